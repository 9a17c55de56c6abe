"""What is served, stale or not, is what RFC 9111 and RFC 5861 say, read plainly."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from core_parts import Desk, outcome_of, request_for
from preheat.core.freshness import Freshness
from preheat.core.types import FOREVER, Forward, Hit, Join, Keep, Refresh, Reject, Request, Want

seconds = st.integers(0, 12).map(float)
wants = st.builds(
    Want,
    no_cache=st.booleans(),
    no_store=st.sampled_from([False, False, False, True]),
    only_if_cached=st.booleans(),
    max_age_s=st.just(FOREVER) | seconds,
    max_stale_s=st.sampled_from([0.0, 3.0, FOREVER]),
    min_fresh_s=st.sampled_from([0.0, 0.0, 2.0]),
    ttl_s=st.none() | seconds,
)
rules = st.builds(
    Freshness,
    ttl_s=st.sampled_from([0.0, 2.0, 8.0]),
    max_ttl_s=st.sampled_from([4.0, 20.0]),
    stale_s=st.sampled_from([0.0, 5.0]),
    revalidate_s=st.sampled_from([0.0, 4.0]),
    on_error_s=st.sampled_from([0.0, 6.0]),
    negative_ttl_s=st.sampled_from([0.0, 3.0]),
)
steps = st.lists(
    st.tuples(
        # Halves: no moment is the exact end of a life, where two readings may differ.
        st.integers(0, 8).map(lambda n: n + 0.125),
        st.just(Want()) | wants,
        st.sampled_from([200, 200, 200, 404, 429, 503, 0]),
    ),
    max_size=25,
)


class Plain:
    """One stored answer and the rules, in the RFCs' own words."""

    def __init__(self, rules: Freshness) -> None:
        self.rules = rules
        self.stored: tuple[float, float, int, str] | None = None

    def may_serve(self, want: Want, now: float) -> bool:
        """From the cache, without the engine's answer."""
        if self.stored is None or want.no_cache or want.no_store:
            return False
        age, lifetime, status = now - self.stored[0], self.stored[1], self.stored[2]
        if age > want.max_age_s:  # 5.2.1.1
            return False
        if lifetime > age:
            return lifetime - age >= want.min_fresh_s  # 5.2.1.3
        staleness = age - lifetime
        if not self._takes_stale(want, status):
            return False
        by_client = staleness < want.max_stale_s and staleness < self.rules.stale_s  # 5.2.1.2
        by_operator = staleness < self.rules.revalidate_s  # RFC 5861, section 3
        return by_client or by_operator

    def may_stand_in(self, want: Want, now: float) -> bool:
        """Where the engine has failed: RFC 5861, section 4."""
        if self.stored is None or want.no_cache or want.no_store:
            return False
        age, lifetime, status = now - self.stored[0], self.stored[1], self.stored[2]
        if age > want.max_age_s or not (lifetime > age or self._takes_stale(want, status)):
            return False
        if lifetime > age and lifetime - age < want.min_fresh_s:
            return False
        return age - lifetime < self.rules.on_error_s

    def store(self, want: Want, status: int, now: float, answer: str) -> None:
        if want.no_store or status not in {200, 400, 404, 422}:
            return
        asked_s = self.rules.ttl_s if want.ttl_s is None else want.ttl_s
        capped_s = min(asked_s, self.rules.max_ttl_s) if want.ttl_s is not None else asked_s
        lifetime = capped_s if status == 200 else min(capped_s, self.rules.negative_ttl_s)
        if lifetime > 0:
            self.stored = now, lifetime, status, answer

    def _takes_stale(self, want: Want, status: int) -> bool:
        names_an_age = want.max_age_s < FOREVER and want.max_stale_s == 0
        return status == 200 and want.min_fresh_s == 0 and not names_an_age


@settings(deadline=None, max_examples=400)
@given(rules, steps)
def test_what_is_served_is_what_the_rfcs_say(rules: Freshness, steps: list[Any]) -> None:
    desk, plain = Desk(freshness=rules, stale_s=rules.stale_s), Plain(rules)
    now = 0.0
    for number, (pause_s, want, status) in enumerate(steps):
        now += pause_s
        while desk.controller.on_tick(now):
            pass
        request = request_for("a", want)
        decision = desk.controller.on_request(request, now)
        if plain.may_serve(want, now):
            assert plain.stored is not None
            assert isinstance(decision, Hit | Refresh), (decision, plain.stored, now)
            hit = decision if isinstance(decision, Hit) else decision.hit
            assert (hit.answer, hit.status) == (plain.stored[3], plain.stored[2])
            is_stale = now - plain.stored[0] >= plain.stored[1]
            assert isinstance(decision, Refresh) <= is_stale
            if isinstance(decision, Refresh) and decision.is_due:
                assert not want.only_if_cached
                answer(desk, plain, request, hit, status, now, number)
        elif want.only_if_cached:
            assert decision == Reject(504, "only-if-cached")
        else:
            assert isinstance(decision, Forward), (decision, plain.stored, now)
            answer(desk, plain, request, None, status, now, number)
    assert not desk.controller._leaders


def answer(
    desk: Desk,
    plain: Plain,
    request: Request,
    refreshed: Hit | None,
    status: int,
    now: float,
    number: int,
) -> None:
    """What the engine says to it, and what becomes of that."""
    if refreshed is not None:
        assert desk.controller.on_refresh(request, refreshed, (), now) is not None
    if status == 200 or desk.controller.keeps_refusal(request, status):
        outcome = outcome_of(request, now, answer=f"{number}", status=status)
        desk.controller.on_outcome(outcome, "x", now)
        plain.store(request.want, status, now, f"{number}")
        return
    desk.controller.on_failure(request, "x", 0.0)
    stands_in = desk.controller.on_error(request, now)
    assert (stands_in is not None) is plain.may_stand_in(request.want, now)
    if stands_in is not None:
        assert plain.stored is not None
        assert stands_in.answer == plain.stored[3]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "ask", "strict", "end", "fail"]), st.integers(0, 20)),
        max_size=60,
    )
)
def test_of_one_answer_there_is_never_more_than_one_call_under_way(steps: list[Any]) -> None:
    """Refreshes included, whoever asks meanwhile; and no second one within a second of a failure."""
    desk = Desk(freshness=Freshness(ttl_s=2.0, revalidate_s=60.0))
    running: list[tuple[Request, float | None]] = []
    failed: float | None = None  # when the refresh began that brought nothing
    now = 0.0
    for number, (what, tenths) in enumerate(steps):
        now += tenths / 10 + 0.001
        if what in {"ask", "strict"}:
            request = request_for("a", Want(max_age_s=0.0) if what == "strict" else Want())
            decision = desk.controller.on_request(request, now)
            if isinstance(decision, Refresh) and decision.is_due:
                assert failed is None or now - failed >= 1.0
                assert desk.controller.on_refresh(request, decision.hit, (), now) is not None
                running.append((request, now))
            elif isinstance(decision, Forward):
                running.append((request, None))
            elif isinstance(decision, Join):
                assert running
                assert decision.leader == running[0][0].id
        elif running:
            request, begun_at = running.pop()
            if what == "end":
                outcome = outcome_of(request, now, answer=f"{number}")
                kept = desk.controller.on_outcome(outcome, "x", now)
                failed = None if isinstance(kept, Keep) else failed
            else:
                desk.controller.on_failure(request, "x", 0.0)
                failed = begun_at if begun_at is not None else failed
        assert len(running) <= 1
