"""L2 in a Redis: is it there, fast enough, and set up for a cache?"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Final

from preheat.core.spread import percentile
from preheat.core.types import Key
from preheat.errors import ConfigError, StoreError
from preheat.lab.doctor.finding import Finding
from preheat.stores.redis import Redis

_PINGS: Final = 50
_PATIENT_S: Final = 1.0
_SETTLED_S: Final = 0.02
_ABOUT: Final = "l2.url"


async def examine_redis(url: str, password: str, timeout_s: float) -> AsyncIterator[Finding]:
    """All findings about it. `timeout_s` is what a request would wait for it."""
    told: list[tuple[str, dict[str, object]]] = []
    try:
        # More patient than the gateway: a slow server is to be measured, not to be given up.
        store = Redis(
            url,
            password=password,
            timeout_s=max(_PATIENT_S, timeout_s),
            on_event=lambda event, fields: told.append((event, fields)),
        )
        await store.start()
    except ConfigError as error:
        yield Finding("settings", _ABOUT, "problem", str(error), "serve doesn't start with it")
        return
    try:
        yield await _latency(store, timeout_s)
        size = await store.size()  # asked after the store's own look at the server, so that is over
        await asyncio.sleep(_SETTLED_S)
        yield Finding(
            "l2",
            _ABOUT,
            "ok",
            f"{size.entries} keys, {size.size_bytes:,} bytes of {size.budget_bytes:,}",
        )
    except StoreError as error:
        why = [str(fields["why"]) for event, fields in told if event == "redis-down"]
        remedy = [str(fields["remedy"]) for event, fields in told if event == "redis-refused"]
        yield Finding(
            "redis-unreachable",
            _ABOUT,
            "problem",
            f"Redis gives no answer: {(why or [str(error)])[0]}",
            "every request goes on without L2",
            (remedy or ["start it, or correct l2.url and l2.password_env"])[0],
        )
    finally:
        await store.aclose()
    for event, fields in told:
        if event in _WORDS:
            yield Finding(
                event,
                _ABOUT,
                "warning",
                f"{_WORDS[event]}: {fields['found']}",
                "L2 keeps less than it could, or forgets what it mustn't",
                str(fields["remedy"]),
            )


_WORDS: Final = {
    "redis-policy": "its memory policy doesn't fit",
    "redis-version": "its version is too old",
}


async def _latency(store: Redis, timeout_s: float) -> Finding:
    """How long a look-up takes, against what a request waits for it."""
    taken_s = []
    for _ in range(_PINGS):
        began_at = perf_counter()
        await store.get([Key(secrets.token_bytes(16))])
        taken_s.append(perf_counter() - began_at)
    ordered = sorted(taken_s)
    p50_s, p99_s = percentile(ordered, 50), percentile(ordered, 99)
    found = (
        f"{_PINGS} look-ups took {p50_s * 1_000:.2f} ms at the median and {p99_s * 1_000:.2f} ms at "
        f"the 99th percentile; l2.timeout_s is {timeout_s * 1_000:g} ms"
    )
    if p50_s > timeout_s:
        return Finding(
            "redis-slow",
            _ABOUT,
            "problem",
            found,
            "most requests give up on L2 before it answers, and its breaker opens",
            "use a Redis that is nearer, or raise l2.timeout_s",
        )
    if p99_s > timeout_s:
        return Finding(
            "redis-slow",
            _ABOUT,
            "warning",
            found,
            "some requests give up on L2 before it answers",
            "use a Redis that is nearer or less busy, or raise l2.timeout_s",
        )
    return Finding("redis-latency", _ABOUT, "ok", found)
