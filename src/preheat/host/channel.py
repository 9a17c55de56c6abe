"""Messages between two processes over a pair of sockets; the end of one is the end of the other's.

A frame is the length of its body, the number of a call (negative: of the call it answers; 0:
neither), and the body in MessagePack.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from preheat.errors import PreheatError
from preheat.host.messages import Message, Refused

_HEAD: Final = struct.Struct("<Ii")
_MOST_BYTES: Final = 67_108_864
_MOST_CALLS: Final = 1_024
"""Calls of the other side that are under way at once; further ones are refused. They can't wait in
the socket: what they need to hear may come behind them."""
_ENCODE: Final = msgspec.msgpack.Encoder().encode


class ChannelError(Exception):
    """The other side is gone, gave no answer in time, or said no."""


class Channel:
    """One end. `on_message` is told what comes, and answers calls with what it returns."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        on_message: Callable[[Any], Awaitable[Message | None]],
    ) -> None:
        self._decode = decoder.decode
        self._on_message = on_message
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._number = 0
        self.is_gone = False

    async def open(self, end: socket.socket) -> None:
        """Take over this socket; from now on the other side can be told things."""
        self._streams = await asyncio.open_connection(sock=end)

    async def run(self) -> None:
        """Read until the other side is gone."""
        assert self._streams is not None
        reader, _ = self._streams
        try:
            while True:
                size_bytes, number = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                if size_bytes > _MOST_BYTES:
                    return
                await self._take(number, self._decode(await reader.readexactly(size_bytes)))
        except (OSError, EOFError, msgspec.MsgspecError):
            pass  # however it ended: there is nobody to talk to any more
        finally:
            self.close()

    def tell(self, message: Message) -> None:
        """Say it; nobody learns whether it was heard."""
        self._send(0, message)

    async def call(self, message: Message, within_s: float) -> Any:
        """The answer. Raises ChannelError."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._send(number, message)
            async with asyncio.timeout(within_s):
                said = await answer
        except TimeoutError:
            raise ChannelError(f"no answer within {within_s:g} s") from None
        finally:
            self._calls.pop(number, None)
        if isinstance(said, Refused):
            raise ChannelError(said.message)
        return said

    async def flush(self, within_s: float) -> None:
        """Let what was said reach the other side."""
        if self._streams is not None:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._streams[1].drain()

    def close(self) -> None:
        """Nothing more is said or heard."""
        self.is_gone = True
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ChannelError("the other process is gone"))
        for task in self._answering:
            task.cancel()
        if self._streams is not None:
            self._streams[1].close()

    def _send(self, number: int, message: Message) -> None:
        if self._streams is None or self.is_gone:
            if number > 0:
                raise ChannelError("the other process is gone")
            return
        _, writer = self._streams
        if writer.transport.get_write_buffer_size() > _MOST_BYTES:
            self.close()  # it has read nothing for a long time
            return
        body = _ENCODE(message)
        writer.write(_HEAD.pack(len(body), number) + body)

    async def _take(self, number: int, message: Any) -> None:
        if number < 0:
            answer = self._calls.get(-number)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif number == 0:
            await self._on_message(message)
        elif len(self._answering) >= _MOST_CALLS:
            self._send(-number, Refused("it is asked too much at once"))
        else:
            task = asyncio.get_running_loop().create_task(self._answer(number, message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, number: int, message: Any) -> None:
        try:
            said = await self._on_message(message)
            if said is not None:
                self._send(-number, said)
        except (PreheatError, ChannelError) as error:
            self._send(-number, Refused(str(error)))
        except Exception as bug:  # noqa: BLE001  the other side must learn of it, not wait
            self._send(-number, Refused(f"{type(bug).__name__} in {type(message).__name__}"))
