"""Which worker probably holds which prefix."""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from preheat.core.residency import Residency
from preheat.core.slots import SlotResidency
from preheat.core.told import Change, ToldResidency

_MANY: Final = 6
"""Of more ones in a mask its digits are read, which takes less than picking out each."""

Known = Residency | SlotResidency | ToldResidency
"""What a worker holds: estimated in blocks or in slots, or told by its own events."""


class Stay(msgspec.Struct, gc=False):
    """A request's blocks at the worker it was sent to, until it has ended. `hoped` are the leading
    blocks that were thought to be there; `is_in`: all of them are held now."""

    worker: int
    residency: Known
    life: int
    blocks: Sequence[int]
    hoped: int
    is_in: bool


class PrefixIndex:
    """The KV caches of all workers of a group, as far as they can be known.

    A block's id names it with all before it, so one flat map is the prefix tree of all: block →
    the bits of the workers that hold it. One walk along a prompt finds what each of them has. The
    blocks of a request under way count from the moment it is sent, so that a burst of one new
    prefix goes to one place.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._residencies: dict[int, Known] = {}
        self._told: dict[int, ToldResidency] = {}

    def __len__(self) -> int:
        """Blocks that anybody holds."""
        return len(self._held)

    def residency(self, worker: int) -> Known:
        """What is known of a worker; one that wasn't heard of has nothing."""
        known = self._residencies.get(worker)
        if known is None:
            known = self._residencies[worker] = Residency()
        return known

    @property
    def listened(self) -> Collection[int]:
        """Workers that tell by events what they hold."""
        return self._told.keys()

    def best_known(self, worker: int) -> Known:
        """What it tells itself, where it does; else the estimate."""
        told = self._told.get(worker)
        return self.residency(worker) if told is None else told

    def overlaps(self, blocks: Sequence[int]) -> dict[int, int]:
        """How many leading blocks each worker holds; those that hold none aren't named."""
        found: dict[int, int] = {}
        held = self._held.get
        left, depth = -1, 0
        for block in blocks:
            here = held(block, 0)
            if here != left:
                if depth:
                    for worker in _bits(left & ~here):
                        found[worker] = depth
                    here &= left
                left = here
                if not left:
                    return found
            depth += 1
        if depth:
            for worker in _bits(left):
                found[worker] = depth
        return found

    def sent(self, worker: int, blocks: Sequence[int], now: float) -> Stay:
        """A request goes to that worker."""
        return self._sent(worker, self.residency(worker), blocks, now)

    def sent_tokens(self, worker: int, blocks: Sequence[int], now: float) -> Stay | None:
        """The same request in blocks of tokens, where that worker tells of those."""
        told = self._told.get(worker)
        return None if told is None else self._sent(worker, told, blocks, now)

    def _sent(self, worker: int, residency: Known, blocks: Sequence[int], now: float) -> Stay:
        hoped = residency.holds(blocks)
        came, gone = residency.sent(blocks, now)
        self._unmark(worker, gone)
        self._mark(worker, came)
        return Stay(
            worker, residency, residency.life, blocks, hoped, hoped + len(came) == len(blocks)
        )

    def ended(self, stay: Stay, now: float, found_blocks: float | None) -> None:
        """It was answered; `found_blocks` of its prompt the engine had, by its own count, if it has
        one."""
        residency = stay.residency
        if not self._is_here(stay):
            return  # the worker is no more
        if stay.is_in and stay.life == residency.life:
            residency.ended(stay.blocks, now)
        if found_blocks is not None:
            gone = residency.found(stay.hoped, found_blocks, len(stay.blocks), now)
            self._unmark(stay.worker, gone)

    def failed(self, stay: Stay, now: float) -> None:
        """It ended before its prompt was computed."""
        residency = stay.residency
        if stay.is_in and self._is_here(stay) and stay.life == residency.life:
            self._unmark(stay.worker, residency.failed(stay.blocks, stay.hoped, now))

    def cleared(self, worker: int) -> None:
        """Its cache is empty: it was restarted, or reset. One whose events are all heard would say so
        itself."""
        self._unmark(worker, self.residency(worker).cleared())
        told = self._told.get(worker)
        if told is not None and told.trust != "told":
            self._unmark(worker, told.cleared())

    def resized(self, worker: int, capacity_blocks: int, now: float) -> None:
        """It says how much it holds."""
        self._unmark(worker, self.residency(worker).resized(capacity_blocks, now))

    def hears(self, worker: int, told: ToldResidency) -> None:
        """It tells by events what it holds from now on, in blocks of tokens. What was sent there in
        blocks of text is still noted: for requests whose tokens nobody knows."""
        before = self._told.get(worker)
        if before is not None:
            self._unmark(worker, before)
        self._told[worker] = told
        self._mark(worker, told)

    def has_slots(self, worker: int, slots: int, cache_blocks: int | None = None) -> None:
        """It is a llama.cpp server with so many; what it was thought to hold is forgotten, unless that
        is known already."""
        known = self._residencies.get(worker)
        if not isinstance(known, SlotResidency) or known.slots != slots:
            self.left(worker)
            self._residencies[worker] = SlotResidency(slots, cache_blocks)

    def told(self, worker: int, change: Change) -> None:
        """What its residency made of an event."""
        self._unmark(worker, change.gone)
        self._mark(worker, change.came)

    def left(self, worker: int) -> None:
        """It is no more; its number may be given to another."""
        for known in (self._residencies.pop(worker, None), self._told.pop(worker, None)):
            if known is not None:
                self._unmark(worker, known)

    def _is_here(self, stay: Stay) -> bool:
        known = (self._residencies.get(stay.worker), self._told.get(stay.worker))
        return any(one is stay.residency for one in known)

    def _mark(self, worker: int, blocks: Iterable[int]) -> None:
        bit, held = 1 << worker, self._held
        for block in blocks:
            held[block] = held.get(block, 0) | bit

    def _unmark(self, worker: int, blocks: Iterable[int]) -> None:
        keep, held = ~(1 << worker), self._held
        for block in blocks:
            left = held.get(block, 0) & keep
            if left:
                held[block] = left
            else:
                held.pop(block, None)


def _bits(mask: int) -> list[int]:
    """The places of its ones.

    >>> _bits(0b1001)
    [0, 3]
    """
    if mask.bit_count() > _MANY:
        return [place for place, digit in enumerate(bin(mask)[:1:-1]) if digit == "1"]
    places = []
    while mask:
        low = mask & -mask
        places.append(low.bit_length() - 1)
        mask ^= low
    return places
