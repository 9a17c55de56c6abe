"""Paths that are passed through: neither looked up, nor joined, nor stored."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from preheat.core.stats import Counters
from preheat.core.types import RequestId
from preheat.engines import Engine
from preheat.errors import EngineError
from preheat.gateway import heads
from preheat.gateway.flights import BUFFER_BYTES
from preheat.gateway.intake import Intake
from preheat.gateway.upstreams import (
    Upstreams,
    header_of,
    shown_of,
)
from preheat.telemetry.logs import Log
from preheat.transport.client import Response
from preheat.transport.server import Exchange
from preheat.wire.openai import decode, encode


class _Named(msgspec.Struct):
    model: str = ""


_MODEL: Final = msgspec.json.Decoder(_Named)
_AT_ONCE_BYTES: Final = 65_536
_REPEATABLE: Final = frozenset({b"GET", b"HEAD"})  # all else may do something, and do it twice
_LIST_WITHIN_S: Final = 2.0


class Relay:
    """Sends a request on as it is and its answer back as it comes; owns a task for each."""

    def __init__(
        self,
        intake: Intake,
        upstreams: Upstreams,
        counters: Counters,
        log: Log,
        on_bug: Callable[[Exception], None],
    ) -> None:
        self._intake = intake
        self._upstreams = upstreams
        self._counters = counters
        self._log = log
        self._on_bug = on_bug
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, exchange: Exchange) -> None:
        """Start passing it through. Raises RequestError where nobody may ask that."""
        self._intake.admit(exchange)
        is_list = exchange.path == b"/v1/models" and exchange.method in _REPEATABLE
        task = asyncio.get_running_loop().create_task(
            self._guard(exchange, self._list if is_list else self._pass)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_gone = task.cancel

    async def aclose(self) -> None:
        """End them all."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _guard(
        self, exchange: Exchange, answer: Callable[[Exchange, RequestId], Awaitable[None]]
    ) -> None:
        """The edge of a request: whatever happens in it, the client is told."""
        started_at = time.monotonic()
        request_id = self._intake.next_id()
        try:
            await answer(exchange, request_id)
            self._counters.latency["pass"].observe(time.monotonic() - started_at)
        except EngineError as error:
            self._counters.bump(self._counters.engine_errors, error.kind)
            self._log.event(
                "engine_failed", request=request_id.decode(), engine=error.worker, kind=error.kind
            )
            _tell(exchange, *heads.engine_error(error, request_id))
        except Exception as bug:  # noqa: BLE001  the edge of a request
            self._on_bug(bug)
            _tell(exchange, *heads.internal_error(request_id))
        finally:
            exchange.on_gone = exchange.on_writable = None

    async def _pass(self, exchange: Exchange, request_id: RequestId) -> None:
        model = model_of(exchange)
        engine = self._upstreams.engine_for(model)
        path, body = self._upstreams.named_for(exchange.path, exchange.body, model)
        body = self._upstreams.marked(path, body, engine)
        path = path.removeprefix(b"/v1")
        if exchange.query:
            path += b"?" + exchange.query
        headers = self._upstreams.passed_headers(exchange.headers)
        worker, response = engine.name, None
        try:
            response = await engine.send(
                exchange.method,
                path,
                headers,
                body,
                is_repeatable=exchange.method in _REPEATABLE,
                tenant=self._intake.admit(exchange),
            )
            worker = response.worker or worker
            lines = heads.forwarded(
                "fwd=bypass; detail=bypass-path", request_id, worker, cached_tokens=None
            )
            head = heads.status_line(response.status) + shown_of(response).lines + lines
            await _copy(response, exchange, head)
        except EngineError as error:
            error.worker = error.worker or worker
            raise
        finally:
            if response is not None:
                response.close()

    async def _list(self, exchange: Exchange, request_id: RequestId) -> None:
        """The models of every engine that answers in time, and those configured by name."""
        engines = self._upstreams.engines.values()
        lists = await asyncio.gather(*(_models_of(engine) for engine in engines))
        models = {
            name: {"id": name, "object": "model", "created": 0, "owned_by": model.engine}
            for name, model in self._upstreams.models.items()
        }
        if not models and all(isinstance(found, EngineError) for found in lists):
            raise next(found for found in lists if isinstance(found, EngineError))
        for entry in (entry for found in lists if isinstance(found, list) for entry in found):
            models.setdefault(str(entry.get("id")), entry)
        head = heads.status_line(200) + heads.JSON + heads.local(request_id)
        exchange.reply(head, encode({"object": "list", "data": list(models.values())}))


async def _models_of(engine: Engine) -> list[dict[str, Any]] | EngineError:
    try:
        async with asyncio.timeout(_LIST_WITHIN_S):
            response = await engine.send(b"GET", b"/models", [], b"")
            try:
                data = decode(await response.read(BUFFER_BYTES)).get("data")
            finally:
                response.close()
    except EngineError as error:
        error.worker = error.worker or engine.name
        return error
    except (TimeoutError, ValueError):
        return EngineError(
            f"engine {engine.name} told no list of its models", kind="protocol", worker=engine.name
        )
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


def model_of(exchange: Exchange) -> str:
    """The model that a request names: in its JSON body, or after /v1/models/."""
    if exchange.path.startswith(b"/v1/models/"):
        return exchange.path.removeprefix(b"/v1/models/").decode("latin-1")
    if not exchange.body.lstrip().startswith(b"{"):
        return ""
    try:
        return _MODEL.decode(exchange.body).model
    except msgspec.MsgspecError:
        return ""


async def _copy(response: Response, exchange: Exchange, head: bytes) -> None:
    """Body pieces as they come, no faster than the client takes them."""
    length = header_of(response, b"content-length")
    if length.isdigit() and int(length) <= _AT_ONCE_BYTES:
        exchange.reply(head, await response.read(_AT_ONCE_BYTES))
        return
    exchange.begin(head)
    writable = asyncio.Event()
    exchange.on_writable = writable.set
    async for piece in response:
        exchange.write(piece)
        if not exchange.is_writable:
            writable.clear()
            await writable.wait()
    exchange.end()


def _tell(exchange: Exchange, head: bytes, body: bytes) -> None:
    if exchange.is_started:
        exchange.cut()
    else:
        exchange.reply(head, body)
