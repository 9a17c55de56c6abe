"""llama.cpp's server in simulated time: slots, longest common prefixes, a prompt cache in memory.

Which slot a prompt gets and what it finds there: `core.slot_rules`. Time:

- One batch a step: a token of each sequence that decodes, then prompts, slot by slot, until it is
  full. At least one token of a prompt is computed anew. The last token said is never in the slot.
"""

from collections import deque
from collections.abc import Callable

import msgspec

from preheat.core.costs import ServiceModel
from preheat.core.slot_rules import SlotRules
from preheat.replay.kernel import Kernel


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


class Server:
    """One process. `on_end` hears of each request that is answered, `on_first` of its first token."""

    def __init__(
        self,
        spec: ServerSpec,
        service: ServiceModel,
        kernel: Kernel,
        overlap: Overlap,
        on_end: Callable[[Prompt], None],
        *,
        host: Host | None = None,
        on_first: Callable[[Prompt], None] | None = None,
    ) -> None:
        self.in_flight = 0
        self.prefill_s = 0.0  # of steps that computed a piece of a prompt
        self._batch_tokens = spec.batch_tokens
        self._service = service
        self._kernel = kernel
        self._on_end = on_end
        self._on_first = on_first
        self._host = host if host is not None else Host()
        self._rules: SlotRules[Prompt] = SlotRules(
            spec.slots,
            spec.cache_bytes // spec.token_bytes,
            overlap=overlap,
            size=lambda held: held.done_tokens,
            asked=lambda prompt: prompt.input_tokens,
        )
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
            taken = self._rules.take(self._waiting[0])
            if taken is None:
                return
            prompt = self._waiting.popleft()
            prompt.cached_tokens = min(taken[1], prompt.input_tokens - 1)
            prompt.done_tokens = prompt.cached_tokens

    # Steps -----------------------------------------------------------------------------------

    def _step(self) -> None:
        """Begin the next batch, if there is anything to do."""
        self._take_waiting()
        service, now = self._service, self._kernel.now
        left = self._batch_tokens
        contexts, chunks = 0, []
        busy = [slot.holds for slot in self._rules.slots if slot.is_busy and slot.holds is not None]
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
                if self._on_first is not None:
                    self._on_first(one)
        for slot in self._rules.slots:
            said = slot.holds
            if not slot.is_busy or said is None or said.first_at < 0.0:
                continue
            if said.done_tokens >= said.held_tokens:
                slot.is_busy, slot.used_at = False, now
                said.ended_at = now
                self.in_flight -= 1
                self._on_end(said)
        self._step()
