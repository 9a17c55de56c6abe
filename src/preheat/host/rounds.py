"""Work that many want at once, done once for all of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Rounds(Generic[T]):
    """One round of the work at a time. Who asks during one shares the next with all others who do:
    what a round finds is never older than the question."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """What a round gives that begins after this call; raises what it raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._round(self._running), name="round")
        return await asyncio.shield(self._next)

    async def _round(self, before: "asyncio.Task[T] | None") -> T:
        if before is not None:
            await asyncio.wait({before})
        self._running, self._next = self._next, None
        return await self._work()
