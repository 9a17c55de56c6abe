"""Requests under way in a server's slots, and who waits for the prefix that one of them computes."""

import asyncio
from collections.abc import Sequence
from math import inf
from typing import Literal

import msgspec

from preheat.core.slot_desk import alike
from preheat.core.slot_ways import Way


class Wanted(msgspec.Struct, frozen=True):
    """A request that wants a slot; `tokens` is about what its prompt has, `expected_s` how long it will
    take in all once it has one (inf: nobody waits for it), `queue_s` what the server computes before it."""

    tenant: str
    session: str
    blocks: Sequence[int]
    tokens: int
    expected_s: float = inf
    queue_s: float = 0.0


class Seated(msgspec.Struct, frozen=True):
    """The slot to name in the request (`id_slot`), and how it came to what it has: `hot` it was there
    still."""

    wanted: Wanted
    slot: int
    way: Way | Literal["hot"]
    found_tokens: int
    life: int
    erasures: int = 0


class Leader(msgspec.Struct, eq=False):
    """One under way. `shared_blocks` is what all its followers have in common with it."""

    wanted: Wanted
    ends_at: float
    shared_blocks: int
    followers: list[asyncio.Future[None]] = []

    def release(self) -> None:
        """It has ended: they go on."""
        for one in self.followers:
            if not one.done():
                one.set_result(None)


class Leaders:
    """By slot. A busy slot shares nothing, so a follower waits or computes the same again."""

    def __init__(self) -> None:
        self._all: dict[int, Leader] = {}

    def began(self, slot: int, wanted: Wanted, now: float) -> None:
        """It runs from now on."""
        self._all[slot] = Leader(wanted, now + wanted.expected_s, len(wanted.blocks))

    def best(self, wanted: Wanted) -> tuple[Leader, int] | None:
        """Who will leave most of this prompt, and how many blocks; of several the one that ends
        first."""
        found = [
            (alike(one.wanted.blocks, wanted.blocks), -one.ends_at, slot)
            for slot, one in self._all.items()
            if one.wanted.tenant == wanted.tenant
        ]
        shared, _, slot = max(found, default=(0, 0.0, 0))
        return (self._all[slot], shared) if shared else None

    def join(self, leader: Leader, shared_blocks: int) -> asyncio.Future[None]:
        """Wait for its end."""
        follower: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leader.followers.append(follower)
        leader.shared_blocks = min(leader.shared_blocks, shared_blocks)
        return follower

    def ended(self, slot: int) -> Leader | None:
        """It runs no more; its followers wait until they are released."""
        return self._all.pop(slot, None)

    def clear(self) -> None:
        """The server was restarted: nobody leaves anything."""
        for leader in self._all.values():
            leader.release()
        self._all.clear()
