"""S3-FIFO: a short queue on trial, a long one for what was used, and a memory of who failed."""

from collections import OrderedDict
from typing import ClassVar, Final, Generic, TypeVar

from preheat.core.types import PLAIN, Traits

K = TypeVar("K")

_MOST_USES: Final = 3
"""The paper counts uses in two bits."""


class S3Fifo(Generic[K]):
    """Yang, Zhang, Qiu, Yue and Vinayak, "FIFO Queues are All You Need for Cache Eviction", SOSP
    2023, algorithm 1.

    New entries go to the small queue. Whoever was used `promote_at` times when its turn comes moves
    on to the main queue; the others leave, and are remembered as ghosts: a ghost that comes back
    goes to the main queue at once. There an entry gets another round for every use, three at most.

    A policy isn't told the capacity. Whenever a victim is asked for the cache is full, so the
    shares are taken of what is held then: `small_share` of the bytes, `ghost_share` of the number
    of entries (the paper: as many ghosts as the main queue has entries). Of what came in while the
    cache filled for the first time the main queue has what is beyond the small one's share, as in the
    authors' simulator: in the paper's own words all of it would be on trial at once.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(
        self, *, small_share: float = 0.1, ghost_share: float = 0.9, promote_at: int = 2
    ) -> None:
        self._small_share = small_share
        self._ghost_share = ghost_share
        self._promote_at = promote_at
        self._small: OrderedDict[K, int] = OrderedDict()  # how often used
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        self._size_bytes: dict[K, int] = {}
        self._small_bytes = 0
        self._main_bytes = 0
        self._named: K | None = None
        self._is_settled = False  # nothing changed since `_named` was
        self._is_filling = True

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._is_settled = False
        self._size_bytes[key] = size_bytes
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
            self._main_bytes += size_bytes
        else:
            self._small[key] = 0
            self._small_bytes += size_bytes
        self._keep_ghosts(int(len(self._size_bytes) * self._ghost_share))

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        self._is_settled = False
        queue = self._small if key in self._small else self._main
        uses = queue[key]
        if uses < _MOST_USES:
            queue[key] = uses + 1

    def remove(self, key: K) -> None:
        self._is_settled = False
        size_bytes = self._size_bytes.pop(key)
        if key not in self._small:
            del self._main[key]
            self._main_bytes -= size_bytes
        else:
            del self._small[key]
            self._small_bytes -= size_bytes
            if key == self._named:
                self._ghosts[key] = None
                self._keep_ghosts(1 + int((1 + len(self._size_bytes)) * self._ghost_share))
        if key == self._named:
            self._named = None

    def victim(self, now: float) -> K:
        if self._is_settled and self._named is not None:
            return self._named  # those who moved on while it was looked for change the shares
        if self._is_filling and self._size_bytes:
            self._is_filling = False
            self._fill_main()
        while True:
            key = self._failed() if self._small_is_due() else self._round()
            if key is not None:
                self._named, self._is_settled = key, True
                return key

    def __len__(self) -> int:
        return len(self._size_bytes)

    def _fill_main(self) -> None:
        """All but the first comers, up to the small queue's share, are past their trial."""
        most_bytes = int(self._small_bytes * self._small_share)
        first_bytes = 0
        for key in list(self._small):
            if first_bytes >= most_bytes:
                self._main[key] = self._small.pop(key)
                self._main_bytes += self._size_bytes[key]
            else:
                first_bytes += self._size_bytes[key]
        self._small_bytes = first_bytes

    def _small_is_due(self) -> bool:
        held_bytes = self._small_bytes + self._main_bytes
        has_share = self._small_bytes >= int(held_bytes * self._small_share)
        return bool(self._small) and (has_share or not self._main)

    def _failed(self) -> K | None:
        """The first of the small queue that wasn't used; those before it move on."""
        while self._small:
            key, uses = next(iter(self._small.items()))
            if uses < self._promote_at:
                return key
            del self._small[key]
            self._main[key] = 0
            self._small_bytes -= self._size_bytes[key]
            self._main_bytes += self._size_bytes[key]
        return None

    def _round(self) -> K | None:
        """The first of the main queue, unless it has rounds left: then it goes to the end."""
        if not self._main:
            raise LookupError("no entry to evict")
        key, uses = next(iter(self._main.items()))
        if uses == 0:
            return key
        self._main[key] = uses - 1
        self._main.move_to_end(key)
        return None

    def _keep_ghosts(self, most: int) -> None:
        while len(self._ghosts) > most:
            self._ghosts.popitem(last=False)
