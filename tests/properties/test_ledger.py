"""The books balance to a residual of zero, whatever is asked, answered and charged."""

from collections import Counter
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from core_parts import Desk, outcome_of, request_for
from preheat.core import stats
from preheat.core.freshness import Freshness
from preheat.core.ledger import NANO, PICO, Ledger, Price
from preheat.core.stats import by_layer, rows
from preheat.core.types import Forward, Hit, Join, Request, Usage
from preheat.core.warmup.found import Found

# A price per million tokens as it is published: a decimal number.
published = st.decimals(0, 1_000, places=6).map(float)
prices = st.builds(Price.per_million, published, published, published)
usages = st.none() | st.builds(
    lambda fresh, cached, output: Usage(fresh + cached, output, cached),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
)
seconds = st.floats(0.0, 1e5)
outcomes = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from(["m1", "m2", "unpriced"]),
        st.sampled_from(["exact", "join", "key-first-seen", "bypass-sampled"]),
        usages,
        seconds,
    ),
    max_size=30,
)


@given(published, prices)
def test_a_published_price_is_kept_to_the_last_digit(price: float, other: Price) -> None:
    exact = Fraction(str(price)) * PICO / 10**6
    assert Price.per_million(price, 0, 0).input == exact
    assert isinstance(other.output, int)


@settings(deadline=None, max_examples=200)
@given(st.fixed_dictionaries({"m1": prices, "m2": prices}), outcomes)
def test_the_residual_is_zero_in_total_and_in_every_row(
    prices: dict[str, Price], outcomes: list[Any]
) -> None:
    ledger = Ledger(prices)
    for tenant, model, word, usage, service_s in outcomes:
        book(ledger, tenant, model, word, usage, service_s)
        found = Found(0 if usage is None else usage.cached_tokens // 2, service_s)
        ledger.book_forward(tenant, model, word, usage, service_s, warmed=found)
        ledger.book_warm(tenant, model, word, found.tokens, service_s)
    assert stats.total(dict(ledger.accounts())).residual == 0
    assert all(account.residual == 0 for _, account in rows(dict(ledger.accounts())))
    assert all(account.residual == 0 for account in by_layer(dict(ledger.accounts())).values())


def book(
    ledger: Ledger, tenant: str, model: str, word: str, usage: Usage | None, service_s: float
) -> None:
    if word in {"exact", "join"}:
        share = ledger.share_of(model, usage, service_s)
        ledger.account(tenant, model, word, word).save(share)
    else:
        ledger.book_forward(tenant, model, word, usage, service_s)


@settings(deadline=None, max_examples=200)
@given(st.fixed_dictionaries({"m1": prices, "m2": prices}), outcomes)
def test_the_sums_are_those_of_plain_whole_numbers(
    prices: dict[str, Price], outcomes: list[Any]
) -> None:
    ledger = Ledger(prices)
    plain: Counter[tuple[str, str, str, str, str]] = Counter()
    for tenant, model, word, usage, service_s in outcomes:
        book(ledger, tenant, model, word, usage, service_s)
        layer = word if word in {"exact", "join"} else "forward"
        row = (tenant, model, layer, word)
        plain[*row, "requests"] += 1
        is_saved = layer != "forward"
        plain[*row, "saved_by_us_ns" if is_saved else "paid_ns"] += round(service_s * NANO)
        if usage is None:
            plain[*row, "unpriced"] += 1
            continue
        price = prices.get(model, Price())
        fresh = usage.input_tokens - usage.cached_tokens
        answer = usage.output_tokens * price.output
        net = fresh * price.input + usage.cached_tokens * price.cached_input + answer
        gross = usage.input_tokens * price.input + answer
        plain[*row, "input_tokens"] += usage.input_tokens
        plain[*row, "output_tokens"] += usage.output_tokens
        plain[*row, "cached_tokens"] += usage.cached_tokens
        plain[*row, "saved_by_us" if is_saved else "paid"] += net
        plain[*row, "saved_by_provider"] += gross - net
        plain[*row, "price_without_us"] += gross
    booked = {
        (*name, field): getattr(account, field)
        for name, account in ledger.accounts()
        for field in account.__struct_fields__
    }
    assert {k: v for k, v in booked.items() if v} == {k: v for k, v in plain.items() if v}
    for field in ("requests", "paid", "saved_by_us", "price_without_us", "paid_ns"):
        total = sum(value for name, value in plain.items() if name[-1] == field)
        assert getattr(stats.total(dict(ledger.accounts())), field) == total


requests = st.lists(
    st.tuples(
        st.integers(0, 5),  # what is asked for
        st.sampled_from(["a", "b"]),  # by which tenant
        st.booleans(),  # whether it is sampled
        usages,
        seconds,
        st.integers(0, 3),  # how many more ask while it is computed
        st.sampled_from(["", "", "finish-length"]),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(prices, requests, st.integers(0, 2))
def test_a_controllers_books_balance_over_hits_joins_and_evictions(
    price: Price, requests: list[Any], variants: int
) -> None:
    freshness = Freshness(ttl_s=8.0, variants=variants)
    desk = Desk(budget_entries=3, freshness=freshness, prices={"m1": price})
    answers: Counter[str] = Counter()
    for now, (name, tenant, sampled, usage, service_s, more, unstorable) in enumerate(requests):
        request = request_for((name, tenant), tenant=tenant, sampled=sampled)
        decision = desk.controller.on_request(request, now)
        desk.controller.on_tick(now)
        if isinstance(decision, Hit):
            answers["exact"] += 1
            continue
        assert isinstance(decision, Forward)
        joined = list(followers(desk, request, more, now)) if decision.joinable else []
        answers["forward"] += 1
        answers["join"] += len(joined)
        outcome = outcome_of(
            request,
            now,
            usage=usage,
            service_s=service_s,
            unstorable=unstorable,
            joined=tuple(joined),
        )
        desk.controller.on_outcome(outcome, decision.reason, now)
    booked: Counter[str] = Counter()
    for (_, _, layer, _), account in desk.ledger.accounts():
        booked[layer] += account.requests
        assert account.residual == 0
    assert +booked == answers
    assert stats.total(dict(desk.ledger.accounts())).residual == 0


def followers(desk: Desk, leader: Request, number: int, now: float) -> Any:
    for _ in range(number):
        follower = Request("f", leader.tenant, leader.namespace, leader.ask)
        assert desk.controller.on_request(follower, now) == Join(leader.id)
        yield follower


@settings(deadline=None, max_examples=5)
@given(st.integers(0, 2**30), st.sampled_from(["forward", "exact"]))
def test_a_flood_of_model_names_stays_bounded_and_is_counted(seed: int, layer: str) -> None:
    ledger = Ledger({"m1": Price(1, 1, 1)})
    flood = 6_000
    for number in range(flood):
        word = "key-first-seen" if layer == "forward" else "exact"
        book(ledger, "t", f"{seed}-{number}", word, Usage(10, 1), 1.0)
    assert len(rows(dict(ledger.accounts()))) <= 4_097
    assert stats.total(dict(ledger.accounts())).requests == flood
    assert stats.total(dict(ledger.accounts())).input_tokens == 10 * flood
    assert stats.total(dict(ledger.accounts())).residual == 0
