"""Our own request log, and traces written in its form, as arrivals.

What the gateway did with a request isn't read: a replay does it anew. Requests that we made
ourselves, and those nobody could read, are left out.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from preheat.errors import TraceError
from preheat.traces.arrival import UNKNOWN, Arrival
from preheat.traces.numbering import (
    BYTES_PER_TOKEN,
    CHUNK_BYTES,
    Numbering,
    ratio_of,
)
from preheat.traces.reader import Draft, Format, Reading
from preheat.traces.rules import Rules
from preheat.traces.source import Head, Source
from preheat.traces.turns import Turns
from preheat.traces.written import TOKENS_UNIT, Written, written_of

if TYPE_CHECKING:
    from preheat.traces.own import LogFile

_PARQUET: Final = b"PAR1"
_ARROW_STREAM: Final = b"\xff\xff\xff\xff"
_NEEDED: Final = (
    *("process", "number", "tenant", "model", "path", "key", "session", "sampled", "layer"),
    *("provenance", "status", "input_tokens", "output_tokens", "prompt_bytes", "answer_bytes"),
    *("ttft_s", "service_s", "duration_s", "block_unit", "max_tokens"),
)
"""Columns of the log that are looked at."""

_DAMAGE: Final = (
    *(OSError, ValueError, LookupError, TypeError, NotImplementedError),
    *(ArithmeticError, MemoryError, msgspec.MsgspecError),
)
"""What reading a damaged file may raise: Arrow's own are kinds of these, and values may be anything."""

_WORDS: Final = ("kind", "stop", "agent", "adapter")
_READ: Final = (*_NEEDED, "name", "session_name", "turn", "think_s", "ends_session", *_WORDS)
"""The last ones are there in a written trace only."""


def _recognises(head: Head) -> bool:
    is_spool = head.data.startswith(_ARROW_STREAM) and head.name.endswith(".arrows")
    return head.data.startswith(_PARQUET) or is_spool


class _Asked(msgspec.Struct):
    """A row that is an arrival. Of the prompt's blocks only the whole ones are hashed."""

    at: float
    blocks: tuple[int, ...]
    has_rest: bool
    row: dict[str, Any]


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    asked: list[_Asked] = []
    written: list[Written | None] = []
    numbers = Numbering()
    for source, file in _files(sources, reading):
        told = _told(source, file, numbers, reading)
        if told is None:
            continue
        written.append(told[0])
        asked += told[1]
        reading.step(source, len(asked))
    asked.sort(key=lambda one: one.at)
    trace = _one_of(written)
    ratio = ratio_of((one.row["input_tokens"] or 0, one.row["prompt_bytes"] or 0) for one in asked)
    if trace is None:
        block_tokens = ratio.block_tokens
        reading.tell(ratio.rule)
    else:
        block_tokens = trace.block_tokens
        for rule in trace.rules:
            reading.tell(rule)
    return Draft(
        arrivals=_arrivals(asked, ratio.per_byte, numbers),
        block_tokens=block_tokens,
        times=trace.times if trace else "measured",
        is_dated=trace is None,
        is_ordered=trace is not None,
    )


def columns_of(
    sources: Sequence[Source], names: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """When each request of these logs came (microseconds since 1970), and these columns of its row.
    Files that are damaged (reading them as a trace tells it), or lack one of them, are left out."""
    for source, file in _files(sources, Reading(Rules(), "skip", None)):
        try:
            table = file.load()
            if table is None or not {*names} <= {*table.schema.names}:
                continue
            table = _checked(source, table)
            ats_us = table["at"].cast("int64").to_numpy().tolist()
            columns = [_listed(table[name]) for name in names]
        except _DAMAGE:
            continue
        for at_us, *values in zip(ats_us, *columns, strict=True):
            yield at_us, dict(zip(names, values, strict=True))


def _files(sources: Sequence[Source], reading: Reading) -> Iterator[tuple[Source, "LogFile"]]:
    """Of folders each log's files as `own` finds them: a spool may just become a Parquet file."""
    try:
        from preheat.traces import own  # noqa: PLC0415 - needs the extra `log`
    except ImportError as error:
        raise TraceError(str(error)) from None
    folders: set[Path] = set()
    for source in sources:
        if source.folder is None or not source.path.name.startswith(("log-", "spool-")):
            yield source, own.file_of(source.path)
        elif source.path.parent not in folders:
            folders.add(source.path.parent)
            try:
                files = own.files(source.path.parent)
            except _DAMAGE:
                reading.refuse(source, 1, "a file beside it is damaged: name the others one by one")
                continue
            for file in files:
                yield Source(file.path, source.folder), file


def _told(
    source: Source, file: "LogFile", numbers: Numbering, reading: Reading
) -> tuple[Written | None, list[_Asked]] | None:
    """What the file says, all of it looked at here: damage may show at any value. None for one that
    is gone or can't be read."""
    try:
        table = file.load()
        if table is None:
            return None
        table = _checked(source, table)
        return written_of(table.schema.metadata), list(_asked(table, numbers, reading))
    except _DAMAGE:
        reading.refuse(source, 1, "the file is cut off or damaged")
        return None


def _checked(source: Source, table: Any) -> Any:
    """The columns that are looked at, in the types that the log has (a word may be plain text)."""
    import pyarrow as pa  # noqa: PLC0415 - needs the extra `log`

    from preheat.traces.own import SCHEMA  # noqa: PLC0415 - the same
    from preheat.traces.writing import MORE  # noqa: PLC0415 - the same

    needed = ("at", "new_blocks", "shared_blocks", *_NEEDED)
    missing = [name for name in needed if name not in table.schema.names]
    if missing:
        raise TraceError(
            f"{source.path}: a Parquet file, but no request log of ours: no column {missing[0]!r} "
            "(docs/request-log.md has them all)"
        )
    for field in (*SCHEMA, *MORE):
        place = table.schema.get_field_index(field.name)
        if place < 0 or table.schema.field(place).type == field.type:
            continue
        is_word = pa.types.is_dictionary(field.type)
        plain = table[field.name].cast(field.type.value_type if is_word else field.type)
        table = table.set_column(place, field.name, plain)
    return table


def _asked(table: Any, numbers: Numbering, reading: Reading) -> Iterator[_Asked]:
    from preheat.traces import own  # noqa: PLC0415 - needs the extra `log`

    present = [name for name in _READ if name in table.schema.names]
    columns = [_listed(table[name]) for name in present]
    ats_us = table["at"].cast("int64").to_numpy().tolist()
    of = numbers.of
    left_out = 0
    for at_us, hashes, *values in zip(ats_us, own.chains(table), *columns, strict=True):
        row = dict(zip(present, values, strict=True))
        if row["provenance"] not in (None, "client") or not row["layer"]:
            left_out += 1
            continue
        blocks = tuple(map(of, hashes.tolist()))
        unit = row["block_unit"] or ""
        if unit.startswith(TOKENS_UNIT):
            whole, rest = divmod(row["input_tokens"] or 0, int(unit.removeprefix(TOKENS_UNIT)))
            has_rest = rest > 0 and len(blocks) == whole
        else:
            has_rest = (row["prompt_bytes"] or 0) - len(blocks) * CHUNK_BYTES >= BYTES_PER_TOKEN
        yield _Asked(at_us / 1e6, blocks, has_rest, row)
    if left_out:
        reading.tell("Engine calls of ours and requests that couldn't be read are left out.")


def _listed(column: Any) -> list[Any]:
    """A column's values; many times as fast as pyarrow's `to_pylist`, which wraps each."""
    import pyarrow as pa  # noqa: PLC0415 - needs the extra `log`

    kind = column.type
    if pa.types.is_dictionary(kind):
        chunk = column.unify_dictionaries().combine_chunks()
        words = [*chunk.dictionary.to_pylist(), None]
        return [words[place] for place in chunk.indices.fill_null(-1).to_numpy().tolist()]
    if not pa.types.is_integer(kind) and not pa.types.is_floating(kind):
        found: list[Any] = column.to_pylist()
        return found
    values: list[Any] = column.fill_null(0).to_numpy().tolist()
    if column.null_count:
        are_known = column.is_valid().to_pylist()
        return [value if known else None for value, known in zip(values, are_known, strict=True)]
    return values


def _one_of(written: Sequence[Written | None]) -> Written | None:
    """What the files say of the trace that was written; None for a log."""
    first = written[0] if written else None
    if any(
        (one is None) != (first is None)
        or (one and first and one.block_tokens != first.block_tokens)
        for one in written
    ):
        raise TraceError(
            "mixed: a request log, and traces written in its form, or such of other blocks"
        )
    return first


def _arrivals(asked: Sequence[_Asked], per_byte: float, numbers: Numbering) -> list[Arrival]:
    keys = Numbering()
    turns = Turns()
    arrivals = []
    for place, one in enumerate(asked):
        row = one.row
        session = row.get("session_name") or (row["session"].hex() if row["session"] else "")
        key = keys.of(row["key"]) if row["key"] else UNKNOWN
        rest = (numbers.of(("rest", row["key"] or place)),) if one.has_rest else ()
        turn, think_s = turns.next(session, one.at, _known(row["duration_s"]))
        arrivals.append(
            Arrival(
                at=one.at,
                id=row.get("name") or f"{row['process']}{row['number']:x}",
                session=session,
                turn=row.get("turn", turn),
                tenant=row["tenant"] or "",
                model=row["model"] or "",
                key=key,
                size_bytes=max(1, row["answer_bytes"] or 1),
                input_tokens=_tokens(row, per_byte),
                output_tokens=_known(row["output_tokens"]),
                blocks=one.blocks + rest,
                think_s=row.get("think_s", think_s),
                ttft_s=_known(row["ttft_s"]),
                service_s=_known(row["service_s"]),
                ends_session=row.get("ends_session", False),
                sampled=bool(row["sampled"]),
                **_words(row),
            )
        )
    return arrivals


def _tokens(row: dict[str, Any], per_byte: float) -> int:
    tokens: int | None = row["input_tokens"]
    if tokens is not None:
        return tokens
    return round(row["prompt_bytes"] * per_byte) if row["prompt_bytes"] else UNKNOWN


def _words(row: dict[str, Any]) -> dict[str, str]:
    """A trace's own, or what the log says of path and status. It doesn't say how an answer ended:
    one as long as it was allowed to be is taken for cut off."""
    if "kind" in row:
        return {name: row[name] or "" for name in _WORDS}
    status, said, most = row["status"], row["output_tokens"], row["max_tokens"]
    if status is not None and status != 200:
        stop = f"status-{status}"
    else:
        stop = "length" if said and most and said >= most else ""
    return {"kind": row["path"] or "", "stop": stop}


def _known(value: Any) -> Any:
    return UNKNOWN if value is None else value


FORMAT: Final = Format(_recognises, _read)
