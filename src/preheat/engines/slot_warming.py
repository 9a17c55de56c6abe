"""Warm-ups and probes on a llama.cpp server whose slots we name: in a slot that was lent for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import msgspec

from preheat.core.blocks import BLOCK_BYTES
from preheat.core.warmup import Mark, Outcome, Proof
from preheat.engines.dialects.calls import Prompt
from preheat.engines.direct import Direct
from preheat.engines.prefixes import as_ids, name_of
from preheat.engines.slot_keeper import SlotKeeper
from preheat.engines.slot_leaders import Wanted
from preheat.engines.slot_loans import Lent
from preheat.engines.warmer import Warmer
from preheat.engines.warmth import Hot
from preheat.errors import EngineError

T = TypeVar("T")

_NONE_FREE: Final = "each of its slots is busy, or holds what is missed sooner"
_RECALLED: Final = "a request wanted the slot"
_TOO_SHORT: Final = f"it is shorter than a block ({BLOCK_BYTES} bytes): no request would find it"
_NO_IDS: Final = "the server doesn't tell its tokens"


class SlotWarming:
    """Where a prefix lies is known to the desk (`core.slot_desk`) then, so that requests that begin with it
    are named that slot. Its slot is given back as soon as a request waits for one."""

    def __init__(self, direct: Direct, warmer: Warmer, keeper: SlotKeeper) -> None:
        self._direct = direct
        self._warmer = warmer
        self._keeper = keeper

    async def warm(self, hot: Hot, prompt: Prompt) -> Outcome:
        """As `Warmer.warm`. What lies in a slot already is done, and touched by nobody: it may be the
        beginning of a session's."""
        try:
            asked = await self._asked(hot, prompt)
        except EngineError as error:
            return self._outcome(prompt, "failed", str(error))
        if isinstance(asked, str):
            return self._outcome(prompt, "failed", asked)
        wanted = _wanted(hot, asked)
        loans = self._keeper.loans
        async with loans.turn:
            if loans.has(wanted):
                there = self._outcome(prompt, "done")
                return msgspec.structs.replace(there, tokens=wanted.tokens)
            lent = await loans.lend(wanted)
            if lent is None:
                return self._outcome(prompt, "busy", _NONE_FREE)
            slot, found = lent.seated.slot, lent.seated.found_tokens
            mark = Mark(worker="", prefix="", tokens=wanted.tokens, done_tokens=found, slot=slot)
            tokens = None
            try:
                named = msgspec.structs.replace(asked, slot=slot)
                outcome = await _unless_recalled(lent, self._warmer.warm(named, mark))
                if outcome is not None and outcome.state == "done":
                    tokens = outcome.tokens
            finally:
                await self._keeper.loans.back(lent, tokens)
        if outcome is None:
            return self._outcome(prompt, "busy", _RECALLED)
        return msgspec.structs.replace(outcome, object=name_of(prompt))

    async def prove(self, hot: Hot, prompt: Prompt) -> Proof:
        """As `Warmer.prove`, in the slot that has it, or where a request would have it brought."""
        try:
            asked = await self._asked(hot, prompt)
        except EngineError as error:
            return Proof(verdict="unknown", why=str(error))
        if isinstance(asked, str):
            return Proof(verdict="unknown", why=asked)
        wanted = _wanted(hot, asked)
        loans = self._keeper.loans
        async with loans.turn:
            lent = await loans.lend(wanted)
            if lent is None:
                return Proof(verdict="unknown", why=_NONE_FREE)
            tokens = None
            try:
                named = msgspec.structs.replace(asked, slot=lent.seated.slot)
                proof = await _unless_recalled(lent, self._warmer.prove(named))
                if proof is not None and proof.verdict != "unknown":
                    tokens = wanted.tokens
            finally:
                await loans.back(lent, tokens)
        return Proof(verdict="unknown", why=_RECALLED) if proof is None else proof

    async def _asked(self, hot: Hot, prompt: Prompt) -> Prompt | str:
        """As token ids; or why that can't be. Raises EngineError."""
        if not hot.blocks:
            return _TOO_SHORT
        asked = await as_ids(self._direct, prompt)
        return _NO_IDS if asked.ids is None else asked

    def _outcome(self, prompt: Prompt, state: Any, why: str = "") -> Outcome:
        return Outcome(
            kind="prefix", worker=self._direct.url, object=name_of(prompt), state=state, why=why
        )


def _wanted(hot: Hot, asked: Prompt) -> Wanted:
    return Wanted(hot.tenant, "", hot.blocks, len(asked.ids or ()))


async def _unless_recalled(lent: Lent, work: Coroutine[Any, Any, T]) -> T | None:
    """What it comes to; None where the slot was wanted first."""
    working = asyncio.ensure_future(work)
    recalled = asyncio.ensure_future(lent.recalled.wait())
    try:
        await asyncio.wait({working, recalled}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        recalled.cancel()
        await asyncio.gather(working, recalled, return_exceptions=True)
