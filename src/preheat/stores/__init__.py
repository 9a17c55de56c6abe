"""L2: values that outlive a process, and what processes that share them tell each other.

To add one: a new file here and one line in `STORES`. Values are "module:class", imported when
chosen. A store knows bytes by key and nothing of what is in them. All times here are wall-clock
seconds (`time.time()`), since they mean something to other processes.

Every method that may wait raises `StoreError`, ends within a bounded time, and may be called by
many tasks at once. `tests/conformance/test_stores.py` runs over every entry by itself.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from preheat.core.types import Epoch, Invalidation, Key


class Size(msgspec.Struct, frozen=True):
    """What a store holds; `budget_bytes` is 0 where the store has none of its own."""

    size_bytes: int
    entries: int
    budget_bytes: int = 0


class News(msgspec.Struct, frozen=True):
    """Invalidations since some epoch, with their numbers, oldest first, and the epoch after them.

    `is_all`: the reader's epoch was of another generation or fell out of the record, so this is
    everything that there still is. `floor` is the number of the last one that isn't there any more:
    what was asked for at a lower one may be void without anyone knowing.
    """

    epoch: Epoch
    invalidations: tuple[tuple[int, Invalidation], ...] = ()
    is_all: bool = False
    floor: int = 0


class Store(Protocol):
    """Values by key, and a board for leases and invalidations, shared between processes."""

    is_immediate: bool
    """Whether `get_now` answers without waiting (from memory that is mapped)."""

    is_shared: bool
    """Whether processes of other hosts use it too."""

    torn: int
    """How many values weren't what had been put, and were answered as if they weren't there."""

    async def start(self) -> None:
        """Open it. An unreachable server isn't an error here; wrong settings are a ConfigError."""

    def get_now(self, keys: Sequence[Key]) -> list[bytes | None]:
        """The values there are, where `is_immediate`. Expired ones may still be among them."""

    async def get(self, keys: Sequence[Key]) -> list[bytes | None]:
        """The values there are. Expired ones may still be among them."""

    async def put(self, key: Key, value: bytes, expires_at: float) -> None:
        """Keep it; returns when every process can read it. The store may forget it at any time,
        and does so after `expires_at`."""

    async def put_many(self, items: Sequence[tuple[Key, bytes, float]]) -> list[str]:
        """`put` of many at the price of few: for each (key, value, expires_at) the kind of error
        for which it isn't kept, or an empty string. Raises where that is the same for all."""

    async def delete(self, keys: Sequence[Key]) -> None:
        """Forget them; keys that aren't there are no error."""

    async def size(self) -> Size:
        """How full it is."""

    # The board.

    async def take(self, key: Key, lease_s: float) -> bool:
        """Whether this process now computes the answer for the key: False while another does. The
        lease ends after `lease_s` unless renewed, and soon after its process has died where that
        can be known."""

    async def renew(self, keys: Sequence[Key], lease_s: float) -> None:
        """Keep the leases: this process is still at it."""

    async def release(self, keys: Sequence[Key]) -> None:
        """Others may compute them now; other holders' leases stay."""

    async def publish(self, what: Invalidation) -> Epoch:
        """Tell every process that this is void; the epoch that begins with it."""

    async def news(self, since: Epoch) -> News:
        """What was published since then."""

    async def aclose(self) -> None:
        """Let what was put reach the store, for at most a second; then close it."""


STORES: Final[Mapping[str, str]] = {
    "lmdb": "preheat.stores.lmdb:Lmdb",
    "redis": "preheat.stores.redis:Redis",
}
