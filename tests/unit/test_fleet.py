"""Workers behind a router, clients before it."""

from collections.abc import Sequence

import pytest

from preheat.core.routing import POLICIES, Candidate, Placing
from preheat.replay.fleet import Fleet, run
from preheat.replay.measures import measures_of
from replay_parts import BLOCK, TOKEN_S, arrival, fleet_spec


def test_every_request_is_served_once_and_costs_what_its_misses_cost() -> None:
    arrivals = [arrival(float(i), [1, 2, 10 + i]) for i in range(6)]
    made = run(arrivals, BLOCK, Fleet(fleet_spec(2), POLICIES["round_robin"]()))
    assert [job.worker for job in made.jobs] == [0, 1, 0, 1, 0, 1]
    assert [job.cached_blocks for job in made.jobs] == [0, 0, 2, 2, 2, 2]
    found = measures_of(made, 2)
    assert found.prefill_s == pytest.approx((2 * 31 + 4 * 11) * TOKEN_S)
    assert found.prefill_share == pytest.approx((2 * 31 + 4 * 11) / (6 * 31))
    assert found.hit_token_ratio == pytest.approx(4 * 20 / (6 * 31))
    assert found.work_max_mean_ratio == pytest.approx(1.0)
    assert (found.requests, found.refused) == (6, 0)


def test_one_shared_memory_is_warm_for_all() -> None:
    arrivals = [arrival(float(i), [1, 2, 10 + i]) for i in range(4)]
    fleet = Fleet(fleet_spec(2, is_shared=True), POLICIES["round_robin"]())
    assert [job.cached_blocks for job in run(arrivals, BLOCK, fleet).jobs] == [0, 2, 2, 2]


class Watching:
    """Takes turns, and notes the prices it was told."""

    def __init__(self) -> None:
        self.prices: list[tuple[float, ...]] = []

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        self.prices.append(tuple(one.price for one in candidates))
        return (len(self.prices) - 1) % len(candidates)

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass


def test_a_router_is_told_what_a_place_is_worth_where_what_was_pushed_out_comes_again() -> None:
    ours, theirs = [1, 2, 3], [4, 5, 6]
    paths = [ours, [7], theirs, [7], ours, [7], [7]]  # the odd ones go to the second worker
    arrivals = [arrival(float(i), path) for i, path in enumerate(paths)]
    watching = Watching()
    run(arrivals, BLOCK, Fleet(fleet_spec(2, capacity_blocks=4), watching))
    assert watching.prices[:5] == [(0.0, 0.0)] * 5
    # Three blocks and then three more left the first worker, which remembers four: of the prompt that
    # came again its root, of ten tokens.
    assert watching.prices[-1] == (pytest.approx(BLOCK * TOKEN_S / 6, rel=0.02), 0.0)


def test_whoever_waits_for_memory_that_others_share_gets_it_in_the_end() -> None:
    arrivals = [arrival(0.0, range(100 * i, 100 * i + 9)) for i in range(1, 7)]
    spec = fleet_spec(3, capacity_blocks=4, is_shared=True)  # twelve in all, nine and a tail each
    made = run(arrivals, BLOCK, Fleet(spec, POLICIES["round_robin"]()))
    assert all(job.first_at is not None or job.refused for job in made.jobs)


def test_a_closed_loop_waits_for_its_answers_and_an_open_one_does_not() -> None:
    arrivals = [
        arrival(0.0, range(10), session="a"),
        arrival(0.01, range(11), session="a", think_s=0.5),
        arrival(0.02, range(12), session="a"),
    ]
    spec = fleet_spec()
    closed = run(arrivals, BLOCK, Fleet(spec, POLICIES["cost"]()), loop="closed")
    opened = run(arrivals, BLOCK, Fleet(spec, POLICIES["cost"]()), speed=2.0)
    ends = [job.ended_at for job in closed.jobs]
    assert [job.arrived_at for job in closed.jobs] == pytest.approx(
        [0.0, ends[0] + 0.5, ends[1] + 0.01]
    )
    assert [job.arrived_at for job in opened.jobs] == [0.0, 0.005, 0.01]


def test_a_prompt_longer_than_a_memory_is_counted_as_refused() -> None:
    fleet = Fleet(fleet_spec(1, capacity_blocks=3), POLICIES["round_robin"]())
    made = run([arrival(0.0, range(9)), arrival(1.0, [1])], BLOCK, fleet)
    found = measures_of(made, 1)
    assert (found.requests, found.refused, found.ttft.count) == (2, 1, 1)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_trace_gives_the_same_run_under_every_rule(name: str) -> None:
    arrivals = [
        arrival(0.003 * i, [i % 3, 10 + i % 7, 100 + i % 13], session=str(i % 5))
        for i in range(200)
    ]

    def once() -> list[tuple[int, float | None]]:
        made = run(arrivals, BLOCK, Fleet(fleet_spec(3, 12), POLICIES[name]()))
        return [(job.worker, job.first_at) for job in made.jobs]

    found = once()
    assert found == once()
    assert all(at is not None for _, at in found)
