"""One server's KV events, from whoever hears them to the index."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from preheat.core.kv_events import (
    Batch,
    Cleared,
    Joined,
    Lost,
    Restarted,
    Step,
    Stored,
    Sure,
    Unsure,
    in_pieces,
)
from preheat.core.kv_names import KvNames
from preheat.core.told import Change, ToldResidency
from preheat.engines.beside import tell_bug
from preheat.engines.kv_feed import FeedCounts, OnStep
from preheat.engines.worker import OnEvent
from preheat.errors import ConfigError

_MOST_WAITING: Final = 1_024
"""Steps that wait to be taken. What comes then is lost, and counted so."""
_MOST_WAITING_TOKENS: Final = 4_194_304
"""Of all of them: some 150 MB."""
_PIECE_BLOCKS: Final = 64
"""Taken at once: half a millisecond."""
_AGE_S: Final = 1.0
_AGAIN_S: Final = 30.0
_QUIET_S: Final = 10.0
"""Between two log lines of one kind; the counts tell of all."""
_MOST_EARLY: Final = 64


class Source(Protocol):
    """Whoever hears the events: a feed of ours, or another process."""

    @property
    def counts(self) -> FeedCounts:
        """What came of it so far."""

    async def run(self) -> None:
        """Tell each step, until cancelled. Raises ConfigError where the address can't be used."""


class Index(Protocol):
    """What is kept in step."""

    def hears(self, worker: int, told: ToldResidency) -> None:
        """It tells by events what it holds from now on."""

    def told(self, worker: int, change: Change) -> None:
        """What its events have changed."""

    def cleared(self, worker: int) -> None:
        """It says that it holds nothing any more."""


Hear = Callable[[OnStep], Source]


class KvEar:
    """Keeps what the index knows of one worker in step with what the worker tells.

    Nothing is known of it by tokens before its first block has told how large its blocks are.
    """

    def __init__(
        self,
        number: int,
        name: str,
        index: Index,
        names: KvNames,
        hear: Hear,
        on_event: OnEvent,
    ) -> None:
        self._number = number
        self._name = name
        self._index = index
        self._names = names
        self._on_event = on_event
        self._source = hear(self._note)
        self._told: ToldResidency | None = None
        self._early: deque[Step] = deque(maxlen=_MOST_EARLY)
        self._steps: asyncio.Queue[tuple[Step, int]] = asyncio.Queue()
        self._waiting_tokens = 0
        self._missed = 0
        self._is_full = False
        self._quiet_until: dict[str, float] = {}

    @property
    def counts(self) -> FeedCounts:
        """What was heard so far."""
        counts = self._source.counts
        return msgspec.structs.replace(counts, lost=counts.lost + self._missed)

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear())
            tasks.create_task(self._take_all())

    async def _hear(self) -> None:
        while True:
            try:
                await self._source.run()
            except ConfigError as error:
                self._say("kv-events-refused", why=str(error))
            except Exception as bug:  # noqa: BLE001  one server's events mustn't stop another's
                self._say("kv-events-refused", why=f"a defect of ours: {type(bug).__name__}")
            await asyncio.sleep(_AGAIN_S)

    def _note(self, step: Step) -> None:
        size = _size_of(step)
        has_room = not size or self._waiting_tokens + size <= _MOST_WAITING_TOKENS
        if self._steps.qsize() < _MOST_WAITING and has_room:
            self._is_full = False
        elif self._is_full:
            self._missed += 1
            return
        else:
            self._is_full = True
            self._missed += 1
            step, size = Lost(1), 0
        self._waiting_tokens += size
        self._steps.put_nowait((step, size))

    async def _take_all(self) -> None:
        while True:
            try:
                await self._take_next()
            except Exception as bug:  # noqa: BLE001  what comes next is worth hearing
                self._say_bug(bug)
                self._miss()
                await asyncio.sleep(0)

    async def _take_next(self) -> None:
        try:
            async with asyncio.timeout(_AGE_S):
                step, size = await self._steps.get()
        except TimeoutError:
            if self._told is not None:
                self._index.told(self._number, self._told.aged(time.monotonic()))
            return
        self._waiting_tokens -= size
        self._say_of(step)
        for piece in in_pieces(step, _PIECE_BLOCKS):
            self._take(piece)
            await asyncio.sleep(0)

    def _miss(self) -> None:
        """A defect of ours has cost a step: it is as if nobody had heard it."""
        self._missed += 1
        try:
            self._take(Lost(1))
        except Exception as bug:  # noqa: BLE001  it doubts before it does anything else
            self._say_bug(bug)

    def _take(self, step: Step) -> None:
        told = self._told
        if told is None:
            if isinstance(step, Restarted):
                self._early.clear()
            self._early.append(step)
            if not self._is_sized(step):
                return
            told = ToldResidency(block_tokens=self._names.block_tokens, root=self._names.root)
            self._index.hears(self._number, told)
            self._told = told
            while len(self._early) > 1:
                self._apply(told, self._early.popleft())
            self._early.clear()
        self._apply(told, step)

    def _apply(self, told: ToldResidency, step: Step) -> None:
        self._index.told(self._number, told.take(step, time.monotonic()))
        if told.is_empty and _may_empty(step):
            self._index.cleared(self._number)

    def _is_sized(self, step: Step) -> bool:
        """Whether it is known by now how large blocks are."""
        if isinstance(step, Batch):
            for event in step.events:
                if isinstance(event, Stored):
                    self._names.learn_size(event.block_tokens)
        return bool(self._names.block_tokens)

    def _say_of(self, step: Step) -> None:
        match step:
            case Joined():
                self._say("kv-events-heard", whole=step.whole)
            case Sure():
                self._say("kv-events-heard", whole=True)
            case Restarted():
                self._say("kv-events-restarted")
            case Unsure():
                self._say("kv-events-broken")
            case Lost():
                self._say("kv-events-lost", batches=step.batches)
            case _:
                pass

    def _say_bug(self, bug: Exception) -> None:
        tell_bug(lambda event, fields: self._say(event, **fields), bug)

    def _say(self, event: str, **fields: object) -> None:
        now = time.monotonic()
        if now >= self._quiet_until.get(event, 0.0):
            self._quiet_until[event] = now + _QUIET_S
            self._on_event(event, {"worker": self._name, **fields})


def _size_of(step: Step) -> int:
    """Tokens of a step, or names where those are more."""
    if not isinstance(step, Batch):
        return 0
    return sum(
        max(len(event.token_ids), len(event.block_hashes))
        if isinstance(event, Stored)
        else len(event.block_hashes)
        for event in step.events
        if not isinstance(event, Cleared)
    )


def _may_empty(step: Step) -> bool:
    """Whether it may say that all is gone, so that what was sent there is gone, too."""
    match step:
        case Restarted():
            return True
        case Batch():
            return any(isinstance(event, Cleared) for event in step.events)
    return False
