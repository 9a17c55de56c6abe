"""A client that sends the bytes it is told to, however wrong, and reads what comes back."""

import contextlib
import json
import socket
import ssl
import struct
from types import TracebackType
from typing import Any, Self

from harness import Reply

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_WITHIN_S = 10.0
_READ_BYTES = 262_144


class Answer(Reply):
    """One answer; `is_complete` tells whether its body came to the end that its head promised."""

    def __init__(self, head: bytes, body: bytes, *, is_complete: bool) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.version, status, _ = first.split(" ", 2)
        self.lines = [tuple(line.split(": ", 1)) for line in lines]
        super().__init__(int(status), dict(self.lines), body)
        self.is_complete = is_complete

    @property
    def code(self) -> str:
        """The error's code, after checking that it has OpenAI's form."""
        assert self.headers["content-type"] == "application/json", self.headers
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"]
        assert error["type"]
        return str(error["code"])


class Raw:
    """One connection. `read_bytes` keeps the kernel's receive buffer small, for slow readers."""

    def __init__(
        self,
        port: int,
        *,
        within_s: float = _WITHIN_S,
        receive_bytes: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        plain = socket.socket()
        plain.settimeout(within_s)
        if receive_bytes is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            plain.connect(("127.0.0.1", port))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket = tls.wrap_socket(plain, server_hostname="localhost") if tls else plain
        except OSError:
            plain.close()
            raise
        self.unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def try_send(self, data: bytes) -> bool:
        """Send to somebody who may have had enough; False where the connection broke."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def ask(self, data: bytes) -> Answer:
        self.send(data)
        return self.answer()

    def answer(self, *, to: str = "POST") -> Answer:
        """The next answer; an interim one (1xx) counts as one. Raises EOFError without any."""
        head, _ = self.until(b"\r\n\r\n")
        answer = Answer(head, b"", is_complete=True)
        if to == "HEAD" or answer.status < 200 or answer.status in {204, 304}:
            return answer
        if answer.headers.get("transfer-encoding") == "chunked":
            answer.body, answer.is_complete = self._chunks()
        elif "content-length" in answer.headers:
            answer.body, answer.is_complete = self._exactly(int(answer.headers["content-length"]))
        else:
            answer.body = self.rest()
        return answer

    def until(self, mark: bytes) -> tuple[bytes, bytes]:
        """What comes before the mark, and the mark. Raises EOFError where it doesn't come."""
        while mark not in self.unread:
            data = self.read()
            if not data:
                raise EOFError(f"it ended before {mark!r}: {self.unread[-200:]!r}")
            self.unread += data
        before, mark, self.unread = self.unread.partition(mark)
        return before, mark

    def read(self) -> bytes:
        """Whatever comes next; nothing at the end, however it ends."""
        try:
            return self.socket.recv(_READ_BYTES)
        except (ConnectionResetError, ssl.SSLError):
            return b""

    def rest(self) -> bytes:
        """All that comes until the end of the connection."""
        pieces = [self.unread]
        self.unread = b""
        while piece := self.read():
            pieces.append(piece)
        return b"".join(pieces)

    def is_ended(self) -> bool:
        """Whether the other side ends the connection, with nothing more to say."""
        return self.rest() == b""

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """End with an RST, as a crashed client's kernel does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def _exactly(self, size: int) -> tuple[bytes, bool]:
        pieces, missing = [self.unread[:size]], size - len(self.unread)
        self.unread = self.unread[size:]
        while missing > 0:
            piece = self.read()
            if not piece:
                break
            pieces.append(piece[:missing])
            self.unread += piece[missing:]
            missing -= len(piece)
        return b"".join(pieces), missing <= 0

    def _chunks(self) -> tuple[bytes, bool]:
        body = []
        try:
            while size := int(self.until(b"\r\n")[0].partition(b";")[0], 16):
                chunk, _ = self._exactly(size + 2)
                body.append(chunk[:size])
            assert self.until(b"\r\n")[0] == b"", "we send no trailers"
        except EOFError:
            return b"".join(body), False
        return b"".join(body), True


def post(
    body: Any, path: str = "/v1/chat/completions", headers: str = "", version: str = "1.1"
) -> bytes:
    """The bytes of a POST; `headers` are whole lines, each with its CRLF."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{headers}Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


def chunked(*pieces: bytes, headers: str = "", end: bytes = b"0\r\n\r\n") -> bytes:
    """A POST whose body is those chunks."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{headers}Transfer-Encoding: chunked\r\n\r\n"
    )
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head.encode() + chunks + end


def get(path: str = "/healthz", headers: str = "", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode()
