"""Eviction policies as plainly as can be: lists, dicts and formulas, nothing kept in order.

Each answers as its namesake in the table must, however slowly. Policies that draw have none.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from preheat.core.types import Key, Traits


@dataclass
class Entry:
    """What is known of an entry, as plainly as can be."""

    size_bytes: int
    traits: Traits
    written_at: float
    used_at: list[float]


class NaiveScores:
    """Scores everybody anew at every question; among equals the one used longest ago."""

    def __init__(self, score: Callable[[Entry, float], float]) -> None:
        self.score = score
        self.entries: dict[Key, Entry] = {}

    def insert(self, key: Key, size_bytes: int, now: float, traits: Traits) -> None:
        self.entries[key] = Entry(size_bytes, traits, now, [now])

    def touch(self, key: Key, now: float, traits: Traits | None) -> None:
        entry = self.entries[key]
        entry.used_at.append(now)
        entry.traits = traits or entry.traits

    def remove(self, key: Key) -> None:
        del self.entries[key]

    def victim(self, now: float) -> Key:
        def rank(key: Key) -> tuple[float, float]:
            entry = self.entries[key]
            return self.score(entry, now), entry.used_at[-1]

        return min(self.entries, key=rank)


def seeds_decay(latency_s: float) -> float:
    if latency_s * 1e3 < 5:
        return 0.98
    return 0.75 if latency_s * 1e3 > 100 else 0.92 + 0.06 * (100 - latency_s * 1e3) / 95


def value(entry: Entry) -> float:
    return entry.traits.cost_s / max(1, entry.size_bytes)


SCORES: dict[str, Callable[[Entry, float], float]] = {
    "lru": lambda entry, now: 0.0,
    "lfu": lambda entry, now: len(entry.used_at),
    "lfu_plus": lambda entry, now: (
        value(entry) * sum(2.0 ** ((at - now) / 600.0) for at in entry.used_at)
    ),
    "lfu_plus_as_written": lambda entry, now: len(entry.used_at) * seeds_decay(entry.traits.cost_s),
    "semantic_lru": lambda entry, now: (
        value(entry) * len(entry.used_at) * 2.0 ** ((entry.used_at[-1] - now) / 600.0)
    ),
    "semantic_lru_as_written": lambda entry, now: (
        len(entry.used_at) * 0.97 ** ((now - entry.written_at) / 3_600.0)
    ),
}


class NaiveSieve:
    """The paper's algorithm 1 on a plain list, oldest first."""

    def __init__(self) -> None:
        self.order: list[Key] = []
        self.visited: set[Key] = set()
        self.hand: Key | None = None

    def insert(self, key: Key, size_bytes: int, now: float, traits: Traits) -> None:
        self.order.append(key)

    def touch(self, key: Key, now: float, traits: Traits | None) -> None:
        self.visited.add(key)

    def remove(self, key: Key) -> None:
        if self.hand == key:
            newer = self.order[self.order.index(key) + 1 :]
            self.hand = newer[0] if newer else None
        self.order.remove(key)
        self.visited.discard(key)

    def victim(self, now: float) -> Key:
        place = self.order.index(self.hand) if self.hand else 0
        while self.order[place] in self.visited:
            self.visited.discard(self.order[place])
            place = (place + 1) % len(self.order)
        self.hand = self.order[place]
        return self.hand


class NaiveGreedy:
    """Greedy-Dual: everybody's priority in a plain dict, L beside it. Sizes and costs count, or not."""

    def __init__(self, *, by_value: bool) -> None:
        self.by_value = by_value
        self.level = 0.0
        self.gone = 0.0
        self.named: Key | None = None
        self.uses: dict[Key, int] = {}
        self.worth: dict[Key, tuple[int, float]] = {}
        self.priority: dict[Key, float] = {}  # in order of the last use

    def insert(self, key: Key, size_bytes: int, now: float, traits: Traits) -> None:
        self.uses[key] = 0
        self.worth[key] = size_bytes, traits.cost_s
        self.touch(key, now, traits)
        if self.by_value:
            self.level = max(self.level, min(self.gone, self.priority[key]))
            self.gone = 0.0

    def touch(self, key: Key, now: float, traits: Traits | None) -> None:
        self.uses[key] += 1
        size_bytes, cost_s = self.worth[key]
        if traits is not None:
            cost_s = traits.cost_s
        self.worth[key] = size_bytes, cost_s
        self.priority.pop(key, None)
        worth = cost_s / max(1, size_bytes) if self.by_value else 1
        self.priority[key] = self.level + self.uses[key] * worth

    def remove(self, key: Key) -> None:
        priority = self.priority.pop(key)
        if key == self.named:
            self.named = None
            if self.by_value:
                self.gone = max(self.gone, priority)
            else:
                self.level = max(self.level, priority)

    def victim(self, now: float) -> Key:
        self.named = min(self.priority, key=self.priority.__getitem__)
        return self.named


class NaiveS3Fifo:
    """The paper's algorithm 1 on plain lists, oldest first."""

    def __init__(self) -> None:
        self.small: list[Key] = []
        self.main: list[Key] = []
        self.ghosts: list[Key] = []
        self.uses: dict[Key, int] = {}
        self.sizes: dict[Key, int] = {}
        self.named: Key | None = None
        self.is_settled = False  # nothing changed since it was named
        self.is_filling = True

    def insert(self, key: Key, size_bytes: int, now: float, traits: Traits) -> None:
        self.is_settled = False
        self.uses[key] = 0
        self.sizes[key] = size_bytes
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)
        self.keep_ghosts(int(0.9 * len(self.sizes)))

    def keep_ghosts(self, most: int) -> None:
        del self.ghosts[: max(0, len(self.ghosts) - most)]

    def touch(self, key: Key, now: float, traits: Traits | None) -> None:
        self.is_settled = False
        self.uses[key] = min(3, self.uses[key] + 1)

    def remove(self, key: Key) -> None:
        self.is_settled = False
        held = len(self.sizes)
        if key in self.main:
            self.main.remove(key)
        else:
            self.small.remove(key)
            if key == self.named:
                self.ghosts.append(key)
                self.keep_ghosts(1 + int(0.9 * held))
        if key == self.named:
            self.named = None
        del self.sizes[key]

    def bytes_of(self, queue: list[Key]) -> int:
        return sum(self.sizes[key] for key in queue)

    def victim(self, now: float) -> Key:
        if self.named is not None and self.is_settled:
            return self.named
        share = int(0.1 * self.bytes_of([*self.small, *self.main]))
        if self.is_filling:
            self.is_filling = False
            first = 0
            while self.bytes_of(self.small[:first]) < share:
                first += 1
            self.main += self.small[first:]
            del self.small[first:]
        while True:
            if self.small and (self.bytes_of(self.small) >= share or not self.main):
                while self.small and self.uses[self.small[0]] >= 2:
                    self.uses[self.small[0]] = 0
                    self.main.append(self.small.pop(0))
                failed = self.small[:1]
            else:
                failed = [key for key in self.main[:1] if not self.uses[key]]
                if not failed:
                    self.uses[self.main[0]] -= 1
                    self.main.append(self.main.pop(0))
            if failed:
                self.named = failed[0]
                self.is_settled = True
                return self.named


class NaiveWTinyLfu:
    """The paper's section 4 on plain lists, oldest first, with exact counts."""

    def __init__(self) -> None:
        self.window: list[Key] = []
        self.probation: list[Key] = []
        self.protected: list[Key] = []
        self.sizes: dict[Key, int] = {}
        self.counts: Counter[Key] = Counter()
        self.counted = 0
        self.beaten: Key | None = None

    def count(self, key: Key) -> None:
        self.counts[key] = min(15, self.counts[key] + 1)
        self.counted += 1
        if self.counted >= 10 * len(self.sizes):
            self.counts = Counter({key: count // 2 for key, count in self.counts.items()})
            self.counted = 0

    def insert(self, key: Key, size_bytes: int, now: float, traits: Traits) -> None:
        self.sizes[key] = size_bytes
        self.window.append(key)
        self.count(key)

    def touch(self, key: Key, now: float, traits: Traits | None) -> None:
        self.count(key)
        for queue in (self.window, self.protected):
            if key in queue:
                queue.remove(key)
                queue.append(key)
        if key in self.probation:
            self.probation.remove(key)
            self.protected.append(key)
            most_bytes = 0.8 * self.bytes_of(self.probation + self.protected)
            while self.bytes_of(self.protected) > most_bytes and len(self.protected) > 1:
                self.probation.append(self.protected.pop(0))

    def remove(self, key: Key) -> None:
        for queue in (self.window, self.probation, self.protected):
            if key in queue:
                queue.remove(key)
        del self.sizes[key]
        if key == self.beaten:
            self.beaten = None
            self.probation += self.window[:1]
            del self.window[:1]

    def bytes_of(self, queue: list[Key]) -> int:
        return sum(self.sizes[key] for key in queue)

    def victim(self, now: float) -> Key:
        self.beaten = None
        held_bytes = sum(self.sizes.values())
        most_bytes = held_bytes - int(0.01 * held_bytes)
        while self.window:
            candidate = self.window[0]
            main = self.probation + self.protected
            if main and self.bytes_of([*main, candidate]) > most_bytes:
                if self.counts[candidate] <= self.counts[main[0]]:
                    return candidate
                self.beaten = main[0]
                return self.beaten
            self.probation.append(self.window.pop(0))
        return (self.probation + self.protected)[0]


class NaiveTLru:
    """Who was ever needed by a path it was on, and when it was used last."""

    def __init__(self) -> None:
        self.order: list[Key] = []
        self.needed: set[Key] = set()
        self.tokens: dict[Key, int] = {}
        self.path: list[int] = []

    def insert(self, key: Key, size_bytes: int, now: float, traits: Traits) -> None:
        self.order.append(key)
        self.tokens[key] = traits.tokens
        self.weigh(key)

    def touch(self, key: Key, now: float, traits: Traits | None) -> None:
        self.order.remove(key)
        self.order.append(key)
        self.tokens[key] = traits.tokens if traits is not None else self.tokens[key]
        self.weigh(key)

    def weigh(self, key: Key) -> None:
        tokens = self.tokens[key]
        if self.path and tokens >= self.path[-1]:
            self.path = []
        self.path.append(tokens)
        without = tokens - 1  # what of the history would still be cached
        if not tokens or self.path[0] + 200 - without > 1_024:
            self.needed.add(key)

    def remove(self, key: Key) -> None:
        self.order.remove(key)
        self.needed.discard(key)

    def victim(self, now: float) -> Key:
        free = [key for key in self.order if key not in self.needed]
        return (free or self.order)[0]


NAIVE: dict[str, Callable[[], Any]] = {
    **{name: partial(NaiveScores, score) for name, score in SCORES.items()},
    "sieve": NaiveSieve,
    "lfu_da": partial(NaiveGreedy, by_value=False),
    "gdsf": partial(NaiveGreedy, by_value=True),
    "s3fifo": NaiveS3Fifo,
    "wtinylfu": NaiveWTinyLfu,
    "t_lru": NaiveTLru,
}
