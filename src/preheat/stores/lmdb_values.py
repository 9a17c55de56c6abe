"""The values, inside one transaction: what is there, how much, what goes first.

Each value has a row in two indexes, by its expiry and by its age, and one row has the sums, so that neither a start nor an eviction looks at more than it has to. The sums change in the
transaction that changes the values: no process's death can part them.
"""

import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import lmdb

from preheat.errors import StoreError
from preheat.stores.lmdb_env import Layout, Place

_PAGE_BYTES: Final = 4096
# Sizes from LMDB 0.9's mdb.c: a page's header, a node's with its place in the page, and what a node
# may have before its data gets pages of its own.
_PAGE_HEAD_BYTES: Final = 16
_NODE_HEAD_BYTES: Final = 10
_MOST_INLINE_BYTES: Final = 2038
_SLACK: Final = 2.5
"""Pages of a B+ tree are two thirds full after random inserts, and half full once as much is removed
as comes in; the branches come on top."""

_HEAD: Final = struct.Struct(">IqqI")
"""Check sum (of key and value), expiry and age in milliseconds, cost in bytes."""
_AT: Final = struct.Struct(">q")
_ROW: Final = struct.Struct(">qI")
_SUMS: Final = struct.Struct(">QQ")
_SUMS_KEY: Final = b"m:sums"
_VALUE: Final = b"v"
_EXPIRY: Final = b"e"
_AGE: Final = b"a"
_INDEX_HEAD_BYTES: Final = 1 + _AT.size
_LONGEST_MS: Final = 2**62
_NO_LIMIT: Final = float("inf")
_CHECK_EVERY: Final = 8


def layout(budget_bytes: int) -> Layout:
    """A map this much larger than the budget never fills up, whatever the sizes of the values: at
    1.1 times it does, since a large value needs pages in a row."""
    map_bytes = max(budget_bytes * 5 // 2, budget_bytes + 256 * 1024 * 1024)
    return Layout(
        name="values",
        version=1,
        map_bytes=map_bytes // _PAGE_BYTES * _PAGE_BYTES,
        reserve_bytes=0,
        first_rows=lambda: {_SUMS_KEY: _SUMS.pack(0, 0)},
    )


def cost_bytes(key_bytes: int, value_bytes: int) -> int:
    """What a value takes of the file, with its rows in the indexes."""
    node_bytes = _NODE_HEAD_BYTES + 1 + key_bytes + _HEAD.size + value_bytes
    rows_bytes = 2 * (_NODE_HEAD_BYTES + _INDEX_HEAD_BYTES + key_bytes + _ROW.size)
    if node_bytes <= _MOST_INLINE_BYTES:
        return int(_SLACK * (node_bytes + rows_bytes))
    own_bytes = _PAGE_HEAD_BYTES + _HEAD.size + value_bytes
    own_bytes = -(-own_bytes // _PAGE_BYTES) * _PAGE_BYTES
    return own_bytes + int(_SLACK * (_NODE_HEAD_BYTES + 1 + key_bytes + 8 + rows_bytes))


def read(place: Place, keys: Sequence[bytes]) -> tuple[list[bytes | None], int]:
    """The values there are, and how many of them aren't what was put."""
    found: list[bytes | None] = []
    torn = 0
    with place.env.begin(buffers=True) as txn:
        for key in keys:
            row = txn.get(_VALUE + key)
            if row is None:
                found.append(None)
                continue
            value = bytes(row[_HEAD.size :])
            if len(row) < _HEAD.size or _check(key, value) != _HEAD.unpack_from(row)[0]:
                torn += 1
                found.append(None)
            else:
                found.append(value)
    return found, torn


def sums(txn: "lmdb.Transaction[bytes]") -> tuple[int, int]:
    """Bytes and values."""
    row = txn.get(_SUMS_KEY)
    if row is None or len(row) != _SUMS.size:
        raise lmdb.CorruptedError("sums")
    size_bytes, entries = _SUMS.unpack(row)
    return size_bytes, entries


def first_expiry_ms(txn: "lmdb.Transaction[bytes]") -> int | None:
    """When the first of them expires."""
    cursor = txn.cursor()
    return _at(cursor.key()) if _goes_to_first(cursor, _EXPIRY) else None


class Values:
    """The values in a write transaction; `close` books what was done."""

    def __init__(self, txn: "lmdb.Transaction[bytes]", *, budget_bytes: int, now: float) -> None:
        self._txn = txn
        self._budget_bytes = budget_bytes
        self._now_ms = int(now * 1000)
        self.size_bytes, self.entries = self._booked = sums(txn)

    def put(self, key: bytes, value: bytes, expires_at: float) -> None:
        """Keep it, at whatever else's expense. Raises StoreError if it can't be."""
        cost = cost_bytes(len(key), len(value))
        if cost > self._budget_bytes:
            raise StoreError("larger than the whole budget", kind="too-large")
        expires_ms = int(max(0.0, min(expires_at * 1000, _LONGEST_MS)))
        self.delete(key)
        if self.size_bytes + cost > self._budget_bytes:
            self.make_room(self._budget_bytes - cost)
        head = _HEAD.pack(_check(key, value), expires_ms, self._now_ms, cost)
        self._txn.put(_VALUE + key, head + value)
        self._txn.put(_EXPIRY + _AT.pack(expires_ms) + key, _ROW.pack(self._now_ms, cost))
        self._txn.put(_AGE + _AT.pack(self._now_ms) + key, _ROW.pack(expires_ms, cost))
        self.size_bytes += cost
        self.entries += 1

    def delete(self, key: bytes) -> None:
        row = self._txn.get(_VALUE + key)
        if row is None:
            return
        if len(row) < _HEAD.size:
            raise lmdb.CorruptedError("head")
        _, expires_ms, put_ms, cost = _HEAD.unpack_from(row)
        self._remove(key, expires_ms, put_ms, cost)

    def make_room(self, target_bytes: int) -> None:
        """Remove what is expired, then what is oldest, until no more than the target is left."""
        self._evict_expired(target_bytes, _NO_LIMIT)
        self._evict_oldest(target_bytes, _NO_LIMIT)

    def evict(self, target_bytes: int, *, until: float) -> bool:
        """Remove all that is expired, then make room. False: it isn't done by then (on the
        monotonic clock)."""
        return self._evict_expired(-1, until) and self._evict_oldest(target_bytes, until)

    def close(self) -> None:
        now = (self.size_bytes, self.entries)
        if now != self._booked:
            self._txn.put(_SUMS_KEY, _SUMS.pack(*now))

    def _evict_expired(self, target_bytes: int, until: float) -> bool:
        cursor = self._txn.cursor()
        may_go_on = _pace(until)
        while self.size_bytes > target_bytes and _goes_to_first(cursor, _EXPIRY):
            row = cursor.key()
            expires_ms = _at(row)
            if expires_ms > self._now_ms:
                return True
            if not may_go_on():
                return False
            put_ms, cost = _ROW.unpack(cursor.value())
            self._remove(row[_INDEX_HEAD_BYTES:], expires_ms, put_ms, cost)
        return True

    def _evict_oldest(self, target_bytes: int, until: float) -> bool:
        cursor = self._txn.cursor()
        may_go_on = _pace(until)
        while self.size_bytes > target_bytes:
            if not _goes_to_first(cursor, _AGE):
                raise lmdb.CorruptedError("sums")
            if not may_go_on():
                return False
            row = cursor.key()
            expires_ms, cost = _ROW.unpack(cursor.value())
            self._remove(row[_INDEX_HEAD_BYTES:], expires_ms, _at(row), cost)
        return True

    def _remove(self, key: bytes, expires_ms: int, put_ms: int, cost: int) -> None:
        self._txn.delete(_VALUE + key)
        self._txn.delete(_EXPIRY + _AT.pack(expires_ms) + key)
        self._txn.delete(_AGE + _AT.pack(put_ms) + key)
        self.size_bytes -= cost
        self.entries -= 1


def _goes_to_first(cursor: "lmdb.Cursor[bytes]", kind: bytes) -> bool:
    """Whether there is a row of that kind; the cursor is at the first one then."""
    return cursor.set_range(kind) and cursor.key()[:1] == kind


def _at(row: bytes) -> int:
    """The point in time that an index's row begins with, in milliseconds."""
    at_ms: int = _AT.unpack_from(row, 1)[0]
    return at_ms


def _check(key: bytes, value: bytes) -> int:
    """LMDB's pages have no check sums, so a page of another time would go unseen."""
    return zlib.crc32(value, zlib.crc32(key))


def _pace(until: float) -> Callable[[], bool]:
    """Whether there is time for one more; the clock is asked now and then."""
    done = 0

    def may_go_on() -> bool:
        nonlocal done
        done += 1
        return done % _CHECK_EVERY != 0 or time.monotonic() < until

    return may_go_on
