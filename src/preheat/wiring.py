"""Names become objects, once."""

import hashlib
import inspect
import random
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

from preheat import config, traces
from preheat.config import Choice, EngineSettings, NamespaceSettings, Settings
from preheat.core import admission, eviction, routing
from preheat.core.breaker import Breaker
from preheat.core.controller import Controller
from preheat.core.freshness import Freshness
from preheat.core.inventory import Inventory
from preheat.core.keys import Keyring
from preheat.core.kv_names import KvNames
from preheat.core.ledger import Ledger, Price
from preheat.core.stats import Counters
from preheat.engines import ENGINES, Engine
from preheat.engines.child import Address, settings_of, sha256_of
from preheat.engines.kv_hearing import Hearing, heard_at
from preheat.engines.kv_link import LearnerLink
from preheat.engines.lmcache_fleet import LmcacheRules
from preheat.engines.lmcache_tier import LmcacheTier
from preheat.engines.rules import Care, Rules
from preheat.engines.salts import Salts
from preheat.engines.slot_seats import SlotRules
from preheat.engines.warmth import Warmth
from preheat.engines.worker import OnEvent
from preheat.errors import ConfigError
from preheat.stores import STORES, Store
from preheat.stores.secret import secret_at
from preheat.stores.trunk_file import TrunkFile
from preheat.stores.trunks import Trunks
from preheat.telemetry.logs import Log
from preheat.transport.client import Timeouts
from preheat.transport.server import Limits

T = TypeVar("T")
Where = Callable[[], Address | None]
"""Tells where an embedded engine answers now; None while it is starting."""

SECRET_CHARACTERS: Final = 32
_DEFAULT_ENGINE: Final = "embedded"


def build(what: str, choice: Choice, table: Mapping[str, Callable[..., T]]) -> T:
    """The policy of that name, with its options. Raises ConfigError for what doesn't fit.

    A name with a colon is an import path, "module:Class": policies needn't be in this tree.
    """
    factory = table.get(choice.name)
    if factory is None:
        if ":" not in choice.name:
            known = ", ".join(table)
            raise ConfigError(f"{what}.name: unknown policy {choice.name!r}; known: {known}")
        factory = _imported(what, choice.name)
    parameters = inspect.signature(factory).parameters
    for option, value in choice.options.items():
        if option not in parameters:
            has = ", ".join(parameters) or "no options"
            raise ConfigError(f"{what}.options: {choice.name!r} has no {option!r}; it has {has}")
        expected = parameters[option].annotation
        if isinstance(expected, type) and not _fits(value, expected):
            raise ConfigError(
                f"{what}.options.{option}: expected {expected.__name__}, got {type(value).__name__}"
            )
    try:
        policy = factory(**choice.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}.options: {choice.name!r} refuses them: {error}") from None
    methods = set.intersection(*(set(dir(one)) for one in table.values())) - {"keeps_order"}
    missing = sorted(name for name in methods if name[0] != "_" and not hasattr(policy, name))
    if missing:
        raise ConfigError(f"{what}.name: {choice.name!r} has no {', '.join(missing)}")
    return policy


def _fits(value: Any, expected: type) -> bool:
    if isinstance(value, bool) and expected is not bool:
        return False
    return isinstance(value, expected) or (expected is float and isinstance(value, int))


def _imported(what: str, path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        factory = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what}.name: can't import {path}: {error}") from None
    if not isinstance(factory, type):
        raise ConfigError(f"{what}.name: {path} isn't a class")
    return factory


def with_defaults(settings: Settings) -> Settings:
    """Without any engine configured, the embedded one, with the model that is installed."""
    if settings.engines:
        return settings
    tree = {_DEFAULT_ENGINE: EngineSettings(kind="embedded")}
    return Settings(
        **{name: getattr(settings, name) for name in settings.__struct_fields__} | {"engines": tree}
    )


class Parts:
    """The objects that drivers share, made from the settings."""

    def __init__(
        self, settings: Settings, log: Log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.log = log
        self.clock = clock
        self.ledger = Ledger(prices(settings))
        self.counters = Counters()
        self.inventory = Inventory(
            build("l1.eviction", settings.l1.eviction, eviction.POLICIES),
            build("l1.admission", settings.l1.admission, admission.POLICIES),
            budget_bytes=settings.l1.bytes,
            budget_entries=settings.l1.entries,
        )
        self.controller = Controller(
            self.inventory,
            self.ledger,
            self.counters,
            freshness=freshness(settings),
            namespaces=namespaces(settings),
            entry_bytes=settings.l1.entry_bytes,
            has_l2=settings.l2.kind != "off",
            draw=random.Random(secrets.randbits(64)).random,
        )


def prices(settings: Settings) -> dict[str, Price]:
    """What each configured model's tokens cost."""
    return {
        name: Price.per_million(
            model.input,
            model.input if model.cached_input is None else model.cached_input,
            model.output,
        )
        for name, model in settings.models.items()
    }


def freshness(settings: Settings) -> Freshness:
    """How long answers live where a namespace doesn't say otherwise."""
    return _freshness(settings, NamespaceSettings())


def namespaces(settings: Settings) -> dict[str, Freshness]:
    """How long answers live in each configured namespace."""
    return {name: _freshness(settings, one) for name, one in settings.namespaces.items()}


def secret(settings: Settings) -> bytes:
    """The operator's secret, or the one that was made at this machine's first start.

    Raises ConfigError.
    """
    variable = settings.exact.secret_env
    if not variable:
        return secret_at(config.cache_folder(settings, config.environment()))
    return hashlib.sha256(_long_secret(variable, "exact.secret_env")).digest()


def _long_secret(variable: str, key: str) -> bytes:
    text = config.secret_from(variable, key, config.environment())
    if len(text) < SECRET_CHARACTERS:
        raise ConfigError(f"{key}: {variable} has fewer than {SECRET_CHARACTERS} characters")
    return text.encode()


def keyring(settings: Settings, secret: bytes, identity_of: Callable[[str], str]) -> Keyring:
    """The keyring under that secret."""
    return Keyring(secret, identity_of, memo_entries=settings.l1.entries)


def store(settings: Settings, log: Log) -> Store | None:
    """L2, not opened yet; None where there is none."""
    l2 = settings.l2
    if l2.kind == "off":
        return None
    module, _, class_name = STORES[l2.kind].partition(":")
    make: Callable[..., Store] = getattr(import_module(module), class_name)

    def on_event(event: str, fields: dict[str, object]) -> None:
        log.event(event, **fields)

    if l2.kind == "redis":
        variable = l2.password_env
        password = (
            config.secret_from(variable, "l2.password_env", config.environment())
            if variable
            else ""
        )
        return make(l2.url, password=password, timeout_s=l2.timeout_s, on_event=on_event)
    folder = config.cache_folder(settings, config.environment())
    return make(folder, budget_bytes=l2.bytes, queue_bytes=l2.queue_bytes, on_event=on_event)


def trunks(settings: Settings, log: Log) -> Trunks | None:
    """Those of before, where they are kept in a file; None where none are kept. Raises ConfigError."""
    wanted = settings.trunks
    if wanted.keep == "off":
        return None
    file = None
    if wanted.keep == "file":
        sealed_by = b""
        if wanted.key_env:
            sealed_by = _long_secret(wanted.key_env, "trunks.key_env")
        path = config.cache_folder(settings, config.environment()) / "trunks"
        file = TrunkFile(
            path, secret=sealed_by, on_damage=lambda why: log.event("trunks-set-aside", why=why)
        )
    return Trunks(most_bytes=wanted.bytes, most_age_s=wanted.age_s, file=file)


def check_request_log(settings: Settings) -> None:
    """Raise ConfigError where there is to be one and can't."""
    if settings.log.enabled and not traces.is_installed():
        raise ConfigError(
            f"log.enabled: needs packages that aren't installed; run: {traces.REMEDY}"
        )


def engine(
    name: str,
    settings: EngineSettings,
    log: Log,
    where: Where | None = None,
    secret: bytes = b"",
    learner: str = "",
    warmth: Warmth | None = None,
    *,
    has_tenants: bool = False,
) -> tuple[Engine, str]:
    """The engine, and what names the model behind it where that can be known. `secret` is the machine's,
    `learner` the path of its socket, where there are several worker processes; `warmth` tells what servers that
    come cold are given.

    `where` tells where an embedded engine answers that another process of ours has started.
    """
    timeouts = Timeouts(
        connect_s=settings.connect_s,
        first_byte_s=settings.first_byte_s,
        idle_s=settings.idle_s,
        queue_s=settings.queue_s,
    )
    module, _, class_name = ENGINES[settings.kind].partition(":")
    make = getattr(import_module(module), class_name)

    def on_event(event: str, fields: dict[str, object]) -> None:
        log.event(event, engine=name, **fields)

    if settings.kind == "embedded":
        child = settings_of(name, settings)
        made = make(name, child, timeouts=timeouts, on_event=on_event, where=where)
        return made, sha256_of(Path(child.model))
    if settings.kind == "fake":
        return make(name), ""
    variable = settings.api_key_env
    key = f"engines.{name}.api_key_env"
    api_key = config.secret_from(variable, key, config.environment()) if variable else ""
    names = KvNames(secrets.token_bytes(16))
    link = None
    if learner:
        link = LearnerLink(learner, name, names, on_event)
    made = make(
        name,
        config.upstreams_of(settings),
        api_key=api_key,
        timeouts=timeouts,
        max_connections=settings.max_connections,
        http2=settings.http2,
        breaker=Breaker(settings.breaker_failures, settings.breaker_open_s),
        rules=rules(settings),
        routing=build(f"engines.{name}.routing", settings.routing, routing.POLICIES),
        shadow=None
        if settings.shadow.name == "off"
        else build(f"engines.{name}.shadow", settings.shadow, routing.POLICIES),
        care=_care(settings, api_key, secret, warmth, has_tenants=has_tenants)
        if settings.poll_s
        else None,
        hearing=_hearing(name, settings, names, link, on_event),
        link=link,
        lmcache=_lmcache(name, settings, on_event),
        inject_usage=settings.inject_usage,
        on_event=on_event,
    )
    return made, ""


def rules(settings: EngineSettings) -> Rules:
    """How a group of servers treats failures."""
    return Rules(
        settings.retries,
        settings.retry_ratio,
        settings.health_path,
        settings.health_s,
        settings.first_byte_s,
        settings.roles,
    )


def _care(
    settings: EngineSettings,
    api_key: str,
    secret: bytes,
    warmth: Warmth | None,
    *,
    has_tenants: bool,
) -> Care:
    slots = SlotRules(settings.slot_folders, settings.slot_bytes, settings.slot_age_s, secret)
    salts = Salts(secret) if has_tenants and settings.salts == "tenant" else None
    return Care(
        settings.dialect,
        api_key,
        settings.poll_s,
        slots,
        settings.gate_s,
        warmth,
        salts,
        settings.adapters,
    )


def _hearing(
    name: str,
    settings: EngineSettings,
    names: KvNames,
    link: LearnerLink | None,
    on_event: OnEvent,
) -> Hearing | None:
    """Who hears the KV events of a group, where they are to be heard."""
    if not settings.kv_events:
        return None
    try:
        urls = config.upstreams_of(settings)
        hear_at = heard_at(urls, settings.kv_events, settings.kv_replay, link)
    except ConfigError as error:
        raise ConfigError(f"engines.{name}.kv_events: {error}") from None
    return Hearing(
        hear_at, names, on_event if link is None else _bugs_of(on_event)
    )  # the learner logs for all


def _lmcache(name: str, settings: EngineSettings, on_event: OnEvent) -> LmcacheTier | None:
    """Who asks LMCache, where it stands behind a group."""
    if not settings.lmcache:
        return None
    try:
        return LmcacheTier(LmcacheRules(settings.lmcache, settings.lmcache_instances), on_event)
    except ValueError as error:
        raise ConfigError(
            f"engines.{name}.lmcache: expected http(s)://host[:port] ({error})"
        ) from None


def _bugs_of(on_event: OnEvent) -> OnEvent:
    """All else is said elsewhere."""

    def tell(event: str, fields: dict[str, object]) -> None:
        if event == "bug":
            on_event(event, fields)

    return tell


def tenant_keys(settings: Settings) -> dict[str, str]:
    """API key to tenant. Raises ConfigError where one is missing or belongs to two."""
    found: dict[str, str] = {}
    for name, tenant in settings.tenants.items():
        for key in _keys_of(name, tenant.api_key_env, tenant.api_key_file):
            if found.setdefault(key, name) != name:
                raise ConfigError(f"tenants.{name}: its key is also that of {found[key]}")
    return found


def _keys_of(name: str, variable: str, file: str) -> list[str]:
    if variable:
        return [config.secret_from(variable, f"tenants.{name}.api_key_env", config.environment())]
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tenants.{name}.api_key_file: can't read {file}: {error}") from None
    if not lines:
        raise ConfigError(f"tenants.{name}.api_key_file: {file} holds no key")
    return lines


def admin_key(settings: Settings) -> str:
    """The admin key, or nothing where none is configured."""
    variable = settings.admin.api_key_env
    if not variable:
        return ""
    return config.secret_from(variable, "admin.api_key_env", config.environment())


def tls(settings: Settings) -> ssl.SSLContext | None:
    """The server's certificate. Raises ConfigError where it can't be used."""
    listen = settings.listen
    if not listen.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(listen.tls_cert, listen.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"listen.tls_cert: can't use {listen.tls_cert}: {error}") from None
    return context


def limits(settings: Settings) -> Limits:
    """What one client may take."""
    listen = settings.listen
    return Limits(
        head_bytes=listen.head_bytes,
        head_lines=listen.head_lines,
        body_bytes=listen.body_bytes,
        bodies_bytes=listen.bodies_bytes,
        connections=listen.connections,
        idle_s=listen.idle_s,
        head_s=listen.head_s,
        body_s=listen.body_s,
        write_s=listen.write_s,
    )


def _freshness(settings: Settings, namespace: NamespaceSettings) -> Freshness:
    exact = settings.exact

    def here(name: str) -> float:
        own: float | None = getattr(namespace, name)
        general: float = getattr(exact, name)
        return general if own is None else own

    return Freshness(
        ttl_s=here("ttl_s"),
        max_ttl_s=exact.max_ttl_s,
        variants=config.variants_of(namespace.sampled or exact.sampled, "exact.sampled"),
        stale_s=exact.stale_s,
        revalidate_s=here("stale_while_revalidate_s"),
        on_error_s=here("stale_if_error_s"),
        early=exact.early_refresh,
        negative_ttl_s=here("negative_ttl_s"),
    )
