"""From a spool's records to rows in order of arrival, each with its parent.

A row's parent is the earlier one of its file with which its prompt shares the most blocks. All is
done in columns: there may be a million hits in a file.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from preheat.traces import spool
from preheat.wire import journal

_ABOUT: Final = msgspec.msgpack.Decoder(journal.About)
_ROW: Final = msgspec.msgpack.Decoder(journal.Row)
_HELLO: Final = msgspec.msgpack.Decoder(journal.Hello)
_FACTS: Final = ("status", "input_tokens", "output_tokens", "answer_bytes")
_Places = npt.NDArray[np.int64]


class Expansion:
    """A spool, read and put in order; `tables` makes the rows."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        table = pa.Table.from_batches(batches, spool.SCHEMA)
        kind, at_us, number, ask, duration_s = (
            table[name].to_numpy() for name in spool.SCHEMA.names[:5]
        )
        self._asks = _Asks()
        slow: list[journal.Row] = [journal.HIT]
        slow_place = np.zeros(len(kind), np.int64)
        places = np.flatnonzero(kind != spool.HIT_RECORD)
        data = table["data"].take(places).to_pylist() if len(places) else []
        for place, told in zip(places.tolist(), data, strict=True):
            if kind[place] == spool.ROW_RECORD:
                slow_place[place] = len(slow)
                slow.append(_ROW.decode(told))
            else:
                self._asks.learn(int(kind[place]), int(number[place]), told)
        is_request = np.flatnonzero(kind <= spool.ROW_RECORD)
        order = is_request[np.argsort(at_us[is_request], kind="stable")]
        self.rows = len(order)
        self._at_us, self._number, self._duration_s = at_us[order], number[order], duration_s[order]
        self._ask, self._slow_place = ask[order].astype(np.int64), slow_place[order]
        self._slow = slow
        if self.rows:
            self._find_parents()

    @property
    def first_at_us(self) -> int:
        """When the first request came."""
        return int(self._at_us[0])

    @property
    def last_at_us(self) -> int:
        """When the last request came."""
        return int(self._at_us[-1])

    def tables(self, schema: pa.Schema, rows: int) -> Iterator[pa.Table]:
        """All rows, so many at once."""
        asks, slow = self._asks.table(), _slow_table(self._slow)
        hits = _taken(slow, np.zeros(min(rows, self.rows), np.int64))
        for start in range(0, self.rows, rows):
            columns = self._columns(slice(start, start + rows), asks, slow, hits)
            yield pa.table(
                [columns[field.name].cast(field.type) for field in schema], schema=schema
            )

    def _find_parents(self) -> None:
        """Per ask: which row came first with it, and with which row that one shares how much."""
        asks = self._asks
        self._first_row = np.full(len(asks), -1, np.int64)
        self._first_row[self._ask[::-1]] = np.arange(self.rows)[::-1]  # the last one written stays
        used = np.flatnonzero(self._first_row >= 0)
        by_arrival = used[np.argsort(self._first_row[used])]
        lengths = asks.lengths
        owner = np.repeat(np.arange(len(by_arrival)), lengths[by_arrival])
        hashes = np.concatenate([asks.hashes[ask] for ask in by_arrival])
        _, first_place, same = np.unique(hashes, return_index=True, return_inverse=True)
        first_owner = owner[first_place][same] if len(hashes) else owner
        known = first_owner < owner
        # Chained: where one block is known, all before it are.
        shared = np.bincount(owner[known], minlength=len(by_arrival))
        ends = np.cumsum(lengths[by_arrival])
        last_shared = ends - lengths[by_arrival] + shared - 1
        self._shared = np.zeros(len(asks), np.int64)
        self._shared[by_arrival] = shared
        self._parent_row = np.full(len(asks), -1, np.int64)
        has = shared > 0
        parents = by_arrival[first_owner[last_shared[has]]]
        self._parent_row[by_arrival[has]] = self._first_row[parents]

    def _columns(
        self, part: slice, asks: pa.Table, slow: pa.Table, hits: dict[str, pa.Array]
    ) -> dict[str, pa.Array]:
        ask, slow_place = self._ask[part], self._slow_place[part]
        columns = _taken(asks, ask)
        if slow_place.any():
            row = _taken(slow, slow_place)
            as_stored = pc.less(row["answer_bytes"], 0)
            for name in _FACTS:
                columns[name] = pc.if_else(as_stored, columns[name], row[name])
        else:  # hits only: all alike
            row = {name: column.slice(0, len(ask)) for name, column in hits.items()}
        columns |= {name: column for name, column in row.items() if name not in _FACTS}
        columns |= self._lineage(part, ask)
        columns["at"] = pa.array(self._at_us[part], pa.timestamp("us", "UTC"))
        columns["number"] = pa.array(self._number[part])
        columns["duration_s"] = pa.array(self._duration_s[part])
        columns["embedding"] = pa.nulls(len(ask), pa.binary())
        return columns

    def _lineage(self, part: slice, ask: _Places) -> dict[str, pa.Array]:
        first_row = self._first_row[ask]
        is_first = first_row == np.arange(part.start, part.start + len(ask))
        shared = np.where(is_first, self._shared[ask], self._asks.lengths[ask])
        parent_row = np.where(is_first, self._parent_row[ask], first_row)
        is_alone = shared == 0
        parent_row[is_alone] = 0
        counts = np.where(is_first, self._asks.lengths[ask] - shared, 0)
        new = [self._asks.hashes[one][self._shared[one] :] for one in ask[np.flatnonzero(is_first)]]
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        values = np.concatenate(new) if new else np.empty(0, np.uint64)
        processes = self._asks.process_column.take(pa.array(self._ask[parent_row]))
        nothing = pa.array(is_alone)
        return {
            "parent_process": pc.if_else(nothing, pa.scalar(None, processes.type), processes),
            "parent_number": pa.array(self._number[parent_row], mask=is_alone),
            "shared_blocks": pa.array(shared.astype(np.uint32)),
            "new_blocks": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
        }


class _Asks:
    """The asks of a spool, by their numbers there."""

    def __init__(self) -> None:
        self.hashes: list[npt.NDArray[np.uint64]] = []
        self._lengths: list[int] = []
        self._abouts: list[tuple[Any, ...]] = []
        self._facts: list[tuple[int, int, int, int]] = []
        self._processes: list[journal.Hello] = []
        self._process: list[int] = []

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def lengths(self) -> _Places:
        """How many blocks each has."""
        return np.array(self._lengths, np.int64)

    @property
    def process_column(self) -> pa.Array:
        """The process of each, a dictionary."""
        names = pa.array([hello.process for hello in self._processes], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(self._process, pa.int32()), names)

    def learn(self, kind: int, number: int, told: bytes) -> None:
        """One record that isn't of a request."""
        facts_end = journal.FACTS.size
        if kind == spool.PROCESS_RECORD:
            self._processes.append(_HELLO.decode(told))
            return
        self._facts.append(journal.FACTS.unpack_from(told))
        if kind == spool.STORED_RECORD:
            hashes, about, process = (
                self.hashes[number],
                self._abouts[number],
                self._process[number],
            )
        else:
            base, shared, about_bytes = spool.ASK_BASE.unpack_from(told, facts_end)
            start = facts_end + spool.ASK_BASE.size
            about = msgspec.structs.astuple(_ABOUT.decode(told[start : start + about_bytes]))
            hashes = np.frombuffer(told[start + about_bytes :], "<u8")
            if shared:
                hashes = np.concatenate((self.hashes[base][:shared], hashes))
            process = number
        self.hashes.append(hashes)
        self._lengths.append(len(hashes))
        self._abouts.append(about)
        self._process.append(process)

    def table(self) -> pa.Table:
        """What rows take from them."""
        names = journal.About.__struct_fields__
        columns = dict(zip(names, zip(*self._abouts, strict=True), strict=True))
        hellos = [self._processes[place] for place in self._process]
        facts = list(zip(*self._facts, strict=True))
        tokens = {
            name: pa.array([None if count < 0 else count for count in counts], pa.int32())
            for name, counts in (("input_tokens", facts[1]), ("output_tokens", facts[2]))
        }
        return pa.table(
            {
                "process": self.process_column,
                "worker": pa.array([hello.worker for hello in hellos], pa.int16()),
                "version": _words([hello.gateway_version for hello in hellos]),
                "block_unit": _words([hello.block_unit for hello in hellos]),
                "key": _binary(columns.pop("key"), 16),
                **{
                    name: _words(columns.pop(name))
                    for name in ("tenant", "namespace", "model", "path")
                },
                "max_tokens": pa.array(columns.pop("max_tokens"), pa.int32()),
                **{name: pa.array(values) for name, values in columns.items()},
                "status": pa.array(facts[0], pa.int16()),
                **tokens,
                "answer_bytes": pa.array(facts[3], pa.int64()),
            }
        )


def _slow_table(rows: Sequence[journal.Row]) -> pa.Table:
    names = journal.Row.__struct_fields__
    columns = dict(zip(names, zip(*map(msgspec.structs.astuple, rows), strict=True), strict=True))
    return pa.table(
        {
            **{
                name: _words(columns[name])
                for name in ("layer", "fwd", "detail", "provenance", "engine_worker")
            },
            "session": _binary(columns["session"], 8),
            **{
                name: pa.array(columns[name], kind)
                for name, kind in (
                    ("status", pa.int16()),
                    ("input_tokens", pa.int32()),
                    ("output_tokens", pa.int32()),
                    ("cached_tokens", pa.int32()),
                    ("answer_bytes", pa.int64()),
                    ("ttft_s", pa.float32()),
                    ("service_s", pa.float32()),
                    ("priority", pa.int16()),
                    ("tags", pa.uint8()),
                )
            },
        }
    )


def _words(values: Sequence[str]) -> pa.Array:
    """Few words, many times; an empty one is none."""
    return pa.array([value or None for value in values], pa.string()).dictionary_encode()


def _binary(values: Sequence[bytes], size: int) -> pa.Array:
    return pa.array([value or None for value in values], pa.binary(size))


def _taken(table: pa.Table, places: _Places) -> dict[str, pa.Array]:
    chosen = pa.array(places.astype(np.int32))
    return {name: table[name].combine_chunks().take(chosen) for name in table.column_names}
