"""One request and its answer, as logs of OpenAI's API keep them, whatever they call the parts.

- LiteLLM: its StandardLoggingPayload (what its callbacks, S3 and GCS logs write), alone or as
  `standard_logging_object`, and rows of its table LiteLLM_SpendLogs.
- Helicone: rows of its export (HeliconeRequest, `npx @helicone/export --include-body`).
- OpenAI's batch files, which `vllm run-batch` reads and writes: requests and answers are two files
  that `custom_id` joins.
- Plain: `{"request": {…}, "response": {…}}`, a bare body, or `{"at": …, "body": {…}}` as
  `preheat load` has it, with a time and a session under any usual name.
"""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from preheat.traces.arrival import UNKNOWN
from preheat.traces.moments import seconds_from
from preheat.traces.numbering import tokens_of
from preheat.traces.reader import MOST

Fields = Mapping[str, Raw]

_TIMES: Final = (
    *("at", "timestamp", "created_at", "start_time", "started_at", "startTime", "time", "ts"),
    *("request_time", "datetime"),
)
_SESSIONS: Final = ("session", "session_id", "conversation_id", "thread_id", "trace_id")
_SECONDS: Final = ("duration_s", "latency_s", "service_s", "duration", "latency", "response_time")
_MILLISECONDS: Final = ("duration_ms", "latency_ms", "response_ms", "delay_ms")
_PROMPTS: Final = ("messages", "prompt", "input")
_REDACTED: Final = b"redacted-by-litellm"
_FIELDS: Final = msgspec.json.Decoder(dict[str, Raw])
_ANY: Final = msgspec.json.Decoder()


class Exchange(msgspec.Struct, kw_only=True):
    """A request and what came of it. `body` is empty where the log doesn't have it; `at` is None
    where nothing says when; `custom_id` joins the two halves of a batch's."""

    body: bytes = b""
    at: float | None = None
    id: str = ""
    session: str = ""
    tenant: str = ""
    model: str = ""
    path: str = ""
    input_tokens: int = UNKNOWN
    output_tokens: int = UNKNOWN
    ttft_s: float = UNKNOWN
    service_s: float = UNKNOWN
    stop: str = ""
    custom_id: str = ""
    is_answer_only: bool = False


def exchange_of(fields: Fields) -> Exchange:
    """From a line's fields. Raises ValueError or msgspec.MsgspecError for one that isn't any."""
    for name in ("standard_logging_object", "standard_logging_payload"):
        if name in fields:
            return _litellm(_object(fields[name]))
    if "request_created_at" in fields:
        return _helicone(fields)
    if "startTime" in fields and ("request_id" in fields or "call_type" in fields):
        return _litellm(fields)
    if "custom_id" in fields:
        return _batch(fields)
    return _plain(fields)


# Shapes --------------------------------------------------------------------------------------


def _litellm(fields: Fields) -> Exchange:
    start = seconds_from(_value(fields, "startTime"))
    end = _moment(fields, "endTime")
    first = _moment(fields, "completionStartTime")
    metadata = _maybe_object(fields.get("metadata"))
    exchange = Exchange(
        body=_litellm_body(fields),
        at=start,
        id=_word(fields, "id", "request_id"),
        session=_word(fields, "session_id", "trace_id"),
        tenant=_word(metadata, "user_api_key_hash") or _word(fields, "api_key"),
        model=_word(fields, "model_group", "model"),
        input_tokens=_count(_value(fields, "prompt_tokens")),
        output_tokens=_count(_value(fields, "completion_tokens")),
        # LiteLLM writes the end for an answer that didn't come as a stream.
        ttft_s=first - start if first is not None and end and start <= first < end else UNKNOWN,
        service_s=end - start if end is not None and end >= start else UNKNOWN,
    )
    _answered(exchange, fields.get("response"))
    if _word(fields, "status") == "failure":
        exchange.stop = "failure"
    return exchange


def _litellm_body(fields: Fields) -> bytes:
    """The client's body where the proxy kept it, else one made of its parts."""
    kept = _maybe_object(fields.get("proxy_server_request"))
    kept = _maybe_object(kept.get("body")) or kept
    if any(name in kept for name in _PROMPTS):
        return msgspec.json.encode(kept)
    prompt = fields.get("messages")
    if prompt is None or _is_empty(prompt) or (len(prompt) < 200 and _REDACTED in bytes(prompt)):
        return b""
    call = _word(fields, "call_type")
    name = "messages"
    if "embedding" in call or "responses" in call:
        name = "input"
    elif "text_completion" in call:
        name = "prompt"
    options = _maybe_object(fields.get("model_parameters"))
    return msgspec.json.encode(
        {"model": _word(fields, "model_group", "model"), **options, name: _unquoted(prompt)}
    )


def _helicone(fields: Fields) -> Exchange:
    properties = _maybe_object(fields.get("request_properties"))
    body = _maybe_object(fields.get("request_body"))
    exchange = Exchange(
        body=_unquoted_bytes(fields["request_body"]) if _has_prompt(body) else b"",
        at=seconds_from(_value(fields, "request_created_at")),
        id=_word(fields, "request_id"),
        session=_word(properties, "Helicone-Session-Id"),
        model=_word(body, "model") or _word(fields, "request_model", "response_model"),
        path=urlsplit(_word(fields, "request_path")).path,
        input_tokens=_count(_value(fields, "prompt_tokens")),
        output_tokens=_count(_value(fields, "completion_tokens")),
        ttft_s=_milliseconds(fields, "time_to_first_token"),
        service_s=_milliseconds(fields, "delay_ms"),
    )
    _answered(exchange, fields.get("response_body"), _value(fields, "response_status"))
    return exchange


def _batch(fields: Fields) -> Exchange:
    name = _word(fields, "custom_id")
    if "body" in fields:
        return _of_body(
            fields["body"], Exchange(custom_id=name, id=name, path=_word(fields, "url"))
        )
    response = _maybe_object(fields.get("response"))
    exchange = Exchange(custom_id=name, id=name, is_answer_only=True)
    _answered(
        exchange, response.get("body") or fields.get("response"), _value(response, "status_code")
    )
    return exchange


def _plain(fields: Fields) -> Exchange:
    exchange = Exchange(
        id=_word(fields, "id", "request_id"),
        session=_word(fields, *_SESSIONS),
        tenant=_word(fields, "tenant"),
        path=urlsplit(_word(fields, "path", "url", "endpoint")).path,
        ttft_s=_seconds(fields, ("ttft_s", "time_to_first_token_s"), ("ttft_ms",)),
        service_s=_seconds(fields, _SECONDS, _MILLISECONDS),
    )
    when = _value(fields, *_TIMES)
    exchange.at = None if when is None else seconds_from(when)
    raw = next((fields[name] for name in ("request", "body") if name in fields), None)
    if raw is not None:
        _of_body(raw, exchange)
    elif any(name in fields for name in _PROMPTS):
        _of_body(Raw(msgspec.json.encode(fields)), exchange)
    else:
        raise ValueError("no `request`, `body`, `messages`, `prompt` or `input`")
    _answered(exchange, fields.get("response"), _value(fields, "status", "status_code"))
    return exchange


# Parts ---------------------------------------------------------------------------------------


def _of_body(raw: Raw, exchange: Exchange) -> Exchange:
    """With a request's body, which may be a string that holds it."""
    fields = _object(raw)
    if not _has_prompt(fields):
        raise ValueError("a request without `messages`, `prompt` or `input`")
    exchange.body = _unquoted_bytes(raw)
    exchange.model = _word(fields, "model")
    return exchange


def _answered(exchange: Exchange, raw: Raw | None, status: Any = None) -> None:
    """With what an answer says of itself; what is known already stays."""
    answer = _maybe_object(raw)
    usage = _maybe_object(answer.get("usage"))
    if exchange.input_tokens < 0:
        exchange.input_tokens = _count(_value(usage, "prompt_tokens", "input_tokens"))
    if exchange.output_tokens < 0:
        exchange.output_tokens = _count(_value(usage, "completion_tokens", "output_tokens"))
    choices = _value(answer, "choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if isinstance(choice, dict):
        exchange.stop = str(choice.get("finish_reason") or "")
        message = choice.get("message")
        text = (message.get("content") if isinstance(message, dict) else None) or choice.get("text")
        if exchange.output_tokens < 0 and isinstance(text, str):
            exchange.output_tokens = tokens_of(text.encode())
    exchange.stop = exchange.stop or _word(answer, "stop_reason", "status")
    if isinstance(status, int) and status >= 400:
        exchange.stop = f"status-{status}"
    if exchange.at is None and "created" in answer:
        exchange.at = seconds_from(_value(answer, "created"))


def _object(raw: Raw) -> dict[str, Raw]:
    return _FIELDS.decode(_unquoted_bytes(raw))


def _maybe_object(raw: Raw | None) -> dict[str, Raw]:
    """Nothing where it is something else."""
    try:
        return _object(raw) if raw is not None else {}
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _unquoted_bytes(raw: Raw) -> bytes:
    return bytes(_unquoted(raw))


def _unquoted(raw: Raw) -> Raw:
    """JSON inside a string is taken out of it; a text stays one."""
    spelled = bytes(raw)
    if not spelled.startswith(b'"'):
        return raw
    text = _ANY.decode(spelled)
    return Raw(text.encode()) if text.lstrip().startswith(("{", "[")) else raw


def _is_empty(raw: Raw) -> bool:
    return bytes(_unquoted(raw)).strip() in (b"{}", b"[]", b'""', b"null")


def _has_prompt(fields: Fields) -> bool:
    return any(name in fields for name in _PROMPTS)


def _value(fields: Fields, *names: str) -> Any:
    """The first of these that is there and not null."""
    for name in names:
        if name in fields and (value := _ANY.decode(fields[name])) is not None:
            return value
    return None


def _word(fields: Fields, *names: str) -> str:
    value = _value(fields, *names)
    return str(value) if isinstance(value, str | int) else ""


def _count(value: Any) -> int:
    """Raises ValueError for one that no prompt can have."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        return UNKNOWN
    if not 0 <= value <= MOST:
        raise ValueError("a number of tokens that is negative or above 10^12")
    return int(value)


def _moment(fields: Fields, name: str) -> float | None:
    value = _value(fields, name)
    return seconds_from(value) if value else None


def _milliseconds(fields: Fields, name: str) -> float:
    return _seconds(fields, (), (name,))


def _seconds(fields: Fields, seconds: tuple[str, ...], milliseconds: tuple[str, ...]) -> float:
    """Of a duration under one of these names. Raises ValueError for a negative one."""
    for names, unit in ((seconds, 1.0), (milliseconds, 1000.0)):
        value = _value(fields, *names)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not 0 <= value <= MOST:
                raise ValueError("a duration that is negative or above 10^12")
            return value / unit
    return UNKNOWN
