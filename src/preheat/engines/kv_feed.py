"""An engine's KV events as they come over ZMQ, in order, with what was lost asked for again."""

import asyncio
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import msgspec

from preheat.core.kv_events import Batch, Lost, Restarted, Step
from preheat.core.kv_stream import KvStream
from preheat.errors import ConfigError
from preheat.wire.kv_events import (
    MOST_BYTES,
    EventsError,
    read_batch,
    read_live,
    read_replay,
    replay_request,
)
from preheat.wire.kv_places import meet

OnStep = Callable[[Step], None]

_POLL_S: Final = 1.0
_AT_ONCE: Final = 64
"""Messages between two turns of everybody else on the loop."""
_BYTES_AT_ONCE: Final = 262_144
"""Likewise: some 5 ms of reading them."""
_REPLAY_STEP_S: Final = 5.0
"""Between two replies. vLLM's publisher looks for requests ten times a second."""
_REPLAY_S: Final = 30.0
_REPLAY_AGAIN_S: Final = 60.0
"""So long no replay is asked for after one that didn't come: events go on meanwhile."""
_QUEUE: Final = 10_000
"""Messages that may wait here: as many as vLLM's publisher keeps for replays."""
_FRAME_BYTES: Final = 8 * MOST_BYTES
"""A larger one ends the connection; one between this and `MOST_BYTES` is only not read."""
_HEARTBEAT_S: Final = 5.0
_SILENCE_S: Final = 15.0


class FeedCounts(msgspec.Struct):
    """Of a feed since it began. `gaps` were filled by replays or not; `lost` are the batches of those
    that weren't. `bad` couldn't be read; `dropped` were repeats, or came too late."""

    received: int = 0
    gaps: int = 0
    lost: int = 0
    replays: int = 0
    replayed: int = 0
    bad: int = 0
    dropped: int = 0
    restarts: int = 0
    breaks: int = 0


class KvFeed:
    """One publisher's stream: of one engine, or of one data-parallel rank.

    `endpoint` and `replay_endpoint` are spelled as in the engine's own `--kv-events-config`, `host`
    is where it runs. Every step of its stream goes to `on_step`, which must not wait or raise. `run`
    is the one task that does all; it ends when it is cancelled.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        on_step: OnStep,
        host: str = "127.0.0.1",
        replay_endpoint: str = "",
        topic: str = "",
        rank: int = 0,
        queue: int = _QUEUE,
        replay_step_s: float = _REPLAY_STEP_S,
    ) -> None:
        self._zmq = load_zmq()
        self.meeting = meet(endpoint, host, rank)
        self._replay_address = meet(replay_endpoint, host, rank).address if replay_endpoint else ""
        self._topic = topic
        self._queue = queue
        self._replay_step_s = replay_step_s
        self._no_replay_until = 0.0
        self._on_step = on_step
        self._stream = KvStream(can_replay=bool(replay_endpoint))
        self._counts = FeedCounts()

    @property
    def counts(self) -> FeedCounts:
        """What came of it so far."""
        stream = self._stream
        return msgspec.structs.replace(
            self._counts, gaps=stream.gaps, dropped=stream.repeats + stream.late
        )

    async def run(self) -> None:
        """Listen until cancelled. Raises ConfigError where the address can't be used."""
        zmq = self._zmq
        context = zmq.asyncio.Context()
        try:
            socket = self._socket(context, zmq.SUB)
            monitor = socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            socket.subscribe(self._topic.encode())
            self._meet(socket)
            poller = zmq.asyncio.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            while True:
                await self._replay(context)
                ready = dict(await poller.poll(_POLL_S * 1000.0))
                if monitor in ready:
                    self._notice(await monitor.recv_multipart())
                if socket in ready:
                    await self._receive(socket)
                await asyncio.sleep(0)
        finally:
            context.destroy(linger=0)

    async def _receive(self, socket: Any) -> None:
        """What has come by now, up to a limit, or until a replay is wanted."""
        left = _BYTES_AT_ONCE
        for _ in range(_AT_ONCE):
            try:
                frames = await socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            self._counts.received += 1
            try:
                number, payload = read_live(frames)
            except EventsError:
                self._counts.bad += 1
                continue
            self._stream.can_replay = self._may_replay()
            self._tell(self._stream.live(number, self._batch(payload)))
            left -= len(payload)
            if self._stream.wanted is not None or left < 0:
                return

    def _notice(self, frames: Sequence[bytes]) -> None:
        """What became of the connection."""
        event = int.from_bytes(frames[0][:2], "little")  # libzmq: 16 bits of event, 32 of value
        if event == self._zmq.EVENT_DISCONNECTED:
            self._counts.breaks += 1
            self._tell(self._stream.broken())
        else:
            self._stream.can_replay = self._may_replay()
            self._stream.mended()

    async def _replay(self, context: Any) -> None:
        """Ask for what is wanted, as often as something is. A socket for each: what one still had to
        say can't be taken for another's."""
        while (first := self._stream.wanted) is not None:
            self._counts.replays += 1
            socket = self._socket(context, self._zmq.DEALER)
            complete = False
            try:
                async with asyncio.timeout(_REPLAY_S):
                    socket.connect(self._replay_address)
                    await socket.send_multipart(replay_request(first))
                    complete = await self._take_replies(socket)
            except TimeoutError:
                pass
            finally:
                socket.close(linger=0)
            if not complete:
                self._no_replay_until = asyncio.get_running_loop().time() + _REPLAY_AGAIN_S
                self._stream.can_replay = False
            self._tell(self._stream.replay_ended(complete=complete))

    async def _take_replies(self, socket: Any) -> bool:
        """Whether they came to their end."""
        taken = 0
        while await socket.poll(self._replay_step_s * 1000.0):
            try:
                reply = read_replay(await socket.recv_multipart())
            except EventsError:
                self._counts.bad += 1
                return False
            if reply is None:
                return True
            steps = self._stream.replayed(reply[0], self._batch(reply[1]))
            self._counts.replayed += sum(isinstance(step, Batch) for step in steps)
            self._tell(steps)
            taken += 1
            if taken % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return False

    def _batch(self, payload: bytes) -> Batch | None:
        try:
            return read_batch(payload)
        except EventsError:
            self._counts.bad += 1
            return None

    def _tell(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Restarted():
                    self._counts.restarts += 1
                case Lost():
                    self._counts.lost += step.batches
                case _:
                    pass
            self._on_step(step)

    def _may_replay(self) -> bool:
        now = asyncio.get_running_loop().time()
        return bool(self._replay_address) and now >= self._no_replay_until

    def _socket(self, context: Any, kind: int) -> Any:
        zmq = self._zmq
        socket = context.socket(kind)
        socket.rcvhwm = self._queue
        socket.maxmsgsize = _FRAME_BYTES
        socket.linger = 0
        socket.ipv6 = True
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(_HEARTBEAT_S * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(_SILENCE_S * 1000))
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 5_000
        return socket

    def _meet(self, socket: Any) -> None:
        try:
            (socket.bind if self.meeting.binds else socket.connect)(self.meeting.address)
        except self._zmq.ZMQError as error:
            what = "listen at" if self.meeting.binds else "connect to"
            raise ConfigError(
                f"KV events: can't {what} {self.meeting.address} ({error}). A publisher with an address "
                "of one host connects to it, so that must be one of ours, and free; with "
                "tcp://*:PORT or ipc:// the engine listens instead."
            ) from error


def load_zmq() -> ModuleType:
    """The library. Raises ConfigError where it isn't installed."""
    try:
        import_module("zmq.asyncio")
        return import_module("zmq")
    except ImportError as error:
        raise ConfigError(
            "KV events need pyzmq. Install it: pip install 'preheat[kv]', or leave kv_events out."
        ) from error
