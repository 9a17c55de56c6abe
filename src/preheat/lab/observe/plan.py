"""Which hot prefixes are missing where, and what warming each would cost and save."""

from collections.abc import Sequence
from typing import Final

import msgspec

from preheat.core.warmup.payback import Offer, chance_of_use
from preheat.core.warmup.proof import PROVEN_SHARE
from preheat.lab.observe.fleet import Fleet
from preheat.lab.observe.hot import Prefix

HORIZON_S: Final = 3_600.0
"""Who isn't used within an hour isn't thought to be: nothing forecasts that yet."""


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix at a worker that hasn't all of it. `tokens` are the prefix's, `missing_tokens` those
    that would be computed; what is warmed stays for `hold_s`, as expected."""

    prefix: Prefix
    worker: int
    tokens: int
    missing_tokens: int
    hold_s: float
    offer: Offer


class Found(msgspec.Struct, frozen=True):
    """A hot prefix: which share of it each worker holds (None: nobody knows), and what is missing."""

    prefix: Prefix
    tokens: int
    held: list[float | None]
    missing: list[Missing]


def found(
    fleet: Fleet,
    prefixes: Sequence[Prefix],
    capacities: Sequence[int | None],
    price_now: float,
    now: float,
) -> list[Found]:
    """Of each prefix. `capacities` are what the workers' caches hold, in tokens; `price_now` is what a
    second of an idle server costs of a busy one's."""
    memories = []
    for worker, capacity in enumerate(capacities):
        held_tokens = fleet.held_tokens(worker, fleet.known(worker, now))
        inflow = fleet.accounts[worker].inflow.per_s(now)
        memories.append(_Memory(capacity, held_tokens, inflow))
    return [_found(fleet, one, memories, price_now, now) for one in prefixes]


class _Memory(msgspec.Struct, frozen=True):
    """A worker's: what it can hold and holds, in tokens, and how many a second come in. `capacity` is
    None where nobody says."""

    capacity: int | None
    held: int
    inflow: float

    @property
    def hold_s(self) -> float:
        """How long what comes in now stays."""
        if self.capacity is None or self.inflow <= 0.0:
            return HORIZON_S
        return min(HORIZON_S, self.capacity / self.inflow)

    def is_full(self, tokens: int) -> bool:
        """Whether something must go for so many more."""
        return self.capacity is not None and self.held + tokens > self.capacity


def _found(
    fleet: Fleet,
    prefix: Prefix,
    memories: Sequence[_Memory],
    price_now: float,
    now: float,
) -> Found:
    tokens = max(1, fleet.tokens(prefix.model, prefix.size_bytes))
    held = fleet.held(prefix.blocks, prefix.token_blocks)
    service = fleet.service(prefix.model)
    repeats = fleet.repeats
    reuse = repeats.repeated_tokens / max(1, repeats.input_tokens)
    missing = []
    for worker, share in enumerate(held):
        if share is None or share >= PROVEN_SHARE:
            continue
        there = int(share * tokens)
        memory = memories[worker]
        cost_s = service.prefill_s(tokens - there, there)
        here_per_s = prefix.uses_per_s(now) * prefix.share_at(worker, len(held), now)
        offer = Offer(
            chance=chance_of_use(here_per_s, memory.hold_s),
            saves_s=cost_s,
            costs_s=cost_s,
            price_now=price_now,
            # What goes is worth less than the mean of all that is kept: it is the least recently used.
            room_s=reuse * cost_s if memory.is_full(tokens - there) else 0.0,
        )
        missing.append(
            Missing(
                prefix=prefix,
                worker=worker,
                tokens=tokens,
                missing_tokens=tokens - there,
                hold_s=memory.hold_s,
                offer=offer,
            )
        )
    return Found(prefix, tokens, held, missing)
