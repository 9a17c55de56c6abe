"""Real processes for tests: the gateway and the fake engine, over TCP, ended by process id."""

import base64
import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_READY_S = 30.0


class Process:
    """A server of ours in a process of its own; its standard error is kept for the test."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        self._lines: list[str] = []
        assert self.process.stderr is not None
        self._drain = threading.Thread(target=self._read_stderr, daemon=True)
        self._drain.start()
        self.url = self._wait_until_it_listens()

    @property
    def stderr(self) -> str:
        return "".join(self._lines)

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def stop(self, within_s: float = 10.0) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._drain.join(5)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 20.0,
    ) -> "Reply":
        """One request on a connection of its own; `body` is bytes, or encoded as JSON."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=timeout_s
        )
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = (
            {"Content-Type": "application/json", **(headers or {})}
            if data is not None
            else dict(headers or {})
        )
        try:
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers.items()), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> "Reply":
        return self.request("POST", path, body, headers)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> "Reply":
        return self.request("GET", path, None, headers)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line.decode("utf-8", "replace"))

    def _wait_until_it_listens(self) -> str:
        timer = threading.Timer(_READY_S, self.process.kill)
        timer.start()
        try:
            assert self.process.stdout is not None
            line = self.process.stdout.readline().decode()
        finally:
            timer.cancel()
        match = re.search(r"https?://[^\s)]+", line)
        if match is None:
            self.stop()
            raise AssertionError(f"it doesn't listen: {line!r}\n{self.stderr}")
        return match[0]


class Reply:
    """Status, headers (any case) and body of one answer."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def cache_status(self) -> str:
        return self.headers.get("cache-status", "")

    @property
    def cache(self) -> str:
        """hit, join, bypass, or miss (stale and request count as misses); none without an answer."""
        status = self.cache_status
        if status.startswith("preheat; hit"):
            return "hit"
        if "collapsed" in status:
            return "join"
        match = re.search(r"fwd=(\w+)", status)
        return {"bypass": "bypass", None: "none"}.get(match[1] if match else None, "miss")

    @property
    def detail(self) -> str:
        match = re.search(r"detail=([^;]+)", self.cache_status)
        return match[1] if match else ""

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; the last one is "[DONE]" where it is complete."""
        found = [
            block.removeprefix("data: ")
            for block in self.body.decode().split("\n\n")
            if block.startswith("data: ")
        ]
        return [data if data == "[DONE]" else json.loads(data) for data in found]


class Fake(Process):
    """The fake engine."""

    def __init__(self, *arguments: str) -> None:
        super().__init__("-m", "preheat.engines.fake", "--listen", "127.0.0.1:0", *arguments)

    def script(self, *replies: Mapping[str, Any], **settings: Any) -> None:
        reply = self.post("/fake/script", {"replies": list(replies), **settings})
        assert reply.status == 200, reply.body

    def reset(self) -> None:
        self.post("/fake/reset", {})

    @property
    def log(self) -> Any:
        return self.get("/fake/log").json

    @property
    def calls(self) -> int:
        return int(self.log["calls"])

    @property
    def bodies(self) -> list[bytes]:
        return [base64.b64decode(one["body_b64"]) for one in self.log["requests"]]


class Gateway(Process):
    """The gateway, with settings as TOML text; it listens on a free port unless they say else."""

    def __init__(
        self,
        toml: str = "",
        *arguments: str,
        upstream: str | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        launcher: tuple[str, ...] = ("-m", "preheat"),
    ) -> None:
        options = [*arguments]
        if "--listen" not in arguments:
            options += ["--listen", "127.0.0.1:0"]
        if upstream is not None:
            options += ["--upstream", upstream]
        if toml:
            assert folder is not None
            path = folder / "preheat.toml"
            path.write_text(toml)
            options += ["--config", str(path)]
        # What it keeps is its own, unless the test says where: other tests' answers aren't its.
        self._home = tempfile.TemporaryDirectory(prefix="gateway-", ignore_cleanup_errors=True)
        own = {"XDG_CACHE_HOME": self._home.name, "XDG_STATE_HOME": self._home.name}
        super().__init__(*launcher, "serve", *options, environment={**own, **(environment or {})})

    def stop(self, within_s: float = 10.0) -> int:
        try:
            return super().stop(within_s)
        finally:
            self._home.cleanup()

    @classmethod
    @contextlib.contextmanager
    def started(cls, toml: str, folder: Path) -> Iterator["Gateway"]:
        """One with these settings, ended afterwards."""
        served = cls(toml, folder=folder)
        with running(served):
            yield served

    @property
    def worker_pid(self) -> int:
        """The process that answers; with several workers, that of the first slot."""
        workers = self.get("/preheat/v1/workers").json["workers"]
        return int(min(workers, key=lambda worker: worker["slot"])["pid"])

    @property
    def stats(self) -> Any:
        return self.get("/preheat/v1/stats").json

    @property
    def ledger(self) -> Any:
        return self.get("/preheat/v1/ledger").json


@contextlib.contextmanager
def running(*processes: Process) -> Iterator[None]:
    """Ends them, whatever happens."""
    try:
        yield
    finally:
        for process in processes:
            process.stop()


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A greedy chat request."""
    return {
        "model": "m1",
        "temperature": 0,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }
