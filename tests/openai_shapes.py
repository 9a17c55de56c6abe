"""Is this answer what its protocol says? Written from OpenAI's reference, not from our code.

Also what a test wants to read out of an answer in either form: its text, its finish, its calls.
"""

import re
from typing import Any

from harness import Reply

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
FINISH_REASONS = {"stop", "length", "tool_calls", "content_filter", "function_call"}
_EXCEPTION = re.compile(
    r"Traceback \(most recent|File \"[^\"]+\", line \d|\b[A-Z]\w*(Error|Exception)\b"
)


def assert_valid(path: str, reply: Reply) -> None:
    """The body is valid for the path, or a valid error. Raises AssertionError."""
    assert not _EXCEPTION.search(reply.body.decode()), "exception text in the body"
    if reply.status != 200:
        assert isinstance(reply.json["error"], dict), reply.body
    elif path not in {CHAT, COMPLETIONS}:
        assert isinstance(reply.json, dict), reply.body
    elif is_stream(reply):
        assert_valid_stream(path, reply)
    else:
        assert_valid_whole(path, reply.json)


def is_stream(reply: Reply) -> bool:
    return reply.headers["content-type"].partition(";")[0] == "text/event-stream"


def assert_valid_whole(path: str, body: Any) -> None:
    _assert_named(body, "chat.completion" if path == CHAT else "text_completion")
    assert body["choices"], body
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    for choice in body["choices"]:
        assert choice["finish_reason"] in FINISH_REASONS, choice
        if path == CHAT:
            _assert_message(choice["message"])
        else:
            assert isinstance(choice["text"], str), choice
    if body.get("usage") is not None:
        _assert_usage(body["usage"])


def assert_valid_stream(path: str, reply: Reply) -> None:
    """A complete stream: one name for all chunks, one finish a choice, and [DONE] at the end."""
    *chunks, last = reply.events
    assert last == "[DONE]", f"the stream ends with {last}"
    assert chunks.count("[DONE]") == 0
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1, "chunks of two names"
    finished: list[int] = []
    for chunk in chunks:
        _assert_named(chunk, "chat.completion.chunk" if path == CHAT else "text_completion")
        if chunk.get("usage") is not None:
            _assert_usage(chunk["usage"])
        for choice in chunk["choices"]:
            assert choice["index"] not in finished or not choice.get("delta", choice.get("text"))
            if path == CHAT:
                _assert_delta(choice["delta"])
            else:
                assert isinstance(choice["text"], str), choice
            if choice["finish_reason"] is not None:
                assert choice["finish_reason"] in FINISH_REASONS, choice
                finished.append(choice["index"])
    assert sorted(finished) == sorted({c["index"] for chunk in chunks for c in chunk["choices"]})


def _assert_named(body: Any, kind: str) -> None:
    assert isinstance(body["id"], str), body
    assert body["id"], body
    assert type(body["created"]) is int, body
    assert body["object"] == kind, body
    assert isinstance(body["model"], str), body


def _assert_message(message: Any) -> None:
    assert message["role"] == "assistant", message
    assert message["content"] is None or isinstance(message["content"], str), message
    for call in message.get("tool_calls") or ():
        assert set(call) == {"id", "type", "function"}, call
        assert isinstance(call["function"]["name"], str), call
        assert isinstance(call["function"]["arguments"], str), call


def _assert_delta(delta: Any) -> None:
    assert delta.get("role") in {None, "assistant"}, delta
    assert delta.get("content") is None or isinstance(delta["content"], str), delta
    for call in delta.get("tool_calls") or ():
        assert type(call["index"]) is int, call


def _assert_usage(usage: Any) -> None:
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert type(usage[name]) is int, usage


def choices_of(reply: Reply) -> list[Any]:
    """All choices, of a whole body or of a stream's chunks in order."""
    if is_stream(reply):
        return [c for chunk in reply.events if chunk != "[DONE]" for c in chunk["choices"]]
    return list(reply.json["choices"])


def text_of(reply: Reply, field: str = "content") -> str:
    """What the first choice says, in either form and on either path."""
    pieces = []
    for choice in choices_of(reply):
        if choice["index"] == 0:
            holder = choice.get("message", choice.get("delta"))
            value = choice["text"] if holder is None else holder.get(field)
            pieces.append(value or "")
    return "".join(pieces)


def finish_of(reply: Reply) -> str | None:
    """The first choice's finish reason."""
    reasons = [choice["finish_reason"] for choice in choices_of(reply) if choice["index"] == 0]
    return next((reason for reason in reversed(reasons) if reason is not None), None)


def usage_of(reply: Reply) -> Any:
    """The usage that the answer tells, or None."""
    if is_stream(reply):
        told = [c["usage"] for c in reply.events if c != "[DONE]" and c.get("usage") is not None]
        return told[-1] if told else None
    return reply.json.get("usage")
