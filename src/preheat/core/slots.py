"""What one llama.cpp server probably holds: whole sequences in slots, and a prompt cache behind them."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from preheat.core.slot_desk import alike
from preheat.core.slot_rules import Slot, SlotRules
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
    """Blocks that belong to each other. Its identity counts: two requests may ask the same."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = blocks


class SlotResidency:
    """An estimate of a llama.cpp server, by its own rules (`core.slot_rules`), corrected by what its
    answers say was cached. Has what `Residency` has, so the index takes either.

    A busy slot's prefix is shared with nobody, so two things are told apart. What it *has* anywhere
    (`__iter__`), requests under way included: that draws a burst of one new prefix to one place. And
    what a request would find *now* (`holds`), and *later* (`usable`), when the one that computes the
    prefix has ended: then a follower may be cheaper to hold back than to compute twice.

    Answers aren't in the blocks; so a sequence here is a little shorter than the server's. The prompt
    cache's size isn't told by the server: `cache_blocks` is given, or learned from answers.
    """

    def __init__(self, slots: int, cache_blocks: int | None = None) -> None:
        self.life = 0
        """How often it was cleared: who was sent there before holds nothing any more."""
        self.capacity_blocks = 0
        """What its slots hold together, as it says; 0 where it doesn't."""
        self._is_size_known = cache_blocks is not None
        self._rules = _rules(slots, USUAL_CACHE_BLOCKS if cache_blocks is None else cache_blocks)
        self._witness = Witness()
        self._running: dict[_Sequence, Slot[_Sequence]] = {}  # the oldest first
        self._waiting: deque[_Sequence] = deque()
        self._known: set[_Sequence] = set()  # whose blocks are counted
        self._counts: dict[int, int] = {}  # in how many sequences a block is
        self._gone: list[int] = []  # not reported yet; may have come back

    @property
    def trust(self) -> Trust:
        """How far it can be relied upon."""
        return self._witness.trust

    @property
    def slots(self) -> int:
        """How many sequences it can compute at once."""
        return len(self._rules.slots)

    @property
    def cache_blocks(self) -> int:
        """What its prompt cache is thought to hold."""
        return self._rules.room

    def __len__(self) -> int:
        return len(self._counts)

    def __iter__(self) -> Iterator[int]:
        """What it is thought to have, in whatever place, or to have soon."""
        return iter(list(self._counts))

    def holds(self, blocks: Sequence[int]) -> int:
        """How many leading blocks a request would find if it came now."""
        return self._rules.foretold(_Sequence(blocks))

    def usable(self, blocks: Sequence[int]) -> Usable:
        """What it would find now, and what later; of several that leave as much, the one sent first."""
        now = self.holds(blocks)
        most, running = now, None
        for one in (*self._running, *self._waiting):
            if most < len(blocks) and len(one.blocks) > most and one.blocks[most] == blocks[most]:
                most, running = alike(one.blocks, blocks), one.blocks
        return Usable(now, most, running)

    def sent(self, blocks: Sequence[int], now: float) -> tuple[Sequence[int], list[int]]:
        """A request goes there, into a slot or the queue. Returns those blocks that it won't find, all
        of which come in, and those that were pushed out."""
        one = _Sequence(blocks)
        taken = None if self._waiting else self._rules.take(one)
        if taken is None:
            found = self._rules.foretold(one)
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
        if verdict == "wiped":
            return self.cleared()
        if not self._is_size_known:
            room = self._rules.room
            if verdict == "less":
                used = sum(len(one.blocks) for one in self._rules.cache)
                self._rules.resize(int(min(room, used) * _SHRINK))
            elif verdict == "more":
                self._rules.resize(min(_MOST_BLOCKS, int(room * _GROW) + 1))
            self._recount()
        return self._left()

    def restored(self, slot: int, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """A slot file was loaded into this idle slot. Returns blocks that came in and that left."""
        place = self._rules.slots[slot]
        if place.is_busy:
            return [], []
        place.holds = _Sequence(blocks)
        came = [block for block in blocks if block not in self._counts]
        self._recount()
        return came, self._left()

    def cleared(self) -> list[int]:
        """It was restarted or reset: another life begins with nothing. Returns what is gone."""
        before = list({*self._counts, *self._gone})
        self._rules = _rules(self.slots, self._rules.room)
        self._witness.cleared()
        self._running.clear()
        self._waiting.clear()
        self._known.clear()
        self._counts.clear()
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
        if slot is not None:
            slot.is_busy, slot.used_at = False, now
            if known is not None:
                slot.holds = _Sequence(blocks[:known])
        elif one is not None:
            self._waiting.remove(one)
        self._begin()

    def _recount(self) -> None:
        """Blocks of sequences that came and went."""
        held = (slot.holds for slot in self._rules.slots)
        here = {one for one in held if one is not None}
        here.update(self._rules.cache, self._waiting)
        counts = self._counts
        for one in here - self._known:
            for block in one.blocks:
                counts[block] = counts.get(block, 0) + 1
        for one in self._known - here:
            for block in one.blocks:
                left = counts[block] - 1
                if left:
                    counts[block] = left
                else:
                    del counts[block]
                    self._gone.append(block)
        self._known = here

    def _left(self) -> list[int]:
        """What went since this was asked last, and hasn't come back."""
        gone, self._gone = self._gone, []
        return [block for block in dict.fromkeys(gone) if block not in self._counts]


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
