"""What an observer makes of what it reads: index, routing, repeats, hot prefixes, and what pays."""

import json
from typing import Any

import msgspec
import pytest

from preheat.lab.observe.fleet import Fleet
from preheat.lab.observe.hot import HotSet
from preheat.lab.observe.lines import Record, read_line
from preheat.lab.observe.plan import HORIZON_S, Found, found

SYSTEM = "Rules of the house. " * 200  # 4,000 characters: 7 whole blocks
TOKENS = 1_000
TOKEN_S = 1e-4


def request(session: str = "s", text: str = SYSTEM, **fields: Any) -> Record:
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": f"{session} asks " * 80},
    ]
    body = {"model": "m", "messages": messages, **fields.pop("body", {})}
    row = {"timestamp": 1_000.0, "session": session, "request": body, "duration_s": 1.0, **fields}
    return read_line(json.dumps(row).encode())


def answer(cached: int | None, tokens: int = TOKENS) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"usage": {"prompt_tokens": tokens, "completion_tokens": 2, **details}}


def passes(
    fleet: Fleet,
    record: Record,
    worker: int | None,
    now: float,
    *,
    ttft_s: float = 0.1,
    hot: HotSet | None = None,
) -> None:
    """A request from its beginning to its end."""
    if hot is not None and record.sighting is not None:
        hot.saw(record.sighting, now)
    ticket, repeated = fleet.began(record.seen, worker, now)
    if hot is not None:
        hot.used(record.seen.blocks, worker, now)
    if ticket is not None:
        fleet.router.began(ticket, now + ttft_s)
        fleet.ended(ticket, record.seen, repeated, now + 1.0)


def learn(fleet: Fleet, worker: int, now: float = 0.0) -> None:
    """Prompts of all lengths that nobody has asked before, at a speed."""
    for number in range(40):
        text = f"{number} " * (100 + 60 * number)
        tokens = len(text) // 4 + 250
        record = request(f"n{number}", text=text, response=answer(0, tokens))
        passes(fleet, record, worker, now + number, ttft_s=TOKEN_S * tokens)


# What is known of servers


def test_the_index_is_what_the_stack_did_by_itself() -> None:
    fleet = Fleet(2)
    record = request()
    passes(fleet, record, 1, 0.0)
    assert fleet.held(record.seen.blocks, ()) == [0.0, 1.0]
    assert [one.requests for one in fleet.accounts] == [0, 1]


def test_a_request_that_failed_before_its_first_token_left_nothing() -> None:
    fleet = Fleet(2)
    record = request(status=503)
    ticket, repeated = fleet.began(record.seen, 0, 0.0)
    assert ticket is not None
    fleet.ended(ticket, record.seen, repeated, 1.0)
    assert fleet.held(record.seen.blocks, ()) == [0.0, 0.0]
    assert fleet.accounts[0].failed == 1


def test_what_was_thought_is_held_against_what_answers_say() -> None:
    fleet = Fleet(1)
    passes(fleet, request("a", response=answer(0)), 0, 0.0)
    passes(fleet, request("b", response=answer(800)), 0, 10.0)
    passes(fleet, request("c", response=answer(0)), 0, 20.0)  # it was reset meanwhile
    account = fleet.accounts[0]
    assert (account.told, account.agreed) == (3, 2)
    assert (account.input_tokens, account.cached_tokens) == (3 * TOKENS, 800)
    assert 1_400 <= account.thought_tokens <= 1_800
    assert fleet.known(0, 30.0).trust == "confirmed"


def test_a_server_that_told_once_tells_zeros_by_silence() -> None:
    fleet = Fleet(1)
    passes(fleet, request("a", response=answer(None)), 0, 0.0)
    assert fleet.accounts[0].told == 0
    passes(fleet, request("b", response=answer(800)), 0, 10.0)
    passes(fleet, request("c", text="other " * 700, response=answer(None)), 0, 20.0)
    assert (fleet.accounts[0].told, fleet.accounts[0].cached_tokens) == (2, 800)


# Routing beside


def test_a_rule_that_tears_sessions_apart_is_told_what_ours_would_have_won() -> None:
    fleet = Fleet(2)
    families = [f"Family {name}. " * 300 for name in "abcd"]
    now = 0.0
    for turn in range(40):
        for number, text in enumerate(families):
            now += 2.0
            worker = (turn + number) % 2 if turn else 0  # the second worker learns it all as well
            passes(fleet, request(f"{turn}-{number}", text=text), worker, now)
        fleet.router.cleared(1)  # it forgets, so each visit there is a miss
    known = [fleet.known(one, now) for one in range(2)]
    assert sum(one.shadow_agreed + one.shadow_differed for one in known) == 160
    assert known[1].shadow_differed > 60  # all went to the one that forgets
    assert sum(one.shadow_sooner_s for one in known) < 0.0  # the shadow, ours, is sooner


def test_without_durations_no_speed_is_learned() -> None:
    fleet = Fleet(1)
    for number in range(30):
        passes(fleet, request(f"{number}", response=answer(0), duration_s=None), 0, 10.0 * number)
    assert fleet.router.service("m") is None
    assert fleet.accounts[0].told == 30


# What is repeated


def test_what_was_computed_again_is_what_was_asked_before_and_not_found() -> None:
    fleet = Fleet(2)
    learn(fleet, 0)
    before = msgspec.structs.replace(fleet.repeats)
    passes(fleet, request("a", response=answer(0)), 0, 400.0)
    passes(fleet, request("b", response=answer(0)), 1, 410.0)  # the other has it
    passes(fleet, request("c", response=answer(800)), 1, 420.0)  # two thirds are repeated
    repeats = fleet.repeats
    assert repeats.told_repeated_tokens == repeats.repeated_tokens
    assert before.repeated_tokens == before.again_tokens == 0
    assert 1_300 <= repeats.repeated_tokens <= 1_600
    assert 650 <= repeats.again_tokens <= 800
    assert repeats.told_cached_tokens == 800
    assert repeats.again_s == pytest.approx(TOKEN_S * repeats.again_tokens, rel=0.1)
    assert repeats.prefill_s - before.prefill_s == pytest.approx(TOKEN_S * 2_200, rel=0.1)


def test_requests_that_nobody_places_are_repeats_only() -> None:
    fleet = Fleet(2)
    for session in "ab":
        passes(fleet, request(session), None, 0.0)
    assert fleet.unplaced == 2
    assert fleet.repeats.repeated_tokens > 700
    assert fleet.held(request().seen.blocks, ()) == [None, None]


# What is hot, where it is missing, and whether warming pays


def watched(
    sessions: int, workers: int = 2, *, every_s: float = 10.0, **fields: Any
) -> tuple[Fleet, HotSet, float]:
    """All at worker 0."""
    fleet, hot, now = Fleet(workers), HotSet(), 0.0
    for number in range(sessions):
        now = every_s * number
        passes(fleet, request(f"{number}", **fields), 0, now, hot=hot)
    hot.refresh(now)
    return fleet, hot, now


def look(fleet: Fleet, hot: HotSet, now: float, price: float = 0.3) -> list[Found]:
    return found(fleet, hot.prefixes, [100_000, 100_000], price, now)


def test_two_sessions_make_nothing_hot_and_three_do() -> None:
    assert watched(2)[1].prefixes == []
    (prefix,) = watched(3)[1].prefixes
    assert prefix.sessions == 3
    assert prefix.prompt.messages == [{"role": "system", "content": SYSTEM}]


def test_a_prefix_that_is_used_often_pays_where_it_is_missing() -> None:
    (one,) = look(*watched(40))
    assert one.held[0] == 1.0
    (missing,) = one.missing
    assert (missing.worker, missing.missing_tokens) == (1, one.tokens)
    assert 900 <= one.tokens <= 1_100
    assert missing.hold_s == HORIZON_S
    assert missing.offer.chance > 0.3
    assert missing.offer.pays
    assert missing.offer.gains_s == pytest.approx(missing.offer.chance * missing.offer.saves_s)


def test_at_equal_prices_nothing_pays() -> None:
    (one,) = look(*watched(40), price=1.0)
    assert not one.missing[0].offer.pays


def test_what_is_used_once_a_day_does_not_pay() -> None:
    (one,) = look(*watched(4, every_s=20_000.0))
    assert one.missing
    assert not any(each.offer.pays for each in one.missing)


def test_in_a_full_memory_warming_costs_what_it_pushes_out() -> None:
    fleet, hot, now = watched(40)
    learn(fleet, 1, now)
    now += 60.0
    (roomy,) = found(fleet, hot.prefixes, [10**8, 10**8], 0.3, now)
    (tight,) = found(fleet, hot.prefixes, [10**8, 20_000], 0.3, now)
    assert roomy.missing[0].offer.room_s == 0.0
    assert tight.missing[0].offer.room_s > 0.0
    assert tight.missing[0].hold_s < roomy.missing[0].hold_s == HORIZON_S
    assert tight.missing[0].offer.chance < roomy.missing[0].offer.chance


def test_tenants_that_begin_alike_have_one_hot_prefix_and_salts_have_their_own() -> None:
    hot = HotSet()
    for tenant in "ab":
        for number in range(3):
            record = request(f"{number}", tenant=tenant)
            assert record.sighting is not None
            hot.saw(record.sighting, 0.0)
    for number in range(3):
        record = request(f"{number}", body={"cache_salt": "x"})
        assert record.sighting is not None
        hot.saw(record.sighting, 0.0)
    hot.refresh(1.0)
    assert sorted((one.prompt.salt, one.sessions) for one in hot.prefixes) == [("", 6), ("x", 3)]


def test_a_model_that_servers_call_otherwise_is_asked_under_their_name() -> None:
    hot = HotSet("served")
    for number in range(3):
        record = request(f"{number}")
        assert record.sighting is not None
        hot.saw(record.sighting, 0.0)
    hot.refresh(1.0)
    (prefix,) = hot.prefixes
    assert (prefix.model, prefix.prompt.model) == ("m", "served")
    assert hot.used(record.seen.blocks, 0, 2.0) == [prefix]


def test_of_a_long_log_that_is_read_at_once_the_last_hour_counts() -> None:
    hot, now = HotSet(), 0.0
    for number in range(2_000):
        now = 60.0 * number  # a day and a half, one a minute
        record = request(f"{number}", text=SYSTEM if number % 2 else f"{number} " * 1_000)
        assert record.sighting is not None
        hot.saw(record.sighting, now)
        if number % 256 == 0:
            hot.refresh(now)
        hot.used(record.seen.blocks, 0, now)
    hot.refresh(now)
    (prefix,) = hot.prefixes
    assert 3_600.0 * prefix.uses_per_s(now) == pytest.approx(30.0, rel=0.1)
