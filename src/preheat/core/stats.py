"""The one definition of each number we report, live or replayed."""

from bisect import bisect_left
from typing import Final

import msgspec

from preheat.core.ledger import Account, AccountName, Ledger

LATENCY_BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


class Histogram:
    """Counts of durations below each bound, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        self.counts[bisect_left(LATENCY_BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s

    @property
    def count(self) -> int:
        return sum(self.counts)


class Counters:
    """What the drivers count beside the ledger: durations by layer, refusals by code."""

    def __init__(self) -> None:
        self.latency: dict[str, Histogram] = {
            layer: Histogram() for layer in ("exact", "join", "forward", "pass")
        }
        self.refused: dict[str, int] = {}
        self.engine_errors: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.sampled_repeats = 0
        self.evicted = 0
        self.expired = 0
        self.invalidated = 0
        self.stored = 0

    def bump(self, counts: dict[str, int], word: str) -> None:
        """Add one to a word's count; the words are ours, so there are few."""
        counts[word] = counts.get(word, 0) + 1


class HitRatio(msgspec.Struct, frozen=True):
    """A layer's share of all answers: by requests, and by the tokens of the answers.

    `by_tokens` counts input and output tokens of answers with known usage.
    """

    by_requests: float
    by_tokens: float


def hit_ratios(ledger: Ledger) -> dict[str, HitRatio]:
    """Request- and token-weighted hit ratio of each layer that spares an engine the work.

    The denominator holds every answer given to a cacheable path, whatever the reason why it was
    forwarded; refused requests and passed-through paths aren't in it.
    """
    total = ledger.total()
    by_layer = {"exact": Account(), "join": Account()}
    for (_, _, layer, _), account in ledger.accounts():
        if layer in by_layer:
            by_layer[layer].add(account)
    return {
        layer: HitRatio(
            _share(account.requests, total.requests), _share(_tokens(account), _tokens(total))
        )
        for layer, account in by_layer.items()
    }


def by_layer(ledger: Ledger) -> dict[tuple[str, str], Account]:
    """The ledger's sums by (layer, reason)."""
    sums: dict[tuple[str, str], Account] = {}
    for (_, _, layer, reason), account in ledger.accounts():
        sums.setdefault((layer, reason), Account()).add(account)
    return sums


def rows(ledger: Ledger) -> list[tuple[AccountName, Account]]:
    """Every account, in a stable order."""
    return sorted(ledger.accounts(), key=lambda row: row[0])


def _tokens(account: Account) -> int:
    return account.input_tokens + account.output_tokens


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
