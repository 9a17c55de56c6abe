"""An event loop whose clock jumps to the next timer when nothing is ready, and a network in it.

Hours pass in seconds, nothing depends on how fast the machine is, and what happens at one moment
happens in the same order each time. Connections between tasks of this loop are queues, not
sockets: what is written arrives in the same instant.
"""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class JumpingLoop(asyncio.SelectorEventLoop):
    """Starts at 0. Where nothing is ready and no timer is set, it would wait for ever: an error."""

    def __init__(self) -> None:
        self._now = 0.0
        self._listeners: dict[int, Callable[[], asyncio.Protocol]] = {}
        super().__init__(_Jumping(self._jump))

    def time(self) -> float:
        return self._now

    def _jump(self) -> None:
        # To the timer's own float: a sum of differences would miss it by some last bits.
        self._now = self._scheduled[0].when()  # type: ignore[attr-defined]  # of BaseEventLoop

    async def create_server(  # type: ignore[override]  # as much of it as is used here
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int, **_: Any
    ) -> "Listener":
        port = port or len(self._listeners) + 10_000
        self._listeners[port] = factory
        return Listener(self._listeners, port)

    async def create_connection(  # type: ignore[override]  # as much of it as is used here
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        if port not in self._listeners:
            raise ConnectionRefusedError(port)
        here, there = End(self, factory()), End(self, self._listeners[port]())
        here.peer, there.peer = there, here
        there.protocol.connection_made(there)
        here.protocol.connection_made(here)
        return here, here.protocol


class _Jumping(selectors.SelectSelector):
    def __init__(self, jump: Callable[[], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing is ready and no timer is set")
        if not ready and timeout:
            self._jump()
        return ready


class Listener:
    """What `create_server` gives: a port where the loop's connections arrive."""

    def __init__(self, listeners: dict[int, Callable[[], asyncio.Protocol]], port: int) -> None:
        self._listeners = listeners
        self._port = port

    @property
    def sockets(self) -> tuple["Listener"]:
        return (self,)

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", self._port)

    def setsockopt(self, *_: object) -> None:
        pass

    def close(self) -> None:
        self._listeners.pop(self._port, None)


class End(asyncio.Transport):
    """One end of a connection."""

    peer: "End"

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self._loop = loop
        self._is_closing = False
        self._is_paused = False
        self._unread: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self._loop.call_soon(self.peer._arrive, bytes(data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self.protocol.connection_lost, None)
            self._loop.call_soon(self.peer._hang_up)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        unread, self._unread = self._unread, []
        for data in unread:
            self._loop.call_soon(self._arrive, data)

    def _arrive(self, data: bytes) -> None:
        if self._is_paused:
            self._unread.append(data)
        elif not self._is_closing:
            self.protocol.data_received(data)

    def _hang_up(self) -> None:
        if not self._is_closing:
            self.protocol.eof_received()
            self.close()
