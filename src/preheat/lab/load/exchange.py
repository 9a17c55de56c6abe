"""One request and what came of it, as its client saw it."""

import asyncio
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final

import msgspec

from preheat.errors import EngineError
from preheat.transport.client import Client, Response
from preheat.wire.openai import DONE
from preheat.wire.sse import EventTooLargeError, SseDecoder, data_of

_ANSWER_BYTES: Final = 64 * 1024 * 1024
_LAYERS: Final = {"hit": "exact", "collapsed": "join"}
_NO_TEXT: Final[tuple[Any, ...]] = ("", None, [], {})
# JSON's numbers may have hundreds of digits; what reads ours as doubles knows no larger ones.
_MOST_TOKENS: Final = 2**53
# Beside chunks with choices: the events of /v1/responses and /v1/messages that matter here.
_FIRST_TYPES: Final = frozenset({"response.output_text.delta", "content_block_delta"})
_LAST_TYPES: Final = frozenset({"response.completed", "message_stop"})


class Outcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What came of one request. Times in seconds, from the moment of sending.

    `ttft_s` ends with the first chunk that has content; a whole answer has all its content at
    once, so there it is `e2e_s`. `tpot_s` is of streams that told their usage: from the first
    content to the end, over the output tokens but the first. `error` is a stable word, empty for
    a complete answer. `number` is its place in the order of sending, `run` which of two runs it is
    of. `worker` and `route` are which server of several our gateway asked, and why.
    """

    id: str
    at_s: float
    number: int = 0
    run: str = ""
    late_s: float = 0.0
    status: int = 0
    error: str = ""
    layer: str = ""
    detail: str = ""
    cache_status: str = ""
    worker: str = ""
    route: str = ""
    ttft_s: float | None = None
    e2e_s: float | None = None
    tpot_s: float | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    is_good: bool = False


class _Choice(msgspec.Struct):
    delta: Any = None
    text: Any = None


class _Part(msgspec.Struct):
    """What is read of a chunk or of a whole body."""

    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    type: Any = None
    message: Any = None
    response: Any = None


_PARTS: Final = msgspec.json.Decoder(_Part)


async def exchange(
    client: Client,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    outcome: Outcome,
    *,
    timeout_s: float,
) -> None:
    """Send it and fill in the outcome. Whatever the server does is an outcome, not an exception."""
    began_at = perf_counter()
    response: Response | None = None
    try:
        async with asyncio.timeout(timeout_s):
            response = await client.request(b"POST", target, headers, body)
            outcome.status = response.status
            _read_head(dict(response.headers), outcome)
            if not 200 <= response.status < 300:
                await response.read(_ANSWER_BYTES)
                outcome.error = f"status-{response.status}"
            elif _is_stream(response):
                await _read_stream(response, outcome, began_at)
            else:
                _read_whole(await response.read(_ANSWER_BYTES), outcome)
                outcome.ttft_s = perf_counter() - began_at
    except TimeoutError:
        outcome.error = "timeout"
    except EngineError as error:
        outcome.error = error.kind
    except EventTooLargeError:
        outcome.error = "too-large"
    finally:
        if response is not None:
            response.close()
    outcome.e2e_s = perf_counter() - began_at
    _set_tpot(outcome)


def _is_stream(response: Response) -> bool:
    kind = next((value for name, value in response.headers if name == b"content-type"), b"")
    return kind.lower().startswith(b"text/event-stream")


def _read_head(headers: Mapping[bytes, bytes], outcome: Outcome) -> None:
    """Where the answer is from: `Cache-Status` (RFC 9211), and what our own gateway adds."""
    outcome.worker = headers.get(b"x-preheat-worker", b"").decode("latin-1")
    outcome.route = headers.get(b"x-preheat-route", b"").decode("latin-1")
    text = headers.get(b"cache-status", b"").decode("latin-1")
    if not text:
        return
    outcome.cache_status = text
    # The member next to the client is the last one.
    members = [one.strip() for one in text.rpartition(",")[2].split(";")[1:]]
    named = headers.get(b"x-preheat-layer", b"").decode("latin-1")
    found = next((_LAYERS[one] for one in members if one in _LAYERS), "")
    outcome.layer = named or found or ("forward" if "fwd=" in text else "")
    outcome.detail = next(
        (one.removeprefix("detail=") for one in members if one.startswith("detail=")), ""
    )


def _read_whole(body: bytes, outcome: Outcome) -> None:
    part = _decoded(body)
    if part is None:
        outcome.error = "not-json"
    elif part.error is not None:
        outcome.error = "error-body"
    else:
        _note_usage(part.usage, outcome)


async def _read_stream(response: Response, outcome: Outcome, began_at: float) -> None:
    decoder = SseDecoder()
    is_whole = False
    async for piece in response:
        for block in decoder.feed(piece):
            data = data_of(block)
            if data is None:
                continue
            if data == DONE:
                is_whole = True
                continue
            part = _decoded(data)
            if part is None or part.error is not None or part.type == "error":
                outcome.error = "not-json" if part is None else "error-event"
                return
            if outcome.ttft_s is None and _has_content(part):
                outcome.ttft_s = perf_counter() - began_at
            is_whole = is_whole or _is_one_of(part.type, _LAST_TYPES)
            for holder in (part.message, part.response, {"usage": part.usage}):
                _note_usage(holder.get("usage") if isinstance(holder, dict) else None, outcome)
    if not is_whole:
        outcome.error = "no-done"
    elif outcome.ttft_s is None:  # a complete answer of no words: its first news is its end
        outcome.ttft_s = perf_counter() - began_at


def _decoded(data: bytes) -> _Part | None:
    try:
        return _PARTS.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _is_one_of(kind: Any, known: frozenset[str]) -> bool:
    return isinstance(kind, str) and kind in known


def _has_content(part: _Part) -> bool:
    """Whether it brings anything of the answer itself: text, reasoning or a tool call."""
    for choice in part.choices or ():
        if choice.text not in _NO_TEXT:
            return True
        delta = choice.delta if isinstance(choice.delta, dict) else {}
        if any(value not in _NO_TEXT for name, value in delta.items() if name != "role"):
            return True
    return _is_one_of(part.type, _FIRST_TYPES)


def _note_usage(usage: Any, outcome: Outcome) -> None:
    """Tokens under OpenAI's names, or those of /v1/responses and /v1/messages."""
    if not isinstance(usage, dict):
        return
    for field, names in _USAGE.items():
        value = next((usage[name] for name in names if _is_count(usage.get(name))), None)
        if value is not None:
            setattr(outcome, field, value)
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = usage.get(name)
        if isinstance(details, dict) and _is_count(details.get("cached_tokens")):
            outcome.cached_tokens = details["cached_tokens"]


_USAGE: Final = {
    "input_tokens": ("prompt_tokens", "input_tokens"),
    "output_tokens": ("completion_tokens", "output_tokens"),
    "cached_tokens": ("cache_read_input_tokens",),
}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS


def _set_tpot(outcome: Outcome) -> None:
    tokens, ttft_s, e2e_s = outcome.output_tokens, outcome.ttft_s, outcome.e2e_s
    if outcome.error:
        outcome.ttft_s = None  # half an answer's first token isn't an answer's first token
    elif tokens is not None and tokens > 1 and ttft_s is not None and e2e_s is not None:
        outcome.tpot_s = (e2e_s - ttft_s) / (tokens - 1)
