"""The folder of the request log: spools become Parquet files, and old ones go."""

import contextlib
import fcntl
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pyarrow as pa

from preheat.traces import own, spool
from preheat.traces.expansion import Expansion

Event = Callable[..., None]

_SECONDS_A_DAY: Final = 86_400.0
_RETRY_S: Final = 30.0
_NICENESS: Final = 10
_SPOOLS: Final = "spool-*.arrows"
_PARQUETS: Final = "log-*.parquet"
_DAMAGED: Final = "*.damaged"


class FolderInUseError(Exception):
    """Another log process writes there."""


class Archive:
    """One folder, which one process writes. Compacts in a thread of low priority.

    `on_event` may be called from that thread.
    """

    def __init__(self, folder: Path, budget_bytes: int, days: float, on_event: Event) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._days = days
        self._on_event = on_event
        self._given: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._last_name = ""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise FolderInUseError from None
        for part in folder.glob("*.part"):
            part.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._work, name="compaction", daemon=True)

    def start(self) -> int:
        """Begin to work, with what an earlier process left. How many spools that is."""
        left = sorted(self._folder.glob(_SPOOLS))
        for path in left:
            self._given.put(path)
        self._thread.start()
        return len(left)

    def new_spool(self) -> spool.Spool:
        """An empty spool. Raises OSError."""
        name = f"spool-{time.time_ns() // 1000:016d}.arrows"
        if name <= self._last_name:  # the clock was set back
            number = int(self._last_name[6:22]) + 1
            name = f"spool-{number:016d}.arrows"
        self._last_name = name
        return spool.Spool(self._folder / name)

    def is_there(self) -> bool:
        """Whether the folder that was opened is still the one at its path."""
        return spool.is_named(self._folder / "lock", os.fstat(self._lock))

    def has_room(self) -> bool:
        """Whether spools alone are within the budget: compaction may be failing."""
        return sum(map(_size, self._folder.glob(_SPOOLS))) < self._budget_bytes

    def compact(self, path: Path) -> None:
        """Make a Parquet file of a spool that is complete, soon."""
        self._given.put(path)

    def close(self, within_s: float) -> None:
        """Do what was given, for so long. What isn't done then is done at the next start."""
        self._given.put(None)
        self._thread.join(within_s)

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        again: list[Path] = []
        while True:
            try:
                path = self._given.get(timeout=_RETRY_S)
            except queue.Empty:
                tries, again = again, []
            else:
                if path is None:
                    return
                tries = [path]
            try:
                again += [path for path in tries if not self._try(path)]
                self._retain()
            except Exception as bug:  # noqa: BLE001  one that fails mustn't be the last one
                self._on_event("bug", type=type(bug).__name__, where="request-log")

    def _try(self, path: Path) -> bool:
        """Whether nothing more is to be done about this spool."""
        try:
            self._compact(path)
        except OSError as error:
            self._on_event(
                "request-log-not-compacted", file=path.name, reason=os.strerror(error.errno or 0)
            )
            return False
        except Exception as bug:  # noqa: BLE001  a spool nobody can read must not stop the others
            self._on_event("request-log-damaged", file=path.name, type=type(bug).__name__)
            with contextlib.suppress(OSError):
                path.replace(path.with_suffix(".damaged"))
        return True

    def _compact(self, path: Path) -> None:
        batches, is_torn = spool.read(path)
        if is_torn:
            self._on_event("request-log-torn", file=path.name)
        expansion = Expansion(batches)
        if expansion.rows:
            target = self._folder / own.name_of(expansion)
            own.write(expansion, target, path.name)
            self._on_event(
                "request-log-compacted",
                file=target.name,
                rows=expansion.rows,
                spool_bytes=_size(path),
                file_bytes=_size(target),
            )
        path.unlink(missing_ok=True)
        del batches, expansion
        pa.default_memory_pool().release_unused()

    def _retain(self) -> None:
        """Delete the oldest files beyond the budget or too old, but for those that are read."""
        now = time.time()
        files = [*sorted(self._folder.glob(_DAMAGED)), *sorted(self._folder.glob(_PARQUETS))]
        sizes = {path: _size(path) for path in files}
        total = sum(sizes.values()) + sum(map(_size, self._folder.glob(_SPOOLS)))
        for path in files:
            with contextlib.suppress(OSError):
                is_old = now - path.stat().st_mtime > self._days * _SECONDS_A_DAY
                if (is_old or total > self._budget_bytes) and _delete(path):
                    total -= sizes[path]
                    self._on_event("request-log-deleted", file=path.name)


def _delete(path: Path) -> bool:
    """Whether it is gone now: not if somebody reads it."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        path.unlink()
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
