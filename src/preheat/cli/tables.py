"""A trace and tables as plain text, for every command that prints a report."""

from textwrap import wrap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from preheat.replay.report import Table, Trace

    Cell = str | float | int | None

WIDE: Final = 118
"""Characters a line, so that two windows fit beside each other on most screens."""


def text_of(table: "Table") -> str:
    """A table as plain text: words to the left, numbers to the right, sentences wrapped."""
    rows = [list(table.columns), *([_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_text = [
        place == 0 or (bool(cells) and all(isinstance(cell, str) for cell in cells))
        for place, cells in enumerate(_columns(table))
    ]
    lines = [table.title, *_wrapped(table.note)]
    for row in rows:
        cells = zip(row[:-1], widths, is_text, strict=False)
        start = "".join(f"{text.ljust(w) if left else text.rjust(w)}  " for text, w, left in cells)
        if is_text[-1]:
            lines += _wrapped(row[-1], start) or [start.rstrip()]
        else:
            lines.append(start + row[-1].rjust(widths[-1]))
    return "\n".join([*lines, *_wrapped(table.verdict)])


def _wrapped(text: str, start: str = "") -> list[str]:
    return wrap(
        text,
        WIDE,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
        break_long_words=False,
    )


def text_of_trace(trace: "Trace") -> str:
    """What was read: its name and size, what was done to it before, and what was skipped."""
    lines = [
        f"{trace.name}: {trace.requests:,} requests ({trace.format}),"
        f" {trace.span_s:,.0f} s, {trace.input_tokens:,} prompt tokens",
        *(line for rule in trace.rules for line in _wrapped(rule, "  ")),
    ]
    if trace.skipped_lines:
        skipped = trace.skipped_lines
        were = "line was" if skipped == 1 else "lines were"
        lines.append(f"  {skipped:,} {were} skipped: what couldn't be read.")
    return "\n".join(lines)


def _columns(table: "Table") -> "list[list[Cell]]":
    return [[row[place] for row in table.rows] for place in range(len(table.columns))]


def _cell(cell: "Cell") -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str | int):
        return str(cell)
    if abs(cell) >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.3f}" if abs(cell) < 1 else f"{cell:.2f}"
