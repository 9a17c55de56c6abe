"""What `benchmarks routing` counts, and how its parts are put together."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks import routing
from benchmarks.report import BenchmarkError, Progress
from benchmarks.routing_scores import Cell, Scores, counts_of, standing
from preheat.traces.arrival import Trace
from replay_parts import arrival

RULES = "preheat,round_robin"
CELL = "chats_1m_80"


def scores(mean_s: list[float], p99_s: list[float]) -> Scores:
    return Scores(mean_s, p99_s, [0.5] * len(mean_s), [0.5] * len(mean_s), [1.0] * len(mean_s))


def asked(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    routing.add_options(parser)
    return parser.parse_args(["--rules", RULES, "--seeds", "2", *arguments])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ten minutes: in the first half nothing comes back, in the second everything is asked twice."""
    early = [arrival(3.0 * i, [100 + i, 1_000 + i], input_tokens=1_025) for i in range(100)]
    late = [arrival(300.0 + 3.0 * i, [i // 8], input_tokens=513) for i in range(101)]
    trace = Trace(name="small", format="test", arrivals=[*early, *late], block_tokens=512)
    monkeypatch.setattr(routing, "chats", lambda: trace)
    monkeypatch.setattr("preheat.replay.side_by_side._cores", lambda: 1)
    routing.traffic_of.cache_clear()
    yield
    routing.traffic_of.cache_clear()


@pytest.mark.usefixtures("small")
def test_only_what_comes_in_the_second_half_is_counted() -> None:
    _, warm_s = routing.traffic_of("chats", 30.0, 1)
    assert warm_s == 300.0
    cell = Cell("chats", 1_000_000, 0.8)
    # Thirteen prompts are asked eight times each (the last five): round robin sends each to every worker.
    assert routing.served(cell, 30.0, 1.0, "round_robin", 1)[3] == 0.0
    # Ours computes each once. The hundred prompts of the first half, never asked again, don't count.
    assert routing.served(cell, 30.0, 1.0, "preheat", 1)[3] == pytest.approx(88 * 512 / (101 * 513))


@pytest.mark.usefixtures("small")
def test_cells_measured_apart_come_to_what_they_come_to_together(tmp_path: Path) -> None:
    progress = Progress("routing")
    parts = []
    for name in ("chats_1m_50", CELL):
        part = routing.run(asked("--cells", name), progress)
        parts.append(tmp_path / f"{name}.json")
        parts[-1].write_text(json.dumps({"figures": part.figures, "settings": part.settings}))
    whole = routing.run(asked("--cells", f"{CELL},chats_1m_50"), progress)
    names = [word for part in parts for word in ("--earlier", str(part))]
    merged = routing.run(asked("--cells", CELL, *names), progress)
    assert merged.figures == whole.figures
    assert list(merged.figures) == list(whole.figures)
    assert whole.figures["cells"] == 2
    with pytest.raises(BenchmarkError, match="the same --rules and seeds"):
        routing.run(asked("--seeds", "3", *names), progress)


def test_what_is_no_cell_rule_or_result_is_told(tmp_path: Path) -> None:
    progress = Progress("routing")
    with pytest.raises(BenchmarkError, match="no cell chats_2m_80; there are chats_1m_50"):
        routing.run(asked("--cells", "chats_2m_80"), progress)
    with pytest.raises(BenchmarkError, match="no rule nonsense"):
        routing.run(asked("--rules", "nonsense"), progress)
    with pytest.raises(BenchmarkError, match="isn't a result"):
        routing.run(asked("--earlier", str(tmp_path / "none.json")), progress)


def test_who_has_won_and_who_is_only_unbeaten() -> None:
    made = {
        "preheat": scores([1.0, 1.1], [9.0, 9.2]),
        "cost": scores([2.0, 2.1], [9.1, 9.3]),
        "cost_4": scores([1.5, 1.6], [8.0, 9.4]),
    }
    assert standing(made) == {
        "won": False,
        "won_of_table": True,
        "won_mean": True,
        "won_p99": False,
        "unbeaten": True,  # two seeds say little of a p99 that is a second shorter in one of them
    }
    made["cost_4"] = msgspec.structs.replace(made["cost_4"], p99_s=[8.0, 8.2])
    cell = Cell("agents", 1_000_000, 0.7)
    assert counts_of({cell: made})["agents_cells_unbeaten"] == 0.0
    assert counts_of({cell: made})["agents_cells"] == 1.0
