"""What a benchmark hands back, and how it is shown while it runs and afterwards."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

SILENT_LINE_EVERY_S = 5.0  # progress into a file or a log: a line now and then, not a flood


class BenchmarkError(Exception):
    """The benchmark can't run, or what it measured isn't what it claims to measure."""


class Result(msgspec.Struct, frozen=True):
    """The figures of one run, under names that stay, and what they depend on."""

    figures: dict[str, float]
    settings: dict[str, object]


class Progress:
    """One line on stderr that tells how far the run is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started_at = time.monotonic()
        self._shown_at = self._started_at
        self._live = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """A step of the run; always shown."""
        self._write(text, end="\n")

    def tick(self, text: str) -> None:
        """How far a step is; shown in place on a terminal, seldom elsewhere."""
        now = time.monotonic()
        if now - self._shown_at < (0.2 if self._live else SILENT_LINE_EVERY_S):
            return
        self._shown_at = now
        self._write(text, end="" if self._live else "\n")

    def _write(self, text: str, *, end: str) -> None:
        elapsed_s = time.monotonic() - self._started_at
        start = "\r\x1b[K" if self._live else ""
        print(f"{start}{self._name} {elapsed_s:6.1f} s  {text}", end=end, file=sys.stderr)
        sys.stderr.flush()


def table(rows: Sequence[Sequence[str]], *, head: Sequence[str]) -> str:
    """A plain table; the first column is text, the others are right-aligned."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


def figures_table(figures: Mapping[str, float]) -> str:
    rows = [[name, plain(value)] for name, value in figures.items()]
    return table(rows, head=["figure", "value"])


def plain(value: float) -> str:
    """A number as people write it: 12,345 or 13.4 or 0.00132."""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The least-squares slope of y over x; 0 where fewer than two points stand."""
    if len({x for x, _ in points}) < 2:
        return 0.0
    return float(statistics.linear_regression(*zip(*points, strict=True)).slope)


def machine(tools: Mapping[str, Sequence[str]] | None = None) -> dict[str, object]:
    """What the figures depend on besides settings; `tools`: by name, what tells its version."""
    facts: dict[str, object] = {
        "cpu": _after("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    for name, command in (tools or {}).items():
        facts[name] = first_line(command)
    return facts


def _after(path: str, label: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(label):
            return line.partition(":")[2].strip()
    return "unknown"


def first_line(command: Sequence[str]) -> str:
    """What a command says first, anywhere: nginx on stderr, wrk with an exit code of 1."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return next(iter((done.stdout + done.stderr).strip().splitlines()), "unknown")
