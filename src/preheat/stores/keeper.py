"""The keeper: one process of a host that evicts, so that writers seldom must, and tidies up.

A plain object for a thread of its own; everything in it may wait for LMDB's lock. Its transactions
are short, so that it holds up nobody.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import lmdb

from preheat.errors import PreheatError, StoreError
from preheat.stores import Size, lmdb_board, lmdb_values
from preheat.stores.lmdb_board import Board
from preheat.stores.lmdb_env import (
    Layout,
    OnEvent,
    Place,
    is_damage,
    is_outdated,
    open_place,
    took_lock,
    why_of,
)
from preheat.stores.lmdb_holder import myself
from preheat.stores.lmdb_values import Values

_HEADROOM: Final = 0.03
_TXN_S: Final = 0.003
"""A commit of what was removed comes on top."""
_TICK_S: Final = 0.3
_CHECK_EVERY_S: Final = 60.0
_MOST_ROWS: Final = 200
_BY_BAD_PAGES: Final = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT})
_CRASHES: Final = 2
_CRASHES_WITHIN_S: Final = 60.0


class Keeper:
    """Keeps the folder within its budget while it is the one that holds `keeper.lock`.

    `on_event` must neither raise nor wait: `l2-set-aside` as in `Lmdb`, `l2-keeper-failed` with
    `why`, `l2-readers-freed` with `count`.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        on_event: OnEvent,
        *,
        keep_s: float = lmdb_board.KEEP_S,
    ) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._on_event = on_event
        self._keep_s = keep_s
        self._me = myself()
        self._lock: int | None = None
        self._layouts = {
            layout.name: layout
            for layout in (lmdb_values.layout(budget_bytes), lmdb_board.layout())
        }
        self._places: dict[str, Place] = {}
        self._checked_at = -_CHECK_EVERY_S
        self._leases_after = b""
        self._crashes: list[float] = []
        self._failure = ""

    @property
    def is_keeper(self) -> bool:
        """Whether this process is the one."""
        return self._lock is not None

    def start(self) -> None:
        """Open the files, making or replacing them; what failed is tried again at each tick.
        Raises StoreError, ConfigError."""
        try:
            for layout in self._layouts.values():
                self._open(layout, may_set_aside=True)
            self._try_lock()
        except StoreError as error:
            self._failure = str(error)  # told by whoever asked
            self._forget_places()
            raise
        except BaseException:
            self._forget_places()
            raise

    def _forget_places(self) -> None:
        for place in self._places.values():
            place.close()
        self._places.clear()

    def tick(self) -> None:
        """What there is to do, once a second. It takes a third of that at most, or as long as
        another process holds the lock."""
        now = time.monotonic()
        if self._attempt("", self._try_lock) and self._attempt("", self._renew_places):
            if not self.is_keeper:
                return
            if now - self._checked_at >= _CHECK_EVERY_S:
                self._attempt("", self.reader_check)
            well = self._attempt("values", lambda: self._evict(now + _TICK_S))
            if self._attempt("board", self._tidy_board) and well:
                self._failure = ""

    def after_death(self, by_signal: int = 0) -> None:
        """A process that used the files has ended. Some ends are what a damaged file does to its
        readers: the second such within a minute sets the values aside."""
        now = time.monotonic()
        if by_signal in _BY_BAD_PAGES:
            self._crashes = [at for at in self._crashes if now - at < _CRASHES_WITHIN_S]
            self._crashes.append(now)
            if len(self._crashes) >= _CRASHES and "values" in self._places:
                self._crashes.clear()
                self._places["values"].mark_damaged()
        self._attempt("", self.reader_check)

    def reader_check(self) -> int:
        """Free the places of dead readers, whose snapshots would keep pages from being used again;
        how many there were."""
        self._checked_at = time.monotonic()
        freed = sum(place.env.reader_check() for place in self._places.values())
        if freed:
            self._on_event("l2-readers-freed", {"count": freed})
        return freed

    def size(self) -> Size:
        """How full the values are. Raises StoreError."""
        place = self._places.get("values")
        if place is None:
            raise StoreError("the files aren't open", kind="closed")
        with place.env.begin() as txn:
            return Size(*lmdb_values.sums(txn), self._budget_bytes)

    def close(self) -> None:
        """After the last of the others has ended: what is stored is on the disk then."""
        for place in self._places.values():
            place.close_clean()
        self._places.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _open(self, layout: Layout, *, may_set_aside: bool) -> None:
        self._places[layout.name] = open_place(
            self._folder, layout, may_set_aside=may_set_aside, on_event=self._on_event
        )

    def _try_lock(self) -> None:
        if self._lock is not None:
            return
        path = self._folder / "keeper.lock"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError(why_of(error), kind="files") from error
        if took_lock(descriptor):
            self._lock = descriptor
        else:
            os.close(descriptor)

    def _renew_places(self) -> None:
        """Open anew what was removed, and set aside what somebody found damaged."""
        for name, layout in self._layouts.items():
            place = self._places.get(name)
            if place is not None and (not place.is_current() or self._must_go(place)):
                place.close()
                del self._places[name]
                place = None
            if place is None:
                self._open(layout, may_set_aside=self.is_keeper)

    def _must_go(self, place: Place) -> bool:
        return self.is_keeper and place.is_damaged()

    def _evict(self, until: float) -> None:
        place = self._places["values"]
        target_bytes = int(self._budget_bytes * (1 - _HEADROOM))
        while time.monotonic() < until:
            now = time.time()
            with place.env.begin() as txn:
                first_ms = lmdb_values.first_expiry_ms(txn)
                is_over = lmdb_values.sums(txn)[0] > target_bytes
            if not is_over and (first_ms is None or first_ms > now * 1000):
                return
            with place.env.begin(write=True) as txn:
                values = Values(txn, budget_bytes=self._budget_bytes, now=now)
                is_done = values.evict(target_bytes, until=time.monotonic() + _TXN_S)
                values.close()
            place.fill_up()
            if is_done:
                return
            time.sleep(_TXN_S)  # whoever waits for the lock has it now

    def _tidy_board(self) -> None:
        place = self._places["board"]
        now = time.time()
        with place.env.begin() as txn:
            if lmdb_board.is_empty(txn):
                return
        with place.env.begin(write=True) as txn:
            board = Board(txn)
            self._leases_after = board.prune_leases(
                self._me, now, after=self._leases_after, most=_MOST_ROWS
            )
            board.prune(now, keep_s=self._keep_s, most=_MOST_ROWS)
        place.fill_up()

    def _attempt(self, name: str, step: Callable[[], object]) -> bool:
        """Whether the step went well. A failure is told once, and where it was one of the named
        files, they are opened anew or set aside at the next tick."""
        try:
            step()
        except (lmdb.Error, PreheatError, OSError) as error:
            why = why_of(error)
            if why != self._failure:
                self._failure = why
                self._on_event("l2-keeper-failed", {"why": why})
            place = self._places.get(name)
            if place is not None and isinstance(error, lmdb.Error):
                if is_damage(error):
                    place.mark_damaged()
                if is_damage(error) or is_outdated(error):
                    del self._places[name]
                    place.close()
            return False
        return True
