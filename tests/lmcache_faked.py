"""LMCache's coordinator, one of its servers and its controller as their HTTP surface shows them.

Shapes and refusals are those of lmcache 0.5.6 (`v1/mp_coordinator`, `v1/multiprocess/http_apis`,
`v1/api_server`); `tests/recorded/lmcache.json` has what the real ones answered to the same questions. Not here: any KV.
"""

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import parse_qs, urlsplit

Reply = tuple[int, Any]
_NOT_FOUND: Reply = (404, {"detail": "Not Found"})
_NUMBERS = count(1)


@dataclass
class Lmcache:
    """A coordinator (or, with `is_old`, a controller) and the servers it knows, all at one address."""

    chunk_tokens: int = 256
    model: str = "org/model"
    world_size: int = 1
    is_old: bool = False
    instances: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Name to address."""
    tells_tokens: bool = True
    fault: str = ""
    """ "late": no answer in time; "500"; "text": no JSON; "list": other JSON; "odd": fields nobody knows."""
    prefetch_s: float = 0.0
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    placed: dict[tuple[str, int], dict[tuple[str, str, bool], int]] = field(default_factory=dict)
    """(chunk, rank) to who has it in which tier, shared or not, and its bytes."""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    jobs: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    # What is where

    def chunks(self, ids: Sequence[int], salt: str = "") -> list[str]:
        """The names of a prompt's whole chunks."""
        names, parent = [], b""
        for at in range(0, len(ids) - self.chunk_tokens + 1, self.chunk_tokens):
            part = list(ids[at : at + self.chunk_tokens])
            parent = hashlib.sha256(parent + repr((part, salt)).encode()).digest()
            names.append(parent.hex())
            self.tokens[names[-1]] = part
        return names

    def store(
        self,
        ids: Sequence[int],
        instance: str,
        tier: str = "l1",
        *,
        salt: str = "",
        shared: bool = False,
        size_bytes: int = 1_000,
        ranks: int | None = None,
    ) -> None:
        for chunk in self.chunks(ids, salt):
            for rank in range(self.world_size if ranks is None else ranks):
                at = self.placed.setdefault((chunk, rank), {})
                at[instance, tier, shared] = size_bytes

    def holds(self, ids: Sequence[int], instance: str, tier: str = "l1") -> int:
        """How many of its chunks are there, whichever."""
        return sum(
            (instance, tier, False) in self.placed.get((one, 0), {}) for one in self.chunks(ids)
        )

    # What is answered

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Reply:
        with self.lock:
            self.asked.append((f"{method} {urlsplit(path).path}", body))
        if self.fault == "late":
            time.sleep(3.0)
        if self.fault == "500":
            return 500, {"detail": "out of luck"}
        status, said = (self._old if self.is_old else self._new)(method, path, body)
        if self.fault == "text":
            return status, "<html>"
        if self.fault == "list":
            return status, [said]
        if self.fault == "odd":
            return status, _with_more(said)
        return status, said

    def _old(self, method: str, path: str, body: dict[str, Any]) -> Reply:
        match method, urlsplit(path).path:
            case "GET", "/controller/workers":
                workers = [
                    {"instance_id": name, "worker_id": 0, "ip": ip, "port": port, "key_count": 0}
                    for name, (ip, port) in self.instances.items()
                ]
                return 200, {"workers": workers, "total_count": len(workers)}
            case "POST", "/lookup":
                layout: dict[str, list[Any]] = {}
                for at, chunk in enumerate(self.chunks(body["tokens"])):
                    held = self.placed.get((chunk, 0), {})
                    first = next(
                        (one for one in self.instances if any(one == h[0] for h in held)), ""
                    )
                    if not first:
                        break
                    layout[first] = ["LocalCPUBackend", (at + 1) * self.chunk_tokens]
                return 200, {"event_id": f"Lookup{next(_NUMBERS)}", "layout_info": layout}
        return _NOT_FOUND

    def _new(self, method: str, path: str, body: dict[str, Any]) -> Reply:
        parts = urlsplit(path)
        match method, parts.path.split("/")[1:]:
            case "GET", ["instances"]:
                return 200, {"instances": [self._instance(name) for name in self.instances]}
            case "GET", ["directory", "keys"]:
                return 200, self._keys(parse_qs(parts.query))
            case "POST", ["directory", "lookup"]:
                if not body["token_ids"]:
                    return 422, {"detail": [{"msg": "Value error, supply exactly one of ..."}]}
                if set(body["cache_salt"]) & set("@/\\\0"):
                    return 400, {"detail": "cache_salt must not contain ..."}
                return 200, self._lookup(body)
            case "POST", ["cache", "prefetches"]:
                if body["instance_id"] not in self.instances:
                    return 404, {"detail": f"no MP server registered with {body['instance_id']!r}"}
                return 200, self._prefetch(body)
            case "GET", ["cache", "prefetches", _, number]:
                return self._prefetched(number)
            case "DELETE", ["cache", "objects"]:
                return 200, self._delete(body)
        return _NOT_FOUND

    def _instance(self, name: str) -> dict[str, Any]:
        ip, port = self.instances[name]
        return {
            "instance_id": name,
            "ip": ip,
            "http_port": port,
            "registration_time": 1_796_092_714.4,
            "metadata": {},
            "p2p_advertised_url": "",
            "mq_port": 0,
        }

    def _key(self, chunk: str, rank: int, salt: str = "") -> dict[str, Any]:
        kv_rank = self.world_size << 24 | rank << 16 | self.world_size << 8 | rank
        return {
            "chunk_hash_hex": chunk,
            "model_name": self.model,
            "kv_rank": kv_rank,
            "object_group_id": 0,
            "cache_salt": salt,
        }

    def _placements(self, chunk: str, rank: int) -> list[dict[str, Any]]:
        return [
            {
                "instance_id": name,
                "incarnation": 1,
                "tier": tier,
                "backend": "dram" if tier == "l1" else "fs",
                "size_bytes": size_bytes,
                "shared": shared,
            }
            for (name, tier, shared), size_bytes in sorted(
                self.placed.get((chunk, rank), {}).items()
            )
        ]

    def _keys(self, query: dict[str, list[str]]) -> dict[str, Any]:
        (wanted,) = query["instance_id"]
        found = [at for at, held in self.placed.items() if any(wanted == one[0] for one in held)]
        page = found[: int(query["limit"][0])]
        keys = [
            {
                "key": self._key(*at),
                "placements": [
                    one for one in self._placements(*at) if one["instance_id"] == wanted
                ],
                "num_tokens": self.chunk_tokens,
                "access_count": 0,
            }
            for at in page
        ]
        return {"total": len(found), "keys": keys}

    def _lookup(self, body: dict[str, Any]) -> dict[str, Any]:
        is_known = (body["model_name"], body["world_size"]) == (self.model, self.world_size)
        chunks = self.chunks(body["token_ids"], body["cache_salt"])
        rows = []
        for chunk in chunks:
            for rank in range(body["world_size"]):
                placements = self._placements(chunk, rank) if is_known else []
                tells = self.tells_tokens and placements
                rows.append(
                    {
                        "key": self._key(chunk, rank, body["cache_salt"]),
                        "placements": placements,
                        "token_ids": self.tokens[chunk] if tells else [],
                        "access_count": 0,
                    }
                )
        return {"chunks": len(chunks), "results": rows}

    def _prefetch(self, body: dict[str, Any]) -> dict[str, Any]:
        chunks = self.chunks(body["token_ids"], body["cache_salt"])
        told = {"instance_id": body["instance_id"], "chunks": len(chunks)}
        if not chunks:
            return {**told, "request_id": "", "status": "noop"}
        for at in ((chunk, rank) for chunk in chunks for rank in range(self.world_size)):
            held = self.placed.get(at, {})
            for (name, tier, shared), size_bytes in list(held.items()):
                if tier == "l2" and (shared or name == body["instance_id"]):
                    held[body["instance_id"], "l1", False] = size_bytes
        number = f"{next(_NUMBERS):032x}"
        self.jobs[number] = time.monotonic() + self.prefetch_s
        return {**told, "request_id": number, "status": "submitted"}

    def _prefetched(self, number: str) -> Reply:
        if number not in self.jobs:
            return 404, {"detail": f"unknown prefetch request_id={number!r}"}
        if time.monotonic() < self.jobs[number]:
            return 200, {"request_id": number, "status": "pending"}
        del self.jobs[number]
        return 200, {"request_id": number, "status": "completed", "found_keys": 1, "total_keys": 1}

    def _delete(self, body: dict[str, Any]) -> dict[str, Any]:
        gone = 0
        for key in body["keys"]:
            held = self.placed.get((key["chunk_hash_hex"], key["kv_rank"] >> 16 & 0xFF), {})
            for one in [one for one in held if one[1] == body["tier"]]:
                del held[one]
                gone += 1
        return {"deleted": gone, "skipped": 0, "ok": True}


def _with_more(said: Any) -> Any:
    """The same with fields of a later version."""
    if isinstance(said, dict):
        more = {
            name: one if name == "layout_info" else _with_more(one) for name, one in said.items()
        }
        return {**more, "added_later": {"a": 1}}
    return [_with_more(one) for one in said] if isinstance(said, list) else said
