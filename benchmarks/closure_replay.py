"""The replayed side of `closure`: the product's replay, with llama.cpp's servers as its engines.

Who asks, what the controller answers itself, who joins and what is kept is the code of
`preheat replay` (`whatif.run_through`); where a request goes is said by the gateway's own
`core.router`, which learns from the simulated answers what it learned from the live ones. Of its
own it has the engines only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from preheat.core.blocks import BLOCK_BYTES
from preheat.core.router import Ask, Router, Ticket
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.replay.fitting import Fitted, fit, served_of
from preheat.replay.kernel import Kernel
from preheat.replay.llamacpp import Host, Prompt, Server, ServerSpec
from preheat.replay.replay import Questions
from preheat.replay.shared_text import TextOverlap, seams_of
from preheat.replay.whatif import Setup, run_through
from preheat.replay.worker import Job
from preheat.traces.arrival import Arrival, Trace
from preheat.traces.own import Logged

RULE = "preheat"
"""`engines.NAME.routing`, by default; the live side says it, too."""


class Asked(msgspec.Struct, frozen=True):
    """What the log says of a request, and of how it was answered."""

    arrival: Arrival
    blocks: tuple[int, ...]
    prompt_bytes: int
    layer: str
    worker: str
    cached_tokens: int

    @classmethod
    def of(cls, arrival: Arrival, logged: Logged) -> Asked:
        row = logged.fields
        return cls(
            arrival,
            tuple(logged.blocks.tolist()),
            row["prompt_bytes"],
            logged.layer,
            row["engine_worker"] or "",
            row["cached_tokens"] or 0,
        )

    @property
    def at(self) -> float:
        return self.arrival.at

    def prompt(self, number: int, worker: int = -1) -> Prompt:
        """As a slot sees it."""
        one = self.arrival
        return Prompt(
            number,
            one.at,
            one.input_tokens,
            one.output_tokens,
            self.blocks,
            self.prompt_bytes,
            one.session,
            str(one.key),
            worker,
        )


def asked_of(trace: Trace, rows: Mapping[str, Logged]) -> list[Asked]:
    """Each arrival of a log with its row, by name."""
    return [Asked.of(one, rows[one.id]) for one in trace.arrivals]


class Learned(msgspec.Struct, frozen=True):
    """What the first part of a log tells of the engines."""

    service: Fitted
    overlap: TextOverlap


def learned(rows: Sequence[Logged], asked: Sequence[Asked], spec: ServerSpec) -> Learned:
    """From the requests that an engine answered."""
    forwards = [one for one in asked if one.layer == "forward"]
    prompts = []
    for number, one in enumerate(forwards):
        prompt = one.prompt(number)
        prompt.cached_tokens = one.cached_tokens
        prompts.append(prompt)
    return Learned(
        fit(served_of(rows), batch_tokens=spec.batch_tokens, is_one_host=True),
        TextOverlap(seams=seams_of(prompts)),
    )


class Servers:
    """Equal servers on one host, as `whatif.Engines`. `placed` says which of them each forward goes
    to; else the gateway's router does, which knows that the slots of each hold `ctx_tokens` (0: it
    wasn't told). `prompts` are those that were asked, by number."""

    def __init__(
        self,
        asked: Sequence[Asked],
        known: Learned,
        spec: ServerSpec,
        *,
        count: int = 2,
        ctx_tokens: int = 0,
        placed: Sequence[int] | None = None,
    ) -> None:
        self.kernel = Kernel()
        self.prompts: dict[int, Prompt] = {}
        self._asked = asked
        self._placed = placed
        service, host = known.service.model, Host(known.service.slowdown)
        self._servers = [
            Server(
                spec,
                service,
                self.kernel,
                known.overlap,
                self._ended,
                host=host,
                on_first=self._began,
            )
            for _ in range(count)
        ]
        self._router = Router(POLICIES[RULE]())
        for worker in range(count):
            self._router.has_slots(worker, spec.slots)
            if ctx_tokens:
                self._router.holds_tokens(worker, ctx_tokens, 0.0)
        self._tickets: dict[int, Ticket] = {}
        self._held: dict[int, tuple[Ticket, float]] = {}  # until then at most
        self._told: dict[int, tuple[Job, Callable[[Job], None]]] = {}

    @property
    def prefill_s(self) -> float:
        """Of batches that held a piece of a prompt, so far."""
        return sum(server.prefill_s for server in self._servers)

    def send(self, job: Job, session: str, then: Callable[[Job], None]) -> None:
        """Ask one of them."""
        number = job.number
        everywhere = range(len(self._servers))
        allowed = everywhere if self._placed is None else [self._placed[number]]
        one, now = self._asked[number], self.kernel.now
        ask = Ask(one.arrival.model, one.blocks, BLOCK_BYTES, one.prompt_bytes, one.arrival.session)
        route = self._router.place(ask, allowed, now)
        self._tickets[number] = route.ticket
        self.prompts[number] = one.prompt(number, route.ticket.worker)
        self._told[number] = job, then
        if route.lead is None:
            self._servers[route.ticket.worker].submit(self.prompts[number])
        else:  # as `engines.followers` holds it back
            until = now + 2.0 * route.lead.wait_s + 1.0
            self._held[number] = route.ticket, until
            self.kernel.plan(until, self._look_at_held, None)

    def _look_at_held(self, _: None) -> None:
        """Those whose turn has come are sent."""
        now = self.kernel.now
        for number, (ticket, until) in list(self._held.items()):
            if now >= until or self._router.leads(ticket, now) is None:
                del self._held[number]
                self._router.go(ticket, now)
                self._servers[ticket.worker].submit(self.prompts[number])

    def _began(self, prompt: Prompt) -> None:
        ticket = self._tickets.get(prompt.number)
        if ticket is not None:
            self._router.began(ticket, self.kernel.now)

    def _ended(self, prompt: Prompt) -> None:
        ticket = self._tickets.pop(prompt.number, None)
        if ticket is not None:
            usage = Usage(
                prompt.input_tokens, prompt.output_tokens, prompt.cached_tokens, tells_cached=True
            )
            self._router.ended(ticket, usage, self.kernel.now)
            self._look_at_held(None)
        job, then = self._told.pop(prompt.number)
        job.cached_tokens = prompt.cached_tokens
        job.first_at, job.ended_at = prompt.first_at, prompt.ended_at
        then(job)


class Replayed(msgspec.Struct, frozen=True):
    """What came of a run: the prompts that engines got, by number, and their prefill seconds from
    `split_at` on."""

    prompts: Mapping[int, Prompt]
    prefill_s: float


def replayed(trace: Trace, servers: Servers, split_at: float) -> Replayed:
    """The whole run from its arrivals alone, with the response cache that `preheat replay` tries."""
    before: list[float] = []
    servers.kernel.plan(split_at, lambda _: before.append(servers.prefill_s), None)
    run_through(trace, Setup(exact_ttl_s=Questions().exact_ttl_s), servers)
    return Replayed(servers.prompts, servers.prefill_s - before[0])
