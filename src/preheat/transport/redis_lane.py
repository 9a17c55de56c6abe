"""One connection to a Redis or Valkey server that any number of tasks talk over at once.

What is asked in one turn of the event loop goes out in one write, and replies are matched to calls
in their order. So a call that was given up keeps its place: its late reply is read and dropped,
never taken for another's, and a slow server doesn't cost a new connection for every time limit.

redis-py does the rest: addresses, TLS, the handshake, the protocol. Its own client lends a whole
connection to each call and throws it away when the call's time is up.
"""

import asyncio
import contextlib
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    MovedError,
    NoScriptError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from preheat.errors import ConfigError, StoreError

_CONNECT_S: Final = 2.0
_STAY_S: Final = 30.0
"""So long it isn't tried again whether another server is behind the address."""

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_STUCK_S: Final = 1.0
"""A connection on which nothing came for so long, though asked, is given up."""

_MOST_CALLS: Final = 4096
_MOST_BYTES: Final = 67_108_864
_WRITE_BYTES: Final = 1_048_576

_TURNS_OF_GRACE: Final = 4
"""A reply that has arrived needs so many turns to reach its call: poll, stream, reader, future."""

_SAID_NO: Final = (ResponseError, BusyLoadingError, AuthenticationError)
"""Replies: redis-py counts the last two among the broken connections."""

_AUTH: Final = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})

OnFault = Callable[[StoreError, str], None]


class Script:
    """A Lua script, known to the server by its hash once it has seen it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class _UnknownScriptError(StoreError):
    """The server has to be sent the text."""


class _Call:
    __slots__ = ("args", "due", "future", "if_late", "sent_at", "size_bytes")

    def __init__(
        self,
        args: tuple[Any, ...],
        future: "asyncio.Future[Any]",
        due: float,
        if_late: Callable[[Any], None] | None,
    ) -> None:
        self.args = args
        self.future = future
        self.due = due
        self.if_late = if_late
        self.sent_at = 0.0
        self.size_bytes = 0


class Lane:
    """A connection, made anew in the background whenever it breaks.

    `limit_s` is each call's time limit. `on_open` is called when it can be used; `on_fault` when
    it can't any more or the server refused something, with the error code or "". Neither may wait.
    """

    def __init__(
        self,
        url: str,
        *,
        password: str,
        limit_s: float,
        on_open: Callable[[], None],
        on_fault: OnFault,
    ) -> None:
        self._limit_s = limit_s
        self._on_open = on_open
        self._on_fault = on_fault
        self._kind, self._settings = _settings(url, password)
        self._target = self._settings
        self._fault: StoreError | None = StoreError("Redis isn't connected yet", kind="connect")
        self._outcome = asyncio.Event()
        self._unsent: deque[_Call] = deque()
        self._unsent_bytes = 0
        self._unanswered: deque[_Call] = deque()
        self._timed: deque[_Call] = deque()
        self._wake = asyncio.Event()
        self._timer: asyncio.Handle | None = None
        self._life: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._why = self._fault
        self._left_at = -math.inf

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._fault is None

    async def start(self) -> None:
        """Begin to connect; returns with the first outcome, whatever it is."""
        self._life = asyncio.create_task(self._live(), name="redis-lane")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONNECT_S + _LONGEST_PAUSE_S):
                await self._outcome.wait()

    async def call(
        self, *args: Any, size_bytes: int = 0, if_late: Callable[[Any], None] | None = None
    ) -> Any:
        """The reply. `if_late` is told a reply that came when nobody waited for it any more."""
        return await self._ask(args, size_bytes, if_late)

    def post(self, *args: Any) -> None:
        """Ask, and let the reply be what it may."""
        with contextlib.suppress(StoreError):
            self._ask(args, 0, None).add_done_callback(asyncio.Future.exception)

    def _ask(
        self, args: tuple[Any, ...], size_bytes: int, if_late: Callable[[Any], None] | None
    ) -> "asyncio.Future[Any]":
        if self._fault is not None:
            raise StoreError(str(self._fault), kind=self._fault.kind)
        full = len(self._unsent) + len(self._unanswered) >= _MOST_CALLS
        if full or self._unsent_bytes + size_bytes > _MOST_BYTES:
            raise StoreError("too many calls to Redis are waiting", kind="timeout")
        loop = asyncio.get_running_loop()
        call = _Call(args, loop.create_future(), time.monotonic() + self._limit_s, if_late)
        if size_bytes:
            call.size_bytes = size_bytes
            self._unsent_bytes += size_bytes
        self._unsent.append(call)
        self._timed.append(call)
        self._wake.set()
        if self._timer is None:
            self._timer = loop.call_later(self._limit_s, self._look, _TURNS_OF_GRACE)
        return call.future

    async def run(self, script: Script, *keys_and_args: Any, keys: int = 1) -> Any:
        """The script's result; its text is sent only to a server that doesn't know it."""
        with contextlib.suppress(_UnknownScriptError):
            return await self.call("EVALSHA", script.sha, keys, *keys_and_args)
        return await self.call("EVAL", script.text, keys, *keys_and_args)

    async def aclose(self, within_s: float) -> None:
        """Wait so long for the calls under way, then close."""
        waiting = [call.future for call in self._timed if not call.future.done()]
        if waiting and self._fault is None:
            await asyncio.wait(waiting, timeout=within_s)
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        self._lose(StoreError("Redis is closed", kind="connect"))

    # The connection's life ---------------------------------------------------------------------

    async def _live(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            begun = time.monotonic()
            connection = self._kind(**self._target)
            code = ""
            try:
                await self._open(connection)
                await self._converse(connection)
                fault = self._why
            except _SAID_NO as error:
                fault, code = _refusal(error), _code(error)
            except (TimeoutError, RedisError, OSError) as error:
                fault = StoreError(f"no connection to Redis: {_reason(error)}", kind="connect")
            finally:
                await _close(connection)
            self._lose(fault)
            self._on_fault(fault, code)
            self._outcome.set()
            if time.monotonic() - begun > _CONNECT_S + _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _open(self, connection: AbstractConnection) -> None:
        target, self._target = self._target, self._settings  # a node elsewhere is tried once
        async with asyncio.timeout(_CONNECT_S):
            await connection.connect()  # type: ignore[no-untyped-call]  # as redis-py has it
            # Shows what the handshake may not: that a password is wanted, or that it still loads.
            await connection.send_command("PING", check_health=False)
            await connection.read_response(disable_decoding=True)
        self._target = target

    async def _converse(self, connection: AbstractConnection) -> None:
        """Until the connection breaks, or doesn't answer any more (then it returns)."""
        self._fault = None
        self._outcome.set()
        self._on_open()
        self._receiving = asyncio.create_task(self._receive(connection))
        sending = asyncio.create_task(self._send(connection))
        both = (self._receiving, sending)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            ends = await asyncio.gather(*both, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _send(self, connection: AbstractConnection) -> None:
        while True:
            await self._wake.wait()
            batch, packed, size_bytes = [], [], 0
            now = time.monotonic()
            while self._unsent and size_bytes < _WRITE_BYTES:
                call = self._unsent.popleft()
                self._unsent_bytes -= call.size_bytes
                if not call.future.done():
                    # A loop that was busy until now is no reason to give up.
                    call.sent_at, call.due = now, now + self._limit_s
                    batch.append(call)
                    packed += connection.pack_command(*call.args)
                    size_bytes += call.size_bytes
                call.args = ()  # a value need not live until its call's time would be up
            if not self._unsent:
                self._wake.clear()
            if batch:
                self._unanswered.extend(batch)
                await connection.send_packed_command(packed, check_health=False)

    async def _receive(self, connection: AbstractConnection) -> None:
        while True:
            try:
                reply = await connection.read_response(
                    disable_decoding=True, timeout=math.inf, disconnect_on_error=False
                )
            except _SAID_NO as error:
                reply = error
            if not self._unanswered:
                raise InvalidResponse("a reply that nobody asked for")
            call = self._unanswered.popleft()
            if call.future.done():
                if call.if_late is not None:
                    call.if_late(reply)
            elif isinstance(reply, RedisError):
                self._refuse(call, reply)
            else:
                call.future.set_result(reply)

    def _refuse(self, call: _Call, error: RedisError) -> None:
        if isinstance(error, NoScriptError):
            call.future.set_exception(_UnknownScriptError("unknown script", kind="refused"))
            return
        fault = _refusal(error)
        call.future.set_exception(fault)
        self._on_fault(fault, _code(error))
        if isinstance(error, MovedError) and "host" in self._settings:
            # All our keys are in one slot, so in a cluster they are on one node: go there.
            self._target = self._settings | {
                "host": error.host or self._settings["host"],
                "port": error.port,
            }
        now = time.monotonic()
        if _code(error) in {"MOVED", "READONLY"} and now - self._left_at > _STAY_S:
            self._left_at = now
            self._break(fault)  # behind the same name there may be another server by now

    def _break(self, why: StoreError) -> None:
        if self._receiving is not None:
            self._why = why
            self._receiving.cancel()

    def _lose(self, fault: StoreError) -> None:
        lasting = fault.kind in {"auth", "refused"}
        self._fault = fault if lasting else StoreError(str(fault), kind="connect")
        for call in (*self._unanswered, *self._unsent):
            if not call.future.done():
                call.future.set_exception(StoreError(str(fault), kind=fault.kind))
        self._unanswered.clear()
        self._unsent.clear()
        self._timed.clear()
        self._unsent_bytes = 0

    # Time limits -------------------------------------------------------------------------------

    def _look(self, turns: int) -> None:
        """End the calls whose time is up, after the loop had turns enough to read what is there."""
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        while self._timed and self._timed[0].future.done():
            self._timed.popleft()
        if not self._timed:
            self._timer = None
        elif self._timed[0].due > now:
            self._timer = loop.call_later(self._timed[0].due - now, self._look, _TURNS_OF_GRACE)
        elif turns > 0:
            self._timer = loop.call_soon(self._look, turns - 1)
        else:
            self._give_up(now)
            self._timer = loop.call_soon(self._look, 0)

    def _give_up(self, now: float) -> None:
        while self._timed and self._timed[0].due <= now:
            call = self._timed.popleft()
            if not call.future.done():
                call.future.set_exception(StoreError("Redis didn't answer in time", kind="timeout"))
        oldest = self._unanswered[0].sent_at if self._unanswered else now
        if now - oldest > _STUCK_S:
            self._break(StoreError("Redis doesn't answer", kind="timeout"))


def _settings(url: str, password: str) -> tuple[type[AbstractConnection], dict[str, Any]]:
    """The connection's class and what it is made with."""
    try:
        settings: dict[str, Any] = dict(parse_url(url))
        kind = settings.pop("connection_class", Connection)
        settings |= {
            "socket_timeout": None,  # the lane's own limits hold
            "socket_connect_timeout": _CONNECT_S,
            "decode_responses": False,
            "protocol": 2,  # no replies that nobody asked for, and no HELLO that a proxy may lack
            "driver_info": None,
        }
        if password:
            settings["password"] = password
        kind(**settings)
    except (TypeError, ValueError, RedisError):
        raise ConfigError(
            "l2.url: expected redis://host:port/db, rediss://host:port/db or unix:///path?db=0"
        ) from None  # its text may quote a password
    return kind, settings


def _code(error: Exception) -> str:
    """The server's word for it. Never its text, which may quote what was asked."""
    word = str(getattr(error, "status_code", None) or str(error).partition(" ")[0])
    if word == "ERR" and isinstance(error, AuthenticationError):
        return "WRONGPASS"
    return word if word.isascii() and word.isalpha() and word.isupper() else "ERR"


def _reason(error: Exception) -> str:
    """Why there is no connection; a broken reply's text may quote what was asked."""
    return str(error) if isinstance(error, RedisConnectionError) else type(error).__name__


def _refusal(error: Exception) -> StoreError:
    code = _code(error)
    kind = "refused"
    if code == "OOM":
        kind = "full"
    elif code in _AUTH:
        kind = "auth"
    return StoreError(f"Redis refused: {code}", kind=kind)


async def _close(connection: AbstractConnection) -> None:
    with contextlib.suppress(RedisError, OSError):
        await connection.disconnect(nowait=True)
