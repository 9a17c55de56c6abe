"""The processes of a play, and what it asserts whatever the scenario says."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from harness import Fake, Gateway, Reply
from openai_shapes import assert_valid

HERE: Final = Path(__file__).parent


class Setup(msgspec.Struct, frozen=True):
    """How the gateway is started. `l2` is its section of settings; in it {kept} is a folder of this
    play's own."""

    toml: str = ""
    l2: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    launcher: tuple[str, ...] = ("-m", "preheat")


class Stage:
    """A fake engine, a gateway with default settings, and others where a scenario needs one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plays = 0
        self.fake = Fake()
        self._usual = self.start(Setup())

    def close(self) -> None:
        self._usual.stop()
        self.fake.stop()

    def gateway_for(self, setup: Setup) -> Gateway:
        """A gateway that is started like this and has nothing in its cache."""
        self._plays += 1
        if setup != Setup():
            return self.start(setup)
        self._usual.post("/preheat/v1/invalidate", {"tenant": "local"})
        return self._usual

    @contextlib.contextmanager
    def playing(self, setup: Setup) -> "Iterator[Play]":
        """A play on a gateway that is started like this; at its end, what must hold is asserted."""
        play = Play(self, self.gateway_for(setup), setup)
        try:
            yield play
            play.finish()
        finally:
            self.retire(play.gateway)

    def start(self, setup: Setup) -> Gateway:
        kept = self._folder / f"l2-{self._plays}"
        l2 = f"\n[l2]\n{setup.l2.format(kept=kept)}" if setup.l2 else ""
        return Gateway(
            setup.toml + l2,
            upstream=self.fake.url,
            folder=self._folder,
            environment=dict(setup.environment),
            launcher=setup.launcher,
        )

    def retire(self, gateway: Gateway) -> None:
        """It isn't needed any more; the usual one is."""
        if gateway is not self._usual:
            gateway.stop()


class Play:
    """One scenario being played: sends, asserts what always holds, and counts."""

    def __init__(self, stage: Stage, gateway: Gateway, setup: Setup) -> None:
        self._stage = stage
        self._setup = setup
        self.fake = stage.fake
        self.gateway = gateway
        self.first: Reply | None = None
        self.saved: dict[str, Reply] = {}
        self._statuses: list[int] = []
        self._expected_calls = 0
        self._lock = threading.Lock()
        self.fake.reset()

    def script(self, replies: list[dict[str, Any]], **settings: Any) -> None:
        """What the engine says next."""
        self.fake.script(*replies, **settings)
        self._statuses = [reply.get("status", 200) for reply in replies]

    @property
    def calls(self) -> int:
        return self.fake.calls

    @property
    def gateway_rss_bytes(self) -> int:
        """The memory that is the worker's own. Pages of the files that it maps (the second level on
        disk, libraries) aren't in it: they are the system's, which takes them back when it likes."""
        status = Path(f"/proc/{self.gateway.worker_pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1_024

    def ask(
        self,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None = None,
        status: int | None = None,
    ) -> Reply:
        """One request; its answer must have this status, or else the engine's."""
        reply = self.gateway.post(path, body, headers)
        with self._lock:
            self._take(path, reply, status)
        return reply

    def ask_at_once(self, posts: list[tuple[str, Any]]) -> list[Reply]:
        """All at the same moment, each on its own connection."""
        with ThreadPoolExecutor(len(posts)) as pool:
            return list(pool.map(lambda post: self.ask(*post), posts))

    def ask_from_processes(self, path: str, body: Any, count: int) -> list[Reply]:
        """The same request from four client processes, each with another hash seed; and so has the
        gateway, which starts again for each."""
        assert count % 4 == 0
        replies: list[Reply] = []
        for seed in range(4):
            environment = (*self._setup.environment, ("PYTHONHASHSEED", str(40 + seed)))
            self.restart(msgspec.structs.replace(self._setup, environment=environment))
            told = subprocess.run(
                [
                    sys.executable,
                    str(HERE / "client_process.py"),
                    self.gateway.url + path,
                    str(count // 4),
                ],
                input=json.dumps(body),
                capture_output=True,
                text=True,
                env={"PYTHONHASHSEED": str(seed)},
                timeout=60,
                check=True,
            ).stdout
            for status, headers, text in json.loads(told):
                reply = Reply(status, headers, text.encode())
                self._take(path, reply, None)
                replies.append(reply)
        return replies

    @contextlib.contextmanager
    def leaving(self, path: str, body: Any, after_s: float) -> Iterator[int]:
        """A client that asks first and hangs up after a while; how many do: 0 without a while."""
        if not after_s:
            yield 0
            return
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        calls = self.calls
        with socket.create_connection(("127.0.0.1", self.gateway.port), 10) as client:
            client.sendall(head.encode() + data)
            deadline = time.monotonic() + 10
            while self.calls == calls:
                assert time.monotonic() < deadline, "its request never reached the engine"
                time.sleep(0.005)
            self._expected_calls += 1  # its miss, which nobody sees answered
            timer = threading.Timer(after_s, lambda: client.shutdown(socket.SHUT_RDWR))
            timer.start()
            yield 1
            timer.join()

    def expect_calls(self, count: int) -> None:
        """Misses and bypasses that were counted elsewhere."""
        self._expected_calls += count

    def restart(self, setup: Setup) -> None:
        self.finish()
        self._stage.retire(self.gateway)
        self.gateway = self._stage.start(setup)

    @contextlib.contextmanager
    def beside(self, setup: Setup) -> Iterator[Gateway]:
        """Another gateway before the same engine."""
        gateway = self._stage.start(setup)
        try:
            yield gateway
        finally:
            self._stage.retire(gateway)

    def finish(self) -> None:
        """What must hold at the end."""
        assert self.calls == self._expected_calls, "engine calls, against misses and bypasses"
        log = self.gateway.stderr
        assert "Traceback" not in log, log
        assert '"event":"bug"' not in log, log

    def _take(self, path: str, reply: Reply, status: int | None) -> None:
        self.first = self.first or reply
        if reply.cache in {"miss", "bypass"}:
            self._expected_calls += 1
            engine_status = self._statuses.pop(0) if self._statuses else 200
            status = engine_status if status is None else status
        assert reply.status == (200 if status is None else status), reply.body
        assert_valid(path, reply)
