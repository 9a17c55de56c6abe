"""The settings: one frozen tree, read from TOML and the environment, checked as a whole.

A setting is written once, here, with its default, its limits and its sentence; `preheat config`,
docs/settings.md and the error messages are made from it. No other module reads the environment.
"""

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from preheat.core.controller import MAX_VARIANTS
from preheat.errors import ConfigError

_PREFIX: Final = "PREHEAT__"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
_MODEL_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
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
    "max_connections",
    "breaker_failures",
    "breaker_open_s",
    "inject_usage",
)
_FOREIGN: Final[Mapping[str, tuple[str, ...]]] = {
    "openai": OF_EMBEDDED,
    "embedded": _OF_OPENAI,
    "fake": OF_EMBEDDED + _OF_OPENAI,
}
"""The settings that mean nothing for a kind of engine."""
_SOCKET_PATH_BYTES: Final = 100
_PORT: Final = re.compile(r"[0-9]{1,5}")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""


class Choice(_Section, frozen=True):
    """A policy by name, with the options of its class's constructor."""

    name: Annotated[str, Meta(description="The policy's name.")]
    options: Annotated[dict[str, Any], Meta(description="Its options.")] = {}


class Listen(_Section, frozen=True):
    """Where the gateway listens, and what one client may take."""

    address: Annotated[str, Meta(description="Host and port; port 0 takes a free one.")] = (
        "127.0.0.1:8000"
    )
    tls_cert: Annotated[
        str, Meta(description="PEM file with the certificate chain; empty: plain HTTP.")
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file with its private key.")] = ""
    body_bytes: Annotated[int, Meta(gt=0, description="Largest request body.")] = 33_554_432
    bodies_bytes: Annotated[
        int, Meta(gt=0, description="Most bytes of large bodies held at once, over all clients.")
    ] = 1_073_741_824
    head_bytes: Annotated[int, Meta(gt=0, description="Largest request head.")] = 65_536
    head_lines: Annotated[int, Meta(gt=0, description="Most header lines in a request.")] = 100
    connections: Annotated[
        int, Meta(gt=0, description="Most client connections at once, each worker's.")
    ] = 4_096
    idle_s: Annotated[
        float, Meta(gt=0, description="An idle connection is closed after this long.")
    ] = 75.0
    head_s: Annotated[
        float, Meta(gt=0, description="A request's head must be complete within this.")
    ] = 10.0
    body_s: Annotated[
        float, Meta(gt=0, description="A request's body must be complete within this.")
    ] = 120.0
    write_s: Annotated[
        float, Meta(gt=0, description="A client that takes nothing for this long is dropped.")
    ] = 60.0
    drain_s: Annotated[
        float, Meta(ge=0, description="On SIGTERM, requests under way get this long to end.")
    ] = 30.0
    workers: Annotated[
        int,
        Meta(ge=1, le=256, description="Processes that answer; each has an L1, all share L2."),
    ] = 1


class Exact(_Section, frozen=True):
    """The exact cache: equal requests get the stored answer."""

    ttl_s: Annotated[float, Meta(gt=0, description="How long an answer is served.")] = 3600.0
    max_ttl_s: Annotated[
        float, Meta(gt=0, description="The longest life that X-Preheat-Ttl can ask for.")
    ] = 86_400.0
    stale_s: Annotated[
        float,
        Meta(ge=0, description="Expired answers are kept this long for requests with max-stale."),
    ] = 0.0
    stale_while_revalidate_s: Annotated[
        float,
        Meta(
            ge=0,
            description="An answer expired for less than this is still served, while a new one is asked for.",
        ),
    ] = 0.0
    stale_if_error_s: Annotated[
        float,
        Meta(
            ge=0,
            description="An answer expired for less than this is served where the engine gives none.",
        ),
    ] = 0.0
    early_refresh: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="XFetch's beta: a popular answer is asked for anew shortly before it expires, the sooner the longer it takes; 1 is the usual value, 0 turns it off.",
        ),
    ] = 0.0
    negative_ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            description="How long an engine's 400, 404 or 422 is served to equal requests; 0: never.",
        ),
    ] = 0.0
    sampled: Annotated[
        str,
        Meta(
            description='Requests whose temperature isn\'t 0: "bypass" the cache, "reuse" one answer, or draw from "variants(k)".'
        ),
    ] = "bypass"
    secret_env: Annotated[
        str,
        Meta(
            description="Environment variable with the secret (32 characters or more) from which tenants' salts are derived; empty: one made at the first start and kept beside L2, readable by its owner only."
        ),
    ] = ""


class L1(_Section, frozen=True):
    """The part of the cache in each worker's memory."""

    bytes: Annotated[int, Meta(ge=0, description="Its budget, overheads included.")] = 268_435_456
    entries: Annotated[int, Meta(ge=0, description="Most answers in it.")] = 100_000
    entry_bytes: Annotated[int, Meta(gt=0, description="Largest answer kept.")] = 1_048_576
    eviction: Annotated[Choice, Meta(description="Who leaves when it is full.")] = Choice(
        name="sieve"
    )
    admission: Annotated[Choice, Meta(description="Who may come in when it is full.")] = Choice(
        name="always"
    )


class L2(_Section, frozen=True):
    """The part of the cache that workers share and that outlives them."""

    kind: Annotated[
        Literal["lmdb", "redis", "off"],
        Meta(
            description='"lmdb": files on a local disk; "redis": a Redis or Valkey server, which several gateways can share; "off": none.'
        ),
    ] = "lmdb"
    bytes: Annotated[
        int,
        Meta(ge=1_048_576, description="Budget of the files; a Redis has its own (maxmemory)."),
    ] = 1_073_741_824
    path: Annotated[
        str,
        Meta(description="Folder of the files, on a local disk; empty: $XDG_CACHE_HOME/preheat."),
    ] = ""
    url: Annotated[
        str, Meta(description="Address of the Redis, e.g. redis://cache-1:6379/0; no password.")
    ] = ""
    password_env: Annotated[
        str, Meta(description="Environment variable with its password; empty: none.")
    ] = ""
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest wait for one call of it, after which a request goes on without it; one may make two or three (look up, lease, look again).",
        ),
    ] = 0.005
    breaker_failures: Annotated[
        int, Meta(gt=0, description="After this many failures in a row it isn't asked for a while.")
    ] = 5
    breaker_open_s: Annotated[float, Meta(gt=0, description="That while.")] = 5.0
    queue_bytes: Annotated[
        int,
        Meta(
            gt=0,
            description="Most bytes waiting to be written, each worker's; past that nothing is kept.",
        ),
    ] = 67_108_864


class RequestLog(_Section, frozen=True):
    """The log that the laboratory reads: one row a request, never its text."""

    enabled: Annotated[
        bool, Meta(description="Write it; needs the extra: pip install 'preheat[log]'.")
    ] = False
    path: Annotated[str, Meta(description="Its folder; empty: $XDG_STATE_HOME/preheat/log.")] = ""
    bytes: Annotated[
        int, Meta(ge=1_048_576, description="The oldest files go when it is larger than this.")
    ] = 10_737_418_240
    days: Annotated[float, Meta(gt=0, description="Files older than this go.")] = 30.0
    roll_s: Annotated[
        float, Meta(gt=0, description="A Parquet file is made of what came in so many seconds.")
    ] = 3600.0


class EngineSettings(_Section, frozen=True):
    """One group of equal upstreams, mostly of one. Times in seconds."""

    kind: Annotated[
        Literal["openai", "embedded", "fake"],
        Meta(
            description='"openai": a compatible server at `url`; "embedded": llama.cpp in a child process; "fake": a deterministic one without a model, for tries and tests.'
        ),
    ] = "openai"
    url: Annotated[
        str, Meta(description="Address of an openai engine; without a path, /v1 is meant.")
    ] = ""
    urls: Annotated[
        tuple[str, ...],
        Meta(
            description="Addresses of several equal servers, instead of `url`: requests are spread over those that are well."
        ),
    ] = ()
    identity: Annotated[
        str,
        Meta(
            description="What names this group in the key of answers; empty: its name and first address, or with l2.kind redis its name alone. Set it to go on with stored answers behind another address."
        ),
    ] = ""
    http2: Annotated[
        bool, Meta(description="Speak HTTP/2 to https urls; needs pip install 'preheat[http2]'.")
    ] = False
    retries: Annotated[
        int,
        Meta(
            ge=0,
            le=16,
            description="How many others of `urls` are tried before the first byte, on connect errors and 429, and for inference on 502 to 504.",
        ),
    ] = 2
    retry_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="How many of the refused requests (429, 502 to 504) are asked elsewhere, as a share of the requests of late, plus five a second and a reserve of 100, in each worker process; connect errors aren't counted. 0: none is.",
        ),
    ] = 0.2
    health_path: Annotated[
        str,
        Meta(
            description="Where one of several `urls` that failed is asked whether it is well again; empty: the next request finds out."
        ),
    ] = "/health"
    health_s: Annotated[float, Meta(gt=0, description="How often it is asked that.")] = 2.0
    api_key_env: Annotated[
        str, Meta(description="Environment variable with the key sent to it.")
    ] = ""
    connect_s: Annotated[float, Meta(gt=0, description="Time to connect.")] = 5.0
    first_byte_s: Annotated[
        float, Meta(gt=0, description="Time to the first byte of the answer.")
    ] = 300.0
    idle_s: Annotated[float, Meta(gt=0, description="Longest silence within an answer.")] = 60.0
    queue_s: Annotated[float, Meta(gt=0, description="Longest wait for a free connection.")] = 30.0
    max_connections: Annotated[
        int,
        Meta(
            gt=0,
            description="Most connections to each url, each worker's; with http2, requests at once.",
        ),
    ] = 256
    breaker_failures: Annotated[
        int, Meta(gt=0, description="After this many failures in a row it isn't asked for a while.")
    ] = 5
    breaker_open_s: Annotated[float, Meta(gt=0, description="That while.")] = 10.0
    inject_usage: Annotated[
        bool,
        Meta(
            description="Ask streams for their usage where the client doesn't; off for servers that refuse stream_options."
        ),
    ] = True
    forward_headers: Annotated[
        tuple[str, ...],
        Meta(description="More request headers to send it; they become part of the key."),
    ] = ()
    model: Annotated[
        str, Meta(description="GGUF file of an embedded engine; empty: the installed weights.")
    ] = ""
    threads: Annotated[
        int,
        Meta(
            ge=1,
            description="Threads of an embedded engine; more than 1 only where cores aren't shared.",
        ),
    ] = 1
    ctx_tokens: Annotated[int, Meta(ge=256, description="Its context, over all slots.")] = 8_192
    slots: Annotated[int, Meta(ge=1, description="Requests it computes at once.")] = 2
    batch_tokens: Annotated[
        int,
        Meta(
            ge=1, description="Its batch; small ones keep one long prompt from blocking everybody."
        ),
    ] = 128
    cache_ram_mib: Annotated[int, Meta(ge=0, description="Its prompt cache in host memory.")] = 256


class ModelSettings(_Section, frozen=True):
    """A model by the name that clients use. Prices per million tokens, in any one currency."""

    engine: Annotated[str, Meta(description="The engine that serves it; empty: the first.")] = ""
    alias: Annotated[str, Meta(description="Its name at the engine; empty: the same.")] = ""
    version: Annotated[
        str,
        Meta(
            description="Anything that changes when weights, template or adapter do; part of the key."
        ),
    ] = ""
    input: Annotated[float, Meta(ge=0, le=1e9, description="Price of input tokens.")] = 0.0
    cached_input: Annotated[
        float | None,
        Meta(
            description="Price of input tokens that the provider's own cache had; absent: as input."
        ),
    ] = None
    output: Annotated[float, Meta(ge=0, le=1e9, description="Price of output tokens.")] = 0.0


class TenantSettings(_Section, frozen=True):
    """A tenant: whose answers are separate from everybody else's."""

    api_key_env: Annotated[str, Meta(description="Environment variable with its key.")] = ""
    api_key_file: Annotated[str, Meta(description="File with its keys, one a line.")] = ""


class NamespaceSettings(_Section, frozen=True):
    """What is different in one namespace (the X-Preheat-Namespace header)."""

    ttl_s: Annotated[float | None, Meta(description="As exact.ttl_s.")] = None
    stale_while_revalidate_s: Annotated[
        float | None, Meta(description="As exact.stale_while_revalidate_s.")
    ] = None
    stale_if_error_s: Annotated[float | None, Meta(description="As exact.stale_if_error_s.")] = None
    negative_ttl_s: Annotated[float | None, Meta(description="As exact.negative_ttl_s.")] = None
    sampled: Annotated[str | None, Meta(description="As exact.sampled.")] = None


class Admin(_Section, frozen=True):
    """The admin routes."""

    api_key_env: Annotated[
        str,
        Meta(description="Environment variable with their key; empty: they answer loopback only."),
    ] = ""
    listen: Annotated[
        str, Meta(description="Host and port of their own; empty: the gateway's.")
    ] = ""


class Telemetry(_Section, frozen=True):
    """What is told about requests."""

    open_metrics: Annotated[
        bool,
        Meta(description="Let anybody read /metrics; else it is guarded like the admin routes."),
    ] = False
    log_requests: Annotated[
        Literal["none", "misses", "all"],
        Meta(
            description='Which requests get a log line: "none"; "misses", those that got no stored answer; "all". Never their text.'
        ),
    ] = "misses"


class Settings(_Section, frozen=True):
    """The whole tree."""

    listen: Listen = Listen()
    exact: Exact = Exact()
    l1: L1 = L1()
    l2: L2 = L2()
    fallback_message: Annotated[
        str,
        Meta(
            description="Written `engines.fallback_message`: what to answer, with status 200, when an engine gives no answer; empty: an error."
        ),
    ] = ""
    engines: dict[str, EngineSettings] = {}
    models: dict[str, ModelSettings] = {}
    tenants: dict[str, TenantSettings] = {}
    namespaces: dict[str, NamespaceSettings] = {}
    admin: Admin = Admin()
    log: RequestLog = RequestLog()
    telemetry: Telemetry = Telemetry()


NAMED: Final[Mapping[str, type[_Section]]] = {
    "engines": EngineSettings,
    "models": ModelSettings,
    "tenants": TenantSettings,
    "namespaces": NamespaceSettings,
}
"""Sections with one table for each name."""


def load(
    path: Path | None, environment: Mapping[str, str], overrides: Mapping[str, Any]
) -> Settings:
    """Defaults, then the file, then PREHEAT__SECTION__KEY, then the command line's options."""
    tree = _read(path) if path is not None else {}
    for words, value in _from_environment(environment):
        _put(tree, words, value)
    for dotted, value in overrides.items():
        words = dotted.split(".")
        _put(tree, words, value)
        if words[0] == "engines" and isinstance(tree["engines"], dict):
            # What the command line names comes first: it answers for every model not configured.
            name = _same_key(tree["engines"], words[1])
            tree["engines"] = {name: tree["engines"][name], **tree["engines"]}
    return check(tree)


def check(tree: dict[str, Any]) -> Settings:
    """The tree as settings. Raises ConfigError naming the key and what was expected."""
    tree = dict(tree)
    engines = tree.get("engines")
    if isinstance(engines, dict) and isinstance(engines.get("fallback_message"), str):
        tree["fallback_message"] = engines["fallback_message"]
        tree["engines"] = {k: v for k, v in engines.items() if k != "fallback_message"}
    elif "fallback_message" in tree:
        raise ConfigError("fallback_message: unknown key; it is engines.fallback_message")
    _check_finite(tree, "")
    try:
        settings = msgspec.convert(tree, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(_explained(str(error), tree)) from None
    _check_together(settings)
    return settings


def address_of(text: str, key: str) -> tuple[str, int]:
    """Host and port. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not _PORT.fullmatch(port) or int(port) > 65_535:
        alone = text.removeprefix(":")
        hint = (
            f"; port {alone} of this machine is 127.0.0.1:{alone}" if _PORT.fullmatch(alone) else ""
        )
        raise ConfigError(f"{key}: expected host:port, got {text!r}{hint}")
    return host, int(port)


def upstreams_of(engine: EngineSettings) -> tuple[str, ...]:
    """The addresses of a group."""
    return engine.urls or ((engine.url,) if engine.url else ())


def variants_of(text: str, key: str) -> int:
    """How many answers are kept for a sampled request. Raises ConfigError."""
    if text in {"bypass", "reuse"}:
        return int(text == "reuse")
    match = re.fullmatch(r"variants\((\d{1,4})\)", text)
    if match is None or not 1 <= int(match[1]) <= MAX_VARIANTS:
        raise ConfigError(
            f'{key}: expected "bypass", "reuse" or "variants(k)" with k from 1 to {MAX_VARIANTS}, '
            f"got {text!r}"
        )
    return int(match[1])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def secret_from(variable: str, key: str, environment: Mapping[str, str]) -> str:
    """A secret that the settings name. Raises ConfigError where it isn't there."""
    value = environment.get(variable, "").strip()
    if not value:
        raise ConfigError(f"{key}: the environment variable {variable} is empty or not set")
    return value


def fields_of(section: type[_Section]) -> Iterator[tuple[str, str, Any]]:
    """(name, sentence, default) of each setting of a section."""
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        hint = hints[field.name]
        described = [arg for arg in get_args(hint)[1:] if isinstance(arg, Meta)]
        sentence = described[0].description if get_origin(hint) is Annotated and described else None
        yield field.name, sentence or "", field.default


def to_toml(settings: Settings) -> str:
    """The whole tree as a file, every setting with its sentence. It holds no secret."""
    lines = ["# Preheat's settings. What is commented out is absent by default."]
    for name, _, _ in fields_of(Settings):
        value = getattr(settings, name)
        if name in NAMED:
            for entry, section in value.items():
                lines += ["", f"[{name}.{_toml_key(entry)}]", *_section_lines(section)]
            if not value:
                lines += ["", f"# # {(NAMED[name].__doc__ or '').strip()}", f"# [{name}.NAME]"]
                lines += [f"# {line}" for line in _section_lines(NAMED[name]())]
        elif isinstance(value, _Section):
            lines += [
                "",
                f"# {(type(value).__doc__ or '').strip()}",
                f"[{name}]",
                *_section_lines(value),
            ]
        else:
            lines += ["", "[engines]", *_setting_lines(name, _sentence(Settings, name), value)]
    return "\n".join(lines) + "\n"


def _section_lines(section: _Section) -> list[str]:
    lines: list[str] = []
    for name, sentence, _ in fields_of(type(section)):
        lines += _setting_lines(name, sentence, getattr(section, name))
    return lines


def _setting_lines(name: str, sentence: str, value: Any) -> list[str]:
    shown = f"# {name} =" if value is None else f"{name} = {_toml_value(value)}"
    return [f"# {sentence}", shown]


def _sentence(section: type[_Section], name: str) -> str:
    return next(sentence for field, sentence, _ in fields_of(section) if field == name)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Choice):
        return f"{{ name = {_toml_value(value.name)}, options = {_toml_value(value.options)} }}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    # JSON's strings are TOML's, but for DEL.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} isn't valid TOML: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[list[str], Any]]:
    for name in sorted(environment):
        if name.startswith(_PREFIX):
            yield name.removeprefix(_PREFIX).lower().split("__"), _parsed(environment[name])
        elif name.startswith("PREHEAT_"):
            _check_meant(name)


def _check_meant(name: str) -> None:
    """Raise ConfigError for a variable that would name a setting but for its single underscores."""
    words = name.removeprefix("PREHEAT_").lower()
    for section, _, default in fields_of(Settings):
        if not words.startswith(f"{section}_"):
            continue
        rest = words.removeprefix(f"{section}_")
        kind = NAMED.get(section) or type(default)
        for field, _, _ in fields_of(kind):
            entry = rest.removesuffix(f"_{field}") if section in NAMED else ""
            if rest == (f"{entry}_{field}" if entry else field):
                path = "__".join(filter(None, (section, entry, field))).upper()
                raise ConfigError(
                    f"{name}: no setting is read from this; sections are parted by two underscores: "
                    f"{_PREFIX}{path}"
                )


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(tree: dict[str, Any], words: list[str], value: Any) -> None:
    for word in words[:-1]:
        tree = tree.setdefault(_same_key(tree, word), {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{'.'.join(words)}: {word} isn't a section")
    tree[_same_key(tree, words[-1])] = value


def _same_key(tree: Mapping[str, Any], word: str) -> str:
    """Names in the environment have no case: the file's spelling wins."""
    return next((key for key in tree if key.lower() == word.lower()), word)


def _explained(message: str, tree: Mapping[str, Any]) -> str:
    """The message of msgspec with the key in front, as it stands in the file."""
    what, _, where = message.partition(" - at `$")
    key = where.rstrip("`").lstrip(".")
    table = key.partition("[...]")[0]
    section = NAMED.get(table) if "[...]" in key else None
    if section is not None:
        key = key.replace("[...]", f".{_wrong_entry(tree[table], section)}", 1)
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown is not None:
        names = [name for name, _, _ in fields_of(section or _section_of(key))]
        known = ", ".join(names)
        if not key:
            known = known.replace("fallback_message", "engines.fallback_message")
        prefix = f"{key}." if key else ""
        near = difflib.get_close_matches(unknown[1], names, n=1)
        guess = f"did you mean {near[0]}? Known here: " if near else "known here: "
        return f"{prefix}{unknown[1]}: unknown key; {guess}{known}"
    if what.startswith("Invalid enum value"):
        above, _, field = key.rpartition(".")
        words = get_args(get_type_hints(section or _section_of(above))[field])
        return (
            f"{key}: expected {' or '.join(words)}, got {what.removeprefix('Invalid enum value ')}"
        )
    return f"{key}: {what[:1].lower()}{what[1:]}"


def _wrong_entry(entries: Mapping[str, Any], section: type[_Section]) -> str:
    """The entry of a table that doesn't fit: msgspec doesn't tell which one it means."""
    return next(name for name, entry in entries.items() if not _fits(entry, section))


def _fits(entry: Any, section: type[_Section]) -> bool:
    try:
        msgspec.convert(entry, section)
    except msgspec.ValidationError:
        return False
    return True


def _section_of(key: str) -> type[_Section]:
    section: Any = Settings
    for word in filter(None, key.split(".")):
        section = type(next(default for name, _, default in fields_of(section) if name == word))
    return cast("type[_Section]", section)


def _check_finite(value: Any, key: str) -> None:
    """TOML knows inf and nan; no setting does."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_finite(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, float) and not isfinite(value):
        raise ConfigError(f"{key}: expected a finite number, got {value}")


def _check_together(settings: Settings) -> None:
    """What no single setting can know."""
    _check_listen(settings)
    variants_of(settings.exact.sampled, "exact.sampled")
    for table in NAMED:
        for name in getattr(settings, table):
            if table == "models" and not _MODEL_NAME.fullmatch(name):
                raise ConfigError(f"models.{name!r}: a name has 1 to 256 printable characters")
            if table != "models" and not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{table}.{name}: a name has 1 to 64 letters, digits and . _ : - and begins with "
                    "a letter or digit"
                )
    _check_models(settings)
    _check_l2(settings)
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


def cache_folder(settings: Settings, environment: Mapping[str, str]) -> Path:
    """Where L2's files and the secret are."""
    if settings.l2.path:
        return Path(settings.l2.path)
    home = environment.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else _home("l2.path") / ".cache") / "preheat"


def log_folder(settings: Settings, environment: Mapping[str, str]) -> Path:
    """Where the request log is."""
    if settings.log.path:
        return Path(settings.log.path)
    home = environment.get("XDG_STATE_HOME", "")
    return (Path(home) if home else _home("log.path") / ".local" / "state") / "preheat" / "log"


def _home(key: str) -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError(f"{key}: this user has no home folder; name a folder here") from None


def log_socket(settings: Settings, environment: Mapping[str, str]) -> Path:
    """Where the log process listens. Raises ConfigError for a path that no socket can have."""
    path = log_folder(settings, environment) / "log.sock"
    if len(str(path).encode()) > _SOCKET_PATH_BYTES:
        raise ConfigError(
            f"log.path: {path} is longer than the {_SOCKET_PATH_BYTES} bytes that a socket's path may "
            "have; choose a shorter folder"
        )
    return path


def environment() -> Mapping[str, str]:
    """The process's environment: the one place where it is read."""
    return os.environ
