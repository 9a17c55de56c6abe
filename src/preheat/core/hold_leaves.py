"""J over the prefixes of a pool: whole requests' blocks share one time of last use and one class."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from preheat.core.prefix import Leaves
from preheat.core.value import HoldTable, Price

FIRST_REFRESH: Final = 16
"""Requests until it learns at first; then twice as many, up to `refresh_requests`: until then it is LRU."""
LEAST_REMEMBERED: Final = 65_536
"""Blocks that left: some tens of MB at most. Of a small pool even what left long ago is known then."""


class _Use:
    """A request, for as long as any block was last used by it."""

    __slots__ = (
        "began",
        "began_at",
        "began_kind",
        "blocks",
        "idle_since",
        "kind",
        "number",
        "under_way",
    )

    def __init__(self, number: int, now: float, kind: int, began: int) -> None:
        self.number = number
        self.began = began
        """How often the table had learned when its blocks' lives began."""
        self.began_at = now
        self.began_kind = kind
        self.under_way = False
        self.idle_since = now
        self.kind = kind
        self.blocks: dict[int, int] = {}
        """How many blocks it was the last to use, by how often they were used."""


class HoldLeaves:
    """The leaf with the smallest hold value goes (`core.value`), the older use first among equals.

    A `LeafOrder` for `PrefixStore`. All blocks have one size, so J counts uses per second. Lives
    begin when a request uses a block. Where the driver knows when answers are over it says
    `began` right after the store took the request, and `ended` later, with the kind that is known by
    then (how the answer ended): lives then begin at the end, and until then the blocks are worth what
    they will be, less what waiting costs. Both lives count: the kind at the beginning learns
    what becomes of its requests whatever their ends.

    What was evicted is remembered, up to `remembered` blocks or four times what is here, so that
    lives longer than a stay are learned too; uses are counted over that memory.

    Exact: at each moment at which something must go, every leaf is looked at once, which costs
    O(leaves) and not O(evictions · leaves). With `renew_requests` above 1 the values of leaves that stay
    unused are so many requests old, which costs so much less. (64 leaves drawn at random lost 7 % of what J won over
    LRU on a trace of chats, 16 lost 23 %.) A table is learned anew every `refresh_requests`: at 32 the
    share of `core.value` is 0.233 and 0.135 instead of 0.207 and 0.125, at four times the cost, and
    with a memory that is a quarter as long; at 256 it is 0.214 and 0.088.
    """

    def __init__(
        self,
        *,
        levels: int = 4,
        back_off: float = 100.0,
        memory: float = 0.99,
        refresh_requests: int = 128,
        remembered: int = LEAST_REMEMBERED,
        renew_requests: int = 1,
    ) -> None:
        self.table = HoldTable(levels=levels, back_off=back_off, memory=memory)
        self.price = Price()
        self.requests = 0
        """How many were taken; the last one's number is one less."""
        self._refresh_requests = refresh_requests
        self._remembered = remembered
        self._refresh_at = min(FIRST_REFRESH, refresh_requests)
        self._refresh_step = self._refresh_at
        self._uses: dict[int, _Use] = {}
        self._last: dict[int, _Use] = {}
        self._counts: dict[int, int] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()  # a dict is slow to give its oldest
        self._free: dict[int, None] = {}
        self._batch: list[tuple[float, int, int]] = []
        self._batch_at: float | None = None
        self._batch_made = 0
        self._renew_requests = renew_requests
        self._now = 0.0

    def used(self, blocks: Sequence[int], known: int, now: float, kind: int) -> None:
        """See `LeafOrder`."""
        self._now = now
        use = _Use(self.requests, now, kind, self.table.refreshes)
        self.requests += 1
        for block in blocks[known:]:
            self._gone.pop(block, None)
        last, counts = self._last, self._counts
        run = 0
        before: tuple[_Use | None, int] = (None, 0)
        for block in blocks:
            past = last.get(block), counts.get(block, 0)
            if past != before:
                self._renew(before, use, run, now)
                before, run = past, 0
            run += 1
            last[block] = use
            counts[block] = past[1] + 1
        self._renew(before, use, run, now)
        if blocks:
            self._uses[use.number] = use
        if self.requests >= self._refresh_at:
            self._refresh_step = min(2 * self._refresh_step, self._refresh_requests)
            self._refresh_at = self.requests + self._refresh_step
            self.table.refresh(self._open_lives(now))
            self._batch_at = None

    def began(self) -> None:
        """The answer to the request taken last isn't there yet; `ended` will be told."""
        use = self._uses.get(self.requests - 1)
        if use is not None:
            use.under_way = True

    def ended(self, number: int, now: float, kind: int) -> None:
        """The answer to request `number` is over; `kind` says what is known of it by now."""
        use = self._uses.get(number)
        if use is not None:
            self.table.serve(now - use.began_at)
            use.under_way = False
            use.idle_since = now
            use.began = self.table.refreshes
            use.kind = kind
            self._batch_at = None

    def freed(self, block: int, used_at: float) -> None:  # noqa: ARG002 - lives say it
        """See `LeafOrder`."""
        self._free[block] = None
        if self._batch_at is not None:
            heappush(self._batch, self._place(block, self._batch_at))

    def removed(self, block: int) -> None:
        """See `LeafOrder`."""
        self._free.pop(block, None)
        self._gone[block] = None
        if len(self._gone) > max(self._remembered, 4 * (len(self._last) - len(self._gone))):
            oldest = self._gone.popitem(last=False)[0]
            self._close(self._last.pop(oldest), self._counts.pop(oldest), 1, self._now, used=False)

    def victim(self, leaves: Leaves, now: float) -> int:
        """See `LeafOrder`."""
        self._now = now
        is_due = self.requests - self._batch_made >= self._renew_requests
        if self._batch_at is None or (is_due and self._batch_at != now):
            for block in [block for block in self._free if not leaves.is_free(block)]:
                del self._free[block]
            self._batch = [self._place(block, now) for block in self._free]
            heapify(self._batch)
            self._batch_at, self._batch_made = now, self.requests
        batch = self._batch
        while batch:
            value, number, block = batch[0]
            if leaves.is_free(block) and self._last[block].number == number:
                self.price.learn(value)
                return block
            heappop(batch)
        raise LookupError("every block is held")

    def _place(self, block: int, now: float) -> tuple[float, int, int]:
        use = self._last[block]
        count = self._counts[block]
        if use.under_way:
            row = self.table.row(use.began_kind, count)
            value = self.table.value_under_way(row, now - use.began_at)
        else:
            value = self.table.value(self.table.row(use.kind, count), now - use.idle_since)
        return value, use.number, block

    def _renew(self, past: tuple[_Use | None, int], use: _Use, run: int, now: float) -> None:
        """So many blocks one after the other, alike in their past, belong to another use now."""
        before, count = past
        if run:
            use.blocks[count + 1] = use.blocks.get(count + 1, 0) + run
        if before is not None:
            self._close(before, count, run, now, used=True)

    def _close(self, use: _Use, count: int, lives: int, now: float, *, used: bool) -> None:
        """The lives of so many of its blocks are over."""
        use.blocks[count] -= lives
        if not use.blocks[count]:
            del use.blocks[count]
            if not use.blocks:
                self._uses.pop(use.number, None)
        if not use.under_way:
            for kind in _kinds(use):
                row = self.table.row(kind, count)
                self.table.end(row, now - use.idle_since, lives, used=used, began=use.began)

    def _open_lives(self, now: float) -> Iterator[tuple[int, float, int, int]]:
        for use in self._uses.values():
            if not use.under_way:
                for kind in _kinds(use):
                    for count, lives in use.blocks.items():
                        yield self.table.row(kind, count), now - use.idle_since, lives, use.began


def _kinds(use: _Use) -> tuple[int, ...]:
    return (use.kind,) if use.kind == use.began_kind else (use.kind, use.began_kind)
