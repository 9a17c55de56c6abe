"""Any server that speaks OpenAI's API: vLLM, SGLang, TGI, llama.cpp, or a hosted one."""

import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from preheat.core.breaker import Breaker
from preheat.errors import ConfigError, EngineError
from preheat.transport.client import Client, Response, Timeouts

_FAILING: Final = frozenset({502, 503, 504})


class OpenAi:
    """One upstream address, its key, its time limits, and a breaker for when it is down."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        api_key: str = "",
        timeouts: Timeouts | None = None,
        max_connections: int = 256,
        breaker: Breaker | None = None,
        inject_usage: bool = True,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(
                f"engines.{name}.url: expected http(s)://host[:port][/v1], got {url!r}"
            )
        self.name = name
        self.inject_usage = inject_usage
        self._client = Client(url, timeouts=timeouts or Timeouts(), max_connections=max_connections)
        # A bare address means the usual place.
        self._base = parts.path.rstrip("/").encode() or b"/v1"
        self._key = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        self._breaker = breaker or Breaker()

    async def start(self) -> None:
        """Nothing to do: connections are opened when they are needed."""

    async def send(
        self,
        method: bytes,
        path: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
    ) -> Response:
        """Ask, unless the breaker is open."""
        now = time.monotonic()
        if not self._breaker.allows(now):
            raise EngineError(
                f"engine {self.name} is failing; it is tried again in "
                f"{self._breaker.retry_after_s(now):.0f} s",
                kind="breaker-open",
                retry_after_s=max(1.0, self._breaker.retry_after_s(now)),
            )
        try:
            response = await self._client.request(
                method, self._base + path, [*headers, *self._key], body
            )
        except EngineError as error:
            if error.kind != "queue":  # that is our own limit, not the engine's failure
                self._breaker.failed(time.monotonic())
            raise
        if response.status in _FAILING:
            self._breaker.failed(time.monotonic())
        else:
            self._breaker.succeeded()
        return response

    @property
    def is_ready(self) -> bool:
        """Whether the breaker would let a request through."""
        return self._breaker.would_allow(time.monotonic())

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()
