"""What events cost and what fills a memory again, on traces small enough to know by hand."""

import msgspec
import pytest

from preheat.core.prefix import LeafLru, PrefixStore
from preheat.core.routing import POLICIES
from preheat.replay.fleet import Fleet
from preheat.replay.headroom import warmth
from preheat.replay.headroom.events import Aftermath, Event, Study, events, ladder, speed_for
from preheat.replay.headroom.pauses import Closing, Sitting, arms, keep
from preheat.replay.tiers import Tiers, TierSpec
from preheat.replay.worker import Job
from preheat.traces.arrival import Arrival
from replay_parts import BLOCK, LINEAR, TOKEN_S, arrival, fleet_spec

ONE = Event("one restarts", ((0.0, 0),))


def repeated(prompts: int = 4, rounds: int = 20, every_s: float = 10.0) -> list[Arrival]:
    """The same prompts in turn, five blocks each."""
    asked = []
    for number in range(prompts * rounds):
        base = 100 * (number % prompts)
        asked.append(arrival(number * every_s, [base + i for i in range(1, 6)]))
    return asked


def study(arrivals: list[Arrival], workers: int = 1, capacity_blocks: int = 100) -> Study:
    spec = fleet_spec(workers, capacity_blocks)
    return Study(arrivals, BLOCK, spec, POLICIES["cost"], 1.0)


def lost(arm: warmth.Arm | None, **fields: int) -> Aftermath:
    return study(repeated(), **fields).aftermath(ONE, "arm", arm, 401.0)


def test_nothing_loses_what_was_in_memory_and_no_event_loses_nothing() -> None:
    assert lost(None).lost_s == 0.0
    assert lost(warmth.nothing).lost_s == pytest.approx(4 * 50 * TOKEN_S)


def test_a_copy_in_the_background_wins_back_what_it_brings_in_time() -> None:
    # Twenty blocks, the newest prompt first, 5.5 s each: five prompts' worth take 27.5 s.
    slow = lost(warmth.restored(5.5))
    assert 0 < slow.lost_s < 4 * 50 * TOKEN_S
    assert lost(warmth.restored(0.01)).lost_s == pytest.approx(0.0)
    assert lost(warmth.restored(1e6)).lost_s == pytest.approx(4 * 50 * TOKEN_S)


def test_what_was_drained_is_read_on_demand_however_slow_the_background_is() -> None:
    block_s = BLOCK * TOKEN_S / 2
    drained = lost(warmth.on_demand("drained", block_s))
    assert drained.lost_s == pytest.approx(0.0)
    made = study(repeated())
    fleet = Fleet(made.spec, POLICIES["cost"]())
    assert not fleet.workers[0].tiers.all


def test_a_list_computes_within_its_budget_and_only_what_was_seen() -> None:
    ranked = warmth.by_frequency
    some = lost(warmth.computed(ranked, 0.125))
    assert some.spent_s <= 0.125
    assert some.lost_s == pytest.approx(4 * 50 * TOKEN_S - some.spent_s)
    every = lost(warmth.computed(ranked, 1e9))
    assert every.spent_s == pytest.approx(4 * 50 * TOKEN_S)
    assert every.lost_s == pytest.approx(0.0)


def jobs(*uses: tuple[float, tuple[int, ...]]) -> list[Job]:
    return [
        Job(number, at, blocks, BLOCK * len(blocks), 1) for number, (at, blocks) in enumerate(uses)
    ]


def test_rankings_score_a_block_never_above_its_parent() -> None:
    told = jobs(
        (0.0, (1, 2)), (100.0, (1, 3)), (900.0, (1, 2)), (1_000.0, (1, 3, 4)), (1_100.0, (9,))
    )
    now = 950.0
    assert warmth.by_frequency(told, now) == {1: 3.0, 2: 2.0, 3: 1.0}
    assert warmth.by_old_frequency(told, now) == {1: 2.0, 2: 1.0, 3: 1.0}
    decayed = warmth.by_decayed_frequency(told, now)
    assert decayed[1] > decayed[2] > decayed[3]
    assert warmth.by_next_use(told, now) == {1: -50.0, 3: -50.0}  # 4 and 9 were never seen


def test_a_rolling_deploy_takes_everybody_and_a_joiner_is_new() -> None:
    made = {event.name: event for event in events(3)}
    assert [number for _, number in made["rolling deploy"].losses] == [0, 1, 2]
    assert made["rolling deploy"].span_s == 120.0
    busy = study(repeated(6, 20, 0.05), workers=2)
    joined = busy.aftermath(events(2)[-2], "copied", warmth.restored(0.0001), 3.0)
    assert joined.lost_s <= busy.aftermath(events(2)[-2], "nothing", warmth.nothing, 3.0).lost_s


def test_every_rung_of_the_ladder_stands_on_every_event() -> None:
    made = study(repeated(6, 12, 1.0), workers=2)
    for event in events(2):
        for name, arm in ladder(BLOCK).items():
            found = made.aftermath(event, name, arm, 30.0)
            assert found.ttfts_s[60.0], (event.name, name)
            assert found.curve


def test_the_speed_is_one_at_which_the_load_is_met() -> None:
    asked = [arrival(float(i), [i]) for i in range(200)]  # eleven tokens each, none reused
    spec = fleet_spec(1, 500)
    speed = speed_for(asked, BLOCK, spec, POLICIES["cost"], 0.5)
    assert speed == pytest.approx(0.5 / (11 * TOKEN_S), rel=0.02)


def sitting(arrivals: list[Arrival]) -> Sitting:
    return Sitting(arrivals, BLOCK, 1.0, 0.0, LINEAR)


def test_when_a_session_is_over_only_what_was_its_own_goes_first() -> None:
    asked = [
        arrival(0.0, [1, 2, 10], session="a"),
        arrival(1.0, [1, 2, 20], session="b"),
        arrival(2.0, [1, 2, 10, 11], session="a"),
        arrival(3.0, [1, 2, 20, 21], session="b"),
    ]
    store, tiers = PrefixStore(9, LeafLru()), Tiers([TierSpec("dram", 9, 0.0)])
    tiers.put([10, 1])
    closing = Closing(sitting(asked), store, tiers)
    for number, one in enumerate(asked[:3]):
        store.take(one.blocks, 0, one.at)
        store.release(one.blocks, 0, one.at)
        closing.after(number, one)
    assert (10 in tiers.all[0], 1 in tiers.all[0]) == (False, True)
    store.take([5, 6, 7, 8, 9, 12], 0, 9.0)
    assert store.evicted == [11, 10]


def test_pauses_lose_least_where_everything_is_always_in_time() -> None:
    asked = [
        arrival(float(at), [*range(100 * s, 100 * s + 4 + turn)], session=str(s), turn=turn)
        for turn in range(5)
        for s in range(6)
        for at in (turn * 60 + s * 9,)
    ]
    asked.sort(key=lambda one: one.at)
    held = msgspec.structs.replace(sitting(asked), open_sessions=6.0)
    made = {arm.name: keep(held, arm, 30) for arm in arms(BLOCK, 6.0)}
    assert made["the engine's LRU"].lost_s > 0
    for name in ("DRAM on demand", "always in time"):
        assert made[name].lost_s == pytest.approx(0.0)
    assert made["clairvoyant"].lost_s <= made["the engine's LRU"].lost_s
    ttft = {name: sum(one.ttfts_s) for name, one in made.items()}
    assert ttft["always in time"] < ttft["DRAM on demand"] < ttft["the engine's LRU"]
