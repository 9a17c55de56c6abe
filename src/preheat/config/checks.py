"""What no single setting can know of the others."""

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, Final
from urllib.parse import urlsplit

from preheat.config.tree import NAMED, EngineSettings, Settings
from preheat.config.values import address_of, is_loopback, upstreams_of, variants_of
from preheat.errors import ConfigError
from preheat.wire.kv_places import places_of

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")


_MODEL_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,256}")


_MOST_ADAPTERS: Final = 1_024


_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")


_NEVER_FORWARDED: Final = frozenset(
    [
        "authorization",
        "connection",
        "content-length",
        "cookie",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
        "x-api-key",
        "accept-encoding",
    ]
)


_ENDPOINTS: Final = ("/chat/completions", "/completions", "/responses", "/embeddings", "/models")


OF_EMBEDDED: Final = ("model", "threads", "ctx_tokens", "slots", "batch_tokens", "cache_ram_mib")


_OF_OPENAI: Final = (
    "url",
    "urls",
    "identity",
    "http2",
    "retries",
    "retry_ratio",
    "health_path",
    "health_s",
    "api_key_env",
    "kv_events",
    "kv_replay",
    "lmcache",
    "lmcache_instances",
    "max_connections",
    "breaker_failures",
    "breaker_open_s",
    "inject_usage",
    "slot_folders",
    "gate_s",
    "roles",
    "salts",
    "adapters",
)


_FOREIGN: Final[Mapping[str, tuple[str, ...]]] = {
    "openai": OF_EMBEDDED,
    "embedded": _OF_OPENAI,
    "fake": OF_EMBEDDED + _OF_OPENAI,
}
"""The settings that mean nothing for a kind of engine."""


def check_finite(value: Any, key: str) -> None:
    """TOML knows inf and nan; no setting does."""
    if isinstance(value, dict):
        for name, inner in value.items():
            check_finite(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, float) and not isfinite(value):
        raise ConfigError(f"{key}: expected a finite number, got {value}")


def check_together(settings: Settings) -> None:
    """What no single setting can know."""
    _check_listen(settings)
    variants_of(settings.exact.sampled, "exact.sampled")
    for table in NAMED:
        for name in getattr(settings, table):
            if table == "models" and not _MODEL_NAME.fullmatch(name):
                raise ConfigError(f"models.{name!r}: a name has 1 to 256 printable characters")
            if table != "models" and not NAME.fullmatch(name):
                raise ConfigError(
                    f"{table}.{name}: a name has 1 to 64 letters, digits and . _ : - and begins with "
                    "a letter or digit"
                )
    _check_models(settings)
    _check_l2(settings)
    _check_trunks(settings)
    for name, tenant in settings.tenants.items():
        if bool(tenant.api_key_env) == bool(tenant.api_key_file):
            raise ConfigError(f"tenants.{name}: give either api_key_env or api_key_file")
    for name, namespace in settings.namespaces.items():
        if namespace.sampled is not None:
            variants_of(namespace.sampled, f"namespaces.{name}.sampled")
        if namespace.ttl_s is not None and namespace.ttl_s <= 0:
            raise ConfigError(f"namespaces.{name}.ttl_s: must be more than 0")
        for field in ("stale_while_revalidate_s", "stale_if_error_s", "negative_ttl_s"):
            if (getattr(namespace, field) or 0.0) < 0:
                raise ConfigError(f"namespaces.{name}.{field}: can't be negative")


def _check_listen(settings: Settings) -> None:
    host, _ = address_of(settings.listen.address, "listen.address")
    if not settings.tenants and not is_loopback(host):
        raise ConfigError(
            f"listen.address: {host} can be reached from outside, but no tenants are configured; "
            "add a [tenants.NAME] with api_key_env, or listen on 127.0.0.1"
        )
    if settings.admin.listen:
        address_of(settings.admin.listen, "admin.listen")
    if bool(settings.listen.tls_cert) != bool(settings.listen.tls_key):
        raise ConfigError("listen: tls_cert and tls_key go together")


def _check_models(settings: Settings) -> None:
    for name, engine in settings.engines.items():
        _check_engine(name, engine)
        if engine.slot_folders and settings.listen.workers > 1:
            raise ConfigError(
                f"engines.{name}.slot_folders: slots are named by one process; set listen.workers to 1"
            )
    for name, model in settings.models.items():
        if model.engine and model.engine not in settings.engines:
            known = ", ".join(settings.engines) or "none"
            raise ConfigError(f"models.{name}.engine: no engine {model.engine!r}; known: {known}")
        if model.cached_input is not None and model.cached_input < 0:
            raise ConfigError(f"models.{name}.cached_input: a price can't be negative")


def _check_engine(name: str, engine: EngineSettings) -> None:
    default = EngineSettings()
    for field in _FOREIGN[engine.kind]:
        if getattr(engine, field) != getattr(default, field):
            hint = "; a model's name at its engine is models.NAME.alias" if field == "model" else ""
            raise ConfigError(f"engines.{name}.{field}: means nothing for kind {engine.kind}{hint}")
    for header in engine.forward_headers:
        if not _HEADER.fullmatch(header) or header.lower() in _NEVER_FORWARDED:
            raise ConfigError(f"engines.{name}.forward_headers: {header!r} can't be forwarded")
    if engine.url and engine.urls:
        raise ConfigError(f"engines.{name}: give either url or urls")
    if engine.kind == "openai" and not upstreams_of(engine):
        raise ConfigError(f"engines.{name}.url: needed for kind openai, e.g. http://gpu-1:8000")
    key = f"engines.{name}.{'url' if engine.url else 'urls'}"
    for url in upstreams_of(engine):
        _check_url(url, key)
        if url.rstrip("/").endswith(_ENDPOINTS):
            raise ConfigError(
                f"{key}: give the server's address, e.g. http://gpu-1:8000, and no path of an endpoint"
            )
    if len(set(engine.urls)) < len(engine.urls):
        raise ConfigError(f"{key}: one address stands there twice")
    if engine.http2 and not all(url.startswith("https:") for url in upstreams_of(engine)):
        raise ConfigError(f"engines.{name}.http2: needs https urls")
    _check_events(name, engine)
    _check_lmcache(name, engine)
    _check_slots(name, engine)
    _check_roles(name, engine)
    _check_adapters(name, engine)


def _check_adapters(name: str, engine: EngineSettings) -> None:
    key = f"engines.{name}.adapters"
    if not engine.adapters:
        return
    if len(engine.adapters) > _MOST_ADAPTERS:
        raise ConfigError(f"{key}: at most {_MOST_ADAPTERS}, got {len(engine.adapters)}")
    for adapter, path in engine.adapters.items():
        if not _MODEL_NAME.fullmatch(adapter):
            raise ConfigError(f"{key}.{adapter!r}: a name has 1 to 256 printable characters")
        if not path.strip():
            raise ConfigError(f"{key}.{adapter}: say where it lies, as the servers see it")
    if engine.dialect not in {"auto", "vllm", "sglang"}:
        raise ConfigError(f"{key}: {engine.dialect} loads none while it runs; vllm and sglang do")
    if not engine.poll_s:
        raise ConfigError(f"{key}: poll_s 0 means that no server is asked what it has")


def _check_roles(name: str, engine: EngineSettings) -> None:
    if not engine.roles:
        return
    key = f"engines.{name}.roles"
    if len(engine.roles) != len(engine.urls):
        raise ConfigError(f"{key}: give one for each of urls, in order")
    if set(engine.roles) != {"any"} and not {"prefill", "decode"} <= set(engine.roles):
        raise ConfigError(
            f"{key}: a prompt needs a prefill and a decode server; give both, or none"
        )
    if engine.dialect not in {"auto", "vllm"}:
        raise ConfigError(f"{key}: {engine.dialect} has no such protocol; vllm has")


def _check_slots(name: str, engine: EngineSettings) -> None:
    if len(engine.slot_folders) not in {0, 1, len(upstreams_of(engine))}:
        raise ConfigError(
            f"engines.{name}.slot_folders: give one folder for all servers, or one for each of urls"
        )
    if engine.slot_folders and not engine.poll_s:
        raise ConfigError(
            f"engines.{name}.slot_folders: poll_s 0 means that no server is asked what it is"
        )
    if engine.slot_folders and engine.dialect not in {"auto", "llamacpp"}:
        raise ConfigError(
            f"engines.{name}.slot_folders: {engine.dialect} has no slots; only llamacpp has"
        )
    if any(folder.strip(" ./") == "" for folder in engine.slot_folders):
        raise ConfigError(
            f"engines.{name}.slot_folders: expected folders of their own, got {engine.slot_folders}"
        )


def _check_events(name: str, engine: EngineSettings) -> None:
    key = f"engines.{name}.kv_events"
    if engine.kv_replay and not engine.kv_events:
        raise ConfigError(f"engines.{name}.kv_replay: means nothing without kv_events")
    if not engine.kv_events:
        return
    if engine.dialect not in {"auto", "vllm", "sglang"}:
        raise ConfigError(f"{key}: {engine.dialect} publishes none; vllm and sglang do")
    if not engine.poll_s:
        raise ConfigError(f"{key}: poll_s 0 means that no server is asked what it is")
    try:
        places_of(upstreams_of(engine), engine.kv_events, engine.kv_replay)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _check_lmcache(name: str, engine: EngineSettings) -> None:
    key = f"engines.{name}.lmcache"
    if not engine.lmcache:
        if engine.lmcache_instances:
            raise ConfigError(f"{key}_instances: means nothing without lmcache")
        return
    _check_url(engine.lmcache, key)
    if engine.dialect not in {"auto", "vllm"}:
        raise ConfigError(f"{key}: LMCache stands behind vLLM, not behind {engine.dialect}")
    if not engine.poll_s:
        raise ConfigError(f"{key}: poll_s 0 means that no server is asked what it is")
    if len(engine.lmcache_instances) not in {0, 1, len(upstreams_of(engine))}:
        raise ConfigError(
            f"{key}_instances: give one instance for all servers, or one for each of urls"
        )


def _check_trunks(settings: Settings) -> None:
    if settings.trunks.key_env and settings.trunks.keep != "file":
        raise ConfigError('trunks.key_env: means nothing without trunks.keep = "file"')


def _check_l2(settings: Settings) -> None:
    l2 = settings.l2
    if l2.kind == "redis":
        parts = urlsplit(l2.url)
        if parts.scheme not in {"redis", "rediss", "unix"}:
            raise ConfigError("l2.url: expected redis://host:port/database for kind redis")
        if "@" in parts.netloc:
            raise ConfigError("l2.url: passwords don't belong into a url; use l2.password_env")
        if not settings.exact.secret_env:
            raise ConfigError(
                "exact.secret_env: needed with l2.kind redis, since gateways find each other's answers "
                "only under one secret; name a variable that holds the same 32 characters everywhere"
            )
    elif l2.url or l2.password_env:
        raise ConfigError(f"l2.url: means nothing for kind {l2.kind}")


def _check_url(url: str, key: str) -> None:
    """Never quotes what may hold a password."""
    expected = f"{key}: expected http(s)://host[:port][/v1]"
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConfigError(f"{expected}, and a port of at most 65535") from None
    if "@" in parts.netloc:
        raise ConfigError(f"{key}: keys don't belong into a url; use api_key_env")
    if not is_fine or not url.isascii() or any(c.isspace() for c in url) or ".." in parts.netloc:
        raise ConfigError(expected)
