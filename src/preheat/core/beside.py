"""What others would have done with the same requests: round robin, and a second rule."""

from collections.abc import Sequence
from typing import Final

from preheat.core.index import PrefixIndex, Stay
from preheat.core.placing import Candidate, Placing
from preheat.core.routing import RoutingPolicy

_UNDER_WAY: Final = 4_096
"""Requests of the ghost fleet whose ends are awaited; of more the oldest are thought to have ended."""


class Ghost:
    """The same requests on as many workers in turn, each with the engine's own cache: what would have
    been cached without us. Only what goes beyond that was saved by routing."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._turn = 0
        self._stays: dict[int, Stay] = {}

    def sent(self, number: int, blocks: Sequence[int], allowed: Sequence[int], now: float) -> int:
        """Request `number` goes to the next worker; how many leading blocks it finds there."""
        self._turn += 1
        worker = allowed[self._turn % len(allowed)]
        stay = self._index.sent(worker, blocks, now)
        self._stays[number] = stay
        if len(self._stays) > _UNDER_WAY:
            self.ended(next(iter(self._stays)), now)
        return stay.hoped

    def ended(self, number: int, now: float) -> None:
        """The request is over, well or not."""
        stay = self._stays.pop(number, None)
        if stay is not None:
            self._index.ended(stay, now, None)

    def resized(self, worker: int, capacity_blocks: int, now: float) -> None:
        """What the worker says it holds."""
        self._index.resized(worker, capacity_blocks, now)

    def has_slots(self, worker: int, slots: int) -> None:
        """The worker is a llama.cpp server with so many."""
        self._index.has_slots(worker, slots)

    def cleared(self, worker: int) -> None:
        """The worker was restarted."""
        self._index.cleared(worker)

    def left(self, worker: int) -> None:
        """The worker is no more."""
        self._index.left(worker)


class Shadow:
    """A second rule that is asked the same and not followed.

    It learns from its own choices only as far as they are ours, so a rule that builds on what it
    chose before shows what it would do next, not where it would have got by itself.
    """

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy

    def compare(
        self, placing: Placing, candidates: Sequence[Candidate], chosen: Candidate, now: float
    ) -> tuple[bool, float]:
        """Whether it would have chosen the same; how much sooner our choice's first token is expected
        than its own's."""
        other = candidates[self._policy.choose(placing, candidates, now)]
        return other is chosen, _expected_s(other) - _expected_s(chosen)

    def finished(self, placing: Placing, worker: int, now: float) -> None:
        """The request has ended, where we had sent it."""
        self._policy.finished(placing, worker, now)


def _expected_s(one: Candidate) -> float:
    return one.queue_s + one.load_s + one.miss_s
