"""What this process's L1 holds, how big it is, and until when."""

import heapq
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from preheat.core.admission import AdmissionPolicy
from preheat.core.epochs import EpochTable
from preheat.core.eviction import EvictionPolicy
from preheat.core.ledger import Account, Share
from preheat.core.memo import Memo
from preheat.core.types import Check, Epoch, Hit, Invalidation, Key, Removed

ENTRY_OVERHEAD_BYTES: Final = 1_400
"""What an entry costs beside its body, in this process's memory: its record, its places in the
dicts, the order and the expiry heap, its memo (measured: docs/measured.md, "memory of an entry")."""

_PORTION: Final = 512


class Record(msgspec.Struct, gc=False):
    """One stored answer, and the decision that serves it.

    `share` is what each use adds to `account`. `uses` counts those that aren't booked yet;
    `is_current` ends with the entry, for whoever still holds its record.
    """

    check: Check
    size_bytes: int
    asked_at: float
    hit: Hit
    tenant: str
    namespace: str
    model: str
    tags: tuple[str, ...]
    epoch: Epoch
    account: Account
    share: Share
    uses: int = 0
    is_current: bool = True


_GONE: Final = Hit(Key(b""), b"", 0.0, 0.0, None, 0.0)


class Inventory:
    """The books of L1: within its budgets after every call.

    An entry stays for `stale_s` after its expiry, for requests that a stale answer may serve.
    `epochs` holds what was invalidated: an answer asked for before that isn't taken in.
    `find` gives the record under a key, expired or not; `see` says that a key was asked for.
    Why a key is not here is remembered for a while, so that every miss can name its reason.

    `use` only counts up in the record; `settle` books the counts and tells the eviction policy,
    before anything is evicted and at least once a second. At a hit that spares a dozen scattered
    memory accesses, which cost more than the work itself (docs/measured.md). Only a policy that
    keeps the order of uses is told at once.
    """

    def __init__(
        self,
        eviction: EvictionPolicy[Key],
        admission: AdmissionPolicy,
        *,
        budget_bytes: int,
        budget_entries: int,
        stale_s: float = 0.0,
    ) -> None:
        self._eviction = eviction
        self._admission = admission
        self.budget_bytes = budget_bytes
        self.budget_entries = budget_entries
        self.size_bytes = 0
        self.stale_s = stale_s
        self._records: dict[Key, Record] = {}
        self.find: Final[Callable[[Key], Record | None]] = self._records.get
        self.see: Final = admission.see
        self._touch: Final = eviction.touch if getattr(eviction, "keeps_order", True) else None
        self._used: list[Record] = []
        self._expiry: list[tuple[float, Key]] = []
        self._gone: Memo[Key, str] = Memo(budget_entries)
        self.epochs = EpochTable()

    def __len__(self) -> int:
        return len(self._records)

    def why_absent(self, key: Key) -> str:
        """The reason why there is no entry under this key, as far as it is remembered."""
        return self._gone[key] or "key-first-seen"

    def keep_stale(self, stale_s: float) -> None:
        """From now on entries stay for so long after their expiry; those that are here, too."""
        if stale_s != self.stale_s:
            self.stale_s = stale_s
            self._reschedule()

    def note_absent(self, key: Key, reason: str) -> None:
        """An answer for this key was not kept, for this reason."""
        self._gone.put(key, reason)

    def store(self, key: Key, record: Record, now: float) -> tuple[Key, ...] | str:
        """Take the entry in: who had to leave for it, or the reason why it stays out.

        What was invalidated since it was asked for isn't kept.
        """
        refused = self._why_refused(key, record, now)
        if refused:
            self.note_absent(key, refused)
            return refused
        if key in self._records:
            self._take_out(key)
        evicted = []
        if not self._fits(record):
            self.settle(now)
        while not self._fits(record):
            victim = self._eviction.victim(now)
            self.remove(victim, "evicted")
            evicted.append(victim)
        self._records[key] = record
        self.size_bytes += record.size_bytes
        self._eviction.insert(key, record.size_bytes, now)
        self._schedule_expiry(key, record)
        return tuple(evicted)

    def use(self, record: Record, now: float) -> Hit:
        """The decision that serves this entry once more."""
        if record.uses:
            record.uses += 1
        else:
            record.uses = 1
            self._used.append(record)
        if self._touch is not None:
            self._touch(record.hit.key, now)
        return record.hit

    def settle(self, now: float, at_most: int | None = None) -> bool:
        """Book the uses since the last time and tell the eviction policy; at most so many entries'
        at once. Whether any are left."""
        used = self._used[:at_most]
        del self._used[:at_most]
        for record in used:
            record.account.save(record.share, record.uses)
            record.uses = 0
            if record.is_current and self._touch is None:
                self._eviction.touch(record.hit.key, now)
        return bool(self._used)

    def remove(self, key: Key, reason: str) -> None:
        """The entry is gone, for this reason."""
        self._take_out(key)
        self.note_absent(key, reason)

    def expire(self, now: float, limit: int = 1_000) -> tuple[Key, ...]:
        """Remove what is past its life, at most `limit` entries: nobody needs to ask for them."""
        expired: list[Key] = []
        heap = self._expiry
        while heap and heap[0][0] <= now and len(expired) < limit:
            due_at, key = heapq.heappop(heap)
            record = self._records.get(key)
            if record is not None and record.hit.expires_at + self.stale_s <= due_at:
                self.remove(key, "expired")
                expired.append(key)
        return tuple(expired)

    def is_void(self, key: Key, record: Record) -> bool:
        """Whether it was invalidated since it was asked for."""
        return self.epochs.voids(
            record.epoch,
            key,
            tenant=record.tenant,
            namespace=record.namespace,
            model=record.model,
            tags=record.tags,
        )

    def sweep(self, what: Invalidation, *, dry_run: bool) -> Iterator[Removed]:
        """Remove every entry that matches and is void, in portions so that the caller can give way
        between; a dry run counts all that match. `epochs` has been told before: what was asked for
        since then stays, whenever the sweep comes."""
        if what.keys and not what.tags:
            found = [(key, self._records[key]) for key in what.keys if key in self._records]
        else:
            found = list(self._records.items())
        for start in range(0, len(found), _PORTION):
            yield self._sweep(what, found[start : start + _PORTION], dry_run=dry_run)

    def _sweep(
        self, what: Invalidation, found: list[tuple[Key, Record]], *, dry_run: bool
    ) -> Removed:
        keys, size_bytes = [], 0
        for key, record in found:
            if (
                record.is_current
                and _matches(what, key, record)
                and (dry_run or self.is_void(key, record))
            ):
                keys.append(key)
                size_bytes += record.size_bytes
                if not dry_run:
                    self.remove(key, "invalidated")
        return Removed(tuple(keys), size_bytes)

    def records(self) -> Iterator[tuple[Key, Record]]:
        """All entries, in no particular order."""
        return iter(self._records.items())

    def _why_refused(self, key: Key, record: Record, now: float) -> str:
        if self.is_void(key, record):
            return "invalidated"
        known = self._records.get(key)
        if known is not None and known.asked_at > record.asked_at and known.check == record.check:
            return "superseded"
        if record.size_bytes > self.budget_bytes or self.budget_entries < 1:
            return "larger-than-cache"
        has_room = key in self._records or self._fits(record)
        if not has_room:
            self.settle(now)  # whom the policy names depends on it
        victim = None if has_room else self._eviction.victim(now)
        return "" if self._admission.admit(key, victim, now) else "not-admitted"

    def _fits(self, record: Record) -> bool:
        return (
            len(self._records) < self.budget_entries
            and self.size_bytes + record.size_bytes <= self.budget_bytes
        )

    def _take_out(self, key: Key) -> None:
        record = self._records.pop(key)
        self.size_bytes -= record.size_bytes
        record.is_current = False
        record.hit = _GONE  # whoever still holds the record doesn't hold the answer
        self._eviction.remove(key)

    def _schedule_expiry(self, key: Key, record: Record) -> None:
        if len(self._expiry) > 2 * len(self._records) + 1_000:
            self._reschedule()  # overwritten and evicted entries leave their old lines behind
        else:
            heapq.heappush(self._expiry, (record.hit.expires_at + self.stale_s, key))

    def _reschedule(self) -> None:
        self._expiry = [
            (record.hit.expires_at + self.stale_s, key) for key, record in self._records.items()
        ]
        heapq.heapify(self._expiry)


def _matches(what: Invalidation, key: Key, record: Record) -> bool:
    return what.covers(
        key,
        model=record.model,
        namespace=record.namespace,
        tenant=record.tenant,
        tags=record.tags,
    )
