"""LeCaR: recency and frequency as two experts, trusted by how seldom they were wrong."""

from collections import OrderedDict
from math import exp
from typing import ClassVar, Final, Generic, TypeVar

from preheat.core.chance import Chance
from preheat.core.ranking import Ranking
from preheat.core.types import PLAIN, Traits

K = TypeVar("K")

_RESOLUTION: Final = 1 << 32


class LeCar(Generic[K]):
    """Vietri et al., "Driving Cache Replacement with ML-based LeCaR", HotStorage 2018.

    Whose victim leaves, LRU's or LFU's, is drawn by their weights. The victims are remembered, as
    many for each expert as entries are held; when one is asked for again the expert that let it go was
    wrong, and the other's weight is multiplied by e^(`learning_rate` · d^age), with the age in
    requests and d = `discount`^(1 / entries held). A victim that comes back has its old count of uses.

    The draws come from a seed: the same requests have the same victims.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(
        self, *, learning_rate: float = 0.45, discount: float = 0.005, seed: int = 1
    ) -> None:
        self._learning_rate = learning_rate
        self._discount = discount
        self._chance = Chance(seed)
        self._recency: OrderedDict[K, int] = OrderedDict()  # how often used
        self._frequency: Ranking[K] = Ranking()
        self._trust_in_recency = 0.5
        self._gone_by_recency: OrderedDict[K, tuple[int, int]] = OrderedDict()  # uses, when
        self._gone_by_frequency: OrderedDict[K, tuple[int, int]] = OrderedDict()
        self._requests = 0
        self._named: K | None = None
        self._by_recency = True

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._requests += 1
        self._named = None
        uses = 1 + self._learn(key)
        self._recency[key] = uses
        self._frequency.place(key, uses)

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        self._requests += 1
        self._named = None
        self._recency[key] = uses = self._recency[key] + 1
        self._recency.move_to_end(key)
        self._frequency.place(key, uses)

    def remove(self, key: K) -> None:
        uses = self._recency.pop(key)
        self._frequency.remove(key)
        if key == self._named:
            gone = self._gone_by_recency if self._by_recency else self._gone_by_frequency
            gone[key] = uses, self._requests
            if len(gone) > len(self._recency) + 1:
                gone.popitem(last=False)
        self._named = None

    def victim(self, now: float) -> K:
        if self._named is None:
            by_frequency = self._frequency.lowest()
            self._by_recency = self._draws_recency()
            self._named = next(iter(self._recency)) if self._by_recency else by_frequency
        return self._named

    def __len__(self) -> int:
        return len(self._recency)

    def _learn(self, key: K) -> int:
        """Blame the expert that let this one go; how often it had been used by then."""
        blamed = self._gone_by_recency.pop(key, None)
        sign = -1.0
        if blamed is None:
            blamed = self._gone_by_frequency.pop(key, None)
            sign = 1.0
        if blamed is None:
            return 0
        uses, at = blamed
        regret = self._discount ** ((self._requests - at) / max(1, len(self._recency)))
        odds = exp(sign * self._learning_rate * regret)
        trust = self._trust_in_recency * odds
        self._trust_in_recency = trust / (trust + 1.0 - self._trust_in_recency)
        return uses

    def _draws_recency(self) -> bool:
        return self._chance.below(_RESOLUTION) < self._trust_in_recency * _RESOLUTION
