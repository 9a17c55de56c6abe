"""Which dialect a server speaks, from what it says of itself."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from preheat.engines.dialects.calls import Call, get
from preheat.engines.dialects.readings import objects, parsed, part

PROBES: Final[tuple[Call, ...]] = tuple(
    get(path) for path in ("/v1/models", "/props", "/info", "/get_model_info", "/version")
)
"""In this order; the first settles it for all servers that name themselves. Only answers with a
status of 200 are evidence."""

_Said = Mapping[str, Any]


def _owner(said: _Said) -> set[str]:
    models = objects(part(said.get("/v1/models"), "data"))
    return {one["owned_by"] for one in models if isinstance(one.get("owned_by"), str)}


def _is_anthropic(said: _Said) -> bool:
    models = list(objects(part(said.get("/v1/models"), "data")))
    return bool(models) and all(
        one.get("type") == "model" and "display_name" in one and "owned_by" not in one
        for one in models
    )


def _has(path: str, *fields: str) -> Callable[[_Said], bool]:
    return lambda said: all(part(said.get(path), field) is not None for field in fields)


def _is_vllm(said: _Said) -> bool:
    """Its list under other owners' names, and a version alone. Each by itself others have too."""
    models = list(objects(part(said.get("/v1/models"), "data")))
    version = said.get("/version")
    return (
        any("max_model_len" in one and "parent" in one for one in models)
        and isinstance(version, dict)
        and set(version) == {"version"}
    )


SIGNS: Final[tuple[tuple[str, Callable[[_Said], bool]], ...]] = (
    ("vllm", lambda said: "vllm" in _owner(said)),
    ("sglang", lambda said: "sglang" in _owner(said)),
    ("llamacpp", lambda said: "llamacpp" in _owner(said)),
    ("anthropic", _is_anthropic),
    ("llamacpp", _has("/props", "default_generation_settings", "total_slots")),
    ("tgi", _has("/info", "model_id", "max_concurrent_requests", "router")),
    ("sglang", _has("/get_model_info", "model_path", "is_generation")),
    ("vllm", _is_vllm),
)
"""The first that holds decides. A wrong guess would put fields into requests that their server
refuses, so a sign is something that no other server says."""


def detect(bodies: Mapping[bytes, bytes]) -> str:
    """The dialect's name, from the bodies of `PROBES` by path; "openai" where nothing tells.

    >>> detect({b"/v1/models": b'{"data": [{"id": "m", "owned_by": "vllm"}]}'})
    'vllm'
    """
    said = {path.decode("latin-1"): parsed(body) for path, body in bodies.items()}
    return next((name for name, holds in SIGNS if holds(said)), "openai")
