"""Every admission policy, and what the doorkeeper in particular promises."""

import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_parts import Desk, key_of, request_for
from preheat.core import admission
from preheat.core.admission.doorkeeper import Doorkeeper
from preheat.core.types import Forward, Hit

KEYS = [key_of(number) for number in range(10)]

every_policy = pytest.mark.parametrize("name", admission.POLICIES)
moves = st.lists(
    st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 9) | st.none()), max_size=100
)


def answers(policy: admission.AdmissionPolicy, moves: list[Any]) -> list[bool]:
    given_answers = []
    for now, (is_seen, candidate, victim) in enumerate(moves):
        if is_seen:
            policy.see(KEYS[candidate], now)
        else:
            leaver = None if victim is None else KEYS[victim]
            given_answers.append(policy.admit(KEYS[candidate], leaver, now))
    return given_answers


@every_policy
@settings(deadline=None, max_examples=60)
@given(moves=moves)
def test_it_answers_yes_or_no_and_the_same_input_alike(name: str, moves: list[Any]) -> None:
    first, second = admission.POLICIES[name](), admission.POLICIES[name]()
    told = answers(first, moves)
    assert all(isinstance(answer, bool) for answer in told)
    assert told == answers(second, moves)


@every_policy
@settings(deadline=None, max_examples=60)
@given(moves=moves)
def test_asking_changes_nothing(name: str, moves: list[Any]) -> None:
    policy, never_asked = admission.POLICIES[name](), admission.POLICIES[name]()
    answers(policy, moves)
    answers(never_asked, [move for move in moves if move[0]])
    for candidate in KEYS[:4]:
        for victim in KEYS[:4]:
            told = policy.admit(candidate, victim, 1e3)
            assert told == policy.admit(candidate, victim, 1e3)
            assert told == never_asked.admit(candidate, victim, 1e3)


@every_policy
def test_where_there_is_room_everybody_comes_in(name: str) -> None:
    policy = admission.POLICIES[name]()
    assert all(policy.admit(key, None, 0.0) for key in KEYS)


@every_policy
def test_its_memory_does_not_grow_with_the_keys_it_has_seen(name: str) -> None:
    policy = admission.POLICIES[name]()
    for number in range(1_000):
        policy.see(key_of(number), number)
    tracemalloc.start()
    try:
        for number in range(1_000, 20_000):
            policy.see(key_of(number), number)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 50_000


# The doorkeeper --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 500), max_size=200),
    st.integers(2, 5),
    st.integers(1_000, 2_000),
)
def test_a_one_hit_wonder_never_displaces_what_was_seen_twice(
    noise: list[int], times: int, wonder: int
) -> None:
    door = Doorkeeper()
    for number in noise:
        door.see(key_of(number), 0.0)
    for _ in range(times):
        door.see(key_of("known"), 0.0)
    door.see(key_of(wonder), 0.0)
    assert not door.admit(key_of(wonder), key_of("known"), 0.0)
    assert door.admit(key_of("known"), key_of(wonder), 0.0)


def test_equals_do_not_displace_each_other() -> None:
    door = Doorkeeper()
    for name in ("a", "b"):
        for _ in range(3):
            door.see(key_of(name), 0.0)
    assert not door.admit(key_of("a"), key_of("b"), 0.0)
    assert not door.admit(key_of("b"), key_of("a"), 0.0)


@pytest.mark.parametrize("fame", [2, 10, 200])
def test_yesterdays_favourite_loses_to_todays(fame: int) -> None:
    window = 1_000
    door = Doorkeeper(window)
    for _ in range(fame):
        door.see(key_of("yesterday"), 0.0)
    for number in range(12 * window):
        door.see(key_of(number), 1.0)
    for _ in range(2):
        door.see(key_of("today"), 2.0)
    assert door.admit(key_of("today"), key_of("yesterday"), 2.0)


def test_fame_fades_by_halves_and_not_at_once() -> None:
    window = 1_000
    door = Doorkeeper(window)
    for _ in range(200):
        door.see(key_of("yesterday"), 0.0)
    for number in range(window):
        door.see(key_of(number), 1.0)
    for _ in range(20):
        door.see(key_of("today"), 2.0)
    assert not door.admit(key_of("today"), key_of("yesterday"), 2.0)


@pytest.mark.parametrize("window", [-1, 0, 1, 2])
def test_a_window_too_small_to_remember_anything_still_answers(window: int) -> None:
    door = Doorkeeper(window)
    for key in KEYS:
        door.see(key, 0.0)
    assert door.admit(KEYS[0], KEYS[1], 0.0) in {True, False}


def zipf_with_scans(seed: int, length: int = 20_000) -> list[int]:
    """Popular keys, and runs of keys that never come back between them."""
    rng = random.Random(seed)
    ranks = range(1, 3_001)
    weights = [rank**-0.9 for rank in ranks]
    popular = iter(rng.choices(ranks, weights, k=length))
    stream: list[int] = []
    fresh = iter(range(10**6, 10**7))
    while len(stream) < length:
        stream += [next(popular) for _ in range(200)]
        stream += [next(fresh) for _ in range(200)]
    return stream[:length]


def hit_ratio(stream: list[int], admit: str) -> float:
    desk = Desk(budget_entries=150, budget_bytes=10**9, evict="lru", admit=admit)
    hits = 0
    for now, name in enumerate(stream):
        request = request_for(name)
        decision = desk.controller.on_request(request, now)
        if isinstance(decision, Hit):
            hits += 1
        else:
            assert isinstance(decision, Forward)
            desk.controller.on_failure(request, "connect", 0.0)
            desk.forward(request_for(name), now)
    return hits / len(stream)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_behind_the_doorkeeper_an_lru_that_is_scanned_hits_no_less(seed: int) -> None:
    stream = zipf_with_scans(seed)
    assert hit_ratio(stream, "doorkeeper") >= hit_ratio(stream, "always")
