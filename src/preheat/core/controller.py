"""The whole decision loop of a request: events and the time in, decisions and effects out."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Literal

from preheat.core.costs import ServiceTimes
from preheat.core.freshness import NEGATIVE, Freshness
from preheat.core.inventory import ENTRY_OVERHEAD_BYTES, Inventory, Record
from preheat.core.ledger import NANO, Ledger
from preheat.core.memo import Memo
from preheat.core.sketch import RotatingBloom
from preheat.core.stats import Counters
from preheat.core.types import (
    NOTHING_SPECIAL,
    Ask,
    Decision,
    Drop,
    Effects,
    Entry,
    Epoch,
    Forward,
    Hit,
    Invalidation,
    Join,
    Keep,
    Key,
    Look,
    Outcome,
    Refresh,
    Reject,
    Removed,
    Request,
    Want,
)
from preheat.core.warmup.found import Found

MAX_VARIANTS: Final = 64
_MOST_TAGS: Final = 64
_PORTION: Final = 512
_PATIENCE_S: Final = 30.0
_LONGEST_PATIENCE_S: Final = 600.0
_RETRY_S: Final = 1.0
"""How long after a refresh that brought nothing the next one may begin."""
_REFRESHES: Final = 16_384
_SAME_S: Final = 0.1
"""Times that come back from L2 went through the wall clock: those so near are one and the same."""


class Controller:
    """The only object the drivers know: what to do with a request, and with its answer.

    Hot and synchronous: one call for a hit; `on_request`, `on_found` where there is an L2, and
    `on_outcome` for a forwarded request. It looks into no body and knows no engines.
    """

    def __init__(
        self,
        inventory: Inventory,
        ledger: Ledger,
        counters: Counters,
        *,
        freshness: Freshness,
        namespaces: Mapping[str, Freshness],
        entry_bytes: int,
        has_l2: bool = False,
        draw: Callable[[], float],
    ) -> None:
        self._inventory = inventory
        # Asked for every request, so without a frame of their own in between:
        self._find, self._see = inventory.find, inventory.see
        self._use = inventory.use
        self._ledger = ledger
        self._counters = counters
        self._entry_bytes = entry_bytes
        self._has_l2 = has_l2
        self._draw = draw
        self._leaders: dict[Key, Request] = {}
        self._refreshed_at: Memo[Key, float] = Memo(_REFRESHES)
        self._sampled_seen = RotatingBloom()
        self._times = ServiceTimes()
        self.set_freshness(freshness, namespaces)

    def set_freshness(self, freshness: Freshness, namespaces: Mapping[str, Freshness]) -> None:
        """The rules from now on; what is stored keeps the life it was given."""
        self._freshness = freshness
        self._namespaces = namespaces
        self._inventory.keep_stale(max(one.kept_s for one in (freshness, *namespaces.values())))

    @property
    def epoch(self) -> Epoch:
        """What is known to be invalidated: an outcome names the epoch its call began in."""
        return self._inventory.epochs.mark

    def on_request(self, request: Request, now: float) -> Decision:
        """The one question. A hit is booked at once."""
        ask = request.ask
        if request.want is not NOTHING_SPECIAL or ask.sampled or ask.bypass:
            return self._on_special(request, now)
        key = ask.key
        self._see(key, now)
        record = ask.record
        if record is None or not record.is_current:
            record = ask.record = self._find(key)
        if record is not None and (record.check is ask.check or record.check == ask.check):
            hit: Hit = record.hit
            if now - hit.stored_at < hit.plain_s:
                return self._use(record, now)
        return self._serve(request, record, now) or self._miss(request, record, now)

    def on_found(
        self, request: Request, entries: Iterable[Entry], now: float
    ) -> Hit | Refresh | Forward | Reject:
        """What L2 had of the keys that a `Look` named, possibly nothing: decide again.

        The entries' times are on the clock of `now`. They fill L1 for the life they have left.
        """
        ask = request.ask
        best: tuple[Record, Hit] | None = None
        for entry in entries:
            record = self._take_in(request, entry, now)
            if record is not None and self._serves(request, record, now):
                best = (record, record.hit)  # the next one may push it out of L1
        if best is not None:
            self._end_flight(request)
            self._ledger.account(request.tenant, ask.model, "exact", "l2").save(best[0].share)
            return self._tell(request, *best, now)
        if request.want.only_if_cached:
            self._end_flight(request)
            return Reject(504, "only-if-cached")
        if ask.sampled:
            return self._forward_sampled(request, now)
        leader = self._leaders.get(ask.key)
        is_leading = leader is not None and leader.id == request.id
        return self._forward(ask, self._find(ask.key), now, joinable=is_leading)

    def is_found(
        self, request: Request, entries: Iterable[Entry], now: float, refreshed: Hit | None = None
    ) -> bool:
        """Whether one of these entries of L2 is what the request looks for: an answer, or one that
        is newer than the hit to be refreshed. Else it is worth waiting for another."""
        after = refreshed.stored_at + _SAME_S if refreshed is not None else float("-inf")
        for entry in entries:
            record = self._record_of(entry)
            if (
                entry.check == request.ask.check
                and entry.stored_at > after
                and not self._inventory.is_void(entry.key, record)
                and (refreshed is not None or self._serves(request, record, now))
            ):
                return True
        return False

    def on_miss(self, request: Request, now: float) -> Decision:
        """The flight that this request had joined failed before its start: decide again."""
        record = self._find(request.ask.key)
        return self._serve(request, record, now) or self._miss(request, record, now)

    def on_overflow(self, request: Request) -> None:
        """The request's flight outgrew its buffer: nobody may join it from its start any more."""
        self._end_flight(request)

    def on_outcome(self, outcome: Outcome, fwd_reason: str, now: float) -> Effects:
        """The one report: books the answer and decides whether it is kept."""
        request = outcome.request
        self._ledger.book_forward(
            request.tenant,
            request.ask.model,
            fwd_reason,
            outcome.usage,
            outcome.service_s,
            is_refresh=outcome.is_refresh,
            warmed=Found(outcome.warmed_tokens, outcome.warmed_s),
        )
        if outcome.joined:
            share = self._ledger.share_of(request.ask.model, outcome.usage, outcome.service_s)
            for follower in outcome.joined:
                account = self._ledger.account(follower.tenant, follower.ask.model, "join", "join")
                account.save(share)
        if outcome.status == 200:
            self._times.learn(request.ask.model, outcome.service_s)
        unwanted = self._why_unwanted(request)
        unstorable = outcome.unstorable or unwanted or self._why_unstorable(request, outcome)
        effects = Drop(unstorable) if unstorable else self._store(request, outcome, now)
        if isinstance(effects, Keep):
            self._counters.stored += not effects.refused
            self._counters.evicted += len(effects.evicted)
        else:
            self._counters.bump(self._counters.dropped, effects.reason)
            if not unwanted:
                self._inventory.note_absent(request.ask.key, effects.reason)
        self._end_flight(request)
        return effects

    def on_stored(self, why_not: str) -> None:
        """What became of an entry's way to L2: empty where it has arrived."""
        self._counters.bump(self._counters.l2, f"put-{why_not}" if why_not else "put")

    def on_failure(
        self, request: Request, reason: str, service_s: float, *, is_refresh: bool = False
    ) -> None:
        """The request's flight ended without an answer. Its engine may have worked all the same:
        the seconds are booked, under this reason; what was paid for nobody says."""
        self._ledger.book_forward(
            request.tenant,
            request.ask.model,
            reason,
            usage=None,
            service_s=service_s,
            is_refresh=is_refresh,
        )
        self._end_flight(request)

    def on_error(self, request: Request, now: float, booked: str = "") -> Hit | None:
        """Its engine gave no answer: an expired one, where such a one may stand in for it.
        `booked` is the reason under which the failure counts as its answer, if it does."""
        record = self._find(request.ask.key)
        if record is None or record.check != request.ask.check or self._why_unwanted(request):
            return None
        if not self._freshness_of(request.namespace).stands_in(record.hit, request.want, now):
            return None
        self._counters.bump(self._counters.stale, "stale-if-error")
        if booked:
            self._ledger.account(request.tenant, request.ask.model, "forward", booked).requests -= 1
        return self._use(record, now)

    def on_refresh(
        self, request: Request, hit: Hit, entries: Iterable[Entry], now: float
    ) -> Forward | None:
        """What L2 had in place of a hit that is to be refreshed: perhaps another process has done
        that. Else the flight to start."""
        for entry in entries:
            self._take_in(request, entry, now)
        record = self._find(hit.key)
        if record is not None and record.hit.stored_at > hit.stored_at + _SAME_S:
            self._end_flight(request)
            return None
        return Forward("stale", "refresh", joinable=True)

    def on_abandoned(self, request: Request) -> None:
        """The request led a look-up that ended without a decision: nobody joins it any more."""
        self._end_flight(request)
        self._refreshed_at.pop(request.ask.key, None)

    def on_tick(self, now: float) -> bool:
        """Once a second: uses are booked, and entries past their life removed. Whether there is
        more to do at once: a tick takes a portion, so that it holds nobody up."""
        has_more = self._inventory.settle(now, _PORTION)
        expired = self._inventory.expire(now, _PORTION)
        self._counters.expired += len(expired)
        return has_more or len(expired) == _PORTION

    def on_invalidate(self, what: Invalidation, number: int) -> None:
        """From now on nothing that was asked for before is kept, or joined. What L1 holds of it
        goes with `sweep`."""
        self._inventory.epochs.add(what, number)
        for key in [key for key, leader in self._leaders.items() if _covers(what, leader)]:
            del self._leaders[key]

    def on_generation(self, generation: str, floor: int) -> None:
        """The count of invalidations is another, or part of it is lost: what was asked for before
        `floor`, or in another generation, isn't kept."""
        self._inventory.epochs.reset(generation, floor)

    def sweep(self, what: Invalidation, *, dry_run: bool) -> Iterator[Removed]:
        """Take what matches out of L1, in portions between which others get their turn."""
        for removed in self._inventory.sweep(what, dry_run=dry_run):
            if not dry_run:
                self._counters.invalidated += len(removed.keys)
            yield removed

    def kept_s(self, entry: Entry) -> float:
        """How long the entry may be of use after its expiry."""
        return self._freshness_of(entry.namespace).kept_s

    def patience_s(self, model: str) -> float:
        """How long to wait for an answer that another process computes: twice what it takes."""
        expected_s = self._times.expected_s(model)
        return _PATIENCE_S if expected_s is None else min(2.0 * expected_s, _LONGEST_PATIENCE_S)

    def keeps_refusal(self, request: Request, status: int) -> bool:
        """Whether an engine's refusal with this status may be kept: not in the place of an answer,
        nor where it may be about a field that isn't part of the key."""
        if status not in NEGATIVE or not request.ask.is_bare:
            return False
        known = self._find(request.ask.key)
        is_answered = known is not None and known.hit.status == 200
        return not is_answered and self._freshness_of(request.namespace).negative_ttl_s > 0

    def _on_special(self, request: Request, now: float) -> Decision:
        """A request that bypasses the cache, or says how it wants it used."""
        ask, want = request.ask, request.want
        bypass = ask.bypass or ("no-store" if want.no_store else "")
        if bypass:
            return _rejected(want) or Forward("bypass", bypass, joinable=False)
        if ask.sampled:
            return self._on_sampled(request, now)
        self._see(ask.key, now)
        record = self._find(ask.key)
        served = self._serve(request, record, now)
        if served is not None:
            return served
        if want.only_if_cached:
            return (
                Look((ask.key,), joinable=False) if self._has_l2 else Reject(504, "only-if-cached")
            )
        return self._miss(request, record, now)

    def _on_sampled(self, request: Request, now: float) -> Decision:
        """Rule 10: sampled requests bypass unless the namespace reuses answers; they never join."""
        ask, want = request.ask, request.want
        variants = self._freshness_of(request.namespace).variants
        if variants == 0:
            if self._sampled_seen.add(ask.key):
                self._counters.sampled_repeats += 1
            return _rejected(want) or Forward("bypass", "bypass-sampled", joinable=False)
        self._see(ask.key, now)
        usable = self._usable_variants(request, variants, now)
        if len(usable) == variants:
            return self._reuse(request, usable[int(self._draw() * variants)], now)
        if want.no_cache:
            return _rejected(want) or Forward("request", "no-cache", joinable=False)
        if self._has_l2:
            missing = set(_variant_keys(ask.key, variants)) - {one.hit.key for one in usable}
            return Look(tuple(sorted(missing)), joinable=False)
        return _rejected(want) or self._forward_sampled(request, now)

    def _usable_variants(self, request: Request, variants: int, now: float) -> list[Record]:
        found = [self._find(key) for key in _variant_keys(request.ask.key, variants)]
        return [one for one in found if one is not None and self._serves(request, one, now)]

    def _forward_sampled(self, request: Request, now: float) -> Hit | Refresh | Forward:
        variants = self._freshness_of(request.namespace).variants
        usable = self._usable_variants(request, variants, now)
        if len(usable) == variants:
            return self._reuse(request, usable[int(self._draw() * variants)], now)
        if usable:
            return Forward("miss", "variant-wanted", joinable=False)
        ask = request.ask
        return self._forward(ask, self._find(ask.key), now, joinable=False)

    def _miss(self, request: Request, record: Record | None, now: float) -> Join | Look | Forward:
        ask = request.ask
        leader = self._leaders.get(ask.key)
        if request.want.no_cache:
            # It asks for an answer computed from now on; others may join that one.
            return Forward("request", "no-cache", joinable=self._lead(request, leader))
        if leader is not None and leader.ask.check == ask.check:
            return Join(leader.id)
        joinable = self._lead(request, leader)
        if self._has_l2:
            return Look((ask.key,), joinable)
        return self._forward(ask, record, now, joinable=joinable)

    def _forward(self, ask: Ask, record: Record | None, now: float, *, joinable: bool) -> Forward:
        """With the reason why the record, if there is one, can't answer."""
        if record is None:
            return Forward("miss", self._inventory.why_absent(ask.key), joinable)
        if record.check != ask.check:
            return Forward("miss", "collision", joinable)
        if now - record.hit.stored_at >= record.hit.ttl_s:
            return Forward("stale", "expired", joinable)
        return Forward("request", "not-fresh-enough", joinable)

    def _lead(self, request: Request, leader: Request | None) -> bool:
        if leader is None:
            self._leaders[request.ask.key] = request
        return leader is None

    def _end_flight(self, request: Request) -> None:
        leader = self._leaders.get(request.ask.key)
        if leader is not None and leader.id == request.id:
            del self._leaders[request.ask.key]

    def _why_unwanted(self, request: Request) -> str:
        """Why this request leaves no trace in the cache, or an empty string."""
        if request.ask.bypass:
            return request.ask.bypass
        if request.want.no_store:
            return "no-store"
        is_bypassing = request.ask.sampled and not self._freshness_of(request.namespace).variants
        return "bypass-sampled" if is_bypassing else ""

    def _why_unstorable(self, request: Request, outcome: Outcome) -> str:
        if outcome.status != 200 and not self.keeps_refusal(request, outcome.status):
            return f"status-{outcome.status}"
        if outcome.size_bytes > self._entry_bytes:
            return "larger-than-entry"
        freshness = self._freshness_of(request.namespace)
        return "ttl-zero" if freshness.ttl_of(request.want, outcome.status) <= 0 else ""

    def _store(self, request: Request, outcome: Outcome, now: float) -> Effects:
        entry = Entry(
            key=self._place(request, now),
            check=request.ask.check,
            tenant=request.tenant,
            namespace=request.namespace,
            model=request.ask.model,
            tags=_tags_of(outcome),
            epoch=outcome.epoch,
            asked_at=outcome.asked_at,
            stored_at=now,
            ttl_s=self._freshness_of(request.namespace).ttl_of(request.want, outcome.status),
            service_s=outcome.service_s,
            usage=outcome.usage,
            size_bytes=outcome.size_bytes,
            answer=outcome.answer,
            status=outcome.status,
        )
        record = self._record_of(entry)
        stored = self._inventory.store(entry.key, record, now)
        if not isinstance(stored, str):
            return Keep(entry, stored)
        if self._has_l2 and stored not in {"invalidated", "superseded"}:
            return Keep(entry, refused=stored)
        return Drop(stored)

    def _record_of(self, entry: Entry) -> Record:
        freshness = self._freshness_of(entry.namespace)
        hit = Hit(
            entry.key,
            entry.key.hex().encode(),
            entry.stored_at,
            entry.ttl_s,
            entry.answer,
            # A refusal is for those only who ask as barely: never plainly told.
            freshness.plain_s(entry.ttl_s, entry.service_s) if entry.status == 200 else 0.0,
            entry.status,
        )
        return Record(
            check=entry.check,
            size_bytes=entry.size_bytes + ENTRY_OVERHEAD_BYTES,
            asked_at=entry.asked_at,
            hit=hit,
            tenant=entry.tenant,
            namespace=entry.namespace,
            model=entry.model,
            tags=entry.tags,
            epoch=entry.epoch,
            account=self._ledger.account(entry.tenant, entry.model, "exact", "exact"),
            share=self._ledger.share_of(entry.model, entry.usage, entry.service_s),
        )

    def _take_in(self, request: Request, entry: Entry, now: float) -> Record | None:
        """An entry of L2 for L1, where it is this request's and isn't void. Also one that L1 has no
        room for can answer once."""
        known = self._find(entry.key)
        if entry.check != request.ask.check:
            self._counters.bump(self._counters.l2, "collision")
            return None
        record = self._record_of(entry)
        if self._inventory.is_void(entry.key, record):
            self._counters.bump(self._counters.l2, "void")
            self._inventory.note_absent(entry.key, "invalidated")
            return None
        if now >= record.hit.expires_at + self._inventory.stale_s:
            return None
        if known is not None and known.hit.stored_at + _SAME_S >= entry.stored_at:
            return known if known.check == request.ask.check else None
        self._inventory.store(entry.key, record, now)
        return record

    def _place(self, request: Request, now: float) -> Key:
        """Where the answer goes: for a sampled request, the first variant that is missing."""
        ask = request.ask
        if not ask.sampled:
            return ask.key
        keys = _variant_keys(ask.key, self._freshness_of(request.namespace).variants)
        oldest = (float("inf"), ask.key)
        for key in keys:
            record = self._find(key)
            if record is None or record.check != ask.check or record.hit.expires_at <= now:
                return key
            oldest = min(oldest, (record.hit.stored_at, key))
        return oldest[1]

    def _serve(self, request: Request, record: Record | None, now: float) -> Hit | Refresh | None:
        """The record as an answer to this request, where it can be one."""
        if record is None or not self._serves(request, record, now):
            return None
        return self._reuse(request, record, now)

    def _reuse(self, request: Request, record: Record, now: float) -> Hit | Refresh:
        return self._tell(request, record, self._use(record, now), now)

    def _tell(self, request: Request, record: Record, hit: Hit, now: float) -> Hit | Refresh:
        """A hit, and whether this is the occasion to ask for a new answer."""
        reason = self._why_refresh(request, record, now)
        is_due = bool(reason) and self._is_refresh_due(request, hit, now)
        if not reason or (reason == "early" and not is_due):
            return hit
        if is_due:
            self._leaders[request.ask.key] = request
            self._refreshed_at.put(request.ask.key, now)
        self._counters.bump(self._counters.stale, reason)
        return Refresh(hit, reason, is_due)

    def _is_refresh_due(self, request: Request, hit: Hit, now: float) -> bool:
        """One at a time; after one that brought nothing not at once another."""
        key = request.ask.key
        if key in self._leaders or request.want.only_if_cached:
            return False
        begun_at = self._refreshed_at[key]
        return begun_at is None or begun_at <= hit.stored_at or now - begun_at >= _RETRY_S

    def _why_refresh(
        self, request: Request, record: Record, now: float
    ) -> Literal["", "early", "stale-while-revalidate"]:
        """Whether this use of a record calls for a new answer."""
        freshness, hit = self._freshness_of(request.namespace), record.hit
        age_s = now - hit.stored_at
        left_s = hit.ttl_s - age_s
        if left_s <= 0:
            is_accepted = -left_s < freshness.accepted_s(request.want)
            return "" if is_accepted else "stale-while-revalidate"
        if age_s < hit.plain_s or hit.status != 200:
            return ""
        service_s = record.share.saved_by_us_ns / NANO
        return "early" if freshness.is_early(left_s, service_s, self._draw()) else ""

    def _serves(self, request: Request, record: Record, now: float) -> bool:
        if record.hit.status != 200 and not request.ask.is_bare:
            return False
        freshness = self._freshness_of(request.namespace)
        return record.check == request.ask.check and freshness.serves(record.hit, request.want, now)

    def _freshness_of(self, namespace: str) -> Freshness:
        return self._namespaces.get(namespace, self._freshness)


def _tags_of(outcome: Outcome) -> tuple[str, ...]:
    """Everybody's who got this answer: each may invalidate it."""
    if not outcome.joined:
        return outcome.request.want.tags
    tags = dict.fromkeys(outcome.request.want.tags)
    for follower in outcome.joined:
        tags.update(dict.fromkeys(follower.want.tags))
    return tuple(tags)[:_MOST_TAGS]


def _covers(what: Invalidation, request: Request) -> bool:
    return what.covers(
        request.ask.key,
        model=request.ask.model,
        namespace=request.namespace,
        tenant=request.tenant,
        tags=request.want.tags,
    )


def _rejected(want: Want) -> Reject | None:
    return Reject(504, "only-if-cached") if want.only_if_cached else None


def _variant_keys(key: Key, variants: int) -> list[Key]:
    return [Key(key[:-1] + bytes([key[-1] ^ variant])) for variant in range(variants)]
