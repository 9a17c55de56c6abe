"""L2 in two LMDB environments on a local disk: the values, and the board.

Values are read from the mapped file on the caller's thread, in a microsecond or two. Writes go
through a thread for each environment (`lmdb_writer`), the board's apart from the values', which
would hold them up. `keeper` is the other half: the process that evicts.

Use it from one thread, and never from a process that was forked while it was open.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import lmdb

from preheat.core.types import Epoch, Invalidation, Key
from preheat.errors import StoreError
from preheat.stores import News, Size, lmdb_board, lmdb_values
from preheat.stores.lmdb_board import Board
from preheat.stores.lmdb_env import (
    Layout,
    OnEvent,
    Place,
    is_damage,
    is_outdated,
    open_place,
    store_error,
)
from preheat.stores.lmdb_holder import Holder, myself
from preheat.stores.lmdb_values import Values
from preheat.stores.lmdb_writer import Writer

_WRITE_WITHIN_S: Final = 2.0
_LEASE_WITHIN_S: Final = 0.1
_BOARD_QUEUE_BYTES: Final = 8 * 1024 * 1024
_CLOSE_WITHIN_S: Final = 1.0
_CHECK_EVERY_S: Final = 1.0
_LONGEST_KEY_BYTES: Final = 64
_RELIEF: Final = 0.1
"""Share of the budget that is given up should the map ever be full."""

T = TypeVar("T")


class Lmdb:
    """A folder of values that outlive every process and are shared by those of one host.

    `on_event` must neither raise nor wait, and is called from other threads: `l2-set-aside` with
    `files`, `why` and `kept_as`, `l2-disk-full` with `files` and `why`.
    """

    is_immediate = True
    is_shared = False

    def __init__(
        self,
        folder: Path,
        *,
        budget_bytes: int,
        queue_bytes: int,
        on_event: OnEvent = lambda _name, _fields: None,
    ) -> None:
        self.torn = 0
        """Values that weren't what had been put: a damaged file, answered as a miss."""
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._on_event = on_event
        self._me = Holder(b"", 0, 0, "")
        self._checked_at = 0.0
        self._may_set_aside = True
        self._values: Writer[Values] = Writer(
            "l2-values",
            open=partial(self._open, lmdb_values.layout(budget_bytes)),
            view=self._view_values,
            relieve=lambda view: _relieve(view, budget_bytes),
            queue_bytes=queue_bytes,
            limit_s=_WRITE_WITHIN_S,
            on_event=on_event,
        )
        self._board: Writer[Board] = Writer(
            "l2-board",
            open=partial(self._open, lmdb_board.layout()),
            view=Board,
            queue_bytes=_BOARD_QUEUE_BYTES,
            limit_s=_LEASE_WITHIN_S,
            on_event=on_event,
        )

    @property
    def map_full(self) -> int:
        """How often the map was full, which it must never be."""
        return self._values.map_full + self._board.map_full

    async def start(self) -> None:
        self._me = myself()
        await self._values.start()
        try:
            await self._board.start()
        except BaseException:
            await self._values.aclose(_CLOSE_WITHIN_S)
            raise
        self._may_set_aside = False

    def get_now(self, keys: Sequence[Key]) -> list[bytes | None]:
        found, torn = self._read(self._values, lmdb_values.read, keys)
        if torn:
            self.torn += torn
            self._values.condemn()
        return found

    async def get(self, keys: Sequence[Key]) -> list[bytes | None]:
        return self.get_now(keys)

    async def put(self, key: Key, value: bytes, expires_at: float) -> None:
        if not 0 < len(key) <= _LONGEST_KEY_BYTES:
            raise StoreError("a key of that length can't be stored", kind="key")
        await self._values.call(
            lambda values: values.put(key, value, expires_at), weight=len(value) + len(key)
        )

    async def put_many(self, items: Sequence[tuple[Key, bytes, float]]) -> list[str]:
        def run(values: Values) -> list[str]:
            return [_put(values, *item) for item in items]

        weight = sum(len(key) + len(value) for key, value, _ in items)
        return await self._values.call(run, weight=weight)

    async def delete(self, keys: Sequence[Key]) -> None:
        def run(values: Values) -> None:
            for key in keys:
                values.delete(key)

        await self._values.call(run, weight=sum(map(len, keys)))

    async def size(self) -> Size:
        size_bytes, entries = self._read(self._values, _sums)
        return Size(size_bytes, entries, self._budget_bytes)

    async def take(self, key: Key, lease_s: float) -> bool:
        me, now = self._me, time.time()
        if self._read(self._board, lmdb_board.is_held, key, me, now):
            return False  # most who ask wait for another: they need no lock
        return await self._board.call(
            lambda board: board.take(key, me, lease_s=lease_s, now=time.time()),
            weight=len(key),
            undo=lambda board: board.release([key], me),
        )

    async def renew(self, keys: Sequence[Key], lease_s: float) -> None:
        me = self._me
        await self._board.call(
            lambda board: board.renew(keys, me, lease_s=lease_s, now=time.time()),
            weight=sum(map(len, keys)),
        )

    async def release(self, keys: Sequence[Key]) -> None:
        me = self._me
        await self._board.call(lambda board: board.release(keys, me), weight=sum(map(len, keys)))

    async def publish(self, what: Invalidation) -> Epoch:
        return await self._board.call(
            lambda board: board.publish(what, time.time()), within_s=_WRITE_WITHIN_S
        )

    async def news(self, since: Epoch) -> News:
        now = time.monotonic()
        if now - self._checked_at >= _CHECK_EVERY_S:
            self._checked_at = now
            self._values.check()
            self._board.check()
        return self._read(self._board, lmdb_board.news, since)

    async def aclose(self) -> None:
        deadline = time.monotonic() + _CLOSE_WITHIN_S
        for writer in (self._values, self._board):
            await writer.aclose(max(0.05, deadline - time.monotonic()))

    def _open(self, layout: Layout) -> Place:
        return open_place(
            self._folder, layout, may_set_aside=self._may_set_aside, on_event=self._on_event
        )

    def _view_values(self, txn: "lmdb.Transaction[bytes]") -> Values:
        return Values(txn, budget_bytes=self._budget_bytes, now=time.time())

    def _read(
        self, writer: Writer[Values] | Writer[Board], read: Callable[..., T], *what: object
    ) -> T:
        place = writer.reading()
        try:
            return read(place, *what)
        except lmdb.Error as error:
            if is_damage(error):
                writer.condemn()
            elif is_outdated(error):
                writer.is_outdated = True
            raise store_error(error) from error


def _put(values: Values, key: Key, value: bytes, expires_at: float) -> str:
    """The kind of error, or an empty string."""
    try:
        values.put(key, value, expires_at)
    except StoreError as error:
        return error.kind
    return ""


def _sums(place: Place) -> tuple[int, int]:
    with place.env.begin() as txn:
        return lmdb_values.sums(txn)


def _relieve(values: Values, budget_bytes: int) -> None:
    values.make_room(max(0, values.size_bytes - int(budget_bytes * _RELIEF)))
