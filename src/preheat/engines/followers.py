"""Requests that are held back for one that computes the same prefix, until it has ended."""

import asyncio
import time
from typing import Final

from preheat.core.router import Route, Router

_SPARE_S: Final = 1.0
"""An end may come later than expected, and waiting a little longer is still cheaper than computing."""


class Followers:
    """Of one group. llama.cpp shares nothing that runs, so a follower waits or computes it again."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}  # by the leader's ticket

    async def hold(self, route: Route) -> None:
        """Return when it should be sent, and note that it is. It waits for one leader after the other
        where each leaves the prefix to one, but not longer than twice what it was to wait for the
        first, and a little."""
        lead = route.lead
        if lead is None:
            return
        now = time.monotonic()
        until = now + 2.0 * lead.wait_s + _SPARE_S
        while lead is not None and now < until:
            await self._ended(lead.ticket.number, min(2.0 * lead.wait_s + _SPARE_S, until - now))
            now = time.monotonic()
            lead = self._router.leads(route.ticket, now)
        self._router.go(route.ticket, now)

    def ended(self, number: int) -> None:
        """That request is over, well or not."""
        for one in self._waiting.pop(number, ()):
            if not one.done():
                one.set_result(None)

    async def _ended(self, number: int, within_s: float) -> None:
        end = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(number, [])
        waiting.append(end)
        try:
            await asyncio.wait([end], timeout=within_s)
        finally:
            waiting.remove(end)
            if not waiting and self._waiting.get(number) is waiting:
                del self._waiting[number]
