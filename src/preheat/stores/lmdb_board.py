"""The board, inside one transaction: leases, and the record of invalidations."""

import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

import lmdb
import msgspec

from preheat.core.types import Epoch, Invalidation
from preheat.errors import StoreError
from preheat.stores import News
from preheat.stores.lmdb_env import Layout, Place
from preheat.stores.lmdb_holder import Holder

KEEP_S: Final = 2 * 86_400.0
_MAP_BYTES: Final = 128 * 1024 * 1024
_RESERVE_BYTES: Final = 1024 * 1024
_MOST_EPOCHS: Final = 10_000
_MOST_EPOCHS_BYTES: Final = 16 * 1024 * 1024
_MOST_LEASES: Final = 100_000
R = TypeVar("R")

_NUMBER: Final = struct.Struct(">Q")
_COUNT_KEY: Final = b"m:count"
_LEASE: Final = b"l"
_EPOCH: Final = b"e"


class _Lease(msgspec.Struct, frozen=True, array_like=True):
    holder: Holder
    ends_at: float


class _Count(msgspec.Struct, frozen=True, array_like=True):
    """How many invalidations there were, which are there no more (up to `floor`), and the size of
    those that are."""

    generation: str
    number: int = 0
    floor: int = 0
    size_bytes: int = 0


class _Record(msgspec.Struct, frozen=True, array_like=True):
    at: float
    what: Invalidation


_ENCODER: Final = msgspec.msgpack.Encoder()
_LEASES: Final = msgspec.msgpack.Decoder(_Lease)
_COUNTS: Final = msgspec.msgpack.Decoder(_Count)
_RECORDS: Final = msgspec.msgpack.Decoder(_Record)


def layout() -> Layout:
    """A generation begins with the files."""
    return Layout(
        name="board",
        version=1,
        map_bytes=_MAP_BYTES,
        reserve_bytes=_RESERVE_BYTES,
        first_rows=lambda: {_COUNT_KEY: _ENCODER.encode(_Count(secrets.token_hex(8)))},
    )


def is_held(place: Place, key: bytes, me: Holder, now: float) -> bool:
    """Whether another process computes the answer, as far as can be seen without the lock."""
    with place.env.begin() as txn:
        return _is_held(txn.get(_LEASE + key), me, now)


def news(place: Place, since: Epoch) -> News:
    """What was published since then."""
    with place.env.begin() as txn:
        count = _count(txn)
        if since.generation == count.generation and since.number == count.number:
            return News(since, floor=count.floor)
        is_all = since.generation != count.generation or not (
            count.floor <= since.number <= count.number
        )
        number = count.floor if is_all else since.number
        found = tuple(
            (_NUMBER.unpack_from(key, 1)[0], _decoded(_RECORDS, row).what)
            for key, row in _rows(txn, _EPOCH, _EPOCH + _NUMBER.pack(number + 1))
        )
        return News(Epoch(count.generation, count.number), found, is_all=is_all, floor=count.floor)


def is_empty(txn: "lmdb.Transaction[bytes]") -> bool:
    """Whether there are neither leases nor records."""
    return not any(next(_rows(txn, kind, kind), None) for kind in (_LEASE, _EPOCH))


class Board:
    """The board in a write transaction."""

    def __init__(self, txn: "lmdb.Transaction[bytes]") -> None:
        self._txn = txn

    def take(self, key: bytes, me: Holder, *, lease_s: float, now: float) -> bool:
        """Whether the lease is mine now."""
        row = self._txn.get(_LEASE + key)
        if _is_held(row, me, now):
            return False
        if row is None and self._txn.stat()["entries"] >= _MOST_EPOCHS + _MOST_LEASES:
            raise StoreError("too many leases", kind="full")
        self._txn.put(_LEASE + key, _ENCODER.encode(_Lease(me, now + lease_s)))
        return True

    def renew(self, keys: Sequence[bytes], me: Holder, *, lease_s: float, now: float) -> None:
        """Put off the end of mine."""
        row = _ENCODER.encode(_Lease(me, now + lease_s))
        for key in keys:
            if self._is_mine(key, me):
                self._txn.put(_LEASE + key, row)

    def release(self, keys: Sequence[bytes], me: Holder) -> None:
        for key in keys:
            if self._is_mine(key, me):
                self._txn.delete(_LEASE + key)

    def publish(self, what: Invalidation, now: float) -> Epoch:
        """Record it, forgetting the oldest beyond the bounds."""
        row = _ENCODER.encode(_Record(now, what))
        if len(row) > _MOST_EPOCHS_BYTES // 16:
            raise StoreError("names too many keys and tags at once", kind="too-large")
        count = _count(self._txn)
        number = count.number + 1
        self._txn.put(_EPOCH + _NUMBER.pack(number), row)
        grown = msgspec.structs.replace(
            count, number=number, size_bytes=count.size_bytes + len(row)
        )
        self._set_count(self._forget(grown, lambda _: False))
        return Epoch(count.generation, number)

    def prune(self, now: float, *, keep_s: float, most: int) -> None:
        """Forget old invalidations, at most so many."""
        count = _count(self._txn)
        left = [most]

        def is_old(row: bytes) -> bool:
            left[0] -= 1
            return left[0] >= 0 and _decoded(_RECORDS, row).at < now - keep_s

        kept = self._forget(count, is_old)
        if kept != count:
            self._set_count(kept)

    def prune_leases(self, me: Holder, now: float, *, after: bytes, most: int) -> bytes:
        """Drop leases past their end or of dead processes, from that key on, looking at so many;
        the key to go on after, empty at the end."""
        seen = list(islice(_rows(self._txn, _LEASE, (after or _LEASE) + b"\0"), most))
        for key, row in seen:
            if not _is_held(row, me, now):
                self._txn.delete(key)
        return seen[-1][0] if len(seen) == most else b""

    def close(self) -> None:
        """Nothing is left to book."""

    def _is_mine(self, key: bytes, me: Holder) -> bool:
        row = self._txn.get(_LEASE + key)
        return row is not None and _decoded(_LEASES, row).holder.owner == me.owner

    def _forget(self, count: _Count, is_old: Callable[[bytes], bool]) -> _Count:
        """Drop the oldest records while there are too many of them, or while they are old."""
        cursor = self._txn.cursor()
        while cursor.set_range(_EPOCH) and cursor.key()[:1] == _EPOCH:
            row = cursor.value()
            kept = count.number - count.floor
            is_over = kept > _MOST_EPOCHS or count.size_bytes > _MOST_EPOCHS_BYTES
            if not (is_over or is_old(row)):
                break
            floor = _NUMBER.unpack_from(cursor.key(), 1)[0]
            cursor.delete()
            count = msgspec.structs.replace(
                count, floor=floor, size_bytes=count.size_bytes - len(row)
            )
        return count

    def _set_count(self, count: _Count) -> None:
        self._txn.put(_COUNT_KEY, _ENCODER.encode(count))


def _is_held(row: bytes | None, me: Holder, now: float) -> bool:
    """Whether the lease is another's, in time, and that other may still live."""
    if row is None:
        return False
    lease = _decoded(_LEASES, row)
    if lease.holder.owner == me.owner or lease.ends_at <= now:
        return False
    return not lease.holder.is_gone(me.world)


def _rows(
    txn: "lmdb.Transaction[bytes]", kind: bytes, first: bytes
) -> Iterator[tuple[bytes, bytes]]:
    """The rows of that kind from the first on."""
    cursor = txn.cursor()
    if cursor.set_range(first):
        for key, row in cursor:
            if key[:1] != kind:
                return
            yield key, row


def _count(txn: "lmdb.Transaction[bytes]") -> _Count:
    row = txn.get(_COUNT_KEY)
    if row is None:
        raise lmdb.CorruptedError("count")
    return _decoded(_COUNTS, row)


def _decoded(decoder: "msgspec.msgpack.Decoder[R]", row: bytes) -> R:
    try:
        return decoder.decode(row)
    except msgspec.MsgspecError as error:
        raise lmdb.CorruptedError("row") from error
