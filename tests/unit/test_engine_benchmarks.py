"""What `engine_routing` and `restart_gate` make of outcomes, and the chats they send."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.engine_routing import figures as routing_figures
from benchmarks.families import Chats, Shape, poisson, write_trace
from benchmarks.restart_scores import Block
from benchmarks.restart_scores import figures as restart_figures
from preheat.lab.load.exchange import Outcome
from preheat.lab.load.trace import Trace

SHAPE = Shape(families=5, prefix_tokens=40, own_tokens=6, answer_tokens=2)


def outcome(at_s: float, ttft_s: float | None, cached: int = 0, worker: str = "") -> Outcome:
    error = "reset" if ttft_s is None else ""
    return Outcome(
        id="",
        at_s=at_s,
        ttft_s=ttft_s,
        input_tokens=100,
        cached_tokens=cached,
        worker=worker,
        error=error,
    )


def test_arms_ask_the_same_families_in_the_same_order_with_texts_of_their_own() -> None:
    one, other = (Chats(SHAPE, pattern="p", texts=arm) for arm in ("a", "b"))
    mine = list(itertools.islice(one, 60))
    others = list(itertools.islice(other, 60))
    assert [family for family, _ in mine] == [family for family, _ in others]
    systems = [
        {json.loads(body)["messages"][0]["content"] for _, body in it} for it in (mine, others)
    ]
    assert len(systems[0]) == len(systems[1]) == len({family for family, _ in mine})
    assert not systems[0] & systems[1]
    assert len({body for _, body in mine}) == 60


def test_families_are_as_popular_as_their_places_say() -> None:
    asked = Counter(
        family for family, _ in itertools.islice(Chats(SHAPE, pattern="p", texts="t"), 5_000)
    )
    total = sum(1 / place for place in range(1, 6))
    for family in range(5):
        assert asked[family] / 5_000 == pytest.approx(1 / (family + 1) / total, abs=0.03)


def test_a_trace_of_them_can_be_played(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    times = itertools.islice(poisson("p", 10.0), 400)
    write_trace(path, Chats(SHAPE, pattern="p", texts="t"), times)
    requests = list(Trace(path).read(""))
    assert len(requests) == 400
    assert requests[-1].at_s == pytest.approx(40.0, rel=0.2)
    assert json.loads(requests[0].body)["stream"] is True


def test_ours_is_compared_with_whichever_other_is_best() -> None:
    seen = {
        "preheat": [[outcome(0, 1.0, 60)], [outcome(0, 1.0, 60)]],
        "round_robin": [[outcome(0, 4.0, 20)], [outcome(0, 4.0, 20)]],
        "vllm_router": [[outcome(0, 2.0, 50)], [outcome(0, 2.0, 50)]],
        "preheat_files": [[outcome(0, 0.1, 90)], [outcome(0, 0.1, 90)]],
    }
    told = routing_figures(seen)
    assert told["mean_ttft_ratio_best_other"] == told["mean_ttft_ratio_best_other_high"] == 0.5
    assert told["hits_ratio_best_other"] == pytest.approx(1.2)
    assert told["preheat_files_mean_ttft_s"] == pytest.approx(0.1)


def test_blocks_that_differ_widen_the_interval() -> None:
    seen = {
        "preheat": [[outcome(0, 1.0)], [outcome(0, 3.0)]],
        "round_robin": [[outcome(0, 2.0)], [outcome(0, 2.0)]],
    }
    told = routing_figures(
        {arm: [[*block, outcome(0, 2.0, 1)] for block in it] for arm, it in seen.items()}
    )
    assert told["mean_ttft_ratio_best_other"] == 1.0
    assert told["mean_ttft_ratio_best_other_low"] == pytest.approx(0.75)
    assert told["mean_ttft_ratio_best_other_high"] == pytest.approx(1.25)


def block(ttft_s: float, back_s: float) -> Block:
    """Requests twice a second, to both in turn; server `a` is away from 30 s on until it is back, and
    one request is lost then."""
    outcomes = [outcome(30.0, None)]
    for number in range(300):
        at_s = number / 2
        is_away = 30.0 <= at_s < 30.0 + back_s
        worker = "b" if number % 2 or is_away else "a"
        outcomes.append(outcome(at_s, ttft_s if is_away else 0.1, 50, worker))
    return Block(outcomes, [30.0, 90.0], [1.0, 1.0])


def test_the_minute_after_each_restart_counts_and_traffic_is_full_when_the_share_is_back() -> None:
    seen = {
        "gate": [block(0.2, 20.0)],
        "nothing": [block(2.0, 40.0)],
        "undisturbed": [block(0.1, 0.0)],
    }
    told = restart_figures(seen, 60.0)
    assert told["gate_requests"] == 240
    assert told["gate_errors"] == 1
    assert told["gate_p95_ratio"] == pytest.approx(0.1)
    assert told["deploy_p95_ratio_kept"] == pytest.approx(2.0)
    assert told["nothing_p95_ratio_undisturbed"] == pytest.approx(20.0)
    assert told["gate_hits"] == 0.5
    # Ten seconds with four fifths of half of the requests: eight of ten are beyond its return.
    assert told["gate_full_traffic_most_s"] == 18.0
    assert told["nothing_full_traffic_most_s"] == 38.0
