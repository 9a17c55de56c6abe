"""The whole decision loop of a request."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_parts import Desk, ask_of, key_of, outcome_of, request_for
from preheat.core.controller import MAX_VARIANTS
from preheat.core.freshness import Freshness
from preheat.core.inventory import ENTRY_OVERHEAD_BYTES
from preheat.core.stats import total
from preheat.core.types import (
    FOREVER,
    NOTHING_SPECIAL,
    Ask,
    Drop,
    Forward,
    Hit,
    Invalidation,
    Join,
    Keep,
    Reject,
    Request,
    RequestId,
    Want,
)

REUSE = Freshness(variants=1)
THREE = Freshness(variants=3)


# hits and misses


def test_a_first_request_leads_and_its_equal_hits() -> None:
    desk = Desk()
    first = request_for("a")
    assert desk.controller.on_request(first, 0.0) == Forward("miss", "key-first-seen", True)
    outcome = outcome_of(first, 0.0, answer="the answer")
    effects = desk.controller.on_outcome(outcome, "key-first-seen", 2.5)
    assert isinstance(effects, Keep)
    assert (effects.entry.key, effects.evicted) == (key_of("a"), ())
    hit = desk.controller.on_request(request_for("a"), 10.0)
    assert hit == Hit(key_of("a"), key_of("a").hex().encode(), 2.5, 3600.0, "the answer", 3600.0)
    assert desk.counters.stored == 1


def test_an_entry_pays_for_its_overhead_too() -> None:
    desk = Desk()
    desk.forward(request_for("a"), 0.0, size_bytes=500)
    assert desk.inventory.size_bytes == 500 + ENTRY_OVERHEAD_BYTES


def test_a_hit_is_booked_at_once_with_what_its_answer_cost() -> None:
    desk = Desk()
    desk.forward(request_for("a"), 0.0)
    desk.controller.on_request(request_for("a"), 1.0)
    accounts = dict(desk.ledger.accounts())
    forward = accounts["local", "m1", "forward", "key-first-seen"]
    exact = accounts["local", "m1", "exact", "exact"]
    assert exact.saved_by_us == forward.paid > 0
    assert exact.saved_by_us_ns == forward.paid_ns == 2_500_000_000
    assert total(dict(desk.ledger.accounts())).residual == 0


def test_a_hit_spares_its_entry_from_eviction() -> None:
    desk = Desk(budget_entries=2)
    desk.forward(request_for("a"), 0.0)
    desk.forward(request_for("b"), 0.0)
    desk.controller.on_request(request_for("a"), 1.0)
    effects = desk.forward(request_for("c"), 2.0)
    assert isinstance(effects, Keep)
    assert (effects.entry.key, effects.evicted) == (key_of("c"), (key_of("b"),))
    assert desk.counters.evicted == 1


def test_two_requests_whose_keys_collide_never_share_an_answer() -> None:
    desk = Desk()
    desk.forward(request_for("a"), 0.0)
    other = request_for("b", key=key_of("a"))
    assert desk.controller.on_request(other, 1.0) == Forward("miss", "collision", True)
    desk.controller.on_outcome(outcome_of(other, 1.0), "collision", 2.0)
    assert desk.reason(request_for("a"), 3.0) == "collision"
    assert isinstance(desk.controller.on_request(other, 3.0), Hit)


@pytest.mark.parametrize("end", ["invalidated", "evicted", "expired", "replaced"])
def test_a_body_asked_before_is_not_answered_with_an_entry_that_has_ended(end: str) -> None:
    desk = Desk(budget_entries=1, freshness=Freshness(ttl_s=10.0))
    first = request_for("a")
    desk.forward(first, 0.0, answer="old")
    same = Request(RequestId(b"same"), "local", "", first.ask)
    hit = desk.controller.on_request(same, 1.0)
    assert isinstance(hit, Hit)
    assert hit.answer == "old"
    assert first.ask.record is not None
    if end == "invalidated":
        desk.invalidate(Invalidation(model="m1"))
    elif end == "evicted":
        desk.forward(request_for("b"), 2.0)
    elif end == "expired":
        desk.controller.on_tick(10.0)
    else:
        desk.forward(request_for("a", Want(no_cache=True)), 2.0, answer="new")
        hit = desk.controller.on_request(same, 3.0)
        assert isinstance(hit, Hit)
        assert hit.answer == "new"
        return
    assert desk.reason(same, 11.0) == end
    assert first.ask.record is None


moves = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "ask", "no-cache", "other", "invalidate", "tick", "collide"]
        ),
        st.integers(0, 4),
        st.floats(0.0, 4.0),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(moves)
def test_a_remembered_body_is_decided_on_like_one_read_anew(moves: list[Any]) -> None:
    def decisions(*, remembers: bool) -> Iterator[Any]:
        desk = Desk(budget_entries=3, freshness=Freshness(ttl_s=9.0), stale_s=3.0)
        asks: dict[Any, Ask] = {}
        now = 0.0
        for number, (move, name, wait_s) in enumerate(moves):
            now += wait_s
            if move == "invalidate":
                what = Invalidation(keys=frozenset({key_of(name)}))
                yield desk.invalidate(what)
                continue
            if move == "tick":
                yield desk.controller.on_tick(now)
                continue
            ask = ask_of((name, move) if move == "collide" else name, key=key_of(name))
            if remembers:
                ask = asks.setdefault((ask.key, ask.check), ask)
            want = Want(no_cache=True) if move == "no-cache" else NOTHING_SPECIAL
            request = Request(RequestId(b"%d" % number), "local", "", ask, want)
            decision = desk.controller.on_request(request, now)
            yield decision
            if isinstance(decision, Forward):
                outcome = outcome_of(request, now, answer=number)
                yield desk.controller.on_outcome(outcome, decision.reason, now)

    assert list(decisions(remembers=True)) == list(decisions(remembers=False))


# RFC 9111: what a request may ask of an entry that is 100 s old and lives 50 s more, and of one
# that expired 20 s ago where stale answers are kept for 60 s.

FRESH = [
    (Want(), "hit"),
    (Want(no_cache=True), "no-cache"),
    (Want(no_store=True), "no-store"),
    (Want(max_age_s=100.0), "hit"),
    (Want(max_age_s=99.9), "not-fresh-enough"),
    (Want(max_age_s=0.0), "not-fresh-enough"),
    (Want(max_age_s=FOREVER), "hit"),
    (Want(min_fresh_s=50.0), "hit"),
    (Want(min_fresh_s=50.1), "not-fresh-enough"),
    (Want(max_stale_s=FOREVER), "hit"),
    (Want(max_age_s=200.0, min_fresh_s=10.0), "hit"),
    (Want(max_age_s=200.0, min_fresh_s=60.0), "not-fresh-enough"),
    (Want(only_if_cached=True), "hit"),
    (Want(only_if_cached=True, max_age_s=99.0), "rejected"),
    (Want(only_if_cached=True, min_fresh_s=51.0), "rejected"),
    (Want(only_if_cached=True, no_cache=True), "rejected"),
    (Want(only_if_cached=True, no_store=True), "rejected"),
    (Want(no_cache=True, no_store=True), "no-store"),
    (Want(no_cache=True, max_stale_s=FOREVER), "no-cache"),
]
STALE = [
    (Want(), "expired"),
    (Want(max_stale_s=FOREVER), "hit"),
    (Want(max_stale_s=20.1), "hit"),
    (Want(max_stale_s=19.9), "expired"),
    (Want(max_stale_s=5.0), "expired"),
    (Want(max_stale_s=FOREVER, min_fresh_s=1.0), "expired"),
    (Want(max_stale_s=FOREVER, max_age_s=170.0), "hit"),
    (Want(max_stale_s=FOREVER, max_age_s=160.0), "expired"),
    (Want(max_age_s=FOREVER), "expired"),
    (Want(max_stale_s=FOREVER, only_if_cached=True), "hit"),
    (Want(only_if_cached=True), "rejected"),
    (Want(no_cache=True), "no-cache"),
    (Want(max_stale_s=FOREVER, no_cache=True), "no-cache"),
    (Want(no_store=True), "no-store"),
]
FWD = {
    "no-cache": "request",
    "not-fresh-enough": "request",
    "no-store": "bypass",
    "expired": "stale",
}


def expected_word(desk: Desk, request: Request, now: float) -> str:
    decision = desk.controller.on_request(request, now)
    match decision:
        case Hit():
            return "hit"
        case Reject(504, "only-if-cached"):
            return "rejected"
        case Forward(fwd, reason, _):
            assert FWD[reason] == fwd
            return reason
    raise AssertionError(decision)


@pytest.mark.parametrize(("want", "word"), FRESH)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_fresh_entry_answers_whom_rfc_9111_lets_it(want: Want, word: str, sampled: bool) -> None:
    desk = Desk(freshness=Freshness(ttl_s=150.0, variants=1), stale_s=60.0)
    desk.forward(request_for("a", sampled=sampled), 0.0)
    assert expected_word(desk, request_for("a", want, sampled=sampled), 100.0) == word


@pytest.mark.parametrize(("want", "word"), STALE)
@pytest.mark.parametrize("sampled", [False, True])
def test_an_expired_entry_answers_whom_rfc_9111_lets_it(
    want: Want, word: str, sampled: bool
) -> None:
    desk = Desk(freshness=Freshness(ttl_s=150.0, variants=1), stale_s=60.0)
    desk.forward(request_for("a", sampled=sampled), 0.0)
    assert expected_word(desk, request_for("a", want, sampled=sampled), 170.0) == word


def test_no_stale_answer_is_older_than_the_operator_allows() -> None:
    desk = Desk(freshness=Freshness(ttl_s=150.0), stale_s=60.0)
    desk.forward(request_for("a"), 0.0)
    want = Want(max_stale_s=FOREVER)
    hit = desk.controller.on_request(request_for("a", want), 209.9)
    assert isinstance(hit, Hit)
    assert hit.expires_at < 209.9
    assert desk.reason(request_for("a", want), 210.0) == "expired"


def test_max_stale_finds_nothing_where_nothing_stale_is_kept() -> None:
    desk = Desk(freshness=Freshness(ttl_s=150.0), stale_s=0.0)
    desk.forward(request_for("a"), 0.0)
    assert desk.reason(request_for("a", Want(max_stale_s=FOREVER)), 150.0) == "expired"


def test_an_entry_is_fresh_until_the_moment_it_expires() -> None:
    desk = Desk(freshness=Freshness(ttl_s=150.0))
    desk.forward(request_for("a"), 0.0)
    assert isinstance(desk.controller.on_request(request_for("a"), 149.999), Hit)
    assert desk.reason(request_for("a"), 150.0) == "expired"


def test_only_if_cached_is_refused_where_nothing_is_known() -> None:
    desk = Desk()
    want = Want(only_if_cached=True)
    rejected = Reject(504, "only-if-cached")
    assert desk.controller.on_request(request_for("a", want), 0.0) == rejected
    assert desk.controller.on_request(request_for("a", want, sampled=True), 0.0) == rejected
    assert (
        desk.controller.on_request(request_for("a", want, bypass="bypass-store"), 0.0) == rejected
    )
    leader = request_for("a")
    desk.controller.on_request(leader, 0.0)
    assert desk.controller.on_request(request_for("a", want), 0.0) == rejected


# joins


def test_a_hundred_equal_requests_are_one_forward_and_99_joins() -> None:
    desk = Desk()
    requests = [request_for("a") for _ in range(100)]
    first, *rest = [desk.controller.on_request(request, 0.0) for request in requests]
    assert first == Forward("miss", "key-first-seen", True)
    assert rest == [Join(requests[0].id)] * 99
    outcome = outcome_of(requests[0], 0.0, joined=tuple(requests[1:]))
    desk.controller.on_outcome(outcome, "key-first-seen", 2.5)
    accounts = dict(desk.ledger.accounts())
    assert accounts["local", "m1", "join", "join"].requests == 99
    assert (
        accounts["local", "m1", "join", "join"].saved_by_us
        == 99 * total(dict(desk.ledger.accounts())).paid
    )
    assert total(dict(desk.ledger.accounts())).residual == 0


def test_a_join_is_booked_to_the_tenant_and_model_of_who_joined() -> None:
    desk = Desk()
    leader, follower = request_for("a"), request_for("a", tenant="other")
    desk.controller.on_request(leader, 0.0)
    desk.controller.on_outcome(outcome_of(leader, 0.0, joined=(follower,)), "x", 1.0)
    assert dict(desk.ledger.accounts())["other", "m1", "join", "join"].requests == 1


@pytest.mark.parametrize("variants", [0, 1, 3])
def test_a_sampled_request_neither_leads_nor_joins(variants: int) -> None:
    desk = Desk(freshness=Freshness(variants=variants))
    for _ in range(3):
        decision = desk.controller.on_request(request_for("a", sampled=True), 0.0)
        assert isinstance(decision, Forward)
        assert not decision.joinable


def test_no_store_neither_leads_nor_joins() -> None:
    desk = Desk()
    alone = Forward("bypass", "no-store", False)
    want = Want(no_store=True)
    assert desk.controller.on_request(request_for("a", want), 0.0) == alone
    assert desk.controller.on_request(request_for("a"), 0.0) == Forward(
        "miss", "key-first-seen", True
    )
    assert desk.controller.on_request(request_for("a", want), 0.0) == alone


def test_a_request_that_bypasses_neither_leads_nor_joins() -> None:
    desk = Desk()
    for _ in range(2):
        decision = desk.controller.on_request(request_for("a", bypass="bypass-inexact"), 0.0)
        assert decision == Forward("bypass", "bypass-inexact", False)


def test_a_colliding_request_goes_alone_and_ends_nobodys_flight() -> None:
    desk = Desk()
    leader, other = request_for("a"), request_for("b", key=key_of("a"))
    desk.controller.on_request(leader, 0.0)
    decision = desk.controller.on_request(other, 0.0)
    assert decision == Forward("miss", "key-first-seen", False)
    desk.controller.on_failure(other, "connect", 0.0)
    assert desk.controller.on_request(request_for("a"), 0.0) == Join(leader.id)


def test_no_cache_leads_where_nobody_does() -> None:
    desk = Desk()
    desk.forward(request_for("a"), 0.0)
    fresh = request_for("a", Want(no_cache=True))
    assert desk.controller.on_request(fresh, 1.0) == Forward("request", "no-cache", True)
    late = request_for("a", Want(max_age_s=0.5))
    assert desk.controller.on_request(late, 1.0) == Join(fresh.id)


def test_no_cache_goes_alone_where_somebody_leads() -> None:
    desk = Desk()
    leader = request_for("a")
    desk.controller.on_request(leader, 0.0)
    alone = request_for("a", Want(no_cache=True))
    assert desk.controller.on_request(alone, 0.5) == Forward("request", "no-cache", False)
    desk.controller.on_outcome(outcome_of(alone, 0.5), "no-cache", 1.0)
    assert isinstance(desk.controller.on_request(request_for("a"), 1.0), Hit)


def test_nobody_joins_a_flight_that_has_outgrown_its_buffer() -> None:
    desk = Desk()
    leader = request_for("a")
    desk.controller.on_request(leader, 0.0)
    desk.controller.on_overflow(leader)
    assert desk.controller.on_request(request_for("a"), 1.0) == Forward(
        "miss", "key-first-seen", True
    )


@pytest.mark.parametrize("end", ["failed", "dropped", "stored"])
def test_nobody_joins_a_flight_that_has_ended(end: str) -> None:
    desk = Desk()
    leader = request_for("a")
    desk.controller.on_request(leader, 0.0)
    if end == "failed":
        desk.controller.on_failure(leader, "connect", 0.0)
    elif end == "dropped":
        desk.controller.on_outcome(outcome_of(leader, 0.0, unstorable="finish-length"), "x", 1.0)
    else:
        desk.controller.on_outcome(outcome_of(leader, 0.0), "x", 1.0)
    decision = desk.controller.on_request(request_for("a"), 2.0)
    assert isinstance(decision, Hit if end == "stored" else Forward)


def test_a_late_end_of_an_old_flight_does_not_end_the_next_one() -> None:
    desk = Desk()
    old, new = request_for("a"), request_for("a")
    desk.controller.on_request(old, 0.0)
    desk.controller.on_overflow(old)
    desk.controller.on_request(new, 1.0)
    desk.controller.on_failure(old, "connect", 0.0)
    assert desk.controller.on_request(request_for("a"), 2.0) == Join(new.id)


def test_of_those_whose_flight_failed_one_leads_and_the_others_join_it() -> None:
    desk = Desk()
    requests = [request_for("a") for _ in range(4)]
    for request in requests:
        desk.controller.on_request(request, 0.0)
    desk.controller.on_failure(requests[0], "connect", 0.0)
    again = [desk.controller.on_miss(request, 1.0) for request in requests[1:]]
    assert again == [
        Forward("miss", "key-first-seen", True),
        Join(requests[1].id),
        Join(requests[1].id),
    ]


def test_a_stale_entry_outlives_a_flight_that_failed() -> None:
    desk = Desk(freshness=Freshness(ttl_s=10.0), stale_s=600.0)
    desk.forward(request_for("a"), 0.0)
    leader, follower = request_for("a"), request_for("a")
    desk.controller.on_request(leader, 20.0)
    desk.controller.on_request(follower, 20.0)
    desk.controller.on_failure(leader, "connect", 0.0)
    assert desk.controller.on_miss(follower, 21.0) == Forward("stale", "expired", True)
    content = request_for("a", Want(max_stale_s=FOREVER))
    assert isinstance(desk.controller.on_request(content, 22.0), Hit)


def test_an_entry_that_came_meanwhile_outlives_a_flight_that_failed() -> None:
    desk = Desk()
    leader, follower = request_for("a"), request_for("a")
    desk.controller.on_request(leader, 0.0)
    desk.controller.on_request(follower, 0.0)
    desk.forward(request_for("a", Want(no_cache=True)), 1.0)
    desk.controller.on_failure(leader, "connect", 0.0)
    assert isinstance(desk.controller.on_miss(follower, 2.0), Hit)
    assert isinstance(desk.controller.on_request(request_for("a"), 3.0), Hit)


# what is kept


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"unstorable": "finish-length"}, "finish-length"),
        ({"unstorable": "unfinished"}, "unfinished"),
        ({"size_bytes": 100_001}, "larger-than-entry"),
    ],
)
def test_what_is_not_kept_says_why_at_the_next_asking(
    fields: dict[str, object], reason: str
) -> None:
    desk = Desk()
    assert desk.forward(request_for("a"), 0.0, **fields) == Drop(reason)
    assert desk.counters.dropped == {reason: 1}
    assert desk.reason(request_for("a"), 1.0) == reason


@pytest.mark.parametrize(
    ("want", "ask_fields", "reason"),
    [
        (Want(no_store=True), {}, "no-store"),
        (Want(), {"bypass": "bypass-store"}, "bypass-store"),
        (Want(), {"sampled": True}, "bypass-sampled"),
    ],
)
@pytest.mark.parametrize("unstorable", ["", "finish-length"])
def test_what_bypasses_the_cache_leaves_no_trace_in_it(
    want: Want, ask_fields: dict[str, object], reason: str, unstorable: str
) -> None:
    desk = Desk()
    effects = desk.forward(request_for("a", want, **ask_fields), 0.0, unstorable=unstorable)
    assert effects == Drop(unstorable or reason)
    assert len(desk.inventory) == 0
    assert desk.reason(request_for("a"), 1.0) == "key-first-seen"


def test_an_entry_of_zero_seconds_is_not_kept() -> None:
    desk = Desk()
    assert desk.forward(request_for("a", Want(ttl_s=0)), 0.0) == Drop("ttl-zero")
    assert desk.reason(request_for("a"), 1.0) == "ttl-zero"


@pytest.mark.parametrize(
    ("wanted_s", "ttl_s"), [(None, 100.0), (50.0, 50.0), (150.0, 150.0), (1e9, 200.0)]
)
def test_a_life_is_the_settings_or_what_was_asked_for_but_never_more_than_the_most(
    wanted_s: float | None, ttl_s: float
) -> None:
    desk = Desk(freshness=Freshness(ttl_s=100.0, max_ttl_s=200.0))
    desk.forward(request_for("a", Want(ttl_s=wanted_s)), 0.0)
    hit = desk.controller.on_request(request_for("a"), 0.0)
    assert isinstance(hit, Hit)
    assert hit.ttl_s == ttl_s


def test_the_most_cuts_what_clients_ask_for_and_not_what_the_operator_set() -> None:
    desk = Desk(freshness=Freshness(ttl_s=500.0, max_ttl_s=200.0))
    desk.forward(request_for("a"), 0.0)
    assert isinstance(desk.controller.on_request(request_for("a"), 499.0), Hit)
    assert desk.reason(request_for("a"), 500.0) == "expired"


def test_an_older_answer_does_not_replace_a_newer_one() -> None:
    desk = Desk()
    slow, fresh = request_for("a"), request_for("a", Want(no_cache=True))
    assert isinstance(desk.controller.on_request(slow, 0.0), Forward)
    assert isinstance(desk.controller.on_request(fresh, 1.0), Forward)
    newer = outcome_of(fresh, 1.0, answer="new")
    assert isinstance(desk.controller.on_outcome(newer, "no-cache", 2.0), Keep)
    older = outcome_of(slow, 0.0, answer="old")
    assert desk.controller.on_outcome(older, "x", 3.0) == Drop("superseded")
    hit = desk.controller.on_request(request_for("a"), 4.0)
    assert isinstance(hit, Hit)
    assert hit.answer == "new"


def test_an_answer_has_the_tags_of_all_who_waited_for_it() -> None:
    desk = Desk()
    leader = request_for("a", Want(tags=("x",)))
    desk.forward(leader, 0.0, joined=(request_for("a", Want(tags=("y", "x"))),))
    record = desk.inventory.find(key_of("a"))
    assert record is not None
    assert record.tags == ("x", "y")


def test_a_call_without_an_answer_is_booked_for_its_seconds() -> None:
    desk = Desk()
    request = request_for("a")
    desk.controller.on_request(request, 0.0)
    desk.controller.on_failure(request, "reset", 2.0)
    account = dict(desk.ledger.accounts())["local", "m1", "forward", "reset"]
    assert (account.requests, account.unpriced, account.paid) == (1, 1, 0)
    assert account.paid_ns == 2_000_000_000


def test_a_namespace_has_its_own_life() -> None:
    desk = Desk(namespaces={"short": Freshness(ttl_s=5.0)})
    desk.forward(request_for("a", namespace="short"), 0.0)
    assert desk.reason(request_for("a", namespace="short"), 5.0) == "expired"


def test_an_entry_carries_what_invalidations_ask_for() -> None:
    desk = Desk()
    desk.forward(request_for("a", Want(tags=("red",)), tenant="t", namespace="n"), 0.0)
    record = desk.inventory.find(key_of("a"))
    assert record is not None
    assert (record.tenant, record.namespace, record.model, record.tags) == (
        "t",
        "n",
        "m1",
        ("red",),
    )


def test_every_kind_of_miss_has_its_reason() -> None:
    desk = Desk(budget_bytes=10_000, budget_entries=1, freshness=Freshness(ttl_s=10.0))
    assert desk.reason(request_for("new"), 0.0) == "key-first-seen"
    desk.forward(request_for("evicted"), 0.0)
    desk.forward(request_for("expired"), 0.0)
    assert desk.reason(request_for("evicted"), 1.0) == "evicted"
    assert desk.reason(request_for("expired"), 10.0) == "expired"
    assert not desk.controller.on_tick(10.0)
    assert desk.reason(request_for("expired"), 11.0) == "expired"
    desk.forward(request_for("large"), 11.0, size_bytes=9_999)
    assert desk.reason(request_for("large"), 12.0) == "larger-than-cache"
    desk.forward(request_for("doomed"), 12.0)
    desk.invalidate(Invalidation(model="m1"))
    assert desk.reason(request_for("doomed"), 14.0) == "invalidated"


def test_whom_the_door_keeps_out_is_told() -> None:
    desk = Desk(budget_entries=1, admit="doorkeeper")
    desk.forward(request_for("a"), 0.0)
    desk.controller.on_request(request_for("a"), 0.0)
    assert desk.forward(request_for("b"), 1.0) == Drop("not-admitted")
    assert desk.reason(request_for("b"), 2.0) == "not-admitted"


# sampled requests


def test_a_sampled_request_bypasses_by_default_and_its_repeats_are_counted() -> None:
    desk = Desk()
    for _ in range(3):
        assert desk.reason(request_for("a", sampled=True), 0.0) == "bypass-sampled"
    assert desk.counters.sampled_repeats == 2


def test_reuse_gives_one_answer_to_sampled_requests_too() -> None:
    desk = Desk(freshness=REUSE)
    assert desk.reason(request_for("a", sampled=True), 0.0) == "key-first-seen"
    desk.forward(request_for("a", sampled=True), 0.0)
    assert isinstance(desk.controller.on_request(request_for("a", sampled=True), 1.0), Hit)
    assert desk.counters.sampled_repeats == 0


def test_as_many_variants_are_computed_as_are_wanted_and_then_one_is_drawn() -> None:
    desk = Desk(freshness=THREE)
    reasons = []
    kept = []
    for now in range(3):
        request = request_for("a", sampled=True)
        decision = desk.controller.on_request(request, now)
        assert isinstance(decision, Forward)
        reasons.append(decision.reason)
        effects = desk.controller.on_outcome(outcome_of(request, now), decision.reason, now)
        assert isinstance(effects, Keep)
        kept.append(effects.entry.key)
    assert reasons == ["key-first-seen", "variant-wanted", "variant-wanted"]
    assert len(set(kept)) == 3
    drawn = []
    for draw in (0.0, 0.34, 0.99):
        desk.drawn = draw
        hit = desk.controller.on_request(request_for("a", sampled=True), 5.0)
        assert isinstance(hit, Hit)
        drawn.append(hit.key)
    assert drawn == kept


def test_an_expired_variant_is_computed_anew_in_its_place() -> None:
    desk = Desk(freshness=Freshness(ttl_s=10.0, variants=2), stale_s=100.0)
    first = desk.forward(request_for("a", sampled=True), 0.0)
    second = desk.forward(request_for("a", sampled=True), 6.0)
    assert isinstance(first, Keep)
    assert isinstance(second, Keep)
    assert desk.reason(request_for("a", sampled=True), 12.0) == "variant-wanted"
    third = desk.forward(request_for("a", sampled=True), 12.0)
    assert isinstance(third, Keep)
    assert third.entry.key == first.entry.key
    assert desk.reason(request_for("a", sampled=True), 30.0) == "expired"


def test_variants_that_are_not_fresh_enough_are_replaced_oldest_first() -> None:
    desk = Desk(freshness=Freshness(variants=2))
    kept = [desk.forward(request_for("a", sampled=True), now) for now in (0.0, 1.0)]
    fresh = Want(no_cache=True)
    again = [desk.forward(request_for("a", fresh, sampled=True), now) for now in (2.0, 3.0)]
    assert [one.entry.key for one in again] == [one.entry.key for one in kept]
    assert len(desk.inventory) == 2


def test_a_colliding_variant_is_nobodys_answer() -> None:
    desk = Desk(freshness=REUSE)
    desk.forward(request_for("a", sampled=True), 0.0)
    other = request_for("b", key=key_of("a"), sampled=True)
    assert desk.reason(other, 1.0) == "collision"


def test_a_namespace_decides_on_sampled_requests_by_itself() -> None:
    desk = Desk(namespaces={"reuse": REUSE})
    desk.forward(request_for("a", namespace="reuse", sampled=True), 0.0)
    again = request_for("a", namespace="reuse", sampled=True)
    assert isinstance(desk.controller.on_request(again, 1.0), Hit)
    assert desk.reason(request_for("a", sampled=True), 1.0) == "bypass-sampled"


def test_the_keys_of_all_variants_differ() -> None:
    desk = Desk(freshness=Freshness(variants=MAX_VARIANTS))
    keys = set()
    for now in range(MAX_VARIANTS):
        effects = desk.forward(request_for("a", sampled=True), now)
        assert isinstance(effects, Keep)
        keys.add(effects.entry.key)
    assert len(keys) == MAX_VARIANTS == len(desk.inventory)


# invalidation and time


def test_an_answer_asked_for_before_an_invalidation_is_not_kept_after_it() -> None:
    desk = Desk()
    request = request_for("a", Want(tags=("red",)))
    desk.controller.on_request(request, 0.0)
    what = Invalidation(tags=frozenset({"red"}))
    assert desk.invalidate(what).keys == ()
    effects = desk.controller.on_outcome(outcome_of(request, 0.0), "key-first-seen", 2.0)
    assert effects == Drop("invalidated")
    assert desk.reason(request_for("a"), 3.0) == "invalidated"


def test_an_answer_asked_for_after_an_invalidation_is_kept() -> None:
    desk = Desk()
    desk.invalidate(Invalidation(model="m1"))
    assert isinstance(desk.forward(request_for("a"), 1.1), Keep)


def test_a_dry_run_counts_what_an_invalidation_would_find_and_changes_nothing() -> None:
    desk = Desk()
    desk.forward(request_for("a"), 0.0)
    found = desk.invalidate(Invalidation(model="m1"), dry_run=True)
    assert found.keys == (key_of("a"),)
    assert found.size_bytes == desk.inventory.size_bytes
    assert desk.counters.invalidated == 0
    assert isinstance(desk.controller.on_request(request_for("a"), 2.0), Hit)
    removed = desk.invalidate(Invalidation(model="m1"))
    assert removed == found
    assert desk.counters.invalidated == 1
    assert desk.reason(request_for("a"), 4.0) == "invalidated"


def test_a_tick_removes_what_is_past_its_life_and_counts_it() -> None:
    desk = Desk(freshness=Freshness(ttl_s=10.0))
    desk.forward(request_for("a"), 0.0)
    desk.forward(request_for("b"), 5.0)
    assert not desk.controller.on_tick(9.0)
    assert desk.inventory.find(key_of("a")) is not None
    assert not desk.controller.on_tick(10.0)
    assert desk.inventory.find(key_of("a")) is None
    assert desk.counters.expired == 1
    assert len(desk.inventory) == 1


def test_flights_that_end_leave_nothing_behind() -> None:
    desk = Desk(budget_entries=10)
    for number in range(1_000):
        request = request_for(number)
        desk.controller.on_request(request, 0.0)
        match number % 4:
            case 0:
                desk.controller.on_failure(request, "connect", 0.0)
            case 1:
                desk.controller.on_overflow(request)
            case 2:
                desk.controller.on_outcome(outcome_of(request, 0.0, unstorable="x"), "x", 1.0)
            case _:
                desk.controller.on_outcome(outcome_of(request, 0.0), "x", 1.0)
    assert desk.controller._leaders == {}
    assert len(desk.inventory) == 10


def test_an_answer_without_usage_is_kept_all_the_same() -> None:
    desk = Desk()
    desk.forward(request_for("a"), 0.0, usage=None)
    assert isinstance(desk.controller.on_request(request_for("a"), 1.0), Hit)
    assert total(dict(desk.ledger.accounts())).unpriced == 2
    assert total(dict(desk.ledger.accounts())).input_tokens == 0


def test_nobody_who_asks_after_an_invalidation_joins_what_was_asked_before() -> None:
    desk = Desk()
    before, after = request_for("a"), request_for("a")
    assert isinstance(desk.controller.on_request(before, 0.0), Forward)
    desk.invalidate(Invalidation(model="m1"), dry_run=True)
    assert isinstance(desk.controller.on_request(request_for("a"), 1.5), Join)
    desk.invalidate(Invalidation(model="m1"))
    assert isinstance(desk.controller.on_request(after, 3.0), Forward)
    assert desk.controller.on_outcome(outcome_of(before, 0.0), "x", 4.0) == Drop("invalidated")
    assert isinstance(
        desk.controller.on_outcome(outcome_of(after, 3.0, epoch=desk.controller.epoch), "x", 5.0),
        Keep,
    )


def test_every_hit_is_booked_however_many_entries_are_hit() -> None:
    desk = Desk(budget_bytes=10**9, budget_entries=6_000)
    for number in range(5_000):
        desk.forward(request_for(number), 0.0)
    for _ in range(3):
        for number in range(5_000):
            assert isinstance(desk.controller.on_request(request_for(number), 1.0), Hit)
    ticks = 1
    while desk.controller.on_tick(2.0):
        ticks += 1
    assert ticks == 10  # portions of 512 entries, so that no tick holds anybody up
    accounts = dict(desk.ledger.accounts())
    assert accounts["local", "m1", "exact", "exact"].requests == 15_000
    assert total(dict(desk.ledger.accounts())).residual == 0
