"""The counters as Prometheus metrics. Every one is described in docs/metrics.md."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from preheat.core.ledger import NANO, PICO
from preheat.core.stats import LATENCY_BOUNDS_S, Snapshot, hit_ratios, rows, total

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ACCOUNTS: Final = ("paid", "spent_by_us", "saved_by_us", "saved_by_provider")


def render(counted: Snapshot) -> bytes:
    """The exposition format."""
    registry = CollectorRegistry()
    registry.register(_Collector(counted))
    return generate_latest(registry)


class _Collector:
    """One snapshot, as the registry asks for it."""

    def __init__(self, counted: Snapshot) -> None:
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._sums()
        yield from self._ratios()
        yield self._latency()
        yield from self._events()
        yield from self._gauges()
        yield from self._upstreams()
        yield self._lmcache()

    def _requests(self) -> Iterator[Metric]:
        labels = ["tenant", "model", "layer", "reason"]
        requests = CounterMetricFamily("preheat_requests", "Answers given.", labels=labels)
        unpriced = CounterMetricFamily(
            "preheat_unpriced_requests", "Answers whose engine reported no usage.", labels=labels
        )
        tokens = CounterMetricFamily(
            "preheat_tokens", "Tokens of the answers given.", labels=[*labels, "kind"]
        )
        for name, account in rows(self._counted.accounts):
            requests.add_metric(name, account.requests)
            unpriced.add_metric(name, account.unpriced)
            tokens.add_metric([*name, "input"], account.input_tokens)
            tokens.add_metric([*name, "output"], account.output_tokens)
            tokens.add_metric([*name, "cached_input"], account.cached_tokens)
            tokens.add_metric([*name, "warmed_input"], account.warmed_tokens)
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
        for (tenant, model, _, _), account in rows(self._counted.accounts):
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
            value=total(self._counted.accounts).residual / PICO,
        )

    def _ratios(self) -> Iterator[Metric]:
        ratio = GaugeMetricFamily(
            "preheat_hit_ratio", "Share of all answers since the start.", labels=["layer", "weight"]
        )
        for layer, share in hit_ratios(self._counted.accounts).items():
            ratio.add_metric([layer, "request"], share.by_requests)
            ratio.add_metric([layer, "token"], share.by_tokens)
        yield ratio

    def _latency(self) -> Metric:
        latency = HistogramMetricFamily(
            "preheat_request_seconds", "From a request's last byte to its answer's.",
            labels=["layer"],
        )  # fmt: skip
        for layer, (counts, sum_s) in self._counted.latency.items():
            below, buckets = 0, []
            for bound, count in zip(LATENCY_BOUNDS_S, counts, strict=False):
                below += count
                buckets.append((str(bound), float(below)))
            buckets.append(("+Inf", float(sum(counts))))
            latency.add_metric([layer], buckets, sum_s)
        return latency

    def _events(self) -> Iterator[Metric]:
        for name, count in self._counted.totals.items():
            yield CounterMetricFamily(f"preheat_{name}", _TOTALS[name], value=count)
        for family, (name, help_text, label) in _WORDS.items():
            metric = CounterMetricFamily(name, help_text, labels=[label])
            for word, count in sorted(self._counted.words.get(family, {}).items()):
                metric.add_metric([word], count)
            yield metric

    def _gauges(self) -> Iterator[Metric]:
        for values in (self._counted.gauges, self._counted.shared):
            for name, value in values.items():
                yield GaugeMetricFamily(f"preheat_{name}", _GAUGES[name], value=value)

    def _upstreams(self) -> Iterator[Metric]:
        labels = ["upstream"]
        up = GaugeMetricFamily(
            "preheat_upstream_up",
            "0 while any worker process leaves it alone for its failures.",
            labels=labels,
        )
        in_flight = GaugeMetricFamily(
            "preheat_upstream_in_flight", "Requests under way at it.", labels=labels
        )
        failures = CounterMetricFamily(
            "preheat_upstream_failures", "Requests that it failed.", labels=labels
        )
        retries = CounterMetricFamily(
            "preheat_upstream_retries",
            "Of its requests, those asked elsewhere then.",
            labels=labels,
        )
        queue = GaugeMetricFamily(
            "preheat_upstream_queue_seconds", "Prefill that waits there, expected.", labels=labels
        )
        tokens = CounterMetricFamily(
            "preheat_upstream_prompt_tokens",
            "Of prompts: all that it counted, those its cache had, and would have had with round robin.",
            labels=[*labels, "of"],
        )
        shadow = CounterMetricFamily(
            "preheat_upstream_shadow",
            "Its requests, by what a second rule would have chosen.",
            labels=[*labels, "choice"],
        )
        sooner = GaugeMetricFamily(
            "preheat_upstream_shadow_sooner_seconds",
            "How much sooner first tokens were expected here than where that rule would have sent them.",
            labels=labels,
        )
        events = CounterMetricFamily(
            "preheat_upstream_kv_events",
            "Messages of its KV events, by what became of them.",
            labels=[*labels, "of"],
        )
        files = CounterMetricFamily(
            "preheat_upstream_slot_files",
            "Files of its slots: saved, restored, failed, and their bytes.",
            labels=[*labels, "of"],
        )
        yield from self._readied()
        yield from self._adapters()
        for name, counts in self._counted.upstreams.items():
            for what, count in counts.events.items():
                events.add_metric([name, what], count)
            for what, count in counts.slot_files.items():
                files.add_metric([name, what], count)
            if counts.up is not None:
                up.add_metric([name], counts.up)
                in_flight.add_metric([name], counts.in_flight)
            failures.add_metric([name], counts.failures)
            retries.add_metric([name], counts.retries)
            if not counts.trust:
                continue
            queue.add_metric([name], counts.queue_s)
            tokens.add_metric([name, "all"], counts.input_tokens)
            tokens.add_metric([name, "cached"], counts.cached_tokens)
            tokens.add_metric([name, "round_robin"], counts.ghost_tokens)
            shadow.add_metric([name, "same"], counts.shadow_agreed)
            shadow.add_metric([name, "other"], counts.shadow_differed)
            sooner.add_metric([name], counts.shadow_sooner_s)
        yield from (up, in_flight, failures, retries, queue, tokens, shadow, sooner, events, files)

    def _lmcache(self) -> Metric:
        asked = CounterMetricFamily(
            "preheat_lmcache", "What was asked of LMCache.", labels=["engine", "of"]
        )
        for engine, counts in self._counted.lmcache.items():
            for what, count in counts.items():
                asked.add_metric([engine, what], count)
        return asked

    def _readied(self) -> Iterator[Metric]:
        labels = ["upstream"]
        warming = GaugeMetricFamily(
            "preheat_upstream_warming",
            "1 while any worker process readies it and sends it nothing.",
            labels=labels,
        )
        readied = CounterMetricFamily(
            "preheat_upstream_readied",
            "What it was given before requests, after it had come back.",
            labels=[*labels, "of"],
        )
        held = CounterMetricFamily(
            "preheat_upstream_held_seconds", "For how long it got none meanwhile.", labels=labels
        )
        starts = CounterMetricFamily(
            "preheat_upstream_starts",
            "How often it was seen to be another process, or another model or version.",
            labels=[*labels, "of"],
        )
        for name, counts in self._counted.upstreams.items():
            for what, seen in counts.starts.items():
                starts.add_metric([name, what], seen)
            if counts.up is not None and counts.readied:
                warming.add_metric([name], counts.warming)
            for what, count in counts.readied.items():
                if what == "held_s":
                    held.add_metric([name], count)
                else:
                    readied.add_metric([name, what], count)
        yield from (warming, readied, held, starts)

    def _adapters(self) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            "preheat_upstream_adapters", "LoRA adapters that it has.", labels=["upstream"]
        )
        loads = CounterMetricFamily(
            "preheat_upstream_adapter_loads",
            "LoRA adapters that it was to load: loaded, refused.",
            labels=["upstream", "of"],
        )
        seconds = CounterMetricFamily(
            "preheat_upstream_adapter_load_seconds",
            "For how long it loaded them.",
            labels=["upstream"],
        )
        for name, counts in self._counted.upstreams.items():
            if not counts.adapter_loads:
                continue
            if counts.up is not None:
                held.add_metric([name], len(counts.adapters))
            loads.add_metric([name, "loaded"], counts.adapter_loads["loads"])
            loads.add_metric([name, "refused"], counts.adapter_loads["refused"])
            seconds.add_metric([name], counts.adapter_loads["load_s"])
        yield from (held, loads, seconds)


_TOTALS: Final = {
    "stored": "Answers stored.",
    "evicted": "Answers evicted from L1.",
    "expired": "Answers that reached the end of their life in L1.",
    "invalidated": "Answers in L1 that were invalidated.",
    "sampled_repeats": "Sampled requests asked before: hits that the setting cost.",
    "log_dropped": "Log lines dropped because nobody read them in time.",
    "rows_dropped": "Rows of the request log dropped because its process was away too long.",
    "trunks_dropped": "Requests that weren't looked at for what they begin with: too many at once.",
}
_WORDS: Final = {
    "refused": ("preheat_refused", "Requests refused.", "code"),
    "engine_errors": ("preheat_engine_errors", "Engine calls without an answer.", "kind"),
    "dropped": ("preheat_not_stored", "Answers not stored.", "reason"),
    "l2": ("preheat_l2_events", "What became of look-ups and writes in L2.", "event"),
    "stale": ("preheat_stale", "Answers given past or near their expiry.", "reason"),
}
_GAUGES: Final = {
    "workers": "Worker processes.",
    "connections": "Client connections open.",
    "flights": "Engine calls and look-ups under way.",
    "trunks_messages": "Messages kept for warming.",
    "trunks_bytes": "Bytes of them.",
    "engines_ready": "Engines that take requests.",
    "l1_bytes": "Bytes in L1, overheads included.",
    "l1_budget_bytes": "Its budget.",
    "l1_entries": "Answers in L1.",
    "l1_budget_entries": "Its budget.",
    "l2_bytes": "Bytes in L2.",
    "l2_budget_bytes": "Its budget; absent for a Redis without a limit.",
    "l2_entries": "Answers in L2.",
    "l2_up": "Whether L2 is asked at all: 0 while its breaker is open.",
}
