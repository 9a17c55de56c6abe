"""What the controller decides where there is an L2."""

import pytest

from core_parts import Desk, ask_of, check_of, entry_of, key_of, outcome_of, request_for
from preheat.core.freshness import Freshness
from preheat.core.stats import total
from preheat.core.types import (
    Drop,
    Epoch,
    Forward,
    Hit,
    Invalidation,
    Join,
    Keep,
    Look,
    Refresh,
    Reject,
    Request,
    RequestId,
    Want,
)


@pytest.fixture
def desk() -> Desk:
    return Desk(has_l2=True)


def look(desk: Desk, request: Request, now: float) -> Look:
    decision = desk.controller.on_request(request, now)
    assert isinstance(decision, Look), decision
    return decision


def test_a_miss_in_l1_asks_l2_once_and_equal_requests_join(desk: Desk) -> None:
    first = request_for("a")
    assert look(desk, first, 0.0) == Look((key_of("a"),), joinable=True)
    assert desk.controller.on_request(request_for("a"), 0.0) == Join(first.id)


def test_what_l2_has_is_a_hit_that_fills_l1_for_the_life_it_has_left(desk: Desk) -> None:
    first = request_for("a")
    look(desk, first, 100.0)
    hit = desk.controller.on_found(first, [entry_of("a", stored_at=40.0, ttl_s=90.0)], 100.0)
    assert isinstance(hit, Hit)
    assert (hit.answer, hit.expires_at) == ("answer 'a'".replace("'", ""), 130.0)
    again = desk.controller.on_request(request_for("a"), 129.0)
    assert again is hit
    assert isinstance(desk.controller.on_request(request_for("a"), 130.0), Look)


def test_a_hit_in_l2_is_booked_as_one_and_later_ones_as_hits_in_l1(desk: Desk) -> None:
    first = request_for("a")
    look(desk, first, 0.0)
    desk.controller.on_found(first, [entry_of("a")], 0.0)
    desk.controller.on_request(request_for("a"), 1.0)
    accounts = dict(desk.ledger.accounts())
    assert accounts["local", "m1", "exact", "l2"].requests == 1
    assert accounts["local", "m1", "exact", "exact"].requests == 1
    assert total(accounts).residual == 0
    assert total(accounts).saved_by_us > 0


def test_nothing_found_makes_the_first_a_leader_whom_others_join(desk: Desk) -> None:
    first = request_for("a")
    look(desk, first, 0.0)
    found = desk.controller.on_found(first, [], 0.0)
    assert found == Forward("miss", "key-first-seen", True)
    assert desk.controller.on_request(request_for("a"), 0.1) == Join(first.id)
    assert isinstance(desk.controller.on_outcome(outcome_of(first, 0.0), "x", 1.0), Keep)
    assert isinstance(desk.controller.on_request(request_for("a"), 1.1), Hit)


def test_an_abandoned_look_up_can_be_led_again(desk: Desk) -> None:
    first = request_for("a")
    look(desk, first, 0.0)
    desk.controller.on_abandoned(first)
    assert isinstance(desk.controller.on_request(request_for("a"), 0.1), Look)


def test_another_requests_answer_under_the_same_key_is_not_taken(desk: Desk) -> None:
    first = request_for("a")
    look(desk, first, 0.0)
    found = desk.controller.on_found(first, [entry_of("a", check=check_of("b"))], 0.0)
    assert isinstance(found, Forward)
    assert desk.counters.l2 == {"collision": 1}
    assert len(desk.inventory) == 0


def test_what_was_invalidated_since_it_was_asked_for_is_not_taken(desk: Desk) -> None:
    desk.controller.on_generation("g", 0)
    desk.controller.on_invalidate(Invalidation(tags=frozenset({"red"})), 5)
    for epoch, tags, is_taken in (
        (Epoch("g", 4), ("red",), False),
        (Epoch("g", 4), ("blue",), True),
        (Epoch("g", 5), ("red",), True),
        (Epoch("old", 9), (), False),
    ):
        request = request_for((epoch, tags))
        look(desk, request, 0.0)
        entry = entry_of((epoch, tags), epoch=epoch, tags=tags)
        assert isinstance(desk.controller.on_found(request, [entry], 0.0), Hit) is is_taken


def test_an_expired_entry_of_l2_is_no_hit(desk: Desk) -> None:
    first = request_for("a")
    look(desk, first, 20.0)
    found = desk.controller.on_found(first, [entry_of("a", stored_at=0.0, ttl_s=10.0)], 20.0)
    assert isinstance(found, Forward)


def test_what_l1_has_no_room_for_answers_once_and_is_kept_in_l2() -> None:
    desk = Desk(has_l2=True, budget_entries=0)
    first = request_for("a")
    look(desk, first, 0.0)
    assert isinstance(desk.controller.on_found(first, [entry_of("a")], 0.0), Hit)
    other = request_for("b")
    look(desk, other, 0.0)
    desk.controller.on_found(other, [], 0.0)
    kept = desk.controller.on_outcome(outcome_of(other, 0.0), "x", 1.0)
    assert isinstance(kept, Keep)
    assert kept.refused == "larger-than-cache"
    assert desk.counters.stored == 0


def test_an_answer_invalidated_meanwhile_is_kept_nowhere(desk: Desk) -> None:
    first = request_for("a")
    look(desk, first, 0.0)
    epoch = desk.controller.epoch
    desk.controller.on_found(first, [], 0.0)
    desk.controller.on_invalidate(Invalidation(model="m1"), 1)
    outcome = outcome_of(first, 0.0, epoch=epoch)
    assert desk.controller.on_outcome(outcome, "x", 1.0) == Drop("invalidated")


def test_what_only_the_cache_may_answer_asks_l2_and_is_refused_where_it_has_nothing(
    desk: Desk,
) -> None:
    want = Want(only_if_cached=True)
    first = request_for("a", want)
    assert look(desk, first, 0.0) == Look((key_of("a"),), joinable=False)
    assert desk.controller.on_found(first, [], 0.0) == Reject(504, "only-if-cached")
    second = request_for("a", want)
    look(desk, second, 0.0)
    assert isinstance(desk.controller.on_found(second, [entry_of("a")], 0.0), Hit)


def test_a_fresh_answer_is_asked_for_without_a_look(desk: Desk) -> None:
    decision = desk.controller.on_request(request_for("a", Want(no_cache=True)), 0.0)
    assert decision == Forward("request", "no-cache", True)


def test_a_sampled_request_looks_for_the_variants_that_l1_lacks() -> None:
    desk = Desk(has_l2=True, freshness=Freshness(variants=2))
    first = request_for("a", sampled=True)
    wanted = look(desk, first, 0.0)
    assert len(wanted.keys) == 2
    assert not wanted.joinable
    one, other = wanted.keys
    found = desk.controller.on_found(first, [entry_of("a", key=one)], 0.0)
    assert isinstance(found, Hit)
    second = request_for("a", sampled=True)
    assert look(desk, second, 0.1).keys == (other,)
    assert desk.controller.on_found(second, [], 0.1) == Forward("miss", "variant-wanted", False)


def test_patience_is_half_a_minute_until_ten_outcomes_and_then_twice_what_it_takes() -> None:
    desk = Desk()
    for number in range(10):
        assert desk.controller.patience_s("m1") == 30.0
        desk.forward(request_for(number), 0.0, service_s=3.0)
    assert desk.controller.patience_s("m1") == pytest.approx(6.0)
    assert desk.controller.patience_s("m2") == 30.0


# Answers past their life, and nearly so.


def expired(desk: Desk, age_s: float, name: str = "a") -> object:
    """What is decided about a request for an answer that old."""
    desk.forward(request_for(name), 0.0)
    return desk.controller.on_request(request_for(name), age_s)


def test_an_expired_answer_is_served_once_more_while_a_new_one_is_asked_for() -> None:
    desk = Desk(freshness=Freshness(ttl_s=10.0, revalidate_s=5.0))
    refresh = expired(desk, 12.0)
    assert isinstance(refresh, Refresh)
    assert refresh.reason == "stale-while-revalidate"
    again = desk.controller.on_request(request_for("a"), 12.5)
    assert isinstance(again, Refresh)
    assert (refresh.is_due, again.is_due) == (True, False)  # one at a time
    assert desk.counters.stale == {"stale-while-revalidate": 2}


def test_a_refresh_puts_the_new_answer_in_the_old_ones_place() -> None:
    desk = Desk(freshness=Freshness(ttl_s=10.0, revalidate_s=5.0))
    desk.forward(request_for("a"), 0.0, answer="old")
    asking = request_for("a")
    refresh = desk.controller.on_request(asking, 12.0)
    assert isinstance(refresh, Refresh)
    forward = desk.controller.on_refresh(asking, refresh.hit, [], 12.0)
    assert forward == Forward("stale", "refresh", True)
    desk.controller.on_outcome(outcome_of(asking, 12.0, answer="new"), "refresh", 13.0)
    hit = desk.controller.on_request(request_for("a"), 14.0)
    assert isinstance(hit, Hit)
    assert hit.answer == "new"


def test_a_refresh_that_another_process_has_made_is_not_made_again() -> None:
    desk = Desk(has_l2=True, freshness=Freshness(ttl_s=10.0, revalidate_s=5.0))
    first = request_for("a")
    look(desk, first, 0.0)
    desk.controller.on_found(first, [entry_of("a", ttl_s=10.0)], 0.0)
    asking = request_for("a")
    refresh = desk.controller.on_request(asking, 12.0)
    assert isinstance(refresh, Refresh)
    newer = entry_of("a", stored_at=11.0, ttl_s=10.0, answer="theirs")
    assert desk.controller.on_refresh(asking, refresh.hit, [newer], 12.0) is None
    hit = desk.controller.on_request(request_for("a"), 12.1)
    assert isinstance(hit, Hit)
    assert hit.answer == "theirs"


def test_past_that_window_the_answer_is_asked_for_first() -> None:
    desk = Desk(freshness=Freshness(ttl_s=10.0, revalidate_s=5.0))
    assert isinstance(expired(desk, 15.0), Forward)


@pytest.mark.parametrize("want", [Want(max_age_s=11.0), Want(min_fresh_s=1.0), Want(no_cache=True)])
def test_who_forbids_stale_answers_gets_none(want: Want) -> None:
    desk = Desk(freshness=Freshness(ttl_s=10.0, revalidate_s=5.0, on_error_s=5.0))
    desk.forward(request_for("a"), 0.0)
    request = request_for("a", want)
    assert isinstance(desk.controller.on_request(request, 12.0), Forward)
    assert desk.controller.on_error(request, 12.0) is None


def test_a_popular_answer_is_refreshed_early_and_the_earlier_the_longer_it_takes() -> None:
    def earliest(service_s: float) -> int:
        desk = Desk(freshness=Freshness(ttl_s=100.0, early=1.0), draw=0.95)  # -ln u = 3
        desk.forward(request_for("a"), 0.0, service_s=service_s)
        return next(
            now
            for now in range(200)
            if isinstance(desk.controller.on_request(request_for("a"), now), Refresh)
        )

    assert earliest(10.0) == 71  # 3 x 10 s before its end
    assert earliest(1.0) == 98


def test_without_a_beta_nothing_is_refreshed_early() -> None:
    desk = Desk(freshness=Freshness(ttl_s=100.0), draw=0.999999)
    desk.forward(request_for("a"), 0.0, service_s=60.0)
    assert isinstance(desk.controller.on_request(request_for("a"), 99.9), Hit)


def test_a_stale_answer_stands_in_where_the_engine_gives_none() -> None:
    desk = Desk(freshness=Freshness(ttl_s=10.0, on_error_s=60.0))
    desk.forward(request_for("a"), 0.0, answer="old")
    asking = request_for("a")
    assert isinstance(desk.controller.on_request(asking, 40.0), Forward)
    desk.controller.on_failure(asking, "connect", 0.1)
    hit = desk.controller.on_error(asking, 40.1)
    assert isinstance(hit, Hit)
    assert hit.answer == "old"
    assert desk.controller.on_error(asking, 70.0) is None
    assert desk.counters.stale == {"stale-if-error": 1}


def test_nobody_elses_answer_stands_in() -> None:
    desk = Desk(freshness=Freshness(ttl_s=10.0, on_error_s=60.0))
    desk.forward(request_for("a"), 0.0)
    other = Request(RequestId(b"o"), "local", "", ask_of("b", key=key_of("a")))
    assert desk.controller.on_error(other, 11.0) is None
    assert desk.controller.on_error(request_for("a", Want(no_store=True)), 11.0) is None


def test_a_refusal_is_kept_only_on_the_operators_wish_and_for_its_own_time() -> None:
    plain, negative = Desk(), Desk(freshness=Freshness(negative_ttl_s=5.0))
    for desk, status, is_kept in (
        (plain, 400, False),
        (negative, 400, True),
        (negative, 404, True),
        (negative, 422, True),
        (negative, 401, False),
        (negative, 429, False),
        (negative, 500, False),
    ):
        request = request_for((id(desk), status))
        assert desk.controller.keeps_refusal(request, status) is is_kept
        effects = desk.forward(request, 0.0, status=status, usage=None)
        assert isinstance(effects, Keep) is is_kept
    hit = negative.controller.on_request(request_for((id(negative), 404)), 4.9)
    assert isinstance(hit, Hit)
    assert hit.status == 404
    later = negative.controller.on_request(request_for((id(negative), 404)), 5.0)
    assert isinstance(later, Forward)


def test_a_namespace_has_rules_of_its_own() -> None:
    desk = Desk(namespaces={"n": Freshness(ttl_s=10.0, revalidate_s=5.0)})
    desk.forward(request_for("a", namespace="n"), 0.0)
    assert isinstance(desk.controller.on_request(request_for("a", namespace="n"), 12.0), Refresh)


def test_new_rules_hold_for_what_is_asked_from_then_on() -> None:
    desk = Desk(freshness=Freshness(ttl_s=10.0))
    desk.forward(request_for("a"), 0.0)
    desk.controller.set_freshness(Freshness(ttl_s=10.0, revalidate_s=100.0), {})
    assert isinstance(desk.controller.on_request(request_for("a"), 50.0), Refresh)
    assert not desk.controller.on_tick(50.0)
    assert desk.inventory.find(key_of("a")) is not None


@pytest.mark.parametrize(("before_s", "after_s"), [(0.0, 100.0), (100.0, 0.0), (100.0, 10.0)])
def test_new_windows_hold_for_when_what_is_stored_leaves(before_s: float, after_s: float) -> None:
    desk = Desk(freshness=Freshness(ttl_s=10.0, revalidate_s=before_s))
    desk.forward(request_for("a"), 0.0)
    desk.controller.set_freshness(Freshness(ttl_s=10.0, revalidate_s=after_s), {})
    desk.controller.on_tick(9.9 + after_s)
    assert len(desk.inventory) == 1
    desk.controller.on_tick(10.0 + after_s)
    assert len(desk.inventory) == 0


# Whether a look-up has found what it is for ---------------------------------------------------


def test_what_cannot_answer_is_not_found(desk: Desk) -> None:
    desk.controller.on_generation("g", 0)
    desk.controller.on_invalidate(Invalidation(tags=frozenset({"red"})), 1)
    known = Epoch("g", 1)
    request = request_for("a")
    for entry, now, is_found in (
        (entry_of("a", epoch=known, stored_at=0.0, ttl_s=10.0), 9.0, True),
        (entry_of("a", epoch=known, stored_at=0.0, ttl_s=10.0), 10.0, False),
        (entry_of("a", epoch=known, check=check_of("b")), 1.0, False),
        (entry_of("a", epoch=Epoch("g", 0), tags=("red",)), 1.0, False),
        (entry_of("a", epoch=Epoch("old", 1)), 1.0, False),
    ):
        assert desk.controller.is_found(request, [entry], now) is is_found
    assert not desk.controller.is_found(request, [], 1.0)
    young = request_for("a", want=Want(max_age_s=5.0))
    assert not desk.controller.is_found(young, [entry_of("a", epoch=known, stored_at=0.0)], 6.0)
    assert desk.counters.l2 == {}  # to ask is not to use
    assert len(desk.inventory) == 0


def test_the_answer_that_is_to_be_refreshed_is_not_the_new_one_however_its_times_come_back(
    desk: Desk,
) -> None:
    """They went through the wall clock, which doesn't give back every digit."""
    first = request_for("a")
    look(desk, first, 0.0)
    hit = desk.controller.on_found(first, [entry_of("a", stored_at=0.0, ttl_s=10.0)], 0.0)
    assert isinstance(hit, Hit)
    same = entry_of("a", stored_at=0.000_1, ttl_s=10.0)
    newer = entry_of("a", stored_at=3.0, ttl_s=10.0)
    assert not desk.controller.is_found(first, [same], 5.0, hit)
    assert desk.controller.is_found(first, [newer], 5.0, hit)
    assert isinstance(desk.controller.on_refresh(first, hit, [same], 5.0), Forward)
    assert desk.controller.on_refresh(first, hit, [newer], 5.0) is None
