"""Any server that speaks OpenAI's API: vLLM, SGLang, TGI, llama.cpp, or a hosted one."""

from collections.abc import Collection, Coroutine, Sequence
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from preheat.core.adapters import Adapters
from preheat.core.breaker import Breaker
from preheat.core.router import Router
from preheat.core.routing import RoutingPolicy
from preheat.core.slot_desk import Freed
from preheat.core.types import SessionState
from preheat.engines.group import Group
from preheat.engines.kv_hearing import Hearing
from preheat.engines.kv_link import LearnerLink
from preheat.engines.lmcache_tier import LmcacheTier
from preheat.engines.rules import Care, Rules
from preheat.engines.warmth import Hot, Proven, Warmed
from preheat.engines.worker import HttpClient, OnEvent, WorkerState
from preheat.errors import ConfigError
from preheat.transport.client import Client, Response, Timeouts


class OpenAi:
    """One upstream, or several equal ones: their key and their time limits."""

    def __init__(
        self,
        name: str,
        urls: str | Sequence[str],
        *,
        api_key: str = "",
        timeouts: Timeouts | None = None,
        max_connections: int = 256,
        http2: bool = False,
        breaker: Breaker | None = None,
        rules: Rules | None = None,
        routing: RoutingPolicy | None = None,
        shadow: RoutingPolicy | None = None,
        care: Care | None = None,
        hearing: Hearing | None = None,
        link: LearnerLink | None = None,
        lmcache: LmcacheTier | None = None,
        inject_usage: bool = True,
        on_event: OnEvent | None = None,
    ) -> None:
        """Check the urls; connect to nothing yet. `breaker` is the pattern of each one's own; without
        `routing` the least loaded is asked; `on_event` is told when one of them goes down and when it is well again. Raises
        ConfigError."""
        self.name = name
        self.inject_usage = inject_usage
        self._key = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        self._timeouts = timeouts or Timeouts()
        self._max_connections = max_connections
        self._http2 = _http2_client(name) if http2 else None
        self._group = Group(
            name,
            [urls] if isinstance(urls, str) else urls,
            connect=self._connect,
            breaker=breaker or Breaker(),
            rules=rules or Rules(),
            router=None if routing is None else _router(routing, shadow, care),
            care=care,
            hearing=hearing,
            link=link,
            lmcache=lmcache,
            probe_headers=self._key,
            api_key=api_key,
            on_event=on_event,
        )
        self._send = self._group.send

    async def start(self) -> None:
        """Of several servers, begin to look after each; connections are opened when they are needed."""
        self._group.start()

    def take_over(self, urls: Collection[str]) -> None:
        """Likewise, in a gateway that serves already, from groups that had these addresses: who is at another
        one is new, and readied first."""
        self._group.start(urls)

    def send(
        self,
        method: bytes,
        path: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        *,
        is_repeatable: bool = True,
        tenant: str = "",
        session: str = "",
        state: SessionState = "",
    ) -> Coroutine[Any, Any, Response]:
        """Ask one that is well; `Response.worker` says who answered, and `Response.placement` wants
        to hear how it went."""
        return self._send(
            method,
            path,
            [*headers, *self._key],
            body,
            is_repeatable=is_repeatable,
            tenant=tenant,
            session=session,
            state=state,
        )

    async def erase(self, tenant: str) -> int:
        """Delete what a tenant has in files of slots; how many they were. Raises ConfigError."""
        return await self._group.erase(tenant)

    async def over(self, tenant: str, session: str) -> Freed:
        """That session won't come back: what is kept for it goes first."""
        return await self._group.over(tenant, session)

    async def warm(self, hot: Hot, workers: Sequence[str], within_s: float) -> list[Warmed]:
        """Have it warm at these, or at all that are well, in idle moments."""
        return await self._group.warm(hot, workers, within_s)

    async def prove(self, hot: Hot, workers: Sequence[str], within_s: float) -> list[Proven]:
        """Whether it is."""
        return await self._group.prove(hot, workers, within_s)

    @property
    def is_ready(self) -> bool:
        """Whether any of them may be asked."""
        return self._group.is_ready

    def workers(self) -> list[WorkerState]:
        """How each of them is."""
        return self._group.workers()

    def lmcache_counts(self) -> dict[str, int]:
        """What was asked of LMCache so far; nothing where there is none."""
        return self._group.lmcache_counts()

    def set_draining(self, worker: str, *, is_draining: bool) -> bool:
        """Let that one take nothing more, or again. Whether there is one of that name."""
        return self._group.set_draining(worker, is_draining=is_draining)

    def reconfigure(self, urls: str | Sequence[str], rules: Rules) -> None:
        """Other addresses and rules, whole or not at all; who stays keeps its connections and its
        state. Raises ConfigError."""
        self._group.reconfigure([urls] if isinstance(urls, str) else urls, rules)

    async def retire(self) -> None:
        """End what is under way, then close: another engine has taken over."""
        await self._group.retire()

    async def aclose(self) -> None:
        """Close its connections."""
        await self._group.aclose()

    def _connect(self, url: str) -> HttpClient:
        try:
            make = self._http2 if self._http2 and urlsplit(url).scheme == "https" else Client
            client: HttpClient = make(
                url, timeouts=self._timeouts, max_connections=self._max_connections
            )
        except ValueError as error:
            raise ConfigError(
                f"engines.{self.name}.url: expected http(s)://host[:port][/v1] ({error})"
            ) from None
        return client


def _router(routing: RoutingPolicy, shadow: RoutingPolicy | None, care: Care | None) -> Router:
    adapters = Adapters({} if care is None else care.adapters)
    return Router(routing, shadow=shadow, adapters=adapters)


def _http2_client(name: str) -> Any:
    """The class; its library is needed only by those who want it."""
    try:
        return import_module("preheat.transport.http2").Http2Client
    except ModuleNotFoundError:
        raise ConfigError(
            f"engines.{name}.http2: needs a package that isn't installed; "
            "run: pip install 'preheat[http2]'"
        ) from None
