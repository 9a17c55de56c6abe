"""What if: the same arrivals through fleets that differ in one lever each."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from preheat.core import admission, eviction
from preheat.core.controller import Controller
from preheat.core.costs import DECODING, ServiceModel
from preheat.core.freshness import Freshness
from preheat.core.inventory import Inventory
from preheat.core.ledger import Ledger
from preheat.core.prefix import LeafLru, LeafOrder
from preheat.core.routing import POLICIES
from preheat.core.stats import Counters
from preheat.core.types import Ask, Check, Hit, Join, Key, Refresh, Request, RequestId, Usage
from preheat.replay.clients import Clients, Loop
from preheat.replay.fleet import Fleet, FleetSpec, Run, job_of
from preheat.replay.kernel import Kernel
from preheat.replay.runner import Flight, Runner, Said, layer_of
from preheat.replay.tiers import TierSpec
from preheat.replay.worker import Job, WorkerSpec
from preheat.traces.arrival import Arrival, Trace

BLOCK_TOKENS: Final = 16
"""vLLM's, where a trace has no blocks: then nothing is shared, and memory is only counted."""
ANSWER_BYTES: Final = 600
"""Of a stored answer without its text."""
TOKEN_BYTES: Final = 4
"""Of its text, a token."""

_NO_SUCCESS: Final = ("length", "content_filter", "failure", "status-")
"""How `Arrival.stop` begins where an answer was cut off or refused: the gateway doesn't store these
either (`wire.openai.why_incomplete`)."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet that a trace is tried on. `tier_tokens` a worker are read on demand, at
    `tier_token_s` each (128 KiB at 20 GB/s). `exact_ttl_s`: how long answers are kept, 0 for no
    response cache."""

    workers: int = 8
    worker_tokens: int = 1_000_000
    tier_tokens: int = 0
    tier_token_s: float = 6.6e-6
    service: ServiceModel = DECODING
    routing: str = "round_robin"
    step_tokens: int = 8_192
    sequences: int = 256
    exact_ttl_s: float = 0.0
    exact_bytes: int = 256 << 20
    exact_entries: int = 100_000
    loop: Loop = "open"
    speed: float = 1.0


class Engines(Protocol):
    """What answers in simulated time: a `Fleet`, or others that keep a job's times the same way."""

    kernel: Kernel

    def send(self, job: Job, session: str, then: Callable[[Job], None]) -> None:
        """Answer it, and tell when that has ended."""


class Tried(msgspec.Struct, frozen=True):
    """What came of a setup. `layers`: what answered each arrival; those that a stored answer, or
    another's flight, served have no job of their own in `run`."""

    run: Run
    layers: Sequence[str]


def fleet_spec(setup: Setup, block_tokens: int) -> FleetSpec:
    """The fleet of a setup."""
    block_tokens = block_tokens or BLOCK_TOKENS
    tiers: tuple[TierSpec, ...] = ()
    if setup.tier_tokens:
        block_s = setup.tier_token_s * block_tokens
        tiers = (TierSpec("dram", setup.tier_tokens // block_tokens, block_s),)
    worker = WorkerSpec(
        setup.worker_tokens // block_tokens,
        block_tokens,
        step_tokens=setup.step_tokens,
        sequences=setup.sequences,
        tiers=tiers,
    )
    return FleetSpec(worker, setup.service, setup.workers)


def try_out(
    trace: Trace,
    setup: Setup,
    *,
    orders: Callable[[], LeafOrder] = LeafLru,
    kinds: Sequence[int] | None = None,
    before: Callable[[Fleet], None] | None = None,
) -> Tried:
    """The trace through a gateway's response cache (where the setup has one) and its fleet.

    `before` may plan events on the fleet's kernel.
    """
    fleet = Fleet(fleet_spec(setup, trace.block_tokens), POLICIES[setup.routing](), orders=orders)
    if before is not None:
        before(fleet)
    return run_through(trace, setup, fleet, kinds=kinds)


def run_through(
    trace: Trace, setup: Setup, engines: Engines, *, kinds: Sequence[int] | None = None
) -> Tried:
    """The same with these engines, whatever the setup says of them."""
    return _Trial(trace, setup, engines, kinds).go()


class _Trial:
    """One run."""

    def __init__(
        self, trace: Trace, setup: Setup, engines: Engines, kinds: Sequence[int] | None
    ) -> None:
        self._arrivals = trace.arrivals
        self._setup = setup
        self._engines = engines
        self._kernel = engines.kernel
        self._layers = ["forward"] * len(trace.arrivals)
        self._jobs = [
            job_of(number, one, trace.block_tokens or BLOCK_TOKENS, kinds[number] if kinds else 0)
            for number, one in enumerate(trace.arrivals)
        ]
        self._clients = Clients(
            trace.arrivals, self._kernel, self._arrive, loop=setup.loop, speed=setup.speed
        )
        self._runner = (
            Runner(controller_of(setup), self._kernel, self._call) if setup.exact_ttl_s else None
        )
        self._followers: dict[int, list[int]] = {}

    def go(self) -> Tried:
        self._clients.start()
        self._kernel.run()
        service = self._setup.service
        no_cache = [service.prefill_s(job.input_tokens) for job in self._jobs]
        return Tried(Run(self._jobs, no_cache, self._kernel.now), self._layers)

    def _arrive(self, number: int) -> None:
        self._jobs[number].arrived_at = self._kernel.now
        if self._runner is None or self._arrivals[number].key < 0:
            self._send(number, self._done)
            return
        decision = self._runner.arrive(request_of(number, self._arrivals[number]))
        self._layers[number] = layer_of(decision)
        match decision:
            case Hit() | Refresh():
                job = self._jobs[number]
                job.first_at = job.ended_at = self._kernel.now
                self._done(job)
            case Join(leader):
                self._followers.setdefault(_number_of(leader), []).append(number)

    def _call(self, flight: Flight) -> None:
        self._send(_number_of(flight.request.id), lambda job: self._flown(flight, job))

    def _send(self, number: int, then: Callable[[Job], None]) -> None:
        self._engines.send(self._jobs[number], self._arrivals[number].session, then)

    def _flown(self, flight: Flight, job: Job) -> None:
        assert self._runner is not None
        one = self._arrivals[job.number]
        size = ANSWER_BYTES + TOKEN_BYTES * max(0, one.output_tokens)
        usage = Usage(job.input_tokens, job.output_tokens, job.cached_tokens)
        why = "refused" if job.refused else one.stop if one.stop.startswith(_NO_SUCCESS) else ""
        self._runner.ended(flight, Said(b"", size, usage, why))
        self._done(job)
        for number in self._followers.pop(job.number, ()):
            follower = self._jobs[number]
            if job.first_at is not None:
                follower.first_at = max(follower.arrived_at, job.first_at)
            follower.ended_at = self._kernel.now
            self._done(follower)

    def _done(self, job: Job) -> None:
        self._clients.answered(job.number)


def _number_of(name: RequestId) -> int:
    return int.from_bytes(name, "big")


def request_of(number: int, one: Arrival) -> Request:
    """An arrival as the core sees it. Its key stands for the whole request."""
    key = Key(one.key.to_bytes(16, "big"))
    ask = Ask(key, Check(key * 2), one.model, sampled=one.sampled)
    return Request(RequestId(number.to_bytes(8, "big")), one.tenant or "trace", "", ask)


def controller_of(setup: Setup) -> Controller:
    """A gateway's, with its defaults, for the life and the room that the setup gives."""
    inventory: Inventory = Inventory(
        eviction.POLICIES["sieve"](),
        admission.POLICIES["always"](),
        budget_bytes=setup.exact_bytes,
        budget_entries=setup.exact_entries,
    )
    return Controller(
        inventory,
        Ledger({}),
        Counters(),
        freshness=Freshness(ttl_s=setup.exact_ttl_s),
        namespaces={},
        entry_bytes=1 << 20,
        draw=_never,
    )


def _never() -> float:
    """No chance is drawn: a replay is the same each time."""
    return 0.5
