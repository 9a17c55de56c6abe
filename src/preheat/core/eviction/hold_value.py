"""J, the hold value: who saves least for the memory and the time it takes leaves (`core.value`)."""

from collections.abc import Iterator
from typing import ClassVar, Final, Generic, TypeVar

from preheat.core.types import PLAIN, Traits
from preheat.core.value import HoldTable, Price

K = TypeVar("K")

FIRST_REFRESH: Final = 16  # uses, as `hold_leaves`
LEAST_FOLLOWED: Final = 64  # lives: fewer say nothing of a table's bins
SEED: Final = 2_463_534_242  # Marsaglia's own
_MASK: Final = 0xFFFFFFFF


class HoldValue(Generic[K]):
    """Of `candidates` drawn at random the one with the smallest J · cost / size, the one used longest
    ago among equals. Until something was learned that is LRU over the drawn.

    What is learned from are lives drawn when they begin, with a chance that is halved whenever more
    than `followed` are open (the idea of SHARDS, Waldspurger et al., FAST 2015, for lives instead of
    keys: a life is followed even if its entry leaves). So learning costs the same for any number of
    entries: at most `followed` steps every `refresh_uses` uses.

    Drawing (as many as LHD does) is Redis's and LHD's way to do without an order that changes with time. The draws follow
    from a seed of its own (xorshift; Marsaglia, J. Stat. Softw. 2003), so a replay repeats.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(
        self,
        *,
        candidates: int = 32,
        levels: int = 4,
        back_off: float = 100.0,
        memory: float = 0.99,
        refresh_uses: int = 1_024,
        followed: int = 2_048,
    ) -> None:
        self.table = HoldTable(levels=levels, back_off=back_off, memory=memory)
        self.price = Price()
        self._candidates = candidates
        self._refresh_uses = refresh_uses
        self._followed = followed
        self._uses_left = min(FIRST_REFRESH, refresh_uses)
        self._step = self._uses_left
        self._places: dict[K, int] = {}
        self._held: list[_Held[K]] = []
        self._lives: dict[K, tuple[int, float, int, int]] = {}  # row, beginning, its draw, `began`
        self._chance_mask = 0
        self._state = SEED
        self._named: K | None = None

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        held = _Held(key, size_bytes, traits, now)
        self._places[key] = len(self._held)
        self._held.append(held)
        self._begin(held, now)

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        held = self._held[self._places[key]]
        held.uses += 1
        held.used_at = now
        if traits is not None:
            held.weigh(traits)
        self._begin(held, now)

    def remove(self, key: K) -> None:
        place = self._places.pop(key)
        last = self._held.pop()
        if place < len(self._held):
            self._held[place] = last
            self._places[last.key] = place
        self._named = None

    def victim(self, now: float) -> K:
        if self._named is None:
            value, held = self._lowest(now)
            self.price.learn(value)
            self._named = held.key
        return self._named

    def __len__(self) -> int:
        return len(self._held)

    def _lowest(self, now: float) -> "tuple[float, _Held[K]]":
        held = self._held
        if not held:
            raise LookupError("no entry to evict")
        lowest = None
        least = 0.0
        for one in held if len(held) <= self._candidates else self._drawn():
            value = self.table.value(one.row, now - one.used_at) * one.worth
            if lowest is None or value < least or (value == least and one.used_at < lowest.used_at):
                lowest, least = one, value
        assert lowest is not None
        return least, lowest

    def _drawn(self) -> "Iterator[_Held[K]]":
        for _ in range(self._candidates):
            yield self._held[self._draw() % len(self._held)]

    def _begin(self, held: "_Held[K]", now: float) -> None:
        """A use: the life before it, if it was followed, ends, and a new one begins."""
        self._named = None
        held.row = self.table.row(held.kind, held.uses)
        life = self._lives.pop(held.key, None)
        if life is not None:
            self.table.end(life[0], now - life[1], 1, used=True, began=life[3])
        draw = self._draw()
        if not draw & self._chance_mask:
            self._lives[held.key] = (held.row, now, draw, self.table.refreshes)
            while len(self._lives) > self._most_followed():
                self._chance_mask = 2 * self._chance_mask + 1
                mask = self._chance_mask
                self._lives = {k: life for k, life in self._lives.items() if not life[2] & mask}
        self._uses_left -= 1
        if not self._uses_left:
            self._step = min(2 * self._step, self._refresh_uses)
            self._uses_left = self._step
            self.table.refresh(
                (row, now - since, 1, began) for row, since, _, began in self._lives.values()
            )
            if 4 * len(self._lives) < self._most_followed():
                self._chance_mask >>= 1

    def _most_followed(self) -> int:
        """Never many more than there are entries: memory is for those."""
        return max(LEAST_FOLLOWED, min(self._followed, 8 * len(self._held)))

    def _draw(self) -> int:
        x = self._state
        x ^= (x << 13) & _MASK
        x ^= x >> 17
        x ^= (x << 5) & _MASK
        self._state = x
        return x


class _Held(Generic[K]):
    """One entry. `worth` is its cost by its size, `row` its class."""

    __slots__ = ("key", "kind", "row", "size_bytes", "used_at", "uses", "worth")

    def __init__(self, key: K, size_bytes: int, traits: Traits, now: float) -> None:
        self.key = key
        self.size_bytes = max(1, size_bytes)
        self.uses = 1
        self.used_at = now
        self.row = 0
        self.weigh(traits)

    def weigh(self, traits: Traits) -> None:
        """Its traits are these from now on."""
        self.kind = traits.kind
        self.worth = traits.cost_s / self.size_bytes
