"""The one definition of each number we report, live or replayed."""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from preheat.core.ledger import NANO, Account, AccountName, Ledger

LATENCY_BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


_SHORTEST_S: Final = LATENCY_BOUNDS_S[0]


class Histogram:
    """Counts of durations below each bound, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        if duration_s <= _SHORTEST_S:  # nearly every hit
            self.counts[0] += 1
        else:
            self.counts[bisect_left(LATENCY_BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s

    @property
    def count(self) -> int:
        return sum(self.counts)


TOTALS: Final = (
    *("stored", "evicted", "expired", "invalidated", "sampled_repeats"),
    *("log_dropped", "rows_dropped", "trunks_dropped"),
)
_STATES: Final = ("_up", "_ready")
_NOBODYS: Final = frozenset({"refresh", "warm"})
"""Layers whose answers no client got."""
WORDS: Final = ("refused", "engine_errors", "dropped", "l2", "stale")


class Counters:
    """What the drivers count beside the ledger: durations by layer, events by word.

    `l2` counts what became of look-ups and writes there, `stale` answers given past or near their
    expiry, by reason.
    """

    def __init__(self) -> None:
        self.latency: dict[str, Histogram] = {
            layer: Histogram() for layer in ("exact", "join", "forward", "pass")
        }
        self.refused: dict[str, int] = {}
        self.engine_errors: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.l2: dict[str, int] = {}
        self.stale: dict[str, int] = {}
        self.sampled_repeats = 0
        self.evicted = 0
        self.expired = 0
        self.invalidated = 0
        self.stored = 0
        self.log_dropped = 0
        self.rows_dropped = 0
        self.trunks_dropped = 0

    def bump(self, counts: dict[str, int], word: str) -> None:
        """Add one to a word's count; the words are ours, so there are few."""
        counts[word] = counts.get(word, 0) + 1


class UpstreamCounts(msgspec.Struct):
    """One server behind an engine, as it has been asked. `up` is 0 while it is left alone for its
    failures, else 1; None where only those have asked it that are gone. Of several equal ones also: what it is
    (`dialect`), how what it holds is known (`trust`), `queue_s` of prefill that wait there, and of the prompt tokens
    that it counted those its cache had, and would have had with round robin (`ghost_tokens`); `shadow_*`: see `core.router.Known`.
    `starts` is how often it was seen to be another one. `unsaved_slots` would be lost with it; `slot_files` is what was done with their files; `events` is what became of its KV events (docs/metrics.md). While it is
    `warming` it gets no requests, then a growing share (`ramping`); `readied` is what it was given. `adapters` are those that it has,
    `adapter_loads` those that we had it load (`loads`, `load_s`, `refused`)."""

    address: str = ""
    in_flight: int = 0
    up: int | None = None
    draining: bool = False
    failures: int = 0
    retries: int = 0
    dialect: str = ""
    trust: str = ""
    queue_s: float = 0.0
    input_tokens: int = 0
    cached_tokens: int = 0
    ghost_tokens: int = 0
    shadow_agreed: int = 0
    shadow_differed: int = 0
    shadow_sooner_s: float = 0.0
    unsaved_slots: int = 0
    slot_files: dict[str, int] = {}
    events: dict[str, int] = {}
    warming: bool = False
    ramping: bool = False
    readied: dict[str, float] = {}
    starts: dict[str, int] = {}
    adapters: list[str] = []
    adapter_loads: dict[str, float] = {}

    def add(self, other: "UpstreamCounts") -> None:
        """Add what another process has of it."""
        self.in_flight += other.in_flight
        self.failures += other.failures
        self.retries += other.retries
        self.queue_s += other.queue_s
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        self.ghost_tokens += other.ghost_tokens
        self.shadow_agreed += other.shadow_agreed
        self.shadow_differed += other.shadow_differed
        self.shadow_sooner_s += other.shadow_sooner_s
        self.unsaved_slots += other.unsaved_slots
        self.warming = self.warming or other.warming
        self.ramping = self.ramping or other.ramping
        self.readied = {
            what: self.readied.get(what, 0) + other.readied.get(what, 0)
            for what in {**self.readied, **other.readied}
        }
        self.adapters = sorted({*self.adapters, *other.adapters})
        self.adapter_loads = {
            what: self.adapter_loads.get(what, 0) + other.adapter_loads.get(what, 0)
            for what in {**self.adapter_loads, **other.adapter_loads}
        }
        self.starts = {  # all have seen the same
            what: max(self.starts.get(what, 0), other.starts.get(what, 0))
            for what in self.starts | other.starts
        }
        self.slot_files = {
            what: self.slot_files.get(what, 0) + other.slot_files.get(what, 0)
            for what in self.slot_files | other.slot_files
        }
        self.events = {  # one process hears them for all
            what: max(self.events.get(what, 0), other.events.get(what, 0))
            for what in self.events | other.events
        }
        self.dialect = self.dialect or other.dialect
        self.trust = self.trust or other.trust
        self.draining = self.draining or other.draining
        if other.up is not None:
            self.address = other.address
            self.up = other.up if self.up is None else min(self.up, other.up)

    def retire(self) -> None:
        """Whoever asked it is gone."""
        self.in_flight, self.up, self.draining, self.queue_s = 0, None, False, 0.0
        self.warming = self.ramping = False
        self.events, self.adapters = {}, []


class Snapshot(msgspec.Struct):
    """All that one process counted, as a value that can be sent and added up.

    `latency` has counts by bound, then the sum; `words` counts by family and word; `totals` only
    grow; `gauges` are of this moment and add up; `shared` are those of what processes share;
    `upstreams` are by name; what was asked of LMCache (`lmcache`) is by engine and word.
    """

    accounts: dict[AccountName, Account] = {}
    latency: dict[str, tuple[list[int], float]] = {}
    words: dict[str, dict[str, int]] = {}
    totals: dict[str, int] = {}
    gauges: dict[str, float] = {}
    shared: dict[str, float] = {}
    upstreams: dict[str, UpstreamCounts] = {}
    lmcache: dict[str, dict[str, int]] = {}

    def add(self, other: "Snapshot") -> None:
        """Add what another process counted."""
        for name, account in other.accounts.items():
            self.accounts.setdefault(name, Account()).add(account)
        for layer, (bins, sum_s) in other.latency.items():
            mine = self.latency.get(layer, ([0] * len(bins), 0.0))
            added = [a + b for a, b in zip(mine[0], bins, strict=True)]
            self.latency[layer] = (added, mine[1] + sum_s)
        for family, words in other.words.items():
            _add(self.words.setdefault(family, {}), words)
        for engine, counts in other.lmcache.items():
            _add(self.lmcache.setdefault(engine, {}), counts)
        _add(self.totals, other.totals)
        _add(self.gauges, other.gauges)
        for gauge, value in other.shared.items():
            # Sizes are told at different times; whether something is up, whoever has it worst says.
            worst = min if gauge.endswith(_STATES) else max
            self.shared[gauge] = worst(self.shared.get(gauge, value), value)
        for upstream, asked in other.upstreams.items():
            self.upstreams.setdefault(upstream, UpstreamCounts(asked.address)).add(asked)

    def retire(self) -> None:
        """Its process has ended: what it counted stays true, what it held is gone."""
        self.gauges, self.shared = {}, {}
        for upstream in self.upstreams.values():
            upstream.retire()


N = TypeVar("N", int, float)


def _add(sums: dict[str, N], more: Mapping[str, N]) -> None:
    for word, value in more.items():
        sums[word] = sums[word] + value if word in sums else value


def snapshot(
    ledger: Ledger,
    counters: Counters,
    gauges: dict[str, float],
    shared: dict[str, float],
    upstreams: dict[str, UpstreamCounts] | None = None,
    lmcache: dict[str, dict[str, int]] | None = None,
) -> Snapshot:
    """What these books say now. `settle` the inventory first."""
    return Snapshot(
        accounts={name: msgspec.structs.replace(one) for name, one in ledger.accounts()},
        latency={
            layer: (list(histogram.counts), histogram.sum_s)
            for layer, histogram in counters.latency.items()
        },
        words={family: dict(getattr(counters, family)) for family in WORDS},
        totals={name: getattr(counters, name) for name in TOTALS},
        gauges=gauges,
        shared=shared,
        upstreams=upstreams or {},
        lmcache=lmcache or {},
    )


Accounts = Mapping[AccountName, Account]


class HitRatio(msgspec.Struct, frozen=True):
    """A layer's share of all answers: by requests, and by the tokens of the answers.

    `by_tokens` counts input and output tokens of answers with known usage.
    """

    by_requests: float
    by_tokens: float


def hit_ratios(accounts: Accounts) -> dict[str, HitRatio]:
    """Request- and token-weighted hit ratio of each layer that spares an engine the work.

    The denominator holds every answer given to a cacheable path, whatever the reason why it was
    forwarded; refreshes, warm-ups, refused requests and passed-through paths aren't in it.
    """
    whole = total({name: one for name, one in accounts.items() if name[2] not in _NOBODYS})
    layers = {"exact": Account(), "join": Account()}
    for (_, _, layer, _), account in accounts.items():
        if layer in layers:
            layers[layer].add(account)
    return {
        layer: HitRatio(
            _share(account.requests, whole.requests), _share(_tokens(account), _tokens(whole))
        )
        for layer, account in layers.items()
    }


class WarmUps(msgspec.Struct, frozen=True):
    """What warm-ups came to: the tokens and seconds that they took, and of those what requests found first.
    `payback` is the seconds found by the seconds spent; 0 where none were."""

    made: int
    computed_tokens: int
    computed_s: float
    found_tokens: int
    found_s: float
    payback: float


def warm_ups(accounts: Accounts) -> WarmUps:
    """Over all tenants and models."""
    layers = {"warm": Account(), "forward": Account()}
    for (_, _, layer, _), account in accounts.items():
        if layer in layers:
            layers[layer].add(account)
    spent, found = layers["warm"], layers["forward"]
    return WarmUps(
        spent.requests,
        spent.input_tokens,
        spent.paid_ns / NANO,
        found.warmed_tokens,
        found.saved_by_us_ns / NANO,
        _share(found.saved_by_us_ns, spent.paid_ns),
    )


def by_layer(accounts: Accounts) -> dict[tuple[str, str], Account]:
    """The sums by (layer, reason)."""
    sums: dict[tuple[str, str], Account] = {}
    for (_, _, layer, reason), account in accounts.items():
        sums.setdefault((layer, reason), Account()).add(account)
    return sums


def rows(accounts: Accounts) -> list[tuple[AccountName, Account]]:
    """Every account, in a stable order."""
    return sorted(accounts.items(), key=lambda row: row[0])


def total(accounts: Accounts) -> Account:
    """The sum over all accounts."""
    whole = Account()
    for account in accounts.values():
        whole.add(account)
    return whole


def _tokens(account: Account) -> int:
    return account.input_tokens + account.output_tokens


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
