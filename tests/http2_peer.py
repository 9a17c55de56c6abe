"""An engine in this process that speaks HTTP/2 over TLS and does what the path says."""

import asyncio
import contextlib
import ssl
from typing import Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset, WindowUpdated
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

_RESETS = {"reset": ErrorCodes.INTERNAL_ERROR, "refuse": ErrorCodes.REFUSED_STREAM}


class Http2Peer:
    """What a test can know about it."""

    def __init__(self, tls: ssl.SSLContext, *, most_streams: int = 100) -> None:
        self.most_streams = most_streams
        self.connections = 0
        self.open = 0
        self.most_at_once = 0
        self.resets: list[int] = []
        self.requests: list[tuple[dict[bytes, bytes], bytes]] = []
        self.paths: list[bytes] = []
        self.release = asyncio.Event()
        self.live: set[_Peered] = set()
        self.port = 0
        self._tls = tls
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Peered(self), "127.0.0.1", self.port, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for one in tuple(self.live):
            one.end()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


class _Peered(asyncio.Protocol):
    """One connection."""

    def __init__(self, peer: Http2Peer) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self._peer = peer
        self._requests: dict[int, tuple[dict[bytes, bytes], bytearray]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._moved = asyncio.Event()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._peer.connections += 1
        self._peer.open += 1
        self._peer.live.add(self)
        self.h2.initiate_connection()
        self.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: self._peer.most_streams})
        self.flush()

    def connection_lost(self, _: Exception | None) -> None:
        self._peer.open -= 1
        self._peer.live.discard(self)
        for task in self._tasks.values():
            task.cancel()

    def end(self) -> None:
        self._transport.abort()

    def flush(self) -> None:
        self._transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, RequestReceived):
                self._requests[event.stream_id] = (dict(event.headers), bytearray())
                self._peer.most_at_once = max(self._peer.most_at_once, len(self._requests))
            elif isinstance(event, DataReceived):
                if event.stream_id in self._requests:
                    self._requests[event.stream_id][1].extend(event.data)
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                self._tasks[event.stream_id] = asyncio.create_task(self._serve(event.stream_id))
            elif isinstance(event, StreamReset):
                self._peer.resets.append(event.error_code)
                self._requests.pop(event.stream_id, None)
                if event.stream_id in self._tasks:
                    self._tasks[event.stream_id].cancel()
            elif isinstance(event, WindowUpdated):
                self._moved.set()
        self.flush()

    async def _serve(self, number: int) -> None:
        headers, body = self._requests[number]
        path = headers[b":path"]
        self._peer.requests.append((headers, bytes(body)))
        self._peer.paths.append(path)
        try:
            await self._act(number, path.rpartition(b"/")[2].decode(), bytes(body))
        finally:
            self._requests.pop(number, None)
            with contextlib.suppress(Exception):
                self.flush()

    def _refuses(self, number: int, act: str) -> bool:
        """Whether that is all there is to say."""
        is_first = len(self._peer.paths) == 1
        if act in _RESETS or (act == "refuse-once" and is_first):
            self.h2.reset_stream(number, _RESETS.get(act, ErrorCodes.REFUSED_STREAM))
        elif act == "goaway-once" and is_first:
            self.h2.close_connection(last_stream_id=0)
        elif act == "cut":
            self._transport.abort()
        elif act == "garbage":
            self._transport.write(bytes(100))
        else:
            return False
        return True

    async def _act(self, number: int, act: str, body: bytes) -> None:
        if self._refuses(number, act):
            return
        if act == "hang":
            await asyncio.Event().wait()
        elif act == "held":
            await self._peer.release.wait()
        elif act == "goaway-and-answer":
            self._transport.write(GoAwayFrame(last_stream_id=number).serialize())
        status = act if act.isdigit() else "200"
        self.h2.send_headers(
            number,
            [(b":status", status.encode()), (b"content-type", b"text/plain"), (b"x-n", b"1")],
        )
        if act in {"slow", "stuck", "half"}:
            await self._send(number, b"first")
            if act == "half":
                self.h2.reset_stream(number, ErrorCodes.INTERNAL_ERROR)
                return
            await (asyncio.sleep(0.05) if act == "slow" else asyncio.Event().wait())
            await self._send(number, b"second")
        elif act == "large":
            for _ in range(64):
                await self._send(number, bytes(65_536))
        else:
            await self._send(number, body)
        self.h2.end_stream(number)

    async def _send(self, number: int, data: bytes) -> None:
        while data:
            size = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
            if size <= 0:
                self._moved.clear()
                await self._moved.wait()
                continue
            self.h2.send_data(number, data[:size])
            data = data[size:]
            self.flush()
