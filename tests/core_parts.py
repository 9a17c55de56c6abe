"""Parts of the core as tests want them: keys, requests, and a controller with its books."""

import itertools
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from msgspec import structs

from preheat.core import admission, eviction
from preheat.core.controller import Controller
from preheat.core.freshness import Freshness
from preheat.core.inventory import Inventory, Record
from preheat.core.ledger import Account, Ledger, Price, Share
from preheat.core.stats import Counters
from preheat.core.types import (
    NOTHING_SPECIAL,
    Ask,
    Check,
    Effects,
    Entry,
    Epoch,
    Forward,
    Hit,
    Invalidation,
    Key,
    Outcome,
    Removed,
    Request,
    RequestId,
    Usage,
    Want,
)

PRICES = {"m1": Price.per_million(0.15, 0.075, 0.6)}
USAGE = Usage(input_tokens=1_000, output_tokens=100, cached_tokens=400)

_numbers = itertools.count(1)


def key_of(name: object) -> Key:
    """Distinct names, distinct and evenly distributed keys."""
    return Key(blake2b(repr(name).encode(), digest_size=16).digest())


def check_of(name: object) -> Check:
    return Check(blake2b(repr(name).encode(), digest_size=32).digest())


def ask_of(name: object, **fields: Any) -> Ask:
    return Ask(**{"key": key_of(name), "check": check_of(name), "model": "m1", **fields})


def request_for(
    name: object,
    want: Want = NOTHING_SPECIAL,
    *,
    tenant: str = "local",
    namespace: str = "",
    **ask_fields: Any,
) -> Request:
    """A request of its own id, that asks for what `name` stands for."""
    request_id = RequestId(b"r%d" % next(_numbers))
    return Request(request_id, tenant, namespace, ask_of(name, **ask_fields), want)


def outcome_of(request: Request, at: float, **fields: Any) -> Outcome:
    return Outcome(
        **{
            "request": request,
            "asked_at": at,
            "service_s": 2.5,
            "size_bytes": 500,
            "usage": USAGE,
            **fields,
        }
    )


def hit_of(name: object, stored_at: float = 0.0, expires_at: float = 1_000.0) -> Hit:
    key = key_of(name)
    life_s = expires_at - stored_at
    return Hit(key, key.hex().encode(), stored_at, life_s, None, life_s)


def record_of(
    name: object, *, stored_at: float = 0.0, expires_at: float = 1_000.0, **fields: Any
) -> Record:
    return Record(
        **{
            "check": check_of(name),
            "size_bytes": 1,
            "asked_at": 0.0,
            "hit": hit_of(name, stored_at, expires_at),
            "tenant": "local",
            "namespace": "",
            "model": "m1",
            "tags": (),
            "epoch": Epoch(),
            "account": Account(),
            "share": Share(0, 0, 0, 0, 0, 0, 0, 0),
            **fields,
        }
    )


def sum_of(portions: Iterable[Removed]) -> Removed:
    """All that a sweep removed."""
    keys: tuple[Key, ...] = ()
    size_bytes = 0
    for removed in portions:
        keys += removed.keys
        size_bytes += removed.size_bytes
    return Removed(keys, size_bytes)


def entry_of(
    name: object, *, stored_at: float = 0.0, ttl_s: float = 1_000.0, **fields: Any
) -> Entry:
    """What L2 may have under a name."""
    return Entry(
        **{
            "key": key_of(name),
            "check": check_of(name),
            "tenant": "local",
            "namespace": "",
            "model": "m1",
            "tags": (),
            "epoch": Epoch(),
            "asked_at": stored_at,
            "stored_at": stored_at,
            "ttl_s": ttl_s,
            "service_s": 2.5,
            "usage": USAGE,
            "size_bytes": 500,
            "answer": f"answer {name}",
            **fields,
        }
    )


class Desk:
    """A controller with its books."""

    def __init__(
        self,
        *,
        budget_bytes: int = 1_000_000,
        budget_entries: int = 1_000,
        stale_s: float = 0.0,
        entry_bytes: int = 100_000,
        freshness: Freshness | None = None,
        namespaces: Mapping[str, Freshness] | None = None,
        draw: float = 0.0,
        evict: str = "sieve",
        admit: str = "always",
        prices: Mapping[str, Price] = PRICES,
        has_l2: bool = False,
    ) -> None:
        general = structs.replace(freshness or Freshness(), stale_s=stale_s)
        self._ledger = Ledger(prices)
        self.counters = Counters()
        self.inventory = Inventory(
            eviction.POLICIES[evict](),
            admission.POLICIES[admit](),
            budget_bytes=budget_bytes,
            budget_entries=budget_entries,
        )
        self.drawn = draw
        self.controller = Controller(
            self.inventory,
            self._ledger,
            self.counters,
            freshness=general,
            namespaces={
                name: structs.replace(one, stale_s=stale_s)
                for name, one in (namespaces or {}).items()
            },
            entry_bytes=entry_bytes,
            has_l2=has_l2,
            draw=lambda: self.drawn,
        )

    @property
    def ledger(self) -> Ledger:
        """The books, every use in them."""
        self.inventory.settle(0.0)
        return self._ledger

    def invalidate(self, what: Invalidation, *, dry_run: bool = False) -> Removed:
        """Forget it as the driver does: at once for what is under way, then sweep."""
        if not dry_run:
            self.controller.on_invalidate(what, self.controller.epoch.number + 1)
        return sum_of(self.controller.sweep(what, dry_run=dry_run))

    def forward(self, request: Request, now: float, **outcome: Any) -> Effects:
        """The whole way of a request that an engine answers, to the effects of its answer."""
        decision = self.controller.on_request(request, now)
        assert isinstance(decision, Forward), decision
        outcome.setdefault("epoch", self.controller.epoch)
        return self.controller.on_outcome(outcome_of(request, now, **outcome), decision.reason, now)

    def reason(self, request: Request, now: float) -> str:
        """Why this request isn't a hit; it leads no flight afterwards."""
        decision = self.controller.on_request(request, now)
        assert isinstance(decision, Forward), decision
        self.controller.on_failure(request, "connect", 0.0)
        return decision.reason
