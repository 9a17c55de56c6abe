"""Writes a trace as a Parquet file in the form of our own request log (docs/traces.md).

Whatever reads the log reads it too. The columns that the log hasn't come after those it has.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Final

from preheat.traces import REMEDY
from preheat.traces.arrival import Arrival, Trace
from preheat.traces.written import TOKENS_UNIT, Written, metadata_of
from preheat.wire import journal

try:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from preheat.traces.own import SCHEMA
except ImportError as error:
    raise ImportError(
        f"a trace can't be written without {error.name}: {REMEDY}", name=error.name
    ) from error

MORE: Final = pa.schema(
    [
        ("name", pa.string()),
        ("session_name", pa.dictionary(pa.int32(), pa.string())),
        ("turn", pa.int32()),
        ("adapter", pa.dictionary(pa.int32(), pa.string())),
        ("think_s", pa.float64()),
        ("kind", pa.dictionary(pa.int32(), pa.string())),
        ("stop", pa.dictionary(pa.int32(), pa.string())),
        ("agent", pa.dictionary(pa.int32(), pa.string())),
        ("ends_session", pa.bool_()),
    ]
)
"""Columns after the log's: what an arrival has besides."""

_PROCESS: Final = "trace-"
_KEY_BYTES: Final = 16
_ROWS_AT_ONCE: Final = 65_536
_LEFT_NULL: Final = dict.fromkeys(SCHEMA.names)


def write(trace: Trace, path: Path) -> None:
    """One file, which has its name only when it is whole. Times are kept to the microsecond,
    counted from 1970, and TTFT and service times as 32-bit floats. Raises OSError."""
    about = Written(trace.name, trace.format, trace.block_tokens, trace.times, trace.rules)
    version = {b"preheat.log_version": str(journal.VERSION).encode()}
    schema = pa.schema([*SCHEMA, *MORE], metadata=version | metadata_of(about))
    part = path.with_name(path.name + ".part")
    rows = _rows(trace)
    try:
        with pq.ParquetWriter(part, schema, compression="zstd") as writer:
            while batch := list(islice(rows, _ROWS_AT_ONCE)):
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _rows(trace: Trace) -> Iterator[dict[str, Any]]:
    lineage = _Lineage()
    for number, one in enumerate(trace.arrivals):
        blocks = _whole(one, trace.block_tokens)
        yield (
            _LEFT_NULL
            | {
                "at": round(one.at * 1_000_000),
                "process": _PROCESS,
                "number": number,
                "tenant": one.tenant,
                "model": one.model,
                "key": one.key.to_bytes(_KEY_BYTES, "big") if one.key >= 0 else None,
                "sampled": one.sampled,
                "session": _short(one.session),
                "layer": "forward",
                "provenance": "client",
                "input_tokens": _known(one.input_tokens),
                "output_tokens": _known(one.output_tokens),
                "answer_bytes": min(one.size_bytes, 2**32 - 1),
                "ttft_s": _known(one.ttft_s),
                "service_s": _known(one.service_s),
                "block_unit": f"{TOKENS_UNIT}{trace.block_tokens or 1}",
            }
            | lineage.of(number, blocks)
            | {
                "name": one.id,
                "session_name": one.session,
                "turn": one.turn,
                "adapter": one.adapter,
                "think_s": one.think_s,
                "kind": one.kind,
                "stop": one.stop,
                "agent": one.agent,
                "ends_session": one.ends_session,
            }
        )


class _Lineage:
    """Finds each row's parent: ids are chained, so whoever first had the last block that is known
    had all before it."""

    def __init__(self) -> None:
        self._first_row: dict[int, int] = {}

    def of(self, number: int, blocks: Sequence[int]) -> dict[str, Any]:
        """The row's columns of lineage."""
        shared = 0
        for block in blocks:
            if block not in self._first_row:
                break
            shared += 1
        parent = self._first_row[blocks[shared - 1]] if shared else None
        new = blocks[shared:]
        self._first_row.update(dict.fromkeys(new, number))
        return {
            "parent_process": None if parent is None else _PROCESS,
            "parent_number": parent,
            "shared_blocks": shared,
            "new_blocks": new,
        }


def _whole(one: Arrival, block_tokens: int) -> Sequence[int]:
    """Its blocks without a partial one."""
    return one.blocks[: max(0, one.input_tokens) // block_tokens] if block_tokens else ()


def _short(session: str) -> bytes | None:
    return blake2b(session.encode(), digest_size=8).digest() if session else None


def _known(value: float) -> float | None:
    return None if value < 0 else value
