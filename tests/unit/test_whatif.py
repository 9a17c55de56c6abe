"""A trace against a gateway and its fleet, and the report that is made of it."""

import json
from typing import Any, cast

import msgspec
import pytest

from preheat.core.spread import spread_of
from preheat.errors import ConfigError
from preheat.replay import arms, report
from preheat.replay.kernel import Kernel
from preheat.replay.measures import measures_of
from preheat.replay.replay import BASELINE, TOGETHER, Questions, replay
from preheat.replay.runner import Runner, Verbs
from preheat.replay.whatif import Setup, controller_of, request_of, try_out
from preheat.traces.arrival import Arrival, Trace
from replay_parts import LINEAR, arrival, trace

SMALL = Setup(workers=2, worker_tokens=300, service=LINEAR, exact_ttl_s=100.0)


def quiet(text: str) -> None:
    """Progress that nobody watches."""


def test_an_equal_request_joins_the_flight_and_then_hits_and_expires() -> None:
    asked = [arrival(at, range(9), key=7) for at in (0.0, 0.03, 5.0, 200.0)]
    tried = try_out(trace(asked), SMALL)
    assert tried.layers == ["forward", "join", "exact", "forward"]
    jobs = tried.run.jobs
    assert jobs[1].first_at == jobs[0].first_at
    assert jobs[1].computed_s == jobs[2].computed_s == 0.0
    assert jobs[2].first_at == 5.0


def test_a_pause_of_ages_takes_no_time() -> None:
    """A log's one line with a time of 0 puts fifty years before all others; a speed of a millionth
    does the like."""
    asked = [arrival(at, range(9), key=7) for at in (0.0, 1.7e9, 1.7e9 + 50.0, 1e300)]
    assert try_out(trace(asked), SMALL).layers == ["forward", "forward", "exact", "forward"]


def test_ticks_that_are_caught_up_are_those_at_the_ends() -> None:
    """Skipping the others changes nothing: nobody came between them."""
    ticks: list[float] = []

    class Ticked:
        def on_tick(self, now: float) -> bool:
            ticks.append(now)
            return False

        def __getattr__(self, name: str) -> Any:
            return getattr(controller, name)

    controller = controller_of(SMALL)
    kernel = Kernel()
    runner = Runner(cast("Verbs", Ticked()), kernel, lambda _: None)
    for number, at in enumerate((0.5, 1.0, 1.5, 4.0, 4.25, 100.0)):
        kernel.run(at)
        runner.arrive(request_of(number, arrival(at, [1], key=number)))
    assert ticks == [1.0, 2.0, 3.0, 4.0, 5.0, 99.0]


def test_requests_without_a_key_never_meet_the_response_cache() -> None:
    tried = try_out(trace([arrival(float(at), [1]) for at in range(3)]), SMALL)
    assert tried.layers == ["forward"] * 3


def test_sampled_requests_go_past_it() -> None:
    asked = [arrival(float(at), [1], key=3, sampled=True) for at in range(3)]
    assert try_out(trace(asked), SMALL).layers == ["forward"] * 3


@pytest.mark.parametrize(
    ("stop", "again"),
    [("stop", "exact"), ("", "exact"), ("length", "forward"), ("status-502", "forward")],
)
def test_only_a_complete_success_is_kept(stop: str, again: str) -> None:
    asked = [
        msgspec.structs.replace(arrival(at, range(9), key=7), stop=stop) for at in (0.0, 0.03, 5.0)
    ]
    assert try_out(trace(asked), SMALL).layers == ["forward", "join", again]


def test_a_closed_loop_goes_on_after_a_hit() -> None:
    asked = [arrival(0.1 * at, range(9), key=7, session="s", think_s=1.0) for at in range(3)]
    tried = try_out(
        trace(asked),
        Setup(workers=1, worker_tokens=300, service=LINEAR, exact_ttl_s=9.0, loop="closed"),
    )
    assert tried.layers == ["forward", "exact", "exact"]
    assert [job.arrived_at for job in tried.run.jobs] == pytest.approx(
        [0.0, 0.091 + 1, 0.091 + 2], abs=2e-3
    )


def conversation() -> Trace:
    """Sessions that grow, over a common trunk."""
    asked = []
    for turn in range(20):
        for session in range(6):
            blocks = [1, 2, *(100 * session + 10 + i for i in range(turn))]
            asked.append(
                arrival(
                    turn * 3.0 + session * 0.4,
                    blocks,
                    session=str(session),
                    turn=turn,
                    key=1000 * session + turn,
                )
            )
    return trace(sorted(asked, key=lambda one: one.at))


def test_the_report_tells_every_lever_and_nothing_that_was_not_measured() -> None:
    made = replay(conversation(), Questions(setup=SMALL, ours="cost", tier_tokens=5_000), quiet)
    assert made.saved is not None
    assert made.latency is not None
    assert made.capacity is not None
    names = [lever.name for lever in made.saved.levers]
    assert names == ["routing", "tier read on demand", "response cache"]
    assert made.saved.together is not None
    assert (
        made.saved.together.saved_gpu_s
        > max(lever.saved_gpu_s for lever in made.saved.levers) - 1e-9
    )
    assert [arm.name for arm in made.latency.arms] == [BASELINE, *names, TOGETHER]
    curves = {curve.policy: curve.hit_token_ratio for curve in made.capacity.curves}
    for lru, belady, most in zip(curves["lru"], curves["belady"], curves["infinite"], strict=True):
        assert lru <= belady <= most
    assert made.ablation is not None
    assert made.price is not None
    document = report.encode(made)
    assert report.decode(document) == made
    assert json.loads(document)["schema"] == "preheat.report/1"


def test_the_response_cache_tells_what_it_answered_and_what_was_not_generated() -> None:
    asked = [arrival(at, range(9), key=7, output_tokens=4) for at in (0.0, 0.03, 5.0, 200.0)]
    made = replay(trace(asked), Questions(setup=SMALL, exact_ttl_s=100.0), quiet)
    found = made.answers
    assert found is not None
    assert (found.requests, found.stored_requests, found.joined_requests) == (4, 1, 1)
    assert found.spared_output_tokens == 8
    assert any("counted as if all were greedy" in note for note in found.notes)
    assert any("Decoding" in note for note in found.notes)
    assert made.settings is not None
    assert made.settings.answers_ttl_s == 100.0


def test_where_nobody_is_greedy_it_is_said_why_nothing_is_stored() -> None:
    asked = [arrival(float(at), [1, at], key=3, sampled=True) for at in range(5)]
    found = replay(trace(asked), Questions(setup=SMALL), quiet).answers
    assert found is not None
    assert found.stored_requests + found.joined_requests == 0
    assert len(found.notes) == 1
    assert found.notes[0].startswith("No request of this trace is greedy")


def test_what_changes_nothing_saves_nothing_and_not_minus_nothing() -> None:
    """No prompt comes twice: sums in another order differ in the last digit only."""
    asked = [arrival(0.37 * at, [10 * at, 10 * at + 1], key=at) for at in range(40)]
    made = replay(trace(asked), Questions(setup=SMALL, tier_tokens=5_000), quiet)
    assert made.saved is not None
    assert made.summary is not None
    document = report.encode(made)
    assert {lever.saved_gpu_s for lever in made.saved.levers} == {0.0}
    assert b"-0" not in document
    assert made.summary.sentence.startswith("Nothing to save here: what was tried changes")
    assert made.summary.saved_share == 0.0


def test_few_blocks_make_no_curves_but_a_sentence() -> None:
    asked = [arrival(float(at), [1, 2, 10 + at], key=at) for at in range(9)]
    made = replay(trace(asked), Questions(setup=SMALL), quiet)
    assert made.capacity is None
    assert made.summary is not None
    assert made.summary.notes == (
        "Everything that repeats fits in 20 tokens of memory: no hit curves.",
    )


def test_an_order_of_requests_has_no_waits() -> None:
    ordered = msgspec.structs.replace(conversation(), times="order")
    made = replay(ordered, Questions(setup=SMALL, tier_tokens=5_000), quiet)
    assert made.latency is None
    assert made.events == ()
    assert made.saved is not None
    assert made.summary is not None
    assert made.summary.fleet_share is None
    assert made.balance is not None
    assert {rule.ttft_p99_s for rule in made.balance.rules} == {None}


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ((10.0, 5.0, 5.01, 5.02), ("Any rule but round robin gets this mean wait, to 1%.",)),
        ((10.0, 5.01, 7.0, 5.0), ("least_loaded, a plain rule, gets the best mean wait, too, to 1%.",)),
        ((10.0, 6.0, 5.0, 5.0), ()),
        ((5.0, 5.0, 5.0, 5.0), ()),
    ],
)  # fmt: skip
def test_a_plain_rule_that_does_as_well_is_told(
    costs: tuple[float, ...], said: tuple[str, ...]
) -> None:
    asked = [Arrival(at=0.1 * at, input_tokens=50, output_tokens=3) for at in range(2)]
    lengths = Trace(name="lengths", format="test", arrivals=asked)
    found = measures_of(try_out(lengths, SMALL).run, 2)
    rules = ("round_robin", "least_loaded", "smg", "preheat")
    runs = {
        name: msgspec.structs.replace(found, ttft=spread_of([cost]))
        for name, cost in zip(rules, costs, strict=True)
    }
    assert arms.balance_section(runs, "preheat", lengths).notes == said


def test_the_same_trace_gives_the_same_report() -> None:
    asked = Questions(setup=SMALL, ours="preheat", tier_tokens=5_000)
    assert report.encode(replay(conversation(), asked, quiet)) == report.encode(
        replay(conversation(), asked, quiet)
    )


def test_a_stream_of_keys_gets_hit_ratios_alone() -> None:
    keys = [Arrival(at=float(i), key=i % 7) for i in range(100)]
    made = replay(Trace(name="keys", format="test", arrivals=keys), Questions(), quiet)
    assert made.saved is None
    assert made.cautions == ()
    assert made.settings == report.Settings(workers=0)
    (table,) = made.headroom
    infinite = table.rows[-1]
    assert infinite[0] == "infinite"
    assert infinite[1] == pytest.approx(93 / 100)


def test_lengths_alone_say_something_about_queues_and_nothing_about_prefixes() -> None:
    asked = [Arrival(at=0.1 * i, input_tokens=50, output_tokens=3) for i in range(50)]
    made = replay(
        Trace(name="lengths", format="test", arrivals=asked), Questions(setup=SMALL), quiet
    )
    assert made.capacity is None
    assert made.balance is not None
    assert any("no blocks" in caution for caution in made.cautions)
    assert (made.saved, made.ablation, made.answers) == (None, None, None)
    assert made.summary is not None
    assert made.summary.sentence.startswith(
        "This trace can't say what a cache would save: it has no prompts. Only waits can be compared."
    )
    assert "p99 of the first token" in made.summary.sentence
    assert (made.summary.saved_gpu_s, made.summary.is_small) == (None, False)
    assert {rule.prefill_share for rule in made.balance.rules} == {None}


def test_a_trace_of_nothing_but_times_is_an_error_that_says_so() -> None:
    bare = Trace(name="bare", format="test", arrivals=[Arrival(at=0.0), Arrival(at=1.0)])
    with pytest.raises(ConfigError, match="neither lengths, blocks nor keys"):
        replay(bare, Questions(), quiet)


def test_a_worker_without_room_refuses_everything_and_the_report_says_it() -> None:
    made = replay(
        conversation(), Questions(setup=Setup(workers=1, worker_tokens=5, service=LINEAR)), quiet
    )
    assert any("longer than a worker's memory" in caution for caution in made.cautions)
    assert made.summary is not None
    assert made.summary.sentence.startswith("Nothing could be served: each of the")
    assert "the 5 tokens that a worker's memory holds" in made.summary.sentence
    assert not made.summary.is_small
    assert (made.saved, made.latency, made.balance, made.events) == (None, None, None, ())


def test_one_endless_cache_for_all_is_the_bound_where_no_answers_are_kept() -> None:
    prompts = [msgspec.structs.replace(one, key=-1) for one in conversation().arrivals]
    made = replay(trace(prompts), Questions(setup=SMALL), quiet)
    assert made.saved is not None
    assert made.saved.together is not None
    assert made.saved.bound_gpu_s is not None
    left_s = made.saved.baseline_gpu_s - made.saved.together.saved_gpu_s
    assert 0 < made.saved.bound_gpu_s <= left_s * (1 + 1e-9)
    answered = replay(conversation(), Questions(setup=SMALL), quiet)
    assert answered.saved is not None
    assert answered.saved.bound_gpu_s is None


def test_what_no_worker_can_hold_is_counted_in_whole_blocks() -> None:
    """A worker of 25 tokens has two blocks of 10: the prompt of 21 tokens, and that of 20 with an
    answer, are refused."""
    asked = [
        Arrival(at=float(at), id=str(at), input_tokens=tokens, output_tokens=5, blocks=blocks)
        for at, (tokens, blocks) in enumerate([(21, (1, 2)), (20, (1, 2)), (10, (1,))])
    ]
    small = Questions(setup=Setup(workers=1, worker_tokens=25, service=LINEAR))
    made = replay(trace(asked), small, quiet)
    assert made.cautions[0].startswith("2 of 3 requests")
