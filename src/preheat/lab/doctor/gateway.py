"""A running gateway: is it one, is it ready, does a repeated request hit?"""

import re
from collections.abc import AsyncIterator
from typing import Any, Final

from preheat.errors import EngineError
from preheat.lab.doctor.engine import names_of
from preheat.lab.doctor.finding import Finding
from preheat.lab.doctor.peer import Peer, Reply, shown
from preheat.lab.doctor.probes import text_of

_WORDS: Final = 8
_TOKENS: Final = 256
_DETAIL: Final = re.compile(r"detail=([a-z0-9_-]+)")
_WHY: Final = {
    "finish-length": "the model didn't come to an end within the doctor's few tokens",
    "bypass-path": "this path is passed through",
    "no-done": "the engine's streams end without data: [DONE]",
    "larger-than-cache": "l1.bytes is too small for any answer",
    "larger-than-entry": "l1.entry_bytes is too small for any answer",
    "ttl-zero": "answers are kept for no time",
}


async def examine_gateway(
    url: str, api_key: str, *, model: str, asks: bool, timeout_s: float
) -> AsyncIterator[Finding]:
    """All findings about it, as they come."""
    peer = Peer("gateway", url, api_key, timeout_s)
    try:
        async for finding in _examine(peer, model, asks=asks):
            yield finding
    except EngineError as error:
        yield peer.unreachable(error)
    finally:
        await peer.aclose()


async def _examine(peer: Peer, model: str, *, asks: bool) -> AsyncIterator[Finding]:
    health = await peer.get(f"{peer.root}/healthz")
    listed = await peer.get(f"{peer.base}/models")
    if health.status != 200 or "preheat" not in listed.cache_status:
        yield Finding(
            "not-a-gateway",
            peer.about,
            "problem",
            f"an HTTP server at {peer.url}, but no Preheat: GET /healthz has status "
            f"{health.status}, and GET {peer.base}/models no Cache-Status of ours",
            "what stands there answers without a cache",
            "give the gateway's address; see whether a proxy on the way takes headers out",
        )
        return
    yield Finding("reachable", peer.about, "ok", f"a Preheat gateway at {peer.url}")
    ready = await peer.get(f"{peer.root}/readyz")
    if ready.status != 200:
        yield Finding(
            "not-ready",
            peer.about,
            "problem",
            f"GET /readyz has status {ready.status}",
            "none of its engines takes requests, or it is being ended",
            "see its log for engine errors, and examine its engines with --config or --upstream",
        )
    if listed.status >= 500:  # where it leads back here, only a path that is passed on says so
        listed = await peer.get(f"{peer.base}/preheat-doctor")
    refused = _refused(peer, listed)
    if refused is not None:
        yield refused
    elif asks:
        async for finding in _ask_twice(peer, model or _first(names_of(listed))):
            yield finding


def _first(names: list[str] | None) -> str:
    return names[0] if names else "any"


def _refused(peer: Peer, reply: Reply) -> Finding | None:
    """Why it didn't do what was asked; None where it did."""
    code = reply.code
    if reply.status == 508 or code == "loop":
        return Finding(
            "loop",
            peer.about,
            "problem",
            "a request through it came back to it",
            "an engine's url leads to this very gateway, so no request can be answered",
            "correct engines.NAME.url: it must be the engine's address, not the gateway's",
        )
    if reply.status in {401, 403}:
        return Finding(
            "key",
            peer.about,
            "problem",
            f"status {reply.status}{f': {reply.said}' if reply.said else ''}",
            "it serves its tenants only",
            "give a tenant's key with --gateway-key-env VAR",
        )
    if reply.status == 200:
        return None
    engine = code.startswith("engine-")
    return Finding(
        "gateway-error",
        peer.about,
        "problem",
        f"status {reply.status}{f' ({code})' if code else ''}: {reply.said}",
        "the engine behind it gives no answer" if engine else "it refuses a plain small chat",
        "examine its engines with --config or --upstream" if engine else "see docs/errors.md",
    )


async def _ask_twice(peer: Peer, model: str) -> AsyncIterator[Finding]:
    """The same greedy request twice: the second must be a hit."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"Say yes. {text_of(_WORDS)}"}],
        "temperature": 0,
        "max_tokens": _TOKENS,
    }
    first = await peer.post(f"{peer.base}/chat/completions", body)
    refused = _refused(peer, first)
    if refused is not None:
        yield refused
        return
    second = await peer.post(f"{peer.base}/chat/completions", body)
    if "; hit" in second.cache_status:
        yield Finding(
            "hit",
            peer.about,
            "ok",
            f"a repeated request is a hit: {first.took_s:.3f} s, then {second.took_s:.4f} s",
        )
        return
    match = _DETAIL.search(second.cache_status)
    detail = match[1] if match else ""
    yield Finding(
        "no-hit",
        peer.about,
        "note" if detail == "finish-length" else "warning",
        f"a repeated greedy request was no hit: {shown(second.cache_status) or 'no Cache-Status'}",
        _WHY.get(detail, "equal requests are computed again"),
        f"see {detail} in docs/errors.md" if detail else "see whether a proxy takes headers out",
    )
