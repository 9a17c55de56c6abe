"""The virtual-time benchmark of warm-ups: every request is answered, and chunks stay short."""

import random

import pytest

from benchmarks import warm_foreground
from benchmarks.warm_foreground import SLO_RATIO, Arm, Simulation, arms, load_of
from preheat.core.costs import ServiceModel
from preheat.core.warmup import Pace

SERVICE = ServiceModel()


def test_short_chunks_in_idle_moments_keep_the_p99_and_whole_prefixes_dont() -> None:
    load = load_of(SERVICE, 20_000, 0.7, random.Random(7))
    without = Simulation(load, SERVICE, Arm("none", None)).run()
    assert without.warmed_tokens == 0
    slack_s = (SLO_RATIO - 1) * without.p99_s
    told = {arm.name: Simulation(load, SERVICE, arm).run() for arm in arms(slack_s)}
    assert told["slack"].longest_chunk_s <= slack_s
    assert told["slack"].p99_s <= SLO_RATIO * without.p99_s
    assert told["whole"].p99_s > told["slack_x4"].p99_s > told["slack"].p99_s >= without.p99_s
    for name, one in told.items():
        share = one.warm_s / (one.took_s - one.live_s)
        if name == "rested":
            assert 0.3 <= share <= 0.8
            assert without.mean_s < one.mean_s < told["slack"].mean_s
        else:
            assert share == pytest.approx(1.0, rel=0.01)  # no idle second is left


def test_a_request_is_held_up_by_one_chunk_at_most_when_it_comes_to_an_idle_server() -> None:
    load = warm_foreground.Load([10.0, 20.0, 30.0], [0.1, 0.1, 0.1])
    pace = Pace(slack_s=0.05)
    one = Simulation(load, SERVICE, Arm("slack", pace))
    one.run()
    held_s = [ttft_s - 0.1 for ttft_s in one._ttft_s]
    assert all(-1e-9 <= one_s <= pace.slack_s for one_s in held_s)
    assert max(held_s) > 0.001
