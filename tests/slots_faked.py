"""llama.cpp's server as far as its slots and their files go, in the test's own loop; at fault at random."""

import asyncio
import contextlib
import json
from pathlib import Path
from random import Random
from typing import Any

_FAULTS = ("hang", "reset", "garbage", "refused", "lie", "cut", "empty")
_LIES = (b"[]", b"{}", b'{"model_path": 5}', b'{"model_path": "/other.gguf"}', b'[{"id": -1}]')
_COUNTS = (-5, "many", 2.5, 2**39, 2**60, None, [1])
TOKEN_BYTES = 16


class Slots:
    """One server. `faults` is the share of answers that are none, or lies."""

    def __init__(self, folder: Path, seed: int, slots: int = 2) -> None:
        self.folder = folder
        self.faults = 0.0
        self.loaded = 0
        self.port = 0
        self._random = Random(seed)
        self._tokens = [0] * slots
        self._busy = [asyncio.Lock() for _ in range(slots)]
        self._talks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """As a new process."""
        self._tokens = [0] * len(self._tokens)
        self._listening = await asyncio.start_server(self._talk, "127.0.0.1", self.port)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Connections break."""
        assert self._listening is not None
        self._listening.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        task.add_done_callback(self._talks.discard)
        try:
            with contextlib.suppress(
                asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
            ):
                while await self._exchange(reader, writer):
                    await writer.drain()
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        is_at_fault = self._random.random() < self.faults
        fault = self._random.choice(_FAULTS) if is_at_fault else ""
        if fault == "hang":
            await asyncio.sleep(1.0)
        if fault in {"hang", "reset"}:
            return False
        if fault == "garbage":
            writer.write(b"\x00\xff nonsense\r\n\r\n")
            return False
        status, said = 500, b'{"error": {"message": "oops"}}'
        if fault == "empty":
            status, said = 200, b""
        elif fault != "refused":
            status, said = await self._answer(head.split(" ", 2)[1], body, lies=fault == "lie")
        whole = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(said), said)
        writer.write(whole[:-5] if fault == "cut" else whole)
        return fault != "cut"

    async def _answer(self, path: str, body: bytes, *, lies: bool) -> tuple[int, bytes]:
        if path.startswith("/slots/"):
            name = json.loads(body)["filename"]
            return self._moved(int(path.split("/")[2].partition("?")[0]), name, path, lies=lies)
        if path == "/v1/completions":
            return 200, await self._computed(json.loads(body), lies=lies)
        if lies:
            return 200, self._random.choice(_LIES)
        count = "llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n"
        said: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp", "meta": {"n_params": 1}}]},
            "/props": {"model_path": "/m.gguf"},
            "/lora-adapters": [],
            "/slots": [
                {"id": at, "n_ctx": 4_096, "is_processing": busy.locked()}
                for at, busy in enumerate(self._busy)
            ],
        }
        if path == "/metrics":
            return 200, count.encode()
        return (200, json.dumps(said[path]).encode()) if path in said else (404, b"{}")

    def _moved(self, slot: int, name: str, path: str, *, lies: bool) -> tuple[int, bytes]:
        file = self.folder / name
        if "action=save" in path:
            data = self._random.randbytes(TOKEN_BYTES) * self._tokens[slot]
            file.write_bytes(data[:-3] if lies else data)
            timings = {"save_ms": -1.0 if lies else 2.0}
            moved = {"n_saved": self._tokens[slot], "n_written": len(data), "timings": timings}
            return 200, json.dumps(moved).encode()
        if not file.is_file():
            return 400, b'{"error": {"message": "no file"}}'
        size = file.stat().st_size
        self._tokens[slot] = size // TOKEN_BYTES
        self.loaded += 1
        timings = {"restore_ms": 1e300 if lies else 1.0}
        moved = {"n_restored": self._tokens[slot], "n_read": size, "timings": timings}
        return 200, json.dumps(moved).encode()

    async def _computed(self, asked: dict[str, Any], *, lies: bool) -> bytes:
        slot = asked.get("id_slot", 0) % len(self._busy)
        tokens = len(asked["prompt"]) // 4
        async with self._busy[slot]:
            await asyncio.sleep(0.002)
            self._tokens[slot] = tokens
        cached = self._random.choice(_COUNTS) if lies else tokens // 2
        usage = {
            "prompt_tokens": self._random.choice(_COUNTS) if lies else tokens,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return json.dumps({"choices": [{"text": "a"}], "usage": usage}).encode()
