"""Health, metrics and the admin routes: an ordinary ASGI application."""

import hmac
import ipaddress
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from preheat.config import Settings
from preheat.core.ledger import NANO, Account
from preheat.core.stats import by_layer, hit_ratios, rows, total, warm_ups
from preheat.core.types import Invalidation, Key
from preheat.errors import StoreError, UpstreamError
from preheat.gateway.hosting import Host
from preheat.gateway.intake import LOCAL_TENANT, SESSION
from preheat.gateway.l2 import L2
from preheat.gateway.openapi import document
from preheat.gateway.upstreams import Upstreams
from preheat.gateway.warm_routes import WarmRoutes
from preheat.telemetry.logs import Log
from preheat.telemetry.metrics import CONTENT_TYPE, render
from preheat.wire.openai import error_body

_SHOWN_ENTRIES: Final = 1_000
_NOT_LOCAL: Final = frozenset({"origin", "forwarded", "x-forwarded-for", "x-real-ip"})
"""Signs of a web page, and of a proxy that speaks for somebody else."""
_NO_SUCH_PATH: Final = HTTPStatus.NOT_FOUND.phrase  # what Starlette says
_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


_Word = Annotated[str, Meta(min_length=1, max_length=256)]


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an invalidation."""

    keys: Annotated[
        list[Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]], Meta(max_length=10_000)
    ] = []
    tags: Annotated[list[_Word], Meta(max_length=1_000)] = []
    model: _Word | None = None
    namespace: Annotated[str, Meta(max_length=64)] | None = None
    tenant: _Word | None = None
    dry_run: bool = False


class _Drained(msgspec.Struct, forbid_unknown_fields=True):
    """The body that drains an upstream, or lets it take requests again."""

    upstream: _Word
    drain: bool


class _Ended(msgspec.Struct, forbid_unknown_fields=True):
    """The body that says that a session won't come back."""

    session: Annotated[str, Meta(pattern=SESSION)]
    state: Literal["over"]
    tenant: _Word | None = None


class AdminApp:
    """Builds the application; what it shows is read when it is asked for, of the whole host."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        api_key: str,
        host: Host,
        upstreams: Upstreams,
        l2: L2 | None,
        log: Log,
        *,
        is_ready: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._api_key = api_key.encode()
        self._host = host
        self._upstreams = upstreams
        self._l2 = l2
        self._log = log
        self._is_ready = is_ready
        self.routes: Final = [
            Route("/healthz", self._health),
            Route("/readyz", self._ready),
            Route("/metrics", self._show_metrics),
            Route("/preheat/v1/stats", self._stats),
            Route("/preheat/v1/ledger", self._show_ledger),
            Route("/preheat/v1/config", self._config),
            Route("/preheat/v1/workers", self._workers, methods=["GET", "POST"]),
            Route("/preheat/v1/sessions", self._end_session, methods=["POST"]),
            Route("/preheat/v1/openapi.json", self._openapi),
            Route("/preheat/v1/invalidate", self._invalidate, methods=["POST"]),
            *WarmRoutes(settings, upstreams, log, self._guard).routes,
        ]
        self.app = Starlette(
            routes=self.routes,
            exception_handlers={HTTPException: _http_error, UpstreamError: _host_error},
        )

    async def _health(self, request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _ready(self, request: Request) -> Response:
        if self._is_ready():
            return Response("ready\n", media_type="text/plain")
        return Response("not ready\n", status_code=503, media_type="text/plain")

    async def _show_metrics(self, request: Request) -> Response:
        if not self._settings().telemetry.open_metrics:
            self._guard(request)
        return Response(render(await self._host.snapshots()), media_type=CONTENT_TYPE)

    async def _stats(self, request: Request) -> Response:
        self._guard(request)
        counted = await self._host.snapshots()
        gauges, totals, words = counted.gauges, counted.totals, counted.words
        return _json(
            {
                "hit_ratio": hit_ratios(counted.accounts),
                "answers": {
                    f"{layer}/{reason}": account.requests
                    for (layer, reason), account in sorted(by_layer(counted.accounts).items())
                    if layer != "warm"
                },
                "warm_ups": {
                    **msgspec.structs.asdict(warm_ups(counted.accounts)),
                    "trunks_messages": gauges.get("trunks_messages", 0),
                    "trunks_bytes": gauges.get("trunks_bytes", 0),
                },
                "l1": {
                    "bytes": gauges["l1_bytes"],
                    "entries": gauges["l1_entries"],
                    "budget_bytes": gauges["l1_budget_bytes"],
                    "budget_entries": gauges["l1_budget_entries"],
                    "stored": totals["stored"],
                    "evicted": totals["evicted"],
                    "expired": totals["expired"],
                    "invalidated": totals["invalidated"],
                    "not_stored": words["dropped"],
                },
                "l2": {
                    name.removeprefix("l2_"): value
                    for name, value in counted.shared.items()
                    if name.startswith("l2_")
                }
                | {"events": words["l2"]},
                "workers": gauges["workers"],
                "stale": words["stale"],
                "sampled_repeats": totals["sampled_repeats"],
                "refused": words["refused"],
                "engine_errors": words["engine_errors"],
                "seconds": {
                    layer: {"count": sum(counts), "sum_s": sum_s}
                    for layer, (counts, sum_s) in counted.latency.items()
                },
            }
        )

    async def _show_ledger(self, request: Request) -> Response:
        self._guard(request)
        accounts = (await self._host.snapshots()).accounts
        return _json(
            {
                "unit": "picodollar",
                "basis_of_seconds": "measured",
                **_sums(total(accounts)),
                "rows": [
                    {
                        "tenant": tenant,
                        "model": model,
                        "layer": layer,
                        "reason": reason,
                        "detail": reason,
                    }
                    | _sums(account)
                    for (tenant, model, layer, reason), account in rows(accounts)
                ],
            }
        )

    async def _workers(self, request: Request) -> Response:
        self._guard(request)
        if request.method == "POST":
            return await self._drain(request)
        workers = await self._host.workers()
        counted = (await self._host.snapshots()).upstreams
        upstreams = [
            {"name": name, **msgspec.structs.asdict(one)}
            for name, one in counted.items()
            if one.up is not None
        ]
        return _json({"workers": workers, "upstreams": upstreams})

    async def _drain(self, request: Request) -> Response:
        _check_json(request)
        try:
            wanted = msgspec.json.decode(await request.body(), type=_Drained)
        except (msgspec.MsgspecError, RecursionError):
            raise HTTPException(
                400, 'expected {"upstream": a name as in X-Preheat-Worker, "drain": true or false}'
            ) from None
        if not await self._host.drain(wanted.upstream, is_draining=wanted.drain):
            raise HTTPException(
                404, "no upstream has this name; GET /preheat/v1/workers tells those there are"
            )
        audit_id = secrets.token_hex(8)
        self._log.audit(
            "upstream-drain",
            audit_id=audit_id,
            by=_client_of(request),
            upstream=wanted.upstream,
            drain=wanted.drain,
        )
        return _json({"upstream": wanted.upstream, "drain": wanted.drain, "audit_id": audit_id})

    async def _end_session(self, request: Request) -> Response:
        """What is kept for it is kept in slots and their files, and those only where one worker process
        is all there are."""
        self._guard(request)
        _check_json(request)
        try:
            ended = msgspec.json.decode(await request.body(), type=_Ended)
        except (msgspec.MsgspecError, RecursionError):
            raise HTTPException(
                400,
                'expected {"tenant": its name, "session": as in X-Preheat-Session, "state": "over"}',
            ) from None
        if ended.tenant is None and self._settings().tenants:
            raise HTTPException(400, "there are tenants: name the one whose session it is")
        tenant = ended.tenant or LOCAL_TENANT
        freed = await self._upstreams.over(tenant, ended.session)
        audit_id = secrets.token_hex(8)
        self._log.audit(
            "session-over",
            audit_id=audit_id,
            by=_client_of(request),
            tenant=tenant,
            slots=freed.slots,
            file_bytes=freed.file_bytes,
        )
        told = {"tenant": tenant, "session": ended.session, "state": ended.state}
        return _json({**told, **freed._asdict(), "audit_id": audit_id})

    async def _config(self, request: Request) -> Response:
        self._guard(request)
        return _json(self._settings())

    async def _openapi(self, request: Request) -> Response:
        self._guard(request)
        return _json(document())

    async def _invalidate(self, request: Request) -> Response:
        self._guard(request)
        _check_json(request)
        what, dry_run = _wanted(await request.body())
        number = None if dry_run else await self._publish(what)
        forgotten = await self._host.invalidate(what, number=number, dry_run=dry_run)
        removed = forgotten.removed
        audit_id = secrets.token_hex(8)
        self._log.audit(
            "invalidate",
            audit_id=audit_id,
            by=_client_of(request),
            keys=len(what.keys),
            tags=sorted(what.tags),
            model=what.model,
            namespace=what.namespace,
            tenant=what.tenant,
            dry_run=dry_run,
            matched=len(removed.keys),
            size_bytes=removed.size_bytes,
            workers_unheard=forgotten.workers_unheard,
        )
        return _json(
            {
                "matched": len(removed.keys),
                "entries": [key.hex() for key in removed.keys[:_SHOWN_ENTRIES]],
                "size_bytes": removed.size_bytes,
                "workers_unheard": forgotten.workers_unheard,
                "dry_run": dry_run,
                "audit_id": audit_id,
            }
        )

    async def _publish(self, what: Invalidation) -> int | None:
        """Tell all who share L2. Where that fails nothing is forgotten here either, so that nobody
        takes half of it for the whole."""
        if self._l2 is None:
            return None
        try:
            return (await self._l2.publish(what)).number
        except StoreError as error:
            raise HTTPException(
                503, f"L2 can't be told ({error.kind}), so nothing was forgotten: send it again"
            ) from None

    def _guard(self, request: Request) -> None:
        """The admin key; without one configured, only programs on this machine get in."""
        if self._api_key:
            sent = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(sent.encode(), self._api_key):
                raise HTTPException(
                    401,
                    "the admin routes need the admin key as 'Bearer KEY'",
                    {"WWW-Authenticate": "Bearer"},
                )
            return
        if not _is_local(request):
            raise HTTPException(
                403,
                "without admin.api_key_env the admin routes answer this machine only, and not through a "
                "proxy; for /metrics alone there is telemetry.open_metrics",
            )


def _client_of(request: Request) -> str:
    return request.client.host if request.client else ""


def _check_json(request: Request) -> None:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "send it as application/json")


def _is_local(request: Request) -> bool:
    """From this machine, and not a web page's doing: a page can send requests to loopback too, but
    it bears its own Origin, or a Host that was made to resolve to here."""
    try:
        is_loopback = ipaddress.ip_address(_client_of(request)).is_loopback
    except ValueError:
        is_loopback = False
    host = request.headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return (
        is_loopback
        and name.lower() in _LOCAL_HOSTS
        and not any(name in request.headers for name in _NOT_LOCAL)
    )


def _wanted(body: bytes) -> tuple[Invalidation, bool]:
    try:
        wanted = msgspec.json.decode(body, type=_Wanted)
    except (msgspec.MsgspecError, RecursionError):
        raise HTTPException(
            400,
            "expected {keys, tags, model, namespace, tenant, dry_run}: at most 10,000 keys of 32 hex "
            "digits, as Cache-Status shows them, and 1,000 tags",
        ) from None
    keys = frozenset(Key(bytes.fromhex(key)) for key in wanted.keys)
    what = Invalidation(keys, frozenset(wanted.tags), wanted.model, wanted.namespace, wanted.tenant)
    if what == Invalidation():
        raise HTTPException(400, "name at least one of keys, tags, model, namespace, tenant")
    return what, wanted.dry_run


def _sums(account: Account) -> dict[str, Any]:
    return {
        "requests": account.requests,
        "unpriced": account.unpriced,
        "input_tokens": account.input_tokens,
        "output_tokens": account.output_tokens,
        "cached_tokens": account.cached_tokens,
        "warmed_tokens": account.warmed_tokens,
        "paid": account.paid,
        "spent_by_us": account.spent_by_us,
        "saved_by_us": account.saved_by_us,
        "saved_by_provider": account.saved_by_provider,
        "price_without_us": account.price_without_us,
        "residual": account.residual,
        "paid_s": account.paid_ns / NANO,
        "saved_by_us_s": account.saved_by_us_ns / NANO,
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "authentication_error" if error.status_code == 401 else "invalid_request_error"
    if error.status_code in {502, 503}:
        kind = "server_error"
    code = {
        401: "invalid-admin-key",
        403: "admin-forbidden",
        404: "not-found",
        405: "method-not-allowed",
        413: "body-too-large",
        415: "unsupported-type",
        429: "too-many-at-once",
        502: "engine-unreachable",
        503: "store-unreachable",
    }.get(error.status_code, "invalid-body")
    message = error.detail
    if error.status_code == 404 and message == _NO_SUCH_PATH:
        message = "there is nothing at this path; OpenAI clients need a base_url that ends in /v1"
    body = error_body(message, kind=kind, code=code)
    return Response(
        body, error.status_code, media_type="application/json", headers=dict(error.headers or {})
    )


async def _host_error(_request: Request, error: Exception) -> Response:
    """The supervisor didn't answer: perhaps it is being replaced."""
    body = error_body(str(error), kind="server_error", code="host-unreachable")
    return Response(body, 503, media_type="application/json", headers={"Retry-After": "1"})
