"""LMCache's instances behind a group of servers: who they are, asked within a time."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from preheat.engines import lmcache
from preheat.engines.beside import aside
from preheat.engines.dialects.calls import Call
from preheat.engines.direct import Direct
from preheat.engines.lmcache import Api, Directory, Held, Instance, Names
from preheat.errors import ConfigError, EngineError

_WITHIN_S: Final = 2.0
"""For a question; what comes later than its request needs it still serves to bring KV nearer."""
_PREFETCH_S: Final = 30.0
_NAMES_S: Final = 600.0
"""How often it is asked what keys are made with: the coordinator counts all its keys for that."""
_ID_BYTES: Final = 4
_POLL_S: Final = 0.02
_LONGEST_POLL_S: Final = 0.5


class LmcacheRules(msgspec.Struct, frozen=True):
    """Where LMCache's coordinator or controller answers, and its names for the instances behind the servers:
    in their order, or one for all; empty: told by their addresses."""

    url: str
    instances: tuple[str, ...] = ()


class Found(msgspec.Struct, frozen=True):
    """What each instance can give of a prompt, and how to ask for more of it."""

    ids: Sequence[int]
    salt: str
    held: Mapping[str, Held]
    directory: Directory | None = None


class LmcacheFleet:
    """One API that knows them all. Questions raise EngineError where there is no answer in time, and
    ConfigError where it can't be asked at all."""

    def __init__(self, rules: LmcacheRules) -> None:
        """Connect to nothing yet. Raises ValueError for a url that can't be."""
        self._rules = rules
        self._direct = Direct(rules.url, dialect="openai", most_s=_WITHIN_S)
        self._servers: dict[str, Direct] = {}
        self._api: Api | None = None
        self._names: Names | None = None
        self._names_until = 0.0
        self._instances: dict[str, Instance] = {}

    async def open(self, urls: Sequence[str]) -> dict[str, str]:
        """The instance behind each of these servers."""
        for api, question in lmcache.LISTS.items():
            status, body = await self._direct.ask(question)
            told = lmcache.read_instances(api, body) if status == 200 else None
            if told is not None:
                self._api, self._instances = api, {one.name: one for one in told}
                break
        else:
            self._api = None
            raise ConfigError("neither LMCache's coordinator nor its controller answers there")
        behind = self._behind(urls)
        if api == "coordinator" and (self._names is None or time.monotonic() >= self._names_until):
            self._names = None
            self._names = await self._read_names(sorted(set(behind.values())))
            self._names_until = time.monotonic() + _NAMES_S
        return behind

    async def look_up(self, ids: Sequence[int], salt: str) -> Found | None:
        """Who could load this prompt; None where the answer doesn't say."""
        size = _ID_BYTES * len(ids)
        if self._api == "controller":
            body = await self._told(await aside(size, lmcache.controller_lookup, ids))
            one = lmcache.read_controller_lookup(body, len(ids))
            return None if one is None else Found(ids, salt, dict([one]))
        if self._names is None:
            return None
        body = await self._told(await aside(size, lmcache.lookup, ids, self._names, salt))
        return await aside(len(body), _read_found, body, ids, salt, tuple(self._instances))

    async def prefetch(self, instance: str, found: Found) -> float | None:
        """Bring what lies in that instance's lower tiers to its memory: the seconds that it took; None where there
        was nothing to do."""
        assert self._names is not None
        began_at = time.monotonic()
        ids, salt = found.ids, found.salt
        size = _ID_BYTES * len(ids)
        call = await aside(size, lmcache.prefetch, instance, ids, self._names, salt)
        number = lmcache.read_prefetch(await self._told(call))
        if number is None:
            return None
        pause_s = _POLL_S
        while time.monotonic() < began_at + _PREFETCH_S:
            await asyncio.sleep(pause_s)
            if lmcache.read_prefetched(await self._told(lmcache.prefetched(instance, number))):
                return time.monotonic() - began_at
            pause_s = min(_LONGEST_POLL_S, 1.5 * pause_s)
        raise EngineError(f"LMCache's {instance} doesn't end a prefetch", kind="timeout-idle")

    async def let_go(self, found: Found, from_tokens: int) -> int:
        """All that lies of the prompt behind so many tokens in anybody's memory: how many keys went."""
        if found.directory is None:
            return 0
        gone = 0
        for name, some in found.directory.in_memory(from_tokens).items():
            instance = self._instances.get(name)
            if instance is None or not instance.port:
                continue
            server = self._server(instance)
            for at in range(0, len(some), lmcache.MOST_KEYS):
                call = lmcache.delete(some[at : at + lmcache.MOST_KEYS])
                gone += lmcache.read_deleted(await self._told(call, server))
        return gone

    async def aclose(self) -> None:
        """Close its connections."""
        await asyncio.gather(*(one.aclose() for one in (self._direct, *self._servers.values())))

    def _server(self, instance: Instance) -> Direct:
        host = f"[{instance.host}]" if ":" in instance.host else instance.host
        url = f"http://{host}:{instance.port}"
        known = self._servers.get(url)
        if known is None:
            try:
                known = self._servers[url] = Direct(url, dialect="openai", most_s=_WITHIN_S)
            except ValueError:
                raise EngineError(f"LMCache tells of {url}", kind="connect") from None
        return known

    def _behind(self, urls: Sequence[str]) -> dict[str, str]:
        given, known = self._rules.instances, self._instances
        if given:
            unknown = sorted(set(given) - set(known))
            if unknown:
                there = ", ".join(sorted(known)) or "none"
                raise ConfigError(f"LMCache has no instance {', '.join(unknown)}; it has {there}")
            if len(given) not in {1, len(urls)}:
                raise ConfigError(f"{len(given)} instances are named, for {len(urls)} servers")
            return {url: given[at if len(given) > 1 else 0] for at, url in enumerate(urls)}
        hosts: dict[str, list[str]] = {}
        for one in known.values():
            hosts.setdefault(one.host, []).append(one.name)
        behind = {url: hosts.get(urlsplit(url).hostname or "", []) for url in urls}
        found = {url: names[0] for url, names in behind.items() if len(names) == 1}
        if not found:
            raise ConfigError(
                "no instance of LMCache is told from the others by a server's address: name them "
                "(engines.NAME.lmcache_instances)"
            )
        return found

    async def _read_names(self, instances: Sequence[str]) -> Names:
        for name in instances:
            names = lmcache.read_names(await self._told(lmcache.keys(name)))
            if names is not None:
                return names
        raise ConfigError("LMCache's directory has no keys yet, or those of several models")

    async def _told(self, call: Call, server: Direct | None = None) -> bytes:
        status, body = await (server or self._direct).ask(call)
        if not 200 <= status < 300:
            raise EngineError(f"LMCache says {status}", kind=f"status-{status}")
        return body


def _read_found(
    body: bytes, ids: Sequence[int], salt: str, instances: Sequence[str]
) -> Found | None:
    directory = lmcache.read_lookup(body, len(ids))
    if directory is None:
        return None
    return Found(ids, salt, {name: directory.held(name) for name in instances}, directory)
