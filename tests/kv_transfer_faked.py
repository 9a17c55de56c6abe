"""vLLM servers with a KV connector, as far as the protocol between them and a proxy goes; no computing.

What is refused, and what a prefill server's answer says, is as vLLM's NixlConnector and its OpenAI server have
it (docs/engines.md): KV is kept only for a request that ended at its length, is fetched once, and by the
engine's id. A server without a connector passes the field over, as vLLM does.
"""

import asyncio
import json
from typing import Any, Self

BLOCK_TOKENS = 4
_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Fabric:
    """What all servers keep for others to fetch: (engine, request) → blocks."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], list[int]] = {}


class KvServer:
    """`mode`: "fine", a status to answer with, "no-connector", "at-end" (the first token ends the answer), "die"
    (the connection is cut), "cut" (in the middle of the answer) or "loses" (its KV can't be fetched)."""

    def __init__(self, name: str, fabric: Fabric, mode: str = "fine") -> None:
        self.name = name
        self.mode = mode
        self.asked: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.computed = self.fetched = 0
        self._fabric = fabric
        self._seen: list[str] = []
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                fields = dict(one.split(": ", 1) for one in head.split("\r\n")[1:] if ": " in one)
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                if head.startswith("get "):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    continue
                asked = json.loads(body)
                self.asked.append(asked)
                self.ids.append(fields.get("x-request-id", ""))
                if self.mode == "die":
                    writer.transport.abort()
                    return
                status, answer = self._answer(asked, self.ids[-1])
                data = json.dumps(answer).encode()
                said = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode()
                if self.mode == "cut":
                    writer.write(said + data[:9])
                    await writer.drain()
                    writer.transport.abort()
                    return
                writer.write(said + data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _answer(self, asked: dict[str, Any], request: str) -> tuple[int, dict[str, Any]]:
        if self.mode[0].isdigit():
            return int(self.mode), {"error": {"message": "as told"}}
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or 16
        if asked.get("min_tokens", 0) > limit:
            return 400, {
                "error": {"message": "min_tokens must be less than or equal to max_tokens"}
            }
        if "stream_options" in asked and not asked.get("stream"):
            return 400, {
                "error": {"message": "Stream options can only be defined when stream=True"}
            }
        tokens = len(asked["prompt"])
        params = asked.get("kv_transfer_params") or {}
        if self.mode == "no-connector":
            params = {}
        if params.get("do_remote_prefill"):
            kept = self._fabric.kept.pop((params["remote_engine_id"], request), None)
            if self.mode == "loses" or kept != params["remote_block_ids"]:
                return 500, {"error": {"message": "KV load failure"}}
            self.fetched += 1
            return 200, self._said(asked, tokens, cached=tokens - 1)
        self.computed += 1
        shared = max((_alike(one, asked["prompt"]) for one in self._seen), default=0)
        self._seen.append(asked["prompt"])
        cached = min(shared, tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        said = self._said(asked, tokens, cached=cached)
        if limit == 1 and self.mode != "at-end":
            said["choices"][0]["finish_reason"] = "length"
        if params.get("do_remote_decode"):
            if params != _ASKED or limit != 1 or asked.get("stream"):
                return 400, {"error": {"message": f"not as the proxy of vLLM asks: {asked}"}}
            if self.mode == "at-end":
                return 200, said | {"kv_transfer_params": None}
            blocks = list(range(-(-tokens // BLOCK_TOKENS)))
            self._fabric.kept[self.name, request] = blocks
            said["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": blocks,
                "remote_engine_id": self.name,
                "remote_host": "10.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
            }
        return 200, said

    def _said(self, asked: dict[str, Any], tokens: int, cached: int) -> dict[str, Any]:
        details = {"cached_tokens": cached}
        return {
            "by": self.name,
            "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": tokens,
                "completion_tokens": 1,
                "prompt_tokens_details": details,
            },
        }


def _alike(one: str, other: str) -> int:
    same = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(same) if a != b), min(len(one), len(other)))
