"""Every eviction policy, alone and inside an inventory: what is in the table is tested by that."""

import tracemalloc
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from eviction_models import NAIVE
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core_parts import key_of, record_of, sum_of
from preheat.core import admission, eviction
from preheat.core.eviction import EvictionPolicy
from preheat.core.inventory import Inventory
from preheat.core.types import Hit, Invalidation, Key, Traits

KEYS = [key_of(number) for number in range(12)]

keys = st.sampled_from(KEYS)


traits = st.builds(
    Traits,
    cost_s=st.sampled_from([0.001, 0.05, 0.3, 2.0]),
    tokens=st.sampled_from([0, 100, 500, 1_000, 1_500, 4_000]),
)


class Moves(RuleBasedStateMachine):
    """A policy beside the plainest set there is, and its naive model where one is written."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.policy = eviction.POLICIES[name]()
        self.naive = NAIVE[name]() if name in NAIVE else None
        self.held: set[Key] = set()
        self.now = 0.0

    def tell(self, move: str, *told: Any) -> None:
        getattr(self.policy, move)(*told)
        if self.naive is not None:
            getattr(self.naive, move)(*told)

    @rule(key=keys, size_bytes=st.integers(1, 1_000), traits=traits)
    def insert(self, key: Key, size_bytes: int, traits: Traits) -> None:
        if key not in self.held:
            self.now += 1.0
            self.held.add(key)
            self.tell("insert", key, size_bytes, self.now, traits)

    @rule(key=keys, traits=st.none() | traits)
    def touch(self, key: Key, traits: Traits | None) -> None:
        if key in self.held:
            self.now += 1.0
            self.tell("touch", key, self.now, traits)

    @rule(key=keys)
    def remove(self, key: Key) -> None:
        if key in self.held:
            self.held.remove(key)
            self.tell("remove", key)

    @precondition(lambda self: self.held)
    @rule()
    def evict(self) -> None:
        victim = self.next_victim()
        self.held.remove(victim)
        self.tell("remove", victim)

    @precondition(lambda self: self.held)
    @rule()
    def ask(self) -> None:
        self.next_victim()

    def next_victim(self) -> Key:
        victim = self.policy.victim(self.now)
        assert victim in self.held
        assert self.policy.victim(self.now) == victim
        if self.naive is not None:
            assert self.naive.victim(self.now) == victim
        return victim

    @precondition(lambda self: not self.held)
    @rule()
    def ask_in_vain(self) -> None:
        with pytest.raises(LookupError):
            self.policy.victim(self.now)

    @invariant()
    def counts_what_it_holds(self) -> None:
        assert len(self.policy) == len(self.held)

    def teardown(self) -> None:
        """In the end everybody can be evicted, one after the other."""
        for left in range(len(self.held), 0, -1):
            self.evict()
            assert len(self.policy) == left - 1


every_policy = pytest.mark.parametrize("name", eviction.POLICIES)


@every_policy
def test_it_evicts_one_of_those_it_holds_whatever_happens(name: str) -> None:
    run_state_machine_as_test(
        lambda: Moves(name),
        settings=settings(max_examples=40, stateful_step_count=50, deadline=None),
    )


moves = st.lists(st.tuples(st.sampled_from("itre"), st.integers(0, 11)), max_size=80)


def victims(policy: EvictionPolicy[Key], moves: list[tuple[str, int]]) -> Iterator[Key]:
    held: set[Key] = set()
    for now, (move, number) in enumerate(moves):
        key = KEYS[number]
        if move == "i" and key not in held:
            policy.insert(key, number + 1, now)
            held.add(key)
        elif move == "t" and key in held:
            policy.touch(key, now)
        elif move in "re" and held:
            gone = policy.victim(now) if move == "e" else min(held)
            policy.remove(gone)
            held.remove(gone)
            if move == "e":
                yield gone


@every_policy
@settings(deadline=None, max_examples=60)
@given(moves=moves)
def test_the_same_input_gives_the_same_victims(name: str, moves: list[tuple[str, int]]) -> None:
    first, second = eviction.POLICIES[name](), eviction.POLICIES[name]()
    assert list(victims(first, moves)) == list(victims(second, moves))


@every_policy
def test_the_next_victim_may_be_removed_by_others(name: str) -> None:
    policy = eviction.POLICIES[name]()
    for now, key in enumerate(KEYS):
        policy.insert(key, 1, now)
    for left in range(len(KEYS), 0, -1):
        policy.remove(policy.victim(100.0))  # expired or invalidated, say
        assert len(policy) == left - 1
        if left > 1:
            assert policy.victim(100.0) in KEYS


@every_policy
def test_an_entry_that_everybody_uses_outlives_one_that_nobody_does(name: str) -> None:
    policy = eviction.POLICIES[name]()
    policy.insert(KEYS[0], 1, 0.0)
    policy.insert(KEYS[1], 1, 1.0)
    for now in (2.0, 3.0, 4.0):
        policy.touch(KEYS[0], now)
    assert policy.victim(5.0) == KEYS[1]


@every_policy
def test_an_entry_that_comes_back_has_no_past(name: str) -> None:
    policy = eviction.POLICIES[name]()
    policy.insert(KEYS[0], 1, 0.0)
    policy.touch(KEYS[0], 1.0)
    policy.remove(KEYS[0])
    policy.insert(KEYS[0], 1, 2.0)
    policy.insert(KEYS[1], 1, 3.0)
    assert policy.victim(4.0) == KEYS[0]


@every_policy
def test_coming_and_going_takes_no_more_room_than_staying(name: str) -> None:
    policy = eviction.POLICIES[name]()

    def churn(rounds: int) -> None:
        for number in range(rounds):
            if len(policy) == 20:
                policy.remove(policy.victim(number))
            policy.insert(key_of(number), 1, number)
        while len(policy):
            policy.remove(policy.victim(rounds))

    churn(1_000)
    tracemalloc.start()
    try:
        churn(4_000)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 50_000


@every_policy
def test_being_used_for_ever_takes_no_more_room(name: str) -> None:
    policy = eviction.POLICIES[name]()
    for number in range(20):
        policy.insert(key_of(number), 1, number)
    held = [key_of(number) for number in range(20)]

    def use(first: int, last: int) -> None:
        for now in range(first, last):
            policy.touch(held[now * now % 20], now)

    use(20, 3_000)
    tracemalloc.start()
    try:
        use(3_000, 12_000)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 200_000


@every_policy
def test_keys_may_be_numbers_or_words_and_sizes_and_costs_nothing(name: str) -> None:
    policy = eviction.POLICIES[name]()
    names = [0, 1, -7, 2**80, "a", ("b", 3)]
    for now, key in enumerate(names):
        policy.insert(key, now % 2 * 1_000, now, Traits(cost_s=now % 3))
        policy.touch(key, now)
    gone = []
    while len(policy):
        gone.append(policy.victim(10.0))
        policy.remove(gone[-1])
    assert sorted(map(str, gone)) == sorted(map(str, names))


# Inside an inventory ---------------------------------------------------------------------------

every_pair = pytest.mark.parametrize(
    ("evict", "admit"),
    [*product(eviction.POLICIES, ["always"]), *product(["lru", "sieve"], ["doorkeeper"])],
)
"""Every eviction policy; of the admission policies the battery of their own has the rest."""


class Books(RuleBasedStateMachine):
    """An inventory under all that may happen to it, beside a plain dict."""

    BUDGET_BYTES = 100
    BUDGET_ENTRIES = 6
    STALE_S = 5.0

    def __init__(self, evict: str, admit: str) -> None:
        super().__init__()
        self.policy = eviction.POLICIES[evict]()
        self.inventory = Inventory(
            self.policy,
            admission.POLICIES[admit](),
            budget_bytes=self.BUDGET_BYTES,
            budget_entries=self.BUDGET_ENTRIES,
            stale_s=self.STALE_S,
        )
        self.held: dict[Key, Any] = {}
        self.now = 0.0

    @rule(step_s=st.floats(0.0, 4.0))
    def wait(self, step_s: float) -> None:
        self.now += step_s

    @rule(key=keys)
    def see(self, key: Key) -> None:
        self.inventory.see(key, self.now)
        if key in self.held:
            self.inventory.use(self.held[key], self.now)

    @rule(
        key=keys,
        size_bytes=st.integers(0, 120),
        life_s=st.floats(0.1, 20.0),
        took_s=st.floats(0.0, 10.0),
        model=st.sampled_from(["m1", "m2"]),
        tag=st.sampled_from(["red", "blue"]),
    )
    def store(
        self, key: Key, size_bytes: int, life_s: float, took_s: float, model: str, tag: str
    ) -> None:
        record = record_of(
            key,
            size_bytes=size_bytes,
            asked_at=self.now - took_s,
            hit=Hit(key, key.hex().encode(), self.now, life_s, None, life_s),
            model=model,
            tags=(tag,),
            epoch=self.inventory.epochs.mark,
        )
        stored = self.inventory.store(key, record, self.now)
        if isinstance(stored, str):
            assert self.inventory.why_absent(key) == stored
        else:
            assert key not in stored
            for gone in stored:
                del self.held[gone]
            for gone in stored[-self.BUDGET_ENTRIES // 2 :]:  # so many reasons are remembered
                assert self.inventory.why_absent(gone) == "evicted"
            self.held[key] = record

    @rule(key=keys)
    def remove(self, key: Key) -> None:
        if key in self.held:
            self.inventory.remove(key, "store-failed")
            del self.held[key]
            assert self.inventory.why_absent(key) == "store-failed"

    @rule(limit=st.sampled_from([1, 1_000]))
    def expire(self, limit: int) -> None:
        due = {k for k, r in self.held.items() if r.hit.expires_at + self.STALE_S <= self.now}
        expired = self.inventory.expire(self.now, limit)
        assert set(expired) <= due
        assert len(expired) == min(limit, len(due))
        for key in expired:
            del self.held[key]

    @rule(
        model=st.sampled_from(["m1", None]),
        tag=st.sampled_from(["red", None]),
        dry_run=st.booleans(),
    )
    def invalidate(self, model: str | None, tag: str | None, dry_run: bool) -> None:
        what = Invalidation(model=model, tags=frozenset({tag} if tag else ()))
        if not dry_run:
            self.inventory.epochs.add(what, self.inventory.epochs.mark.number + 1)
        removed = sum_of(self.inventory.sweep(what, dry_run=dry_run))
        matching = {
            k
            for k, r in self.held.items()
            if model in {None, r.model} and (tag is None or tag in r.tags)
        }
        assert set(removed.keys) == matching
        assert removed.size_bytes == sum(self.held[key].size_bytes for key in matching)
        if not dry_run:
            for key in matching:
                del self.held[key]

    @invariant()
    def the_books_balance(self) -> None:
        inventory = self.inventory
        assert dict(inventory.records()) == self.held
        assert inventory.size_bytes == sum(record.size_bytes for record in self.held.values())
        assert len(inventory) == len(self.policy) == len(self.held)

    @invariant()
    def nothing_is_over_its_budget(self) -> None:
        inventory = self.inventory
        assert inventory.size_bytes <= self.BUDGET_BYTES
        assert len(inventory) <= self.BUDGET_ENTRIES
        assert inventory._gone.size <= self.BUDGET_ENTRIES
        assert len(inventory._expiry) <= 2 * len(self.held) + 1_001

    def teardown(self) -> None:
        """At the end of all lives a sweep leaves nothing, and nobody had to ask for it."""
        self.now += 1_000.0
        assert set(self.inventory.expire(self.now)) == set(self.held)
        assert len(self.inventory) == self.inventory.size_bytes == len(self.policy) == 0


@every_pair
def test_an_inventorys_books_always_balance(evict: str, admit: str) -> None:
    run_state_machine_as_test(
        lambda: Books(evict, admit),
        settings=settings(max_examples=20, stateful_step_count=40, deadline=None),
    )


@every_pair
@settings(deadline=None, max_examples=20)
@given(names=st.lists(st.integers(0, 9), max_size=120))
def test_uses_that_are_told_late_evict_the_same(evict: str, admit: str, names: list[int]) -> None:
    def decisions(*, at_once: bool) -> Iterator[tuple[Key, ...] | str]:
        inventory = Inventory(
            eviction.POLICIES[evict](),
            admission.POLICIES[admit](),
            budget_bytes=1_000,
            budget_entries=4,
        )
        for now, number in enumerate(names):
            key = KEYS[number]
            inventory.see(key, now)
            record = inventory.find(key)
            if record is None:
                yield inventory.store(key, record_of(number), now)
            else:
                inventory.use(record, now)
                if at_once:
                    inventory.settle(now)

    assert list(decisions(at_once=False)) == list(decisions(at_once=True))


@every_pair
def test_nothing_in_an_inventory_grows_with_the_number_of_requests(evict: str, admit: str) -> None:
    inventory = Inventory(
        eviction.POLICIES[evict](),
        admission.POLICIES[admit](),
        budget_bytes=1_000_000,
        budget_entries=50,
    )

    def serve(first: int, last: int) -> None:
        for number in range(first, last):
            key = key_of(number)
            for _ in range(2):
                inventory.see(key, number)
            record = record_of(number, expires_at=number + 1e9)
            inventory.store(key, record, number)

    serve(0, 1_500)
    tracemalloc.start()
    try:
        serve(1_500, 5_000)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 200_000
    assert len(inventory._expiry) <= 2 * len(inventory) + 1_001
