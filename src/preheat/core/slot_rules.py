"""llama.cpp's rules for its slots and the prompt cache behind them, over any kind of sequence.

It shares no blocks between requests. Each slot holds one sequence, and what a new prompt has in common
with the sequence in its slot isn't computed again. The rules are those of tools/server
(server-context.cpp, server-task.cpp) of build 11549, without a unified KV cache:

- A request takes the idle slot whose sequence shares most with its prompt, if that is more than a
  tenth of the prompt, else the one that was used longest ago. With no slot idle it waits.
- Where the slot was chosen by age, or would lose more than half of its sequence, that is first
  copied to the prompt cache, and the cache may give a better one back: one that shares more, both
  as a part of the prompt and of itself (a quarter at least). What is given back leaves the cache.
- Whenever a request begins, the sequences of all idle slots are copied to the prompt cache, too.
  It keeps none that begins another it has and none that is larger than itself, and drops the
  oldest when it is full.
"""

from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

LEAST_LIKENESS: Final = 0.1
"""`--slot-prompt-similarity`'s default."""
LEAST_KEPT: Final = 0.5
_LEAST_FOUND: Final = 0.25

S = TypeVar("S")
"""A sequence: of a request that asks for a slot, or held by one."""


class Slot(Generic[S]):
    """One place for a sequence."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.used_at = -1.0
        self.holds: S | None = None
        self.is_busy = False
        self.is_given_back = False
        """Whether its last prompt began with what the cache had given back."""


class SlotRules(Generic[S]):
    """A server's slots and its prompt cache.

    `overlap` tells how many leading units (tokens, blocks) of a held sequence begin another one, and
    `exceeds` whether they are more than so many, which may be known sooner. `size` is how many are
    held, `asked` how long a prompt is. `room` is what the cache holds of them all.
    """

    def __init__(
        self,
        count: int,
        room: int,
        *,
        overlap: Callable[[S, S], int],
        exceeds: Callable[[S, S, int], bool] | None = None,
        size: Callable[[S], int],
        asked: Callable[[S], int],
    ) -> None:
        self.slots: list[Slot[S]] = [Slot(number) for number in range(count)]
        self.cache: list[S] = []  # the oldest first
        self.room = room
        self._overlap = overlap
        self._exceeds = exceeds or (lambda held, other, least: overlap(held, other) > least)
        self._size = size
        self._asked = asked

    def take(self, prompt: S) -> tuple[Slot[S], int] | None:
        """Its slot, which holds it from now on, and how much of it was there already; None where
        none is idle."""
        picked = self._pick(prompt)
        if picked is None:
            return None
        slot, is_exchanged = picked
        slot.is_given_back = False
        if is_exchanged:
            self._save(slot.holds, self.cache)
            found = self._better(slot.holds, prompt, self.cache)
            if found is not None:
                self.cache.remove(found)
                slot.holds, slot.is_given_back = found, True
        shared = self._shared(slot.holds, prompt)
        slot.holds, slot.is_busy = prompt, True
        for idle in self.slots:
            if not idle.is_busy:
                self._save(idle.holds, self.cache)
        return slot, shared

    def foretold(self, prompt: S) -> int:
        """How much of it `take` would find; with no slot idle, what the cache alone would give."""
        picked = self._pick(prompt)
        if picked is None:
            return self._shared(self._better(None, prompt, self.cache), prompt)
        slot, is_exchanged = picked
        if is_exchanged and self.room:
            cache = list(self.cache)
            self._save(slot.holds, cache)
            found = self._better(slot.holds, prompt, cache)
            if found is not None:
                return self._shared(found, prompt)
        return self._shared(slot.holds, prompt)

    def resize(self, room: int) -> None:
        """The cache holds so much from now on; the oldest that are too many go."""
        self.room = room
        self._make_room(0, self.cache)

    def _pick(self, prompt: S) -> tuple[Slot[S], bool] | None:
        """The idle slot for it, and whether its sequence is exchanged first."""
        best, shared = None, LEAST_LIKENESS * self._asked(prompt)
        oldest: Slot[S] | None = None
        for slot in self.slots:
            if slot.is_busy:
                continue
            if slot.holds is not None and self._exceeds(slot.holds, prompt, int(shared)):
                here = self._shared(slot.holds, prompt)
                if here > shared:
                    best, shared = slot, here
            if oldest is None or slot.used_at <= oldest.used_at:
                oldest = slot
        if best is not None and best.holds is not None:
            return best, shared < LEAST_KEPT * self._size(best.holds)
        return None if oldest is None else (oldest, True)

    def best(
        self, shared: int, kept: float, offers: Iterable[tuple[S, int]]
    ) -> tuple[S | None, int]:
        """What of the cache is better than a slot whose sequence shares so much with a prompt, `kept`
        of itself. Offered are sequences, the oldest first, and what each shares with the prompt.
        Returns it, and what it shares."""
        found = None
        for one, here in offers:
            if here > shared:
                part = here / self._size(one)
                if part >= _LEAST_FOUND and part > kept:
                    found, shared, kept = one, here, part
        return found, shared

    def _better(self, held: S | None, prompt: S, cache: list[S]) -> S | None:
        """What of the cache is better for this prompt than what the slot holds."""
        shared, kept = 0, -1.0
        if held is not None:
            shared = self._shared(held, prompt)
            size = self._size(held)
            kept = shared / size if size else 0.0
        exceeds = self._exceeds
        offers = ((one, self._shared(one, prompt)) for one in cache if exceeds(one, prompt, shared))
        return self.best(shared, kept, offers)[0]

    def _save(self, held: S | None, cache: list[S]) -> None:
        """Copy a sequence into the cache, unless it begins one that is there or is too large."""
        if held is None or not 0 < self._size(held) <= self.room:
            return
        if any(held is other for other in cache):
            return
        if any(self._begins(held, other) for other in cache):
            return
        cache[:] = [other for other in cache if not self._begins(other, held)]
        self._make_room(self._size(held), cache)
        cache.append(held)

    def _make_room(self, size: int, cache: list[S]) -> None:
        size += sum(map(self._size, cache))
        while size > self.room:
            size -= self._size(cache.pop(0))

    def _begins(self, held: S, other: S) -> bool:
        """Whether all of it is the beginning of the other."""
        return self._exceeds(held, other, self._size(held) - 1)

    def _shared(self, held: S | None, prompt: S) -> int:
        if held is None:
            return 0
        return min(self._overlap(held, prompt), self._size(held), self._asked(prompt))
