"""Which engine answers for which model, and what goes to it."""

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import msgspec

from preheat.core.router import Known
from preheat.core.slot_desk import Freed
from preheat.core.stats import UpstreamCounts
from preheat.core.types import Ask
from preheat.engines import Engine
from preheat.engines.openai import OpenAi
from preheat.engines.worker import AdapterCounts
from preheat.errors import ConfigError
from preheat.gateway.intake import KEYED_HEADERS, Sender
from preheat.gateway.table import Table
from preheat.transport.client import Response
from preheat.transport.server import Head
from preheat.wire.anthropic import with_breakpoints
from preheat.wire.splice import change_field, insert_field, set_field

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
        b"content-length",
        b"expect",
    }
)
_NOT_SHOWN: Final = _HOP_BY_HOP | {b"date", b"server"}
_USUAL: Final = frozenset({b"close", b"keep-alive"})
_OURS: Final = frozenset({b"host", b"authorization", b"x-api-key", b"accept-encoding"})
_PLAIN: Final = (
    b"content-type",
    b"accept",
    b"user-agent",
    b"traceparent",
    b"tracestate",
    b"x-request-id",
)
"""Headers that go upstream with a cacheable request and can't change its answer."""
_KEYED: Final = tuple(name.encode() for name in KEYED_HEADERS)


class Upstreams:
    """Which engine answers for which model, from a table that can be changed in one step.

    `via` names this host's workers on every request they send, so that they know one that came
    back.
    """

    def __init__(self, table: Table, via: bytes) -> None:
        self._via = via
        self.version = 0
        self.change(table)

    def change(self, table: Table) -> None:
        """From now on this holds. Raises ConfigError for a table without engines."""
        if not table.engines:
            raise ConfigError("no engine is configured")
        self.version += 1
        self.engines = table.engines
        self.models = table.models
        self._first = next(iter(table.engines))
        self._identity_of_engine = table.identity_of_engine
        self._forward_headers = table.forward_headers
        self._breakpoints = table.breakpoints
        self.weights = table.weights

    def engine_for(self, model: str) -> Engine:
        """The engine that serves this model."""
        known = self.models.get(model)
        return self.engines[known.engine if known else self._first]

    def alias_of(self, model: str) -> str:
        """What its engine calls this model."""
        known = self.models.get(model)
        return known.alias if known else model

    def identity_of(self, model: str) -> str:
        """What answers for this model, as part of the key."""
        known = self.models.get(model)
        return known.identity if known else self._identity_of_engine[self._first]

    def body_for(self, body: bytes, ask: Ask, engine: Engine) -> tuple[bytes, bool]:
        """The client's bytes with what must be changed in them, and whether usage was injected."""
        known = self.models.get(ask.model)
        if known is not None and known.alias != ask.model:
            alias = msgspec.json.encode(known.alias)
            body = change_field(body, "model", lambda _: alias)
        if not (ask.stream and engine.inject_usage) or ask.include_usage:
            return body, False
        if ask.has_stream_options:
            return change_field(body, "stream_options", _with_usage), True
        return insert_field(body, "stream_options", _with_usage(b"{}")), True

    def named_for(self, path: bytes, body: bytes, model: str) -> tuple[bytes, bytes]:
        """Path and body of a request that is passed through, under the engine's own name for the
        model."""
        known = self.models.get(model)
        if known is None or known.alias == model:
            return path, body
        if path.startswith(b"/v1/models/"):
            return b"/v1/models/" + quote(known.alias).encode(), body
        alias = msgspec.json.encode(known.alias)
        return path, change_field(body, "model", lambda _: alias)

    def marked(self, path: bytes, body: bytes, engine: Engine) -> bytes:
        """The body of a request to Anthropic's API, with marks where prefixes should end if the
        operator wants that."""
        breakpoints = self._breakpoints.get(engine.name)
        if breakpoints is None or path != b"/v1/messages":
            return body
        return with_breakpoints(body, breakpoints.places)

    def headers_for(self, head: Head, engine: Engine) -> list[tuple[bytes, bytes]]:
        """What goes upstream with a cacheable request: what the key holds, and what can't matter.
        Worked out once for a head, as long as the table stays."""
        kept = head.memory.sent if isinstance(head.memory, Sender) else {}
        found = kept.get((self.version, engine.name))
        if found is None:
            headers = head.headers
            names = (*_PLAIN, *_KEYED, *self._forward_headers.get(engine.name, ()))
            found = [(name, headers[name]) for name in dict.fromkeys(names) if name in headers]
            found += [(b"accept-encoding", b"identity"), self._passed_via(headers)]
            kept.clear()
            kept[self.version, engine.name] = found
        return found

    def passed_headers(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """What goes upstream with a request that is passed through: all but what ends here."""
        dropped = _listed(headers.get(b"connection", b"")) | {b"via"}
        return [self._passed_via(headers)] + [
            (name, value)
            for name, value in headers.items()
            if name not in _HOP_BY_HOP
            and name not in _OURS
            and name not in dropped
            and not name.startswith(b"x-preheat-")
        ]

    def _passed_via(self, headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
        came = headers.get(b"via")
        return b"via", b"%b, %b" % (came, self._via) if came else self._via

    @property
    def is_ready(self) -> bool:
        """Whether any engine takes requests."""
        return any(engine.is_ready for engine in self.engines.values())

    def counted(self) -> dict[str, UpstreamCounts]:
        """How each server is. One that leaves may share its name with who has come for it."""
        found: dict[str, UpstreamCounts] = {}
        for state in (one for engine in self.engines.values() for one in engine.workers()):
            if state.name not in found:
                known = state.known or Known()
                found[state.name] = UpstreamCounts(
                    address=state.address,
                    in_flight=state.in_flight,
                    up=int(state.is_up),
                    draining=state.state == "draining",
                    failures=state.failures,
                    retries=state.retries,
                    dialect=state.dialect,
                    trust=known.trust,
                    queue_s=known.queue_s,
                    input_tokens=known.input_tokens,
                    cached_tokens=known.cached_tokens,
                    ghost_tokens=known.ghost_tokens,
                    shadow_agreed=known.shadow_agreed,
                    shadow_differed=known.shadow_differed,
                    shadow_sooner_s=known.shadow_sooner_s,
                    unsaved_slots=state.unsaved_slots,
                    slot_files=state.slot_files,
                    warming=state.state == "warming",
                    ramping=known.is_back,
                    readied=msgspec.structs.asdict(state.readied),
                    starts=state.starts,
                    adapters=[] if state.adapters is None else state.adapters.names,
                    adapter_loads=_loads_of(state.adapters),
                    events={} if state.events is None else msgspec.structs.asdict(state.events),
                )
        return found

    def lmcache_counts(self) -> dict[str, dict[str, int]]:
        """What was asked of LMCache, of each engine that has one."""
        told = {
            name: engine.lmcache_counts()
            for name, engine in self.engines.items()
            if isinstance(engine, OpenAi)
        }
        return {name: counts for name, counts in told.items() if counts}

    async def over(self, tenant: str, session: str) -> Freed:
        """That session won't come back: what is kept for it goes first."""
        freed = [await one.over(tenant, session) for one in self.engines.values()]
        return Freed(sum(one.slots for one in freed), sum(one.file_bytes for one in freed))

    async def erase(self, tenant: str) -> int:
        """Delete what engines keep of a tenant's prompts in files; how many they were. Raises ConfigError,
        after all the others, where that can't be done."""
        files, failure = 0, None
        for one in self.engines.values():
            try:
                files += await one.erase(tenant)
            except ConfigError as error:
                failure = error
        if failure is not None:
            raise failure
        return files

    def set_draining(self, name: str, *, is_draining: bool) -> bool:
        """Let the server of that name take nothing more, or again. Whether there is one."""
        return any(
            engine.set_draining(name, is_draining=is_draining) for engine in self.engines.values()
        )


def _with_usage(options: bytes) -> bytes:
    return set_field(options, "include_usage", b"true")


class Shown(msgspec.Struct, gc=False):
    """An engine's headers: as lines for the client, but for those that frame a message, and those
    that decide what is done with its answer."""

    lines: bytes
    content_type: bytes
    retry_after: bytes
    coding: bytes


def shown_of(response: Response) -> Shown:
    """What a client is shown of an answer's head, and what we look at."""
    lines: list[bytes] = []
    content_type = retry_after = coding = b""
    dropped: set[bytes] = set()
    for name, value in response.headers:
        if name == b"connection":
            dropped = _listed(value)
            continue
        if name in _NOT_SHOWN or name.startswith(b"x-preheat-"):
            continue
        if name == b"content-type":
            content_type = content_type or value
        elif name == b"retry-after":
            retry_after = retry_after or value
        elif name == b"content-encoding":
            coding = coding or value
        lines.append(b"%b: %b\r\n" % (name.title(), value))
    if not dropped <= _USUAL:
        lines = [line for line in lines if line.partition(b":")[0].lower() not in dropped]
    return Shown(b"".join(lines), content_type, retry_after, coding)


def header_of(response: Response, name: bytes) -> bytes:
    """The first header of that name, or nothing."""
    return next((value for found, value in response.headers if found == name), b"")


def _listed(value: bytes) -> set[bytes]:
    return {part.strip().lower() for part in value.split(b",")}


def _loads_of(counts: AdapterCounts | None) -> dict[str, float]:
    if counts is None or not (counts.names or counts.loads or counts.refused):
        return {}  # most servers have nothing to do with any
    return {"loads": counts.loads, "load_s": counts.load_s, "refused": counts.refused}
