"""A vLLM-like server in the test's own loop that can be started again at its address."""

import asyncio
import contextlib
import json
import time
from typing import Any
from zlib import crc32

BLOCK = 16


class Server:
    """Counts and caches as vLLM does; `log` is what it computed, in order: ("warm" | "ask", text or ids,
    cached tokens). `warms_in_s` is how long a warm-up takes; None: for ever."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any, int]] = []
        self.salts: list[str | None] = []
        self.warms_in_s: float | None = 0.0
        self.has_counts = True
        self.owner = "vllm"
        self.root, self.version = "weights-1", "0.32.0"
        self.health_in_s = 0.0
        self.hangs = False
        self.loads_for_s = 0.0
        self.port = 0
        self._listening: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()
        self._began_at = 0.0
        self._cache: set[tuple[int, ...]] = set()
        self._prompt_tokens = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def asked(self) -> int:
        return sum(kind == "ask" for kind, _, _ in self.log)

    async def start(self) -> None:
        """As a new process."""
        self._cache.clear()
        self._prompt_tokens = 0
        self._began_at = asyncio.get_running_loop().time()
        self._listening = await asyncio.start_server(self._talk, "127.0.0.1", self.port)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Its process ends: connections break."""
        assert self._listening is not None
        self._listening.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    def forget(self) -> None:
        """It is started again so fast that nobody sees it away."""
        self._cache.clear()
        self._prompt_tokens = 0
        self.log.clear()

    def switch(self, *, root: str = "weights-2", version: str = "0.32.0") -> None:
        """Another model or version answers here, which counts on from where the one before was: nothing but its
        own word tells of it."""
        self._cache.clear()
        self.log.clear()
        self.root, self.version = root, version

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        task.add_done_callback(self._talks.discard)
        try:
            with contextlib.suppress(
                asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
            ):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                    fields = dict(
                        line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line
                    )
                    body = await reader.readexactly(int(fields.get("content-length", 0)))
                    status, said = await self._answer(head.split(" ", 2)[1], body)
                    writer.write(
                        b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(said), said)
                    )
        finally:
            writer.transport.abort()

    async def _answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        if self.hangs:
            await asyncio.Event().wait()
        if asyncio.get_running_loop().time() - self._began_at < self.loads_for_s:
            return 503, b'{"error": {"message": "loading"}}'
        if path == "/health":
            await asyncio.sleep(self.health_in_s)
            return 200, b""
        if path == "/version" and self.version:
            return 200, json.dumps({"version": self.version}).encode()
        if path == "/v1/models":
            now = {"created": int(time.time()), "parent": None}  # vLLM's is the time of the answer
            models = [{"id": "m", "owned_by": self.owner, "root": self.root or None, **now}]
            return 200, json.dumps({"object": "list", "data": models}).encode()
        if path == "/metrics" and self.has_counts:
            return 200, (
                "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
                f"vllm:prompt_tokens_total {self._prompt_tokens}\n"
                'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1\n'
            ).encode()
        asked = json.loads(body or b"{}")
        if path == "/tokenize":
            ids = ids_of(asked["messages"])
            return 200, json.dumps({"count": len(ids), "tokens": ids}).encode()
        if path == "/v1/completions":
            if self.warms_in_s is None:
                await asyncio.Event().wait()
            await asyncio.sleep(self.warms_in_s or 0.0)
            return 200, self._compute("warm", asked["prompt"], asked)
        if path == "/v1/chat/completions":
            return 200, self._compute("ask", ids_of(asked["messages"]), asked)
        return 404, b"{}"

    def _compute(self, kind: str, ids: list[int], asked: dict[str, Any]) -> bytes:
        salt = asked.get("cache_salt")
        self.salts.append(salt)
        ends = range(BLOCK, len(ids) + 1, BLOCK)
        names = [(crc32(str(salt).encode()), *ids[:end]) for end in ends]
        held = next((at for at, one in enumerate(names) if one not in self._cache), len(names))
        self._cache.update(names)
        cached = min(held, (len(ids) - 1) // BLOCK) * BLOCK
        self._prompt_tokens += len(ids)
        self.log.append((kind, ids, cached))
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "text": "a"}
        return json.dumps({"choices": [choice], "usage": usage}).encode()


def ids_of(messages: list[dict[str, str]]) -> list[int]:
    words = " ".join(f"<{one['role']}> {one['content']}" for one in messages).split()
    return [crc32(word.encode()) % 100_000 for word in words]
