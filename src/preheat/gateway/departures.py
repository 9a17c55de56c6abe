"""What is under way for requests, by the request that leads it."""

import asyncio
from typing import Final, Protocol

from preheat.core.types import Request, RequestId
from preheat.gateway.listeners import Listener

_MOST_IDLE: Final = 256


class Venture(Protocol):
    """A look-up or a flight: a task that equal requests join."""

    request: Request
    task: asyncio.Task[None] | None

    def add(self, listener: Listener) -> None:
        """Wait for what comes of it."""

    async def run(self) -> None:
        """See it through."""


class Departures:
    """All of this process; the owner of their tasks."""

    def __init__(self) -> None:
        self._by_leader: dict[RequestId, Venture] = {}
        self._hands: set[_Hand] = set()
        self._idle: list[_Hand] = []
        self.is_closing = False

    def __len__(self) -> int:
        return len(self._hands) - len(self._idle)

    def launch(self, venture: Venture) -> None:
        """Start it."""
        self._by_leader[venture.request.id] = venture
        if self._idle:
            self._idle.pop().take(venture)
        else:
            self._hands.add(_Hand(self, venture))

    def find(self, leader: RequestId) -> Venture | None:
        """What this request leads, while it can be joined."""
        return self._by_leader.get(leader)

    def close(self, venture: Venture) -> None:
        """Nobody joins it any more."""
        if self._by_leader.get(venture.request.id) is venture:
            del self._by_leader[venture.request.id]

    def rests(self, hand: "_Hand") -> bool:
        """It has nothing to do; whether it is kept for what comes next."""
        is_kept = len(self._idle) < _MOST_IDLE and not self.is_closing
        if is_kept:
            self._idle.append(hand)
        return is_kept

    def gone(self, hand: "_Hand") -> None:
        """It has ended, perhaps before it began."""
        self._hands.discard(hand)
        if hand in self._idle:
            self._idle.remove(hand)
        hand.let_go()

    async def aclose(self) -> None:
        """End them all."""
        self.is_closing = True
        tasks = [hand.task for hand in self._hands]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Hand:
    """A task that sees one venture through after the other: making a task for each costs more than
    most of what it does."""

    def __init__(self, departures: Departures, venture: Venture) -> None:
        self._departures = departures
        self._venture = venture
        self._called: asyncio.Future[None] | None = None
        self.task = asyncio.get_running_loop().create_task(self._live())
        self.task.add_done_callback(lambda _: departures.gone(self))
        venture.task = self.task

    def take(self, venture: Venture) -> None:
        self._venture = venture
        venture.task = self.task
        assert self._called is not None, "it rests"
        self._called.set_result(None)

    def let_go(self) -> None:
        """Its venture is over."""
        self._departures.close(self._venture)
        self._venture.task = None

    async def _live(self) -> None:
        while True:
            await self._see_through()
            self._called = asyncio.get_running_loop().create_future()
            if not self._departures.rests(self):
                return

    async def _see_through(self) -> None:
        """The venture, to its end or to its cancelling, of which nothing is left for the next one."""
        try:
            if self._called is not None:
                await self._called
            await self._venture.run()
        except asyncio.CancelledError:
            if self._departures.is_closing:
                raise
            self.task.uncancel()
        finally:
            self.let_go()
        while self.task.cancelling():  # it came when the venture was ending by itself
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if self._departures.is_closing:
                    raise
            self.task.uncancel()
