"""Asks each server now and then who it is, how much it holds and how busy it is."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

import msgspec

from preheat.core.router import Router
from preheat.engines.dialects.readings import Capacity, Load
from preheat.engines.direct import Direct
from preheat.errors import EngineError
from preheat.lab.observe.settling import Act

_LATEST_S: Final = 60.0
"""After a failure it is asked again after twice as long each time, up to this."""
_ENDED: Final = frozenset({"connect", "reset"})
"""Failures of a process that is no more, as `engines.group` has them: its successor's cache is empty."""
_CAPACITY_S: Final = 300.0


class Totals(msgspec.Struct):
    """Tokens of prompts by the server's own count since it is watched; None where it doesn't count."""

    input_tokens: int | None = None
    cached_tokens: int | None = None


class Server:
    """One server. What it says goes to the router in its turn (`tell`). One that can't be reached is
    `down_why`, and asked again."""

    def __init__(
        self,
        number: int,
        name: str,
        direct: Direct,
        router: Router,
        tell: Callable[[Act], None],
        poll_s: float,
    ) -> None:
        self.number = number
        self.name = name
        self.direct = direct
        self.dialect = ""
        self.capacity: Capacity | None = None
        self.load: Load | None = None
        self.down_why = "not asked yet"
        self.restarts = 0
        self.totals = Totals()
        self._router = router
        self._tell = tell
        self._poll_s = poll_s
        self._measured_at = float("-inf")

    async def run(self) -> None:
        """Until it is cancelled."""
        wait_s = self._poll_s
        while True:
            await asyncio.sleep(wait_s)
            is_up = await self.look()
            wait_s = self._poll_s if is_up else min(_LATEST_S, 2.0 * wait_s)

    async def look(self) -> bool:
        """Ask it once; whether it answered."""
        try:
            dialect = await self.direct.known()
            if monotonic() - self._measured_at >= _CAPACITY_S:
                body = await self.direct.told(dialect.capacity())
                self._measured(None if body is None else dialect.read_capacity(body))
                self._measured_at = monotonic()
            load = await self.direct.load()
            if load is None:  # nothing that would show whether it lives
                await self.direct.ask(dialect.health(), within_s=self._poll_s)
        except EngineError as error:
            if error.kind in _ENDED and not self.down_why:
                self._tell(lambda _: self._router.cleared(self.number))
            self.down_why = str(error)
            return False
        self.dialect, self.down_why = dialect.name, ""
        if load is not None:
            self._loaded(load)
        return True

    def _measured(self, capacity: Capacity | None) -> None:
        self.capacity = capacity
        if capacity is None:
            return

        def size(now: float) -> None:
            if capacity.slots is not None:
                self._router.has_slots(self.number, capacity.slots)
            if capacity.tokens is not None:
                self._router.holds_tokens(self.number, capacity.tokens, now)

        self._tell(size)

    def _loaded(self, load: Load) -> None:
        before, self.load = self.load, load
        is_new = (
            before is not None
            and load.prompt_tokens_total is not None
            and load.prompt_tokens_total < (before.prompt_tokens_total or 0)
        )
        if is_new:
            self.restarts += 1
            self._measured_at = float("-inf")
            self._tell(lambda _: self._router.cleared(self.number))
        if before is not None:
            was = Load(prompt_tokens_total=0, cached_tokens_total=0) if is_new else before
            totals = self.totals
            totals.input_tokens = _sum(
                totals.input_tokens, load.prompt_tokens_total, was.prompt_tokens_total
            )
            totals.cached_tokens = _sum(
                totals.cached_tokens, load.cached_tokens_total, was.cached_tokens_total
            )
        self._tell(lambda now: self._router.reported(self.number, load.waiting or 0, now))


def _sum(known: int | None, now: int | None, before: int | None) -> int | None:
    """With what has come since; None where it isn't counted."""
    if now is None or before is None:
        return known
    return (known or 0) + max(0, now - before)
