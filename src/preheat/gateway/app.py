"""The gateway's life: which path goes where, starting, ticking, draining."""

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final

from preheat.config import Settings
from preheat.core.controller import Controller
from preheat.core.inventory import Inventory
from preheat.core.ledger import Ledger
from preheat.core.stats import Counters, Snapshot, snapshot
from preheat.core.types import Invalidation, Key, Removed
from preheat.errors import ConfigError, RequestError
from preheat.gateway import heads
from preheat.gateway.asgi import App, AsgiDoor
from preheat.gateway.l2 import L2
from preheat.gateway.proxy import Proxy, log_bug
from preheat.gateway.relay import Relay
from preheat.gateway.reload import Prepared, Reload
from preheat.gateway.upstreams import Upstreams
from preheat.telemetry.logs import Log
from preheat.telemetry.requestlog import RequestFeed
from preheat.transport.server import Exchange, HttpServer, Limits, Refusal
from preheat.wire.openai import DIALECTS

_TICK_S: Final = 1.0
# TRACE among the others would tell a client what we add for the engine, its key included.
_PASSED_METHODS: Final = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE"})
_PROBES: Final = frozenset({b"/healthz", b"/readyz"})  # on the gateway's port in any case
_BAD_PATH: Final = re.compile(rb"(?:^|/)(?:\.|%2e){1,2}(?:/|%2f|$)|\\|%5c|%00|//", re.IGNORECASE)


class Gateway:
    """Everything that runs in one process: servers, engines, the ticker. Built by `assembly`."""

    def __init__(
        self,
        proxy: Proxy,
        relay: Relay,
        controller: Controller,
        inventory: Inventory,
        ledger: Ledger,
        counters: Counters,
        upstreams: Upstreams,
        l2: L2 | None,
        feed: RequestFeed | None,
        log: Log,
        limits: Limits,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.log = log
        self.proxy = proxy
        self._relay = relay
        self._controller = controller
        self._inventory = inventory
        self._ledger = ledger
        self._counters = counters
        self._upstreams = upstreams
        self._l2 = l2
        self._feed = feed
        self._l2_size: dict[str, float] = {}
        self._clock = clock
        self._admin: AsgiDoor | None = None
        self._is_admin_apart = False
        self._server = HttpServer(self._handle, self._refuse, limits)
        self._admin_server: HttpServer | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._is_started = False
        self.reload: Reload

    def mount(self, app: App, *, apart: bool) -> None:
        """The application behind the ASGI door; `apart` keeps it off the gateway's own port."""
        self._admin = AsgiDoor(app, self._on_bug)
        self._is_admin_apart = apart

    async def start_engines(self) -> None:
        """Make L2 and every engine ready. Raises EngineError and ConfigError."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        if self._l2 is not None:
            await self._l2.start()
        if self._feed is not None:
            self._feed.start()
        if self.proxy.sightings is not None:
            self.proxy.sightings.start()
        for engine in self._upstreams.engines.values():
            await engine.start()
        self._is_started = True
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Accept requests; the port that was taken."""
        return await self._server.listen(host, port, tls)

    async def accept(self, listening: Sequence[socket.socket], tls: ssl.SSLContext | None) -> None:
        """Accept requests at these sockets."""
        await self._server.accept(listening, tls)

    async def accept_admin(self, listening: Sequence[socket.socket]) -> None:
        """Accept admin requests at sockets of their own."""
        self._admin_server = HttpServer(self._handle_admin, self._refuse, self._server.limits)
        await self._admin_server.accept(listening)

    async def drain(self, within_s: float, linger_s: float = 0.0) -> bool:
        """Accept nothing more and let what is under way end; False where time ran out. Idle
        connections stay for `linger_s`."""
        return await self._server.drain(within_s, linger_s)

    async def aclose(self) -> None:
        """End everything that is left."""
        if self._ticker is not None:
            self._ticker.cancel()
        await self._server.aclose()
        if self._admin_server is not None:
            await self._admin_server.aclose()
        await self.proxy.departures.aclose()
        await self.reload.aclose()
        await self._relay.aclose()
        if self._l2 is not None:
            await self._l2.aclose()
        if self._feed is not None:
            await self._feed.aclose()
        if self.proxy.sightings is not None:
            await self.proxy.sightings.aclose()
        if self._admin is not None:
            await self._admin.aclose()
        await asyncio.gather(*(engine.aclose() for engine in self._upstreams.engines.values()))
        self.log.close()

    @property
    def is_ready(self) -> bool:
        """Whether requests have a chance: an engine is up, and no drain has begun."""
        return self._is_started and self._upstreams.is_ready and not self._server.is_draining

    def snapshot(self) -> Snapshot:
        """All that this process counted, and what it holds at this moment."""
        inventory = self._inventory
        inventory.settle(self._clock())
        gauges = {
            "workers": 1.0,
            "connections": len(self._server.connections),
            "flights": len(self.proxy.departures),
            "l1_bytes": inventory.size_bytes,
            "l1_budget_bytes": inventory.budget_bytes,
            "l1_entries": len(inventory),
            "l1_budget_entries": inventory.budget_entries,
        }
        if self.proxy.sightings is not None:
            gauges["trunks_messages"] = self.proxy.sightings.messages
            gauges["trunks_bytes"] = self.proxy.sightings.size_bytes
            self._counters.trunks_dropped = self.proxy.sightings.dropped
        ready = sum(engine.is_ready for engine in self._upstreams.engines.values())
        shared = {"engines_ready": float(ready), **self._l2_size}
        if self._l2 is not None:
            shared["l2_up"] = float(self._l2.is_up)
        self._counters.log_dropped = self.log.dropped
        self._counters.rows_dropped = self._feed.dropped if self._feed is not None else 0
        return snapshot(
            self._ledger,
            self._counters,
            gauges,
            shared,
            self._upstreams.counted(),
            self._upstreams.lmcache_counts(),
        )

    def drain_upstream(self, name: str, *, is_draining: bool) -> bool:
        """Let that server take nothing more from this process, or again. Whether there is one of
        that name."""
        return self._upstreams.set_draining(name, is_draining=is_draining)

    async def invalidate(self, what: Invalidation, number: int | None, *, dry_run: bool) -> Removed:
        """Forget it in this process's L1, and what is being computed of it; `number` is the
        board's, None where nobody else counts."""
        if not dry_run:
            mark = self._controller.epoch
            self._controller.on_invalidate(what, mark.number + 1 if number is None else number)
            if self._l2 is not None and number is not None:
                self._l2.note_applied(number)
        keys: list[Key] = []
        size_bytes = 0
        for removed in self._controller.sweep(what, dry_run=dry_run):
            keys += removed.keys
            size_bytes += removed.size_bytes
            await asyncio.sleep(0)
        if self._l2 is not None and number is not None and not dry_run:
            for removed in self._l2.swept(number):
                keys += removed.keys
                size_bytes += removed.size_bytes
        if self.proxy.sightings is not None and not dry_run:
            await self.proxy.sightings.invalidate(what)
        if what.tenant is not None and not dry_run:
            await self._erase_files(what.tenant)
        return Removed(tuple(keys), size_bytes)

    async def _erase_files(self, tenant: str) -> None:
        """Slot files are known by their tenants, and by nothing else that an invalidation names."""
        try:
            files = await self._upstreams.erase(tenant)
        except ConfigError as error:
            self.log.event("slot-files-not-erased", why=str(error))
        else:
            if files:
                self.log.event("slot-files-erased", files=files)

    def prepare(self, settings: Settings) -> Prepared:
        """Make what these settings need, and change nothing yet. Raises ConfigError."""
        return self.reload.prepare(settings)

    def commit(self, prepared: Prepared) -> None:
        """Go on with what was prepared."""
        self.reload.commit(prepared)

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
            if exchange.path in DIALECTS:
                self.proxy.on_refused(exchange, error)
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
                await self._measure_l2()
            except Exception as bug:  # noqa: BLE001  a tick that fails mustn't be the last one
                self._on_bug(bug)

    async def _measure_l2(self) -> None:
        l2 = self._l2
        if l2 is None:
            return
        size = await l2.size() if l2.is_up else None
        self._l2_size = {}
        if size is not None:
            self._l2_size = {"l2_bytes": size.size_bytes, "l2_entries": size.entries}
            if size.budget_bytes:
                self._l2_size["l2_budget_bytes"] = size.budget_bytes
