"""The one definition of each number we report."""

import pytest

from core_parts import PRICES, USAGE
from preheat.core import stats
from preheat.core.ledger import Ledger
from preheat.core.stats import LATENCY_BOUNDS_S, Counters, Histogram
from preheat.core.types import Usage


def test_a_duration_counts_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram()
    for duration_s in (0.0, 0.0001, 0.00011, 300.0, 301.0):
        histogram.observe(duration_s)
    assert histogram.counts[:2] == [2, 1]
    assert histogram.counts[-2:] == [1, 1]
    assert histogram.count == 5
    assert histogram.sum_s == pytest.approx(601.00021)


def test_bounds_rise() -> None:
    assert list(LATENCY_BOUNDS_S) == sorted(set(LATENCY_BOUNDS_S))


def test_a_word_is_counted_under_its_name() -> None:
    counters = Counters()
    counters.bump(counters.refused, "too-deep")
    counters.bump(counters.refused, "too-deep")
    assert counters.refused == {"too-deep": 2}
    assert counters.engine_errors == {}


def test_an_empty_ledger_has_ratios_of_zero() -> None:
    ratios = stats.hit_ratios({})
    assert ratios == {
        "exact": stats.HitRatio(0.0, 0.0),
        "join": stats.HitRatio(0.0, 0.0),
    }


def test_hit_ratios_are_shares_of_all_answers_by_requests_and_by_tokens() -> None:
    ledger = Ledger(PRICES)
    ledger.book_forward("t", "m1", "key-first-seen", Usage(90, 10), 1.0)
    ledger.book_forward("t", "m1", "bypass-sampled", Usage(290, 10), 1.0)
    ledger.account("t", "m1", "exact", "exact").save(ledger.share_of("m1", Usage(90, 10), 1.0))
    ledger.account("u", "m1", "join", "join").save(ledger.share_of("m1", Usage(490, 10), 1.0))
    ratios = stats.hit_ratios(dict(ledger.accounts()))
    assert ratios["exact"] == stats.HitRatio(by_requests=0.25, by_tokens=0.1)
    assert ratios["join"] == stats.HitRatio(by_requests=0.25, by_tokens=0.5)


def test_sums_by_layer_leave_nothing_out() -> None:
    ledger = Ledger(PRICES)
    for tenant in ("a", "b"):
        for reason in ("expired", "evicted"):
            ledger.book_forward(tenant, "m1", reason, USAGE, 0.5)
    sums = stats.by_layer(dict(ledger.accounts()))
    assert {name: account.requests for name, account in sums.items()} == {
        ("forward", "expired"): 2,
        ("forward", "evicted"): 2,
    }
    assert (
        sum(account.paid for account in sums.values()) == stats.total(dict(ledger.accounts())).paid
    )


def test_rows_come_in_a_stable_order() -> None:
    one, other = Ledger({}), Ledger({})
    names = [("b", "x"), ("a", "y"), ("a", "x")]
    for tenant, model in names:
        one.book_forward(tenant, model, "expired", None, 0.0)
    for tenant, model in reversed(names):
        other.book_forward(tenant, model, "expired", None, 0.0)
    assert [name for name, _ in stats.rows(dict(one.accounts()))] == [
        name for name, _ in stats.rows(dict(other.accounts()))
    ]


def counted(tenant: str, *, gauge: float = 0.0) -> stats.Snapshot:
    ledger, counters = Ledger(PRICES), Counters()
    ledger.book_forward(tenant, "m1", "expired", USAGE, 0.5)
    counters.latency["exact"].observe(0.01)
    counters.bump(counters.refused, tenant)
    counters.stored = 2
    return stats.snapshot(ledger, counters, {"workers": gauge}, {"l2_bytes": gauge})


def test_snapshots_add_up_to_those_of_one_process() -> None:
    whole = counted("a", gauge=1.0)
    whole.add(counted("a", gauge=1.0))
    whole.add(counted("b", gauge=5.0))
    assert whole.accounts["a", "m1", "forward", "expired"].requests == 2
    assert whole.accounts["b", "m1", "forward", "expired"].requests == 1
    assert sum(whole.latency["exact"][0]) == 3
    assert whole.latency["exact"][1] == pytest.approx(0.03)
    assert whole.words["refused"] == {"a": 2, "b": 1}
    assert whole.totals["stored"] == 6
    assert whole.gauges == {"workers": 7.0}
    assert whole.shared == {"l2_bytes": 5.0}  # all of them see the same L2
    assert stats.total(whole.accounts).residual == 0


def test_what_a_dead_process_counted_stays_and_what_it_held_is_gone() -> None:
    dead = counted("a", gauge=1.0)
    dead.retire()
    whole = counted("a", gauge=1.0)
    whole.add(dead)
    assert whole.totals["stored"] == 4
    assert whole.gauges == {"workers": 1.0}


def test_what_is_down_for_one_process_is_told_as_down_and_sizes_are_the_largest() -> None:
    whole = stats.Snapshot(shared={"l2_up": 1.0, "engines_ready": 1.0, "l2_bytes": 1.0})
    whole.add(stats.Snapshot(shared={"l2_up": 0.0, "engines_ready": 2.0, "l2_bytes": 2.0}))
    assert whole.shared == {"l2_up": 0.0, "engines_ready": 1.0, "l2_bytes": 2.0}


def test_an_upstream_is_the_sum_of_what_all_processes_have_of_it() -> None:
    def asked(up: int, *, draining: bool = False) -> stats.Snapshot:
        one = stats.UpstreamCounts("a:1", 2, up, draining, failures=3, retries=1)
        return stats.Snapshot(upstreams={"gpu.0": one})

    well, dead = asked(1), asked(0)
    dead.retire()
    assert dead.upstreams["gpu.0"] == stats.UpstreamCounts("a:1", failures=3, retries=1)
    whole = stats.Snapshot()
    for one in (dead, well, asked(0, draining=True), asked(1)):
        whole.add(one)
    assert whole.upstreams == {"gpu.0": stats.UpstreamCounts("a:1", 6, 0, True, 12, 4)}
    assert well.upstreams["gpu.0"].failures == 3  # adding changes what is added to alone


def test_what_was_dropped_stays_counted_when_its_process_ends() -> None:
    ledger, counters = Ledger(PRICES), Counters()
    counters.log_dropped, counters.rows_dropped = 2, 3
    dead = stats.snapshot(ledger, counters, {}, {})
    dead.retire()
    assert (dead.totals["log_dropped"], dead.totals["rows_dropped"]) == (2, 3)


def test_a_snapshot_stands_still_while_the_books_go_on() -> None:
    ledger = Ledger(PRICES)
    ledger.book_forward("t", "m1", "expired", USAGE, 0.5)
    one = stats.snapshot(ledger, Counters(), {}, {})
    ledger.book_forward("t", "m1", "expired", USAGE, 0.5)
    assert one.accounts["t", "m1", "forward", "expired"].requests == 1
