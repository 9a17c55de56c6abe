"""Parts of the core as tests want them: keys, requests, and a controller with its books."""

import itertools
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from preheat.core import admission, eviction
from preheat.core.controller import Controller, Freshness
from preheat.core.inventory import Inventory, Record
from preheat.core.ledger import Account, Ledger, Price, Share
from preheat.core.stats import Counters
from preheat.core.types import (
    NOTHING_SPECIAL,
    Ask,
    Check,
    Effects,
    Forward,
    Hit,
    Key,
    Outcome,
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
    return Hit(key, key.hex().encode(), stored_at, expires_at - stored_at, None)


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
            "account": Account(),
            "share": Share(0, 0, 0, 0, 0, 0, 0, 0),
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
    ) -> None:
        self._ledger = Ledger(prices)
        self.counters = Counters()
        self.inventory = Inventory(
            eviction.POLICIES[evict](),
            admission.POLICIES[admit](),
            budget_bytes=budget_bytes,
            budget_entries=budget_entries,
            stale_s=stale_s,
        )
        self.drawn = draw
        self.controller = Controller(
            self.inventory,
            self._ledger,
            self.counters,
            freshness=freshness or Freshness(),
            namespaces=namespaces or {},
            entry_bytes=entry_bytes,
            draw=lambda: self.drawn,
        )

    @property
    def ledger(self) -> Ledger:
        """The books, every use in them."""
        self.inventory.settle(0.0)
        return self._ledger

    def forward(self, request: Request, now: float, **outcome: Any) -> Effects:
        """The whole way of a request that an engine answers, to the effects of its answer."""
        decision = self.controller.on_request(request, now)
        assert isinstance(decision, Forward), decision
        return self.controller.on_outcome(outcome_of(request, now, **outcome), decision.reason, now)

    def reason(self, request: Request, now: float) -> str:
        """Why this request isn't a hit; it leads no flight afterwards."""
        decision = self.controller.on_request(request, now)
        assert isinstance(decision, Forward), decision
        self.controller.on_failure(request, "connect", 0.0)
        return decision.reason
