"""What was spent and saved."""

import pytest

from core_parts import PRICES, USAGE
from preheat.core import stats
from preheat.core.ledger import NANO, Account, Ledger, Price
from preheat.core.types import Usage
from preheat.core.warmup.found import Found


def test_a_price_per_million_is_a_whole_number_of_picodollars_a_token() -> None:
    assert Price.per_million(0.15, 0.075, 0.6) == Price(150_000, 75_000, 600_000)
    assert Price.per_million(2.5e-6, 0, 0).input == 2


def test_net_and_discount_are_the_gross_price() -> None:
    price = PRICES["m1"]
    assert price.gross(USAGE) == 1_000 * 150_000 + 100 * 600_000
    assert price.discount(USAGE) == 400 * 75_000
    assert price.net(USAGE) + price.discount(USAGE) == price.gross(USAGE)


def test_a_forward_is_paid() -> None:
    ledger = Ledger(PRICES)
    ledger.book_forward("t", "m1", "key-first-seen", USAGE, 1.5)
    ((name, account),) = ledger.accounts()
    assert name == ("t", "m1", "forward", "key-first-seen")
    assert account.paid == PRICES["m1"].net(USAGE)
    assert account.saved_by_provider == PRICES["m1"].discount(USAGE)
    assert account.saved_by_us == 0
    assert account.paid_ns == 1_500_000_000
    assert account.residual == 0


def test_a_hit_saves_what_the_first_asking_cost_and_not_what_the_provider_took_off() -> None:
    ledger = Ledger(PRICES)
    share = ledger.share_of("m1", USAGE, 1.5)
    account = ledger.account("t", "m1", "exact", "exact")
    account.save(share)
    account.save(share)
    assert account.requests == 2
    assert account.saved_by_us == 2 * PRICES["m1"].net(USAGE)
    assert account.saved_by_provider == 2 * PRICES["m1"].discount(USAGE)
    assert account.paid == 0
    assert account.saved_by_us_ns == 3 * NANO
    assert account.residual == 0


def test_seconds_paid_and_saved_are_rounded_alike() -> None:
    ledger = Ledger({})
    service_s = 0.123_456_789_7
    ledger.book_forward("t", "m", "expired", None, service_s)
    ledger.account("t", "m", "exact", "exact").save(ledger.share_of("m", None, service_s))
    total = stats.total(dict(ledger.accounts()))
    assert total.paid_ns == total.saved_by_us_ns == 123_456_790


def test_an_answer_without_usage_is_counted_but_in_no_sum_of_money() -> None:
    ledger = Ledger(PRICES)
    ledger.book_forward("t", "m1", "expired", None, 1.0)
    ledger.account("t", "m1", "join", "join").save(ledger.share_of("m1", None, 1.0))
    total = stats.total(dict(ledger.accounts()))
    assert (total.requests, total.unpriced) == (2, 2)
    assert total.paid == total.saved_by_us == total.price_without_us == total.input_tokens == 0


def test_a_model_without_a_price_costs_nothing() -> None:
    ledger = Ledger(PRICES)
    assert ledger.price("unknown") == Price()
    ledger.book_forward("t", "unknown", "expired", USAGE, 1.0)
    assert stats.total(dict(ledger.accounts())).paid == 0
    assert stats.total(dict(ledger.accounts())).input_tokens == USAGE.input_tokens


def test_a_provider_that_asks_more_for_cached_tokens_saves_less_than_nothing() -> None:
    ledger = Ledger({"odd": Price.per_million(1.0, 1.25, 4.0)})
    ledger.book_forward("t", "odd", "expired", Usage(100, 10, 80), 1.0)
    total = stats.total(dict(ledger.accounts()))
    assert total.saved_by_provider < 0
    assert total.residual == 0


def test_a_flood_of_model_names_is_one_account() -> None:
    ledger = Ledger(PRICES)
    for number in range(10_000):
        ledger.book_forward("t", f"made-up-{number}", "expired", USAGE, 1.0)
    names = [name for name, _ in ledger.accounts()]
    assert len(names) == 4_097
    assert ("t", "(other)", "forward", "expired") in names
    assert stats.total(dict(ledger.accounts())).requests == 10_000


def test_a_priced_model_keeps_its_accounts_in_a_flood() -> None:
    ledger = Ledger(PRICES)
    for number in range(5_000):
        ledger.book_forward("t", f"made-up-{number}", "expired", USAGE, 1.0)
    ledger.book_forward("t", "m1", "expired", USAGE, 1.0)
    assert dict(ledger.accounts())["t", "m1", "forward", "expired"].requests == 1


@pytest.mark.parametrize("length", [128, 129, 1_000_000])
def test_a_name_longer_than_any_setting_may_be_is_not_kept(length: int) -> None:
    ledger = Ledger({})
    ledger.book_forward("t", "m" * length, "expired", None, 1.0)
    ((name, _),) = ledger.accounts()
    assert name[1] == ("m" * 128 if length == 128 else "(other)")


def test_accounts_add_up_field_by_field() -> None:
    one = Account(**dict.fromkeys(Account.__struct_fields__, 2))
    one.add(Account(**dict.fromkeys(Account.__struct_fields__, 3)))
    assert one == Account(**dict.fromkeys(Account.__struct_fields__, 5))


def test_a_warm_up_is_spent_by_us_and_what_is_found_of_it_saved_by_us() -> None:
    ledger, price = Ledger(PRICES), PRICES["m1"]
    ledger.book_warm("t", "m1", "gate", 300, 0.5)
    ledger.book_forward("t", "m1", "key-first-seen", USAGE, 1.5, warmed=Found(300, 0.5))
    accounts = dict(ledger.accounts())
    warm, forward = (
        accounts["t", "m1", layer, reason]
        for layer, reason in (("warm", "gate"), ("forward", "key-first-seen"))
    )
    assert (warm.requests, warm.input_tokens, warm.paid_ns) == (1, 300, NANO // 2)
    assert warm.paid == warm.spent_by_us == 300 * price.input
    assert warm.price_without_us == warm.saved_by_us == 0
    assert (forward.cached_tokens, forward.warmed_tokens) == (400, 300)
    assert forward.saved_by_us == 300 * (price.input - price.cached_input)
    assert forward.saved_by_provider == 100 * (price.input - price.cached_input)
    assert forward.saved_by_us_ns == NANO // 2
    assert warm.residual == forward.residual == stats.total(accounts).residual == 0
    assert stats.hit_ratios(accounts)["exact"].by_requests == 0.0


def test_no_more_is_found_than_was_cached() -> None:
    ledger = Ledger(PRICES)
    ledger.book_forward("t", "m1", "expired", USAGE, 1.0, warmed=Found(10_000, 0.0))
    ((_, account),) = ledger.accounts()
    assert account.saved_by_us == PRICES["m1"].discount(USAGE)
    assert account.saved_by_provider == 0
    assert account.residual == 0
