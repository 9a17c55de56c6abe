"""llama.cpp's server in simulated time: slots, longest common prefixes, a prompt cache in memory.

It shares no blocks between requests. Each of its slots holds one sequence, and what a new prompt
has in common with the sequence in its slot isn't computed again. The rules are those of
tools/server (server-context.cpp, server-task.cpp) of build 11549, without a unified KV cache:

- A request takes the idle slot whose sequence shares most with its prompt, if that is more than a
  tenth of the prompt, else the one that was used longest ago. With no slot idle it waits.
- Where the slot was chosen by age, or would lose more than half of its sequence, that is first
  copied to the prompt cache, and the cache may give a better one back: one that shares more, both
  as a part of the prompt and of itself (a quarter at least). What is given back leaves the cache.
- Whenever a request begins, the sequences of all idle slots are copied to the prompt cache, too.
  It keeps none that begins another it has and none that is larger than itself, and drops the
  oldest when it is full.
- One batch a step: a token of each sequence that decodes, then prompts, slot by slot, until it is
  full. At least one token of a prompt is computed anew. The last token said is never in the slot.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from preheat.core.costs import ServiceModel
from preheat.replay.kernel import Kernel

_LEAST_LIKENESS: Final = 0.1
"""`--slot-prompt-similarity`'s default."""
_LEAST_KEPT: Final = 0.5
_LEAST_FOUND: Final = 0.25


class Prompt(msgspec.Struct, gc=False):
    """A request as a slot sees it, and what came of it. Times are negative until they have come.

    `blocks` are its whole blocks, root first; `bytes` is the length of its text. Equal keys are
    equal prompts. Of one session (empty: of none) a later prompt is an earlier one with its answer
    and more, where their blocks don't say otherwise.
    """

    number: int
    arrived_at: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    bytes: int = 0
    session: str = ""
    key: str = ""
    worker: int = -1
    cached_tokens: int = 0
    done_tokens: int = 0  # of prompt and answer, in its slot
    started_at: float = -1.0
    first_at: float = -1.0
    ended_at: float = -1.0

    @property
    def held_tokens(self) -> int:
        """Of prompt and answer together, when all is said."""
        return self.input_tokens + self.output_tokens - 1


class ServerSpec(msgspec.Struct, frozen=True):
    """How a server is set up; `cache_bytes` is its prompt cache (`--cache-ram`), 0 is none."""

    slots: int = 2
    batch_tokens: int = 128
    cache_bytes: int = 256 * 2**20
    token_bytes: int = 23_040


Overlap = Callable[[Prompt, Prompt], int]
"""How many leading tokens a held prompt with its answer shares with another prompt."""


class Host(msgspec.Struct):
    """A machine whose servers slow each other: by `slowdown` for each other one that works."""

    slowdown: float = 0.0
    working: int = 0


class _Slot:
    def __init__(self) -> None:
        self.used_at = -1.0
        self.holds: Prompt | None = None  # whose sequence
        self.is_busy = False


class Server:
    """One process. `on_end` hears of each request that is answered."""

    def __init__(
        self,
        spec: ServerSpec,
        service: ServiceModel,
        kernel: Kernel,
        overlap: Overlap,
        on_end: Callable[[Prompt], None],
        *,
        host: Host | None = None,
    ) -> None:
        self.in_flight = 0
        self.prefill_s = 0.0  # of steps that computed a piece of a prompt
        self._spec = spec
        self._service = service
        self._kernel = kernel
        self._overlap = overlap
        self._on_end = on_end
        self._host = host if host is not None else Host()
        self._slots = [_Slot() for _ in range(spec.slots)]
        self._cache: list[Prompt] = []  # the oldest first
        self._waiting: deque[Prompt] = deque()
        self._is_stepping = False

    def submit(self, prompt: Prompt) -> None:
        """A request has come. One that comes during a step waits for its end."""
        self.in_flight += 1
        self._waiting.append(prompt)
        if not self._is_stepping:
            self._step()

    # Slots -----------------------------------------------------------------------------------

    def _take_waiting(self) -> None:
        while self._waiting:
            slot = self._choose(self._waiting[0])
            if slot is None:
                return
            prompt = self._waiting.popleft()
            prompt.cached_tokens = min(self._shared(slot.holds, prompt), prompt.input_tokens - 1)
            prompt.done_tokens = prompt.cached_tokens
            slot.holds, slot.is_busy = prompt, True
            for idle in self._slots:
                if not idle.is_busy:
                    self._save(idle.holds)

    def _choose(self, prompt: Prompt) -> _Slot | None:
        """The slot for it, with the best sequence for it."""
        idle = [slot for slot in self._slots if not slot.is_busy]
        if not idle:
            return None
        best, shared = None, _LEAST_LIKENESS * prompt.input_tokens
        for slot in idle:
            here = self._shared(slot.holds, prompt)
            if here > shared:
                best, shared = slot, here
        if best is not None and best.holds is not None:
            if shared < _LEAST_KEPT * best.holds.done_tokens:
                self._exchange(best, prompt)
            return best
        oldest = idle[0]
        for slot in idle[1:]:
            if slot.used_at <= oldest.used_at:
                oldest = slot
        self._exchange(oldest, prompt)
        return oldest

    def _shared(self, held: Prompt | None, prompt: Prompt) -> int:
        if held is None:
            return 0
        return min(self._overlap(held, prompt), held.done_tokens, prompt.input_tokens)

    # The prompt cache ------------------------------------------------------------------------

    def _exchange(self, slot: _Slot, prompt: Prompt) -> None:
        """Keep the slot's sequence, and give it a better one for this prompt."""
        self._save(slot.holds)
        if not self._spec.cache_bytes:
            return
        shared, kept = 0, -1.0
        if slot.holds is not None:
            shared = self._shared(slot.holds, prompt)
            kept = shared / slot.holds.done_tokens
        found = None
        for held in self._cache:
            here = self._shared(held, prompt)
            part = here / held.done_tokens
            if part >= _LEAST_FOUND and part > kept and here > shared:
                found, shared, kept = held, here, part
        if found is not None:
            self._cache.remove(found)
            slot.holds = found

    def _save(self, held: Prompt | None) -> None:
        """Copy a sequence into the cache, unless it begins one that is there or is too large."""
        room = self._spec.cache_bytes // self._spec.token_bytes
        if held is None or not 0 < held.done_tokens <= room:
            return
        if any(self._begins(held, other) for other in self._cache):
            return
        self._cache = [other for other in self._cache if not self._begins(other, held)]
        while sum(one.done_tokens for one in self._cache) + held.done_tokens > room:
            del self._cache[0]
        self._cache.append(held)

    def _begins(self, held: Prompt, other: Prompt) -> bool:
        """Whether all of it is the beginning of the other."""
        if held is other:
            return True
        return self._overlap(held, other) >= held.done_tokens

    # Steps -----------------------------------------------------------------------------------

    def _step(self) -> None:
        """Begin the next batch, if there is anything to do."""
        self._take_waiting()
        service, now = self._service, self._kernel.now
        left = self._spec.batch_tokens
        contexts, chunks = 0, []
        busy = [slot.holds for slot in self._slots if slot.is_busy and slot.holds is not None]
        decoding = [one for one in busy if one.first_at >= 0.0]
        for one in decoding:
            contexts += one.done_tokens + 1
            left -= 1
        took_s = service.step_s + service.sequence_s * len(decoding) + service.context_s * contexts
        for one in busy:
            if one.first_at < 0.0 and left > 0:
                if one.started_at < 0.0:
                    one.started_at = now
                tokens = min(left, one.input_tokens - one.done_tokens)
                left -= tokens
                took_s += service.prefill_s(tokens, one.done_tokens)
                chunks.append((one, tokens))
        self._host.working += bool(busy) - self._is_stepping
        self._is_stepping = bool(busy)
        took_s *= 1.0 + self._host.slowdown * (self._host.working - 1)
        if chunks:
            self.prefill_s += took_s
        if busy:
            self._kernel.plan(now + took_s, self._end_step, (decoding, chunks))

    def _end_step(self, batch: tuple[list[Prompt], list[tuple[Prompt, int]]]) -> None:
        decoding, chunks = batch
        now = self._kernel.now
        for one in decoding:
            one.done_tokens += 1
        for one, tokens in chunks:
            one.done_tokens += tokens
            if one.done_tokens == one.input_tokens:
                one.first_at = now
        for slot in self._slots:
            said = slot.holds
            if not slot.is_busy or said is None or said.first_at < 0.0:
                continue
            if said.done_tokens >= said.held_tokens:
                slot.is_busy, slot.used_at = False, now
                said.ended_at = now
                self.in_flight -= 1
                self._on_end(said)
        self._step()
