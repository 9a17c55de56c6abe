"""JSON log lines, in nobody's way."""

import io
import os
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

import msgspec
import pytest

from preheat.telemetry.logs import Log


def lines_of(stream: io.BytesIO) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in stream.getvalue().splitlines()]


class Blocked(io.RawIOBase):
    """A pipe that nobody reads: writing waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached = threading.Event()
        self.is_open = threading.Event()
        self.written = b""

    def write(self, data: Any) -> int:
        self.is_reached.set()
        assert self.is_open.wait(10)
        self.written += bytes(data)
        return len(data)


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    stream = Blocked()
    yield stream
    stream.is_open.set()


def test_an_event_is_one_line_of_json() -> None:
    stream = io.BytesIO()
    log = Log(stream)
    before = time.time()
    log.event("request", model="m\n1", status=200)
    log.event("draining")
    log.close()
    first, second = lines_of(stream)
    assert first.pop("at") == pytest.approx(before, abs=5)
    assert first == {"event": "request", "model": "m\n1", "status": 200}
    assert second["event"] == "draining"
    assert stream.getvalue().count(b"\n") == 2


def test_the_last_lines_are_written_before_it_is_closed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "wb", buffering=65_536) as writer:
        log = Log(writer)
        for number in range(100):
            log.event("bug", number=number)
        log.close()
        written = os.read(reader.fileno(), 1_000_000)
    assert written.count(b"\n") == 100


def test_nobody_waits_for_a_reader_that_does_not_read(blocked: Blocked) -> None:
    log = Log(blocked, capacity=10)  # type: ignore[arg-type]  # a stream as far as it is used
    log.event("first")
    assert blocked.is_reached.wait(10)
    started_at = time.perf_counter()
    for _ in range(1_000):
        log.event("more")
    assert time.perf_counter() - started_at < 2
    assert log.dropped == 990
    blocked.is_open.set()
    log.close(10)
    assert blocked.written.count(b"\n") == 11


def test_closing_does_not_wait_for_ever_either(blocked: Blocked) -> None:
    log = Log(blocked)  # type: ignore[arg-type]  # a stream as far as it is used
    log.event("first")
    started_at = time.perf_counter()
    log.close(within_s=0.05)
    assert time.perf_counter() - started_at < 5


def test_a_reader_that_has_gone_costs_lines_and_nothing_else() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream: IO[bytes] = os.fdopen(writing, "wb", buffering=0)
    log = Log(stream)
    log.event("first")
    log.event("second")
    log.close()
    assert log.dropped == 2
    stream.close()


def test_a_closed_stream_costs_lines_and_nothing_else() -> None:
    stream = io.BytesIO()
    stream.close()
    log = Log(stream)
    log.event("first")
    log.close()
    assert log.dropped == 1
