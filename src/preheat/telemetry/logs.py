"""JSON log lines: one event name each, no request text, no secret, and never in anybody's way."""

import threading
import time
from collections import deque
from typing import IO, Final

import msgspec

_CAPACITY: Final = 10_000
_GATHER_S: Final = 0.02
_ATOMIC_BYTES: Final = 4_096  # more than that several processes could write into each other's
_ENCODE: Final = msgspec.json.Encoder().encode


class Log:
    """Writes from a thread of its own, so that a blocked pipe doesn't block the event loop.

    The thread is woken for the first line only and takes what has gathered a little later: waking it
    costs more than a line. When too many wait, lines are dropped and counted.
    """

    def __init__(self, stream: IO[bytes], capacity: int = _CAPACITY) -> None:
        self._stream = stream
        self._lines: deque[bytes] = deque()
        self._capacity = capacity
        self._is_awake = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="preheat-log", daemon=True)
        self._thread.start()

    def event(self, name: str, **fields: object) -> None:
        """One line."""
        if len(self._lines) >= self._capacity:
            self.dropped += 1
        else:
            self.audit(name, **fields)

    def audit(self, name: str, **fields: object) -> None:
        """One line that isn't dropped: only operators cause them, and few."""
        self._add(_ENCODE({"at": round(time.time(), 3), "event": name, **fields}) + b"\n")

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        if not self._is_awake:
            self._is_awake = True
            self._wake.set()

    def told(self, line: msgspec.Struct) -> None:
        """One line that is made often: its fields as they stand, the event's name and the time
        among them."""
        if len(self._lines) >= self._capacity:
            self.dropped += 1
        else:
            self._add(_ENCODE(line) + b"\n")

    def close(self, within_s: float = 1.0) -> None:
        """Write what is queued, for at most this long."""
        self._closing.set()
        self._wake.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._closing.wait(_GATHER_S)
            self._wake.clear()
            self._is_awake = False  # before the lines are taken: who comes now wakes us again
            self._write()
        self._write()

    def _write(self) -> None:
        piece: list[bytes] = []
        size_bytes = 0
        while self._lines:
            line = self._lines.popleft()
            if size_bytes + len(line) > _ATOMIC_BYTES:
                self._send(piece)
                piece, size_bytes = [], 0
            piece.append(line)
            size_bytes += len(line)
        self._send(piece)

    def _send(self, lines: list[bytes]) -> None:
        rest = memoryview(b"".join(lines))
        try:
            while rest:
                rest = rest[self._stream.write(rest) or len(rest) :]
            self._stream.flush()
        except (OSError, ValueError):
            self.dropped += len(lines)  # nobody reads: requests go on all the same
