"""Which model a server serves, and by which software: what tells that something else answers at its address."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from preheat.engines.dialects.calls import Call, get
from preheat.engines.dialects.llamacpp import model_identity
from preheat.engines.dialects.readings import objects, parsed, part

_MOST: Final = 200
_MODELS: Final = b"/v1/models"

Bodies = Mapping[bytes, bytes]


class Served(msgspec.Struct, frozen=True):
    """What a server says of itself, each empty where it doesn't: its model, which weights these are, and the
    version of the server."""

    model: str = ""
    weights: str = ""
    version: str = ""

    def differs(self, now: "Served") -> bool:
        """Whether anything that both say isn't the same. What one leaves out is no sign: an answer may fail."""
        both = zip(_told(self), _told(now), strict=True)
        return any(before and after and before != after for before, after in both)

    def updated(self, now: "Served") -> "Served":
        """What is known after that answer."""
        both = zip(_told(self), _told(now), strict=True)
        return Served(*(after or before for before, after in both))

    def __str__(self) -> str:
        return " ".join(one for one in _told(self) if one)


def questions(dialect: str) -> tuple[Call, ...]:
    """What a server of this kind is asked; nothing where it has no such word. Cheap for all: they are asked as
    often as how busy it is."""
    return _ASKED[dialect][0] if dialect in _ASKED else ()


def served(dialect: str, bodies: Bodies) -> Served:
    """What it says, from the bodies of its `questions` by path.

    >>> served("vllm", {b"/v1/models": b'{"data": [{"id": "m", "root": "org/m"}]}'})
    Served(model='m=org/m', weights='', version='')
    """
    if dialect not in _ASKED:
        return Served()
    return _ASKED[dialect][1](bodies)


def _vllm(bodies: Bodies) -> Served:
    """Its models without adapters, which come and go. Not `created`: that is the time of the answer."""
    bases = [
        f"{one.get('id')}={root}"
        for one in objects(part(parsed(bodies.get(_MODELS, b"")), "data"))
        if isinstance(root := one.get("root"), str) and not one.get("parent")
    ]
    version = part(parsed(bodies.get(b"/version", b"")), "version")
    return Served(_word(",".join(sorted(bases))), "", _word(version))


def _sglang(bodies: Bodies) -> Served:
    """Its weights change in a running process, too, and then get another version."""
    info = parsed(bodies.get(b"/get_model_info", b""))
    version = part(parsed(bodies.get(b"/v1/loads?include=core", b"")), "version")
    return Served(
        _word(part(info, "model_path")), _word(part(info, "weight_version")), _word(version)
    )


def _tgi(bodies: Bodies) -> Served:
    info = parsed(bodies.get(b"/info", b""))
    told = (part(info, name) for name in ("model_id", "model_sha", "version"))
    return Served(*(_word(one) for one in told))


def _llamacpp(bodies: Bodies) -> Served:
    """Another file under the same path has other sizes, mostly: what slot files are bound to, but for adapters."""
    body = bodies.get(b"/props", b"")
    props = parsed(body)
    weights = model_identity(bodies.get(_MODELS, b""), body)
    return Served(_word(part(props, "model_path")), weights or "", _word(part(props, "build_info")))


_ASKED: Final[Mapping[str, tuple[tuple[Call, ...], Callable[[Bodies], Served]]]] = {
    "vllm": ((get("/v1/models"), get("/version")), _vllm),
    "sglang": ((get("/get_model_info"), get("/v1/loads?include=core")), _sglang),
    "tgi": ((get("/info"),), _tgi),
    "llamacpp": ((get("/props"), get("/v1/models")), _llamacpp),
}


def _told(served: Served) -> tuple[str, str, str]:
    return served.model, served.weights, served.version


def _word(value: Any) -> str:
    """A short line of it, for the log; nothing where it is no text."""
    if not isinstance(value, str):
        return ""
    return "".join(one if one.isprintable() else " " for one in value).strip()[:_MOST]
