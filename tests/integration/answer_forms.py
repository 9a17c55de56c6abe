"""What engines say, each answer in both forms: as one body and as a stream's chunks.

Written after what OpenAI, vLLM, llama.cpp, DeepSeek and OpenRouter send, down to their habits:
a role in every delta, empty names after the first piece of a call, finish and text in one chunk.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from openai_shapes import CHAT, COMPLETIONS

USAGE: Final[dict[str, Any]] = {
    "prompt_tokens": 9,
    "completion_tokens": 6,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 5, "audio_tokens": 0},
}
_NAME: Final = {"id": "engine-1", "created": 1_700_000_000, "model": "m1-2026-01-01"}


class Form(msgspec.Struct, frozen=True):
    """One answer. `asked` is what the request says beside its text, to get such an answer."""

    path: str
    whole: dict[str, Any]
    chunks: list[dict[str, Any]]
    asked: dict[str, Any] = {}

    def as_body(self) -> dict[str, Any]:
        """The fake engine's reply that says it whole."""
        return {"body": self.whole}

    def as_stream(self, *, usage: bool = True, pause_s: float = 0.0) -> dict[str, Any]:
        """The fake engine's reply that streams it."""
        events: list[Any] = list(self.chunks)
        if usage:
            events.append({**self._chunk_fields, "choices": [], "usage": USAGE})
        return {"sse": [_data(event) for event in events] + ["[DONE]"], "chunk_delay_s": pause_s}

    @property
    def _chunk_fields(self) -> dict[str, Any]:
        return {k: v for k, v in self.chunks[-1].items() if k not in {"choices", "usage"}}


def _data(event: Any) -> str:
    return json.dumps(event, ensure_ascii=False)


def _chat(
    message: dict[str, Any],
    deltas: Sequence[dict[str, Any]],
    *,
    finish: str = "stop",
    fields: dict[str, Any] | None = None,
    choice: dict[str, Any] | None = None,
    last: dict[str, Any] | None = None,
    parts: Sequence[dict[str, Any]] | None = None,
    asked: dict[str, Any] | None = None,
) -> Form:
    """A chat answer of one choice: its message, and the deltas between role and finish.

    `fields` stand in the body and in each chunk, `choice` in the whole choice, `last` in the
    chunk that finishes it; `parts` are chunks' choices where those are more than deltas.
    """
    fields, choice = fields or {}, choice or {}
    whole = {
        **_NAME,
        "object": "chat.completion",
        **fields,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", **message},
                **choice,
                "finish_reason": finish,
            }
        ],
        "usage": USAGE,
    }
    choices = [
        {"delta": {"role": "assistant", "content": None if message["content"] is None else ""}},
        *(parts or [{"delta": delta} for delta in deltas]),
        {"delta": {}, **(last or {}), "finish_reason": finish},
    ]
    return Form(CHAT, whole, [_chat_chunk([one], fields) for one in choices], asked or {})


def _chat_chunk(choices: Sequence[dict[str, Any]], fields: dict[str, Any]) -> dict[str, Any]:
    made = [{"index": 0, "finish_reason": None, **one} for one in choices]
    return {**_NAME, "object": "chat.completion.chunk", **fields, "choices": made}


def _text(
    text: str,
    pieces: Sequence[dict[str, Any]],
    *,
    fields: dict[str, Any] | None = None,
    choice: dict[str, Any] | None = None,
) -> Form:
    """A completion of one choice."""
    named = {**_NAME, "object": "text_completion", **(fields or {})}
    whole_choice = {
        "index": 0,
        "text": text,
        "logprobs": None,
        **(choice or {}),
        "finish_reason": "stop",
    }
    whole = {**named, "choices": [whole_choice], "usage": USAGE}
    chunks = [
        {**named, "choices": [{"index": 0, "logprobs": None, "finish_reason": None, **piece}]}
        for piece in [*pieces, {"text": "", "finish_reason": "stop"}]
    ]
    return Form(COMPLETIONS, whole, chunks)


def _call(number: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _call_start(index: int, number: int, name: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **_call(number, name, "")}]}


def _call_part(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    function = {**more.pop("function", {}), "arguments": arguments}
    return {"tool_calls": [{"index": index, **more, "function": function}]}


def _logprob(token: str) -> dict[str, Any]:
    top = [{"token": token, "logprob": -0.10, "bytes": list(token.encode())}]
    return {"token": token, "logprob": -0.10, "bytes": list(token.encode()), "top_logprobs": top}


def _two_choices() -> Form:
    messages = ["One fish", "Two fish"]
    whole = {
        **_NAME,
        "object": "chat.completion",
        "choices": [
            {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            for i, text in enumerate(messages)
        ],
        "usage": USAGE,
    }
    words = [text.split(" ") for text in messages]
    choices: list[dict[str, Any]] = [
        *({"index": i, "delta": {"role": "assistant", "content": ""}} for i in range(2)),
        {"index": 1, "delta": {"content": words[1][0]}},
        {"index": 0, "delta": {"content": words[0][0]}},
        {"index": 0, "delta": {"content": " " + words[0][1]}},
        {"index": 1, "delta": {"content": " " + words[1][1]}},
        *({"index": i, "delta": {}, "finish_reason": "stop"} for i in (1, 0)),
    ]
    return Form(CHAT, whole, [_chat_chunk([one], {}) for one in choices], {"n": 2})


def _two_texts() -> Form:
    named = {**_NAME, "object": "text_completion"}
    choices = [
        {"index": i, "text": text, "logprobs": None, "finish_reason": "stop"}
        for i, text in enumerate(("one", "two"))
    ]
    pieces = [(1, "t"), (0, "on"), (1, "wo"), (0, "e")]
    chunks = [
        {**named, "choices": [{"index": i, "text": text, "logprobs": None, "finish_reason": None}]}
        for i, text in pieces
    ]
    chunks += [
        {**named, "choices": [{"index": i, "text": "", "logprobs": None, "finish_reason": "stop"}]}
        for i in range(2)
    ]
    return Form(COMPLETIONS, {**named, "choices": choices, "usage": USAGE}, chunks, {"n": 2})


def _filtered() -> Form:
    """Azure tells what its filters say of the prompt in a chunk without choices, and of the
    answer in each chunk."""
    verdict = {"hate": {"filtered": False, "severity": "safe"}}
    prompt = {"prompt_filter_results": [{"prompt_index": 0, "content_filter_results": verdict}]}
    parts = [
        {"delta": {"content": text}, "content_filter_results": verdict}
        for text in ("Hello", " there.")
    ]
    form = _chat(
        {"content": "Hello there."}, [], choice={"content_filter_results": verdict}, parts=parts
    )
    first = {**_NAME, "object": "chat.completion.chunk", "choices": [], **prompt}
    last = form.chunks[-1]
    last["choices"][0]["content_filter_results"] = {}
    return Form(CHAT, form.whole | prompt, [first, *form.chunks])


def _padded(form: Form) -> Form:
    """OpenAI adds letters to each chunk, so that lengths don't tell what is said."""
    chunks = [chunk | {"obfuscation": "x" * number} for number, chunk in enumerate(form.chunks)]
    return Form(form.path, form.whole, chunks, form.asked)


_WEATHER: Final = _call(1, "weather", '{"city":"Bergen"}')
_CLOCK: Final = _call(2, "clock", "{}")
_FAMILY: Final = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
_LETTERS: Final = (
    "ne",
    "\u0301 ",
    _FAMILY[:3],
    _FAMILY[3:],
    "\u2028\U0001f1f3",
    "\U0001f1f4\0\ufeff\x7f",
)

FORMS: Final[dict[str, Form]] = {
    "plain": _chat({"content": "Hello there."}, [{"content": "Hello"}, {"content": " there."}]),
    "one tool call": _chat(
        {"content": None, "tool_calls": [_WEATHER]},
        [_call_start(0, 1, "weather"), _call_part(0, '{"city":'), _call_part(0, '"Bergen"}')],
        finish="tool_calls",
    ),
    "two parallel tool calls": _chat(
        {"content": None, "tool_calls": [_WEATHER, _CLOCK]},
        [
            _call_start(0, 1, "weather"),
            _call_start(1, 2, "clock"),
            _call_part(1, "{"),
            _call_part(0, '{"city":"Bergen"}'),
            _call_part(1, "}"),
        ],
        finish="tool_calls",
    ),
    "text and then a tool call": _chat(
        {"content": "Let me look.", "tool_calls": [_WEATHER]},
        [
            {"content": "Let me "},
            {"content": "look."},
            _call_start(0, 1, "weather"),
            _call_part(0, '{"city":"Bergen"}'),
        ],
        finish="tool_calls",
    ),
    "a tool call whose later pieces have empty names": _chat(
        {"content": None, "tool_calls": [_WEATHER]},
        [
            _call_start(0, 1, "weather"),
            _call_part(0, '{"city":', id="", type="function", function={"name": ""}),
            _call_part(0, '"Bergen"}', id=None, type="function", function={"name": None}),
        ],
        finish="tool_calls",
    ),
    "a tool call without arguments": _chat(
        {"content": None, "tool_calls": [_call(1, "now", "")]},
        [_call_start(0, 1, "now")],
        finish="tool_calls",
    ),
    "reasoning": _chat(
        {"content": "4", "reasoning_content": "Two and two."},
        [{"reasoning_content": "Two and"}, {"reasoning_content": " two."}, {"content": "4"}],
    ),
    "logprobs": _chat(
        {"content": "Hi you"},
        [],
        choice={"logprobs": {"content": [_logprob("Hi"), _logprob(" you")], "refusal": None}},
        parts=[
            {
                "delta": {"content": token},
                "logprobs": {"content": [_logprob(token)], "refusal": None},
            }
            for token in ("Hi", " you")
        ],
        asked={"logprobs": True, "top_logprobs": 1},
    ),
    "two choices": _two_choices(),
    "a refusal": _chat(
        {"content": None, "refusal": "I can't help with that."},
        [{"refusal": "I can't"}, {"refusal": " help with that."}],
    ),
    "fields nobody knows": _chat(
        {"content": "ok", "mood": {"name": "calm", "score": 0.50}, "sources": ["a", "b"]},
        [
            {"content": "o", "mood": {"name": "calm"}, "sources": ["a"]},
            {"content": "k", "mood": {"score": 0.50}, "sources": ["b"]},
        ],
        fields={"service_tier": "default", "x_engine": {"build": 7, "scale": 1.0}, "error": None},
        choice={"stop_reason": None, "native_finish_reason": "eos"},
        last={"stop_reason": None, "native_finish_reason": "eos"},
    ),
    "an empty answer": _chat({"content": ""}, []),
    "letters cut between their code points": _chat(
        {"content": "".join(_LETTERS)}, [{"content": piece} for piece in _LETTERS]
    ),
    "a role in every delta": _chat(
        {"content": "Hello there."},
        [
            {"role": "assistant", "content": "Hello"},
            {"role": "assistant", "content": " there."},
        ],
    ),
    "quotes, escapes and what looks like a stream's end": _chat(
        {"content": '"\\n\\"\n\ndata: [DONE]\n\n{"id":"x"}\r\n'},
        [
            {"content": '"\\n\\"\n\n'},
            {"content": "data: [DONE]\n\n"},
            {"content": '{"id":"x"}\r\n'},
        ],
    ),
    "padding against eavesdroppers": _padded(
        _chat({"content": "Hello there."}, [{"content": "Hello"}, {"content": " there."}])
    ),
    "a filter's verdict in every chunk": _filtered(),
    "a plain text": _text("Once upon", [{"text": "Once"}, {"text": " upon"}]),
    "two texts": _two_texts(),
    "a text with logprobs": _text(
        "ab",
        [
            {
                "text": "a",
                "logprobs": {"tokens": ["a"], "token_logprobs": [-0.10], "text_offset": [0]},
            },
            {
                "text": "b",
                "logprobs": {"tokens": ["b"], "token_logprobs": [-2.0], "text_offset": [1]},
            },
        ],
        choice={
            "logprobs": {
                "tokens": ["a", "b"],
                "token_logprobs": [-0.10, -2.0],
                "text_offset": [0, 1],
            }
        },
    ),
    "a text with fields nobody knows": _text(
        "ab",
        [{"text": "a", "stop_reason": None}, {"text": "b", "stop_reason": None}],
        fields={"system_fingerprint": "fp", "x_engine": {"build": 7}},
        choice={"stop_reason": None},
    ),
    "an empty text": _text("", []),
    "a text of several code points": _text(
        f"é{_FAMILY}", [{"text": "é" + _FAMILY[:1]}, {"text": _FAMILY[1:]}]
    ),
}
