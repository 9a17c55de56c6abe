"""A log that somebody is still writing: its lines as they come, over rotations and truncations."""

import io
import queue
import threading
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from preheat.errors import TraceError

MOST_LINE_BYTES: Final = 16 * 2**20
"""A longer line isn't one."""
_READ_BYTES: Final = 1 << 20
_READS: Final = MOST_LINE_BYTES // _READ_BYTES
"""Until a line has come: who gets none takes it that there is none at this moment, and waits."""
_CHUNKS: Final = 8
_PATIENCE: Final = 4
"""So many looks in a row must find nothing more in a file that was moved away: its writer may not
have noticed yet."""


class Line(NamedTuple):
    """Its number in its file, from 1, and what stands there; None where that is too long."""

    number: int
    data: bytes | None


class Tail(Protocol):
    """Where lines come from."""

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""

    def read(self) -> list[Line]:
        """Those that have come; none where there are none at this moment. Never waits. Raises
        TraceError."""

    def close(self) -> None:
        """Read no more."""


class _Splitter:
    """Bytes into lines; a line that is too long is passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_skipping = False
        self._number = 0

    def feed(self, data: bytes) -> list[Line]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = []
        for one in whole:
            self._number += 1
            too_long = self._is_skipping or len(one) > MOST_LINE_BYTES
            self._is_skipping = False
            lines.append(Line(self._number, None if too_long else one))
        if len(self._rest) > MOST_LINE_BYTES:
            self._rest, self._is_skipping = b"", True
        return lines

    def end(self) -> list[Line]:
        """What stands behind the last newline; the next line is the first of another file."""
        lines = self.feed(b"\n") if self._rest or self._is_skipping else []
        self._number = 0
        return lines


class FileTail:
    """A file by its name: another file of that name is read from its start, and so is one that has
    become shorter. With `once` it is over at the file's end. `from_end`: only what is written from
    now on.

    A file that is cut and grows beyond where it was between two looks can't be told from one that
    grew. Two rotations within a second lose the file between them.
    """

    def __init__(self, path: Path, *, once: bool = False, from_end: bool = False) -> None:
        """Raises TraceError where it isn't there."""
        self.is_over = False
        self._path = path
        self._once = once
        self._splitter = _Splitter()
        self._looks = 0
        self._file, self._identity = self._open()
        self._position = 0
        while from_end and (data := self._file.read(_READ_BYTES)):
            self._position += len(data)
            self._splitter.feed(data)

    def read(self) -> list[Line]:
        """See `Tail`."""
        has_more = False
        for _ in range(_READS):
            try:
                data = self._file.read(_READ_BYTES)
            except OSError as error:
                raise TraceError(f"can't read {self._path}: {error.strerror}") from None
            if not data:
                break
            has_more = True
            self._position += len(data)
            self._looks = 0
            if lines := self._splitter.feed(data):
                return lines
        if has_more:
            return []
        if self._once:
            self.is_over = True
            return self._splitter.end()
        return self._look()

    def close(self) -> None:
        """See `Tail`."""
        self._file.close()

    def _look(self) -> list[Line]:
        """Whether it is still the same file, now that its end is reached."""
        try:
            status = self._path.stat()
        except OSError:
            return []  # moved away, and no other is there yet
        if (status.st_dev, status.st_ino) == self._identity:
            self._looks = 0
            if status.st_size >= self._position:
                return []
            self._position = 0
            self._file.seek(0)
            return self._splitter.end()
        self._looks += 1
        if self._looks < _PATIENCE:
            return []
        try:
            file, identity = self._open()
        except TraceError:
            return []
        self._file.close()
        self._file, self._identity = file, identity
        self._position = self._looks = 0
        return self._splitter.end()

    def _open(self) -> tuple[io.BufferedReader, tuple[int, int]]:
        """The file and what it is; the name may be given to another at that very moment."""
        try:
            while True:
                before = self._path.stat()
                file = self._path.open("rb")
                after = self._path.stat()
                if (before.st_dev, before.st_ino) == (after.st_dev, after.st_ino):
                    return file, (after.st_dev, after.st_ino)
                file.close()
        except OSError as error:
            raise TraceError(f"can't read {self._path}: {error.strerror}") from None


class PipeTail:
    """A pipe or whatever else a descriptor is, until its other end is closed.

    A thread reads it, without a buffer of its own: whoever is stopped in the middle of that holds
    nothing that Python's end would wait for.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self.is_over = False
        self._splitter = _Splitter()
        self._chunks: queue.Queue[bytes] = queue.Queue(_CHUNKS)
        self._file = io.FileIO(descriptor, closefd=False)
        threading.Thread(target=self._run, name="preheat-log-reader", daemon=True).start()

    def read(self) -> list[Line]:
        """See `Tail`."""
        try:
            data = self._chunks.get_nowait()
        except queue.Empty:
            return []
        if data:
            return self._splitter.feed(data)
        self.is_over = True
        return self._splitter.end()

    def close(self) -> None:
        """See `Tail`; the thread ends with the process."""

    def _run(self) -> None:
        data = b"a"
        while data:
            try:
                data = self._file.read(_READ_BYTES) or b""
            except OSError:
                data = b""
            self._chunks.put(data)
