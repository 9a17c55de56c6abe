"""Listens to a publisher of KV events for a moment, and keeps what came as it came."""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any, Final, Self

import msgspec

from preheat.core.kv_events import Stored
from preheat.errors import ConfigError
from preheat.wire.kv_events import MOST_BYTES, EventsError, read_batch, read_live
from preheat.wire.kv_places import Meeting

_MOST_MESSAGES: Final = 1_000
_MOST_BLOCKS: Final = 4_096
_SUBSCRIBED_S: Final = 0.2
"""Until the publisher knows of the subscription."""
_QUIET_S: Final = 0.5
"""So long nothing must come for what was asked to be told: a step of an engine is shorter."""

REMEDY: Final = "pip install 'preheat[kv]'"


class Block(msgspec.Struct, frozen=True):
    """A block, as an engine tells it. `name` is the engine's hash, its low 64 bits; `keys`: what else
    went into it."""

    name: int
    tokens: tuple[int, ...]
    keys: tuple[str | bytes, ...]
    lora_name: str


class Heard(msgspec.Struct, kw_only=True):
    """What came. `form`: how events and hashes are spelled; `error`: why nobody could listen."""

    meeting: Meeting
    is_connected: bool = False
    error: str = ""
    messages: int = 0
    bad: int = 0
    form: str = ""
    block_tokens: int = 0
    blocks: list[Block] = msgspec.field(default_factory=list)

    def take(self, frames: list[bytes]) -> None:
        """One message."""
        self.messages += 1
        try:
            _, payload = read_live(frames)
            batch = read_batch(payload)
        except EventsError:
            self.bad += 1
            return
        self.form = form_of(payload) or self.form
        for event in batch.events:
            if isinstance(event, Stored) and event.token_ids:
                self.block_tokens = event.block_tokens
                self.blocks += _blocks_of(event)
        del self.blocks[_MOST_BLOCKS:]


def _blocks_of(event: Stored) -> Iterator[Block]:
    size = event.block_tokens
    for at, name in enumerate(event.block_hashes):
        keys = tuple(event.extra_keys[at]) if at < len(event.extra_keys) else ()
        tokens = tuple(event.token_ids[at * size : (at + 1) * size])
        yield Block(name, tokens, keys, event.lora_name)


def form_of(payload: bytes) -> str:
    """How the first event that stores blocks is spelled; nothing where there is none."""
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    events = raw.get("events") if isinstance(raw, dict) else raw[1] if _is_batch(raw) else None
    for event in events if isinstance(events, list) else ():
        is_map = isinstance(event, dict)
        if is_map:
            kind, hashes = event.get("type"), event.get("block_hashes")
        else:
            kind, hashes = event[:2] if isinstance(event, list) and len(event) > 1 else ("", ())
        if kind == "BlockStored" and isinstance(hashes, list) and hashes:
            spelled = "bytes" if isinstance(hashes[0], bytes) else "integers"
            return f"{'maps' if is_map else 'arrays'}, with hashes as {spelled}"
    return ""


class Ear:
    """A subscriber at one meeting place, for as long as it is entered. `heard` says what came."""

    def __init__(self, meeting: Meeting) -> None:
        self.heard = Heard(meeting=meeting)
        self._zmq = _zmq()

    async def __aenter__(self) -> Self:
        zmq = self._zmq
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.maxmsgsize = 8 * MOST_BYTES
        self._socket.linger = 0
        self._socket.ipv6 = True
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.subscribe(b"")
        meeting = self.heard.meeting
        try:
            (self._socket.bind if meeting.binds else self._socket.connect)(meeting.address)
        except zmq.ZMQError as error:
            self.heard.error = str(error)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    async def meets(self, within_s: float) -> bool:
        """Whether a publisher is there. A socket that was bound subscribes to who has connected only when
        it is touched, and what is published before is lost."""
        if not self.heard.error and await self._monitor.poll(within_s * 1000.0):
            await self._monitor.recv_multipart()
            self.heard.is_connected = True
            await self._socket.poll(_SUBSCRIBED_S * 1000.0)
        return self.heard.is_connected

    async def hear(self, within_s: float) -> None:
        """What comes until it is quiet; so long at most for the first."""
        wait_s = within_s
        while self.heard.messages < _MOST_MESSAGES and await self._socket.poll(wait_s * 1000.0):
            self.heard.take(await self._socket.recv_multipart())
            wait_s = _QUIET_S


def _is_batch(raw: Any) -> bool:
    return isinstance(raw, list) and len(raw) > 1


def _zmq() -> ModuleType:
    try:
        import_module("zmq.asyncio")
        return import_module("zmq")
    except ImportError as error:
        raise ConfigError(f"KV events need pyzmq: {REMEDY}") from error
