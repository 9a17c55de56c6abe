"""Work for a server's idle moments: asked for only when nobody else is kept waiting by it."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

import msgspec

from preheat.core.warmup import Busy, Pace, blocked, rest_s
from preheat.engines.dialects.calls import Call, Prompt
from preheat.engines.dialects.readings import Cached, Slot, why
from preheat.engines.direct import Direct

_LOOK_AGAIN_S: Final = 1.0
"""While live requests run. More often, and llama.cpp doesn't notice who leaves."""
_LOWEST: Final = 1_000_000
"""A priority behind everybody's."""
_TRY_LATER: Final = frozenset({429, 502, 503, 504})


class RefusedError(Exception):
    """The server won't compute this; its words."""


class NeverIdleError(Exception):
    """No idle moment came in time; what stood in the way."""


class Patience(msgspec.Struct):
    """How long one warm-up may wait in all, and has waited. `tell` hears what it waits for, and
    nothing ("") when it goes on."""

    most_s: float
    tell: Callable[[str], None] = lambda _: None
    waited_s: float = 0.0


class Computed(msgspec.Struct, frozen=True):
    """A prompt was computed, in so many seconds; `cached` is None where its answer tells no usage."""

    cached: Cached | None
    took_s: float


class Idle:
    """One server's idle moments."""

    def __init__(self, direct: Direct, pace: Pace) -> None:
        self._direct = direct
        self._pace = pace
        self._takes_priority = True  # until it refuses one
        self._rests_until = 0.0

    async def compute(self, prompt: Prompt, patience: Patience) -> Computed:
        """Have this prompt computed, with one token of answer at most, behind all live requests.
        Raises EngineError, RefusedError and NeverIdleError."""
        took_priority = self._takes_priority
        while True:
            await self._wait(patience)
            call, has_priority = await self._call(prompt)
            began_at = monotonic()
            status, body = await self._direct.ask(call)
            took_s = monotonic() - began_at
            if status == 200:
                self._rests_until = monotonic() + rest_s(self._pace, took_s)
                dialect = await self._direct.known()
                return Computed(dialect.read_cached(body), took_s)
            if status in _TRY_LATER:
                await self.pause(patience, why(status, body))
            elif status == 400 and has_priority:
                self._takes_priority = False
            else:
                self._takes_priority = took_priority  # that wasn't what it refused
                raise RefusedError(why(status, body))

    async def probe(
        self, prompt: Prompt, patience: Patience, block_tokens: int, *, tells: bool
    ) -> Cached | None:
        """What it had of it, in blocks of so many tokens, before it was asked for it. Raises as `compute`.

        vLLM and SGLang leave out a zero, and without a flag tell nothing at all. So where a server isn't
        known to be one that `tells`, the prompt, which is there now, is asked for once more after silence: who
        tells of it then has told of nothing before.
        """
        cached = (await self.compute(prompt, patience)).cached
        if cached is None or cached.cached_tokens is not None:
            return cached
        if not tells and cached.prompt_tokens > block_tokens:
            again = (await self.compute(prompt, patience)).cached
            tells = again is not None and again.cached_tokens is not None
        return msgspec.structs.replace(cached, cached_tokens=0) if tells else cached

    async def pause(self, patience: Patience, what: str) -> None:
        """Wait a moment for this. Raises NeverIdleError where patience is at its end."""
        if patience.waited_s + _LOOK_AGAIN_S > patience.most_s:
            raise NeverIdleError(f"no idle moment within {patience.most_s:g} s: {what}")
        patience.tell(what)
        await asyncio.sleep(_LOOK_AGAIN_S)
        patience.waited_s += _LOOK_AGAIN_S

    async def _call(self, prompt: Prompt) -> tuple[Call, bool]:
        dialect = await self._direct.known()
        lower_first = dialect.priority_lower_first
        has_priority = self._takes_priority and lower_first is not None
        if has_priority:
            lowest = _LOWEST if lower_first else -_LOWEST
            prompt = msgspec.structs.replace(prompt, priority=lowest)
        call = dialect.warm(prompt)
        if call is None:
            raise RefusedError(f"{dialect.name} can't be asked for a prompt of this form")
        return call, has_priority

    async def _wait(self, patience: Patience) -> None:
        await asyncio.sleep(max(0.0, self._rests_until - monotonic()))
        while what := blocked(self._pace, await self._busy()):
            await self.pause(patience, what)
        patience.tell("")

    async def _busy(self) -> Busy:
        slots = await self._direct.slots()
        if slots:
            return _of_slots(slots)
        load = await self._direct.load()
        if load is None:
            return Busy()
        return Busy(running=load.running, waiting=load.waiting, load=load.kv_used_share)


def _of_slots(slots: list[Slot]) -> Busy:
    """Nobody waits while a slot is free; otherwise nobody knows, and it is full anyway."""
    running = sum(slot.is_busy for slot in slots)
    return Busy(running=running, load=running / len(slots))
