"""Opens a Redis store for the battery in test_stores.py, with a server of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from preheat.stores.redis import Redis
from redis_server import RedisServer


@asynccontextmanager
async def opened(server: RedisServer | None = None) -> AsyncIterator[Redis]:
    """A started store; a second one on the same server shares with the first."""
    own = None if server else RedisServer("--maxmemory", "256mb")
    served = server or own
    assert served is not None
    store = Redis(served.url, password="", timeout_s=1.0, on_event=lambda *_: None)
    try:
        await store.start()
        yield store
    finally:
        await store.aclose()
        if own:
            own.__exit__(None, None, None)
