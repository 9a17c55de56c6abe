"""Tells the log process of every request, and never waits for it."""

import asyncio
import contextlib
import hashlib
import struct
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import msgspec

from preheat import __version__
from preheat.core.blocks import BLOCK_UNIT, prompt_of
from preheat.core.memo import Memo
from preheat.core.types import NOTHING_SPECIAL, Hit, Key, Request
from preheat.wire import journal, openai

_FLUSH_S: Final = 0.2
_CONNECT_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 2.0
_HELD_S: Final = 5.0
"""A connection that held so long was a good one: the next is tried for at once."""

_TRANSPORT_BYTES: Final = 1_048_576
_MOST_WAITING_BYTES: Final = 8_388_608
_MOST_ASKS: Final = 131_072
_MOST_ASK_BYTES: Final = 33_554_432
_ONE_FRAME_HITS: Final = 32_768
_MODEL_CHARACTERS: Final = 128
_MOST_ANSWER_BYTES: Final = 1_048_576
"""To look for the usage in a longer stored answer would hold up others: its tokens are unknown."""

_SESSIONS: Final = 4_096
_NEVER: Final = 2**32  # no ref is that large: everything is asked for anew
_KEPT_STATUSES: Final = frozenset({200, 400, 404, 422})
"""Of answers that later hits may be given."""

_ENCODE: Final = msgspec.msgpack.Encoder().encode
_LOST_BYTES: Final = journal.LOST.size


class Source(Protocol):
    """Where a request came from: read only when its ask is new to the log."""

    @property
    def path(self) -> bytes:
        """The target's path."""

    @property
    def body(self) -> bytes:
        """The whole body."""


class RequestFeed:
    """The worker's side of the request log. No method waits or fails.

    Rows gather for a fifth of a second and go to the log process over a Unix socket. While it is
    away they wait, up to `waiting_bytes`; past that they are dropped and counted in `dropped`.
    What it hadn't read when it ended is lost with it.

    An ask is described once: its `ref` then names the description for as long as the log process
    knows it, which is as long as `ref` isn't below a bound that rises whenever it starts anew.

    `process` begins the names of this process's requests, `worker` is its slot. Prompts and
    sessions are hashed with the secret. `identity_of` names what answers for a model.
    `on_event(name)` hears when the log process is lost, and when it is found.
    """

    def __init__(
        self,
        socket_path: str,
        process: str,
        secret: bytes,
        on_event: Callable[[str], None],
        *,
        worker: int = 0,
        identity_of: Callable[[str], str] = str,
        waiting_bytes: int = _MOST_WAITING_BYTES,
        most_asks: int = _MOST_ASKS,
    ) -> None:
        self.dropped = 0
        self._socket_path = socket_path
        self._on_event = on_event
        self._secret = hashlib.sha256(b"request log:" + secret).digest()
        self._identity_of = identity_of
        self._waiting_bytes = waiting_bytes
        self._most_asks = most_asks
        self._sessions: Memo[tuple[str, str], bytes] = Memo(_SESSIONS)
        self._by_key: Memo[tuple[Key, bool], int] = Memo(most_asks)
        hello = journal.Hello(journal.VERSION, process, worker, __version__, BLOCK_UNIT)
        self._hello = journal.frame(journal.HELLO, _ENCODE(hello))
        self._hits: list[float] = []
        self._note = cast("Callable[[tuple[float, ...]], None]", self._hits.extend)
        self._waiting = bytearray()
        self._waiting_rows = 0
        self._base = self._next = 0
        self._ask_bytes = 0
        self._link: _Link | None = None
        self._is_away = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tell; in the event loop."""
        self._task = asyncio.create_task(self._run(), name="request-log")

    async def aclose(self) -> None:
        """Tell what is still to be told, for at most a second."""
        self._closing.set()
        if self._task is not None:
            await self._task

    # What the proxy says.

    def hit(
        self, number: int, request: Request, hit: Hit, source: Source, now: float, duration_s: float
    ) -> None:
        """An answer from L1; after it was sent."""
        ask = request.ask
        ref = ask.ref
        if ref < self._base:
            # Another spelling of what is described already: what differs is only its length.
            known = self._by_key[ask.key, ask.stream]
            ref = ask.ref = -1 if known is None else known
        if ref >= self._base and request.want is NOTHING_SPECIAL:
            self._note((now, number, ref, duration_s))
        else:
            row = journal.Row("exact", detail="exact")
            self.kept(number, request, hit, source, row, now, duration_s)

    def kept(
        self,
        number: int,
        request: Request,
        hit: Hit,
        source: Source,
        row: journal.Row,
        now: float,
        duration_s: float,
    ) -> None:
        """A stored answer of which more is to be said, e.g. that it was stale. The row's status
        and lengths are those of the answer."""
        ask = request.ask
        if self._is_full():
            pass  # dropped and counted below
        elif ask.ref < self._base:
            ask.ref = self._describe(request, source, _facts_of(hit))
        elif row.detail != "exact":  # it may be another answer than the last one
            self._renew(ask.ref, _facts_of(hit))
        self.row(number, request, source, row, now, duration_s)

    def row(
        self,
        number: int,
        request: Request,
        source: Source,
        row: journal.Row,
        now: float,
        duration_s: float,
    ) -> None:
        """Any other answer, when all is known of it. `now` is when the request came."""
        if self._is_full():
            self.dropped += 1
            return
        want, ask = request.want, request.ask
        row.priority, row.tags = want.priority, len(want.tags)
        if want.session:
            row.session = self._session(request.tenant, want.session)
        if ask.ref < self._base:
            ask.ref = self._describe(request, source, _facts(row))
        elif row.answer_bytes != journal.AS_STORED and row.status in _KEPT_STATUSES:
            self._renew(ask.ref, _facts(row))
        self._say_row(number, ask.ref, row, now, duration_s)

    def refusal(
        self,
        number: int,
        tenant: str,
        source: Source,
        row: journal.Row,
        now: float,
        duration_s: float,
    ) -> None:
        """A request that asks for nothing that could be read."""
        if self._is_full():
            self.dropped += 1
            return
        about = journal.About(
            tenant, path=source.path.decode("latin-1"), body_bytes=len(source.body)
        )
        ref = self._new_ask(about, b"", journal.NO_FACTS)
        self._say_row(number, ref, row, now, duration_s)

    # Frames.

    def _is_full(self) -> bool:
        return len(self._waiting) >= self._waiting_bytes

    def _describe(self, request: Request, source: Source, facts: bytes) -> int:
        ask, path = request.ask, source.path.decode("latin-1")
        where = (request.tenant, path, self._identity_of(ask.model))
        prompt = prompt_of(source.body, self._secret, where)
        about = journal.About(
            tenant=request.tenant,
            namespace=request.namespace,
            model=ask.model[:_MODEL_CHARACTERS],
            path=path,
            key=ask.key if any(ask.key) else b"",
            stream=ask.stream,
            sampled=ask.sampled,
            max_tokens=prompt.max_tokens,
            body_bytes=len(source.body),
            prompt_bytes=prompt.prompt_bytes,
        )
        ref = self._new_ask(about, prompt.blocks, facts)
        if not ask.bypass:
            self._by_key.put((ask.key, ask.stream), ref)
        return ref

    def _new_ask(self, about: journal.About, blocks: bytes, facts: bytes) -> int:
        if self._next - self._base >= self._most_asks or self._ask_bytes > _MOST_ASK_BYTES:
            self._pack_hits()  # they name refs that end here
            self._base, self._ask_bytes = self._next, 0
            self._say(journal.RESET, journal.RESET_HEAD.pack(self._base))
        ref = self._next
        self._next += 1
        said = _ENCODE(about)
        self._say(journal.ASK, journal.ASK_HEAD.pack(ref, len(said)), facts, said, blocks)
        self._ask_bytes += len(said) + len(blocks)
        return ref

    def _renew(self, ref: int, facts: bytes) -> None:
        self._pack_hits()  # of the answer that was kept before
        self._say(journal.STORED, journal.STORED_HEAD.pack(ref), facts)

    def _say_row(
        self, number: int, ref: int, row: journal.Row, now: float, duration_s: float
    ) -> None:
        at_us = int((now + _to_wall_s()) * 1e6)
        head = journal.ROW_HEAD.pack(at_us, number, ref, duration_s)
        self._say(journal.ROW, head, _ENCODE(row))
        self._waiting_rows += 1

    def _say(self, kind: bytes, *parts: bytes) -> None:
        self._waiting += journal.frame(kind, *parts)

    def _pack_hits(self) -> None:
        """The hits so far, as frames; dropped where too much waits already."""
        hits = self._hits
        step = _ONE_FRAME_HITS * 4
        for start in range(0, len(hits), step):
            part = hits[start : start + step]
            if self._is_full():
                self.dropped += len(part) // 4
                continue
            columns = struct.pack(f"<{len(part)}d", *part)
            self._say(journal.HITS, journal.HITS_HEAD.pack(_to_wall_s()), columns)
            self._waiting_rows += len(part) // 4
        hits.clear()

    def _session(self, tenant: str, session: str) -> bytes:
        known = self._sessions[tenant, session]
        if known is None:
            text = f"{len(tenant)}:{tenant}{session}".encode()
            known = hashlib.blake2b(text, digest_size=8, key=self._secret).digest()
            self._sessions.put((tenant, session), known)
        return known

    # The connection.

    async def _run(self) -> None:
        pause_s, next_try_at = _FLUSH_S, 0.0
        while not self._closing.is_set():
            now = time.monotonic()
            if self._link is None and now >= next_try_at:
                has_held = now - next_try_at > _HELD_S
                pause_s = _FLUSH_S if has_held else min(2 * pause_s, _LONGEST_PAUSE_S)
                next_try_at = now + pause_s
                await self._connect()
            self._flush()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _FLUSH_S)
        if self._link is None:
            await self._connect()
        self._flush()
        if self._link is not None:
            await self._link.close()
        self.dropped += self._waiting_rows
        self._base = _NEVER  # what comes now is dropped by a full buffer
        self._waiting_bytes = 0

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, link = await loop.create_unix_connection(
                    lambda: _Link(self.on_lost, self._on_told), self._socket_path
                )
        except OSError:  # TimeoutError is one
            if not self._is_away:
                self._is_away = True
                self._on_event("request-log-away")
            return
        self._link = link
        link.write(self._hello)
        if self._is_away:
            self._is_away = False
            self._on_event("request-log-back")

    def on_lost(self) -> None:
        """The log process is gone, and with it all that it was told of asks."""
        self._link = None
        self.dropped += self._waiting_rows + len(self._hits) // 4
        self._waiting.clear()
        self._hits.clear()
        self._waiting_rows = self._ask_bytes = 0
        self._base = self._next
        if not self._is_away and not self._closing.is_set():
            self._is_away = True
            self._on_event("request-log-away")

    def _on_told(self, lost_rows: int) -> None:
        self.dropped += lost_rows

    def _flush(self) -> None:
        self._pack_hits()
        if self._link is not None and self._link.is_writable and self._waiting:
            self._link.write(bytes(self._waiting))
            self._waiting.clear()
            self._waiting_rows = 0


class _Link(asyncio.Protocol):
    """One connection to the log process."""

    def __init__(self, on_lost: Callable[[], None], on_told: Callable[[int], None]) -> None:
        self.is_writable = True
        self._on_lost = on_lost
        self._on_told = on_told
        self._told = bytearray()
        self._gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self._transport.set_write_buffer_limits(_TRANSPORT_BYTES)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._gone.set()
        self._on_lost()

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True

    def data_received(self, data: bytes) -> None:
        self._told += data
        while len(self._told) >= _LOST_BYTES:
            self._on_told(*journal.LOST.unpack_from(self._told))
            del self._told[:_LOST_BYTES]

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def close(self) -> None:
        """Let what was written go out, for at most a second."""
        self._transport.close()
        try:
            await asyncio.wait_for(self._gone.wait(), _CONNECT_S)
        except TimeoutError:
            self._transport.abort()


def _to_wall_s() -> float:
    """What to add to `time.monotonic()`. Another process may run between the two clocks: the
    largest of a few is the least disturbed."""
    return max(time.time() - time.monotonic() for _ in range(3))


def _facts(row: journal.Row) -> bytes:
    return journal.facts(row.status, row.input_tokens, row.output_tokens, row.answer_bytes)


class _Counted(msgspec.Struct):
    usage: Any = None


_COUNTED: Final = msgspec.json.Decoder(_Counted)


def _facts_of(hit: Hit) -> bytes:
    """Status and lengths of a stored answer, as its engine counted them."""
    usage, answer = None, hit.answer
    if isinstance(answer, openai.Answer) and len(answer.body) <= _MOST_ANSWER_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            usage = openai.usage_of(_COUNTED.decode(b"{" + answer.body).usage)
    return journal.facts(
        hit.status,
        usage.input_tokens if usage else None,
        usage.output_tokens if usage else None,
        getattr(answer, "size_bytes", 0),
    )
