"""What events cost and what fills a memory again, on traces small enough to know by hand."""

import re
from pathlib import Path

import msgspec
import pytest

from preheat.cli.tables import WIDE, text_of, text_of_trace
from preheat.core.placing import Candidate, Placing
from preheat.core.prefix import LeafLru, PrefixStore
from preheat.core.ramp import Ramp
from preheat.core.routing import POLICIES
from preheat.errors import ConfigError
from preheat.replay.fleet import Fleet, run
from preheat.replay.headroom import warmth
from preheat.replay.headroom.event_tables import (
    KEPT,
    SHOWN,
    TIMES_KEPT,
    WHOLE_TIMES_KEPT,
    aftermaths,
)
from preheat.replay.headroom.events import (
    Aftermath,
    Event,
    Study,
    events,
    speed_for,
)
from preheat.replay.headroom.finding import NOTHING_TO_WIN, Finding, in_short
from preheat.replay.headroom.fleets import blind_spots, fleet_of
from preheat.replay.headroom.ladder import LEVERS, NOTHING, OURS, RAMPED, ladder, legend
from preheat.replay.headroom.pauses import LEVERS as PAUSE_LEVERS
from preheat.replay.headroom.pauses import Closing, Sitting, arms, keep
from preheat.replay.headroom.study import study as whole_study
from preheat.replay.headroom.wanted import QUICK, Wanted
from preheat.replay.measures import Measures, measures_of
from preheat.replay.report import Table
from preheat.replay.sections import trace_section
from preheat.replay.tiers import Tiers, TierSpec
from preheat.replay.worker import Job
from preheat.traces.arrival import Arrival, Trace
from replay_parts import BLOCK, LINEAR, TOKEN_S, arrival, fleet_spec, trace

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
    for refills in (False, True):
        drained = lost(warmth.on_demand("drained", block_s, refills=refills))
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
        for name, arm in ladder(BLOCK, event).items():
            assert name in LEVERS
            found = made.aftermath(event, name, arm, 30.0)
            assert found.ttfts_s[60.0], (event.name, name)
            assert found.curve


def test_the_speed_is_one_at_which_the_load_is_met() -> None:
    asked = [arrival(float(i), [i]) for i in range(200)]  # eleven tokens each, none reused
    spec = fleet_spec(1, 500)
    speed = speed_for(asked, BLOCK, spec, POLICIES["cost"], 0.5)
    assert speed == pytest.approx(0.5 / (11 * TOKEN_S), rel=0.02)


def sitting(arrivals: list[Arrival]) -> Sitting:
    return Sitting(trace(arrivals), 1.0, 0.0, LINEAR)


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


SMALL = Wanted(
    workers=2,
    worker_tokens=(300,),
    alone_tokens=(300,),
    loads=(0.7,),
    switches=2,
    capacity_shares=(0.1, 0.5),
    granularity_shares=(0.1,),
    service=LINEAR,
)


def chats(prompts: int = 12) -> Trace:
    """More prompts in turn than one memory of 300 tokens holds: six fit."""
    return trace(repeated(prompts, 8, 1.0))


def told(asked: Trace, wanted: Wanted = SMALL, *parts: str) -> tuple[list[Table], list[str]]:
    progress: list[str] = []
    made = list(whole_study(asked, wanted, progress.append, parts))
    return [one for one in made if isinstance(one, Table)], progress


def test_the_study_ends_with_a_line_a_part_and_counts_its_simulations() -> None:
    tables, progress = told(chats())
    short = tables[-1]
    assert [row[0] for row in short.rows] == [
        "capacity",
        "granularity",
        "pauses",
        "events",
        "events",
        "events",
        "routing",
    ]
    by_part = {str(row[0]): row for row in short.rows}
    assert by_part["pauses"][1] == "big"  # LRU loses everything of prompts that come in turn
    assert "an endless DRAM tier leaves 0.0%" in str(by_part["pauses"][2])
    assert "round robin" in str(by_part["routing"][2])
    assert "p95 TTFT" in str(by_part["events"][2])
    assert not short.verdict
    total = len(progress)
    assert [line.split(":")[0] for line in progress] == [
        f"{number} of {total} simulations" for number in range(1, total + 1)
    ]


def test_nothing_to_win_is_said_plainly() -> None:
    large = msgspec.structs.replace(SMALL, alone_tokens=(100_000,))
    tables, _ = told(trace(repeated()), large, "capacity", "pauses")
    assert "Everything fits: 20 distinct blocks, 200 tokens." in tables[0].verdict
    assert len(tables[0].rows) == 1
    assert [row[1] for row in tables[-1].rows] == [NOTHING_TO_WIN] * 2
    assert tables[-1].verdict == "Nothing to win: everything fits."


def test_where_nothing_comes_back_nothing_is_said_to_fit() -> None:
    tables, _ = told(trace([arrival(float(at), [at]) for at in range(150)]), SMALL, "capacity")
    assert "nothing comes back" in str(tables[-1].rows[0][2])
    assert tables[-1].verdict == "Nothing to win on this trace."


@pytest.mark.parametrize(
    ("shares", "worths", "verdict"),
    [
        ((0.3, -0.02), ["big", "a loss"], ""),
        ((0.01, 0.0), ["small", NOTHING_TO_WIN], "no part is more than small"),
        ((-0.02, 0.0), ["a loss", NOTHING_TO_WIN], "Nothing to win on this trace."),
    ],
)
def test_what_shares_are_called(shares: list[float], worths: list[str], verdict: str) -> None:
    short = in_short([Finding("part", share, "") for share in shares])
    assert [row[1] for row in short.rows] == worths
    assert verdict in short.verdict
    assert bool(verdict) == bool(short.verdict)


def test_waits_that_change_are_not_nothing() -> None:
    assert Finding("events", 0.0, "", is_felt=True).worth == "small"


def test_endless_memory_is_simulated_once() -> None:
    tables, progress = told(chats(30), SMALL, "capacity")
    assert len(progress) == 1 + 2 * len(SMALL.capacity_shares)
    (_, _, lru, belady, endless, room), _ = tables[0].rows
    assert isinstance(lru, float)
    assert isinstance(belady, float)
    assert room == pytest.approx((belady - lru) * 100)
    assert endless == pytest.approx(7 / 8)  # every round but the first


def test_tables_of_events_are_narrow_and_speak_to_newcomers() -> None:
    tables, _ = told(chats(), SMALL, "events")
    for table in tables:
        assert max(map(len, text_of(table).split("\n"))) <= WIDE, table.title
    seconds = next(table for table in tables if table.title.startswith("Seconds, rolling"))
    assert [row[0] for row in seconds.rows][:2] == ["no restart", "memory lost"]
    assert "Extrapolated: the trace is 0.0 hours long" in seconds.note
    assert seconds.columns[-1] == "%, 20 a day*"
    assert "costs 0.3 of one later" in seconds.note


def test_what_is_computed_beforehand_is_told_net_at_both_prices() -> None:
    cheap = msgspec.structs.replace(SMALL, off_peak_price=0.1)
    tables, _ = told(chats(), cheap, "events")
    seconds = next(table for table in tables if table.title.startswith("Seconds, rolling"))
    at = {name: place for place, name in enumerate(seconds.columns)}
    by_arm = {row[0]: row for row in seconds.rows}
    lost_nothing = by_arm["memory lost"][at["lost s"]]
    assert isinstance(lost_nothing, float)
    listed = by_arm["frequency, computed"]
    lost, spent, payback, net, off_peak = (
        listed[at[name]] for name in ("lost s", "spent s", "payback", "net s", "net at 0.1")
    )
    assert isinstance(lost, float)
    assert isinstance(spent, float)
    assert spent > 0
    assert net == pytest.approx(lost_nothing - lost - spent)
    assert off_peak == pytest.approx(lost_nothing - lost - 0.1 * spent)
    assert payback == pytest.approx((lost_nothing - lost) / spent)
    copied = by_arm["snapshot from DRAM"]
    assert copied[at["net s"]] == copied[at["net at 0.1"]]
    assert by_arm["no restart"][at["net s"]] is None


def test_every_arm_names_engines_that_the_table_of_levers_has() -> None:
    page = (Path(__file__).parents[2] / "docs" / "levers.md").read_text()
    known = {*re.findall(r"^\| \*\*([^*]+)\*\*", page, re.MULTILINE), "HiCache", "hosted"}
    for arm, lever in [*LEVERS.items(), *PAUSE_LEVERS.items()]:
        if lever.engines not in ("any", "none", "none: a bound"):
            assert set(re.findall(r"\w+(?:\.\w+)?", lever.engines)) <= known, arm
    assert [arm.name for arm in arms(BLOCK, 6.0)] == list(PAUSE_LEVERS)
    assert [row[0] for row in legend("Events", LEVERS).rows] == list(LEVERS)


def candidate(number: int, miss_s: float) -> Candidate:
    return Candidate(number, miss_s=miss_s)


def test_who_comes_back_cold_gets_as_much_work_as_the_others_and_not_as_many_requests() -> None:
    ramp = Ramp(POLICIES["round_robin"]())
    for _ in range(40):
        ramp.choose(Placing(10), [candidate(0, 0.1), candidate(1, 0.1)], 0.0)
    ramp.returned(0, 10.0)
    cold = [
        ramp.choose(Placing(10), [candidate(0, 1.0), candidate(1, 0.1)], 10.0) for _ in range(200)
    ]
    assert 5 <= cold.count(0) <= 15  # a tenth of its half
    warm = [
        ramp.choose(Placing(10), [candidate(0, 0.1), candidate(1, 0.1)], 20.0) for _ in range(400)
    ]
    assert warm[-40:].count(0) == 20  # it has learned that it is warm again


def test_nobody_stands_in_a_queue_beside_one_that_came_back_and_would_be_sooner() -> None:
    ramp = Ramp(POLICIES["cost"]())
    for _ in range(40):
        ramp.choose(Placing(10), [candidate(0, 0.1), candidate(1, 0.1)], 0.0)
    ramp.returned(0, 10.0)
    long = Candidate(1, miss_s=0.1, queue_s=5.0)
    assert all(ramp.choose(Placing(10), [candidate(0, 1.0), long], 10.0) == 0 for _ in range(20))
    short = Candidate(1, miss_s=0.1, queue_s=0.5)
    assert all(ramp.choose(Placing(10), [candidate(0, 1.0), short], 11.0) == 1 for _ in range(20))


def test_a_ramp_ends_in_time_and_nobody_is_kept_back_where_all_are_cold() -> None:
    late = Ramp(POLICIES["round_robin"]())
    for number in (0, 1):
        late.returned(number, 0.0)
    both = [candidate(0, 1.0), candidate(1, 1.0)]
    assert {late.choose(Placing(10), both, 1.0) for _ in range(4)} == {0, 1}
    ramp = Ramp(POLICIES["round_robin"]())
    uneven = [candidate(0, 1.0), candidate(1, 0.01)]
    for _ in range(10):
        ramp.choose(Placing(10), [candidate(0, 0.01), candidate(1, 0.01)], 0.0)
    ramp.returned(0, 0.0)
    assert 0 not in [ramp.choose(Placing(10), uneven, 299.0) for _ in range(20)]
    cheaper = [candidate(0, 0.001), candidate(1, 0.01)]
    assert 0 in [ramp.choose(Placing(10), cheaper, 299.0) for _ in range(2)]
    assert 0 in [ramp.choose(Placing(10), uneven, 301.0) for _ in range(2)]


def test_alone_a_ramped_worker_is_given_everything_all_the_same() -> None:
    assert lost(warmth.ramped(warmth.nothing)).lost_s == lost(warmth.nothing).lost_s > 0


def test_in_a_steady_state_and_before_a_peak_nothing_is_lost_and_nobody_copies() -> None:
    made = {event.name: event for event in events(2)}
    for name in ("steady state", "peak of 1.5", "version switch"):
        assert not [arm for arm in ladder(BLOCK, made[name]) if "snapshot" in arm or "ours" in arm]
    steady = study(repeated(6, 12, 1.0), workers=2).aftermath(
        made["steady state"], NOTHING, warmth.nothing, 30.0
    )
    assert steady.lost_s == 0.0
    assert RAMPED in ladder(BLOCK, made["rolling deploy"])
    assert RAMPED not in ladder(BLOCK, events(1)[1])


def test_a_day_long_trace_is_not_extrapolated() -> None:
    asked = trace(repeated(4, 4, 6_000.0))
    tables, _ = told(asked, SMALL, "events")
    assert "Extrapolated" not in tables[0].note
    assert tables[0].columns[-1] == "%, 20 a day"


def test_tables_for_benchmarks_keep_the_names_of_the_ladder() -> None:
    made = list(aftermaths(chats(), SMALL, lambda _: None))
    waits = next(table for table in made if table.title.startswith("rolling deploy"))
    assert {KEPT, NOTHING, OURS} <= {row[0] for row in waits.rows}
    kept = next(row for row in waits.rows if row[0] == KEPT)
    for column in (TIMES_KEPT, WHOLE_TIMES_KEPT):
        assert kept[waits.columns.index(column)] == 1.0
    assert set(SHOWN) == {event.kind for event in events(2)}


def test_a_bound_is_marked() -> None:
    tables, _ = told(chats(), SMALL, "pauses")
    assert {row[0] for row in tables[0].rows if row[-1] == "bound"} == {
        "always in time",
        "clairvoyant",
    }


def models(keys: list[int]) -> Trace:
    asked = [Arrival(at=float(at), key=key) for at, key in enumerate(keys)]
    return Trace(name="keys", format="test", arrivals=asked)


def test_a_stream_of_keys_is_not_one_of_models() -> None:
    with pytest.raises(ConfigError, match=r"1,001 different keys.*preheat replay"):
        whole_study(models(list(range(1_001))), SMALL, lambda _: None)
    tables, _ = told(models([1, 2, 3, 4] * 20))
    short = tables[-1]
    assert [row[:2] for row in short.rows] == [
        ("residency, 3", "big"),
        ("residency, 5", NOTHING_TO_WIN),
    ]
    assert "everything fits" in str(short.rows[1][2])
    assert "40 loads by LRU" in str(short.rows[0][2])


def test_a_request_that_names_no_model_is_none_of_them() -> None:
    tables, _ = told(models([1, 2, 3, -1] * 20))
    assert tables[0].title.startswith("Residency: 3 models")
    assert tables[0].rows[0][-1] == 0.0  # all three were loaded in the first half


def test_where_the_second_half_is_one_moment_nothing_is_said_of_a_day() -> None:
    tables, _ = told(models([1, 2]))
    assert tables[0].rows[0] == ("lru", None, None, 1.0)


def measured(asked: Trace, name: str) -> Measures:
    spec = fleet_of(SMALL, asked, 2, 300)
    made = run(asked.arrivals, BLOCK, Fleet(spec, POLICIES[name]()))
    return measures_of(made, 2)


def test_rules_that_the_trace_cannot_judge_are_named() -> None:
    alike = trace([arrival(at * 0.01, [1, 10 + at]) for at in range(40)])
    made = {name: measured(alike, name) for name in ("production_stack", "round_robin")}
    said = blind_spots(alike, 2, made)
    assert "names no sessions" in said
    assert "`production_stack` sent nearly everything to one worker" in said
    assert "round_robin" not in said
    named = trace([arrival(at * 0.01, [10 + at], session=str(at)) for at in range(40)])
    assert not blind_spots(named, 2, {"round_robin": measured(named, "round_robin")})


def test_the_quick_study_is_small() -> None:
    for sizes in (QUICK.worker_tokens, QUICK.alone_tokens, QUICK.session_tokens, QUICK.loads):
        assert len(sizes) == 1
    quick = msgspec.structs.replace(SMALL, only_events=QUICK.only_events, events_alone=False)
    tables, _ = told(chats(), quick, "events")
    assert [row[2].split(",")[0] for row in tables[-1].rows if isinstance(row[2], str)] == [
        "one restarts",
        "rolling deploy",
    ]


def test_a_trace_is_told_with_what_was_done_to_it() -> None:
    asked = msgspec.structs.replace(chats(), rules=("Starts are drawn, seed 1.",), skipped=3)
    said = text_of_trace(trace_section(asked))
    assert said.startswith("small: 96 requests (test), 95 s, ")
    assert "  Starts are drawn, seed 1." in said
    assert "3 lines were skipped" in said
