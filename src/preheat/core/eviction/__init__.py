"""The order in which entries leave. A policy keeps order and choice; the inventory keeps the books.

To add one: a new file here and one line in `POLICIES` (docs/adding-a-policy.md).
"""

from collections.abc import Callable, Mapping
from typing import ClassVar, Final, Protocol

from preheat.core.eviction.lru import Lru
from preheat.core.eviction.sieve import Sieve
from preheat.core.types import Key


class EvictionPolicy(Protocol):
    """Which entry leaves next. Every key is inserted once before it is touched or removed.

    Where `keeps_order` is false, touching an entry twice is as good as once and the order of
    touches doesn't matter: then they may come late, but before the next victim is asked for.
    """

    keeps_order: ClassVar[bool]

    def insert(self, key: Key, size_bytes: int, now: float) -> None:
        """A new entry came in."""

    def touch(self, key: Key, now: float) -> None:
        """The entry was used."""

    def remove(self, key: Key) -> None:
        """The entry is gone: evicted, expired or invalidated."""

    def victim(self, now: float) -> Key:
        """Who leaves next; asked again without a change in between, the answer is the same.

        May move the policy's own pointers. Raises LookupError when it holds nothing.
        """

    def __len__(self) -> int:
        """How many entries it holds."""


POLICIES: Final[Mapping[str, Callable[..., EvictionPolicy]]] = {
    "lru": Lru,
    "sieve": Sieve,
}
