"""A server that is examined: asked over HTTP, each time within a time limit."""

import asyncio
import socket
from time import perf_counter
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from preheat.engines.dialects.calls import Call
from preheat.errors import EngineError
from preheat.lab.doctor.finding import Finding
from preheat.transport.client import Client, Timeouts
from preheat.wire.sse import EventTooLargeError, SseDecoder, data_of

_REPLY_BYTES: Final = 16 * 1024 * 1024
_CONNECT_S: Final = 5.0
_QUOTED: Final = 160


class Reply(msgspec.Struct, frozen=True):
    """A whole answer; `took_s` is from the sending to its end."""

    status: int
    headers: dict[str, str]
    body: bytes
    took_s: float

    @property
    def json(self) -> dict[str, Any]:
        """Its object; empty where it is none."""
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def events(self) -> list[bytes]:
        """The data of a stream's events."""
        try:
            blocks = SseDecoder().feed(self.body)
        except EventTooLargeError:
            return []
        return [data for block in blocks if (data := data_of(block)) is not None]

    @property
    def is_stream(self) -> bool:
        """Whether it came as events."""
        return self.headers.get("content-type", "").lower().startswith("text/event-stream")

    @property
    def said(self) -> str:
        """Its error message, short and in one line; nothing where there is none."""
        error = self.json.get("error", self.json.get("detail", self.json.get("message", "")))
        text = error.get("message", "") if isinstance(error, dict) else error
        return shown(text) if isinstance(text, str) else ""

    @property
    def code(self) -> str:
        """Its error's code; empty where it is none of a word."""
        error = self.json.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        return shown(code) if isinstance(code, str) else ""

    @property
    def cache_status(self) -> str:
        """The header of that name."""
        return self.headers.get("cache-status", "")


def shown(text: str) -> str:
    """What somebody else wrote, as it may be told: short, in one line, nothing a terminal obeys."""
    words = " ".join(text[: 4 * _QUOTED].split())
    return "".join(c for c in words if c.isprintable())[:_QUOTED]


class Peer:
    """One address. `base` is its path, mostly /v1; `about` is what findings call it."""

    def __init__(self, about: str, url: str, api_key: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        self.about = about
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.base = parts.path.rstrip("/") or "/v1"
        self.root = self.base.removesuffix("/v1")
        self.has_key = bool(api_key)
        self._timeout_s = timeout_s
        timeouts = Timeouts(
            connect_s=min(_CONNECT_S, timeout_s), first_byte_s=timeout_s, idle_s=timeout_s
        )
        self._client = Client(self.url, timeouts=timeouts, max_connections=4)
        self._headers = [
            (b"accept-encoding", b"identity"),
            (b"content-type", b"application/json"),
            (b"user-agent", b"preheat-doctor"),
        ]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.encode()))

    async def get(self, path: str) -> Reply:
        """Ask for a page. Raises EngineError."""
        return await self._ask(b"GET", path, b"")

    async def post(self, path: str, body: dict[str, Any]) -> Reply:
        """Post JSON. Raises EngineError."""
        return await self._ask(b"POST", path, msgspec.json.encode(body))

    async def send(self, call: Call) -> Reply:
        """Ask what a dialect made. Raises EngineError."""
        return await self._ask(call.method, self.root + call.path.decode(), call.body)

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def _ask(self, method: bytes, path: str, body: bytes) -> Reply:
        began_at = perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.request(method, path.encode(), self._headers, body)
                whole = await answer.read(_REPLY_BYTES)
        except TimeoutError:
            raise EngineError(
                f"{urlsplit(self.url).netloc} gave no whole answer within {self._timeout_s:g} s",
                kind="timeout-idle",
            ) from None
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers
        }
        return Reply(answer.status, headers, whole, perf_counter() - began_at)

    def unreachable(self, error: EngineError) -> Finding:
        """What it means that it gave no answer."""
        check, do = _REASONS.get(error.kind, ("unreachable", "see its log"))
        if isinstance(error.__cause__, socket.gaierror):
            check, do = "unknown-host", "check the spelling of the host's name, and this host's DNS"
        elif error.kind in {"protocol", "reset"} and self.url.startswith("http:"):
            do += "; a server that speaks TLS at this port needs https://"
        elif error.kind == "tls" and "WRONG_VERSION_NUMBER" in str(error):
            do = "it speaks plain HTTP: write http:// in the url"
        return Finding(
            check, self.about, "problem", str(error), "no request can be answered by it", do
        )


_REASONS: Final = {
    "connect": ("refused", "start it, or correct host and port of the url"),
    "timeout-connect": ("no-connection", "check the address, and the firewalls on the way"),
    "tls": ("tls", "renew its certificate, or have this host trust who issued it"),
    "timeout-first-byte": ("no-answer", "see whether it is overloaded or stuck"),
    "timeout-idle": ("no-answer", "see whether it is overloaded or stuck"),
    "reset": ("not-http", "see whether this is an HTTP server, and its log"),
    "protocol": ("not-http", "see whether this is the port of an HTTP server"),
    "too-large": ("not-openai", "see whether this is the port of an OpenAI-compatible server"),
}
