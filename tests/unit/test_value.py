"""Hold values against sums done the long way, and what must hold for any life table."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.core import kinds
from preheat.core.hold_leaves import HoldLeaves
from preheat.core.life_table import BINS, EDGES, age_bin, curve, hazards, rests, steepest, use_level
from preheat.core.prefix import PrefixStore
from preheat.core.value import HoldTable, Price

hazard_rows = st.lists(st.floats(0.0, 1.0), min_size=BINS, max_size=BINS)


def learned(lives: list[tuple[float, bool]], **options: float) -> HoldTable:
    """A table of one class that has seen these lives: their age at the end, and if by a use."""
    table = HoldTable(levels=1, memory=1.0, **{"back_off": 1e-6, **options})
    for age_s, used in lives:
        table.end(0, age_s, 1, used=used, began=0)
    table.refresh([])
    return table


def test_edges_and_bins_agree() -> None:
    assert [age_bin(edge) for edge in EDGES] == list(range(BINS))
    assert [age_bin(math.nextafter(edge, 0.0)) for edge in EDGES[1:]] == list(range(BINS - 1))


@given(st.integers(1, 10**6), st.integers(1, 8))
def test_use_levels_are_octaves(uses: int, levels: int) -> None:
    assert use_level(uses, levels) == min(levels - 1, uses.bit_length() - 1)


def test_hazards_are_the_actuarial_ones() -> None:
    uses, ends = [0.0] * BINS, [0.0] * BINS
    uses[2], ends[2], ends[3] = 2.0, 4.0, 6.0  # of ten, two used and two lost sight of in bin 2
    out = [0.0] * BINS
    hazards(uses, ends, [0.5] * BINS, 1.0, out)
    assert out[2] == pytest.approx((2 + 0.5) / (10 - 1 + 1))
    assert out[3] == pytest.approx((0 + 0.5) / (6 - 3 + 1))
    assert out[4] == pytest.approx(0.5)


@settings(deadline=None)
@given(hazard_rows)
def test_the_hull_finds_the_best_of_all_holding_times(hazard: list[float]) -> None:
    gained, held = [0.0] * (BINS + 1), [0.0] * (BINS + 1)
    value, until = [0.0] * BINS, [0] * BINS
    curve(hazard, EDGES, gained, held)
    steepest(gained, held, value, until, [0] * (BINS + 2))
    for place in range(BINS):
        slopes = [
            (gained[end] - gained[place]) / (held[end] - held[place])
            for end in range(place + 1, BINS + 1)
            if held[end] > held[place]
        ]
        assert value[place] == pytest.approx(max(slopes, default=0.0), rel=1e-6, abs=1e-12)
        assert place < until[place] <= BINS


def test_what_comes_back_after_ten_seconds_is_worth_most_just_before() -> None:
    table = learned([(10.5, True)] * 500 + [(3_000.0, False)] * 500)
    new, due, late = (table.value(0, age_s) for age_s in (0.0, 9.9, 60.0))
    assert due > 5 * new > 25 * late
    assert table.hold_s(0, 0.0) == pytest.approx(12.0, abs=2.1)
    assert new == pytest.approx(0.5 / 11, rel=0.1)  # half of them after about 11 s, then let go


def test_constant_hazards_are_worth_their_rate_at_any_age() -> None:
    chance = random.Random(1)
    table = learned([(chance.expovariate(0.02), True) for _ in range(20_000)])
    for age_s in (0.0, 5.0, 30.0, 90.0):  # the best of many noisy sums is never too low
        assert 0.02 * 0.95 < table.value(0, age_s) < 0.02 * 1.5


def test_falling_hazards_make_an_older_entry_worth_less() -> None:
    chance = random.Random(2)
    table = learned([(chance.lognormvariate(0.0, 3.0), True) for _ in range(20_000)])
    values = [table.value(0, age_s) for age_s in (1.0, 10.0, 100.0, 1_000.0)]
    assert values == sorted(values, reverse=True)


def test_a_thin_class_leans_on_its_level_and_a_thick_one_does_not() -> None:
    table = HoldTable(levels=2, back_off=50.0, memory=1.0)
    for row, lives, age_s in ((0, 2_000, 2.0), (2, 5, 1_000.0), (4, 2_000, 1_000.0)):
        table.end(row, age_s, lives, used=True, began=0)
    table.refresh([])
    quick, thin, slow = (table.value(row, 0.0) for row in (0, 2, 4))
    assert quick > 20 * slow
    assert thin > 3 * slow
    assert table.value(6, 0.0) > 3 * slow  # a class nobody has seen


def test_open_lives_count_as_far_as_they_went() -> None:
    used = [(5.0, True)] * 10
    alone = learned(used)
    crowded = HoldTable(levels=1, back_off=1e-6, memory=1.0)
    for age_s, is_use in used:
        crowded.end(0, age_s, 1, used=is_use, began=0)
    crowded.refresh([(0, 100.0, 90, 0)])
    assert crowded.value(0, 0.0) == pytest.approx(alone.value(0, 0.0) / 10, rel=0.2)
    crowded.refresh([])  # they weren't kept: they may still end one way or the other
    assert crowded.value(0, 0.0) == pytest.approx(alone.value(0, 0.0))


def test_it_forgets() -> None:
    table = HoldTable(levels=1, back_off=1e-6, memory=0.5)
    table.end(0, 2.0, 1_000, used=True, began=0)
    for _ in range(20):
        table.end(0, 1_000.0, 100, used=True, began=table.refreshes)
        table.refresh([])
    assert table.value(0, 0.0) == pytest.approx(1 / 1_000, rel=0.3)


def test_open_and_ended_lives_of_one_beginning_fade_alike() -> None:
    """One of three lives is used at once and two never are: that is its class's law at any time, however
    long ago the lives began, or how many of them are still open."""
    table = HoldTable(levels=1, back_off=1e-6, memory=0.9)
    hazards_seen = []
    for began in range(60):
        table.end(0, 0.0, 100, used=True, began=began)
        table.refresh([(0, 50.0, 200, since) for since in range(began + 1)])
        hazards_seen.append(table.value(0, 0.0))
    assert hazards_seen == pytest.approx([hazards_seen[0]] * 60, rel=1e-4)
    late = HoldTable(levels=1, back_off=1e-6, memory=0.9)
    late.end(0, 0.0, 100, used=True, began=0)
    for _ in range(10):
        late.refresh([(0, 50.0, 200, 0)])
    late.end(0, 50.0, 100, used=True, began=0)  # half of them come back after all
    late.refresh([(0, 50.0, 100, 0)])
    once = HoldTable(levels=1, back_off=1e-6, memory=1.0)
    once.end(0, 0.0, 100, used=True, began=0)
    once.end(0, 50.0, 100, used=True, began=0)
    once.refresh([(0, 50.0, 100, 0)])
    assert late.value(0, 0.2) == pytest.approx(once.value(0, 0.2), rel=1e-3)


def test_kinds_are_bounded() -> None:
    table = HoldTable(levels=2, most_kinds=3)
    assert table.row(10**9, 1) == table.row(2, 1) == 4


def test_what_is_under_way_waits_for_its_answer() -> None:
    table = learned([(2.0, True)] * 100)
    before = table.value_under_way(0, 0.0)
    assert before == pytest.approx(table.value(0, 0.0), rel=1e-9)  # no service known: over at once
    for _ in range(100):
        table.serve(30.0)
    table.refresh([])
    assert table.value_under_way(0, 0.0) < before / 5
    assert table.value_under_way(0, 0.0) < table.value_under_way(0, 27.0) < before


def test_rests_are_mean_residual_lives() -> None:
    ends, out = [0.0] * BINS, [0.0] * BINS
    ends[age_bin(1.0)] = ends[age_bin(8.0)] = 1.0
    rests(ends, EDGES, out)
    assert out[0] == pytest.approx((1.125 + 9.0) / 2, rel=0.01)
    assert out[age_bin(2.0)] == pytest.approx(9.0 - 2.0, rel=0.01)
    assert out[age_bin(100.0)] == 0.0


def test_impossible_tables_are_refused() -> None:
    for options in ({"levels": 0}, {"back_off": 0.0}, {"memory": 1.5}, {"most_kinds": 0}):
        with pytest.raises(ValueError, match="must be at least"):
            HoldTable(**options)


def test_the_price_follows_what_had_to_go() -> None:
    price = Price()
    assert price.now == 0.0
    price.learn(4.0)
    price.learn(2.0)
    assert price.now == 3.0
    for _ in range(2_000):
        price.learn(1.0)
    assert price.now == pytest.approx(1.0)


# Over prefixes ---------------------------------------------------------------------------------


def take(store: PrefixStore, path: list[int], now: float, kind: int = 0) -> None:
    assert store.take(path, 0, now, kind)
    store.release(path, 0, now)


def taught(order: HoldLeaves, store: PrefixStore) -> float:
    """Sessions of kind 1 that come back after 10 s, of kind 2 that never do."""
    now = 0.0
    for turn in range(400):
        now = 20.0 * turn
        take(store, [10_000 + turn], now, 2)
        take(store, [1], now + 0.1, 1)
        take(store, [1], now + 10.1, 1)
    return now + 100.0


def test_the_kind_that_comes_back_stays_though_it_is_older() -> None:
    order = HoldLeaves(levels=1)
    store = PrefixStore(2, order)
    now = taught(order, store)
    take(store, [501], now, 1)
    take(store, [502], now + 1.0, 2)
    take(store, [503], now + 2.0, 1)
    assert 501 in store
    assert 502 not in store
    assert order.price.now >= 0.0


def test_a_request_under_way_is_worth_less_than_one_that_is_over() -> None:
    order = HoldLeaves(levels=1)
    store = PrefixStore(2, order)
    now = taught(order, store)
    for number in range(40):  # answers take a minute
        take(store, [600 + number], now, 1)
        order.began()
        order.ended(order.requests - 1, now + 60.0, 1)
        now += 100.0
    take(store, [701], now, 1)
    take(store, [702], now + 0.5, 1)
    order.began()
    take(store, [703], now + 1.0, 1)
    assert 701 in store
    assert 702 not in store


def test_what_left_long_ago_is_forgotten() -> None:
    order = HoldLeaves(remembered=50)
    store = PrefixStore(10, order)
    for number in range(1_000):
        take(store, [number], float(number))
    assert len(order._last) == len(order._counts) == 60
    assert len(order._uses) == 60


# Kinds -----------------------------------------------------------------------------------------


def test_levels_of_what_is_known_of_a_request() -> None:
    assert [kinds.known_level(share) for share in (0.0, 0.3, 1.0)] == [0, 1, 2]
    assert [kinds.answer_level(tokens) for tokens in (1, 100, 1_000)] == [0, 1, 2]
    stops = ("", "end_turn", "stop", "tool_use", "tool_calls")
    assert [kinds.stop_level(stop) for stop in stops] == [0, 1, 1, 2, 2]


def test_a_sessions_pauses_move_its_level_halfway_each_time() -> None:
    pauses = kinds.Pauses()
    assert pauses.level("s") == 0
    pauses.learn("s", 2.0)
    assert pauses.level("s") == 1
    pauses.learn("s", 50.0)  # the geometric mean is 10
    assert pauses.level("s") == 3
    assert pauses.level("other") == 0
