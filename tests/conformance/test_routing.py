"""Every routing policy: whoever is chosen is one of those asked about, and the same input gives the
same choice."""

import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.core.placing import Candidate, Placing
from preheat.core.routing import POLICIES, RoutingPolicy

every_policy = pytest.mark.parametrize("name", POLICIES)

seconds = st.floats(0.0, 1e4)
counts = st.integers(0, 300)
candidates = st.builds(
    Candidate,
    number=st.just(0),
    overlap_tokens=st.integers(0, 4_000),
    loadable_tokens=counts,
    load_s=seconds,
    miss_s=seconds,
    queue_s=seconds,
    in_flight=counts,
    waiting=counts,
    prefill_tokens=st.integers(0, 10**6),
    kv_blocks=counts,
    kv_capacity_blocks=counts,
    price=seconds,
)


@st.composite
def askings(draw: Any) -> list[tuple[Placing, list[Candidate], float]]:
    """Requests with the workers of the moment, of which some leave and come back."""
    asked = []
    now = 0.0
    for _ in range(draw(st.integers(1, 12))):
        now += draw(st.floats(0.0, 1e6))
        blocks = draw(st.lists(st.integers(0, 20), max_size=6, unique=True))
        placing = Placing(
            input_tokens=draw(st.integers(0, 5_000)),
            blocks=blocks,
            block_tokens=draw(st.sampled_from([0, 16, 512])),
            session=draw(st.sampled_from(["", "a", "b"])),
        )
        numbers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
        workers = [draw(candidates) for _ in numbers]
        for worker, number in zip(workers, numbers, strict=True):
            worker.number = number
        asked.append((placing, workers, now))
    return asked


def choices(policy: RoutingPolicy, asked: Sequence[Any]) -> list[int]:
    given_answers = []
    for placing, workers, now in asked:
        place = policy.choose(placing, workers, now)
        given_answers.append(place)
        policy.finished(placing, workers[place].number, now)
    return given_answers


@every_policy
@settings(deadline=None, max_examples=25)
@given(asked=askings())
def test_it_names_one_of_those_asked_about_and_the_same_input_alike(
    name: str, asked: list[Any]
) -> None:
    chosen = choices(POLICIES[name](), asked)
    places = [range(len(workers)) for _, workers, _ in asked]
    assert all(place in allowed for place, allowed in zip(chosen, places, strict=True))
    assert chosen == choices(POLICIES[name](), asked)


@every_policy
def test_a_request_of_which_nothing_is_known_goes_somewhere_from_the_first(name: str) -> None:
    policy = POLICIES[name]()
    assert policy.choose(Placing(0), [Candidate(7)], 0.0) == 0
    assert policy.choose(Placing(0), [Candidate(7), Candidate(3)], 0.0) in {0, 1}


@every_policy
def test_what_it_is_asked_about_it_does_not_change(name: str) -> None:
    placing = Placing(2_000, [1, 2, 3], 512, "a")
    workers = [Candidate(number, in_flight=number, miss_s=1.0) for number in range(4)]
    before = [repr(worker) for worker in workers]
    POLICIES[name]().choose(placing, workers, 0.0)
    assert [repr(worker) for worker in workers] == before


@every_policy
def test_equal_and_idle_workers_all_get_something(name: str) -> None:
    """Of many unrelated requests, each ended before the next comes."""
    policy = POLICIES[name]()
    shares = [0] * 4
    in_flight: list[tuple[Placing, int]] = []
    for number in range(400):
        placing = Placing(1_024, [2 * number, 2 * number + 1], 512, f"s{number}")
        counts = [sum(1 for _, at in in_flight if at == one) for one in range(4)]
        busy = [0.4 * count for count in counts]
        workers = [
            Candidate(one, miss_s=0.1, queue_s=busy[one], in_flight=counts[one]) for one in range(4)
        ]
        place = policy.choose(placing, workers, float(number))
        shares[place] += 1
        in_flight.append((placing, place))
        if len(in_flight) > 6:
            policy.finished(*in_flight.pop(0), float(number))
    assert min(shares) >= 20


@every_policy
def test_its_memory_does_not_grow_with_the_requests_it_has_seen(name: str) -> None:
    options: dict[str, dict[str, int]] = {
        "smg": {"tree_blocks": 2_000},
        "vllm_router": {"tree_blocks": 2_000},
        "production_stack": {"trie_blocks": 2_000},
        "bounded_hash": {"window": 100},
    }
    policy = POLICIES[name](**options.get(name, {}))
    rng = random.Random(1)

    def serve(start: int, end: int) -> None:
        for number in range(start, end):
            placing = Placing(2_048, [4 * number + place for place in range(4)], 512)
            workers = [Candidate(one, in_flight=rng.randrange(9), miss_s=1.0) for one in range(4)]
            policy.finished(placing, policy.choose(placing, workers, float(number)), number + 0.5)

    serve(0, 1_500)
    tracemalloc.start()
    try:
        serve(1_500, 5_000)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 200_000


@every_policy
def test_after_requests_that_took_next_to_nothing_a_long_one_goes_somewhere(name: str) -> None:
    policy = POLICIES[name]()
    for now, miss_s in enumerate([5e-324, 5e-324, 1e4, 1e4, 0.0]):
        workers = [Candidate(one, miss_s=miss_s, queue_s=miss_s) for one in range(3)]
        assert policy.choose(Placing(1_000, [1], 512), workers, float(now)) in range(3)
