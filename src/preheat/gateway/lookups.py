"""A look into L2 that takes its time, and the requests that wait for what it finds.

Where other processes share L2, it also waits for its turn: of all processes that want the same
answer one computes it, under a lease; the others come back for it until it is there, the lease is
free again, or their patience is at its end.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from preheat.core.types import Entry, Hit, Key, Look, Request
from preheat.gateway import heads
from preheat.gateway.l2 import L2
from preheat.gateway.listeners import Listener

_FIRST_PAUSE_S: Final = 0.004
_LONGEST_PAUSE_S: Final = 0.05


class Seeker(Protocol):
    """Whom a look-up tells what it found."""

    def is_found(self, lookup: "Lookup", entries: list[Entry]) -> bool:
        """Whether what was looked for is among these."""

    def on_looked(self, lookup: "Lookup", entries: list[Entry]) -> None:
        """It is over; `lookup.leased` is what this process holds the lease of."""

    def on_abandoned(self, lookup: "Lookup") -> None:
        """Nobody waits for it any more."""

    def on_bug(self, bug: Exception) -> None:
        """Something in it raised what nobody expected."""


class Lookup:
    """One look, led by one request. `refreshed` is the hit that it shall replace, if any; then
    nobody need wait. `first` is what a look that took no waiting found, and which wasn't enough."""

    def __init__(
        self,
        request: Request,
        look: Look,
        l2: L2,
        seeker: Seeker,
        *,
        patience_s: float,
        clock: Callable[[], float],
        generation: int = 0,
        refreshed: Hit | None = None,
        first: list[Entry] | None = None,
    ) -> None:
        self.request = request
        self.generation = generation
        self.refreshed = refreshed
        self.leased: Key | None = None  # what this process has taken the lease of
        self.source: Listener | None = None  # of a refresh: whose request is asked anew
        self.listeners: list[Listener] = []
        self.task: asyncio.Task[None] | None = None
        self._first = first
        self._look = look
        self._l2 = l2
        self._seeker = seeker
        self._patience_s = patience_s
        self._clock = clock
        self._is_over = False

    def add(self, listener: Listener, *, is_leader: bool = False) -> None:
        """Wait for what it finds."""
        listener.is_leader = is_leader
        self.listeners.append(listener)
        listener.exchange.on_gone = lambda: self._leave(listener)

    async def run(self) -> None:
        """Look, wait where that is worth it, and tell."""
        entries: list[Entry] = []
        try:
            entries = await self._entries()
        except asyncio.CancelledError:
            self._abandon()
            raise
        except Exception as bug:  # noqa: BLE001  the edge of a request: it goes on without L2
            self._seeker.on_bug(bug)
        if self._is_over:
            return
        self._is_over = True
        for listener in self.listeners:
            listener.exchange.on_gone = None
        try:
            self._seeker.on_looked(self, entries)
        except Exception as bug:  # noqa: BLE001  the edge of a request: nobody waits for ever
            self._seeker.on_bug(bug)
            for listener in self.listeners:
                if not listener.exchange.is_started:
                    listener.exchange.reply(*heads.internal_error(listener.request.id))

    async def _entries(self) -> list[Entry]:
        keys = self._look.keys
        entries = await self._l2.look(keys) if self._first is None else self._first
        if not self._look.joinable or self._seeker.is_found(self, entries):
            return entries
        until = self._clock() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        while self._l2.has_company and self._clock() < until:
            is_ours = await self._l2.claim(keys[0])
            if is_ours:
                # Whoever held it before has perhaps just written what we want.
                self.leased = keys[0]
                return await self._l2.look(keys, is_again=True) or entries
            if is_ours is None:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
            entries = await self._l2.look(keys, is_again=True)
            if self._seeker.is_found(self, entries):
                break
        return entries

    def _leave(self, listener: Listener) -> None:
        self.listeners.remove(listener)
        listener.exchange.on_gone = None
        is_wanted = bool(self.listeners) or self.refreshed is not None
        if not is_wanted and self.task is not None and not self._is_over:
            self._abandon()
            self.task.cancel()

    def _abandon(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._seeker.on_abandoned(self)
