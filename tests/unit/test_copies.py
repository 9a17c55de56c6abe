"""A hot prefix is copied where the copy pays for itself, and a lukewarm one isn't."""

import random
from math import exp
from typing import NamedTuple

import pytest

from preheat.core.copies import Copies
from preheat.core.costs import ServiceModel
from preheat.core.placing import Candidate, Placing
from preheat.core.routing import POLICIES
from preheat.core.routing.preheat import Preheat
from preheat.replay.fleet import Fleet, FleetSpec, run
from preheat.replay.measures import measures_of
from preheat.replay.worker_spec import WorkerSpec
from preheat.traces.arrival import Arrival

BLOCK_TOKENS = 100
BLOCKS = (11, 12, 13, 14, 15, 16, 17, 18)
PROMPT = Placing(800, BLOCKS, BLOCK_TOKENS)


def worker(number: int, blocks: int, queue_s: float, price: float = 0.0) -> Candidate:
    """One that takes 1 ms for each token that it lacks."""
    has = min(blocks * BLOCK_TOKENS, 799)
    miss_s = (800 - has) / 1_000
    return Candidate(number=number, overlap_tokens=has, miss_s=miss_s, queue_s=queue_s, price=price)


def test_a_copy_is_worth_what_the_requests_before_would_have_been_sooner() -> None:
    copies = Copies(memory_s=100.0)
    fleet = [worker(0, 5, 0.5), worker(1, 0, 0.3)]
    # With the five blocks the other would have begun after 0.3 + 0.3 s instead of 0.5 + 0.3.
    assert (
        copies.worth_s(PROMPT, fleet, -9.0) is None
    )  # somebody waits: from now on it could be there
    assert copies.worth_s(PROMPT, fleet, 0.0) is None
    assert copies.worth_s(PROMPT, fleet, 0.0) == pytest.approx([0.0, 0.2])
    again = copies.worth_s(PROMPT, fleet, 100.0)
    assert again == pytest.approx([0.0, 0.4 * exp(-1.0)])
    assert len(copies) == 4  # of 1, 2, 4 and 5 blocks


def test_those_who_wait_for_its_first_computing_want_no_copy() -> None:
    copies = Copies()
    for milliseconds in range(0, 400, 10):  # 0.4 s for the four blocks
        now = milliseconds / 1_000
        computing = [worker(0, 4, 0.4 - now), worker(1, 0, 0.0)]
        assert copies.worth_s(PROMPT, computing, now) is None


def test_who_need_not_wait_wants_no_copy() -> None:
    copies = Copies()
    assert copies.worth_s(PROMPT, [worker(0, 8, 0.0), worker(1, 0, 0.0)], 0.0) is None
    assert copies.worth_s(PROMPT, [worker(0, 4, 1.0), worker(1, 4, 0.0)], 0.0) is None
    assert copies.worth_s(Placing(800), [worker(0, 4, 1.0), worker(1, 0, 0.0)], 0.0) is None
    assert len(copies) == 0


def test_a_part_that_another_request_shares_counts_for_it() -> None:
    copies = Copies()
    busy = [worker(0, 8, 9.0), worker(1, 0, 0.0)]
    copies.worth_s(PROMPT, busy, -9.0)
    copies.worth_s(PROMPT, busy, 0.0)
    other = Placing(800, (*BLOCKS[:4], 91, 92, 93, 94), BLOCK_TOKENS)
    worth_s = copies.worth_s(other, [worker(0, 4, 9.0), worker(1, 0, 0.0)], 0.0)
    # It could have begun after 0.8 s there without a copy, after 0.4 s with four blocks.
    assert worth_s == pytest.approx([0.0, 0.4])


def test_what_the_copy_pushes_out_is_taken_off() -> None:
    copies = Copies()
    fleet = [worker(0, 5, 0.5, price=9.0), worker(1, 0, 0.3, price=0.02)]
    copies.worth_s(PROMPT, fleet, -9.0)
    copies.worth_s(PROMPT, fleet, 0.0)
    assert copies.worth_s(PROMPT, fleet, 0.0) == pytest.approx([0.0, 0.2 - 8 * 0.02])
    dear = [worker(0, 5, 0.5), worker(1, 0, 0.3, price=1.0)]
    assert copies.worth_s(PROMPT, dear, 0.0) == [0.0, 0.0]


def test_once_it_is_made_another_must_be_earned_anew() -> None:
    copies = Copies()
    fleet = [worker(0, 5, 0.5), worker(1, 0, 0.3), worker(2, 0, 0.3)]
    copies.worth_s(PROMPT, fleet, -9.0)
    copies.worth_s(PROMPT, fleet, 0.0)
    copies.sent(PROMPT, fleet, fleet[0], 0.0)  # where it is already: nothing changes
    assert copies.worth_s(PROMPT, fleet, 0.0) == pytest.approx([0.0, 0.2, 0.2])
    copies.sent(PROMPT, fleet, fleet[1], 0.0)
    assert copies.worth_s(PROMPT, fleet, 0.0) is None


def test_what_is_remembered_is_bounded() -> None:
    copies = Copies(prefixes=10)
    for number in range(100):
        prompt = Placing(800, tuple(range(10 * number, 10 * number + 8)), BLOCK_TOKENS)
        copies.worth_s(prompt, [worker(0, 8, 9.0), worker(1, 0, 0.0)], float(number))
    assert len(copies) == 10


# What comes of it, in simulated time --------------------------------------------------------------

COMMON, OWN, OF = 64, 4, 128
SERVICE = ServiceModel()
HIT_S = SERVICE.prefill_s(OWN * OF, COMMON * OF)


def prompts(rate_per_s: float, families: int, requests: int = 1_500) -> list[Arrival]:
    """Prompts that share 8,192 tokens and have 512 of their own."""
    chance = random.Random(7)
    at, made = 0.0, []
    for number in range(requests):
        at += chance.expovariate(rate_per_s)
        first = 1_000 * chance.randrange(families)
        own = 1_000_000 + OWN * number
        blocks = (*range(first, first + COMMON), *range(own, own + OWN))
        tokens = OF * len(blocks) + 1
        made.append(Arrival(at=at, input_tokens=tokens, output_tokens=1, blocks=blocks))
    return made


class Served(NamedTuple):
    """TTFTs and prefill of the second half; requests by worker."""

    mean_s: float
    p99_s: float
    prefill_share: float
    sent: list[int]


def served(arrivals: list[Arrival], *, copies: bool) -> Served:
    spec = FleetSpec(WorkerSpec(4_096, OF, step_tokens=0, step_prefills=1), SERVICE, 4)
    made = run(arrivals, OF, Fleet(spec, Preheat(copies=copies)))
    found = measures_of(made, 4, start=arrivals[len(arrivals) // 2].at)
    sent = [sum(job.worker == number for job in made.jobs) for number in range(4)]
    return Served(found.ttft.mean, found.ttft.p99, found.prefill_share, sent)


def test_prefixes_hotter_than_a_worker_can_serve_are_spread() -> None:
    arrivals = prompts(2.5 / HIT_S, families=2)
    alone, copied = served(arrivals, copies=False), served(arrivals, copies=True)
    assert alone.mean_s > 20 * copied.mean_s  # they queue at two, whatever stands idle beside
    assert copied.p99_s < 6 * HIT_S
    assert min(copied.sent) > 0.15 * len(arrivals)
    assert max(alone.sent) > 0.4 * len(arrivals)


def test_hot_prefixes_wait_less_long() -> None:
    arrivals = prompts(2.5 / HIT_S, families=8)
    alone, copied = served(arrivals, copies=False), served(arrivals, copies=True)
    assert copied.mean_s < 0.85 * alone.mean_s


def test_prefixes_that_come_rarely_are_hardly_computed_twice() -> None:
    arrivals = prompts(0.2 / HIT_S, families=200, requests=600)
    alone, copied = served(arrivals, copies=False), served(arrivals, copies=True)
    assert copied.prefill_share < 1.03 * alone.prefill_share
    assert copied.mean_s < 1.03 * alone.mean_s


def test_it_is_a_setting_of_the_rule() -> None:
    assert isinstance(POLICIES["preheat"](copies=True), Preheat)
