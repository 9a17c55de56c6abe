"""A stream of keys against one policy: the plainest replay there is."""

from collections.abc import Hashable, Sequence
from itertools import compress, repeat
from typing import TypeVar

import msgspec

from preheat.core.eviction import EvictionPolicy
from preheat.core.types import Traits

K = TypeVar("K", bound=Hashable)


class Result(msgspec.Struct, frozen=True):
    """What a cache had of what was asked for. A ratio of nothing is 0."""

    requests: int
    hits: int
    asked_bytes: int
    hit_bytes: int
    asked_s: float
    saved_s: float

    @property
    def object_hit_ratio(self) -> float:
        """Hits by number of requests."""
        return self.hits / self.requests if self.requests else 0.0

    @property
    def byte_hit_ratio(self) -> float:
        """Hits by size."""
        return self.hit_bytes / self.asked_bytes if self.asked_bytes else 0.0

    @property
    def second_hit_ratio(self) -> float:
        """Hits by the seconds they save."""
        return self.saved_s / self.asked_s if self.asked_s else 0.0


def outcomes(
    policy: EvictionPolicy[K],
    keys: Sequence[K],
    sizes: Sequence[int] | None,
    costs: Sequence[float] | None,
    capacity_bytes: int,
) -> bytearray:
    """One byte a request: whether it was a hit.

    `now` is the request's number. Without `sizes` all have one byte, without `costs` a hit saves one
    second. What is larger than the cache is never held. On a miss victims leave until the new one
    fits, and then it comes in, whatever it is worth.
    """
    found = bytearray(len(keys))
    held: dict[K, int] = {}
    held_bytes = 0
    touch, victim, remove, insert = policy.touch, policy.victim, policy.remove, policy.insert
    each = repeat(1) if sizes is None else sizes
    traits = repeat(None) if costs is None else map(Traits, costs)
    for now, (key, size_bytes, trait) in enumerate(zip(keys, each, traits)):  # noqa: B905 (repeat has no end)
        if key in held:
            found[now] = 1
            touch(key, now, trait)
            continue
        if size_bytes > capacity_bytes:
            continue
        while held_bytes + size_bytes > capacity_bytes:
            gone = victim(now)
            remove(gone)
            held_bytes -= held.pop(gone)
        if trait is None:
            insert(key, size_bytes, now)
        else:
            insert(key, size_bytes, now, trait)
        held[key] = size_bytes
        held_bytes += size_bytes
    return found


def hits(
    policy: EvictionPolicy[K],
    keys: Sequence[K],
    sizes: Sequence[int] | None,
    costs: Sequence[float] | None,
    capacity_bytes: int,
) -> Result:
    """What `outcomes` comes to, by number, by bytes and by seconds."""
    found = outcomes(policy, keys, sizes, costs, capacity_bytes)
    number = sum(found)
    return Result(
        requests=len(keys),
        hits=number,
        asked_bytes=len(keys) if sizes is None else sum(sizes),
        hit_bytes=number if sizes is None else sum(compress(sizes, found)),
        asked_s=float(len(keys)) if costs is None else sum(costs),
        saved_s=float(number) if costs is None else sum(compress(costs, found)),
    )
