"""Which engine answers for which model, as one value."""

from collections.abc import Callable, Mapping

import msgspec

from preheat import wiring
from preheat.config import Settings, upstreams_of
from preheat.core.breakpoints import Breakpoints
from preheat.engines import Engine
from preheat.engines.dialects import DIALECTS
from preheat.engines.warmth import Warmth
from preheat.gateway.hosting import Host
from preheat.telemetry.logs import Log


class Model(msgspec.Struct, frozen=True):
    """Where requests for one name go. `identity` is the part of the key that names what answers:
    engines of one group are declared equal by the operator."""

    engine: str
    alias: str
    identity: str


class Table(msgspec.Struct, frozen=True):
    """The engines by name, the models by name, and the first engine for every other model.

    `identity_of_engine` is what names an engine in the key of a model that isn't configured,
    `weights` what identifies an embedded engine's model, `breakpoints` where prefixes end for those
    providers that are told.
    """

    engines: Mapping[str, Engine]
    models: Mapping[str, Model]
    identity_of_engine: Mapping[str, str]
    forward_headers: Mapping[str, tuple[bytes, ...]]
    weights: Mapping[str, str] = {}
    breakpoints: Mapping[str, Breakpoints] = {}


def engines_of(
    settings: Settings, log: Log, host: Host, secret: bytes, warmth_of: Callable[[str], Warmth]
) -> dict[str, tuple[Engine, str]]:
    """Every engine by its name, with what identifies its weights where that can be known."""
    return {
        name: wiring.engine(
            name,
            engine,
            log,
            host.where(name),
            secret,
            host.learner,
            warmth_of(name),
            has_tenants=bool(settings.tenants),
        )
        for name, engine in settings.engines.items()
    }


def keyed_headers(settings: Settings) -> tuple[str, ...]:
    """What any engine is sent of a request's headers, beside those that all are."""
    return tuple(
        header for engine in settings.engines.values() for header in engine.forward_headers
    )


def table_of(settings: Settings, made: Mapping[str, tuple[Engine, str]]) -> Table:
    """Which engine answers for which model, and what names it in the key.

    The operator declares the servers of one group equal, so that its first address stands for
    them, and the name alone where gateways of several machines share answers.
    """
    identity = {name: _identity(name, settings, weights) for name, (_, weights) in made.items()}
    first = next(iter(made))
    models = {}
    for name, model in settings.models.items():
        engine = model.engine or first
        alias = model.alias or name
        models[name] = Model(engine, alias, "\n".join((identity[engine], alias, model.version)))
    return Table(
        {name: engine for name, (engine, _) in made.items()},
        models,
        identity,
        {
            name: tuple(header.lower().encode() for header in engine.forward_headers)
            for name, engine in settings.engines.items()
        },
        {name: weights for name, (_, weights) in made.items()},
        {
            name: Breakpoints(DIALECTS["anthropic"].least_tokens)
            for name, engine in settings.engines.items()
            if engine.auto_breakpoints
        },
    )


def _identity(name: str, settings: Settings, weights: str) -> str:
    engine = settings.engines[name]
    if engine.identity:
        return engine.identity
    addresses = upstreams_of(engine)
    if weights or not addresses or settings.l2.kind == "redis":
        return f"{name}\n{weights}"
    return f"{name}\n{addresses[0].rstrip('/')}"
