"""What one llama.cpp server probably holds: whole sequences in slots, and a prompt cache behind them."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Final, NamedTuple

from preheat.core.slot_desk import alike
from preheat.core.slot_rules import LEAST_KEPT, LEAST_LIKENESS, Slot, SlotRules
from preheat.core.starts import ALL, Starts
from preheat.core.witness import Trust, Witness

USUAL_CACHE_BLOCKS: Final = 512
"""`--cache-ram`'s default of 8 GiB at 128 KiB a token, an 8B model's: 65,536 tokens of 128 a block."""
_MOST_BLOCKS: Final = 131_072
_SHRINK: Final = 0.95
_GROW: Final = 1.02


class Usable(NamedTuple):
    """How many leading blocks of a prompt a request would find if it came now; and how many once
    `running`, the prompt of a request under way, has ended: None where none would leave more."""

    blocks: int
    later_blocks: int
    running: Sequence[int] | None


class _Sequence:
    """Blocks that belong to each other, and their bit, once they are counted. Its identity counts:
    two requests may ask the same."""

    __slots__ = ("bit", "blocks")

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = blocks
        self.bit = 0


class SlotResidency:
    """An estimate of a llama.cpp server, by its own rules (`core.slot_rules`), corrected by what its
    answers say was cached. Has what `Residency` has, so the index takes either.

    A busy slot's prefix is shared with nobody, so two things are told apart. What it *has* anywhere
    (`__iter__`), requests under way included: that draws a burst of one new prefix to one place. And
    what a request would find *now* (`holds`), and *later* (`usable`), when the one that computes the
    prefix has ended: then a follower may be cheaper to hold back than to compute twice.

    Answers aren't in the blocks; so a sequence here is a little shorter than the server's. The prompt
    cache's size isn't told by the server: `cache_blocks` is given, or learned from answers. The first
    answer for which the cache was hoped says whether there is one at all.
    """

    def __init__(self, slots: int, cache_blocks: int | None = None) -> None:
        self.life = 0
        """How often it was cleared: who was sent there before holds nothing any more."""
        self.capacity_blocks = 0
        """What its slots hold together, as it says; 0 where it doesn't."""
        self._is_size_known = self._has_cache = cache_blocks is not None
        self._is_of_cache = False  # what the last one that ended had hoped for
        self._rules = _rules(slots, USUAL_CACHE_BLOCKS if cache_blocks is None else cache_blocks)
        self._witness = Witness()
        self._running: dict[_Sequence, Slot[_Sequence]] = {}  # the oldest first
        self._waiting: deque[_Sequence] = deque()
        self._known: set[_Sequence] = set()  # whose blocks are counted
        self._starts = Starts()  # of those
        self._idle = self._cached = self._busy = 0  # bits of those in such a place
        self._idle_slots: list[_Sequence] = []
        self._oldest: _Sequence | None = None  # of those
        self._used = 0  # blocks in the prompt cache
        self._gone: list[int] = []  # not reported yet; may have come back

    @property
    def trust(self) -> Trust:
        """How far it can be relied upon."""
        return self._witness.trust

    @property
    def slots(self) -> int:
        """How many sequences it can compute at once."""
        return len(self._rules.slots)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[int]:
        """What it is thought to have, in whatever place, or to have soon."""
        return iter(list(self._starts))

    def holds(self, blocks: Sequence[int]) -> int:
        """How many leading blocks a request would find if it came now."""
        return self._finds(blocks, self._starts.deepest(blocks, ALL, len(blocks)))

    def has_now(self, blocks: Sequence[int], most: int) -> bool:
        """Whether it would find all that anybody has of it now, `most` blocks: a look, not a search.
        Where it says no, `usable` knows."""
        here = self._starts.bits.get(blocks[most - 1], 0) & self._idle
        if not here or most > LEAST_LIKENESS * len(blocks):
            return here != 0
        return self._oldest is not None and here & self._oldest.bit != 0

    def usable(self, blocks: Sequence[int], most: int | None = None) -> Usable:
        """What it would find now, and what later; of several that leave as much, the one sent first.
        `most` leading blocks are anywhere, where that is known."""
        if most is None:
            most = self._starts.deepest(blocks, ALL, len(blocks))
        now = self._finds(blocks, most)
        later = self._starts.deepest(blocks, self._busy, most) if now < most else 0
        if later <= now:
            return Usable(now, now, None)
        among = self._starts.bits.get(blocks[later - 1], 0)
        first = next(one for one in (*self._running, *self._waiting) if one.bit & among)
        return Usable(now, later, first.blocks)

    def sent(self, blocks: Sequence[int], now: float) -> tuple[Sequence[int], list[int]]:
        """A request goes there, into a slot or the queue. Returns those blocks that it won't find, all
        of which come in, and those that were pushed out."""
        one = _Sequence(blocks)
        taken = None if self._waiting else self._rules.take(one)
        if taken is None:
            found = self.holds(blocks)
            self._waiting.append(one)
        else:
            slot, found = taken
            self._running[one] = slot
        self._recount()
        return blocks[found:], self._left()

    def ended(self, blocks: Sequence[int], now: float) -> None:
        """The request that had been sent with these has ended; its slot is idle."""
        self._end(blocks, now, None)

    def failed(self, blocks: Sequence[int], known: int, now: float) -> list[int]:
        """It ended before its prompt was computed: what came in with it isn't there. Returns that."""
        self._end(blocks, now, known)
        return self._left()

    def found(
        self, hoped_blocks: int, found_blocks: float, prompt_blocks: int, now: float
    ) -> list[int]:
        """What an answer said was cached, in blocks, where `hoped_blocks` were thought to be there.
        Returns what isn't there after all."""
        verdict = self._witness.hears(hoped_blocks, found_blocks, prompt_blocks)
        is_of_cache, self._is_of_cache = self._is_of_cache, False
        if is_of_cache and not self._has_cache:
            if verdict in ("less", "wiped"):
                self._witness.cleared()  # of the slots it says nothing
                self._rules.resize(0)
                self._recount()
                return self._left()
            self._has_cache = verdict in ("as-hoped", "more")
        if verdict == "wiped":
            return self.cleared()
        if not self._is_size_known:
            room = self._rules.room
            if verdict == "less":
                used = sum(len(one.blocks) for one in self._rules.cache)
                self._rules.resize(int(min(room, used) * _SHRINK))
            elif verdict == "more":
                larger = int(room * _GROW) + 1 if room else USUAL_CACHE_BLOCKS
                self._rules.resize(min(_MOST_BLOCKS, larger))
            self._recount()
        return self._left()

    def restored(self, slot: int, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """A slot file was loaded into this idle slot. Returns blocks that came in and that left."""
        place = self._rules.slots[slot]
        if place.is_busy:
            return [], []
        place.holds = _Sequence(blocks)
        came = [block for block in blocks if block not in self._starts]
        self._recount()
        return came, self._left()

    def cleared(self) -> list[int]:
        """It was restarted or reset: another life begins with nothing. Returns what is gone."""
        before = list({*self._starts, *self._gone})
        self._rules = _rules(self.slots, self._rules.room)
        self._witness.cleared()
        self._running.clear()
        self._waiting.clear()
        self._known.clear()
        self._starts.clear()
        self._recount()
        self._gone.clear()
        self.life += 1
        return before

    def resized(self, capacity_blocks: int, now: float) -> list[int]:
        """It says what its slots hold together. A longer prompt is refused by the server itself; the
        cache behind them has its own size."""
        self.capacity_blocks = capacity_blocks
        return self._left()

    def _begin(self) -> None:
        """Those that wait take what slots are idle, in their order."""
        while self._waiting:
            taken = self._rules.take(self._waiting[0])
            if taken is None:
                break
            self._running[self._waiting.popleft()] = taken[0]
        self._recount()

    def _end(self, blocks: Sequence[int], now: float, known: int | None) -> None:
        one = _same((*self._running, *self._waiting), blocks)
        slot = None if one is None else self._running.pop(one, None)
        self._is_of_cache = slot is not None and slot.is_given_back
        if slot is not None:
            slot.is_busy, slot.used_at = False, now
            if known is not None:
                slot.holds = _Sequence(blocks[:known])
        elif one is not None:
            self._waiting.remove(one)
        self._begin()

    def _finds(self, blocks: Sequence[int], most: int) -> int:
        """What `SlotRules.foretold` says, where `most` leading blocks are anywhere: told by the bits."""
        starts, taken = self._starts, self._oldest
        here = starts.deepest(blocks, self._idle, most)
        if here > LEAST_LIKENESS * len(blocks):
            if here == most:
                return here
            among = starts.bits.get(blocks[here - 1], 0)
            taken = fullest = next(one for one in self._idle_slots if one.bit & among)
            if here >= LEAST_KEPT * len(fullest.blocks):
                return here
        else:
            here = 0 if taken is None else starts.deepest(blocks, taken.bit, here)
        offered = 0 if here == most else starts.bits.get(blocks[here], 0) & self._cached
        if not offered:
            return here
        if taken is not None and not taken.bit & self._cached and self._would_push_out(taken):
            return self._rules.foretold(_Sequence(blocks))
        kept = -1.0 if taken is None else here / max(1, len(taken.blocks))
        shares = starts.depths(blocks, offered, most)
        offers = [(one, shares[one.bit]) for one in self._rules.cache if one.bit in shares]
        return self._rules.best(here, kept, offers)[1]

    def _would_push_out(self, one: _Sequence) -> bool:
        """Whether others may leave the cache when this is copied there."""
        size = len(one.blocks)
        return self._used + size > self._rules.room >= size

    def _recount(self) -> None:
        """Sequences that came and went, and where all are now."""
        rules, starts = self._rules, self._starts
        here = {slot.holds for slot in rules.slots if slot.holds is not None}
        here.update(rules.cache, self._waiting)
        for one in here - self._known:
            one.bit = starts.add(one.blocks)
        for one in self._known - here:
            self._gone += starts.drop(one.blocks, one.bit)
        self._known = here
        self._busy = self._idle = self._cached = self._used = 0
        self._idle_slots, self._oldest, oldest_at = [], None, inf
        for slot in rules.slots:
            held = slot.holds
            if slot.is_busy:
                self._busy |= 0 if held is None else held.bit
                continue
            if held is not None:
                self._idle |= held.bit
                self._idle_slots.append(held)
            if slot.used_at <= oldest_at:
                oldest_at, self._oldest = slot.used_at, held
        for one in self._waiting:
            self._busy |= one.bit
        for one in rules.cache:
            self._cached |= one.bit
            self._used += len(one.blocks)

    def _left(self) -> list[int]:
        """What went since this was asked last, and hasn't come back."""
        gone, self._gone = self._gone, []
        return [block for block in dict.fromkeys(gone) if block not in self._starts]


def _rules(slots: int, room: int) -> SlotRules[_Sequence]:
    return SlotRules(
        slots,
        room,
        overlap=lambda held, other: alike(held.blocks, other.blocks),
        exceeds=_exceeds,
        size=lambda held: len(held.blocks),
        asked=lambda prompt: len(prompt.blocks),
    )


def _exceeds(one: _Sequence, other: _Sequence, least: int) -> bool:
    """Whether more than so many are the same: one look."""
    mine, theirs = one.blocks, other.blocks
    return len(mine) > least and len(theirs) > least and mine[least] == theirs[least]


def _same(among: Iterable[_Sequence], blocks: Sequence[int]) -> _Sequence | None:
    """The one with these very blocks, else the first with equal ones."""
    equal = None
    for one in among:
        if one.blocks is blocks:
            return one
        if equal is None and one.blocks == blocks:
            equal = one
    return equal
