"""Which slot of a llama.cpp server each request is sent to, where we say it and not the server."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

_LEAST_KEPT: Final = 0.5
"""As `core.slot_rules`: a sequence that would lose more than this for another's prompt is pushed out
by age instead, not cut down."""

_LEAST_IDLE_S: Final = 60.0
"""Who was there within the last minute may be back at any moment, whatever pauses are usual."""


class Holding(msgspec.Struct, frozen=True):
    """A sequence in a slot: whose it is, its prompt's blocks (one at least, or nobody could find
    it), and how many tokens it has."""

    tenant: str
    session: str
    blocks: Sequence[int]
    tokens: int


class Seat(NamedTuple):
    """A slot for a request, about how many tokens it has of the prompt, and what it is about to
    lose: a sequence that no file has."""

    slot: int
    found_tokens: int
    losing: Holding | None


class Freed(NamedTuple):
    """What goes first since its session is over: so many slots, and the bytes of its files."""

    slots: int = 0
    file_bytes: int = 0


class _Slot:
    def __init__(self, number: int) -> None:
        self.number = number
        self.is_busy = False
        self.is_saved = True
        self.is_over = False
        self.is_judged = False
        self.pause = ""
        self.used_at = -1.0
        self.longer_s = 0.0
        self.holds: Holding | None = None


class SlotDesk:
    """The slots of one server, each named in the request that is sent there.

    What lies where is then known, not guessed, so that a sequence can be saved before another takes
    its place, and restored when its session comes back. A request gets the idle slot that has most
    of its prompt, if that is at least half of what the slot holds; else the one that costs least:
    an empty one, one whose session is over as was said, or as is judged, the one that will be missed last (`core.pauses`), which is
    that used longest ago where all pause alike.

    The server's own prompt cache isn't asked for a request that names its slot: the files are in its
    place.
    """

    def __init__(self, slots: int) -> None:
        self._slots = [_Slot(number) for number in range(slots)]

    @property
    def idle(self) -> int:
        """How many requests could be seated now."""
        return sum(not slot.is_busy for slot in self._slots)

    @property
    def next_slot(self) -> int | None:
        """Which slot a new session would get."""
        idle = [slot for slot in self._slots if not slot.is_busy]
        return min(idle, key=_worth).number if idle else None

    def most_found(self, tenant: str, blocks: Sequence[int]) -> int:
        """How many leading blocks the best idle slot has."""
        idle = (slot for slot in self._slots if not slot.is_busy)
        return max((_found(slot, tenant, blocks) for slot in idle), default=0)

    def take(self, tenant: str, blocks: Sequence[int]) -> Seat | None:
        """A seat, which is busy from now on; None where all are."""
        idle = [slot for slot in self._slots if not slot.is_busy]
        if not idle:
            return None
        slot, found = _most_found(idle, tenant, blocks)
        holds = slot.holds
        if holds is None or found == 0 or found < _LEAST_KEPT * len(holds.blocks):
            slot = min(idle, key=_worth)
            found = _found(slot, tenant, blocks)
        return _taken(slot, found)

    def spare(self, tenant: str, blocks: Sequence[int], now: float, usual_s: float) -> Seat | None:
        """A seat for what no request asks for yet: where all of it is; else where nothing is, or of a session
        that is over or has paused for longer than pauses usually last, `usual_s` in all. What is missed sooner
        stays: None where that is all there is."""
        idle = [slot for slot in self._slots if not slot.is_busy]
        if not idle:
            return None
        slot, found = _most_found(idle, tenant, blocks)
        if found == len(blocks):
            return _taken(slot, found)
        slot = min(idle, key=_worth)
        paused_s = now - slot.used_at - slot.longer_s
        if slot.holds is None or slot.is_over or paused_s > max(_LEAST_IDLE_S, usual_s):
            return _taken(slot, _found(slot, tenant, blocks))
        return None

    def take_empty(self) -> int | None:
        """An idle slot that holds nothing, which is busy from now on."""
        for slot in self._slots:
            if slot.holds is None and not slot.is_busy:
                slot.is_busy = True
                return slot.number
        return None

    def holds(self, holding: Holding) -> bool:
        """Whether a slot has this, or more of the same."""
        blocks = holding.blocks
        return any(_found(slot, holding.tenant, blocks) == len(blocks) for slot in self._slots)

    def restored(self, slot: int, holding: Holding) -> None:
        """A file was loaded into it."""
        one = self._slots[slot]
        one.holds, one.is_saved = holding, True

    def ended(
        self,
        slot: int,
        holding: Holding | None,
        now: float,
        longer_s: float = 0.0,
        pause: str = "",
    ) -> None:
        """Its request was answered, and it holds this now; None where that isn't known. Pauses of this
        kind are so much longer than others (or shorter, below 0)."""
        one = self._slots[slot]
        one.is_busy, one.used_at, one.longer_s, one.pause = False, now, longer_s, pause
        one.is_judged = False
        one.holds, one.is_saved, one.is_over = holding, holding is None, False

    def saved(self, slot: int, holding: Holding) -> None:
        """A file has what it held, if that is still the same."""
        one = self._slots[slot]
        if one.holds is holding:
            one.is_saved = True

    def is_saved(self, slot: int) -> bool:
        """Whether a file has what it holds, or held when it was taken."""
        return self._slots[slot].is_saved

    def is_judged(self, slot: int) -> bool:
        """Whether what it holds isn't worth a file."""
        return self._slots[slot].is_judged

    def unsaved(self) -> list[tuple[int, Holding]]:
        """Sequences of idle slots that no file has, in the order in which they go."""
        found = [
            (_worth(slot), slot.number, slot.holds)
            for slot in self._slots
            if slot.holds is not None and not (slot.is_busy or slot.is_saved or slot.is_over)
        ]
        return [(number, holds) for _, number, holds in sorted(found, key=lambda it: it[:2])]

    def over(self, tenant: str, session: str) -> int:
        """That session won't come back: its slots are the first to be taken, and aren't saved. How
        many they are. None where it has no name: others have none, too."""
        found = [
            slot
            for slot in self._slots
            if session
            and slot.holds is not None
            and (slot.holds.tenant, slot.holds.session) == (tenant, session)
        ]
        for slot in found:
            slot.is_over = slot.is_saved = True
        return len(found)

    def over_at(self, slot: int) -> None:
        """Nobody comes back to what this slot holds."""
        one = self._slots[slot]
        one.is_over = one.is_saved = True

    def judge(self, is_over: Callable[[Holding, str, float], bool], now: float) -> None:
        """Judge anew what idle slots hold, by its kind of pause and the seconds that it has paused. What is
        judged to be over goes next behind what was said to be, and isn't saved for that."""
        for slot in self._slots:
            if slot.holds is not None and not slot.is_busy:
                slot.is_judged = is_over(slot.holds, slot.pause, now - slot.used_at)

    def erase(self, tenant: str) -> None:
        """What a tenant has in idle slots is neither found nor written any more."""
        for slot in self._slots:
            if slot.holds is not None and slot.holds.tenant == tenant and not slot.is_busy:
                slot.holds, slot.is_saved = None, True

    def forget(self, slot: int) -> None:
        """It holds something else, nobody knows what."""
        one = self._slots[slot]
        if not one.is_busy:
            one.holds, one.is_saved = None, True

    def cleared(self) -> None:
        """The server was restarted: all are empty, and nothing is under way."""
        self._slots = [_Slot(slot.number) for slot in self._slots]


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading blocks are the same. Equal ids have equal ids before them, so it is searched
    by halves.

    >>> alike((7, 8, 9), (7, 8, 5, 6))
    2
    """
    low, high = 0, min(len(one), len(other))
    if not high or one[0] != other[0]:
        return 0
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _found(slot: _Slot, tenant: str, blocks: Sequence[int]) -> int:
    holds = slot.holds
    if holds is None or holds.tenant != tenant:
        return 0
    return alike(holds.blocks, blocks)


def _most_found(idle: list[_Slot], tenant: str, blocks: Sequence[int]) -> tuple[_Slot, int]:
    return max(((one, _found(one, tenant, blocks)) for one in idle), key=lambda it: it[1])


def _taken(slot: _Slot, found: int) -> Seat:
    """It is busy from now on."""
    slot.is_busy = True
    holds = slot.holds
    if holds is None:
        return Seat(slot.number, 0, None)
    is_lost = found == 0 or found < len(holds.blocks)
    tokens = holds.tokens * found // len(holds.blocks) if found else 0
    is_missed = is_lost and not (slot.is_saved or slot.is_judged)
    return Seat(slot.number, tokens, holds if is_missed else None)


def _worth(slot: _Slot) -> tuple[bool, bool, bool, float]:
    left_at = slot.used_at - slot.longer_s
    return slot.holds is not None, not slot.is_over, not slot.is_judged, left_at
