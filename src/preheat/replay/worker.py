"""One serving process in simulated time: continuous batching over a paged, prefix-sharing KV pool."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from preheat.core.costs import ServiceModel
from preheat.core.ghosts import Ghosts
from preheat.core.prefix import PrefixStore
from preheat.replay.backlog import Backlog
from preheat.replay.decoding import Decoding
from preheat.replay.job import Job
from preheat.replay.kernel import Kernel
from preheat.replay.tiers import Found, Tiers
from preheat.replay.worker_spec import WorkerSpec

__all__ = ["Job", "Worker", "WorkerSpec"]

_ALL: Final = 1 << 60
_RETRY_S: Final = 0.02


class _Step(msgspec.Struct, gc=False):
    started_at: float
    chunks: list[tuple[Job, int, float]]
    """Jobs, tokens, seconds."""
    decodes: int
    """How many decoding steps in a row."""


class Worker:
    """An engine like vLLM's (version 1's scheduler): first come, first served; decoding goes before
    prefill in every step; the youngest is preempted when memory runs out, and computed anew."""

    def __init__(
        self,
        number: int,
        spec: WorkerSpec,
        service: ServiceModel,
        kernel: Kernel,
        store: PrefixStore,
        on_end: Callable[[Job], None],
        *,
        tiers: Tiers | None = None,
    ) -> None:
        self.number = number
        self.spec = spec
        self.store = store
        self.tiers = tiers if tiers is not None else Tiers(spec.tiers)
        self.ghosts = Ghosts(spec.capacity_blocks)
        """What its memory pushed out, and so what a place in it is worth."""
        self.waiting: deque[Job] = deque()
        self.backlog = Backlog(service)
        self._service = service
        self._kernel = kernel
        self._on_end = on_end
        self._loading: list[Job] = []
        self._prefilling: list[Job] = []
        self._decoding = Decoding(service)
        self._step: _Step | None = None
        self._generation = 0
        self._channel_at = 0.0

    # What a router may know ------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests it was sent and hasn't finished."""
        return len(self.waiting) + len(self._loading) + len(self._prefilling) + len(self._decoding)

    def overlap(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are in memory, or will be by what it has been sent already."""
        return self.backlog.coming_after(blocks, self.store.overlap(blocks))

    def queue_s(self) -> float:
        """Seconds of prefill before a request that comes now could begin."""
        step = self._step
        if step is None or not step.chunks:
            return max(0.0, self.backlog.prefill_s)
        return max(0.0, self.backlog.prefill_s - (self._kernel.now - step.started_at))

    # What happens to it ----------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """A request is sent here."""
        job.worker = self.number
        overlap = self.overlap(job.blocks)
        context = min(overlap * self.spec.block_tokens, job.input_tokens - 1)
        self.backlog.expect(job, job.input_tokens - context, context)
        self.backlog.count_blocks(job, -(-job.input_tokens // self.spec.block_tokens))
        self.backlog.will_come(job.blocks[overlap:])
        job.cached_blocks = overlap  # until it begins: from where on its blocks are coming
        self.waiting.append(job)
        self._wake()

    def load(self, seconds: float) -> float:
        """Read from lower tiers for so long, after what is being read already; when it is done."""
        self._channel_at = max(self._channel_at, self._kernel.now) + seconds
        return self._channel_at

    def _wake(self) -> None:
        step = self._step
        if step is None:
            self._begin()
        elif not step.chunks and step.decodes > 1:
            self._shorten(step)

    def _shorten(self, step: _Step) -> None:
        """A row of decoding steps ends with the one that is under way."""
        spent_s = self._kernel.now - step.started_at
        low = self._decoding.steps_within(spent_s, step.decodes)
        if low < step.decodes:
            step.decodes = low
            self._plan_end(step.started_at + self._decoding.steps_s(low))

    def _plan_end(self, at: float) -> None:
        self._generation += 1
        self._kernel.plan(at, self._end, self._generation)

    def _begin(self) -> None:
        """Plan the next step, if there is anything to do."""
        chunks = self._chunks()
        decodes = 0
        while self._decoding:
            decodes = 1 if chunks else self._decoding.steps_left()
            while decodes > 1 and not self._grow(decodes):
                decodes //= 2
            if decodes > 1 or self._grow(1):
                break
            self._preempt()
            decodes = 0
        if not chunks and not decodes:
            self._step = None
            if self.waiting and not self._loading:  # others hold the memory that they share with it
                self._kernel.plan(self._kernel.now + _RETRY_S, self._retry, None)
            return
        service = self._service
        took_s = sum(chunk[2] for chunk in chunks)
        took_s += self._decoding.steps_s(decodes) if decodes else service.step_s
        self._step = _Step(self._kernel.now, chunks, decodes)
        self._plan_end(self._kernel.now + took_s)

    def _retry(self, _: None) -> None:
        if self._step is None:
            self._begin()

    def _end(self, generation: int) -> None:
        step = self._step
        if generation != self._generation or step is None:
            return
        if step.decodes:
            for job in self._decoding.advance(step.decodes):
                self._finish(job, self._kernel.now)
        now = self._kernel.now
        for job, tokens, took_s in step.chunks:
            job.done_tokens += tokens
            job.computed_s += took_s
            left = job.input_tokens + job.decoded - job.done_tokens
            self.backlog.expect(job, left, job.done_tokens)
            if job.done_tokens >= job.input_tokens + job.decoded:
                self._prefilled(job, now)
        self._begin()

    def _prefilled(self, job: Job, now: float) -> None:
        self._prefilling.remove(job)
        if job.first_at is None:
            job.first_at = now
        job.decoded += 1
        if job.decoded >= job.output_tokens:
            self._finish(job, now)
        else:
            self._decoding.add(job)

    def _finish(self, job: Job, now: float) -> None:
        job.ended_at = now
        self.store.release(job.blocks, job.private, now)
        job.private = 0
        self.backlog.count_blocks(job, 0)
        self._on_end(job)

    # Prefill ---------------------------------------------------------------------------------

    def _chunks(self) -> list[tuple[Job, int, float]]:
        """What prompts' tokens the next step computes: (job, tokens, seconds) each."""
        spec, service = self.spec, self._service
        left = spec.step_tokens - len(self._decoding) if spec.step_tokens else _ALL
        most = spec.step_prefills or _ALL
        chunks: list[tuple[Job, int, float]] = []
        place = 0
        while left > 0 and len(chunks) < most:
            if place == len(self._prefilling) and not self._admit():
                break
            if place == len(self._prefilling):
                continue  # what was admitted is being loaded
            job = self._prefilling[place]
            place += 1
            tokens = min(left, job.input_tokens + job.decoded - job.done_tokens)
            left -= tokens
            chunks.append((job, tokens, service.prefill_s(tokens, job.done_tokens)))
        return chunks

    def _admit(self) -> bool:
        """The next waiting request begins, if there is room for it."""
        running = len(self._prefilling) + len(self._decoding) + len(self._loading)
        if not self.waiting or running >= self.spec.sequences:
            return False
        job, spec = self.waiting[0], self.spec
        now = self._kernel.now
        total = -(-(job.input_tokens + job.decoded) // spec.block_tokens)
        # As engines do by `max_model_len`: else it would compute, fill all and be refused in the end.
        whole = -(-(job.input_tokens + job.output_tokens - 1) // spec.block_tokens)
        if whole > spec.capacity_blocks:
            self._leave_queue(job)
            job.refused = True
            job.ended_at = now
            self.backlog.expect(job, 0, 0)
            self.backlog.count_blocks(job, 0)
            self._on_end(job)
            return bool(self.waiting) and self._admit()
        here = self.store.overlap(job.blocks)
        private = total - len(job.blocks)
        taken = self.store.take(job.blocks, private, now, job.kind)
        found = self.tiers.find(job.blocks[here:]) if taken else None
        self._note_evicted()
        if found is None:
            return False
        self._leave_queue(job)
        self._start(job, here, found, private)
        return True

    def _start(self, job: Job, here: int, found: Found, private: int) -> None:
        now, block_tokens = self._kernel.now, self.spec.block_tokens
        if self.tiers.all:
            self.tiers.remove(job.blocks[here:])
        found = found.if_quicker(self._service, here * block_tokens, block_tokens)
        lower, load_s = found.blocks, found.load_s
        if job.started_at is None:
            job.started_at = now
            job.cached_blocks, job.loaded_blocks, job.load_s = here, lower, load_s
            job.cached_tokens = min((here + lower) * block_tokens, job.input_tokens - 1)
            self.ghosts.computed(job.blocks, here + lower, self._block_s, now)
        job.private = private
        job.done_tokens = min((here + lower) * block_tokens, job.input_tokens - 1)
        self.backlog.expect(job, job.input_tokens + job.decoded - job.done_tokens, job.done_tokens)
        if load_s:
            self._loading.append(job)
            self._kernel.plan(self.load(load_s), self._loaded, job)
        else:
            self._prefilling.append(job)

    def _block_s(self, place: int) -> float:
        tokens = self.spec.block_tokens
        return self._service.prefill_s(tokens, place * tokens)

    def _leave_queue(self, job: Job) -> None:
        """It is the first in the queue, and is no more."""
        self.waiting.popleft()
        if job.started_at is not None:
            return  # preempted before: its blocks were counted down then
        self.backlog.came(job.blocks[job.cached_blocks :])

    def _loaded(self, job: Job) -> None:
        if job in self._loading:
            self._loading.remove(job)
            self._prefilling.append(job)
            self._wake()

    # Memory ----------------------------------------------------------------------------------

    def _grow(self, steps: int) -> bool:
        """Room for so many more tokens of every decoding sequence."""
        needs = self._decoding.needs(steps, self.spec.block_tokens)
        total = sum(needs)
        if total:
            grown = self.store.grow(total, self._kernel.now)
            self._note_evicted()
            if not grown:
                return False
            for job, need in zip(self._decoding.jobs, needs, strict=True):
                job.private += need
                self.backlog.count_blocks(job, job.kv_blocks + need)
        return True

    def _note_evicted(self) -> None:
        evicted = self.store.evicted
        if evicted:
            self.ghosts.evicted(evicted, self._kernel.now)
            self.tiers.put(evicted)
            evicted.clear()

    def _preempt(self) -> None:
        """The youngest decoding sequence gives its memory back, and will be computed anew."""
        job = self._decoding.youngest()
        self.store.release(job.blocks, job.private, self._kernel.now)
        job.private = job.done_tokens = 0
        job.preempted += 1
        self.backlog.expect(job, job.input_tokens + job.decoded, 0)
        self.waiting.appendleft(job)
