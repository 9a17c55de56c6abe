"""New settings for a gateway that goes on serving: all of them, or none."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from preheat import config, wiring
from preheat.config import EngineSettings, Settings
from preheat.core.keys import Keyring
from preheat.engines import Engine
from preheat.engines.openai import OpenAi
from preheat.engines.warmth import Warmth
from preheat.errors import ConfigError
from preheat.gateway.hosting import Host
from preheat.gateway.intake import Intake
from preheat.gateway.proxy import Proxy
from preheat.gateway.table import Table, keyed_headers, table_of
from preheat.gateway.upstreams import Upstreams
from preheat.telemetry.logs import Log

_OF_THE_GROUP: Final = frozenset(
    {"url", "urls", "retries", "retry_ratio", "health_path", "health_s", "roles"}
)


class Prepared(msgspec.Struct, frozen=True):
    """Everything made that `commit` puts in place. `moved` are engines that go on with other
    addresses or rules, `gone` those that nobody asks any more."""

    settings: Settings
    table: Table
    moved: tuple[str, ...]
    gone: tuple[Engine, ...]


class Reload:
    """What changes in place: engines, models, namespaces, the exact cache's rules and prices."""

    def __init__(
        self,
        settings: Settings,
        parts: wiring.Parts,
        proxy: Proxy,
        intake: Intake,
        upstreams: Upstreams,
        keyring: Keyring,
        host: Host,
        log: Log,
        secret: bytes,
        warmth_of: Callable[[str], Warmth],
    ) -> None:
        self.settings = settings
        self._parts = parts
        self._proxy = proxy
        self._intake = intake
        self._upstreams = upstreams
        self._keyring = keyring
        self._host = host
        self._log = log
        self._secret = secret
        self._warmth_of = warmth_of
        self._tasks: set[asyncio.Task[None]] = set()

    def prepare(self, settings: Settings) -> Prepared:
        """Make all that is new, and change nothing yet. Raises ConfigError."""
        settings = wiring.with_defaults(settings)
        made: dict[str, tuple[Engine, str]] = {}
        moved = []
        for name, wanted in settings.engines.items():
            known = self._upstreams.engines.get(name)
            if known is not None and _is_same_group(self.settings.engines[name], wanted):
                made[name] = (known, self._upstreams.weights[name])
                if self.settings.engines[name] != wanted:
                    moved.append(name)
            elif wanted.kind != "openai":
                raise ConfigError(f"engines.{name}: kind {wanted.kind} needs a new start")
            else:
                made[name] = wiring.engine(
                    name,
                    wanted,
                    self._log,
                    self._host.where(name),
                    self._secret,
                    self._host.learner,
                    self._warmth_of(name),
                    has_tenants=bool(settings.tenants),
                )
        kept = {id(engine) for engine, _ in made.values()}
        gone = [one for one in self._upstreams.engines.values() if id(one) not in kept]
        return Prepared(settings, table_of(settings, made), tuple(moved), tuple(gone))

    def commit(self, prepared: Prepared) -> None:
        """From now on these hold. What is under way ends as it began."""
        settings = prepared.settings
        known = {id(engine) for engine in self._upstreams.engines.values()}
        groups = self.settings.engines.values()
        urls = {url for group in groups for url in config.upstreams_of(group)}
        for name in prepared.moved:
            engine = self._upstreams.engines[name]
            assert isinstance(engine, OpenAi), "only groups of servers have addresses"
            group = settings.engines[name]
            engine.reconfigure(config.upstreams_of(group), wiring.rules(group))
        self._upstreams.change(prepared.table)
        for engine in prepared.table.engines.values():
            if id(engine) not in known:  # not a process of ours: those don't change in place
                assert isinstance(engine, OpenAi), "`prepare` has seen to that"
                engine.take_over(urls)
        self._intake.key_by(keyed_headers(settings))
        self._keyring.forget()
        self._proxy.fallback = settings.fallback_message
        self._parts.ledger.reprice(wiring.prices(settings))
        self._parts.controller.set_freshness(
            wiring.freshness(settings), wiring.namespaces(settings)
        )
        self.settings = settings
        for engine in prepared.gone:
            self._own(engine.retire())

    async def aclose(self) -> None:
        """End what still waits for the last answers of engines that are gone."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_same_group(old: EngineSettings, new: EngineSettings) -> bool:
    """Whether nothing but the addresses of a group differ, and nothing else that is told of each
    is a matter of their order."""
    ordered = (new.kv_events, new.lmcache_instances, new.slot_folders)
    if max(map(len, ordered)) > 1 and old.urls != new.urls:
        return False
    fields = set(EngineSettings.__struct_fields__) - _OF_THE_GROUP
    return all(getattr(old, field) == getattr(new, field) for field in fields) and (
        old == new or new.kind == "openai"
    )
