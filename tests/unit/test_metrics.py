"""The counters as Prometheus metrics."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core_parts import PRICES, USAGE, Desk, key_of, request_for
from preheat.core.ledger import PICO
from preheat.core.stats import Snapshot, UpstreamCounts, snapshot
from preheat.core.types import Want
from preheat.telemetry.metrics import _GAUGES, render


def counted(desk: Desk, **gauges: float) -> Snapshot:
    return snapshot(desk.ledger, desk.counters, dict(gauges), {})


class Told:
    """What the exporter tells of a desk, by name and labels."""

    def __init__(self, desk: Desk, **gauges: float) -> None:
        families = text_string_to_metric_families(render(counted(desk, **gauges)).decode())
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self._samples[f"preheat_{name}", frozenset(labels.items())]


@pytest.fixture
def desk() -> Desk:
    """One forward and two hits of tenant a, and a forward of tenant b."""
    desk = Desk()
    desk.forward(request_for("x", tenant="a"), 0.0)
    for _ in range(2):
        desk.controller.on_request(request_for("x", tenant="a"), 1.0)
    desk.inventory.remove(key_of("x"), "evicted")
    desk.forward(request_for("x", tenant="b"), 2.0)
    return desk


def test_answers_are_counted_by_tenant_model_layer_and_reason(desk: Desk) -> None:
    told = Told(desk)
    hits = {"tenant": "a", "model": "m1", "layer": "exact", "reason": "exact"}
    forward = {"tenant": "b", "model": "m1", "layer": "forward", "reason": "evicted"}
    assert told("requests_total", **hits) == 2
    assert told("requests_total", **forward) == 1
    assert told("requests_total", **{**forward, "tenant": "a", "reason": "key-first-seen"}) == 1
    assert told("tokens_total", **hits, kind="input") == 2_000
    assert told("tokens_total", **hits, kind="output") == 200
    assert told("tokens_total", **hits, kind="cached_input") == 800
    assert told("unpriced_requests_total", **hits) == 0


def test_money_and_seconds_are_told_by_account(desk: Desk) -> None:
    told = Told(desk)
    whose = {"tenant": "a", "model": "m1"}
    net, discount = PRICES["m1"].net(USAGE), PRICES["m1"].discount(USAGE)
    assert told("money_total", **whose, account="paid") == pytest.approx(net / PICO)
    assert told("money_total", **whose, account="saved_by_us") == pytest.approx(2 * net / PICO)
    saved_by_provider = told("money_total", **whose, account="saved_by_provider")
    assert saved_by_provider == pytest.approx(3 * discount / PICO)
    seconds = {
        (account, basis): told("engine_seconds_total", **whose, account=account, basis=basis)
        for account, basis in (
            ("paid", "measured"),
            ("saved_by_us", "measured"),
            ("saved_by_provider", "unknown"),
        )
    }
    assert list(seconds.values()) == [2.5, 5.0, 0.0]
    assert told("ledger_residual") == 0


def test_ratios_are_those_of_the_stats(desk: Desk) -> None:
    told = Told(desk)
    assert told("hit_ratio", layer="exact", weight="request") == 0.5
    assert told("hit_ratio", layer="exact", weight="token") == 0.5
    assert told("hit_ratio", layer="join", weight="request") == 0


def test_a_histograms_buckets_add_up(desk: Desk) -> None:
    for duration_s in (0.00005, 0.0002, 0.0002, 1_000.0):
        desk.counters.latency["exact"].observe(duration_s)
    told = Told(desk)
    buckets = {
        bound: told("request_seconds_bucket", layer="exact", le=bound)
        for bound in ("0.0001", "0.00025", "300.0", "+Inf")
    }
    assert list(buckets.values()) == [1, 3, 3, 4]
    assert told("request_seconds_count", layer="exact") == 4
    assert told("request_seconds_sum", layer="exact") == pytest.approx(1_000.00045)


def test_what_is_stored_and_what_isn_t_is_counted(desk: Desk) -> None:
    desk.forward(request_for("y", Want(no_store=True)), 0.0)
    told = Told(desk)
    assert told("stored_total") == 2
    assert told("not_stored_total", reason="no-store") == 1


def test_refusals_and_failures_are_counted_by_their_word(desk: Desk) -> None:
    desk.counters.bump(desk.counters.refused, "too-deep")
    desk.counters.bump(desk.counters.engine_errors, "reset")
    told = Told(desk)
    assert told("refused_total", code="too-deep") == 1
    assert told("engine_errors_total", kind="reset") == 1


def test_what_was_dropped_is_a_counter(desk: Desk) -> None:
    desk.counters.log_dropped, desk.counters.rows_dropped = 3, 4
    told = Told(desk)
    assert (told("log_dropped_total"), told("rows_dropped_total")) == (3, 4)


def test_what_was_asked_of_lmcache_is_told_by_engine_and_outlives_its_process() -> None:
    whole = Snapshot(lmcache={"gpu": {"lookups": 2, "in_time": 1}})
    dead = Snapshot(lmcache={"gpu": {"lookups": 3, "in_time": 0}, "old": {"lookups": 4}})
    dead.retire()
    whole.add(dead)
    families = text_string_to_metric_families(render(whole).decode())
    (told,) = [family for family in families if family.name == "preheat_lmcache"]
    assert {tuple(one.labels.values()): one.value for one in told.samples} == {
        ("gpu", "lookups"): 5,
        ("gpu", "in_time"): 1,
        ("old", "lookups"): 4,
    }
    assert {one.name for one in told.samples} == {"preheat_lmcache_total"}


def test_each_upstream_is_told_by_name_and_one_that_is_gone_by_its_counters_only() -> None:
    seen = UpstreamCounts("127.0.0.1:1", in_flight=2, up=0, failures=5, retries=4)
    gone = UpstreamCounts("127.0.0.1:2", failures=1)
    text = render(Snapshot(upstreams={"gpu.0": seen, "gpu.1": gone})).decode()
    samples = {
        (sample.name.removeprefix("preheat_upstream_"), sample.labels["upstream"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "upstream" in sample.labels
    }
    assert samples == {
        ("up", "gpu.0"): 0,
        ("in_flight", "gpu.0"): 2,
        ("failures_total", "gpu.0"): 5,
        ("failures_total", "gpu.1"): 1,
        ("retries_total", "gpu.0"): 4,
        ("retries_total", "gpu.1"): 0,
    }


@pytest.mark.parametrize("name", _GAUGES)
def test_every_gauge_is_told(name: str, desk: Desk) -> None:
    assert Told(desk, **{name: 7.0})(name) == 7.0


@pytest.mark.parametrize("model", ['"quoted"', "new\nline", "back\\slash", "ünïcode😀", ""])
def test_a_models_name_may_hold_anything(model: str) -> None:
    desk = Desk()
    desk.forward(request_for("x", model=model), 0.0)
    told = Told(desk)
    labels = {"tenant": "local", "layer": "forward", "reason": "key-first-seen"}
    assert told("requests_total", model=model, **labels) == 1


def test_every_metric_is_ours_and_has_a_help_text(desk: Desk) -> None:
    text = render(counted(desk, **dict.fromkeys(_GAUGES, 0.0))).decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    assert all(family.name.startswith("preheat_") for family in families)
    assert len({family.name for family in families}) == len(families)
