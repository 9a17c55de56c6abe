"""A prompt computed by one server and answered by another: vLLM's protocol of prefill and decode roles.

A server that was started with a KV connector takes the field `kv_transfer_params` (docs/engines.md). The
prefill server is asked for one token, not streamed, with `do_remote_decode`: it keeps the prompt's KV and
says in its answer's `kv_transfer_params` where it lies. With these the decode server is asked what the
client wanted: it fetches the KV and goes on from there. Both are asked under one X-Request-Id.
"""

import os
import time
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from preheat.core.breaker import Breaker
from preheat.core.router import Ask, Route, Router
from preheat.core.types import Usage
from preheat.engines.worker import UNASKED, Headers, OnEvent, Worker
from preheat.errors import EngineError
from preheat.transport.client import Response
from preheat.wire.openai import usage_of
from preheat.wire.splice import insert_field

Role = Literal["any", "prefill", "decode"]

FIELD: Final = "kv_transfer_params"
_PATHS: Final = frozenset({b"/chat/completions", b"/completions"})
_WANTED: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_DROPPED: Final = ("stream_options", "min_tokens")
"""Of a request for one token that isn't streamed vLLM refuses these."""
_UNWANTED: Final = frozenset({b"accept", b"accept-encoding"})
_MOST_BYTES: Final = 4_194_304
"""A million tokens are 65,536 numbers of blocks."""
_BUSY: Final = 429
_FAILED: Final = 500
"""What vLLM says of a request whose KV couldn't be fetched, where it doesn't compute it then."""
_CLIENTS: Final = frozenset({400, 413, 422})
"""What is wrong with the client's own request: it is told so by whom it is asked next."""
_UNFIT: Final = frozenset({"no-kv-transfer", "malformed", f"status-{_FAILED}"})
_FAILURES: Final = 3
_PAUSE_S: Final = 60.0
"""After so many of these in a row prompts are computed where they are answered for so long: servers without a
connector would compute each of them twice. Who is down or busy is left alone for that anyway."""


class _Body(msgspec.Struct):
    """Of a request: what can't be handed over, or is already."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Prefilled(msgspec.Struct):
    """What the prefill server's answer is needed for."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    choices: list[_Choice] = []
    usage: Any = None


_BODY: Final = msgspec.json.Decoder(_Body)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PREFILLED: Final = msgspec.json.Decoder(_Prefilled)


class Handover:
    """A prompt whose KV lies at a prefill server until a decode server has fetched it. `route` is why that
    one computed it, `usage` what it counted."""

    def __init__(
        self,
        prefiller: Worker,
        decoder: Worker,
        headers: Headers,
        params: bytes,
        roles: "Roles",
        route: Route | None,
        usage: Usage | None,
    ) -> None:
        self.prefiller = prefiller
        self.decoder = decoder
        self.route = route
        self.usage = usage
        self._headers = headers
        self._params = params
        self._roles = roles
        self._is_there = True

    async def ask(self, worker: Worker, path: bytes, body: bytes) -> Response:
        """The second step, at this worker; one that isn't for it is asked for the whole, and so is one that
        couldn't fetch the KV, or after one that may have: it isn't kept then. Raises EngineError."""
        if not self._is_there or self._roles.of(worker) != "decode":
            return await worker.ask(b"POST", path, self._headers, body)
        told = insert_field(body, FIELD, self._params)
        try:
            response = await worker.ask(b"POST", path, self._headers, told)
        except EngineError as error:
            self._is_there = error.kind in UNASKED
            raise
        self._is_there = response.status == _BUSY
        if response.status != _FAILED:
            self._roles.succeeded()
            return response
        response.close()
        self._roles.failed(worker, f"status-{_FAILED}")
        return await worker.ask(b"POST", path, self._headers, body)


class Roles:
    """Which of a group's servers are for which step; "any" answers whole requests.

    Where one of either kind is well, requests go through both; else, or where the first step fails, they are
    placed like everywhere. Of prefill servers the router names one, by what it holds and has to do; of decode
    servers the one with the fewest requests under way is asked: they hardly compute prompts.
    """

    def __init__(self, urls: Sequence[str], roles: Sequence[Role], on_event: OnEvent) -> None:
        self._roles = dict(zip(urls, roles, strict=True))
        self._on_event = on_event
        self._breaker = Breaker(_FAILURES, _PAUSE_S)

    def of(self, worker: Worker) -> Role:
        """What this one is for."""
        return self._roles.get(worker.url, "any")

    async def prefilled(
        self,
        workers: Sequence[Worker],
        router: Router | None,
        ask: Ask | None,
        path: bytes,
        headers: Headers,
        body: bytes,
    ) -> Handover | None:
        """The first step. None where it isn't to be taken, or has failed: then the request is one like
        any other."""
        now = time.monotonic()
        able = [self._able(workers, role, now) for role in ("prefill", "decode")]
        if not all(able) or path not in _PATHS or not self._breaker.would_allow(now):
            return None
        wanted = prefill_body(body)
        if wanted is None or not self._breaker.allows(now):
            return None
        worker, route = _placed(_ready(able[0], now), router, ask, now)
        headers = _named(headers)
        answer = None
        try:
            answer = await self._ask(worker, path, headers, wanted)
        finally:
            _report(router, route, answer)
        if answer is None:
            return None
        decoders = _ready(self._able(workers, "decode", time.monotonic()), time.monotonic())
        if not decoders:
            return None
        chosen = min(decoders, key=lambda one: one.client.in_flight)
        params, usage = bytes(answer.kv_transfer_params), usage_of(answer.usage)
        return Handover(worker, chosen, headers, params, self, route, usage)

    def succeeded(self) -> None:
        """Both steps came off."""
        self._breaker.succeeded()

    def failed(self, worker: Worker, kind: str) -> None:
        """A step didn't come off there."""
        if kind in _UNFIT:
            self._breaker.failed(time.monotonic())
        self._on_event("handover-failed", {"worker": worker.name, "kind": kind})

    def _able(self, workers: Sequence[Worker], role: Role, now: float) -> list[Worker]:
        """Who of that role may be asked, or might be tried again."""
        return [
            one
            for one in workers
            if self._roles.get(one.url) == role
            and not (one.is_draining or one.is_gated)
            and now >= one.avoided_until
            and (one.breaker.is_closed or (not one.is_probed and one.breaker.would_allow(now)))
        ]

    async def _ask(
        self, worker: Worker, path: bytes, headers: Headers, body: bytes
    ) -> _Prefilled | None:
        """Its answer; None where it has none that could be handed over."""
        asked = [one for one in headers if one[0].lower() not in _UNWANTED]
        try:
            response = await worker.ask(b"POST", path, asked, body)
            kind, answer = await _read(response)
        except EngineError as error:
            kind, answer = error.kind, None
        if kind:
            self.failed(worker, kind)
        return answer


def prefill_body(body: bytes) -> bytes | None:
    """What the prefill server is asked; None where the request can't be taken in two steps.

    >>> prefill_body(b'{"prompt": "a", "stream": true, "n": 1}')[:47]
    b'{"prompt":"a","stream":false,"n":1,"max_tokens"'
    """
    try:
        told = _BODY.decode(body)
        fields = _FIELDS.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if told.kv_transfer_params or bytes(told.n) not in {b"", b"1", b"null"}:
        return None
    for name in _DROPPED:
        fields.pop(name, None)
    fields["stream"] = msgspec.Raw(b"false")
    fields["max_tokens"] = msgspec.Raw(b"1")
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = msgspec.Raw(b"1")
    fields[FIELD] = msgspec.Raw(_WANTED)
    return msgspec.json.encode(fields)


async def _read(response: Response) -> tuple[str, _Prefilled | None]:
    """An answer that can be handed over, or what is wrong with it. Neither where nothing is: the answer was at
    its end after one token, so that its server kept nothing, or the request is no good."""
    try:
        data = await response.read(_MOST_BYTES)
    finally:
        response.close()
    if response.status in _CLIENTS:
        return "", None
    if response.status != 200:
        return f"status-{response.status}", None
    try:
        answer = _PREFILLED.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return "malformed", None
    if bytes(answer.kv_transfer_params).startswith(b"{"):
        return "", answer
    is_ended = bool(answer.choices) and answer.choices[0].finish_reason == "stop"
    return "" if is_ended else "no-kv-transfer", None


def _ready(able: Sequence[Worker], now: float) -> list[Worker]:
    """Those that are well; or one alone that may be well again, which this request finds out."""
    well = []
    for one in able:
        if one.breaker.is_closed:
            well.append(one)
        elif one.may_be_tried(now):
            return [one]
    return well


def _placed(
    workers: Sequence[Worker], router: Router | None, ask: Ask | None, now: float
) -> tuple[Worker, Route | None]:
    if router is None or ask is None:
        return min(workers, key=lambda one: one.client.in_flight), None
    route = router.place(ask, [one.number for one in workers], now)
    router.go(route.ticket, now)
    return next(one for one in workers if one.number == route.ticket.worker), route


def _report(router: Router | None, route: Route | None, answer: _Prefilled | None) -> None:
    if router is None or route is None:
        return
    now = time.monotonic()
    if answer is None:
        router.failed(route.ticket, now)
        return
    router.began(route.ticket, now)
    router.ended(route.ticket, usage_of(answer.usage), now)


def _named(headers: Headers) -> Headers:
    """With a name by which both servers know the request."""
    if any(name.lower() == b"x-request-id" for name, _ in headers):
        return headers
    return [*headers, (b"x-request-id", os.urandom(16).hex().encode())]
