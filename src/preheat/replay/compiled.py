"""The compiled path: LRU and J over streams of keys and over prefixes, as the core decides them.

Needs the extra `replay` (numpy, numba); without it the core itself runs, some hundred times slower,
and the answers are the same: every hit and every victim (tests/unit/test_compiled.py). The first
call compiles for half a minute and keeps the result beside the modules; later processes load it in
about a second.
"""

from collections.abc import Hashable, Sequence
from functools import cached_property
from heapq import heappop, heappush
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from preheat.core.eviction import POLICIES
from preheat.core.hold_leaves import LEAST_REMEMBERED, HoldLeaves
from preheat.core.prefix import LeafLru, PrefixStore

if TYPE_CHECKING:
    from preheat.replay.compiled_prefixes import Stream

Order = Literal["lru", "j"]

REMEDY: Final = "pip install 'preheat[replay]'"


def is_available() -> bool:
    """Whether numpy and numba are there; they aren't imported for that."""
    return find_spec("numba") is not None and find_spec("numpy") is not None


class Run(msgspec.Struct, frozen=True):
    """What a request found (of keys 0 or 1, as bytes; of paths blocks), and who left, oldest first."""

    hits: bytes | list[int]
    victims: list[int]


class Use(msgspec.Struct, frozen=True, gc=False):
    """One request for J: `HoldLeaves` says what its kinds are. Where `ended_at` is None the answer
    is over at once and of kind `began_kind`."""

    began_at: float
    began_kind: int = 0
    ended_at: float | None = None
    ended_kind: int = 0


def key_stream(order: Order, keys: Sequence[int], capacity: int, *, compiled: bool = True) -> Run:
    """Entries of one size; `now` is the request's number. With a numpy array of keys (int64)
    nothing is converted."""
    if not (compiled and is_available()):
        return _key_stream(order, keys, capacity)
    from preheat.replay import compiled_keys  # noqa: PLC0415 - needs the extra

    return Run(*compiled_keys.run(order, keys, capacity))


def _key_stream(order: Order, keys: Sequence[int], capacity: int) -> Run:
    policy = POLICIES[order]()
    held: set[Hashable] = set()
    hits = bytearray()
    victims: list[int] = []
    for now, key in enumerate(keys):
        hits.append(key in held)
        if key in held:
            policy.touch(key, now)
        elif capacity:
            if len(held) == capacity:
                victims.append(policy.victim(now))
                policy.remove(victims[-1])
                held.discard(victims[-1])
            policy.insert(key, 1, now)
            held.add(key)
    return Run(bytes(hits), victims)


class PrefixStream:
    """A stream of prompts, as paths of blocks, to be run again and again."""

    def __init__(self, paths: Sequence[Sequence[int]], uses: Sequence[Use]) -> None:
        if len(paths) != len(uses):
            raise ValueError(f"{len(paths)} paths but {len(uses)} uses")
        self._paths = paths
        self._uses = uses

    def lru(self, capacity: int, *, compiled: bool = True) -> Run:
        """The engine's own order; `now` is the request's number."""
        if compiled and is_available():
            return Run(*self._stream.lru(capacity))
        uses = [Use(number) for number in range(len(self._uses))]
        return _serve(self._paths, uses, PrefixStore(capacity, LeafLru()), None)

    def hold(
        self,
        capacity: int,
        *,
        levels: int = 4,
        remembered: int = LEAST_REMEMBERED,
        compiled: bool = True,
    ) -> Run:
        """J, with so many frequency levels, and so many blocks remembered that aren't here."""
        if compiled and is_available():
            from preheat.replay.compiled_pool import HoldOptions  # noqa: PLC0415 - needs the extra

            options = HoldOptions(levels=levels, remembered=remembered)
            return Run(*self._stream.hold(capacity, options))
        order = HoldLeaves(levels=levels, remembered=remembered)
        return _serve(self._paths, self._uses, PrefixStore(capacity, order), order)

    @cached_property
    def _stream(self) -> "Stream":
        from preheat.replay import compiled_prefixes  # noqa: PLC0415 - needs the extra

        return compiled_prefixes.Stream(self._paths, self._uses)


def _serve(
    paths: Sequence[Sequence[int]],
    uses: Sequence[Use],
    store: PrefixStore,
    order: HoldLeaves | None,
) -> Run:
    """The core itself: requests in their order, each held only while it is taken in. What of a path
    is longer than the pool is never kept."""
    hits: list[int] = []
    victims: list[int] = []
    answers: list[tuple[float, int]] = []
    for number, (path, use) in enumerate(zip(paths, uses, strict=True)):
        while order is not None and answers and answers[0][0] <= use.began_at:
            ended_at, over = heappop(answers)
            order.ended(over, ended_at, uses[over].ended_kind)
        hits.append(store.overlap(path))
        blocks = path[: store.capacity_blocks]
        if not store.take(blocks, 0, use.began_at, use.began_kind):
            raise AssertionError("a path no longer than the pool has room in it")
        if order is not None and use.ended_at is not None:
            order.began()
            heappush(answers, (use.ended_at, number))
        store.release(blocks, 0, use.began_at)
        victims.extend(store.evicted)
        store.evicted.clear()
    return Run(hits, victims)
