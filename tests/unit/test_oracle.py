"""What no cache can beat, beside brute force and beside what caches do."""

import gzip
import importlib
import json
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.core.eviction import POLICIES
from preheat.core.prefix import LeafLru, LeafOrder, PrefixStore
from preheat.errors import ConfigError
from preheat.replay import keys as replay_keys
from preheat.replay import oracle
from preheat.replay.orders import Clairvoyant

requests = st.lists(st.integers(0, 5), max_size=14)
sizes_of_keys = st.lists(st.integers(1, 5), min_size=6, max_size=6)
costs_of_keys = st.lists(st.sampled_from([0.5, 1.0, 3.0, 7.0]), min_size=6, max_size=6)


@st.composite
def paths(draw: st.DrawFn) -> list[oracle.Path]:
    """Requests whose equal block ids are equal prefixes: a word's prefixes, numbered."""
    words = draw(st.lists(st.text("ab", max_size=4), max_size=12))
    ids: dict[str, int] = {}
    return [
        tuple(ids.setdefault(word[:end], len(ids)) for end in range(1, len(word) + 1))
        for word in words
    ]


# Keys -----------------------------------------------------------------------------------------


def best_by_brute_force(
    keys: Sequence[int],
    sizes: Sequence[int],
    costs: Sequence[float],
    capacity: int,
    *,
    bypass: bool = True,
) -> float:
    """Tries every set that could be held after every request."""

    @cache
    def best(now: int, held: frozenset[int]) -> float:
        if now == len(keys):
            return 0.0
        key = keys[now]
        saved = costs[key] if key in held else 0.0
        may_stay = held | {key}
        must_stay = set() if bypass or sizes[key] > capacity else {key}
        choices = (
            frozenset(kept)
            for count in range(len(may_stay) + 1)
            for kept in combinations(sorted(may_stay), count)
            if sum(sizes[k] for k in kept) <= capacity and must_stay <= set(kept)
        )
        return saved + max(best(now + 1, kept) for kept in choices)

    return best(0, frozenset())


ONES = [1] * 6


@settings(deadline=None, max_examples=80)
@given(keys=requests, capacity=st.integers(0, 4))
def test_min_is_what_brute_force_finds(keys: list[int], capacity: int) -> None:
    for bypass in (True, False) if capacity else (True,):
        found = oracle.belady_keys(keys, capacity, bypass=bypass)
        assert found == best_by_brute_force(keys, ONES, ONES, capacity, bypass=bypass)


@settings(deadline=None, max_examples=60)
@given(keys=requests, sizes=sizes_of_keys, costs=costs_of_keys, capacity=st.integers(1, 10))
def test_the_whole_optimum_is_what_brute_force_finds_and_the_bound_is_above(
    keys: list[int], sizes: list[int], costs: list[float], capacity: int
) -> None:
    pytest.importorskip("scipy")
    best = best_by_brute_force(keys, sizes, costs, capacity)
    told = keys, [sizes[key] for key in keys], [costs[key] for key in keys], capacity
    assert oracle.best_saving(*told, whole=True) == pytest.approx(best)
    assert oracle.best_saving(*told) >= best - 1e-6


def zipf(length: int, objects: int, seed: int) -> list[int]:
    state, keys = seed, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        keys.append(int(objects ** ((state >> 32) / 2**32)))
    return keys


def test_the_bound_equals_min_where_all_is_of_one_size() -> None:
    pytest.importorskip("scipy")
    keys = zipf(1_500, 300, seed=1)
    ones = [1] * len(keys)
    for capacity in (1, 10, 60):
        bound = oracle.best_saving(keys, ones, ones, capacity)
        assert bound == pytest.approx(oracle.belady_keys(keys, capacity, bypass=True))


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_saves_more_than_the_bound(name: str) -> None:
    pytest.importorskip("scipy")
    keys = zipf(800, 100, seed=2)
    sizes = [1 + key * 7 % 30 for key in keys]
    costs = [0.1 + key * 13 % 11 for key in keys]
    found = replay_keys.hits(POLICIES[name](), keys, sizes, costs, 150)
    assert found.hits > 100
    assert found.saved_s <= _bound_of(tuple(keys), tuple(sizes), tuple(costs)) + 1e-6


@cache
def _bound_of(keys: tuple[int, ...], sizes: tuple[int, ...], costs: tuple[float, ...]) -> float:
    return oracle.best_saving(keys, sizes, costs, 150)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_hits_more_often_than_min(name: str) -> None:
    keys = zipf(4_000, 600, seed=3)
    for capacity in (10, 100):
        found = replay_keys.hits(POLICIES[name](), keys, None, None, capacity).hits
        assert 0 < found <= oracle.belady_keys(keys, capacity)
    assert replay_keys.hits(POLICIES[name](), keys, None, None, 600).hits == oracle.infinite_keys(
        keys
    )


@pytest.mark.parametrize(
    ("stream", "distinct", "min_percents"),
    [("multi1", 2_606, (21.1, 49.3, 52.7, 62.6)), ("ps", 3_083, (17.9, 41.7, 54.4, 63.3))],
)
def test_min_finds_what_an_independent_program_found(
    shared_data: Path, stream: str, distinct: int, min_percents: tuple[float, ...]
) -> None:
    """At 1, 5, 10 and 25 % of a LIRS trace's distinct keys."""
    path = shared_data / "cache_traces" / f"lirs__{stream}.trace.gz"
    if not path.is_file():
        pytest.skip(f"this key stream isn't here ({path})")
    with gzip.open(path, "rt") as lines:
        keys = [int(line) for line in map(str.strip, lines) if line.isdigit()]
    for share, percent in zip((0.01, 0.05, 0.1, 0.25), min_percents, strict=True):
        hits = oracle.belady_keys(keys, int(share * distinct), bypass=True)
        assert round(100 * hits / len(keys), 1) == percent


def test_without_the_solver_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(oracle, "import_module", nothing)
    with pytest.raises(ConfigError, match="pip install scipy"):
        oracle.best_saving([1, 1], [1, 1], [1.0, 1.0], 1)
    assert importlib.import_module("preheat.replay.oracle") is oracle


def test_nothing_asked_for_twice_saves_nothing() -> None:
    assert oracle.best_saving([1, 2, 3], [1, 1, 1], [1.0, 1.0, 1.0], 3) == 0.0
    assert oracle.best_saving([1, 1], [5, 5], [1.0, 1.0], 4) == 0.0
    assert oracle.infinite_keys([]) == oracle.belady_keys([], 3) == oracle.infinite_blocks([]) == 0


# Blocks ---------------------------------------------------------------------------------------


def held_prefix(path: oracle.Path, held: frozenset[int]) -> int:
    return next((depth for depth, block in enumerate(path) if block not in held), len(path))


def subsets(blocks: frozenset[int]) -> Iterator[frozenset[int]]:
    for count in range(len(blocks) + 1):
        yield from map(frozenset, combinations(sorted(blocks), count))


def best_blocks_by_brute_force(given: list[oracle.Path], capacity: int, *, bypass: bool) -> int:
    @cache
    def best(now: int, held: frozenset[int]) -> int:
        if now == len(given):
            return 0
        path = given[now]
        must_stay = frozenset() if bypass else frozenset(path[:capacity])
        return held_prefix(path, held) + max(
            best(now + 1, kept)
            for kept in subsets(held | frozenset(path))
            if len(kept) <= capacity and must_stay <= kept
        )

    return best(0, frozenset())


@settings(deadline=None, max_examples=40)
@given(given=paths(), capacity=st.integers(0, 4))
def test_min_on_prefixes_is_what_brute_force_finds(given: list[oracle.Path], capacity: int) -> None:
    free = best_blocks_by_brute_force(given, capacity, bypass=True)
    assert oracle.belady_blocks(given, capacity) == free
    forced = best_blocks_by_brute_force(given, capacity, bypass=False)
    assert min_hits(given, capacity) == forced


def hits_of(order: LeafOrder, given: list[oracle.Path], capacity: int) -> int:
    """What the core's own store finds; what of a path is longer than it never comes in."""
    store = PrefixStore(capacity, order)
    return sum(store.serve(path[:capacity], now) for now, path in enumerate(given))


def lru_hits(given: list[oracle.Path], capacity: int) -> int:
    return hits_of(LeafLru(), given, capacity)


def min_hits(given: list[oracle.Path], capacity: int) -> int:
    return hits_of(Clairvoyant(given, capacity), given, capacity)


class PlainLru:
    """Blocks in a list, the oldest use first; a path's deepest block is its oldest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: list[int] = []

    def ask(self, path: oracle.Path) -> int:
        hits = held_prefix(path, frozenset(self.order))
        kept = list(path[: self.capacity])
        others = [block for block in self.order if block not in kept]
        while len(others) + len(kept) > self.capacity:
            others.pop(0)
        self.order = others + kept[::-1]
        return hits


@settings(deadline=None)
@given(given=paths(), capacity=st.integers(0, 6))
def test_lru_on_prefixes_is_what_a_plain_list_does(given: list[oracle.Path], capacity: int) -> None:
    plain = PlainLru(capacity)
    assert lru_hits(given, capacity) == sum(plain.ask(path) for path in given)
    assert (
        lru_hits(given, capacity)
        <= min_hits(given, capacity)
        <= oracle.belady_blocks(given, capacity)
        <= oracle.infinite_blocks(given)
    )


@settings(deadline=None)
@given(given=paths())
def test_with_room_for_all_everybody_has_what_can_be_had(given: list[oracle.Path]) -> None:
    asked = sum(map(len, given))
    distinct = len({block for path in given for block in path})
    for found in (
        oracle.infinite_blocks(given),
        lru_hits(given, distinct),
        min_hits(given, distinct),
        oracle.belady_blocks(given, distinct),
    ):
        assert found == asked - distinct


# Mooncake, beside what an independent program found ---------------------------------------------


def mooncake(folder: Path, name: str) -> list[oracle.Path]:
    path = folder / "mooncake" / f"{name}.part1.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"this trace isn't here ({path})")
    with gzip.open(path, "rt") as lines:
        return [tuple(json.loads(line)["hash_ids"]) for line in lines]


@pytest.mark.parametrize(
    ("capacity_blocks", "lru_percent", "min_percent"),
    [(456, 4.2, 13.1), (1_827, 5.2, 24.6), (3_655, 7.9, 31.4), (9_139, 19.6, 36.6)],
)
def test_mooncake_conversation_comes_near_what_was_found_on_all_of_it(
    shared_data: Path, capacity_blocks: int, lru_percent: float, min_percent: float
) -> None:
    """The first two thirds, at the same capacities: within two points of the whole."""
    given = mooncake(shared_data, "conversation")
    asked = sum(map(len, given))
    lru = lru_hits(given, capacity_blocks)
    began_at = time.perf_counter()
    best = oracle.belady_blocks(given, capacity_blocks)
    assert time.perf_counter() - began_at < 3.0
    assert 100 * lru / asked == pytest.approx(lru_percent, abs=2.0)
    assert 100 * best / asked == pytest.approx(min_percent, abs=2.0)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_an_endless_cache_has_all_but_first_uses(shared_data: Path, name: str) -> None:
    given = mooncake(shared_data, name)
    hits = 0
    known: set[int] = set()
    for path in given:
        hits += held_prefix(path, frozenset(known & set(path)))
        known |= set(path)
    assert oracle.infinite_blocks(given) == hits > 0
