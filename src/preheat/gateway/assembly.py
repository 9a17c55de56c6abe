"""The gateway from its settings."""

import secrets

from preheat import config, wiring
from preheat.config import Settings
from preheat.gateway.admin import AdminApp
from preheat.gateway.app import Gateway
from preheat.gateway.intake import Intake, Tenants
from preheat.gateway.proxy import Proxy, log_bug
from preheat.gateway.relay import Relay
from preheat.gateway.upstreams import VIA, Model, Upstreams
from preheat.telemetry.logs import Log


def assemble(settings: Settings, log: Log) -> Gateway:
    """All its objects, not started yet. Raises ConfigError."""
    settings = wiring.with_defaults(settings)
    parts = wiring.Parts(settings, log)
    upstreams = _upstreams(settings, log)
    keyed = tuple(
        header for engine in settings.engines.values() for header in engine.forward_headers
    )
    intake = Intake(
        Tenants(wiring.tenant_keys(settings)),
        wiring.keyring(settings, upstreams.identity_of),
        f"{secrets.token_hex(4)}-",
        keyed,
        VIA,
    )
    proxy = Proxy(
        parts.controller,
        intake,
        upstreams,
        parts.counters,
        log,
        fallback=settings.fallback_message,
        log_requests=settings.telemetry.log_requests,
    )
    relay = Relay(intake, upstreams, parts.counters, log, lambda bug: log_bug(log, bug))
    gateway = Gateway(
        proxy,
        relay,
        parts.controller,
        parts.counters,
        upstreams.engines,
        log,
        wiring.limits(settings),
        clock=parts.clock,
    )
    admin = AdminApp(
        settings,
        wiring.admin_key(settings),
        parts.controller,
        parts.inventory,
        parts.ledger,
        parts.counters,
        parts.metrics(gateway.gauges),
        log,
        is_ready=lambda: gateway.is_ready,
        clock=parts.clock,
    )
    gateway.mount(admin.app, apart=bool(settings.admin.listen))
    return gateway


async def listen(gateway: Gateway, settings: Settings) -> str:
    """Start accepting requests; the gateway's URL."""
    host, port = config.address_of(settings.listen.address, "listen.address")
    tls = wiring.tls(settings)
    port = await gateway.listen(host, port, tls)
    if settings.admin.listen:
        await gateway.listen_admin(*config.address_of(settings.admin.listen, "admin.listen"))
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def _upstreams(settings: Settings, log: Log) -> Upstreams:
    made = {name: wiring.engine(name, engine, log) for name, engine in settings.engines.items()}
    first = next(iter(made))
    models = {}
    for name, model in settings.models.items():
        engine = model.engine or first
        alias = model.alias or name
        identity = "\n".join((engine, made[engine][1], alias, model.version))
        models[name] = Model(engine, alias, identity)
    return Upstreams(
        {name: engine for name, (engine, _) in made.items()},
        models,
        {name: "\n".join((name, weights)) for name, (_, weights) in made.items()},
        {
            name: tuple(header.lower().encode() for header in engine.forward_headers)
            for name, engine in settings.engines.items()
        },
    )
