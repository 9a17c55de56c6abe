"""An engine that says the bytes it is told to, right or wrong, over TCP."""

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum
from types import TracebackType
from typing import Self

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class End(Enum):
    """How a connection ends, or doesn't."""

    CLOSE = 1
    RESET = 2
    HANG = 3  # until the other side leaves


Step = bytes | float | End  # say this, wait so many seconds, or end


class Upstream:
    """Plays one act a request, the last one again and again. A thread a connection."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.left = 0  # how often somebody left while it hung
        self._acts: deque[Sequence[Step]] = deque()
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def calls(self) -> int:
        return len(self.requests)

    def play(self, *acts: Sequence[Step]) -> None:
        self.requests.clear()
        self.left = 0
        self._acts = deque(acts)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in tuple(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            unread = b""
            while True:
                request, unread = _request(connection, unread)
                if not request:
                    break
                self.requests.append(request)
                act = self._acts.popleft() if len(self._acts) > 1 else self._acts[0]
                if not all(self._do(connection, step) for step in act):
                    break
        self._connections.discard(connection)

    def _do(self, connection: socket.socket, step: Step) -> bool:
        """Whether there is more to come."""
        if isinstance(step, bytes):
            connection.sendall(step)
        elif isinstance(step, float):
            time.sleep(step)
        elif step is End.HANG:
            while connection.recv(65_536):
                pass
            self.left += 1
            return False
        elif step is End.RESET:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            return False
        else:
            return False
        return True


def _request(connection: socket.socket, unread: bytes) -> tuple[bytes, bytes]:
    """The next whole request, and what came behind it; nothing at the end."""
    while b"\r\n\r\n" not in unread:
        data = connection.recv(65_536)
        if not data:
            return b"", b""
        unread += data
    head, _, _ = unread.partition(b"\r\n\r\n")
    length = next(
        int(line.partition(b":")[2])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    )
    size = len(head) + 4 + length
    while len(unread) < size:
        data = connection.recv(65_536)
        if not data:
            return b"", b""
        unread += data
    return unread[:size], unread[size:]


def answer(
    body: bytes, headers: str = "", status: str = "200 OK", kind: str = "application/json"
) -> bytes:
    """A whole HTTP answer."""
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def stream_head(headers: str = "") -> bytes:
    return (
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        f"{headers}Transfer-Encoding: chunked\r\n\r\n"
    ).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
