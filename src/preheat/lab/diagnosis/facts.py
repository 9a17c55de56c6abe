"""What a server says of its own settings: nothing is computed for it."""

from typing import Any, Final

import msgspec

from preheat.engines.dialects.calls import Call, get
from preheat.engines.dialects.readings import Capacity, Load, count, objects, parsed, part
from preheat.engines.dialects.samples import Page
from preheat.lab.diagnosis.server import Server

_CONFIG: Final = "vllm:cache_config_info"
_METRICS: Final = get("/metrics")
_STARTED: Final = "process_start_time_seconds"
_PROMPTS: Final = (
    "vllm:prompt_tokens",
    "sglang:prompt_tokens",
    "llamacpp:prompt_tokens",
    "tgi_request_input_length_sum",
)
_SIGHTS: Final = 4
"""So often a page is read to see whether one server gives it: up to that many are told apart."""


class Facts(msgspec.Struct, kw_only=True):
    """None where a server doesn't say. `caches`: prefixes are kept; `tells`: cached tokens stand in
    the usage; `limit_tokens`: the longest prompt; `template`: the chat template's source;
    `has_host_cache`: what leaves a slot comes back."""

    has_metrics: bool | None = None
    caches: bool | None = None
    tells: bool | None = None
    algorithm: str = ""
    block_tokens: int | None = None
    capacity: Capacity = Capacity()
    load: Load = Load()
    limit_tokens: int | None = None
    takes_priority: bool | None = None
    loads_adapters: bool | None = None
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    template: str = ""
    sights: tuple["Sight", ...] = ()
    least_tokens: int = 0
    has_host_cache: bool | None = None


class Sight(msgspec.Struct, frozen=True):
    """Who gave a page: when that process began, and how many tokens it had been asked by then."""

    started_at: float | None
    prompt_tokens: int | None


async def facts_of(server: Server) -> Facts:
    """All of them. Raises EngineError."""
    facts = Facts(
        least_tokens=server.dialect.least_tokens, block_tokens=server.dialect.block_tokens
    )
    _of_models(server, facts)
    for _ in range(_SIGHTS):
        page = await server.ask(_METRICS)
        if page.status == 200 and page.body:
            facts.sights += (sight_in(page.body),)
    facts.has_metrics = page.status == 200
    if facts.has_metrics:
        _of_page(page.body, facts)
    await _of_capacity(server, facts)
    await _of_flags(server, facts)
    await _of_adapters(server, facts)
    return facts


async def sights_now(server: Server) -> tuple[Sight, ...]:
    """Who answers at this address now. Raises EngineError."""
    pages = [await server.told(_METRICS) for _ in range(_SIGHTS)]
    return tuple(sight_in(page) for page in pages if page is not None)


def sight_in(body: bytes) -> Sight:
    """What a page of metrics says of who gave it."""
    page = Page(body, (_STARTED, *_PROMPTS))
    return Sight(page.mean(_STARTED), page.sum(*_PROMPTS))


def _of_models(server: Server, facts: Facts) -> None:
    models = list(objects(part(parsed(server.pages.get(b"/v1/models", b"")), "data")))
    names = [name for one in models if isinstance(name := one.get("id"), str)]
    facts.models = tuple(names)
    server.model = server.target.model or (names[0] if names else "")
    asked = next((one for one in models if one.get("id") == server.model), {})
    facts.limit_tokens = count(asked.get("max_model_len"))
    props = parsed(server.pages.get(b"/props", b""))
    template = part(props, "chat_template")
    facts.template = template if isinstance(template, str) else ""


def _of_page(body: bytes, facts: Facts) -> None:
    """As labels of a sample vLLM has its settings; they are Python's words."""
    config = Page(body, (_CONFIG,)).of(_CONFIG)
    if config:
        labels = config[0].labels
        facts.caches = _boolean(labels.get("enable_prefix_caching"))
        facts.algorithm = labels.get("prefix_caching_hash_algo", "")


async def _of_capacity(server: Server, facts: Facts) -> None:
    dialect = server.dialect
    body = await server.told(dialect.capacity())
    capacity = dialect.read_capacity(body) if body is not None else None
    if capacity is not None:
        facts.capacity = capacity
        facts.block_tokens = capacity.block_tokens or facts.block_tokens
        facts.limit_tokens = facts.limit_tokens or capacity.slot_tokens
    body = await server.told(dialect.load())
    load = dialect.read_load(body) if body is not None else None
    if load is not None:
        facts.load = load
        if facts.capacity.tokens is None and load.capacity_tokens:
            facts.capacity = msgspec.structs.replace(facts.capacity, tokens=load.capacity_tokens)


async def _of_flags(server: Server, facts: Facts) -> None:
    """SGLang tells its arguments; llama.cpp a few of its."""
    if server.dialect.name == "sglang":
        flags = parsed(await server.told(get("/server_info")) or b"")
        facts.caches = _opposite(part(flags, "disable_radix_cache"))
        facts.tells = _flag(part(flags, "enable_cache_report"))
        facts.takes_priority = _flag(part(flags, "enable_priority_scheduling"))
        facts.loads_adapters = _flag(part(flags, "enable_lora"))
        facts.limit_tokens = facts.limit_tokens or count(part(flags, "max_req_input_len"))
    if server.dialect.name == "tgi":
        info = parsed(server.pages.get(b"/info", b""))
        facts.limit_tokens = facts.limit_tokens or count(part(info, "max_input_tokens"))


async def _of_adapters(server: Server, facts: Facts) -> None:
    """A route that only takes POST says 405 to GET where it is there: nothing is changed by it."""
    dialect = server.dialect
    body = await server.told(dialect.adapters())
    listed = dialect.read_adapters(body) if body is not None else None
    facts.adapters = tuple(one.name for one in listed or ())
    load = dialect.load_adapter("none", "none")
    if load is None:
        facts.loads_adapters = False if dialect.name in {"llamacpp", "tgi"} else None
    elif facts.loads_adapters is None:
        reply = await server.ask(Call(b"GET", load.path))
        facts.loads_adapters = {405: True, 404: False}.get(reply.status)


def _boolean(word: str | None) -> bool | None:
    return {"true": True, "false": False}.get(word.lower()) if word else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _opposite(value: Any) -> bool | None:
    return None if (flag := _flag(value)) is None else not flag
