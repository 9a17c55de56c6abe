"""The gateway's life: which path goes where, starting, ticking, draining."""

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final

from preheat.core.controller import Controller
from preheat.core.stats import Counters
from preheat.engines import Engine
from preheat.errors import RequestError
from preheat.gateway import heads
from preheat.gateway.asgi import App, AsgiDoor
from preheat.gateway.proxy import Proxy, log_bug
from preheat.gateway.relay import Relay
from preheat.telemetry.logs import Log
from preheat.transport.server import Exchange, HttpServer, Limits, Refusal
from preheat.wire.openai import DIALECTS

_TICK_S: Final = 1.0
# TRACE among the others would tell a client what we add for the engine, its key included.
_PASSED_METHODS: Final = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE"})
_PROBES: Final = frozenset({b"/healthz", b"/readyz"})  # on the gateway's port in any case
_BAD_PATH: Final = re.compile(rb"(?:^|/)(?:\.|%2e){1,2}(?:/|%2f|$)|\\|%5c|%00|//", re.IGNORECASE)


class Gateway:
    """Everything that runs: the servers, the engines, the ticker. Built by `wiring`."""

    def __init__(
        self,
        proxy: Proxy,
        relay: Relay,
        controller: Controller,
        counters: Counters,
        engines: Mapping[str, Engine],
        log: Log,
        limits: Limits,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.log = log
        self.proxy = proxy
        self._relay = relay
        self._controller = controller
        self._counters = counters
        self._engines = engines
        self._clock = clock
        self._admin: AsgiDoor | None = None
        self._is_admin_apart = False
        self._server = HttpServer(self._handle, self._refuse, limits)
        self._admin_server: HttpServer | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._is_started = False
        self.admin_url = ""  # empty where the admin routes are on the gateway's own port

    def mount(self, app: App, *, apart: bool) -> None:
        """The application behind the ASGI door; `apart` keeps it off the gateway's own port."""
        self._admin = AsgiDoor(app, self._on_bug)
        self._is_admin_apart = apart

    async def start_engines(self) -> None:
        """Make every engine ready. Raises EngineError."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        for engine in self._engines.values():
            await engine.start()
        self._is_started = True
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Accept requests; the port that was taken."""
        return await self._server.listen(host, port, tls)

    async def listen_admin(self, host: str, port: int) -> None:
        """Accept admin requests on a port of their own, at `admin_url`."""
        self._admin_server = HttpServer(self._handle_admin, self._refuse, self._server.limits)
        port = await self._admin_server.listen(host, port)
        self.admin_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def drain(self, within_s: float) -> bool:
        """Accept nothing more and let what is under way end; False where time ran out."""
        return await self._server.drain(within_s)

    async def aclose(self) -> None:
        """End everything that is left."""
        if self._ticker is not None:
            self._ticker.cancel()
        await self._server.aclose()
        if self._admin_server is not None:
            await self._admin_server.aclose()
        await self.proxy.flights.aclose()
        await self._relay.aclose()
        if self._admin is not None:
            await self._admin.aclose()
        await asyncio.gather(*(engine.aclose() for engine in self._engines.values()))
        self.log.close()

    @property
    def is_ready(self) -> bool:
        """Whether requests have a chance: an engine is up, and no drain has begun."""
        is_up = any(engine.is_ready for engine in self._engines.values())
        return self._is_started and is_up and not self._server.is_draining

    def gauges(self) -> dict[str, float]:
        """What is true at this moment, for the metrics."""
        return {
            "preheat_connections": len(self._server.connections),
            "preheat_flights": len(self.proxy.flights),
            "preheat_log_dropped": self.log.dropped,
            "preheat_engines_ready": sum(engine.is_ready for engine in self._engines.values()),
        }

    def _handle(self, exchange: Exchange) -> None:
        """Where a request goes. The edge: nothing it raises leaves it."""
        try:
            head = exchange.head
            if head.path in DIALECTS and head.method == b"POST":
                self.proxy.serve(exchange)
            else:
                self._route(exchange)
        except RequestError as error:
            self._counters.bump(self._counters.refused, error.code)
            exchange.reply(*heads.request_error(error))
        except Exception as bug:  # noqa: BLE001  the edge of a request
            self._on_bug(bug)
            if exchange.is_started:
                exchange.cut()
            else:
                exchange.reply(*heads.internal_error(None))

    def _route(self, exchange: Exchange) -> None:
        path = exchange.path
        if exchange.method == b"OPTIONS":
            allowed = b"POST, OPTIONS" if path in DIALECTS else b"GET, HEAD, POST, OPTIONS"
            exchange.reply(heads.status_line(204) + b"Allow: %b\r\n" % allowed, b"")
        elif path in DIALECTS:
            raise RequestError("this path takes POST only", status=405, code="method-not-allowed")
        elif path.startswith(b"/v1/"):
            if exchange.method not in _PASSED_METHODS:
                raise RequestError(
                    "this method isn't passed on", status=405, code="method-not-allowed"
                )
            if _BAD_PATH.search(path):
                raise RequestError("the path leaves /v1", status=400, code="invalid-target")
            self._relay.serve(exchange)
        elif self._admin is not None and (path in _PROBES or not self._is_admin_apart):
            self._admin.serve(exchange)
        else:
            raise RequestError(
                "there is nothing at this path; OpenAI clients need a base_url that ends in /v1",
                status=404,
                code="not-found",
            )

    def _handle_admin(self, exchange: Exchange) -> None:
        assert self._admin is not None
        self._admin.serve(exchange)

    def _refuse(self, refusal: Refusal) -> tuple[bytes, bytes]:
        self._counters.bump(self._counters.refused, refusal.code)
        return heads.refusal(refusal)

    def _on_bug(self, bug: Exception) -> None:
        log_bug(self.log, bug)

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What no task and no request caught: a line of our own, since asyncio's would quote values."""
        bug = context.get("exception")
        if isinstance(bug, Exception):
            self._on_bug(bug)
        else:
            self.log.event("bug", type="loop", where=str(context.get("message"))[:128])

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                while self._controller.on_tick(self._clock()):  # noqa: ASYNC110  gives way between portions
                    await asyncio.sleep(0)
            except Exception as bug:  # noqa: BLE001  a tick that fails mustn't be the last one
                self._on_bug(bug)
