"""What a reader of one format is, and what it is given: files, rules, and somebody who hears of
lines that can't be read."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Annotated, Any, Final, Literal, NoReturn, Protocol, TypeVar

import msgspec
from msgspec import Meta

from preheat.errors import TraceError
from preheat.traces.arrival import Arrival, BadLine
from preheat.traces.rules import Rules
from preheat.traces.source import DAMAGE, LINE_BYTES, Head, Source

Progress = Callable[[str, int], None]
"""Told now and then which file is read, and how many of its lines or records have been; with no
file, how many requests have been drawn."""

UNSORTED_RULE: Final = "What wasn't in order of time was sorted; equal times keep the files' order."

MOST: Final = 10**12
"""Tokens, seconds, or whatever is counted: more is a mistake,
and would overflow sums or take for ever."""

Count = Annotated[int, Meta(ge=0, le=MOST)]
Amount = Annotated[float, Meta(ge=0, le=MOST)]

_MOST_BAD_KEPT: Final = 100
_MOST_DIGITS: Final = 20
_LINES_A_STEP: Final = 256
_DRAWN_A_STEP: Final = 4_096
_BOM: Final = b"\xef\xbb\xbf"

Record_co = TypeVar("Record_co", covariant=True)


class Decoder(Protocol[Record_co]):
    """Of JSON, into one type."""

    def decode(self, buf: bytes, /) -> Record_co:
        """Raises msgspec.MsgspecError."""


class Draft(msgspec.Struct, kw_only=True):
    """What a reader made of its files. Arrivals needn't be in order.

    `is_dated`: their times are on a calendar, so the first one becomes second 0.
    """

    arrivals: Sequence[Arrival]
    block_tokens: int = 0
    times: Literal["measured", "rule", "order"] = "measured"
    is_dated: bool = False
    is_ordered: bool = False


class Format(msgspec.Struct, frozen=True):
    """One format: whether a file that begins so is one, and how such files are read together."""

    recognises: Callable[[Head], bool]
    read: Callable[[Sequence[Source], "Reading"], Draft]


class Reading:
    """One call of `read`, as its reader sees it."""

    def __init__(
        self, rules: Rules, on_bad: Literal["skip", "fail"], progress: Progress | None
    ) -> None:
        self.rules = rules
        self.told: list[str] = []
        self.bad: list[BadLine] = []
        self.skipped = 0
        self.has_sessions = False
        self._is_fatal = on_bad == "fail"
        self._progress = progress
        self._drawn = 0

    def tell(self, rule: str) -> None:
        """A rule that was used, as a sentence; the same one once."""
        if rule not in self.told:
            self.told.append(rule)

    def refuse(self, source: Source, line: int, why: str) -> None:
        """A line (from 1) that can't be read. Raises TraceError where that is fatal."""
        if self._is_fatal:
            raise TraceError(
                f"{source.name}:{line}: {why}; bad lines can be skipped instead (--on-bad skip)"
            )
        self.skipped += 1
        if len(self.bad) < _MOST_BAD_KEPT:
            self.bad.append(BadLine(source.name, line, why))

    def step(self, source: Source, count: int) -> None:
        """So much of a file has been read."""
        if self._progress is not None:
            self._progress(source.name, count)

    def drawn(self, count: int) -> None:
        """So many more requests have been made up."""
        step = self._drawn // _DRAWN_A_STEP
        self._drawn += count
        if self._progress is not None and self._drawn // _DRAWN_A_STEP > step:
            self._progress("", self._drawn)

    def lines(self, source: Source) -> Iterator[tuple[int, bytes]]:
        """Lines that aren't blank, with their numbers, up to where the file is damaged."""
        number = 0
        with source.open() as file:
            try:
                while line := file.readline(LINE_BYTES + 1):
                    number += 1
                    if number == 1:
                        line = line.removeprefix(_BOM)
                    if number % _LINES_A_STEP == 0:
                        self.step(source, number)
                    if len(line) > LINE_BYTES:
                        self.refuse(source, number, f"a line of more than {LINE_BYTES} bytes")
                        return
                    if not line.isspace():
                        yield number, line
            except DAMAGE:
                self.refuse(source, number + 1, "the file is cut off or damaged here")
        self.step(source, number)

    def records(
        self, source: Source, decoder: Decoder[Record_co]
    ) -> Iterator[tuple[int, Record_co]]:
        """The lines that hold such an object, with their numbers."""
        decode = decoder.decode
        for number, line in self.lines(source):
            try:
                record = decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self.refuse(source, number, said(error))
                continue
            yield number, record

    def rows(self, source: Source, kind: type[Any]) -> Iterator[tuple[int, Any]]:
        """The rows of a table with named columns, as such structs, with their lines' numbers."""
        columns: list[str] = []
        split = ","
        floats = [field.name for field in msgspec.structs.fields(kind) if _is_float(field.type)]
        for number, line in self.lines(source):
            try:
                text = line.decode().rstrip("\r\n")
                if not columns:
                    split = "\t" if "\t" in text else ","
                    columns = text.split(split)
                    continue
                row = _row(kind, columns, text.split(split), floats)
            except (msgspec.MsgspecError, ValueError) as error:
                self.refuse(source, number, said(error))
                continue
            yield number, row

    def data(self, source: Source, record_bytes: int) -> bytes:
        """All bytes of a file of fixed records, up to where it is damaged, in whole records."""
        whole = bytearray()
        with source.open() as file:
            try:
                while more := file.read1(1 << 20):
                    whole += more
                    self.step(source, len(whole) // record_bytes)
            except DAMAGE:
                self.refuse(
                    source, len(whole) // record_bytes + 1, "the file is cut off or damaged here"
                )
                return bytes(whole[: len(whole) // record_bytes * record_bytes])
        rest = len(whole) % record_bytes
        if rest:
            self.refuse(
                source,
                len(whole) // record_bytes + 1,
                f"a record of {rest} bytes, where each has {record_bytes}",
            )
        return bytes(whole[: len(whole) - rest])


def said(error: Exception) -> str:
    """What is wrong with a line, none of whose text is told."""
    if isinstance(error, UnicodeDecodeError):
        return "it isn't UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).replace("`$.", "`")


def is_whole(word: bytes) -> bool:
    """Whether it is a whole number, of no more digits than any trace has (2^64 has 20)."""
    return word.isdigit() and len(word) <= _MOST_DIGITS


def finite(*values: float) -> None:
    """Raises ValueError where one is infinite or no number."""
    if not all(map(isfinite, values)):
        raise ValueError("a number that isn't finite")


def too_many(count: int, rules: Rules) -> NoReturn:
    """Raises TraceError: rates would give too many requests."""
    raise TraceError(
        f"these rates give {count:,} requests and more, above most_requests "
        f"({rules.most_requests:,}): take fewer days or clients, or a rate_scale below 1 "
        "(--rule days=1 --rule rate_scale=0.01)"
    )


def _row(kind: type[Any], columns: list[str], cells: list[str], floats: list[str]) -> Any:
    if len(cells) != len(columns):
        raise ValueError(f"{len(cells)} columns instead of {len(columns)}")
    row = msgspec.convert(dict(zip(columns, cells, strict=True)), kind, strict=False)
    finite(*(getattr(row, name) for name in floats))
    return row


def _is_float(kind: Any) -> bool:
    """Also where it is annotated with its least value."""
    return getattr(kind, "__origin__", kind) is float
