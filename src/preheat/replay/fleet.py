"""Workers behind a router, in simulated time: a trace goes in, and what came of each request out."""

from collections.abc import Callable, Sequence

import msgspec

from preheat.core.costs import ServiceModel
from preheat.core.prefix import LeafLru, LeafOrder, PrefixStore
from preheat.core.routing import Candidate, Placing, RoutingPolicy
from preheat.replay.clients import Clients, Loop
from preheat.replay.kernel import Kernel
from preheat.replay.tiers import Tiers
from preheat.replay.worker import Job, Worker, WorkerSpec
from preheat.traces.arrival import Arrival


class FleetSpec(msgspec.Struct, frozen=True):
    """Equal workers. With `is_shared` all of them read and fill one memory, as large as theirs
    together: the bound for what any router can reach."""

    worker: WorkerSpec
    service: ServiceModel = ServiceModel()
    workers: int = 1
    is_shared: bool = False


class Run(msgspec.Struct):
    """What came of a trace: a job for each arrival, in their order, and its no-cache seconds."""

    jobs: list[Job]
    no_cache_s: list[float]
    ended_at: float = 0.0


class Fleet:
    """A router and its workers. `orders` makes the order in which a worker's leaves leave."""

    def __init__(
        self,
        spec: FleetSpec,
        policy: RoutingPolicy,
        *,
        orders: Callable[[], LeafOrder] = LeafLru,
    ) -> None:
        self.spec = spec
        self.kernel = Kernel()
        self._policy = policy
        self._orders = orders
        self._placings: dict[int, Placing] = {}
        self._told: dict[int, Callable[[Job], None]] = {}
        self.workers: list[Worker] = []
        for _ in range(spec.workers):
            self.add()

    def add(self) -> Worker:
        """One more worker, cold."""
        spec = self.spec
        number = len(self.workers)
        if spec.is_shared and self.workers:
            store, tiers = self.workers[0].store, self.workers[0].tiers
        else:
            store, tiers = self._store(), Tiers(spec.worker.tiers)
        worker = Worker(
            number, spec.worker, spec.service, self.kernel, store, self._ended, tiers=tiers
        )
        self.workers.append(worker)
        return worker

    def _store(self) -> PrefixStore:
        blocks = self.spec.worker.capacity_blocks
        if self.spec.is_shared:
            blocks *= self.spec.workers
        return PrefixStore(blocks, self._orders())

    def send(self, job: Job, session: str = "", then: Callable[[Job], None] | None = None) -> None:
        """Route a request to one of the workers."""
        if then is not None:
            self._told[job.number] = then
        self._placings[job.number] = Placing(
            job.input_tokens, job.blocks, self.spec.worker.block_tokens, session, job.output_tokens
        )
        self._route(job)

    def _route(self, job: Job) -> None:
        candidates = self._candidates(job)
        placing = self._placings[job.number]
        chosen = candidates[self._policy.choose(placing, candidates, self.kernel.now)]
        self.workers[chosen.number].submit(job)

    def _candidates(self, job: Job) -> list[Candidate]:
        block_tokens, service = self.spec.worker.block_tokens, self.spec.service
        made = []
        for worker in self.workers:
            here = worker.overlap(job.blocks)
            found = worker.tiers.find(job.blocks[here:])
            overlap_tokens = min(here * block_tokens, job.input_tokens - 1)
            lower_tokens = min(found.blocks * block_tokens, job.input_tokens - 1 - overlap_tokens)
            context = overlap_tokens + lower_tokens
            made.append(
                Candidate(
                    number=worker.number,
                    overlap_tokens=overlap_tokens,
                    loadable_tokens=lower_tokens,
                    load_s=found.load_s,
                    miss_s=service.prefill_s(job.input_tokens - context, context),
                    queue_s=worker.queue_s(),
                    in_flight=worker.in_flight,
                    waiting=len(worker.waiting),
                    prefill_tokens=worker.backlog.prefill_tokens,
                    kv_blocks=worker.backlog.kv_blocks,
                    kv_capacity_blocks=worker.store.capacity_blocks,
                    price=worker.ghosts.price_s,
                )
            )
        return made

    def _ended(self, job: Job) -> None:
        placing = self._placings.pop(job.number)
        self._policy.finished(placing, job.worker, self.kernel.now)
        then = self._told.pop(job.number, None)
        if then is not None:
            then(job)


def job_of(number: int, one: Arrival, block_tokens: int, kind: int = 0) -> Job:
    """An arrival as its worker sees it: of its blocks, those that are full."""
    tokens = max(1, one.input_tokens)
    return Job(
        number, one.at, one.blocks[: tokens // block_tokens], tokens, one.output_tokens, kind
    )


def run(
    arrivals: Sequence[Arrival],
    block_tokens: int,
    fleet: Fleet,
    *,
    loop: Loop = "open",
    speed: float = 1.0,
    kinds: Sequence[int] | None = None,
) -> Run:
    """The whole trace through the fleet; see `Clients` for `loop` and `speed`. `kinds` are the
    classes of `Traits.kind`, one for each arrival."""
    kernel, service = fleet.kernel, fleet.spec.service
    jobs = [
        job_of(number, one, block_tokens, kinds[number] if kinds is not None else 0)
        for number, one in enumerate(arrivals)
    ]

    def send(number: int) -> None:
        job = jobs[number]
        job.arrived_at = kernel.now
        fleet.send(job, arrivals[number].session, answered)

    def answered(job: Job) -> None:
        clients.answered(job.number)

    clients = Clients(arrivals, kernel, send, loop=loop, speed=speed)
    clients.start()
    kernel.run()
    return Run(jobs, [service.prefill_s(job.input_tokens) for job in jobs], kernel.now)
