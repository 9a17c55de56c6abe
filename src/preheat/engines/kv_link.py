"""A group's line to the learner of this machine: the one process that hears events for all workers."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from preheat.core.kv_events import Moved, Restarted
from preheat.core.kv_names import KvNames
from preheat.engines.beside import tell_bug
from preheat.engines.kv_feed import FeedCounts, OnStep
from preheat.engines.worker import OnEvent
from preheat.wire import kv_link as wire
from preheat.wire.kv_places import KvPlace

OnSent = Callable[[str, Sequence[int], Sequence[int]], None]
"""Told the url, the blocks of text and those of tokens of what another process has sent there."""

_CONNECT_S: Final = 1.0
_FLUSH_S: Final = 0.05
_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0
_MOST_WAITING_BYTES: Final = 2_097_152
"""Of prompts that wait to be told of; of more the others don't learn. Some 3,000 of 1,000 tokens each."""
_MOST_TOKEN_BLOCKS: Final = 1_024
"""Of a prompt. Of what is behind them the events tell."""
_MOST_UNREAD_BYTES: Final = 1_048_576
_STALE_S: Final = 120.0
"""So long what was told counts without the learner, as where a publisher is away."""
_AWAY_S: Final = 3.0
"""A learner that is started again takes a second."""
_READ_BYTES: Final = 262_144


class LearnerLink:
    """Connects, and connects again; what it is to hear is asked for each time."""

    def __init__(self, path: str, group: str, names: KvNames, on_event: OnEvent) -> None:
        self._path = path
        self._group = group
        self._names = names
        self._on_event = on_event
        self._on_sent: OnSent | None = None
        self._told: dict[str, _Told] = {}
        self._waiting: list[wire.Sent] = []
        self._waiting_bytes = 0
        self._writer: asyncio.StreamWriter | None = None
        self._secret = b""
        self._task: asyncio.Task[None] | None = None

    def start(self, on_sent: OnSent) -> None:
        """Begin, in the event loop."""
        if self._task is None:
            self._on_sent = on_sent
            self._task = asyncio.get_running_loop().create_task(self._run(), name="learner-link")

    def hear_at(self, place: KvPlace, url: str, name: str, on_step: OnStep) -> "_Told":
        """The learner as a source of one server's steps."""
        return _Told(self, wire.Listen(url, name, place), on_step)

    def sent(self, url: str, blocks: Sequence[int], token_blocks: Sequence[int]) -> None:
        """A prompt was sent there: tell the others soon."""
        one = wire.Sent(url, wire.packed(blocks), wire.packed(token_blocks[:_MOST_TOKEN_BLOCKS]))
        size = len(one.blocks) + len(one.token_blocks)
        if size and self._waiting_bytes + size <= _MOST_WAITING_BYTES:
            self._waiting.append(one)
            self._waiting_bytes += size

    async def aclose(self) -> None:
        """No more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def begin(self, told: "_Told") -> None:
        """Hear that server."""
        self._told[told.listen.url] = told
        self._write(told.listen)

    def end(self, told: "_Told") -> None:
        """No more."""
        if self._told.get(told.listen.url) is told:
            del self._told[told.listen.url]
            self._write(wire.Ignore(told.listen.url))

    async def _run(self) -> None:
        pause_s, is_away = _PAUSE_S, False
        lost_at = time.monotonic()
        while True:
            began_at = time.monotonic()
            try:
                with contextlib.suppress(OSError, EOFError, wire.LinkError, msgspec.MsgspecError):
                    async with asyncio.timeout(_CONNECT_S):
                        reader, self._writer = await asyncio.open_unix_connection(self._path)
                    if is_away:
                        is_away = False
                        self._on_event("learner-back", {})
                    try:
                        await self._talk(reader)
                    finally:
                        self._writer.close()
                        self._writer = None
                        lost_at = time.monotonic()
            except Exception as bug:  # noqa: BLE001  without a link nothing is heard any more
                tell_bug(self._on_event, bug)
            if not is_away and time.monotonic() - lost_at > _AWAY_S:
                is_away = True
                self._on_event("learner-away", {})
            is_stale = time.monotonic() - lost_at > _STALE_S
            for told in self._told.values():
                told.lost(is_stale=is_stale)
            has_held = time.monotonic() - began_at > _LONGEST_PAUSE_S
            pause_s = _PAUSE_S if has_held else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _talk(self, reader: asyncio.StreamReader) -> None:
        self._write(wire.Join(self._group))
        for told in self._told.values():
            self._write(told.listen)
        flushing = asyncio.get_running_loop().create_task(self._flush())
        try:
            buffer = bytearray()
            while data := await reader.read(_READ_BYTES):
                buffer += data
                for body in wire.bodies(buffer):
                    await self._take(wire.WORKER_READS.decode(body))
                    await asyncio.sleep(0)
        finally:
            flushing.cancel()

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            prompts, self._waiting, self._waiting_bytes = self._waiting, [], 0
            if prompts:
                self._write(wire.AllSent(prompts))

    async def _take(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Hello():
                self._secret = message.secret
            case wire.Heard():
                if message.block_tokens:
                    self._names.adopt(self._secret, message.block_tokens)
                for name in message.adapters:
                    self._names.learn_adapter(name)
                told = self._told.get(message.url)
                if told is not None:
                    told.take(message)
            case wire.AllSent():
                for one in message.prompts:
                    if self._on_sent is not None:
                        self._on_sent(
                            one.url, wire.unpacked(one.blocks), wire.unpacked(one.token_blocks)
                        )
                        await asyncio.sleep(0)

    def _write(self, message: wire.ToLearner) -> None:
        writer = self._writer
        if writer is not None and writer.transport.get_write_buffer_size() < _MOST_UNREAD_BYTES:
            writer.write(wire.frame(message))


class _Told:
    """One server's steps, from the learner."""

    def __init__(self, link: LearnerLink, listen: wire.Listen, on_step: OnStep) -> None:
        self.listen = listen
        self.counts = FeedCounts()
        self._link = link
        self._on_step = on_step

    async def run(self) -> None:
        """Hear it until cancelled."""
        self._link.begin(self)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._link.end(self)

    def take(self, heard: wire.Heard) -> None:
        """What it says."""
        # The learner may be of another version: counts that only one of us has are passed over.
        self.counts = msgspec.convert(heard.counts, FeedCounts)
        if heard.is_empty:
            self._on_step(Restarted())
        if heard.block_tokens:
            came, gone = wire.unpacked(heard.came), wire.unpacked(heard.gone)
            self._on_step(Moved(came, gone, heard.trust, heard.anew))

    def lost(self, *, is_stale: bool) -> None:
        """There is no learner at this moment."""
        self._on_step(Moved((), (), "estimated" if is_stale else "doubted", anew=is_stale))
