"""A service model is found again in the times of simulated servers, alone and in company."""

import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import pytest

from preheat.core.costs import ServiceModel, Timing
from preheat.errors import ConfigError
from preheat.replay.fitting import Served, fit, fit_points, fit_times, served_of
from preheat.replay.kernel import Kernel
from preheat.replay.llamacpp import Host, Prompt, Server, ServerSpec
from preheat.replay.whatif import Setup, try_out
from preheat.traces.arrival import Arrival, Trace

TRUE = ServiceModel(token_s=5e-3, attention_s=2e-6, step_s=8e-3, sequence_s=3e-3, context_s=1e-5)
BATCH = 128


def on_one_host(slowdown: float) -> list[Served]:
    """Two servers beside each other, both busy half of the time."""
    chance, kernel, ended = random.Random(8), Kernel(), list[Prompt]()
    host, spec = Host(slowdown), ServerSpec(batch_tokens=BATCH, cache_bytes=0)
    servers = [
        Server(spec, TRUE, kernel, nothing_shared, ended.append, host=host) for _ in range(2)
    ]
    at = 0.0
    for number in range(300):
        at += chance.expovariate(1 / 5.0)
        place = number % 2
        sizes = chance.randrange(2, 1500), chance.randrange(1, 60)
        kernel.plan(at, servers[place].submit, Prompt(number, at, *sizes, worker=place))
    kernel.run()
    return [msgspec.structs.replace(logged(one), worker=f"w{one.worker}") for one in ended]


def nothing_shared(held: Prompt, prompt: Prompt) -> int:
    return 0


def served(gap_s: float, *, count: int = 150, slots: int = 4) -> list[Served]:
    """What a server's log would say of random requests, one about every `gap_s`."""
    chance, kernel, ended = random.Random(5), Kernel(), list[Prompt]()
    spec = ServerSpec(slots=slots, batch_tokens=BATCH, cache_bytes=0)
    server = Server(spec, TRUE, kernel, nothing_shared, ended.append)
    at = 0.0
    for number in range(count):
        at += chance.expovariate(1 / gap_s)
        prompt = Prompt(number, at, chance.randrange(2, 1500), chance.randrange(1, 60))
        kernel.plan(at, server.submit, prompt)
    kernel.run()
    return [logged(one) for one in ended]


def logged(one: Prompt) -> Served:
    ttft_s, service_s = one.first_at - one.arrived_at, one.ended_at - one.arrived_at
    tokens = one.input_tokens, one.cached_tokens, one.output_tokens
    return Served("w", one.arrived_at, ttft_s, service_s, *tokens)


def test_without_company_prices_are_exact() -> None:
    found = fit(served(1e4), batch_tokens=BATCH)
    assert found.model.token_s == pytest.approx(TRUE.token_s, rel=1e-3)
    assert found.model.attention_s == pytest.approx(TRUE.attention_s, rel=1e-3)
    assert found.model.context_s == pytest.approx(TRUE.context_s, rel=0.01)
    # A step has one sequence here: its price and the step's can't be told apart in decoding.
    together_s = found.model.step_s + found.model.sequence_s
    assert together_s == pytest.approx(TRUE.step_s + TRUE.sequence_s, rel=0.01)
    assert found.ttft.p99 < 0.02
    assert found.decode.p99 < 0.02
    assert found.requests == 150


def test_in_company_they_are_near() -> None:
    rows = served(7.0)  # seven tenths of the time there is work
    crowded = sum(
        any(
            other.asked_at < one.ended_at and other.ended_at > one.asked_at
            for other in rows
            if other is not one
        )
        for one in rows
    )
    assert crowded > 0.5 * len(rows)
    found = fit(rows, batch_tokens=BATCH).model
    assert found.prefill_s(1000) == pytest.approx(TRUE.prefill_s(1000), rel=0.05)
    assert found.decode_s(30, 500) == pytest.approx(TRUE.decode_s(30, 500), rel=0.1)


def test_to_take_company_into_account_is_better_than_not_to() -> None:
    rows = served(7.0)
    apart = [Served(f"{n}", *one_of(row)) for n, row in enumerate(rows)]  # as if nobody shared
    true_s = TRUE.prefill_s(1000)
    with_others_s = fit(rows, batch_tokens=BATCH).model.prefill_s(1000)
    without_s = fit(apart, batch_tokens=BATCH).model.prefill_s(1000)
    assert abs(with_others_s - true_s) < 0.5 * abs(without_s - true_s)


@pytest.mark.parametrize("slowdown", [0.0, 0.3])
def test_how_much_servers_of_one_host_slow_each_other_is_found(slowdown: float) -> None:
    rows = on_one_host(slowdown)
    found = fit(rows, batch_tokens=BATCH, is_one_host=True)
    assert found.slowdown == pytest.approx(slowdown, abs=0.051)
    assert found.model.prefill_s(1000) == pytest.approx(TRUE.prefill_s(1000), rel=0.05)
    assert ("longer beside another" in str(found)) == (found.slowdown > 0)
    assert fit(rows, batch_tokens=BATCH).slowdown == 0.0  # nobody said that it is one host


def one_of(row: Served) -> Sequence[Any]:
    return [getattr(row, name) for name in Served.__struct_fields__ if name != "worker"]


def test_rare_slow_moments_are_in_the_total() -> None:
    chance = random.Random(1)
    rows = []
    for number in range(2000):
        tokens = chance.randrange(10, 1500)
        slow = 6.0 if chance.random() < 0.1 else 1.0
        ttft_s = slow * tokens * 1e-3
        rows.append(Served("w", 1e4 * number, ttft_s, ttft_s, tokens, 0, 1))
    model = fit(rows).model
    expected_s = fmean(model.step_s + model.prefill_s(row.input_tokens) for row in rows)
    assert expected_s == pytest.approx(fmean(row.ttft_s for row in rows), rel=0.03)


def test_a_short_log_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"at least 10 answered .* here are 9; take a longer log"):
        fit(served(1e4)[:9])


def test_the_error_is_of_later_requests_by_a_fit_to_earlier_ones() -> None:
    rows = served(1e4)
    found = fit_times(rows, batch_tokens=BATCH)
    assert found.model == fit(rows, batch_tokens=BATCH).model
    assert (found.requests, found.ttft.count) == (150, 50)
    assert found.ttft.p99 < 0.02
    # A machine that becomes half as fast after two thirds is off by a half, and says it.
    slow = [
        msgspec.structs.replace(one, ttft_s=2 * one.ttft_s, service_s=2 * one.service_s)
        for one in rows[100:]
    ]
    later = fit_times([*slow, *rows[:100]], batch_tokens=BATCH)  # in any order
    assert later.ttft.p50 == pytest.approx(0.5, abs=0.01)
    assert later.decode.p50 == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("rate", "error"), [(1.0, 0.02), (8.0, 0.25)])
def test_the_engines_of_a_replay_are_found_again(rate: float, error: float) -> None:
    """From nearly alone to some thirty at once on each of two."""
    chance, at, asked = random.Random(1), 0.0, []
    for _ in range(800):
        at += chance.expovariate(rate)
        sizes = {
            "input_tokens": chance.randrange(10, 4_000),
            "output_tokens": chance.randrange(20, 400),
        }
        asked.append(Arrival(at=at, **sizes))
    setup = Setup(workers=2, worker_tokens=4_000_000)
    run = try_out(Trace(name="t", format="t", arrivals=asked), setup).run
    rows = []
    for job in run.jobs:
        assert job.first_at is not None
        assert job.ended_at is not None
        times = job.first_at - job.arrived_at, job.ended_at - job.arrived_at
        rows.append(
            Served(f"{job.worker}", job.arrived_at, *times, job.input_tokens, 0, job.output_tokens)
        )
    found = fit_times(rows, batch_tokens=setup.step_tokens)
    assert found.ttft.p50 < error
    for tokens in (500, 2_000):
        true_s = setup.service.prefill_s(tokens)
        assert found.model.prefill_s(tokens) == pytest.approx(true_s, rel=0.06)
    assert found.model.decode_s(100, 2_000, 20) == pytest.approx(
        setup.service.decode_s(100, 2_000, 20), rel=0.1
    )


def test_only_the_newest_requests_count() -> None:
    old = [Served("w", 10.0 * at, 9.0, 9.0, 100 + at, 0, 1) for at in range(5_000)]
    new = [
        Served("w", 1e6 + 10.0 * at, 1e-3 * (100 + at), 1e-3 * (100 + at), 100 + at, 0, 1)
        for at in range(4_000)
    ]
    found = fit_times([*old, *new])
    assert found.requests == 4_000
    assert found.model.token_s == pytest.approx(1e-3)
    assert found.decode.count == 0
    assert "decoding: no answer is longer than a token" in str(found)


@pytest.mark.parametrize("same", ["tokens", "times"])
def test_times_that_do_not_tell_what_a_token_costs_are_refused(same: str) -> None:
    chance, rows = random.Random(3), []
    for number in range(60):
        tokens = 500 if same == "tokens" else chance.randrange(10, 2_000)
        ttft_s = 0.5 if same == "times" else chance.uniform(0.4, 0.6)
        rows.append(Served("w", 1e4 * number, ttft_s, ttft_s + 0.1, tokens, 0, 5))
    with pytest.raises(ConfigError, match=r"don't grow .* what a token costs can't be told"):
        fit_times(rows)


def test_too_few_to_judge_by_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 15 answered .* here are 14"):
        fit_times(served(1e4)[:14])


def test_it_says_its_error() -> None:
    text = str(fit(served(1e4), batch_tokens=BATCH))
    assert text.startswith("150 requests; error as a share, p50 / p90 / p99\nfirst token: 0.00")


def test_points_that_were_measured_one_by_one_do_as_well() -> None:
    chance, points = random.Random(2), []
    for _ in range(40):
        new, context = chance.randrange(1, 3000), chance.randrange(3000)
        out, sequences = chance.randrange(1, 50), chance.randrange(1, 9)
        ttft_s = TRUE.step_s + TRUE.prefill_s(new, context)
        decode_s = TRUE.decode_s(out - 1, new + context + 1, sequences)
        points.append(Timing(new, context, out, ttft_s, ttft_s + decode_s, sequences))
    found = fit_points(points).model
    for name in ServiceModel.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)
    with pytest.raises(ConfigError, match="at least 10"):
        fit_points(points[:3])


class Row(NamedTuple):
    at_us: int
    layer: str
    fields: dict[str, Any]


def in_one_piece(row: Served, *, streamed: bool) -> Served:
    return msgspec.structs.replace(row, ttft_s=row.service_s if streamed else None)


@pytest.mark.parametrize("streamed", [True, False])
def test_answers_in_one_piece_teach_no_first_token(*, streamed: bool) -> None:
    """Not even where they are nearly all of the log, and take it for their own."""
    rows = served(1e4)
    mixed = [
        row if number % 3 == 0 else in_one_piece(row, streamed=streamed)
        for number, row in enumerate(rows)
    ]
    found = fit_times(mixed, batch_tokens=BATCH)
    assert found.requests == sum(row.first_s is not None for row in mixed) < 70
    assert found.model.token_s == pytest.approx(TRUE.token_s, rel=0.02)
    assert found.ttft.p90 < 0.02
    with pytest.raises(ConfigError, match="at least 15 answered requests that were streamed"):
        fit_times([in_one_piece(row, streamed=streamed) for row in rows])


def test_an_engine_that_answers_others_in_one_piece_meanwhile_is_no_slower_for_it() -> None:
    rows = served(7.0)
    chance = random.Random(3)
    mixed = [in_one_piece(row, streamed=False) if chance.random() < 0.5 else row for row in rows]
    true_s = TRUE.prefill_s(1000)
    found_s = fit(mixed, batch_tokens=BATCH).model.prefill_s(1000)
    alone_s = fit(
        [row for row in mixed if row.ttft_s is not None], batch_tokens=BATCH
    ).model.prefill_s(1000)
    assert found_s == pytest.approx(true_s, rel=0.1)
    assert abs(found_s - true_s) < 0.5 * abs(alone_s - true_s)


def test_of_a_log_only_answers_of_engines_count() -> None:
    about = {
        "stream": True,
        "status": 200,
        "engine_worker": "up.1",
        "ttft_s": 0.5,
        "service_s": 0.75,
        "input_tokens": 100,
        "cached_tokens": None,
        "output_tokens": 9,
    }
    rows = [
        Row(2_000_000, "forward", about),
        Row(3_000_000, "exact", about),
        Row(3_000_000, "join", about),
        Row(3_000_000, "forward", {**about, "stream": False}),
        Row(3_000_000, "forward", {**about, "status": 429}),
        Row(3_000_000, "forward", {**about, "input_tokens": None}),
    ]
    assert served_of(rows) == [
        Served("up.1", 2.0, 0.5, 0.75, 100, 0, 9, tells_cached=False),
        Served("up.1", 3.0, None, 0.75, 100, 0, 9, tells_cached=False),
    ]


def test_a_log_that_does_not_say_what_was_cached_is_told() -> None:
    rows = [msgspec.structs.replace(one, tells_cached=False) for one in served(1e4)]
    assert "150 of them don't say what was cached" in str(fit(rows, batch_tokens=BATCH))
    assert "cached" not in str(fit(served(1e4), batch_tokens=BATCH))
