"""The evaluation traces, which aren't part of the project: where they are, and how they are read."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import BenchmarkError
from preheat.traces.arrival import Trace
from preheat.traces.reading import read
from preheat.traces.rules import Rules

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def chats(name: str = "conversation") -> Trace:
    """A Mooncake trace."""
    return read([_there(DATA / "mooncake" / f"{name}.part1.jsonl.gz")])


def agents(
    open_sessions: float, seed: int, *, hours: float = 30.0, name: str = "v6_global"
) -> Trace:
    """Weka's sessions by the drawn calendar."""
    rules = Rules(seed=seed, sessions="drawn", open_sessions=open_sessions, hours=hours)
    return read([_there(DATA / "weka_agentic" / f"{name}.jsonl.gz")], rules=rules)


def _there(path: Path) -> Path:
    if not path.exists():
        raise BenchmarkError(f"{path} isn't there: the evaluation traces stand beside the project")
    return path
