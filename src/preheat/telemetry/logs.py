"""JSON log lines: one event name each, no request text, no secret, and never in anybody's way."""

import contextlib
import queue
import threading
import time
from typing import IO, Final

import msgspec

_CAPACITY: Final = 10_000
_ENCODE: Final = msgspec.json.Encoder().encode


class Log:
    """Writes from a thread of its own, so that a blocked pipe doesn't block the event loop.

    When the queue is full, lines are dropped and counted.
    """

    def __init__(self, stream: IO[bytes], capacity: int = _CAPACITY) -> None:
        self._stream = stream
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._capacity = capacity
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name="preheat-log", daemon=True)
        self._thread.start()

    def event(self, name: str, **fields: object) -> None:
        """One line."""
        if self._lines.qsize() >= self._capacity:
            self.dropped += 1
        else:
            self.audit(name, **fields)

    def audit(self, name: str, **fields: object) -> None:
        """One line that isn't dropped: only operators cause them, and few."""
        self._lines.put(_ENCODE({"at": round(time.time(), 3), "event": name, **fields}) + b"\n")

    def close(self, within_s: float = 1.0) -> None:
        """Write what is queued, for at most this long."""
        self._lines.put(None)
        self._thread.join(within_s)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line)
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):
                self.dropped += 1  # nobody reads: requests go on all the same
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
