"""The admin routes that have a prefix warmed on an engine's servers, and tell whether it is."""

import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from preheat.config import Settings
from preheat.core.blocks import block_ends, prefix_of
from preheat.engines import Engine
from preheat.engines.dialects.calls import Prompt
from preheat.engines.warmth import Hot, Proven, Warmed
from preheat.errors import EngineError
from preheat.gateway.intake import LOCAL_TENANT
from preheat.gateway.upstreams import Upstreams
from preheat.telemetry.logs import Log

T = TypeVar("T")

LONGEST_S: Final = 600.0
_MOST_AT_ONCE: Final = 4
_MOST_BYTES: Final = 8 * 2**20
_MOST_IDS: Final = 2**20
_MOST_PARTS: Final = 2**16
"""Of a prefix: more than any engine's context has. What is larger would hold up every other request
while it is read."""
_Word = Annotated[str, Meta(min_length=1, max_length=256)]
_Id = Annotated[int, Meta(ge=0, lt=2**31)]
_EXPECTED: Final = (
    'expected {"model", "tenant", "workers": names as in X-Preheat-Worker, "within_s": up to 600} and one of '
    f'"messages" (with "tools"; up to {_MOST_PARTS:,} of each), "text", "ids" (up to {_MOST_IDS:,})'
)
_MESSAGES: Final = msgspec.json.Decoder(
    Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=_MOST_PARTS)]
)
_TOOLS: Final = msgspec.json.Decoder(
    Annotated[list[dict[str, Any]], Meta(max_length=_MOST_PARTS)] | None
)


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    """The body. Messages stay as they are spelled: the router knows prompts by their text."""

    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    text: Annotated[str, Meta(min_length=1)] | None = None
    ids: Annotated[list[_Id], Meta(min_length=1, max_length=_MOST_IDS)] | None = None
    model: Annotated[str, Meta(max_length=256)] = ""
    adapter: Annotated[str, Meta(max_length=256)] = ""
    tenant: _Word | None = None
    workers: Annotated[list[_Word], Meta(max_length=1_024)] = []
    within_s: Annotated[float, Meta(gt=0, le=LONGEST_S)] = 60.0


_WANTED: Final = msgspec.json.Decoder(_Wanted)


class WarmRoutes:
    """`guard` lets in whom the admin routes let in. Who hangs up calls it off; a few at once run."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        upstreams: Upstreams,
        log: Log,
        guard: Callable[[Request], None],
    ) -> None:
        self._settings = settings
        self._upstreams = upstreams
        self._log = log
        self._guard = guard
        self._running = 0
        self.routes: Final = [
            Route("/preheat/v1/warm", self._warm, methods=["POST"]),
            Route("/preheat/v1/verify", self._verify, methods=["POST"]),
        ]

    async def _warm(self, request: Request) -> Response:
        hot, wanted, engine = await self._read(request)
        outcomes = await self._one_of_few(engine.warm(hot, wanted.workers, wanted.within_s))
        done = sum(one.state == "done" for one in outcomes)
        told = {"done": done, "of": len(outcomes)}
        return self._answer("warm", request, hot, outcomes, "outcomes", told)

    async def _verify(self, request: Request) -> Response:
        hot, wanted, engine = await self._read(request)
        proofs = await self._one_of_few(engine.prove(hot, wanted.workers, wanted.within_s))
        proven = sum(one.proof.verdict == "proven" for one in proofs)
        told = {"proven": proven, "of": len(proofs)}
        return self._answer("verify", request, hot, proofs, "proofs", told)

    async def _read(self, request: Request) -> tuple[Hot, _Wanted, Engine]:
        self._guard(request)
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "send it as application/json")
        body = await request.body()
        if len(body) > _MOST_BYTES:
            raise HTTPException(413, f"a prefix of more than {_MOST_BYTES} bytes isn't warmed")
        try:
            wanted = _WANTED.decode(body)
            messages = _MESSAGES.decode(wanted.messages) if wanted.messages else None
            tools = _TOOLS.decode(wanted.tools) if wanted.tools else None
            prompt = Prompt(
                model=self._upstreams.alias_of(wanted.model),
                messages=messages,
                tools=tools,
                text=wanted.text,
                ids=wanted.ids,
                adapter=wanted.adapter,
            )
        except (ValueError, RecursionError):  # msgspec's own is one
            raise HTTPException(400, _EXPECTED) from None
        tenants = self._settings().tenants
        if wanted.tenant is None and tenants:
            raise HTTPException(400, "there are tenants: name the one whose requests shall find it")
        if tenants and wanted.tenant not in tenants:
            raise HTTPException(404, f"there is no tenant of this name: {wanted.tenant}")
        engine = self._upstreams.engine_for(wanted.model)
        unknown = set(wanted.workers) - {one.name for one in engine.workers()}
        if unknown:
            raise HTTPException(
                404, f"engine {engine.name} has no server of this name: {min(unknown)}"
            )
        tenant = wanted.tenant or LOCAL_TENANT
        blocks = _blocks_of(prompt, wanted, tenant)
        return Hot(prompt=prompt, tenant=tenant, model=wanted.model, blocks=blocks), wanted, engine

    async def _one_of_few(self, work: Coroutine[Any, Any, list[T]]) -> list[T]:
        if self._running >= _MOST_AT_ONCE:
            work.close()
            raise HTTPException(
                429, f"{_MOST_AT_ONCE} run already: try again", {"Retry-After": "5"}
            )
        self._running += 1
        try:
            return await work
        except EngineError as error:
            raise HTTPException(502, f"no server could be asked: {error}") from None
        finally:
            self._running -= 1

    def _answer(
        self,
        event: str,
        request: Request,
        hot: Hot,
        found: Sequence[Warmed | Proven],
        name: str,
        told: dict[str, int],
    ) -> Response:
        audit_id = secrets.token_hex(8)
        by = request.client.host if request.client else ""
        self._log.audit(event, audit_id=audit_id, by=by, model=hot.model, tenant=hot.tenant, **told)
        body = msgspec.json.encode({name: found, **told, "audit_id": audit_id})
        return Response(body, media_type="application/json")


def _blocks_of(prompt: Prompt, wanted: _Wanted, tenant: str) -> Sequence[int]:
    """How the router will know requests that begin so, where they spell it like this."""
    fields: dict[str, Any] = {"model": prompt.model}
    if wanted.messages:
        fields["messages"] = wanted.messages
        if wanted.tools:
            fields["tools"] = wanted.tools
    elif wanted.text is not None:
        fields["prompt"] = wanted.text
    body = msgspec.json.encode(fields)
    blocks = prefix_of(body, tenant.encode()).blocks
    if wanted.messages:
        ends = block_ends(body, len(prompt.messages or ()))
        return blocks[: ends[-1] if ends else 0]
    return blocks
