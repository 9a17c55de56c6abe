"""The counters as Prometheus metrics. Every one is described in docs/metrics.md."""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from preheat.core.inventory import Inventory
from preheat.core.ledger import NANO, PICO, Ledger
from preheat.core.stats import LATENCY_BOUNDS_S, Counters, hit_ratios, rows

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ACCOUNTS: Final = ("paid", "saved_by_us", "saved_by_provider")


class Metrics:
    """Reads the counters when it is asked, and holds nothing itself."""

    def __init__(
        self,
        ledger: Ledger,
        counters: Counters,
        inventory: Inventory,
        gauges: Callable[[], dict[str, float]],
    ) -> None:
        self._ledger = ledger
        self._counters = counters
        self._inventory = inventory
        self._gauges = gauges
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        yield from self._requests()
        yield from self._sums()
        yield from self._ratios()
        yield self._latency()
        yield from self._cache()
        yield from self._events()

    def _requests(self) -> Iterator[Metric]:
        labels = ["tenant", "model", "layer", "reason"]
        requests = CounterMetricFamily("preheat_requests", "Answers given.", labels=labels)
        unpriced = CounterMetricFamily(
            "preheat_unpriced_requests", "Answers whose engine reported no usage.", labels=labels
        )
        tokens = CounterMetricFamily(
            "preheat_tokens", "Tokens of the answers given.", labels=[*labels, "kind"]
        )
        for name, account in rows(self._ledger):
            requests.add_metric(name, account.requests)
            unpriced.add_metric(name, account.unpriced)
            tokens.add_metric([*name, "input"], account.input_tokens)
            tokens.add_metric([*name, "output"], account.output_tokens)
            tokens.add_metric([*name, "cached_input"], account.cached_tokens)
        yield requests
        yield unpriced
        yield tokens

    def _sums(self) -> Iterator[Metric]:
        labels = ["tenant", "model", "account"]
        money = CounterMetricFamily(
            "preheat_money", "In the currency of the configured prices.", labels=labels
        )
        seconds = CounterMetricFamily(
            "preheat_engine_seconds", "Seconds of engine calls, made and spared.",
            labels=[*labels, "basis"],
        )  # fmt: skip
        sums: dict[tuple[str, str], dict[str, int]] = {}
        for (tenant, model, _, _), account in rows(self._ledger):
            one = sums.setdefault(
                (tenant, model), dict.fromkeys((*_ACCOUNTS, "paid_ns", "us_ns"), 0)
            )
            for name in _ACCOUNTS:
                one[name] += getattr(account, name)
            one["paid_ns"] += account.paid_ns
            one["us_ns"] += account.saved_by_us_ns
        for (tenant, model), one in sums.items():
            for name in _ACCOUNTS:
                money.add_metric([tenant, model, name], one[name] / PICO)
            seconds.add_metric([tenant, model, "paid", "measured"], one["paid_ns"] / NANO)
            seconds.add_metric([tenant, model, "saved_by_us", "measured"], one["us_ns"] / NANO)
            # Nobody tells how long the provider's own hit would have taken otherwise.
            seconds.add_metric([tenant, model, "saved_by_provider", "unknown"], 0)
        yield money
        yield seconds
        yield GaugeMetricFamily(
            "preheat_ledger_residual",
            "Price without us, less paid and saved; always 0.",
            value=self._ledger.total().residual / PICO,
        )

    def _ratios(self) -> Iterator[Metric]:
        ratio = GaugeMetricFamily(
            "preheat_hit_ratio", "Share of all answers since the start.", labels=["layer", "weight"]
        )
        for layer, share in hit_ratios(self._ledger).items():
            ratio.add_metric([layer, "request"], share.by_requests)
            ratio.add_metric([layer, "token"], share.by_tokens)
        yield ratio

    def _latency(self) -> Metric:
        latency = HistogramMetricFamily(
            "preheat_request_seconds", "From a request's last byte to its answer's.",
            labels=["layer"],
        )  # fmt: skip
        for layer, histogram in self._counters.latency.items():
            total, buckets = 0, []
            for bound, count in zip(LATENCY_BOUNDS_S, histogram.counts, strict=False):
                total += count
                buckets.append((str(bound), float(total)))
            buckets.append(("+Inf", float(histogram.count)))
            latency.add_metric([layer], buckets, histogram.sum_s)
        return latency

    def _cache(self) -> Iterator[Metric]:
        inventory = self._inventory
        for name, help_text, value in (
            ("preheat_l1_bytes", "Bytes in L1, overheads included.", inventory.size_bytes),
            ("preheat_l1_budget_bytes", "Its budget.", inventory.budget_bytes),
            ("preheat_l1_entries", "Answers in L1.", len(inventory)),
            ("preheat_l1_budget_entries", "Its budget.", inventory.budget_entries),
        ):
            yield GaugeMetricFamily(name, help_text, value=value)
        counters = self._counters
        for name, help_text, value in (
            ("preheat_stored", "Answers stored.", counters.stored),
            ("preheat_evicted", "Answers evicted.", counters.evicted),
            ("preheat_expired", "Answers that reached the end of their life.", counters.expired),
            ("preheat_invalidated", "Answers invalidated.", counters.invalidated),
            (
                "preheat_sampled_repeats",
                "Sampled requests that had been asked before: hits that the setting cost.",
                counters.sampled_repeats,
            ),
        ):
            yield CounterMetricFamily(name, help_text, value=value)

    def _events(self) -> Iterator[Metric]:
        counters = self._counters
        for name, help_text, label, counts in (
            ("preheat_refused", "Requests refused.", "code", counters.refused),
            (
                "preheat_engine_errors",
                "Engine calls without an answer.",
                "kind",
                counters.engine_errors,
            ),
            ("preheat_not_stored", "Answers not stored.", "reason", counters.dropped),
        ):
            family = CounterMetricFamily(name, help_text, labels=[label])
            for word, count in sorted(counts.items()):
                family.add_metric([word], count)
            yield family
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(name, _GAUGES[name], value=value)


_GAUGES: Final = {
    "preheat_connections": "Client connections open.",
    "preheat_flights": "Engine calls under way.",
    "preheat_log_dropped": "Log lines dropped because nobody read them in time.",
    "preheat_engines_ready": "Engines that take requests.",
}
