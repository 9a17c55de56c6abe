"""The gateway from its settings."""

import secrets
import socket
import time
from collections.abc import Callable, Sequence

from preheat import config, wiring
from preheat.config import Settings
from preheat.core.breaker import Breaker
from preheat.gateway.admin import AdminApp
from preheat.gateway.app import Gateway
from preheat.gateway.hosting import Alone, Host
from preheat.gateway.hot_sets import HotSets
from preheat.gateway.intake import Intake, Tenants
from preheat.gateway.l2 import L2
from preheat.gateway.proxy import Proxy, log_bug
from preheat.gateway.relay import Relay
from preheat.gateway.reload import Reload
from preheat.gateway.sightings import Sightings
from preheat.gateway.table import engines_of, keyed_headers, table_of
from preheat.gateway.upstreams import Upstreams
from preheat.stores import Store
from preheat.telemetry.logs import Log
from preheat.telemetry.requestlog import RequestFeed
from preheat.wire.entry import Codec


def assemble(
    settings: Settings,
    log: Log,
    host: Host | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Gateway:
    """All its objects, not started yet. Raises ConfigError."""
    settings = wiring.with_defaults(settings)
    alone = Alone()
    host = host or alone
    wiring.check_request_log(settings)
    parts = wiring.Parts(settings, log, clock)
    secret = host.secret or wiring.secret(settings)
    via = b"1.1 preheat-%b" % host.name.encode()
    hot_sets = HotSets(parts.ledger)
    engines = engines_of(settings, log, host, secret, hot_sets.of)
    upstreams = Upstreams(table_of(settings, engines), via)
    keyring = wiring.keyring(settings, secret, upstreams.identity_of)
    keyed = keyed_headers(settings)
    process = f"{secrets.token_hex(4)}-"
    intake = Intake(Tenants(wiring.tenant_keys(settings)), keyring, process, keyed, via)
    feed = None
    if settings.log.enabled:
        feed = RequestFeed(
            str(config.log_socket(settings, config.environment())),
            process,
            secret,
            log.event,
            worker=host.slot,
            identity_of=upstreams.identity_of,
        )

    def on_bug(bug: Exception) -> None:
        log_bug(log, bug)

    l2 = _l2(settings, secret, parts, log, on_bug)
    proxy = Proxy(
        parts.controller,
        intake,
        upstreams,
        parts.counters,
        log,
        l2,
        feed,
        log_requests=settings.telemetry.log_requests,
        clock=parts.clock,
    )
    proxy.fallback = settings.fallback_message
    trunks = wiring.trunks(settings, log)
    if trunks is not None:
        proxy.sightings = Sightings(trunks, log, on_bug)
        hot_sets.begin(proxy.sightings, upstreams)
        if l2 is not None:
            l2.on_news = proxy.sightings.catch_up
    gateway = Gateway(
        proxy,
        Relay(intake, upstreams, parts.counters, log, on_bug),
        parts.controller,
        parts.inventory,
        parts.ledger,
        parts.counters,
        upstreams,
        l2,
        feed,
        log,
        wiring.limits(settings),
        clock=parts.clock,
    )
    alone.gateway = gateway
    gateway.reload = Reload(
        settings, parts, proxy, intake, upstreams, keyring, host, log, secret, hot_sets.of
    )
    admin = AdminApp(
        lambda: gateway.reload.settings,
        wiring.admin_key(settings),
        host,
        upstreams,
        l2,
        log,
        is_ready=lambda: gateway.is_ready,
    )
    gateway.mount(admin.app, apart=bool(settings.admin.listen))
    return gateway


async def accept(
    gateway: Gateway,
    settings: Settings,
    listening: Sequence[socket.socket],
    admin: Sequence[socket.socket],
) -> None:
    """Start accepting requests at sockets that were opened elsewhere."""
    await gateway.accept(listening, wiring.tls(settings))
    if admin:
        await gateway.accept_admin(admin)


def _l2(
    settings: Settings,
    secret: bytes,
    parts: wiring.Parts,
    log: Log,
    on_bug: Callable[[Exception], None],
) -> L2 | None:
    def make() -> Store:
        store = wiring.store(settings, log)
        assert store is not None
        return store

    if settings.l2.kind == "off":
        return None
    return L2(
        make,
        Codec(secret),
        Breaker(settings.l2.breaker_failures, settings.l2.breaker_open_s),
        parts.controller,
        parts.counters,
        log,
        timeout_s=settings.l2.timeout_s,
        queue_bytes=settings.l2.queue_bytes,
        has_company=settings.listen.workers > 1,
        clock=parts.clock,
        on_bug=on_bug,
    )
