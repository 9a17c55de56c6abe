"""Who may use a connection, which ones are idle, and when those must go."""

import asyncio
import contextlib
from collections import OrderedDict, deque
from typing import Final, Generic, Protocol, TypeVar

from preheat.errors import EngineError

# uvicorn, and so vLLM and SGLang, closes a connection that was idle for 5 s (`timeout_keep_alive`):
# give up a second earlier, so that a request hardly ever meets a connection that is being closed.
_MAX_IDLE_S: Final = 4.0
# How long `Client.aclose` waits for sockets that are closing already.
_CLOSE_S: Final = 1.0


class Pooled(Protocol):
    """What the pool knows of a connection."""

    idle_at: float

    def is_closing(self) -> bool:
        """Whether it is of no use any more."""

    def drop(self) -> None:
        """Close it now."""

    def give_up(self, what: str) -> None:
        """Close it now, and tell that to whoever waits for an answer on it."""


C = TypeVar("C", bound=Pooled)


class Pool(Generic[C]):
    """The connections of one client: who may use one, which are idle, when those must go.

    A slot is the right to have one connection in use. Idle connections hold none, but a new one
    is only made when no idle one is left, so there are never more than `max_connections`.
    """

    def __init__(self, where: str, max_connections: int) -> None:
        self.where = where
        self.is_closed = False
        self._max_connections = max_connections
        self._busy = 0
        self._waiters: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._idle: deque[C] = deque()  # oldest first, closed ones among them
        self._open: set[C] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event | None = None

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot or wait for one."""
        return self._busy + len(self._waiters)

    @property
    def has_room(self) -> bool:
        """Whether a request would have to wait for nobody."""
        return self._busy < self._max_connections

    def try_lease(self) -> bool:
        """Take a slot if one is free."""
        # While anybody waits none is: a slot given back is handed on.
        if self._busy >= self._max_connections or self.is_closed:
            return False
        self._busy += 1
        return True

    async def lease(self, queue_s: float) -> None:
        """Wait for a slot, in the order of asking."""
        if self.is_closed:
            raise self.closed_error()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(queue_s):
                await waiter
        except BaseException as error:
            self._waiters.pop(waiter, None)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give_back()  # the slot came in the moment of giving up
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"all {self._max_connections} connections to {self.where} stayed busy for "
                    f"{queue_s:g} s: add engines, or raise max_connections or queue_s",
                    kind="queue",
                ) from error
            raise

    def give_back(self) -> None:
        """Pass a slot on to whoever waits longest."""
        while self._waiters:
            waiter, _ = self._waiters.popitem(last=False)
            if not waiter.done():
                waiter.set_result(None)
                return
        self._busy -= 1

    def take_idle(self) -> C | None:
        """Return the connection used last, of those the engine hasn't closed."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closing():
                return connection
        return None

    def put_idle(self, connection: C) -> None:
        self._idle.append(connection)
        if self._timer is None:
            self._set_timer()

    def _drop_old(self) -> None:
        """Close what has been idle too long; one timer does it, and only while any is idle."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        # The same sum as the timer's, else rounding could set it again for this very moment.
        while self._idle and self._idle[0].idle_at + _MAX_IDLE_S <= now:
            self._idle.popleft().drop()
        if self._idle:
            self._set_timer()

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(self._idle[0].idle_at + _MAX_IDLE_S, self._drop_old)

    def on_open(self, connection: C) -> None:
        self._open.add(connection)

    def on_lost(self, connection: C) -> None:
        self._open.discard(connection)
        if self._emptied is not None and not self._open:
            self._emptied.set()

    def closed_error(self) -> EngineError:
        return EngineError(
            f"the client for {self.where} is closed: the gateway is shutting down, ask again later",
            kind="connect",
        )

    async def aclose(self) -> None:
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self.closed_error())
        self._waiters.clear()
        for connection in list(self._open):
            connection.give_up("was let go: the gateway is shutting down, ask again later")
        if self._open:
            self._emptied = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._emptied.wait()
