"""A deterministic engine without a model, over HTTP: for tests, benchmarks and first tries.

    python -m preheat.engines.fake --listen 127.0.0.1:9000

It speaks chat, completions, embeddings, responses, messages and models, counts tokens (one a
byte of the rendered prompt), and has a KV cache: a block LRU of stated capacity (`fake_kv`).
Unasked it answers "A1", "A2", … so that a wrong cache hit shows as a repeated number.
For routers that ask a worker for tokens before they choose one it has vLLM's
`/v1/chat/completions/render` and `/tokenize` (a token for four bytes there, as real ones have;
neither is a call, nor is it in the log).

`POST /fake/script` sets what it says next:

    {"replies": [REPLY, …], "default": "count" | "echo" | REPLY, "delay_s": 0, "flaws": {…}}

Each call takes the next reply, then the default; `fake_flaws` has the flaws. A REPLY is an object with any of

    content, finish_reason, tool_calls [{id, name, arguments}], reasoning, usage, pieces (how many
    deltas a streamed content has), message (more fields of the message), fields (more of the body)
    sse: the events of a stream, verbatim: {"delta": …, "finish_reason": …}, whole chunks, "[DONE]"
    status, body, headers, content_type: another answer altogether
    delay_s, chunk_delay_s
    fault: "connect_error" | "reset" | "hang" | "garbage" | "reset_after" | "end_after" |
           "half_event" (the last three after `after` pieces, default 1)

`GET /fake/log` tells what came: calls, running, cancelled, most_at_once, adapters, adapter_loads (that were
asked for), requests (the last 1,000, bodies in base64). `POST /fake/reset` forgets all of it.
"""

import argparse
import asyncio
import base64
import hashlib
import json
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from preheat.core.slot_desk import Freed
from preheat.core.types import SessionState
from preheat.engines.fake_adapters import LOAD, UNLOAD, Answer, FakeAdapters, unknown
from preheat.engines.fake_flaws import Flaws
from preheat.engines.fake_kv import BlockLru
from preheat.engines.openai import OpenAi
from preheat.engines.warmth import Hot, Proven, Warmed
from preheat.engines.worker import WorkerState
from preheat.errors import EngineError
from preheat.transport.client import Response
from preheat.transport.server import Exchange, HttpServer, Limits, Refusal

_LOGGED: Final = 1_000
_JSON: Final = b"Content-Type: application/json\r\n"
_EVENTS: Final = b"Content-Type: text/event-stream\r\n"
_PLAIN: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
_DIMENSIONS: Final = 8
_OF_ADAPTERS: Final = frozenset({LOAD, UNLOAD})
_RENDERED: Final = frozenset({"/v1/chat/completions/render", "/tokenize"})


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One scripted answer; see the module's docstring."""

    content: str | None = None
    finish_reason: str = "stop"
    tool_calls: list[dict[str, Any]] = []
    reasoning: str | None = None
    usage: dict[str, Any] | None = None
    pieces: int = 1
    message: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    sse: list[Any] | None = None
    status: int = 200
    body: Any = None
    headers: dict[str, str] = {}
    content_type: str = "application/json"
    delay_s: float | None = None
    chunk_delay_s: float = 0.0
    fault: str = ""
    after: int = 1


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """What it says next."""

    replies: list[Reply] = []
    default: str | Reply = "count"
    delay_s: float = 0.0
    flaws: Flaws = Flaws()


class FakeEngine:
    """The script, the KV cache, and what has been asked."""

    def __init__(
        self,
        *,
        capacity_blocks: int = 16_384,
        logged: int = _LOGGED,
        script: Script | None = None,
    ) -> None:
        self._kv = BlockLru(capacity_blocks) if capacity_blocks else None
        self._adapters = FakeAdapters()
        self._logged = logged
        self._script = script or Script()
        self._forget()
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        path = exchange.path.decode("latin-1")
        if path.startswith("/fake/"):
            self._control(exchange, path)
        elif path == "/health":
            exchange.reply(_head(200), b"{}")
        elif self._script.flaws.is_refused(exchange.headers):
            exchange.reply(_head(401), _encode({"error": {"message": "Unauthorized"}}))
        elif path == "/v1/models":
            exchange.reply(_head(200), _encode(self._model_list()))
        elif path == "/metrics" and self._script.flaws.metrics:
            counted = self._queried_tokens, self._hit_tokens, self._running
            exchange.reply(_PLAIN, self._script.flaws.metrics_page(*counted))
        elif path in _RENDERED:
            exchange.reply(_head(200), _tokens_of(exchange.body))
        elif exchange.method == b"GET" and not path.startswith("/v1/"):
            exchange.reply(_head(404), b"{}")  # who asks what it is asks for nothing
        else:
            task = asyncio.get_running_loop().create_task(self._answer(exchange, path))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            exchange.on_gone = task.cancel

    def _forget(self) -> None:
        self._calls = 0
        self._cancelled = 0
        self._running = 0
        self._most_at_once = 0
        self._queried_tokens = self._hit_tokens = 0
        self._requests: deque[dict[str, Any]] = deque(maxlen=self._logged)

    def _control(self, exchange: Exchange, path: str) -> None:
        if path == "/fake/script":
            try:
                self._script = msgspec.json.decode(exchange.body, type=Script)
            except msgspec.MsgspecError as error:
                exchange.reply(_head(400), _encode({"error": str(error)}))
                return
        elif path == "/fake/reset":
            self._forget()
            if self._kv is not None:
                self._kv.clear()
            self._adapters.forget()
            self._script = Script()
        elif path != "/fake/log":
            exchange.reply(_head(404), b"{}")
            return
        log = {
            "calls": self._calls,
            "running": self._running,
            "cancelled": self._cancelled,
            "most_at_once": self._most_at_once,
            "adapters": list(self._adapters.paths),
            "adapter_loads": self._adapters.loads,
            "requests": list(self._requests),
        }
        exchange.reply(_head(200), _encode(log))

    async def _answer(self, exchange: Exchange, path: str) -> None:
        self._calls += 1
        self._running += 1
        self._most_at_once = max(self._most_at_once, self._running)
        if self._logged:
            self._requests.append(_logged(exchange, path))
        try:
            await self._perform(exchange, path, self._calls)
        except asyncio.CancelledError:
            self._cancelled += 1
            raise
        except Exception as bug:  # noqa: BLE001  the edge of a request: whoever asks is told
            exchange.reply(_head(500), _encode({"error": {"message": repr(bug)}}))
        finally:
            self._running -= 1
            exchange.on_gone = exchange.on_writable = None

    async def _perform(self, exchange: Exchange, path: str, number: int) -> None:
        try:
            asked = json.loads(exchange.body)
        except ValueError:
            asked = {}
        if not isinstance(asked, dict):
            asked = {}
        flaws = self._script.flaws
        if flaws.loads_adapters and path in _OF_ADAPTERS:
            status, said = await self._adapt(path, asked)
            exchange.reply(_head(status), said.encode() if isinstance(said, str) else _encode(said))
            return
        if flaws.loads_adapters and asked.get("model") not in self._model_names():
            status, said = unknown(asked.get("model"))
            exchange.reply(_head(status), _encode(said))
            return
        reply = self._next_reply(asked, number)
        await asyncio.sleep(self._script.delay_s if reply.delay_s is None else reply.delay_s)
        if reply.fault in {"connect_error", "reset"}:
            exchange.reset()
        elif reply.fault == "hang":
            await asyncio.Event().wait()
        elif reply.fault == "garbage":
            exchange.write(b"this is no HTTP\r\n\r\n")
            exchange.cut()
        elif reply.body is not None or reply.status != 200:
            body = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
            exchange.reply(_head(reply.status, reply), body.encode())
        else:
            await self._tell(exchange, path, asked, reply, number)

    async def _adapt(self, path: str, asked: dict[str, Any]) -> Answer:
        flaws = self._script.flaws
        if path == UNLOAD:
            return self._adapters.unload(asked)
        return await self._adapters.load(
            asked, most=flaws.most_adapters, load_s=flaws.adapter_load_s
        )

    def _model_list(self) -> dict[str, Any]:
        flaws = self._script.flaws
        listed = flaws.model_list()
        listed["data"] += self._adapters.listed(flaws.models[0], flaws.owned_by)
        return listed

    def _model_names(self) -> set[str]:
        return {*self._script.flaws.models, *self._adapters.paths}

    def _next_reply(self, asked: dict[str, Any], number: int) -> Reply:
        if self._script.replies:
            return self._script.replies.pop(0)
        default = self._script.default
        if isinstance(default, Reply):
            return default
        return Reply(content=f"A{number}" if default == "count" else f"echo: {_last_text(asked)}")

    async def _tell(
        self, exchange: Exchange, path: str, asked: dict[str, Any], reply: Reply, number: int
    ) -> None:
        prompt = _rendered(asked)
        # A token a byte.
        adapter = model if (model := str(asked.get("model"))) in self._adapters.paths else ""
        cached_tokens = self._kv.serve(list(prompt), adapter) if self._kv is not None else 0
        self._queried_tokens += len(prompt) if self._kv is not None else 0
        self._hit_tokens += cached_tokens
        flaws = self._script.flaws
        if flaws.token_s:
            await asyncio.sleep(flaws.token_s * (len(prompt) - cached_tokens))
        refused = flaws.refused_field(asked)
        usage = flaws.told(reply.usage or _usage(prompt, reply, cached_tokens))
        shape = _SHAPES.get(path)
        if shape is None:
            exchange.reply(_head(404), _encode({"error": {"message": "no such path", "code": 404}}))
        elif refused:
            message = f"Extra inputs are not permitted: {refused}"
            exchange.reply(_head(400), _encode({"error": {"message": message, "code": 400}}))
        elif path in _STREAMED and (asked.get("stream") or reply.sse is not None):
            await self._stream(exchange, path, asked, reply, usage, number)
        else:
            body = shape(asked, reply, usage, number)
            if flaws.usage == "never":
                body.pop("usage", None)
            exchange.reply(_head(200, reply), _encode(body))

    async def _stream(
        self,
        exchange: Exchange,
        path: str,
        asked: dict[str, Any],
        reply: Reply,
        usage: dict[str, Any],
        number: int,
    ) -> None:
        wants_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        wants_usage = wants_usage and self._script.flaws.usage == "told"
        extra = b"".join(b"%b: %b\r\n" % (k.encode(), v.encode()) for k, v in reply.headers.items())
        exchange.begin(b"HTTP/1.1 200 OK\r\n" + _EVENTS + extra)
        for position, event in enumerate(
            _events(path, asked, reply, usage, number, wants_usage=wants_usage)
        ):
            if (
                reply.fault in {"reset_after", "end_after", "half_event"}
                and position == reply.after
            ):
                self._break(exchange, reply.fault)
                return
            if position and reply.chunk_delay_s:
                await asyncio.sleep(reply.chunk_delay_s)
            exchange.write(b"data: %b\n\n" % event)
            if not exchange.is_writable:
                writable = asyncio.Event()
                exchange.on_writable = writable.set
                await writable.wait()
        exchange.end()

    def _break(self, exchange: Exchange, fault: str) -> None:
        if fault == "reset_after":
            exchange.cut()
        elif fault == "half_event":
            exchange.write(b'data: {"id":"x","choi')
            exchange.cut()
        else:
            exchange.end()


class Fake:
    """The fake engine as an engine of the gateway's own: a server of it on a free port."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inject_usage = True
        self._server = HttpServer(FakeEngine().handle, _refuse, Limits())
        self._engine: OpenAi | None = None

    async def start(self) -> None:
        """Listen."""
        port = await self._server.listen("127.0.0.1", 0)
        self._engine = OpenAi(self.name, f"http://127.0.0.1:{port}")

    async def send(
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
    ) -> Response:
        """Ask it over HTTP, like any other."""
        if self._engine is None:
            raise EngineError(f"engine {self.name} isn't started", kind="start")
        return await self._engine.send(
            method,
            path,
            headers,
            body,
            is_repeatable=is_repeatable,
            tenant=tenant,
            session=session,
            state=state,
        )

    async def erase(self, tenant: str) -> int:  # noqa: ARG002  all alike
        """It has no files."""
        return 0

    async def over(self, tenant: str, session: str) -> Freed:  # noqa: ARG002  all alike
        """It keeps nothing for anybody."""
        return Freed()

    async def warm(self, hot: Hot, workers: Sequence[str], within_s: float) -> list[Warmed]:
        """Have it warm there."""
        return [] if self._engine is None else await self._engine.warm(hot, workers, within_s)

    async def prove(self, hot: Hot, workers: Sequence[str], within_s: float) -> list[Proven]:
        """Whether it is."""
        return [] if self._engine is None else await self._engine.prove(hot, workers, within_s)

    @property
    def is_ready(self) -> bool:
        """Whether it listens."""
        return self._engine is not None

    def workers(self) -> list[WorkerState]:
        """Itself, as it is asked."""
        return [] if self._engine is None else self._engine.workers()

    def set_draining(self, worker: str, *, is_draining: bool) -> bool:
        """Let it take nothing more, or again."""
        if self._engine is None:
            return False
        return self._engine.set_draining(worker, is_draining=is_draining)

    async def retire(self) -> None:
        """Nobody takes over from it while it runs."""
        await self.aclose()

    async def aclose(self) -> None:
        """End the server."""
        if self._engine is not None:
            await self._engine.aclose()
        await self._server.aclose()


def _logged(exchange: Exchange, path: str) -> dict[str, Any]:
    return {
        "path": path,
        "method": exchange.method.decode(),
        "headers": {k.decode(): v.decode("latin-1") for k, v in exchange.headers.items()},
        "body_b64": base64.b64encode(exchange.body).decode(),
    }


def _head(status: int, reply: Reply | None = None) -> bytes:
    content_type = reply.content_type.encode() if reply else b"application/json"
    lines = b"".join(
        b"%b: %b\r\n" % (name.encode(), value.encode())
        for name, value in (reply.headers if reply else {}).items()
    )
    return b"HTTP/1.1 %d Fake\r\nContent-Type: %b\r\n%b" % (status, content_type, lines)


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _rendered(asked: dict[str, Any]) -> bytes:
    """The prompt, as a chat template would write it."""
    messages = asked.get("messages")
    if not isinstance(messages, list):
        return str(asked.get("prompt") or asked.get("input") or "").encode("utf-8", "replace")
    lines = [f"<{m.get('role')}>{m.get('content')}" for m in messages if isinstance(m, dict)]
    return "\n".join(lines).encode("utf-8", "replace")


def _tokens_of(body: bytes) -> bytes:
    """What vLLM answers where only the prompt's tokens are asked for, in either form's fields."""
    try:
        asked = json.loads(body)
    except ValueError:
        asked = {}
    prompt = _rendered(asked if isinstance(asked, dict) else {})
    tokens = [int.from_bytes(prompt[at : at + 4]) % 128_000 for at in range(0, len(prompt), 4)]
    return _encode({"token_ids": tokens, "tokens": tokens, "count": len(tokens)})


def _last_text(asked: dict[str, Any]) -> str:
    messages = asked.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        return str(messages[-1].get("content"))
    return str(asked.get("prompt") or asked.get("input") or "")


def _usage(prompt: bytes, reply: Reply, cached_tokens: int) -> dict[str, Any]:
    told = (reply.content or "") + (reply.reasoning or "")
    output_tokens = max(1, len(told.encode("utf-8", "replace")) // 4)
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": output_tokens,
        "total_tokens": len(prompt) + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.get("id", f"call_{position}"),
                "type": "function",
                "function": {"name": call.get("name"), "arguments": call.get("arguments", "")},
            }
            for position, call in enumerate(reply.tool_calls)
        ]
    return {**message, **reply.message}


def _base(kind: str, asked: dict[str, Any], number: int) -> dict[str, Any]:
    return {
        "id": f"fake-{number}",
        "object": kind,
        "created": 1_700_000_000 + number,
        "model": asked.get("model") or "fake",
        "system_fingerprint": "fp_fake",
    }


def _chat(
    asked: dict[str, Any], reply: Reply, usage: dict[str, Any], number: int
) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": _message(reply),
            "logprobs": None,
            "finish_reason": reply.finish_reason,
        }
        for index in range(_choice_count(asked))
    ]
    return {
        **_base("chat.completion", asked, number),
        "choices": choices,
        "usage": usage,
        **reply.fields,
    }


def _completion(
    asked: dict[str, Any], reply: Reply, usage: dict[str, Any], number: int
) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": reply.content or "",
            "logprobs": None,
            "finish_reason": reply.finish_reason,
        }
        for index in range(_choice_count(asked))
    ]
    return {
        **_base("text_completion", asked, number),
        "choices": choices,
        "usage": usage,
        **reply.fields,
    }


def _choice_count(asked: dict[str, Any]) -> int:
    count = asked.get("n")
    return count if isinstance(count, int) and 1 <= count <= 16 else 1


def _embeddings(
    asked: dict[str, Any], reply: Reply, usage: dict[str, Any], number: int
) -> dict[str, Any]:
    texts = asked.get("input")
    texts = texts if isinstance(texts, list) else [texts]
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(str(text))}
        for index, text in enumerate(texts)
    ]
    return {"object": "list", "data": data, "model": asked.get("model"), "usage": usage}


def _vector(text: str) -> list[float]:
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return [byte / 255 for byte in digest[:_DIMENSIONS]]


def _responses(
    asked: dict[str, Any], reply: Reply, usage: dict[str, Any], number: int
) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "output_text", "text": reply.content, "annotations": []}
    return {
        "id": f"resp_fake{number}",
        "object": "response",
        "status": "completed",
        "model": asked.get("model"),
        "output": [{"type": "message", "role": "assistant", "content": [text]}],
        "usage": usage,
    }


def _messages(
    asked: dict[str, Any], reply: Reply, usage: dict[str, Any], number: int
) -> dict[str, Any]:
    is_warm_up = asked.get("max_tokens") == 0
    return {
        "id": f"msg_fake{number}",
        "type": "message",
        "role": "assistant",
        "model": asked.get("model"),
        "content": [] if is_warm_up else [{"type": "text", "text": reply.content}],
        "stop_reason": "max_tokens" if is_warm_up else "end_turn",
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": 0 if is_warm_up else usage["completion_tokens"],
            "cache_creation_input_tokens": usage["prompt_tokens"],
            "cache_read_input_tokens": 0,
        },
    }


_SHAPES: Final = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embeddings,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
}
_STREAMED: Final = frozenset({"/v1/chat/completions", "/v1/completions"})


def _events(
    path: str,
    asked: dict[str, Any],
    reply: Reply,
    usage: dict[str, Any],
    number: int,
    *,
    wants_usage: bool,
) -> Iterator[bytes]:
    is_chat = path == "/v1/chat/completions"
    base = _base("chat.completion.chunk" if is_chat else "text_completion", asked, number)
    base |= reply.fields
    if reply.sse is not None:
        for event in reply.sse:
            yield (
                event.encode() if isinstance(event, str) else _encode({**base, **_as_chunk(event)})
            )
        return
    for index in range(_choice_count(asked)):
        for choice in _chat_choices(reply) if is_chat else _text_choices(reply):
            yield _encode({**base, "choices": [{"index": index, **choice}]})
    if wants_usage:
        yield _encode({**base, "choices": [], "usage": usage})
    yield b"[DONE]"


def _as_chunk(event: dict[str, Any]) -> dict[str, Any]:
    if "choices" in event:
        return event
    return {"choices": [{"index": 0, "finish_reason": None, **event}]}


def _chat_choices(reply: Reply) -> Iterator[dict[str, Any]]:
    message = _message(reply)
    content, calls = message.pop("content"), message.pop("tool_calls", [])
    reasoning = message.pop("reasoning_content", None)
    going_on = {"logprobs": None, "finish_reason": None}
    yield {"delta": {**message, "content": None if calls else ""}, **going_on}
    if reasoning is not None:
        yield {"delta": {"reasoning_content": reasoning}, **going_on}
    for piece in _cut(content or "", reply.pieces):
        yield {"delta": {"content": piece}, **going_on}
    for position, call in enumerate(calls):
        yield {"delta": {"tool_calls": [{"index": position, **call}]}, **going_on}
    yield {"delta": {}, "logprobs": None, "finish_reason": reply.finish_reason}


def _text_choices(reply: Reply) -> Iterator[dict[str, Any]]:
    for piece in _cut(reply.content or "", reply.pieces):
        yield {"text": piece, "logprobs": None, "finish_reason": None}
    yield {"text": "", "logprobs": None, "finish_reason": reply.finish_reason}


def _cut(text: str, pieces: int) -> list[str]:
    size = max(1, -(-len(text) // max(1, pieces)))
    return [text[start : start + size] for start in range(0, len(text), size)]


def _refuse(refusal: Refusal) -> tuple[bytes, bytes]:
    return _head(refusal.status), _encode({"error": {"message": refusal.message}})


async def _serve(options: argparse.Namespace) -> None:
    default = options.reply if options.reply in {"count", "echo"} else Reply(content=options.reply)
    flaws = msgspec.json.decode(options.flaws, type=Flaws)
    script = Script(default=default, delay_s=options.delay_s, flaws=flaws)
    engine = FakeEngine(
        capacity_blocks=options.capacity_blocks, logged=options.logged, script=script
    )
    server = HttpServer(engine.handle, _refuse, Limits())
    host, _, port = options.listen.rpartition(":")
    taken = await server.listen(host, int(port))
    print(f"fake: listening on http://{host}:{taken}", flush=True)
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    await stopping.wait()
    await server.aclose()


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(
        prog="python -m preheat.engines.fake",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--reply", default="count", metavar="count|echo|TEXT")
    parser.add_argument("--delay-s", type=float, default=0.0, help="before each answer")
    parser.add_argument(
        "--capacity-blocks", type=int, default=16_384, help="of 16 tokens; 0: no KV cache"
    )
    parser.add_argument(
        "--flaws", default="{}", metavar="JSON", help="as in /fake/script, from the start on"
    )
    parser.add_argument(
        "--logged", type=int, default=_LOGGED, help="requests kept for /fake/log; 0: none"
    )
    options = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(options))
    else:
        uvloop.run(_serve(options))


if __name__ == "__main__":
    main()
