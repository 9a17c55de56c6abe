"""The whole decision loop of a request: events and the time in, decisions and effects out."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from preheat.core.inventory import ENTRY_OVERHEAD_BYTES, Inventory, Record
from preheat.core.ledger import Ledger
from preheat.core.sketch import RotatingBloom
from preheat.core.stats import Counters
from preheat.core.types import (
    NOTHING_SPECIAL,
    Ask,
    Decision,
    Drop,
    Effects,
    Forward,
    Hit,
    Invalidation,
    Join,
    Keep,
    Key,
    Outcome,
    Reject,
    Removed,
    Request,
    Want,
)

MAX_VARIANTS: Final = 64
_MOST_TAGS: Final = 64
_PORTION: Final = 512


class Freshness(msgspec.Struct, frozen=True):
    """How long answers live, and whether sampled ones may be reused, in one namespace.

    `variants`: 0, sampled requests bypass the cache; 1, one answer is reused; k, k different
    answers are kept and one is drawn.
    """

    ttl_s: float = 3600.0
    max_ttl_s: float = 86_400.0
    variants: int = 0


class Controller:
    """The only object the drivers know: what to do with a request, and with its answer.

    Hot and synchronous: one call for a hit; `on_request` and `on_outcome` for a forwarded
    request. It looks into no body and knows no engines.
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
        draw: Callable[[], float],
    ) -> None:
        self._inventory = inventory
        # Asked for every request, so without a frame of their own in between:
        self._find, self._see = inventory.find, inventory.see
        self._use = inventory.use
        self._ledger = ledger
        self._counters = counters
        self._freshness = freshness
        self._namespaces = namespaces
        self._entry_bytes = entry_bytes
        self._draw = draw
        self._leaders: dict[Key, Request] = {}
        self._sampled_seen = RotatingBloom()

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
            if now - hit.stored_at < hit.ttl_s:
                return self._use(record, now)
        return self._miss(request, record, now)

    def on_miss(self, request: Request, now: float) -> Hit | Join | Forward:
        """The flight that this request had joined failed before its start: decide again."""
        record = self._find(request.ask.key)
        if (
            record is not None
            and record.check == request.ask.check
            and self._satisfies(record, request.want, now)
        ):
            return self._use(record, now)
        return self._miss(request, record, now)

    def on_overflow(self, request: Request) -> None:
        """The request's flight outgrew its buffer: nobody may join it from its start any more."""
        self._end_flight(request)

    def on_outcome(self, outcome: Outcome, fwd_reason: str, now: float) -> Effects:
        """The one report: books the answer and decides whether it is kept."""
        request = outcome.request
        self._ledger.book_forward(
            request.tenant, request.ask.model, fwd_reason, outcome.usage, outcome.service_s
        )
        if outcome.joined:
            share = self._ledger.share_of(request.ask.model, outcome.usage, outcome.service_s)
            for follower in outcome.joined:
                account = self._ledger.account(follower.tenant, follower.ask.model, "join", "join")
                account.save(share)
        unwanted = self._why_unwanted(request)
        unstorable = outcome.unstorable or unwanted or self._why_unstorable(request, outcome)
        effects = Drop(unstorable) if unstorable else self._store(request, outcome, now)
        if isinstance(effects, Keep):
            self._counters.stored += 1
            self._counters.evicted += len(effects.evicted)
        else:
            self._counters.bump(self._counters.dropped, effects.reason)
            if not unwanted:
                self._inventory.note_absent(request.ask.key, effects.reason)
        self._end_flight(request)
        return effects

    def on_failure(self, request: Request, reason: str, service_s: float) -> None:
        """The request's flight ended without an answer. Its engine may have worked all the same:
        the seconds are booked, under this reason; what was paid for nobody says."""
        self._ledger.book_forward(
            request.tenant, request.ask.model, reason, usage=None, service_s=service_s
        )
        self._end_flight(request)

    def on_tick(self, now: float) -> bool:
        """Once a second: uses are booked, and entries past their life removed. Whether there is
        more to do at once: a tick takes a portion, so that it holds nobody up."""
        has_more = self._inventory.settle(now, _PORTION)
        expired = self._inventory.expire(now, _PORTION)
        self._counters.expired += len(expired)
        return has_more or len(expired) == _PORTION

    def on_invalidate(self, what: Invalidation, now: float, *, dry_run: bool) -> Removed:
        """Forget entries, and what is being computed for them. A dry run only counts."""
        removed = self._inventory.invalidate(what, now, dry_run=dry_run)
        if not dry_run:
            self._counters.invalidated += len(removed.keys)
            # Whoever asks from now on asks for an answer from now on, and joins nothing older.
            for key in [key for key, leader in self._leaders.items() if _covers(what, leader)]:
                del self._leaders[key]
        return removed

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
        if record is not None and record.check == ask.check and self._satisfies(record, want, now):
            return self._use(record, now)
        return _rejected(want) or self._miss(request, record, now)

    def _on_sampled(self, request: Request, now: float) -> Decision:
        """Rule 10: sampled requests bypass unless the namespace reuses answers; they never join."""
        ask, want = request.ask, request.want
        variants = self._freshness_of(request.namespace).variants
        if variants == 0:
            if self._sampled_seen.add(ask.key):
                self._counters.sampled_repeats += 1
            return _rejected(want) or Forward("bypass", "bypass-sampled", joinable=False)
        self._see(ask.key, now)
        usable = []
        for key in _variant_keys(ask.key, variants):
            record = self._find(key)
            if (
                record is not None
                and record.check == ask.check
                and self._satisfies(record, want, now)
            ):
                usable.append((key, record))
        if len(usable) == variants:
            key, record = usable[int(self._draw() * variants)]
            return self._use(record, now)
        rejected = _rejected(want)
        if rejected is not None:
            return rejected
        if want.no_cache:
            return Forward("request", "no-cache", joinable=False)
        if usable:
            return Forward("miss", "variant-wanted", joinable=False)
        return self._forward(ask, self._find(ask.key), now, joinable=False)

    def _miss(self, request: Request, record: Record | None, now: float) -> Join | Forward:
        ask = request.ask
        leader = self._leaders.get(ask.key)
        if request.want.no_cache:
            # It asks for an answer computed from now on; others may join that one.
            return Forward("request", "no-cache", joinable=self._lead(request, leader))
        if leader is not None and leader.ask.check == ask.check:
            return Join(leader.id)
        return self._forward(ask, record, now, joinable=self._lead(request, leader))

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
        if outcome.size_bytes > self._entry_bytes:
            return "larger-than-entry"
        return "ttl-zero" if self._ttl_s(request) <= 0 else ""

    def _store(self, request: Request, outcome: Outcome, now: float) -> Effects:
        key = self._place(request, now)
        tenant, model = request.tenant, request.ask.model
        record = Record(
            check=request.ask.check,
            size_bytes=outcome.size_bytes + ENTRY_OVERHEAD_BYTES,
            asked_at=outcome.asked_at,
            hit=Hit(key, key.hex().encode(), now, self._ttl_s(request), outcome.answer),
            tenant=tenant,
            namespace=request.namespace,
            model=model,
            tags=_tags_of(outcome),
            account=self._ledger.account(tenant, model, "exact", "exact"),
            share=self._ledger.share_of(model, outcome.usage, outcome.service_s),
        )
        stored = self._inventory.store(key, record, outcome.asked_at, now)
        if isinstance(stored, str):
            return Drop(stored)
        return Keep(key, stored)

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

    def _satisfies(self, record: Record, want: Want, now: float) -> bool:
        """RFC 9111 sections 4.2 and 5.2.1: is this entry fresh enough for what was asked?"""
        if want.no_cache or now - record.hit.stored_at > want.max_age_s:
            return False
        ttl_s = record.hit.expires_at - now
        if ttl_s > 0:
            return ttl_s >= want.min_fresh_s
        stale_s = min(want.max_stale_s, self._inventory.stale_s)
        return -ttl_s < stale_s and want.min_fresh_s == 0.0

    def _freshness_of(self, namespace: str) -> Freshness:
        return self._namespaces.get(namespace, self._freshness)

    def _ttl_s(self, request: Request) -> float:
        freshness = self._freshness_of(request.namespace)
        wanted_s = request.want.ttl_s
        return freshness.ttl_s if wanted_s is None else min(wanted_s, freshness.max_ttl_s)


def _tags_of(outcome: Outcome) -> tuple[str, ...]:
    """Everybody's who got this answer: each may invalidate it."""
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
