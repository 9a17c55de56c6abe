"""Least hit density: who will bring the fewest hits for the room it still takes."""

from array import array
from collections.abc import MutableSequence
from math import inf, log2
from typing import ClassVar, Final, Generic, TypeVar

from preheat.core.chance import Chance
from preheat.core.types import PLAIN, Traits

K = TypeVar("K")

_CLASSES: Final = 16
_AGES: Final = 512
_SPAN: Final = 32
"""Ages up to so many requests for each entry held are told apart."""

_FADE: Final = 0.9
"""What the counts keep from one learning to the next, as the authors' code has it."""

_EXPLORER_ONE_IN: Final = 32
"""As the authors' code has it."""

_FIRST_PERIOD: Final = 2_048
_PERIOD: Final = 4
"""Requests for each entry held between two learnings, the least number of them beside."""


class Lhd(Generic[K]):
    """Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018.

    Hit density = expected hits / expected time to the next hit or the eviction, given the age, per
    byte; times the seconds that a hit saves. It is learned from how old entries were at their hits and
    evictions, by class: a class is the size of the last two ages at hits, in powers of two. The
    lowest of `candidates` drawn by chance and the `newest` last comers leaves. Explorers, at most
    `explore_share` of the entries, are spared until a hit or the oldest age that is told apart, so
    that ages beyond today's are seen.

    Ages are counted in requests, and told apart in 512 steps up to 32 requests for each entry held
    (the authors: 20,000 steps, chosen once). Densities are learned anew every four requests for
    each entry held (the authors: every 2^20 requests), so that short traces have a chance. Applications
    aren't told apart. The draws come from a seed: the same requests have the same victims.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(
        self, *, candidates: int = 32, newest: int = 8, explore_share: float = 0.01, seed: int = 1
    ) -> None:
        self._candidates = candidates
        self._newest = newest
        self._explore_share = explore_share
        self._explorers = 0
        self._chance = Chance(seed)
        self._slot: dict[K, int] = {}
        self._key: list[K] = []
        self._used_at = array("q")
        self._last_age = array("q")
        self._class = bytearray()
        self._is_explorer = bytearray()
        self._value = array("d")  # seconds a byte
        self._size_bytes = array("q")
        self._density = _Density()
        self._recent: list[K] = []
        self._requests = 0
        self._learned_at = 0
        self._named: K | None = None

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._tick()
        self._slot[key] = len(self._key)
        self._key.append(key)
        self._used_at.append(self._requests)
        self._last_age.append(_AGES * self._density.step)
        self._class.append(0)
        self._is_explorer.append(self._explores())
        self._size_bytes.append(max(1, size_bytes))
        self._value.append(traits.cost_s / max(1, size_bytes))
        self._recent.append(key)
        if len(self._recent) > self._newest:
            del self._recent[0]

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        self._tick()
        slot = self._slot[key]
        age = self._requests - self._used_at[slot]
        self._density.hit(self._class[slot], age)
        self._class[slot] = self._density.class_of(age + self._last_age[slot])
        self._last_age[slot] = age
        self._used_at[slot] = self._requests
        self._explorers -= self._is_explorer[slot]
        self._is_explorer[slot] = 0
        if traits is not None:
            self._value[slot] = traits.cost_s / self._size_bytes[slot]

    def remove(self, key: K) -> None:
        slot = self._slot.pop(key)
        if key == self._named:
            self._density.eviction(self._class[slot], self._requests - self._used_at[slot])
        self._named = None
        self._explorers -= self._is_explorer[slot]
        last = self._key.pop()
        if last != key:
            self._slot[last] = slot
            self._key[slot] = last
        for column in (self._used_at, self._last_age, self._class, self._is_explorer):
            moved = column.pop()
            if last != key:
                column[slot] = moved
        value, size_bytes = self._value.pop(), self._size_bytes.pop()
        if last != key:
            self._value[slot], self._size_bytes[slot] = value, size_bytes
        if key in self._recent:
            self._recent.remove(key)

    def victim(self, now: float) -> K:
        if self._named is None:
            self._named = self._lowest()
        return self._named

    def __len__(self) -> int:
        return len(self._key)

    def _tick(self) -> None:
        self._requests += 1
        self._named = None
        period = max(_FIRST_PERIOD, _PERIOD * len(self._key))
        if self._requests - self._learned_at >= period:
            self._learned_at = self._requests
            self._density.learn(len(self._key))

    def _lowest(self) -> K:
        held = len(self._key)
        if not held:
            raise LookupError("no entry to evict")
        if held <= self._candidates:
            slots = list(range(held))
        else:
            slots = [self._chance.below(held) for _ in range(self._candidates)]
            slots += [self._slot[key] for key in self._recent]
        return self._key[min(slots, key=self._rank)]

    def _rank(self, slot: int) -> float:
        age = self._requests - self._used_at[slot]
        if self._is_explorer[slot] and age < _AGES * self._density.step:
            return inf
        return self._density.of(self._class[slot], age) * self._value[slot]

    def _explores(self) -> bool:
        """Whether the newcomer is an explorer: by chance, while there is room for one more."""
        has_room = self._explorers < self._explore_share * len(self._slot)
        explores = has_room and self._chance.below(_EXPLORER_ONE_IN) == 0
        self._explorers += explores
        return explores


class _Density:
    """Hits to come per request of room, by class and age; before anything is learned as in the
    authors' code, (class + 1) / (age + 1)."""

    def __init__(self) -> None:
        self.step = 1
        self._hits = [array("d", bytes(8 * _AGES)) for _ in range(_CLASSES)]
        self._evictions = [array("d", bytes(8 * _AGES)) for _ in range(_CLASSES)]
        self._density = [
            array("d", ((class_ + 1) / (age + 1) for age in range(_AGES)))
            for class_ in range(_CLASSES)
        ]

    def of(self, class_: int, age: int) -> float:
        return self._density[class_][min(age // self.step, _AGES - 1)]

    def hit(self, class_: int, age: int) -> None:
        self._hits[class_][min(age // self.step, _AGES - 1)] += 1.0

    def eviction(self, class_: int, age: int) -> None:
        self._evictions[class_][min(age // self.step, _AGES - 1)] += 1.0

    def class_of(self, age: int) -> int:
        """The younger at its last hits, the higher."""
        steps = age // self.step
        return _CLASSES - 1 if steps < 1 else max(0, min(_CLASSES - 1, int(log2(_AGES / steps))))

    def learn(self, held: int) -> None:
        """New densities, from the oldest age down; then the counts fade."""
        while self.step * _AGES < held * _SPAN:
            self.step *= 2
            for counts in (*self._hits, *self._evictions):
                _coarsen(counts)
        for hits, evictions, density in zip(
            self._hits, self._evictions, self._density, strict=True
        ):
            hits_to_come = events_to_come = room = 0.0
            for age in range(_AGES - 1, -1, -1):
                hits_to_come += hits[age]
                events_to_come += hits[age] + evictions[age]
                room += events_to_come
                density[age] = hits_to_come / room if room > 0.0 else 0.0
                hits[age] *= _FADE
                evictions[age] *= _FADE


def _coarsen(counts: MutableSequence[float]) -> None:
    """Two ages become one."""
    for age in range(_AGES // 2):
        counts[age] = counts[2 * age] + counts[2 * age + 1]
    for age in range(_AGES // 2, _AGES):
        counts[age] = 0.0
