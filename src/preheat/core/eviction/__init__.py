"""The order in which entries leave. A policy keeps order and choice; the inventory keeps the books.

To add one: a new file here and one line in `POLICIES` (docs/adding-a-policy.md).
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Protocol, TypeVar

from preheat.core.eviction.gdsf import Gdsf
from preheat.core.eviction.hold_value import HoldValue
from preheat.core.eviction.lecar import LeCar
from preheat.core.eviction.lfu import Lfu
from preheat.core.eviction.lfu_da import LfuDa
from preheat.core.eviction.lfu_plus import LfuPlus
from preheat.core.eviction.lfu_plus_as_written import LfuPlusAsWritten
from preheat.core.eviction.lhd import Lhd
from preheat.core.eviction.lru import Lru
from preheat.core.eviction.s3fifo import S3Fifo
from preheat.core.eviction.semantic_lru import SemanticLru
from preheat.core.eviction.semantic_lru_as_written import SemanticLruAsWritten
from preheat.core.eviction.sieve import Sieve
from preheat.core.eviction.t_lru import TLru
from preheat.core.eviction.wtinylfu import WTinyLfu
from preheat.core.types import PLAIN, Traits

K = TypeVar("K")


class EvictionPolicy(Protocol[K]):
    """Which entry leaves next. Every key is inserted once before it is touched or removed.

    Keys are whatever hashes: names of stored answers in the gateway, numbers of KV blocks or of a
    trace's objects in a replay.

    Where `keeps_order` is false, touching an entry twice is as good as once and the order of
    touches doesn't matter: then they may come late, but before the next victim is asked for.
    """

    keeps_order: ClassVar[bool]

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        """A new entry came in."""

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        """The entry was used; its traits may be others from now on."""

    def remove(self, key: K) -> None:
        """The entry is gone: evicted, expired or invalidated."""

    def victim(self, now: float) -> K:
        """Who leaves next; asked again without a change in between, the answer is the same.

        May move the policy's own pointers. Raises LookupError when it holds nothing.
        """

    def __len__(self) -> int:
        """How many entries it holds."""


POLICIES: Final[Mapping[str, Callable[..., EvictionPolicy[Any]]]] = {
    "lru": Lru,
    "lfu": Lfu,
    "lfu_da": LfuDa,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "wtinylfu": WTinyLfu,
    "gdsf": Gdsf,
    "lhd": Lhd,
    "lecar": LeCar,
    "t_lru": TLru,
    "j": HoldValue,
    "lfu_plus": LfuPlus,
    "lfu_plus_as_written": LfuPlusAsWritten,
    "semantic_lru": SemanticLru,
    "semantic_lru_as_written": SemanticLruAsWritten,
}
