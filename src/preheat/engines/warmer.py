"""Warms prefixes and adapters on one real server, and finds out whether they are warm.

The rules are `core.warmup`'s. What is done here: a prefix becomes token ids and goes in growing
pieces (llama.cpp continues in the slot that holds the last piece; block caches find their blocks),
each in an idle moment.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from preheat.core.warmup import (
    ChunkSize,
    Mark,
    Outcome,
    Pace,
    Proof,
    Run,
    Underway,
    Walk,
    of_adapter,
    of_prefix,
    probing_order,
)
from preheat.engines.dialects.calls import Prompt
from preheat.engines.dialects.readings import Cached, Slot
from preheat.engines.direct import Direct
from preheat.engines.idle import Computed, Idle, NeverIdleError, Patience, RefusedError
from preheat.engines.prefixes import as_ids, bytes_of, name_of
from preheat.engines.slot_files import SlotFiles
from preheat.errors import EngineError

_LOOKS: Final = 5


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """How far a warm-up is: where it goes on if it is stopped now. `tokens` is 0 until they are known,
    `waits_for` what it waits for, or empty."""

    prefix: str
    tokens: int = 0
    done_tokens: int = 0
    slot: int | None = None
    waits_for: str = ""


class Warmer:
    """One server. Warm-ups run one after the other; who wants a prefix that is under way joins it.

    `patience_s` is how long each may wait for idle moments in all; then its outcome is `busy`. With
    `files` a prefix is read from its slot file where there is one, and written at its end. `on_step` must not wait.
    """

    def __init__(
        self,
        direct: Direct,
        *,
        pace: Pace | None = None,
        patience_s: float = 600.0,
        files: SlotFiles | None = None,
        on_step: Callable[[Step], None] = lambda _: None,
    ) -> None:
        pace = pace or Pace()
        self._direct = direct
        self._idle = Idle(direct, pace)
        self._size = ChunkSize(pace)
        self._patience_s = patience_s
        self._files = files
        self._on_step = on_step
        self._underway = Underway()
        self._ends: dict[Run, asyncio.Future[Outcome]] = {}
        self._turn = asyncio.Lock()

    async def warm(self, prompt: Prompt, mark: Mark | None = None) -> Outcome:
        """Have it computed and kept; `mark` says how far an earlier run came. Raises nothing but
        CancelledError: what `on_step` told last is then where it can go on."""
        where = f"{prompt.model}\0{prompt.adapter}\0{prompt.salt}"
        run, leads = self._underway.begin(where, bytes_of(prompt))
        while not leads:
            ended = self._ends[run]
            await asyncio.wait([ended])
            if not ended.cancelled():
                return ended.result()
            run, leads = self._underway.begin(where, bytes_of(prompt))  # its leader was called off
        self._ends[run] = ended = asyncio.get_running_loop().create_future()
        try:
            async with self._turn:
                outcome = await self._lead(prompt, mark)
            ended.set_result(outcome)
            return outcome
        finally:
            ended.cancel()
            self._underway.end(run)
            del self._ends[run]

    async def prove(
        self, prompt: Prompt, warmed_tokens: int | None = None, *, tells: bool = False
    ) -> Proof:
        """Whether it is warm now, by a probe in an idle moment, which computes what isn't there. So many
        `warmed_tokens`, if not all; `tells`: its answers are known to tell what was cached."""
        try:
            async with self._turn:
                dialect = await self._direct.known()
                prompt = await as_ids(self._direct, prompt)
                block_tokens = await self._direct.block_tokens()
                patience = Patience(self._patience_s)
                cached = await self._idle.probe(prompt, patience, block_tokens, tells=tells)
        except (EngineError, RefusedError, NeverIdleError) as error:
            return Proof(verdict="unknown", why=str(error))
        if cached is None:
            return Proof(verdict="unknown", why="its answer tells no usage")
        return of_prefix(
            cached.prompt_tokens if warmed_tokens is None else warmed_tokens,
            prompt_tokens=cached.prompt_tokens,
            cached_tokens=cached.cached_tokens,
            block_tokens=block_tokens,
            least_tokens=dialect.least_tokens,
        )

    async def order(self, marks: Sequence[Mark | None]) -> list[int]:
        """In which order to prove these, so that no probe pushes out what a later one asks for."""
        try:
            slots = await self._direct.slots()
        except EngineError:
            slots = None
        held = None if slots is None else {one.number: one.tokens or 0 for one in slots}
        return probing_order(marks, held)

    async def load_adapter(self, name: str, path: str = "") -> Outcome:
        """Have it loaded, where that isn't so, `path` is known and the server lets us."""
        state: Literal["done", "failed"] = "done"
        said = ""
        try:
            if name not in (await self._adapters() or ()):
                await self._load(name, path)
        except (EngineError, RefusedError) as error:
            state, said = "failed", str(error)
        return Outcome(kind="adapter", worker=self._direct.url, object=name, state=state, why=said)

    async def prove_adapter(self, name: str) -> Proof:
        """Whether it is loaded, and answers under its name."""
        try:
            dialect = await self._direct.known()
            listed = await self._adapters()
            call = dialect.warm(Prompt(text="a", adapter=name))
            status = None if call is None else (await self._direct.ask(call))[0]
        except EngineError as error:
            return Proof(verdict="unknown", why=str(error))
        is_final = status is not None and status < 500 and status != 429
        return of_adapter(name, listed, answers=status == 200 if is_final else None)

    # What a leader does.

    async def _lead(self, prompt: Prompt, mark: Mark | None) -> Outcome:
        warming = _Warming(name_of(prompt), self._patience_s, self._on_step)
        try:
            asked = await as_ids(self._direct, prompt)
            if asked.ids is None:
                await self._at_once(asked, warming)
            else:
                await self._in_chunks(asked, mark, warming)
                if self._files is not None and warming.slot is not None:
                    await self._files.save(warming.name, warming.slot)
        except NeverIdleError as error:
            return warming.outcome(self._direct.url, "busy", str(error))
        except (EngineError, RefusedError) as error:
            return warming.outcome(self._direct.url, "failed", str(error))
        return warming.outcome(self._direct.url, "done")

    async def _at_once(self, prompt: Prompt, warming: "_Warming") -> None:
        """Where nobody but the server knows the tokens."""
        computed = await self._idle.compute(prompt, warming.patience)
        tokens = 0 if computed.cached is None else computed.cached.prompt_tokens
        warming.walk = Walk(tokens=tokens)
        warming.did(tokens, computed)

    async def _in_chunks(self, prompt: Prompt, mark: Mark | None, warming: "_Warming") -> None:
        assert prompt.ids is not None
        tokens = len(prompt.ids)
        done_tokens, slot = 0 if mark is None else mark.done_tokens, prompt.slot
        if slot is None:  # else who names it knows what it holds
            done_tokens, slot = await self._begin_at(tokens, mark, warming)
        warming.walk = walk = Walk(tokens=tokens, done_tokens=min(done_tokens, tokens))
        while True:
            end = walk.end(self._size.tokens)
            piece = msgspec.structs.replace(prompt, ids=prompt.ids[:end], slot=slot)
            computed = await self._idle.compute(piece, warming.patience)
            self._size.took(warming.did(end, computed), computed.took_s)
            if walk.is_over:
                return
            slot = prompt.slot

    async def _begin_at(
        self, tokens: int, mark: Mark | None, warming: "_Warming"
    ) -> tuple[int, int | None]:
        """How many tokens are there already, and the slot to begin in; None: the server's choice.

        A block cache is walked again from its start, which costs little where it is warm. A shorter
        prompt would cut a slot's sequence off: there it goes on where the slot that was marked still
        holds as much, or where a slot file ends. A new one begins in an empty slot: its first piece is
        short, so that the template's tokens alone make it look like any other prompt, and the server
        would put it in that one's place. Without an empty slot the server chooses: it then keeps what it
        pushes out in host memory, and doesn't where it is told a slot.
        """
        slots = await self._slots(mark, warming.patience)
        if slots is None:
            return 0, None
        if tokens >= (most := min((one.ctx_tokens for one in slots), default=tokens + 1)):
            raise RefusedError(f"its slots hold {most} tokens, and the prefix has {tokens}")
        idle = [one for one in slots if not one.is_busy]
        if mark is not None and mark.tokens == tokens:
            for one in idle:
                if one.number == mark.slot and (one.tokens or 0) >= mark.done_tokens:
                    return mark.done_tokens, None
        if self._files is not None:
            restored = await self._files.restore_into_idle(warming.name)
            if restored is not None:
                return restored[1], None
        return 0, next((one.number for one in idle if not one.tokens), None)

    async def _slots(self, mark: Mark | None, patience: Patience) -> list[Slot] | None:
        """They, where the marked one is idle or remains busy: it may still be at the piece at which an
        earlier run was stopped."""
        for _ in range(_LOOKS):
            slots = await self._direct.slots()
            if mark is None or not any(
                one.is_busy and one.number == mark.slot for one in slots or ()
            ):
                break
            await self._idle.pause(patience, "its slot is busy")
        return slots

    async def _adapters(self) -> list[str] | None:
        dialect = await self._direct.known()
        body = await self._direct.told(dialect.adapters())
        found = None if body is None else dialect.read_adapters(body)
        return None if found is None else [one.name for one in found]

    async def _load(self, name: str, path: str) -> None:
        dialect = await self._direct.known()
        call = dialect.load_adapter(name, path)
        if call is None:
            raise RefusedError(f"{dialect.name} loads adapters at its start only")
        if not path:
            raise RefusedError(f"{name} isn't loaded, and nobody says where it lies")
        done = dialect.read_done(*await self._direct.ask(call))
        if done.ok is False:
            raise RefusedError(done.why)


class _Warming:
    """One warm-up and its figures."""

    def __init__(self, name: str, patience_s: float, on_step: Callable[[Step], None]) -> None:
        self.name = name
        self.walk = Walk(tokens=0)
        self.slot: int | None = None
        self.patience = Patience(patience_s, tell=self._tell)
        self._on_step = on_step
        self._waits_for = ""
        self._chunks: list[float] = []

    def did(self, end: int, computed: Computed) -> int:
        """A piece up to `end` is there; how many tokens were computed for it."""
        cached = computed.cached or Cached(end, None)
        fresh = self.walk.did(end, cached.cached_tokens)
        self.slot = cached.slot
        self._chunks.append(computed.took_s)
        self._tell("")
        return fresh

    def outcome(self, url: str, state: Literal["done", "busy", "failed"], why: str = "") -> Outcome:
        """What it came to."""
        return Outcome(
            kind="prefix",
            worker=url,
            object=self.name,
            state=state,
            why=why,
            tokens=self.walk.done_tokens,
            computed_tokens=self.walk.computed_tokens,
            chunks=len(self._chunks),
            longest_chunk_s=max(self._chunks, default=0.0),
            took_s=sum(self._chunks),
            waited_s=self.patience.waited_s,
            slot=self.slot,
        )

    def _tell(self, waits_for: str) -> None:
        self._on_step(
            Step(
                prefix=self.name,
                tokens=self.walk.tokens,
                done_tokens=self.walk.done_tokens,
                slot=self.slot,
                waits_for=waits_for,
            )
        )
