"""Load by wrk, the C tool: it costs its core so little that the server stays the limit."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.chat import PATH
from benchmarks.process import on_core
from benchmarks.rawhttp import HOST, post, post_head
from benchmarks.report import BenchmarkError
from benchmarks.workload import MARK, Workload

SCRIPT = Path(__file__).with_name("wrk.lua")
FILLER_BYTES = 16
NUMBERS_A_RUN = 100_000_000  # more than a run can use, so that no number comes twice


class Load(msgspec.Struct, frozen=True):
    """What wrk counted in one run."""

    requests: int
    duration_us: int
    p50_us: int
    p99_us: int
    refused: int
    lost: int
    timeouts: int
    bad_status: int

    @property
    def failures(self) -> int:
        return self.refused + self.lost + self.timeouts + self.bad_status


class Script:
    """A workload as wrk sends it; each run goes on where numbers were left."""

    def __init__(self, workload: Workload, *, keys: Sequence[str], path: Path) -> None:
        self._path = path
        self._filler = workload.filler
        self._runs = itertools.count()
        requests = [_request(r.body, keys[r.tenant]) for r in workload.requests]
        path.with_suffix(".requests").write_bytes(b"".join(requests))
        path.with_suffix(".lengths").write_text("\n".join(str(len(r)) for r in requests))
        path.with_suffix(".order").write_text("\n".join(map(str, workload.order)))

    def run(self, port: int, *, connections: int, duration_s: int, core: int | None) -> Load:
        command = [_wrk(), "-t1", f"-c{connections}", f"-d{duration_s}s", "--timeout", "30s"]
        command += ["-s", str(SCRIPT), f"http://{HOST}:{port}{PATH}", "--"]
        command += [str(self._path), self._filler, str(next(self._runs) * NUMBERS_A_RUN)]
        with on_core(core):
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=duration_s + 60, check=False
            )
        for line in done.stdout.splitlines():
            if line.startswith("RESULT "):
                return msgspec.json.decode(line[7:], type=Load)
        raise BenchmarkError(f"wrk failed: {(done.stdout + done.stderr).strip()[-1000:]}")


def _request(body: str, key: str) -> bytes:
    """The whole request, marks and all; its length counts what goes there."""
    data = body.encode()
    if MARK not in body:
        return post(PATH, data, key=key)
    size = len(data) + body.count(MARK) * (FILLER_BYTES - 1)
    return post_head(PATH, size, key=key) + data


def _wrk() -> str:
    found = shutil.which("wrk")
    if found is None:
        raise BenchmarkError("wrk is missing: apt-get install wrk nginx-light")
    return found


def wrk_version() -> list[str]:
    return [_wrk(), "-v"]
