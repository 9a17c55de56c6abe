"""Our own request log: what its rows say, and how to read a folder of them.

A folder holds Parquet files, and the spool of what came in since. Each Parquet file makes sense
by itself: a row's parent stands before it in the same file.

```python
for request in own.requests(Path.home() / ".local/state/preheat/log"):
    print(request.at_us, request.layer, len(request.blocks))
```
"""

import errno
import fcntl
import heapq
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from preheat.traces import REMEDY
from preheat.wire import journal

try:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    import pyarrow.parquet as pq

    from preheat.traces import spool
    from preheat.traces.expansion import Expansion
except ImportError as error:
    raise ImportError(
        f"the request log can't be read without {error.name}: {REMEDY}", name=error.name
    ) from error

_WORD: Final = pa.dictionary(pa.int32(), pa.string())

SCHEMA: Final = pa.schema(
    [
        ("at", pa.timestamp("us", "UTC")),
        ("process", _WORD),
        ("number", pa.uint64()),
        ("worker", pa.int16()),
        ("version", _WORD),
        ("tenant", _WORD),
        ("namespace", _WORD),
        ("model", _WORD),
        ("path", _WORD),
        ("key", pa.binary(16)),
        ("stream", pa.bool_()),
        ("sampled", pa.bool_()),
        ("max_tokens", pa.int32()),
        ("priority", pa.int16()),
        ("session", pa.binary(8)),
        ("tags", pa.uint8()),
        ("layer", _WORD),
        ("fwd", _WORD),
        ("detail", _WORD),
        ("provenance", _WORD),
        ("status", pa.int16()),
        ("engine_worker", _WORD),
        ("input_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("body_bytes", pa.uint32()),
        ("prompt_bytes", pa.uint32()),
        ("answer_bytes", pa.uint32()),
        ("ttft_s", pa.float32()),
        ("service_s", pa.float32()),
        ("duration_s", pa.float32()),
        ("parent_process", _WORD),
        ("parent_number", pa.uint64()),
        ("shared_blocks", pa.uint32()),
        ("new_blocks", pa.list_(pa.uint64())),
        ("block_unit", _WORD),
        ("embedding", pa.binary()),
    ]
)
"""docs/request-log.md says what each means."""

_WORDS: Final = [field.name for field in SCHEMA if field.type == _WORD]
_DICTIONARIES: Final = [*_WORDS, "key", "session", "body_bytes", "prompt_bytes", "answer_bytes"]
_ROWS_AT_ONCE: Final = 65_536
_SOUGHT: Final = ["at", "number", "tenant", "namespace", "model", "layer", "status"]
"""Columns by which parts of a file can be skipped."""

_SPOOL_KEY: Final = b"preheat.spool"


class Logged(msgspec.Struct, frozen=True):
    """One request of the log. `blocks` are all hashes of its prompt; `fields` the rest of its
    row, under the columns' names."""

    at_us: int
    id: str
    parent: str | None
    blocks: npt.NDArray[np.uint64]
    layer: str
    fields: dict[str, Any]


def write(expansion: Expansion, path: Path, spool_name: str) -> None:
    """A Parquet file of a spool. It has its name only when it is whole."""
    about = {"preheat.log_version": str(journal.VERSION), "preheat.spool": spool_name}
    part = path.with_name(path.name + ".part")
    try:
        with pq.ParquetWriter(
            part,
            SCHEMA.with_metadata(about),
            compression="zstd",
            use_dictionary=_DICTIONARIES,
            write_statistics=_SOUGHT,
            column_encoding={"at": "DELTA_BINARY_PACKED", "number": "DELTA_BINARY_PACKED"},
        ) as writer:
            for table in expansion.tables(SCHEMA, _ROWS_AT_ONCE):
                writer.write_table(table)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def name_of(expansion: Expansion) -> str:
    """The name of a spool's Parquet file: the same whenever it is made of the same spool."""
    return f"log-{_stamp(expansion.first_at_us)}-{_stamp(expansion.last_at_us)}.parquet"


def tables(folder: Path) -> Iterator[pa.Table]:
    """All there is, file by file, each in order of arrival; without those that are deleted
    meanwhile because they are old. Raises FileNotFoundError, at once."""
    _check_there(folder)
    return (found for file in files(folder) if (found := file.load()) is not None)


def requests(folder: Path) -> Iterator[Logged]:
    """All requests in order of arrival. Only files that overlap in time are in memory at once.
    Raises FileNotFoundError, at once."""
    _check_there(folder)
    return _requests(folder)


def _requests(folder: Path) -> Iterator[Logged]:
    open_ones: list[tuple[int, int, Logged, Iterator[Logged]]] = []
    for place, file in enumerate(files(folder)):
        yield from _before(file.from_us, open_ones)
        table = file.load()
        if table is not None:
            _push(open_ones, place, logged(table))
    yield from _before(None, open_ones)


def _check_there(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(
            errno.ENOENT,
            "no request log is here; log.enabled writes one, to log.path or else to "
            "$XDG_STATE_HOME/preheat/log (~/.local/state/preheat/log)",
            str(folder),
        )


class LogFile(msgspec.Struct, frozen=True):
    """A file of the log. `load` gives its table; None where it has been deleted meanwhile."""

    path: Path
    from_us: int
    load: Callable[[], pa.Table | None]


def file_of(path: Path) -> LogFile:
    """One by itself, Parquet or spool. Its loading may raise OSError or ValueError."""
    load = _spool_table if path.suffix == ".arrows" else _read_parquet
    return LogFile(path, 0, partial(load, path))


def files(folder: Path) -> list[LogFile]:
    """Oldest first, without spools of which there is a Parquet file. Spools are read before those
    are looked for: one that is gone is among them."""
    spools = {path: _read_spool(path) for path in sorted(folder.glob("spool-*.arrows"))}
    paths = sorted(folder.glob("log-*.parquet"))
    found = [LogFile(path, _from_us(path), partial(_read_parquet, path)) for path in paths]
    compacted = {_spool_of(path) for path in paths} if spools else set()
    for path, expansion in spools.items():
        if path.name not in compacted and expansion is not None and expansion.rows:
            found.append(LogFile(path, expansion.first_at_us, partial(_table, expansion)))
    return sorted(found, key=lambda file: file.from_us)


def _push(
    open_ones: list[tuple[int, int, Logged, Iterator[Logged]]],
    place: int,
    rest: Iterator[Logged],
) -> None:
    request = next(rest, None)
    if request is not None:
        heapq.heappush(open_ones, (request.at_us, place, request, rest))


def _before(
    at_us: int | None, open_ones: list[tuple[int, int, Logged, Iterator[Logged]]]
) -> Iterator[Logged]:
    """The requests of open files from before this time, or all."""
    while open_ones and (at_us is None or open_ones[0][0] < at_us):
        _, place, request, rest = heapq.heappop(open_ones)
        yield request
        _push(open_ones, place, rest)


def logged(table: pa.Table) -> Iterator[Logged]:
    """The requests of one file's table."""
    whole = chains(table)
    first = 0
    for batch in table.to_batches(max_chunksize=1024):
        ats_us = batch["at"].cast(pa.int64()).to_pylist()
        rows = zip(ats_us, batch.to_pylist(), whole[first : first + len(batch)], strict=True)
        for at_us, row, blocks in rows:
            parent = None
            if row["parent_number"] is not None:
                parent = f"{row['parent_process']}{row['parent_number']:x}"
            name = f"{row['process']}{row['number']:x}"
            yield Logged(at_us, name, parent, blocks, row["layer"], row)
        first += len(batch)


def chains(table: pa.Table) -> list[npt.NDArray[np.uint64]]:
    """All block hashes of each row of one file: its parent's first ones, then its own."""
    new = table["new_blocks"].combine_chunks()
    values = new.values.to_numpy()
    ends = new.offsets.to_numpy()
    shared = table["shared_blocks"].to_numpy()
    names = list(zip(*(table[name].to_pylist() for name in ("process", "number")), strict=True))
    parents = zip(
        *(table[name].to_pylist() for name in ("parent_process", "parent_number")), strict=True
    )
    place_of = {name: place for place, name in enumerate(names)}
    whole: list[npt.NDArray[np.uint64]] = []
    for place, parent in enumerate(parents):
        own = values[ends[place] : ends[place + 1]]
        if shared[place]:
            begin = whole[place_of[parent]][: shared[place]]
            own = np.concatenate((begin, own)) if len(own) else begin
        whole.append(own)
    return whole


def _read_parquet(path: Path) -> pa.Table | None:
    """None where it is gone. While it is read, a shared lock keeps it from being deleted."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return pq.read_table(file)
    except FileNotFoundError:
        return None


def _spool_of(path: Path) -> str:
    try:
        about = pq.read_metadata(path).metadata or {}
    except FileNotFoundError:
        return ""
    return str(about.get(_SPOOL_KEY, b"").decode())


def _table(expansion: Expansion) -> pa.Table:
    return pa.concat_tables(
        expansion.tables(SCHEMA, _ROWS_AT_ONCE), promote_options="permissive"
    ).combine_chunks()


def _spool_table(path: Path) -> pa.Table | None:
    expansion = _read_spool(path)
    return _table(expansion) if expansion is not None and expansion.rows else None


def _read_spool(path: Path) -> Expansion | None:
    try:
        batches, _ = spool.read(path)
    except FileNotFoundError:
        return None  # its Parquet file is there
    return Expansion(batches)


def _stamp(at_us: int) -> str:
    at = datetime.fromtimestamp(at_us // 1_000_000, UTC)
    return f"{at:%Y%m%dT%H%M%S}.{at_us % 1_000_000:06}"


def _from_us(path: Path) -> int:
    """What `_stamp` said. A file that somebody has named otherwise is taken for the oldest."""
    try:
        at = datetime.strptime(path.name[4:26], "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC)
    except ValueError:
        return 0
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
