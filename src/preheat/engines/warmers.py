"""Who warms each server of a group: one for all who want something warm there."""

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Final

import msgspec

from preheat.core.router import Router
from preheat.core.warmup import Outcome, Pace, Proof
from preheat.engines.dialects import Dialect
from preheat.engines.dialects.calls import Prompt
from preheat.engines.direct import Direct
from preheat.engines.kv_link import LearnerLink
from preheat.engines.prefixes import name_of
from preheat.engines.salts import Salts
from preheat.engines.slot_warming import SlotWarming
from preheat.engines.warmer import Warmer
from preheat.engines.warmth import Hot, Proven, Warmth
from preheat.engines.worker import Worker
from preheat.errors import EngineError

_PACE: Final = Pace(slack_s=0.5, first_tokens=256)
"""Mostly for a server that is being readied: it has hardly a request to hold up."""


class Warmers:
    """Made when they are first wanted, on connections of their own, with the group's key. `dialect` is
    "auto" where each server is asked for its own."""

    def __init__(
        self,
        dialect: str,
        api_key: str,
        router: Router | None = None,
        salts: Salts | None = None,
        warmth: Warmth | None = None,
        link: LearnerLink | None = None,
    ) -> None:
        self._dialect = dialect
        self._api_key = api_key
        self._router = router
        self._salts = salts
        self._warmth = warmth
        self._link = link
        self._made: dict[Worker, tuple[Direct, Warmer]] = {}
        self._booked: dict[Worker, Outcome] = {}  # the last of each: who joined it has the same
        self._kind: Dialect | None = None  # of all of these
        self._kind_of: Sequence[Worker] = ()

    async def salted(
        self, path: bytes, body: bytes, tenant: str, workers: Sequence[Worker]
    ) -> bytes:
        """A request with its tenant's salt, where these servers take one: they are asked what they are before
        the first. Raises EngineError where none of them says it."""
        salts = self._salts
        if salts is None or not tenant or not salts.takes(path):
            return body
        kind = self._kind
        if kind is None or self._kind_of is not workers:  # a reload may have brought others
            kind = await self.known(workers)
            self._kind, self._kind_of = kind, workers
        field = kind.salt_field
        return body if field is None else salts.salted(body, tenant, field)

    async def warm(self, worker: Worker, hot: Hot, why: str) -> Outcome:
        """Have it computed there as its tenant's requests have it, in idle moments; booked, and known to the
        router. Raises nothing but CancelledError."""
        try:
            prompt = await self._salted(worker, hot)
        except EngineError as error:
            return _failed(worker, hot, str(error))
        named = self._named(worker)
        if named is None:
            outcome = await self._of(worker)[1].warm(prompt)
        else:
            outcome = await named.warm(hot, prompt)
        has_joined = self._booked.get(worker) is outcome
        self._booked[worker] = outcome
        if self._warmth is not None and outcome.chunks and not has_joined:
            self._warmth.book(hot, why, outcome)
        if self._router is not None and outcome.state == "done":
            number = worker.number
            self._router.learned(number, hot.blocks, (), monotonic())
            if self._link is not None:  # the other processes' routers
                self._link.sent(worker.url, hot.blocks, ())
            computed, took_s = outcome.computed_tokens, outcome.took_s
            if outcome.chunks and not has_joined:
                self._router.warmed.put(number, hot.blocks, computed, took_s)
        return msgspec.structs.replace(outcome, worker=worker.name, tenant=hot.tenant)

    async def prove(self, worker: Worker, hot: Hot) -> Proof:
        """Whether it is warm there."""
        try:
            prompt = await self._salted(worker, hot)
        except EngineError as error:
            return Proof(verdict="unknown", why=str(error))
        named = self._named(worker)
        if named is None:
            return await self._of(worker)[1].prove(prompt)
        return await named.prove(hot, prompt)

    async def warm_within(self, worker: Worker, hot: Hot, within_s: float) -> Outcome:
        """As `warm`, on somebody's wish; what isn't done in time is given up."""
        try:
            async with asyncio.timeout(within_s):
                return await self.warm(worker, hot, "admin")
        except TimeoutError:
            why = f"it wasn't done within {within_s:g} s"
            return msgspec.structs.replace(_failed(worker, hot, why), state="busy")

    async def prove_within(self, worker: Worker, hot: Hot, within_s: float) -> Proven:
        """As `prove`, likewise."""
        try:
            async with asyncio.timeout(within_s):
                proof = await self.prove(worker, hot)
        except TimeoutError:
            proof = Proof(verdict="unknown", why=f"it didn't say so within {within_s:g} s")
        return Proven(worker.name, proof)

    def direct(self, worker: Worker) -> Direct:
        """What it asks the server through."""
        return self._of(worker)[0]

    async def known(self, workers: Sequence[Worker]) -> Dialect:
        """What kind these are, as the first that answers says. Raises EngineError."""
        failure = EngineError("there are no servers", kind="connect")
        asked = [asyncio.ensure_future(self.direct(one).known()) for one in workers]
        try:
            for first in asyncio.as_completed(asked):
                try:
                    return await first
                except EngineError as error:
                    failure = error
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise failure

    async def forget(self, worker: Worker) -> None:
        """That server is no more."""
        self._booked.pop(worker, None)
        made = self._made.pop(worker, None)
        if made is not None:
            await made[0].aclose()

    async def aclose(self) -> None:
        """End all."""
        for worker in tuple(self._made):
            await self.forget(worker)

    async def _salted(self, worker: Worker, hot: Hot) -> Prompt:
        if self._salts is None or not hot.tenant:
            return hot.prompt
        if (await self.direct(worker).known()).salt_field is None:
            return hot.prompt
        return msgspec.structs.replace(hot.prompt, salt=self._salts.of(hot.tenant))

    def _named(self, worker: Worker) -> SlotWarming | None:
        """Where its slots are named by the keeper of its files."""
        keeper = None if worker.seats is None else worker.seats.keeper
        return None if keeper is None else SlotWarming(*self._of(worker), keeper)

    def _of(self, worker: Worker) -> tuple[Direct, Warmer]:
        made = self._made.get(worker)
        if made is None:
            direct = Direct(worker.url, api_key=self._api_key, dialect=self._dialect)
            made = self._made[worker] = direct, Warmer(direct, pace=_PACE)
        return made


def _failed(worker: Worker, hot: Hot, why: str) -> Outcome:
    return Outcome(
        kind="prefix",
        worker=worker.name,
        object=name_of(hot.prompt),
        state="failed",
        why=why,
        tenant=hot.tenant,
    )
