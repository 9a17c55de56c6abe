"""Where requests go, and what the router learns from what becomes of them."""

import random

import pytest

from preheat.core.costs import ServiceModel
from preheat.core.router import Ask, Router, Ticket
from preheat.core.routing import POLICIES
from preheat.core.types import Usage

FLEET = range(4)
SPEED = ServiceModel(token_s=1e-3, attention_s=0.0, step_s=0.01)


def ask(*blocks: int, model: str = "m", session: str = "", prompt_bytes: int = 0) -> Ask:
    return Ask(model, blocks, 512, prompt_bytes or 512 * max(1, len(blocks)), session)


def router(policy: str = "preheat") -> Router:
    return Router(POLICIES[policy]())


def serve(made: Router, one: Ask, now: float, took_s: float = 0.2) -> Ticket:
    """Placed at once, answered in time, as an engine of 1 ms a token would; four bytes a token."""
    ticket = made.place(one, FLEET, now).ticket
    tokens = one.prompt_bytes // 4
    assert ticket.stay is not None
    cached = min(int(128 * ticket.stay.hoped), tokens - 1)
    first_at = now + SPEED.step_s + SPEED.prefill_s(tokens - cached, cached)
    made.began(ticket, first_at)
    made.ended(ticket, Usage(tokens, 8, cached, tells_cached=True), first_at + took_s)
    return ticket


def test_a_prompt_goes_where_its_beginning_is() -> None:
    made = router()
    first = serve(made, ask(*range(20)), 0.0)
    for now in range(1, 9):
        route = made.place(ask(*range(20), 100 + now), FLEET, 10.0 * now)
        assert route.ticket.worker == first.worker
        assert route.overlap_tokens == route.best_overlap_tokens == 20 * 128
        made.failed(route.ticket, 10.0 * now + 1.0)


def test_a_burst_of_one_new_prefix_goes_to_one_place_and_of_different_ones_to_all() -> None:
    made = router()
    burst = [made.place(ask(*range(64), 1_000 + number), FLEET, 0.0) for number in range(4)]
    assert len({route.ticket.worker for route in burst}) == 1
    made = router()
    apart = [made.place(ask(*range(100 * k, 100 * k + 64)), FLEET, 0.0) for k in range(4)]
    assert len({route.ticket.worker for route in apart}) == 4


def test_a_long_queue_outweighs_a_short_prefix() -> None:
    made = router()
    holder = serve(made, ask(1), 0.0).worker
    for number in range(6):
        made.place(ask(*range(100 * number, 100 * number + 90)), [holder], 10.0)
    route = made.place(ask(1, 2), FLEET, 10.0)
    assert route.ticket.worker != holder
    assert route.best_overlap_tokens > route.overlap_tokens
    assert route.least_queue_s <= route.queue_s < made.queue_s(holder, 10.0)


def test_a_queue_is_what_was_sent_less_what_is_done() -> None:
    made = router()
    first = made.place(ask(*range(40)), [0], 0.0).ticket
    second = made.place(ask(*range(100, 140)), [0], 0.0).ticket
    assert made.queue_s(0, 0.0) == pytest.approx(first.miss_s + second.miss_s)
    assert made.queue_s(0, 0.1) == pytest.approx(first.miss_s + second.miss_s - 0.1)
    assert made.queue_s(0, 900.0) == pytest.approx(second.miss_s), "the first is overdue, no more"
    made.began(first, 900.0)
    made.began(second, 901.0)
    assert made.queue_s(0, 901.0) == 0.0


def test_speeds_and_the_bytes_of_a_token_are_learned_from_answers() -> None:
    made, chance = router(), random.Random(1)
    for number in range(200):
        blocks = range(1_000 * number, 1_000 * number + chance.randrange(1, 60))
        serve(made, ask(*blocks), 20.0 * number)
    learned = made.service("m")
    assert learned is not None
    assert learned.prefill_s(4_000) == pytest.approx(4.0, rel=0.1)
    errors = made.errors("m")
    assert errors is not None
    assert errors.p50 < 0.1
    assert made.service("another") is None


def test_answers_in_one_piece_teach_speeds_too() -> None:
    made, chance = router(), random.Random(2)
    for number in range(300):
        tokens, output = 128 * chance.randrange(1, 60), chance.randrange(1, 100)
        blocks = range(1_000 * number, 1_000 * number + tokens // 128)
        ticket = made.place(ask(*blocks), FLEET, 40.0 * number).ticket
        took_s = 0.01 + 1e-3 * tokens + 0.02 * (output - 1)
        usage = Usage(tokens, output, 0, tells_cached=True)
        made.ended(ticket, usage, 40.0 * number + took_s)
    learned = made.service("m")
    assert learned is not None
    assert learned.prefill_s(4_000) == pytest.approx(4.0, rel=0.1)


def test_what_the_engine_had_corrects_what_was_hoped() -> None:
    made = router()
    holder = serve(made, ask(*range(20)), 0.0).worker
    for now in (10.0, 20.0):  # it was restarted in between, and says so by its counts
        ticket = made.place(ask(*range(20), 77), FLEET, now).ticket
        assert ticket.worker == holder
        made.ended(ticket, Usage(21 * 128, 8, 0, tells_cached=True), now + 3.0)
    assert made.index.overlaps(range(20)) == {}


def test_an_engine_that_tells_no_counts_is_believed_to_hold_what_was_sent() -> None:
    made = router()
    first = made.place(ask(*range(20)), FLEET, 0.0).ticket
    made.ended(first, Usage(20 * 128, 8), 3.0)
    holder = first.worker
    for now in range(1, 5):
        ticket = made.place(ask(*range(20), 77 + now), FLEET, 10.0 * now).ticket
        made.ended(ticket, Usage(21 * 128, 8), 10.0 * now + 3.0)
    assert made.index.overlaps(range(20)) == {holder: 20}


def test_a_zero_that_is_left_out_corrects_too_once_counts_were_told() -> None:
    made = router()
    same = ask(*range(20))
    silent = Usage(2_560, 8)
    made.ended(made.place(same, [0], 0.0).ticket, silent, 1.0)
    assert not made.tells(0)
    assert made.place(same, [0], 2.0).overlap_tokens > 2_000, "it may be one that never tells"
    made.ended(made.place(same, [0], 10.0).ticket, Usage(2_560, 8, 2_500, tells_cached=True), 11.0)
    assert made.tells(0)
    assert not made.tells(1)
    made.ended(made.place(same, [0], 20.0).ticket, silent, 21.0)
    assert (made.known(0, 22.0).input_tokens, made.known(0, 22.0).cached_tokens) == (5_120, 2_500)
    assert made.counted(1, silent) == silent


def test_speeds_are_learned_where_no_counts_of_cached_tokens_are_told() -> None:
    made, chance = router(), random.Random(4)
    for number in range(200):
        begun = chance.randrange(3)
        blocks = [*range(100 * begun, 100 * begun + 30), *range(900 * number, 900 * number + 12)]
        ticket = made.place(ask(*blocks), FLEET, 20.0 * number).ticket
        tokens, cached = 42 * 128, ticket.stay.hoped * 128
        first_at = 20.0 * number + 0.01 + 1e-3 * (tokens - cached)
        made.began(ticket, first_at)
        made.ended(ticket, Usage(tokens, 8), first_at + 0.2)
    learned = made.service("m")
    assert learned is not None
    assert learned.prefill_s(42 * 128) == pytest.approx(5.4, rel=0.1)


def test_a_session_without_hashes_goes_back_to_its_worker() -> None:
    made = router()
    home = made.place(ask(session="s", prompt_bytes=40_000), FLEET, 0.0).ticket
    made.ended(home, None, 1.0)
    for now in range(1, 6):
        other = made.place(ask(prompt_bytes=40_000), FLEET, 10.0 * now).ticket
        made.ended(other, None, 10.0 * now + 1.0)
        back = made.place(ask(session="s", prompt_bytes=40_000), FLEET, 10.0 * now + 5.0).ticket
        made.ended(back, None, 10.0 * now + 6.0)
        assert back.worker == home.worker


@pytest.mark.parametrize("policy", ["preheat", "session"])
def test_a_session_is_its_tenants(policy: str) -> None:
    made = router(policy)
    named = {
        tenant: Ask("m", (), 512, 40_000, "the same", tenant=tenant) for tenant in ("one", "two")
    }
    first = made.place(named["one"], FLEET, 0.0).ticket
    made.ended(first, Usage(10_000, 8), 5.0)
    others = [number for number in FLEET if number != first.worker]
    second = made.place(named["two"], others, 10.0).ticket
    made.ended(second, Usage(10_000, 8), 15.0)
    for now, tenant, worker in ((20.0, "one", first.worker), (30.0, "two", second.worker)):
        ticket = made.place(named[tenant], FLEET, now).ticket
        assert ticket.worker == worker, tenant
        made.ended(ticket, Usage(10_000, 8), now + 5.0)


def test_what_failed_before_its_first_byte_left_nothing_and_holds_up_nobody() -> None:
    made = router()
    ticket = made.place(ask(*range(20)), [2], 0.0).ticket
    made.failed(ticket, 0.1)
    assert made.index.overlaps(range(20)) == {}
    assert made.queue_s(2, 0.1) == 0.0
    late = made.place(ask(*range(20)), [2], 1.0).ticket
    made.began(late, 2.0)
    made.failed(late, 3.0)
    assert made.index.overlaps(range(20)) == {2: 20}


def test_a_worker_that_left_is_no_longer_anything() -> None:
    made = router()
    ticket = made.place(ask(*range(20)), [3], 0.0).ticket
    made.left(3)
    made.began(ticket, 1.0)
    made.ended(ticket, Usage(2_560, 8, 0, tells_cached=True), 2.0)
    assert made.index.overlaps(range(20)) == {}
    assert made.queue_s(3, 2.0) == 0.0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_rule_of_the_table_serves(policy: str) -> None:
    made, chance = router(policy), random.Random(3)
    under_way: list[Ticket] = []
    for number in range(400):
        now = 0.05 * number
        begun = chance.randrange(6)
        one = ask(*(hash((begun, place)) for place in range(8)), number, session=f"s{begun}")
        under_way.append(made.place(one, FLEET, now).ticket)
        if len(under_way) > 6:
            ticket = under_way.pop(chance.randrange(6))
            if chance.random() < 0.2:
                made.failed(ticket, now)
            else:
                made.ended(ticket, Usage(1_152, 8, 512, tells_cached=True), now)
    for ticket in under_way:
        made.ended(ticket, None, 30.0)
    assert all(made.queue_s(worker, 30.0) == 0.0 for worker in FLEET)


def test_only_what_goes_beyond_round_robin_is_saved_by_us() -> None:
    made = router()
    for number in range(40):
        now = 10.0 * number
        serve(made, ask(*range(30), 900 + number), now)
    known = [made.known(worker, 400.0) for worker in FLEET]
    assert sum(one.input_tokens for one in known) == 40 * 31 * 128
    cached = sum(one.cached_tokens for one in known)
    assert cached == 39 * 30 * 128, "one miss, then always there"
    ghost = sum(one.ghost_tokens for one in known)
    assert ghost == 36 * 30 * 128, "in turn each of four has one miss"


def test_a_second_rule_is_compared_and_not_followed() -> None:
    made = Router(POLICIES["preheat"](), shadow=POLICIES["round_robin"]())
    for number in range(20):
        serve(made, ask(*range(30)), 10.0 * number)
    known = [made.known(worker, 300.0) for worker in FLEET]
    assert sum(one.shadow_agreed + one.shadow_differed for one in known) == 20
    assert 4 <= sum(one.shadow_agreed for one in known) <= 6
    assert sum(one.shadow_sooner_s for one in known) > 0.0


def test_of_hits_alone_no_speed_is_learned() -> None:
    made = router()
    for number in range(30):
        ticket = made.place(ask(*range(20)), [0], 10.0 * number).ticket
        made.began(ticket, 10.0 * number + 0.01)
        usage = Usage(2_560, 1 + number % 8, 2_559, tells_cached=True)
        made.ended(ticket, usage, 10.0 * number + 0.01 + 0.05 * (number % 8))
    learned = made.service("m")
    assert learned is None or learned.prefill_s(1_000) > 0.0
    route = made.place(ask(*range(20)), FLEET, 400.0)
    assert route.ticket.worker == 0


# llama.cpp's slots --------------------------------------------------------------------------------


def slotted(*, output_tokens: int = 8) -> Router:
    """One server with four slots, whose speed is known: 1 ms a token, and as long an answer as said."""
    made = router()
    made.has_slots(0, 4)
    for number in range(40):
        at, length = 20.0 * number, 5 + 7 * number % 40
        ticket = made.place(
            ask(*range(1_000 + 100 * number, 1_000 + 100 * number + length)), [0], at
        ).ticket
        said = 1 + (number + output_tokens) % (2 * output_tokens)
        first_at = at + 0.128 * length
        made.began(ticket, first_at)
        made.ended(
            ticket, Usage(128 * length, said, 0, tells_cached=True), first_at + 0.05 * (said - 1)
        )
    return made


def test_who_asks_for_what_runs_in_a_slot_waits_for_its_end_and_then_goes() -> None:
    made = slotted()
    first = made.place(ask(*range(30)), [0], 1_000.0)
    assert first.lead is None
    assert first.ticket.stay is not None
    follower = made.place(ask(*range(30), 99), [0], 1_001.0)
    assert follower.lead is not None
    assert follower.ticket.stay is None
    assert follower.lead.ticket is first.ticket
    assert follower.lead.wait_s == pytest.approx(3.84 - 1.0 + 0.4, rel=0.2)
    assert follower.ticket.overlap_tokens == pytest.approx(30 * 128, rel=0.01)
    again = made.leads(follower.ticket, 1_002.0)
    assert again is not None
    assert again.wait_s == pytest.approx(follower.lead.wait_s - 1.0, rel=0.1)
    made.began(first.ticket, 1_003.84)
    made.ended(first.ticket, None, 1_004.24)
    assert made.leads(follower.ticket, 1_004.24) is None
    made.go(follower.ticket, 1_004.24)
    assert follower.ticket.stay is not None
    assert follower.ticket.stay.hoped == 30


def test_nobody_waits_for_an_answer_that_takes_longer_than_computing_the_prompt() -> None:
    made = slotted(output_tokens=200)
    made.place(ask(*range(30)), [0], 1_000.0)
    route = made.place(ask(*range(30), 99), [0], 1_001.0)
    assert route.lead is None
    assert route.overlap_tokens == 0, "a busy slot shares nothing"
    assert route.ticket.miss_s == pytest.approx(31 * 0.128, rel=0.2)


def test_one_that_is_held_back_may_be_given_up() -> None:
    made = slotted()
    leader = made.place(ask(*range(30)), [0], 1_000.0).ticket
    follower = made.place(ask(*range(30), 99), [0], 1_001.0).ticket
    made.failed(follower, 1_002.0)
    made.began(leader, 1_003.84)
    made.ended(leader, None, 1_004.24)
    assert made.queue_s(0, 1_004.24) == 0.0
    assert made.place(ask(*range(30), 99), [0], 1_005.0).overlap_tokens > 3_000


def test_a_follower_of_one_that_failed_goes_at_once() -> None:
    made = slotted()
    leader = made.place(ask(*range(30)), [0], 1_000.0).ticket
    follower = made.place(ask(*range(30), 99), [0], 1_001.0).ticket
    made.failed(leader, 1_002.0)
    assert made.leads(follower, 1_002.0) is None


def test_a_worker_that_comes_back_cold_gets_a_growing_share() -> None:
    made = router("round_robin")

    def share(number: int, began_at: float, *, asks: int = 48) -> int:
        """Of requests with a trunk that the others hold, and an end of their own."""
        ends = (
            range(int(1_000 * (began_at + at)) + 100, int(1_000 * (began_at + at)) + 110)
            for at in range(asks)
        )
        blocks = [(*range(20), *end) for end in ends]
        served = [serve(made, ask(*one), began_at + at).worker for at, one in enumerate(blocks)]
        return served.count(number)

    share(0, 0.0)
    made.cleared(0)
    made.returned(0, 400.0)
    assert 0 < share(0, 400.0, asks=24) < 6
    assert made.known(0, 424.0).is_back
    assert share(0, 800.0) == 12
    assert not made.known(0, 848.0).is_back
    made.returned(1, 900.0)
    made.left(1)
    assert share(1, 900.0) == 12
