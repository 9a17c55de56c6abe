"""What LMCache is asked over HTTP, and how its answers are read: no I/O, no decisions.

Read and run here: `lmcache` 0.5.6, its two APIs as they are served without a GPU.

- The **coordinator** (`lmcache coordinator`, port 9300; `v1/mp_coordinator`) of LMCache's own servers
  (`LMCacheMPConnector`): for each chunk of a prompt, who holds it in which tier. Its directory is built from
  events, so the servers need `--coordinator-event-reporting`.
- The older **controller** (`lmcache_controller`, port 9000; `v1/api_server`; docs.lmcache.ai, "KV cache
  management") of LMCache inside vLLM (`LMCacheConnectorV1`).

What isn't asked, and why: docs/tiers.md.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from preheat.engines.dialects.calls import Call, get, post
from preheat.engines.dialects.readings import count, objects, parsed, part

Api = Literal["coordinator", "controller"]
LISTS: Final[dict[Api, Call]] = {
    "coordinator": get("/instances"),
    "controller": get("/controller/workers"),
}
"""Who there is. Each API answers 404 to the other's question: so they are told apart."""
_KEYS_OF_LIST: Final = {"coordinator": "instances", "controller": "workers"}
_MEMORY: Final = "LocalCPUBackend"
TOKEN_BYTES: Final = 131_072
"""KV of a token where the answer has no sizes: an 8B model's (32 layers of 8 heads of 128, two bytes each)."""
MOST_TOKENS: Final = 1_000_000
"""A question with more is refused (`MAX_TOKEN_IDS`)."""
MOST_KEYS: Final = 10_000
"""So many are deleted by one call (`MAX_DELETE_BATCH`)."""
_SAMPLED: Final = 16


class Instance(msgspec.Struct, frozen=True):
    """One that holds KV. `port` is where its own HTTP server answers (the coordinator's servers only)."""

    name: str
    host: str
    port: int = 0


class Names(msgspec.Struct, frozen=True):
    """What the keys of a fleet are made with besides tokens and salts."""

    model: str
    world_size: int


class Held(NamedTuple):
    """What an instance can give its engine of a prompt's beginning, in tokens and bytes; so many of the
    bytes come from a lower tier than the machine's memory."""

    tokens: int
    size_bytes: int
    lower_bytes: int


class _Placement(msgspec.Struct):
    instance_id: str
    tier: str
    size_bytes: int = 0
    shared: bool = False


class _Row(msgspec.Struct):
    """A chunk's part of one rank. The key goes back as it came, with fields that aren't known yet; its tokens
    are only counted."""

    key: msgspec.Raw
    placements: list[_Placement] = []
    token_ids: msgspec.Raw = msgspec.Raw()


class _Found(msgspec.Struct):
    chunks: int
    results: list[_Row]


class _Chunk(msgspec.Struct):
    chunk_hash_hex: str


_FOUND: Final = msgspec.json.Decoder(_Found)
_CHUNK: Final = msgspec.json.Decoder(_Chunk)


class Directory:
    """What a coordinator knows of a prompt: its whole chunks of `chunk_tokens` each, root first."""

    def __init__(self, chunks: list[list[_Row]], chunk_tokens: int) -> None:
        self._chunks = chunks
        self.chunk_tokens = chunk_tokens

    def held(self, instance: str) -> Held:
        """By this instance, without a gap: a chunk counts where each of its parts is in its memory, or in a
        lower tier of its own or one that all share. Others' memories don't count: only some fleets lend."""
        tokens = size_bytes = lower_bytes = 0
        for rows in self._chunks:
            parts = [_best(row.placements, instance) for row in rows]
            if any(one is None for one in parts):
                break
            tokens += self.chunk_tokens
            for one in parts:
                if one is not None:
                    size_bytes += one.size_bytes
                    lower_bytes += one.size_bytes if one.tier != "l1" else 0
        return Held(tokens, size_bytes, lower_bytes)

    def in_memory(self, from_tokens: int) -> dict[str, list[msgspec.Raw]]:
        """The keys of all chunks that begin there or later, by the instance in whose memory they are."""
        found: dict[str, list[msgspec.Raw]] = {}
        for rows in self._chunks[-(-from_tokens // self.chunk_tokens) :]:
            for row in rows:
                for name in {one.instance_id for one in row.placements if one.tier == "l1"}:
                    found.setdefault(name, []).append(row.key)
        return found


# The coordinator -----------------------------------------------------------------------------------


def keys(instance: str) -> Call:
    """Some of what that instance holds: what its keys are made with."""
    return get(f"/directory/keys?instance_id={quote(instance, safe='')}&limit={_SAMPLED}")


def read_names(body: bytes) -> Names | None:
    """Of keys of one model; None where there are none yet, or of several models. The parallel size is in
    the highest of a rank's four bytes (`ObjectKey.ComputeKVRank`)."""
    found = set()
    for one in objects(part(parsed(body), "keys")):
        model, rank = part(one, "key", "model_name"), count(part(one, "key", "kv_rank"))
        if not isinstance(model, str) or rank is None or not rank >> 24 & 0xFF:
            return None
        found.add((model, rank >> 24 & 0xFF))
    return Names(*found.pop()) if len(found) == 1 else None


def lookup(ids: Sequence[int], names: Names, salt: str) -> Call:
    """Who holds which chunks of this prompt; `ids` are all of it, from its first token on."""
    return post("/directory/lookup", _prompt(ids, names, salt))


def read_lookup(body: bytes, tokens: int) -> Directory | None:
    """Of a prompt of so many tokens."""
    try:
        found = _FOUND.decode(body)
        chunks = [
            list(rows)
            for _, rows in groupby(
                found.results, key=lambda row: _CHUNK.decode(row.key).chunk_hash_hex
            )
        ]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if len(chunks) != found.chunks or found.chunks > tokens:
        return None
    told = {commas + 1 for row in found.results if (commas := bytes(row.token_ids).count(b","))}
    # Where nobody has told a chunk's tokens: the least size that makes so many of so many tokens.
    size = told.pop() if len(told) == 1 else tokens // (found.chunks + 1) + 1
    return Directory(chunks, size) if size * found.chunks <= tokens else None


def prefetch(instance: str, ids: Sequence[int], names: Names, salt: str) -> Call:
    """Bring what that instance has of the prompt in lower tiers to its memory, where it stays until it is
    pushed out. It computes nothing."""
    return post("/cache/prefetches", {"instance_id": instance, **_prompt(ids, names, salt)})


def read_prefetch(body: bytes) -> str | None:
    """The number to ask for how it goes; None where there is nothing to do."""
    number = part(parsed(body), "request_id")
    return number if isinstance(number, str) and number else None


def prefetched(instance: str, number: str) -> Call:
    """Whether it is done. Its server forgets it with that answer, and else keeps it: ask until then."""
    return get(f"/cache/prefetches/{quote(instance, safe='')}/{quote(number, safe='')}")


def read_prefetched(body: bytes) -> bool:
    """Its count of keys found isn't read: it has those that were in memory before (LMCache #5086)."""
    return bool(part(parsed(body), "status") == "completed")


def delete(some: Sequence[msgspec.Raw]) -> Call:
    """Let these go from memory; what is in use stays, and so do copies in lower tiers. Asked of the server
    that holds them: the coordinator deletes by tokens, a prompt from its first on, and so what others share."""
    body = msgspec.json.encode({"keys": some, "tier": "l1", "force": False})
    return Call(b"DELETE", b"/cache/objects", body)


def read_deleted(body: bytes) -> int:
    """How many went."""
    return count(part(parsed(body), "deleted")) or 0


# Both ----------------------------------------------------------------------------------------------


def read_instances(api: Api, body: bytes) -> list[Instance] | None:
    """None where it isn't that API's answer."""
    told = part(parsed(body), _KEYS_OF_LIST[api])
    return list(_instances(told)) if isinstance(told, list) else None


def _instances(told: object) -> Iterator[Instance]:
    for one in objects(told):
        name, host = one.get("instance_id"), one.get("ip")
        if isinstance(name, str) and name and isinstance(host, str):
            yield Instance(name, host, count(one.get("http_port")) or 0)


# The controller ------------------------------------------------------------------------------------


def controller_lookup(ids: Sequence[int]) -> Call:
    """Who holds this prompt, of whatever model and salt: its keys have neither."""
    return post("/lookup", {"tokens": ids})


def read_controller_lookup(body: bytes, tokens: int) -> tuple[str, Held] | None:
    """The instance that is named. Of several none: each chunk is put down to the first that has it, with
    its place in the prompt, so nobody can tell what any of them has before that."""
    told = part(parsed(body), "layout_info")
    if not isinstance(told, dict) or len(told) != 1:
        return None
    ((name, where),) = told.items()
    if not isinstance(where, list) or len(where) != 2 or not isinstance(where[0], str):
        return None
    held = count(where[1])
    if not held or held > tokens:
        return None
    size_bytes = held * TOKEN_BYTES
    return name, Held(held, size_bytes, 0 if where[0] == _MEMORY else size_bytes)


def _prompt(ids: Sequence[int], names: Names, salt: str) -> dict[str, object]:
    return {
        "token_ids": ids,
        "model_name": names.model,
        "world_size": names.world_size,
        "cache_salt": salt,
    }


def _best(placements: Sequence[_Placement], instance: str) -> _Placement | None:
    """Where that instance would take it from."""
    own = [one for one in placements if one.instance_id == instance]
    memory = next((one for one in own if one.tier == "l1"), None)
    lower = (one for one in placements if one.tier == "l2" and (one.shared or one in own))
    return memory or next(lower, None)
