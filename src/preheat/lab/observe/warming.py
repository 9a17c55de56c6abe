"""Warms what is hot and missing: on idle servers, within a budget, proven, and booked either way."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from preheat.core.memo import Memo
from preheat.core.warmup import Outcome, Pace, Proof
from preheat.core.warmup.proof import PROVEN_SHARE
from preheat.engines.warmer import Warmer
from preheat.errors import EngineError
from preheat.lab.observe.plan import Missing
from preheat.lab.observe.servers import Server

_HOUR_S: Final = 3_600.0
_AGAIN_S: Final = 600.0
"""The same prefix isn't tried again sooner at a server, however it ended."""
_PATIENCE_S: Final = 60.0
_BOOKED: Final = 256
_AWAITED: Final = 4_096
_LEAST_FACTOR: Final = 1 / 64


class Budget:
    """So many computed tokens an hour at all servers together, probes included. Each refuted proof
    halves it, each proven one doubles it again, up to what was given.

    >>> budget = Budget(1_000)
    >>> budget.spend(600, now=0.0)
    >>> budget.left(10.0), budget.left(3_601.0)
    (400, 1000)
    """

    def __init__(self, tokens_per_hour: int) -> None:
        self.factor = 1.0
        self._tokens_per_hour = tokens_per_hour
        self._spent: deque[tuple[float, int]] = deque()

    def left(self, now: float) -> int:
        """Of the last hour's."""
        while self._spent and self._spent[0][0] <= now - _HOUR_S:
            self._spent.popleft()
        spent = sum(tokens for _, tokens in self._spent)
        return max(0, int(self._tokens_per_hour * self.factor) - spent)

    def spend(self, tokens: int, now: float) -> None:
        """They were computed, or are going to be."""
        if tokens:
            self._spent.append((now, tokens))

    def judged(self, proof: Proof) -> None:
        """What came of a warm-up."""
        if proof.verdict == "refuted":
            self.factor = max(_LEAST_FACTOR, 0.5 * self.factor)
        elif proof.verdict == "proven":
            self.factor = min(1.0, 2.0 * self.factor)


class WarmUp(msgspec.Struct, kw_only=True):
    """One, as it is booked. `gains_s` and `spends_s` are what the inequality expected, `saves_s` what a
    use saves; `saved_s` is what the first use did, None while none came, 0 where it was gone by then."""

    at: float
    server: str
    prefix: str
    gains_s: float
    spends_s: float
    saves_s: float
    outcome: Outcome
    saved_s: float | None = None


class Totals(msgspec.Struct, kw_only=True):
    """Of all that were tried."""

    tried: int = 0
    done: int = 0
    busy: int = 0
    failed: int = 0
    proven: int = 0
    refuted: int = 0
    unknown: int = 0
    computed_tokens: int = 0
    spent_s: float = 0.0
    used: int = 0
    saved_s: float = 0.0


class Warming:
    """One warm-up at a time at a server. `tells`: whether that one's answers tell cached tokens;
    `on_warm` hears of each prefix that is warm, as far as is known."""

    def __init__(
        self,
        servers: Sequence[Server],
        budget: Budget,
        pace: Pace,
        clock: Callable[[], float],
        tells: Callable[[int], bool],
        on_warm: Callable[[Missing], None],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.budget = budget
        self.totals = Totals()
        self.booked: deque[WarmUp] = deque(maxlen=_BOOKED)
        self._servers = servers
        self._warmers = [Warmer(one.direct, pace=pace, patience_s=patience_s) for one in servers]
        self.clock = clock
        self._tells = tells
        self._on_warm = on_warm
        self._tried: Memo[tuple[int, str], float] = Memo(_AWAITED)
        self._awaited: Memo[tuple[int, str], WarmUp] = Memo(_AWAITED)
        self._running: dict[int, asyncio.Task[None]] = {}

    def begin(self, plan: Sequence[Missing]) -> int:
        """Begin the best at each server that has none under way; how many were begun."""
        now, begun = self.clock(), 0
        best = sorted(plan, key=lambda one: one.offer.spends_s - one.offer.gains_s)
        for one in best:
            if self._may_begin(one, now):
                self._tried.put((one.worker, one.prefix.name), now)
                self.budget.spend(one.missing_tokens, now)
                self._running[one.worker] = asyncio.create_task(self._carry_out(one, now))
                begun += 1
        return begun

    async def settled(self) -> None:
        """Until none is under way."""
        await asyncio.gather(*self._running.values())

    async def aclose(self) -> None:
        """Call off what is under way."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def used(self, worker: int, prefix: str, cached_tokens: int, at: float) -> None:
        """A request with this prefix came to that server, which had so much of it."""
        one = self._awaited[worker, prefix]
        if one is None or at < one.at:
            return
        self._awaited.pop((worker, prefix))
        is_there = cached_tokens >= PROVEN_SHARE * one.outcome.tokens
        one.saved_s = one.saves_s if is_there else 0.0
        self.totals.used += is_there
        self.totals.saved_s += one.saved_s

    def _may_begin(self, one: Missing, now: float) -> bool:
        running = self._running.get(one.worker)
        tried_at = self._tried[one.worker, one.prefix.name]
        return (
            one.offer.pays
            and not self._servers[one.worker].down_why
            and (running is None or running.done())
            and (tried_at is None or now - tried_at >= _AGAIN_S)
            and one.missing_tokens <= self.budget.left(now)
        )

    async def _carry_out(self, one: Missing, now: float) -> None:
        server, warmer, prompt = (
            self._servers[one.worker],
            self._warmers[one.worker],
            one.prefix.prompt,
        )
        if await self._tells_load(server):
            outcome = await warmer.warm(prompt)
        else:
            why = "it doesn't tell how busy it is, so nobody knows when it is idle"
            outcome = Outcome(
                kind="prefix",
                worker=server.direct.url,
                object=one.prefix.name,
                state="failed",
                why=why,
            )
        probed_tokens = 0
        if outcome.state == "done":
            proof = await warmer.prove(prompt, outcome.tokens, tells=self._tells(one.worker))
            outcome = msgspec.structs.replace(outcome, proof=proof)
            if proof.cached_tokens is not None:
                probed_tokens = max(0, outcome.tokens - proof.cached_tokens)
            self.budget.judged(proof)
        self.budget.spend(outcome.computed_tokens + probed_tokens - one.missing_tokens, now)
        self._book(one, server, outcome)

    def _book(self, one: Missing, server: Server, outcome: Outcome) -> None:
        share = min(1.0, outcome.computed_tokens / max(1, one.missing_tokens))
        warmed = WarmUp(
            at=self.clock(),
            server=server.name,
            prefix=one.prefix.name,
            gains_s=one.offer.gains_s,
            spends_s=one.offer.spends_s,
            saves_s=share * one.offer.saves_s,
            outcome=outcome,
        )
        self.booked.append(warmed)
        totals, proof = self.totals, outcome.proof
        totals.tried += 1
        totals.computed_tokens += outcome.computed_tokens
        totals.spent_s += outcome.took_s
        setattr(totals, outcome.state, getattr(totals, outcome.state) + 1)
        if proof is None:
            return
        setattr(totals, proof.verdict, getattr(totals, proof.verdict) + 1)
        if proof.verdict != "refuted":
            self._awaited.put((one.worker, one.prefix.name), warmed)
            self._on_warm(one)

    @staticmethod
    async def _tells_load(server: Server) -> bool:
        try:
            return server.load is not None or bool(await server.direct.slots())
        except EngineError:
            return False
