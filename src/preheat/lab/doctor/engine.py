"""An engine: can it be reached, is it one, does it know the models, does it answer?"""

import difflib
from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import urlsplit

import msgspec

from preheat.errors import EngineError
from preheat.lab.doctor.finding import Finding
from preheat.lab.doctor.peer import Peer, Reply, shown
from preheat.lab.doctor.probes import Probes

_NAMED: Final = 8
_COMPARED: Final = 1_000
_NAME_CHARACTERS: Final = 256
_OWNERS: Final = ("vllm", "sglang", "llamacpp")
_NAMES: Final = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "tgi": "TGI"}
# Servers that answer with the one model they have, whatever name is asked for.
_OBLIGING: Final = frozenset({"llamacpp", "tgi"})


class EngineCase(msgspec.Struct, frozen=True, kw_only=True):
    """An engine to examine. `models` are the names that it is asked for, by what names them."""

    about: str
    url: str
    api_key: str = ""
    models: dict[str, str] = {}
    injects_usage: bool = True
    asks: bool = True
    timeout_s: float = 60.0


async def examine_engine(case: EngineCase) -> AsyncIterator[Finding]:
    """All findings about it, as they come."""
    peer = Peer(case.about, case.url, case.api_key, case.timeout_s)
    try:
        async for finding in _examine(case, peer):
            yield finding
    except EngineError as error:
        yield peer.unreachable(error)
    finally:
        await peer.aclose()


async def _examine(case: EngineCase, peer: Peer) -> AsyncIterator[Finding]:
    listed = await peer.get(f"{peer.base}/models")
    known = names_of(listed)
    if known is None:
        yield await _no_list(peer, listed)
        return
    kind = await _kind_of(peer, listed)
    shown = _NAMES.get(kind, "an OpenAI-compatible server")
    yield Finding("reachable", case.about, "ok", f"{shown} at {peer.url}{peer.base}")
    if not known:
        yield Finding(
            "no-model",
            case.about,
            "problem",
            "it lists no model",
            "every request needs one",
            "see its log for why none is loaded",
        )
        return
    for name, model in case.models.items():
        yield _model(case.about, name, model, known, kind)
    if "preheat" in listed.cache_status:
        yield Finding(
            "engine-is-gateway",
            case.about,
            "warning",
            "what answers there is a Preheat gateway, not an engine",
            "answers would be cached twice and epochs differ; its own engines aren't examined",
            "give the engine's own address, or examine that gateway with --gateway",
        )
        return
    if case.asks:
        model = next((one for one in case.models.values() if one in known), known[0])
        async for finding in Probes(peer, model, kind, injects_usage=case.injects_usage).run():
            yield finding


def names_of(reply: Reply) -> list[str] | None:
    """The models of a list in OpenAI's form; None where it isn't one."""
    data = reply.json.get("data")
    if reply.status != 200 or not isinstance(data, list):
        return None
    names = [one.get("id") for one in data if isinstance(one, dict)]
    return [name for name in names if isinstance(name, str)]


async def _no_list(peer: Peer, reply: Reply) -> Finding:
    """Why there is no list of models."""
    about, path = peer.about, f"{peer.base}/models"
    said = f": {reply.said}" if reply.said else ""
    if reply.status in {401, 403}:
        return Finding(
            "key",
            about,
            "problem",
            f"status {reply.status} for GET {path}",
            "it refuses requests " + ("with this key" if peer.has_key else "without a key"),
            "put the right key into the variable that api_key_env (--api-key-env) names"
            if peer.has_key
            else "set api_key_env (--api-key-env) to the environment variable that holds its key",
        )
    if 300 <= reply.status < 400:
        to = _address(reply.headers.get("location", ""))
        return Finding(
            "redirect",
            about,
            "problem",
            f"status {reply.status} for GET {path}: it sends elsewhere",
            "redirects aren't followed",
            f"give the address it names as url: {to}"
            if to
            else "give the address that answers itself",
        )
    if reply.status >= 500:
        return Finding(
            "failing",
            about,
            "problem",
            f"status {reply.status} for GET {path}{said}",
            "it doesn't answer requests now",
            "wait until it has loaded its model; else see its log",
        )
    elsewhere = await _api_elsewhere(peer)
    if elsewhere:
        return Finding(
            "wrong-path",
            about,
            "problem",
            f"status {reply.status} for GET {path}, but the API is at {elsewhere}",
            "every request goes to a path that isn't there",
            f'set url = "{peer.url}{elsewhere}"',
        )
    return Finding(
        "not-openai",
        about,
        "problem",
        f"an HTTP server, but GET {path} (status {reply.status}) is no list of models",
        "this isn't the OpenAI-compatible API of an engine",
        "give the port of its API; another one may be its metrics or its page",
    )


def _address(location: str) -> str:
    """Scheme and host; the rest may hold a secret."""
    try:
        to = urlsplit(location)
    except ValueError:
        return ""
    host = to.netloc.rpartition("@")[2]
    return shown(f"{to.scheme}://{host}") if host else ""


async def _api_elsewhere(peer: Peer) -> str:
    """Another usual path at which the server lists models, or nothing."""
    for base in ("/v1", f"{peer.base}/v1", "/openai/v1", "/api/v1"):
        if base != peer.base and names_of(await peer.get(f"{base}/models")) is not None:
            return base
    return ""


async def _kind_of(peer: Peer, listed: Reply) -> str:
    """Which software it is, from what it tells of itself; empty where it doesn't."""
    data = listed.json["data"]
    owner = data[0].get("owned_by") if data and isinstance(data[0], dict) else ""
    if owner in _OWNERS:
        return str(owner)
    if listed.headers.get("server", "").startswith("llama.cpp"):
        return "llamacpp"
    router = (await peer.get(f"{peer.root}/info")).json.get("router")
    return "tgi" if isinstance(router, str) and "text-generation" in router else ""


def _model(about: str, name: str, model: str, known: list[str], kind: str) -> Finding:
    """Whether it has a model that it will be asked for."""
    if model in known:
        return Finding("model", about, "ok", f"{name}: it has {model}")
    comparable = [name for name in known[:_COMPARED] if len(name) <= _NAME_CHARACTERS]
    near = difflib.get_close_matches(model, comparable, 1)
    listed = ", ".join(map(shown, known[:_NAMED])) + (", …" if len(known) > _NAMED else "")
    obliging = kind in _OBLIGING
    return Finding(
        "model-unknown",
        about,
        "warning" if obliging else "problem",
        f"{name}: it has no {model}; it has {listed}",
        "it answers any name with the one model it has, so a wrong name goes unseen"
        if obliging
        else "it refuses every request for this name",
        f"set models.NAME.alias to its name there{f', e.g. {shown(near[0])}' if near else ''}",
    )
