"""OpenAI's chat and completion bodies: chunks to one answer, one answer to chunks, errors.

An answer is kept once and told in either form. What a stream adds to the assembled body, its
cuts, is kept beside it, so that a replayed stream has the same deltas as the recorded one.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import jiter
import msgspec

from preheat.core.types import Usage

DONE: Final = b"[DONE]"
COMPLETE_REASONS: Final = frozenset({"stop", "tool_calls", "function_call"})
"""The finish reasons of a complete answer; `length` and `content_filter` aren't among them."""

_TOOL_CALLS: Final = (b'"finish_reason":"tool_calls"', b'"finish_reason":"function_call"')

_NOT_OF_THE_BODY: Final = frozenset({"id", "created", "choices", "usage", "obfuscation"})
"""A chunk's fields that say nothing about the answer or are kept elsewhere; `obfuscation` is
random letters by which OpenAI hides from eavesdroppers how long a chunk's text is."""

_GROWING: Final = frozenset({"message", "text", "logprobs"})
_MOST_INDEXED: Final = 4_096
_SET_ONCE: Final = frozenset(
    {"role", "id", "type", "name", "index", "finish_reason", "object", "format", "signature"}
)
_ENCODE: Final = msgspec.json.Encoder().encode


class Dialect(msgspec.Struct, frozen=True):
    """How one path shapes its answers."""

    whole: str
    chunk: str
    id_prefix: bytes
    part: str  # a choice's field in a whole answer
    delta: str  # the same in a chunk


CHAT: Final = Dialect("chat.completion", "chat.completion.chunk", b"chatcmpl-", "message", "delta")
COMPLETION: Final = Dialect("text_completion", "text_completion", b"cmpl-", "", "")

DIALECTS: Final[Mapping[bytes, Dialect]] = {
    b"/v1/chat/completions": CHAT,
    b"/v1/completions": COMPLETION,
}


class Answer(msgspec.Struct, frozen=True, gc=False):
    """A complete answer, ready to be told again.

    `body` is the whole JSON body without its first brace, `id` and `created`; `cuts` is how a
    stream was cut (empty for an answer that didn't come as one); `usage_tail` is the last chunk
    of a stream for those who ask for usage, in the same form as `body`.
    """

    body: bytes
    cuts: bytes
    usage_tail: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of its parts."""
        return len(self.body) + len(self.cuts) + len(self.usage_tail)


class RefusedAnswer(msgspec.Struct, frozen=True, gc=False):
    """An engine's refusal, kept for a while: its content type and its body, as they came."""

    content_type: bytes
    body: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of its parts."""
        return len(self.content_type) + len(self.body)


def decode(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError for anything else, doubled keys and lost digits included."""
    value = jiter.from_json(
        data, allow_inf_nan=False, catch_duplicate_keys=True, float_mode="lossless-float"
    )
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def encode(value: Any) -> bytes:
    """JSON, with floats spelled as they came."""
    return _ENCODER.encode(value)


def _spell(number: Any) -> msgspec.Raw:
    if not isinstance(number, jiter.LosslessFloat):
        raise TypeError(f"JSON has no {type(number).__name__}")
    return msgspec.Raw(bytes(number))


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_spell)


# Usage ---------------------------------------------------------------------------------------


def usage_of(value: Any) -> Usage | None:
    """Tokens from a `usage` object; None where it isn't one. Never trusts a number blindly."""
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    input_tokens = _count(value.get("prompt_tokens"))
    told = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        input_tokens,
        _count(value.get("completion_tokens")),
        min(_count(told), input_tokens),
        tells_cached=told is not None,
    )


def _count(value: Any) -> int:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40
    return value if is_count else 0


# A whole body --------------------------------------------------------------------------------


def why_incomplete(body: Mapping[str, Any]) -> str:
    """Why this whole body isn't a complete success, or an empty string."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        return "no-choices"
    if body.get("error"):
        return "error-event"
    for choice in choices:
        if not isinstance(choice, dict):
            return "no-choices"
        reason = choice.get("finish_reason")
        if not isinstance(reason, str) or reason not in COMPLETE_REASONS:
            return f"finish-{reason}" if reason in ("length", "content_filter") else "unfinished"
        if not _is_well_formed(choice):
            return "bad-form"
    return ""


def _is_well_formed(choice: Mapping[str, Any]) -> bool:
    """Whether this choice can be told in the other form."""
    if "message" not in choice:
        return isinstance(choice.get("text"), str)
    message = choice["message"]
    if not isinstance(message, dict):
        return False
    calls = message.get("tool_calls")
    return calls is None or (isinstance(calls, list) and all(isinstance(c, dict) for c in calls))


def answer_of(
    body: Mapping[str, Any], cuts: bytes = b"", tail: Mapping[str, Any] | None = None
) -> Answer:
    """The answer that a whole body gives."""
    return Answer(_without_name(body), cuts, _without_name(tail) if tail is not None else b"")


class _Choice(msgspec.Struct):
    finish_reason: Literal["stop", "tool_calls", "function_call"]
    message: "_Message | None" = None
    text: str | None = None


class _Message(msgspec.Struct):
    tool_calls: list[dict[str, Any]] | None = None


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None


class _Whole(msgspec.Struct):
    id: str
    created: int
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage | None = None
    error: None = None


_WHOLE: Final = msgspec.json.Decoder(_Whole)


def plain_answer_of(body: bytes) -> tuple[Answer, Usage | None] | None:
    """The answer and usage of a body that is plainly complete and written as engines do, cut out of
    its own bytes; None for whatever needs a closer look."""
    try:
        seen = _WHOLE.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    name, created = b'{"id":%b,' % _ENCODE(seen.id), b'"created":%d,' % seen.created
    if not body.startswith(name) or body.count(created) != 1 or body[-1:] != b"}":
        return None
    if any(choice.message is None and choice.text is None for choice in seen.choices):
        return None
    rest = body[len(name) :].replace(created, b"", 1)
    told = seen.usage
    if told is None:
        return Answer(rest, b"", b""), None
    details = told.prompt_tokens_details
    cached_tokens = details.cached_tokens if details is not None else None
    usage = Usage(
        told.prompt_tokens,
        told.completion_tokens,
        min(cached_tokens or 0, told.prompt_tokens),
        tells_cached=cached_tokens is not None,
    )
    return Answer(rest, b"", b""), usage


def calls_tool(answer: Answer) -> bool:
    """Whether any choice ended with a tool call, by how engines spell that and we do; nobody's text can
    look like it, since quotes inside a string are escaped."""
    return any(sign in answer.body for sign in _TOOL_CALLS)


def _without_name(body: Mapping[str, Any]) -> bytes:
    rest = {name: value for name, value in body.items() if name not in {"id", "created"}}
    return encode(rest)[1:]


def whole(answer: Answer, name: bytes, created: int) -> bytes:
    """The answer as one JSON body, under a fresh id (with the dialect's prefix) and time."""
    return b'{"id":"%b","created":%d,%b' % (name, created, answer.body)


# Streams -------------------------------------------------------------------------------------


class Assembler:
    """Puts the chunks of a stream together, and remembers where they were cut."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._base: dict[str, Any] | None = None
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._steps: list[Any] = []
        self._shape: dict[str, Any] | None = None
        self._tail: dict[str, Any] | None = None
        self._usage: Any = None
        self._growing: _Text | None = None
        self.plain_text: str | None = None
        """The text of the last chunk, if another one like it would add nothing but its text."""
        self.is_done = False

    def feed(self, chunk: Mapping[str, Any]) -> None:
        """The next chunk. Raises ValueError for one that isn't OpenAI's form."""
        self.plain_text = self._growing = None
        choices = chunk.get("choices", [])
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise ValueError("choices must be objects")
        rest = {k: v for k, v in chunk.items() if k not in _NOT_OF_THE_BODY}
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
            if not choices:
                self._tail = {**rest, "choices": [], "usage": self._usage}
                return
        if self._base is None:
            self._base = rest
        for field, value in rest.items():
            if value is not None or field not in self._fields:
                self._fields[field] = value
        for choice in choices:
            index = choice.get("index", 0)
            if not isinstance(index, int) or isinstance(index, bool):
                raise ValueError("a choice's index must be a number")
            _add(self._choices.setdefault(index, {}), self._as_whole(choice))
        step = self._step(rest, choices)
        self._steps.append(step)
        if isinstance(step, int) and _adds_text_only(self._dialect, choices[0]):
            self.plain_text = _plain_text(self._dialect, choices)
            self._growing = self._text_of_first()

    def feed_text(self, text: str) -> None:
        """A chunk that is the last one but for its text. Only after one with a `plain_text`."""
        assert self._growing is not None
        self._growing.append(text)
        self._steps.append(len(text))

    def end(self) -> None:
        """The stream said that it is complete."""
        self.is_done = True

    @property
    def usage(self) -> Usage | None:
        """The tokens, once the engine has told them."""
        return usage_of(self._usage)

    def body(self) -> dict[str, Any]:
        """The whole body, but for `id` and `created`."""
        body = {**self._fields, "object": self._dialect.whole}
        body["choices"] = [self._finished(index) for index in sorted(self._choices)]
        if self._usage is not None:
            body["usage"] = self._usage
        return body

    def why_incomplete(self) -> str:
        """Why this stream isn't a complete success, or an empty string."""
        return why_incomplete(self.body()) or ("" if self.is_done else "no-done")

    def answer(self) -> Answer:
        """The answer, with its cuts."""
        cuts = encode({"base": self._base or {}, "shape": self._shape, "steps": self._steps})
        return answer_of(self.body(), cuts, self._tail)

    def _text_of_first(self) -> "_Text":
        choice, part = self._choices[0], self._dialect.part
        text: _Text = choice[part]["content"] if part else choice["text"]
        return text

    def _as_whole(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        dialect = self._dialect
        if not dialect.delta or dialect.delta not in choice:
            return dict(choice)
        return {dialect.part if k == dialect.delta else k: v for k, v in choice.items()}

    def _finished(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = _joined(self._choices[index])
        message = choice.get(self._dialect.part)
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list):
            calls = [
                {k: v for k, v in call.items() if k != "index"} if isinstance(call, dict) else call
                for call in message["tool_calls"]
            ]
            choice = {**choice, self._dialect.part: {**message, "tool_calls": calls}}
        return choice

    def _step(self, rest: dict[str, Any], choices: list[dict[str, Any]]) -> Any:
        """A number of characters for the plain next piece of the first choice's text, and the
        chunk itself for everything else."""
        text = _plain_text(self._dialect, choices)
        if text is not None and rest == self._base:
            shape = _shape(self._dialect, choices[0])
            if self._shape is None:
                self._shape = shape
            if shape == self._shape:
                return len(text)
        base = self._base or {}
        changed = {k: v for k, v in rest.items() if k not in base or base[k] != v}
        absent = [k for k in base if k not in rest]
        step: dict[str, Any] = {"choices": choices}
        if changed:
            step["+"] = changed
        if absent:
            step["-"] = absent
        return step


def chunks(answer: Answer, dialect: Dialect) -> Iterator[bytes]:
    """The answer as chunks without their first brace, `id` and `created`: as recorded, or cut by
    us where it didn't come as a stream. Usage isn't among them."""
    body = decode(b"{" + answer.body)
    if answer.cuts:
        yield from _recorded(body, answer.cuts, dialect)
    else:
        base = {k: v for k, v in body.items() if k not in {"choices", "usage", "object"}}
        for choices in _cut(body["choices"], dialect):
            yield encode({"object": dialect.chunk, **base, "choices": choices})[1:]


def usage_chunk(answer: Answer, dialect: Dialect) -> bytes:
    """The last chunk for those who asked for usage, in the same form; empty where none is known."""
    if answer.usage_tail:
        return answer.usage_tail
    body = decode(b"{" + answer.body)
    if "usage" not in body:
        return b""
    base = {k: v for k, v in body.items() if k not in {"choices", "usage", "object"}}
    return encode({"object": dialect.chunk, **base, "choices": [], "usage": body["usage"]})[1:]


def event(chunk: bytes, name: bytes, created: int) -> bytes:
    """A chunk as an event, under this id and time."""
    return b'data: {"id":"%b","created":%d,%b\n\n' % (name, created, chunk)


def events(
    answer: Answer, dialect: Dialect, name: bytes, created: int, *, include_usage: bool
) -> Iterator[bytes]:
    """The whole answer as a stream of events, one at a time."""
    for chunk in chunks(answer, dialect):
        yield event(chunk, name, created)
    tail = usage_chunk(answer, dialect) if include_usage else b""
    if tail:
        yield event(tail, name, created)
    yield b"data: [DONE]\n\n"


def stream(
    answer: Answer, dialect: Dialect, name: bytes, created: int, *, include_usage: bool
) -> bytes:
    """The same in one piece."""
    return b"".join(events(answer, dialect, name, created, include_usage=include_usage))


def _recorded(body: dict[str, Any], cuts: bytes, dialect: Dialect) -> Iterator[bytes]:
    record = decode(cuts)
    base, shape = record["base"], record["shape"]
    text = _first_text(body, dialect)
    # A plain piece differs from the one before in nothing but its text.
    plain = encode({**base, "choices": [_with_text(dialect, shape, _HOLE)]})[1:] if shape else b""
    before, _, after = plain.partition(b"\0")
    position = 0
    for step in record["steps"]:
        if isinstance(step, int):
            yield before + encode(text[position : position + step]) + after
            position += step
        else:
            fields = {k: v for k, v in base.items() if k not in step.get("-", ())}
            position += len(_piece(dialect, step["choices"]))
            yield encode({**fields, **step.get("+", {}), "choices": step["choices"]})[1:]


_HOLE: Final = msgspec.Raw(b"\0")  # a byte that stands nowhere else in JSON


def _plain_text(dialect: Dialect, choices: list[dict[str, Any]]) -> str | None:
    """The text of a chunk that only adds text to the first choice."""
    if len(choices) != 1 or choices[0].get("index", 0) != 0:
        return None
    choice = choices[0]
    if choice.get("finish_reason") is not None:
        return None
    holder = choice.get(dialect.delta) if dialect.delta else choice
    field = "content" if dialect.delta else "text"
    if not isinstance(holder, dict) or (dialect.delta and set(holder) != {field}):
        return None
    text = holder.get(field)
    return text if isinstance(text, str) else None


def _adds_text_only(dialect: Dialect, choice: dict[str, Any]) -> bool:
    """Whether what a plain chunk says beside its text is the same if it is said twice."""
    said = dialect.delta or "text"
    return "message" not in choice and all(
        value is None or not (name in _GROWING or isinstance(value, list))
        for name, value in choice.items()
        if name != said
    )


def _shape(dialect: Dialect, choice: dict[str, Any]) -> dict[str, Any]:
    return _with_text(dialect, choice, "")


def _with_text(dialect: Dialect, choice: dict[str, Any], text: str | msgspec.Raw) -> dict[str, Any]:
    if dialect.delta:
        return {**choice, dialect.delta: {"content": text}}
    return {**choice, "text": text}


def _piece(dialect: Dialect, choices: list[Any]) -> str:
    """What a chunk adds to the first choice's text."""
    pieces = []
    for choice in choices:
        if choice.get("index", 0) == 0:
            holder = choice.get(dialect.delta) if dialect.delta else choice
            value = holder.get("content" if dialect.delta else "text") if holder else None
            pieces.append(value if isinstance(value, str) else "")
    return "".join(pieces)


def _first_text(body: dict[str, Any], dialect: Dialect) -> str:
    for choice in body["choices"]:
        if choice.get("index", 0) == 0:
            holder = choice.get(dialect.part) if dialect.part else choice
            value = (holder or {}).get("content" if dialect.part else "text")
            return value if isinstance(value, str) else ""
    return ""


def _cut(choices: list[dict[str, Any]], dialect: Dialect) -> Iterator[list[dict[str, Any]]]:
    """A whole answer's choices as chunks: the role, all the rest, the finish."""
    for choice in choices:
        index = choice.get("index", 0)
        outer = {
            k: v for k, v in choice.items() if k not in {"index", "finish_reason", dialect.part}
        }
        finish = {"finish_reason": choice.get("finish_reason")}
        if not dialect.delta:
            yield [{"index": index, **outer, "finish_reason": None}]
            yield [{"index": index, "text": "", **finish}]
            continue
        message = dict(choice.get(dialect.part) or {})
        if "role" in message:
            role = {"role": message.pop("role")}
            yield [{"index": index, "delta": role, "finish_reason": None}]
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [
                {"index": position, **call} for position, call in enumerate(message["tool_calls"])
            ]
        yield [{"index": index, "delta": message, **outer, "finish_reason": None}]
        yield [{"index": index, "delta": {}, **finish}]


def _add(into: dict[str, Any], choice: Mapping[str, Any]) -> None:
    """Add a chunk's choice: what it says grows piece by piece; what is said about it (its finish,
    a filter's verdict) is said again in later chunks, and the last word counts."""
    for name, value in choice.items():
        if name in _GROWING:
            _merge(into, {name: value})
        elif isinstance(value, list) and isinstance(into.get(name), list):
            into[name] = [*into[name], *value]  # vLLM's token ids, for one
        elif value or name not in into:
            into[name] = value


def _merge(into: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add a piece of a streamed object: text is appended, lists are extended, tool calls go by
    their index, everything else is replaced. A null adds nothing, and an empty piece doesn't take
    a name away. Raises ValueError for a field of two types: nobody knows what the whole would be.
    """
    for name, said in piece.items():
        known = into.get(name)
        value = _Text((said,)) if isinstance(said, str) and name not in _SET_ONCE else said
        if value is None:
            into.setdefault(name, None)
        elif known is None:
            into[name] = _grown(type(value)(), value) if isinstance(value, (dict, list)) else value
        elif type(known) is type(value):
            into[name] = _grown(known, value)
        elif isinstance(known, (str, dict, list)) or isinstance(value, (str, dict, list)):
            raise ValueError("a field of two types")
        else:
            into[name] = value


def _grown(known: Any, value: Any) -> Any:
    """The known value with one more piece of its own type."""
    if isinstance(known, _Text):
        known.extend(value)
    elif isinstance(known, dict):
        _merge(known, value)
    elif isinstance(known, list):
        _extend(known, value)
    else:
        return value if value or not isinstance(known, str) else known
    return known


class _Text(list[str]):
    """A string that grows by pieces, joined once at the end: appending to a string of megabytes
    copies it each time."""


def _joined(value: Any) -> Any:
    """The value with its texts made whole."""
    if isinstance(value, _Text):
        return "".join(value)
    if isinstance(value, dict):
        return {name: _joined(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_joined(part) for part in value]
    return value


def _extend(into: list[Any], values: list[Any]) -> None:
    for value in values:
        index = value.get("index") if isinstance(value, dict) else None
        if isinstance(index, int):
            if len(into) >= _MOST_INDEXED:
                raise ValueError("too many parts with an index")
            same = into[index] if 0 <= index < len(into) else None
            if not isinstance(same, dict) or same.get("index") != index:
                same = next(
                    (v for v in into if isinstance(v, dict) and v.get("index") == index), None
                )
            if same is None:
                into.append({})
                same = into[-1]
            _merge(same, value)
        else:
            into.append(value)


# Errors --------------------------------------------------------------------------------------


def error_body(message: str, *, kind: str, code: str, param: str | None = None) -> bytes:
    """The error object that OpenAI's clients know."""
    return _ENCODE({"error": {"message": message, "type": kind, "param": param, "code": code}})


def fallback_body(dialect: Dialect, model: str, text: str) -> dict[str, Any]:
    """A whole body that says the operator's words instead of an engine's."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if dialect.part:
        choice[dialect.part] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    return {"object": dialect.whole, "model": model, "choices": [choice]}
