"""A simulated worker, step by step: what the sums come to by hand."""

from collections.abc import Sequence
from heapq import heappop

import pytest

from preheat.core.costs import ServiceModel
from preheat.core.prefix import LeafLru, PrefixStore
from preheat.replay.kernel import Kernel
from preheat.replay.tiers import TierSpec
from preheat.replay.worker import Job, Worker, WorkerSpec

TOKEN_S = 0.001
LINEAR = ServiceModel(token_s=TOKEN_S, attention_s=0.0)
DECODING = ServiceModel(token_s=TOKEN_S, attention_s=0.0, step_s=0.01, sequence_s=0.001)


class Bench:
    """One worker with blocks of ten tokens."""

    def __init__(self, service: ServiceModel = LINEAR, capacity_blocks: int = 100, **spec: object):
        self.kernel = Kernel()
        self.ended: list[int] = []
        made = WorkerSpec(capacity_blocks, 10, **spec)  # type: ignore[arg-type]  # by the tests
        store = PrefixStore(capacity_blocks, LeafLru())
        self.worker = Worker(0, made, service, self.kernel, store, self.note)
        self.jobs: list[Job] = []

    def note(self, job: Job) -> None:
        self.ended.append(job.number)

    def ask(self, at: float, blocks: Sequence[int], tokens: int, output_tokens: int = 1) -> Job:
        job = Job(len(self.jobs), at, tuple(blocks), tokens, output_tokens)
        self.jobs.append(job)
        self.kernel.plan(at, self.worker.submit, job)
        return job


def test_a_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    bench = Bench(DECODING, step_tokens=64)
    job = bench.ask(1.0, range(10), 100, output_tokens=4)
    bench.kernel.run()
    # Two steps of prefill (64 and 36 tokens), the second gives the first token; three of decoding.
    assert job.first_at == pytest.approx(1.0 + 0.010 + 0.064 + 0.010 + 0.036)
    assert job.ended_at == pytest.approx(job.first_at + 3 * (0.010 + 0.001))
    assert bench.worker.store.free_blocks == 100 - 10  # its blocks stay, what it generated goes


def test_a_known_prefix_is_not_computed_again_but_for_the_last_token() -> None:
    bench = Bench()
    bench.ask(0.0, range(10), 100)
    again = bench.ask(10.0, range(10), 100)
    longer = bench.ask(20.0, range(12), 125)
    bench.kernel.run()
    assert (again.cached_tokens, longer.cached_tokens) == (99, 100)
    assert again.first_at == pytest.approx(10.0 + 1 * TOKEN_S)
    assert longer.computed_s == pytest.approx(25 * TOKEN_S)


def test_who_comes_while_others_decode_waits_for_the_step_that_is_under_way() -> None:
    bench = Bench(DECODING, capacity_blocks=200)
    first = bench.ask(0.0, [1], 10, output_tokens=1_000)
    # Its first token comes after 20 ms, then one each 11 ms.
    second = bench.ask(0.035, [2], 10)
    bench.kernel.run()
    assert second.first_at == pytest.approx(0.020 + 2 * 0.011 + 0.010 + 0.010 + 0.001)
    assert bench.ended == [1, 0]
    # A thousand tokens: one from prefill, the rest in steps, one of which computed a prompt too.
    assert first.ended_at == pytest.approx(0.020 + 999 * 0.011 + 0.010)


def test_equal_prefixes_in_the_queue_are_computed_once() -> None:
    bench = Bench(step_tokens=1_000)
    jobs = [bench.ask(0.0, range(10), 105) for _ in range(5)]
    bench.kernel.run()
    assert sum(job.computed_s for job in jobs) == pytest.approx((100 + 5 * 5) * TOKEN_S)


def test_a_router_sees_what_is_coming_and_how_long_the_queue_is() -> None:
    bench = Bench(step_tokens=0, step_prefills=1)
    bench.ask(0.0, range(10), 100)
    bench.ask(0.0, [*range(10), 77], 110)
    bench.kernel.run(until=0.03)
    assert bench.worker.overlap([*range(10), 77, 78]) == 11
    assert bench.worker.queue_s() == pytest.approx(0.1 + 0.01 - 0.03)
    assert bench.worker.in_flight == 2
    bench.kernel.run()
    assert bench.worker.queue_s() == pytest.approx(0.0)
    assert bench.worker.overlap([*range(10), 77, 78]) == 11


def test_the_youngest_is_preempted_when_memory_runs_out_and_computed_anew() -> None:
    bench = Bench(DECODING, capacity_blocks=5)
    old = bench.ask(0.0, [1, 2], 20, output_tokens=25)
    young = bench.ask(0.0, [7], 15, output_tokens=25)
    bench.kernel.run()
    assert (old.preempted, young.preempted) == (0, 1)
    assert bench.ended == [0, 1]
    assert young.decoded == 25
    assert bench.worker.store.free_blocks + len(bench.worker.store) == 5


def test_what_can_never_fit_is_refused_and_holds_up_nobody() -> None:
    bench = Bench(capacity_blocks=5)
    large = bench.ask(0.0, range(6), 60)
    small = bench.ask(0.0, [9], 10)
    bench.kernel.run()
    assert large.refused
    assert large.first_at is None
    assert small.first_at == pytest.approx(10 * TOKEN_S)


@pytest.mark.parametrize(("block_s", "loads"), [(0.002, True), (0.02, False)])
def test_a_lower_tier_is_read_where_that_is_faster_than_computing(
    block_s: float, loads: bool
) -> None:
    tier = TierSpec("dram", capacity_blocks=50, block_s=block_s)
    bench = Bench(capacity_blocks=11, tiers=(tier,))
    bench.ask(0.0, range(10), 100)
    bench.ask(1.0, range(50, 61), 110)
    again = bench.ask(2.0, range(10), 101)
    bench.kernel.run()
    assert again.loaded_blocks == (10 if loads else 0)
    if loads:
        assert again.first_at == pytest.approx(2.0 + 10 * block_s + 1 * TOKEN_S)
    else:
        assert again.first_at == pytest.approx(2.0 + 101 * TOKEN_S)


def test_loading_lets_others_compute_meanwhile() -> None:
    tier = TierSpec("ssd", capacity_blocks=50, block_s=0.009)
    bench = Bench(capacity_blocks=12, tiers=(tier,))
    bench.ask(0.0, range(10), 100)
    bench.ask(1.0, range(50, 62), 120)
    loading = bench.ask(2.0, range(10), 101)
    other = bench.ask(2.0, [90], 10)
    bench.kernel.run()
    assert other.first_at == pytest.approx(2.0 + 10 * TOKEN_S)
    assert loading.first_at == pytest.approx(2.0 + 0.09 + TOKEN_S)


def test_a_very_long_answer_takes_few_events() -> None:
    bench = Bench(DECODING, capacity_blocks=1_000)
    bench.ask(0.0, [1], 10, output_tokens=10**9)
    for _ in range(4_000):
        if not bench.kernel._heap:
            break
        bench.kernel.now, _, do, what = heappop(bench.kernel._heap)
        do(what)
    assert bench.worker.in_flight == 0
    assert bench.jobs[0].refused  # ten thousand tokens fit, and no more


def test_what_is_told_to_a_router_is_nothing_again_when_all_is_done() -> None:
    bench = Bench(DECODING, capacity_blocks=7, step_tokens=16)
    for number in range(9):
        bench.ask(0.01 * number, [number % 3, 50 + number], 25, output_tokens=9)
    bench.ask(0.02, range(100, 120), 200)  # never fits
    bench.kernel.run(until=0.03)
    waiting = bench.worker
    assert waiting.backlog.prefill_tokens > 0
    assert waiting.backlog.kv_blocks >= 3 * 2
    bench.kernel.run()
    assert (waiting.backlog.prefill_tokens, waiting.backlog.kv_blocks, waiting.in_flight) == (
        0,
        0,
        0,
    )
    assert waiting.queue_s() == pytest.approx(0.0)
    assert sum(job.preempted for job in bench.jobs) > 0
