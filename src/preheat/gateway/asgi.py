"""A small adapter through which an ordinary ASGI application answers on the same port."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import unquote

from preheat.gateway import heads
from preheat.transport.server import Exchange

Message = MutableMapping[str, Any]
App = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[Message]],
        Callable[[Message], Awaitable[None]],
    ],
    Awaitable[None],
]

_WITHIN_S: Final = 30.0
_LONG_S: Final = 610.0
_LONG: Final = frozenset({b"/preheat/v1/warm", b"/preheat/v1/verify"})
"""They wait for idle moments, as long as the client says, up to ten minutes."""


class AsgiDoor:
    """Runs the application for one exchange in a task that it owns. Bodies are small and whole."""

    def __init__(self, app: App, on_bug: Callable[[Exception], None]) -> None:
        self._app = app
        self._on_bug = on_bug
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, exchange: Exchange) -> None:
        """Start answering."""
        task = asyncio.get_running_loop().create_task(self._run(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_gone = task.cancel

    async def aclose(self) -> None:
        """End them all."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, exchange: Exchange) -> None:
        status = 500
        lines: list[tuple[bytes, bytes]] = []
        body = bytearray()

        async def receive() -> Message:
            return {"type": "http.request", "body": exchange.body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                lines.extend(message.get("headers", ()))
            else:
                body.extend(message.get("body", b""))

        try:
            async with asyncio.timeout(_LONG_S if exchange.path in _LONG else _WITHIN_S):
                await self._app(_scope(exchange), receive, send)
        except Exception as bug:  # noqa: BLE001  the edge of a request
            self._on_bug(bug)
            exchange.reply(*heads.internal_error(None))
        else:
            shown = b"".join(
                b"%b: %b\r\n" % (name.title(), value)
                for name, value in lines
                if name.lower() != b"content-length"
            )
            exchange.reply(heads.status_line(status) + shown, bytes(body))
        finally:
            exchange.on_gone = None


def _scope(exchange: Exchange) -> MutableMapping[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": exchange.method.decode("latin-1"),
        "scheme": "http",
        "path": unquote(exchange.path.decode("latin-1"), errors="replace"),
        "raw_path": exchange.path,
        "query_string": exchange.query,
        "root_path": "",
        "headers": list(exchange.headers.items()),
        "client": (exchange.peer, 0),
        "server": None,
        "state": {},
    }
