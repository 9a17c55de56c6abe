"""All that there is to examine for given settings, in the order in which it is told."""

from collections.abc import AsyncIterator, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from preheat import config, traces, wiring
from preheat.config import EngineSettings, Settings
from preheat.engines.child import weights_of
from preheat.errors import ConfigError
from preheat.lab.doctor.engine import EngineCase, examine_engine
from preheat.lab.doctor.finding import Finding
from preheat.lab.doctor.folder import examine_folder
from preheat.lab.doctor.gateway import examine_gateway

_NO_START: Final = "serve doesn't start with it"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to examine beside the settings."""

    gateway: str = ""
    gateway_key: str = ""
    model: str = ""
    asks: bool = True
    timeout_s: float = 60.0


async def examine(
    settings: Settings, order: Order, environment: Mapping[str, str]
) -> AsyncIterator[Finding]:
    """All findings, as they come."""
    for finding in settings_findings(settings, environment):
        yield finding
    for number, (name, engine) in enumerate(settings.engines.items()):
        models = _models_of(settings, name, order.model, is_first=number == 0)
        async for finding in _engine(name, engine, models, order, environment):
            yield finding
    async for finding in _l2(settings, environment):
        yield finding
    for finding in _request_log(settings, environment):
        yield finding
    if order.gateway:
        async for finding in examine_gateway(
            order.gateway,
            order.gateway_key,
            model=order.model,
            asks=order.asks,
            timeout_s=order.timeout_s,
        ):
            yield finding


def settings_findings(settings: Settings, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What `serve` would refuse: secrets that aren't there, files that can't be read."""
    checks = (
        lambda: _secret(settings, environment),
        lambda: wiring.tenant_keys(settings),
        lambda: wiring.admin_key(settings),
        lambda: wiring.tls(settings),
    )
    is_fine = True
    for check in checks:
        try:
            check()
        except ConfigError as error:
            is_fine = False
            yield refused_settings(error)
    if is_fine:
        yield Finding("settings", "settings", "ok", "they can be used")


def refused_settings(error: ConfigError) -> Finding:
    """A setting that can't work; the message names it and what to do."""
    key, _, rest = str(error).partition(": ")
    if not key or not rest or " " in key:
        return Finding("settings", "settings", "problem", str(error), _NO_START)
    return Finding("settings", key, "problem", rest, _NO_START)


def _secret(settings: Settings, environment: Mapping[str, str]) -> None:
    if settings.exact.secret_env:
        text = config.secret_from(settings.exact.secret_env, "exact.secret_env", environment)
        if len(text) < wiring.SECRET_CHARACTERS:
            raise ConfigError(
                f"exact.secret_env: {settings.exact.secret_env} has fewer than "
                f"{wiring.SECRET_CHARACTERS} characters"
            )


def _models_of(settings: Settings, name: str, asked: str, *, is_first: bool) -> dict[str, str]:
    """The names this engine is asked for, by what names them."""
    found = {
        f"models.{model}": one.alias or model
        for model, one in settings.models.items()
        if one.engine == name or (not one.engine and is_first)
    }
    if asked and asked not in settings.models and is_first:
        found["--model"] = asked
    return found


async def _engine(
    name: str,
    engine: EngineSettings,
    models: dict[str, str],
    order: Order,
    environment: Mapping[str, str],
) -> AsyncIterator[Finding]:
    about = f"engines.{name}"
    if engine.kind == "embedded":
        yield _embedded(name, engine)
    if engine.kind != "openai":
        return
    try:
        variable, key = engine.api_key_env, f"{about}.api_key_env"
        api_key = config.secret_from(variable, key, environment) if variable else ""
    except ConfigError as error:
        yield refused_settings(error)
        return
    urls = config.upstreams_of(engine)
    for url in urls:
        case = EngineCase(
            about=about if len(urls) == 1 else f"{about} at {url}",
            url=url,
            api_key=api_key,
            models=models,
            injects_usage=engine.inject_usage,
            asks=order.asks,
            timeout_s=order.timeout_s,
        )
        async for finding in examine_engine(case):
            yield finding


def _embedded(name: str, engine: EngineSettings) -> Finding:
    """It lives within `serve`, so only its parts can be looked at."""
    try:
        weights = weights_of(name, engine.model)
    except ConfigError as error:
        return refused_settings(error)
    if find_spec("xllamacpp") is None:
        return Finding(
            "extra-missing",
            f"engines.{name}",
            "problem",
            "the embedded engine isn't installed",
            _NO_START,
            "pip install 'preheat[embedded]'",
        )
    return Finding("embedded", f"engines.{name}", "ok", f"installed, with {weights.name}")


async def _l2(settings: Settings, environment: Mapping[str, str]) -> AsyncIterator[Finding]:
    l2 = settings.l2
    if l2.kind == "off":
        yield Finding(
            "l2-off",
            "l2.kind",
            "note",
            "there is no L2",
            "what is stored is lost with each restart, and workers don't share it",
            'set l2.kind = "lmdb"',
        )
    elif find_spec(l2.kind) is None:
        yield Finding(
            "extra-missing",
            "l2.kind",
            "problem",
            f"the package for {l2.kind} isn't installed",
            _NO_START,
            f"pip install 'preheat[{l2.kind}]'",
        )
    elif l2.kind == "lmdb":
        from preheat.lab.doctor.lmdb_store import examine_lmdb  # noqa: PLC0415 - an extra

        folder = config.cache_folder(settings, environment)
        has_secret = bool(settings.exact.secret_env)
        for finding in examine_lmdb(folder, l2.bytes, has_secret=has_secret):
            yield finding
    else:
        from preheat.lab.doctor.redis_store import examine_redis  # noqa: PLC0415 - an extra

        try:
            variable = l2.password_env
            key = "l2.password_env"
            password = config.secret_from(variable, key, environment) if variable else ""
        except ConfigError as error:
            yield refused_settings(error)
            return
        async for finding in examine_redis(l2.url, password, l2.timeout_s):
            yield finding


def _request_log(settings: Settings, environment: Mapping[str, str]) -> Iterator[Finding]:
    if not settings.log.enabled:
        return
    if not traces.is_installed():
        yield Finding(
            "extra-missing",
            "log.enabled",
            "problem",
            "the packages for the request log aren't installed",
            _NO_START,
            traces.REMEDY,
        )
    folder: Path = config.log_folder(settings, environment)
    yield from examine_folder("log.path", folder, settings.log.bytes)
