"""What is under way for requests, by the request that leads it."""

import asyncio
from typing import Protocol

from preheat.core.types import Request, RequestId
from preheat.gateway.listeners import Listener


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
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def launch(self, venture: Venture) -> None:
        """Start it."""
        self._by_leader[venture.request.id] = venture
        task = asyncio.get_running_loop().create_task(venture.run())
        venture.task = task
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._forget(venture, task))

    def find(self, leader: RequestId) -> Venture | None:
        """What this request leads, while it can be joined."""
        return self._by_leader.get(leader)

    def close(self, venture: Venture) -> None:
        """Nobody joins it any more."""
        if self._by_leader.get(venture.request.id) is venture:
            del self._by_leader[venture.request.id]

    def _forget(self, venture: Venture, task: asyncio.Task[None]) -> None:
        venture.task = None  # else the two would hold each other until the next full collection
        self._tasks.discard(task)
        self.close(venture)

    async def aclose(self) -> None:
        """End them all."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
