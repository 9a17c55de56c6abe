"""OpenAI's bodies, by example; tests/properties/test_openai_wire.py holds the rules in general."""

import json
from typing import Any

import pytest

from preheat.core.types import Usage
from preheat.wire import openai
from preheat.wire.openai import CHAT, COMPLETION, Assembler

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def chunk(*choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-theirs",
        "object": "chat.completion.chunk",
        "created": 17,
        "model": "m1",
        "choices": list(choices),
        **fields,
    }


def delta(finish_reason: str | None = None, index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": fields, "finish_reason": finish_reason}


def assembled(*chunks: dict[str, Any], is_done: bool = True) -> Assembler:
    assembler = Assembler(CHAT)
    for one in chunks:
        assembler.feed(one)
    if is_done:
        assembler.end()
    return assembler


HELLO = [
    chunk(delta(role="assistant", content="")),
    chunk(delta(content="Hel")),
    chunk(delta(content="lo")),
    chunk(delta("stop")),
]


# decoding


def test_floats_keep_their_spelling() -> None:
    text = b'{"a":0.10,"b":[1e2,-0.0,1E+2],"c":7}'
    assert openai.encode(openai.decode(text)) == text


@pytest.mark.parametrize("text", [b"[]", b"1", b"", b"{", b'{"a":1,"a":2}', b'{"a":NaN}', b"\xff"])
def test_what_is_no_plain_object_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        openai.decode(text)


def test_what_json_lacks_cannot_be_encoded() -> None:
    with pytest.raises(TypeError, match="JSON has no object"):
        openai.encode({"a": object()})


# usage


@pytest.mark.parametrize(
    ("value", "usage"),
    [
        (USAGE, Usage(9, 3, 4, tells_cached=True)),
        ({"prompt_tokens": 9, "completion_tokens": 3}, Usage(9, 3, 0)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, 0, 0)),
        (
            {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}},
            Usage(2, 0, 2, tells_cached=True),
        ),
        ({"prompt_tokens": -1, "completion_tokens": "3"}, Usage(0, 0, 0)),
        ({"prompt_tokens": True, "completion_tokens": 2**40}, Usage(0, 0, 0)),
        ({"prompt_tokens": 1.0}, Usage(0, 0, 0)),
        ({}, Usage(0, 0, 0)),
        (None, None),
        ([], None),
    ],
)
def test_usage_is_read_without_trust(value: Any, usage: Usage | None) -> None:
    assert openai.usage_of(value) == usage


# whole bodies


@pytest.mark.parametrize(
    ("reason", "text", "calls"),
    [
        ("tool_calls", "", True),
        ("function_call", "", True),
        ("stop", "", False),
        ("length", "tool_calls", False),
        ("stop", '"finish_reason":"tool_calls"', False),
    ],
)
def test_an_answer_that_calls_a_tool_is_known(reason: str, text: str, calls: bool) -> None:
    choices = [
        {"index": 0, "finish_reason": "stop", "message": {"content": text}},
        {"index": 1, "finish_reason": reason, "message": {"content": None}},
    ]
    assert openai.calls_tool(openai.answer_of({"id": "a", "choices": choices})) is calls


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ([{"finish_reason": "stop", "text": ""}], ""),
        ([{"finish_reason": "tool_calls", "message": {"tool_calls": [{}]}}], ""),
        ([{"finish_reason": "function_call", "message": {}}], ""),
        ([{"finish_reason": "stop", "text": ""}, {"finish_reason": "length"}], "finish-length"),
        ([{"finish_reason": "stop"}], "bad-form"),
        ([{"finish_reason": "stop", "message": "text"}], "bad-form"),
        ([{"finish_reason": "stop", "message": {"tool_calls": [3, None]}}], "bad-form"),
        ([{"finish_reason": "stop", "message": {"tool_calls": {}}}], "bad-form"),
        ([{"finish_reason": "content_filter"}], "finish-content_filter"),
        ([{"finish_reason": None}], "unfinished"),
        ([{"finish_reason": "a thing of the engine's own"}], "unfinished"),
        ([{}], "unfinished"),
        ([], "no-choices"),
        (None, "no-choices"),
        ({}, "no-choices"),
        (["text"], "no-choices"),
    ],
)
def test_only_a_complete_success_is_complete(choices: Any, why: str) -> None:
    assert openai.why_incomplete({"choices": choices}) == why


def test_a_whole_answer_gets_a_fresh_name_and_time_and_loses_nothing_else() -> None:
    body = {"id": "theirs", "created": 1, "model": "m", "choices": [], "x": 1, "usage": USAGE}
    answer = openai.answer_of(body)
    told = json.loads(openai.whole(answer, b"chatcmpl-ours", 99))
    assert told == {**body, "id": "chatcmpl-ours", "created": 99}
    assert answer.size_bytes == len(answer.body)


def test_an_answer_of_nothing_but_a_name_can_be_told() -> None:
    answer = openai.answer_of({"id": "theirs", "created": 1, "a": 1})
    assert json.loads(openai.whole(answer, b"n", 2)) == {"id": "n", "created": 2, "a": 1}


def test_a_whole_answer_is_streamed_as_role_content_and_finish() -> None:
    message = {"role": "assistant", "content": "Hello"}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    body = {"object": "chat.completion", "model": "m1", "choices": [choice], "usage": USAGE}
    text = openai.stream(openai.answer_of(body), CHAT, b"n", 5, include_usage=True)
    *events, done = text.decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    told = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [one["choices"] for one in told] == [
        [delta(role="assistant")],
        [{**delta(content="Hello"), "logprobs": None}],
        [delta("stop")],
        [],
    ]
    assert told[-1]["usage"] == USAGE
    assert {(one["id"], one["created"], one["object"], one["model"]) for one in told} == {
        ("n", 5, "chat.completion.chunk", "m1")
    }
    assert all("usage" not in one for one in told[:-1])


def test_a_completion_is_streamed_as_text_and_finish() -> None:
    choice = {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    body = {"object": "text_completion", "model": "m1", "choices": [choice]}
    told = list(openai.chunks(openai.answer_of(body), COMPLETION))
    assert [json.loads(b"{" + one)["choices"] for one in told] == [
        [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "finish_reason": "stop"}],
    ]
    assert openai.usage_chunk(openai.answer_of(body), COMPLETION) == b""


# streams


def test_the_pieces_of_a_stream_make_the_whole_answer() -> None:
    assembler = assembled(*HELLO, chunk(usage=USAGE))
    assert assembler.why_incomplete() == ""
    assert assembler.usage == Usage(9, 3, 4, tells_cached=True)
    assert assembler.body() == {
        "object": "chat.completion",
        "model": "m1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def test_plain_pieces_take_a_number_each() -> None:
    answer = assembled(*HELLO).answer()
    steps = json.loads(answer.cuts)["steps"]
    assert [step for step in steps if isinstance(step, int)] == [3, 2]


def test_tool_calls_are_put_together_by_their_index() -> None:
    calls = [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"x"'}},
        {"index": 1, "function": {"arguments": "{}"}},
        {"index": 0, "function": {"arguments": ":1}"}},
    ]
    pieces = [chunk(delta(tool_calls=[call])) for call in calls]
    body = assembled(*pieces, chunk(delta("tool_calls"))).body()
    assert body["choices"][0]["message"]["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_a_stream_that_was_not_ended_is_not_complete() -> None:
    assert assembled(*HELLO, is_done=False).why_incomplete() == "no-done"
    assert assembled(*HELLO[:3]).why_incomplete() == "unfinished"
    assert assembled().why_incomplete() == "no-choices"
    assert assembled(chunk(delta("length", content="a"))).why_incomplete() == "finish-length"


def test_usage_beside_the_last_choice_is_kept_too() -> None:
    assembler = assembled(*HELLO[:3], chunk(delta("stop"), usage=USAGE))
    assert assembler.body()["usage"] == USAGE
    tail = json.loads(b"{" + openai.usage_chunk(assembler.answer(), CHAT))
    assert tail == {
        "object": "chat.completion.chunk",
        "model": "m1",
        "choices": [],
        "usage": USAGE,
    }


def test_a_usage_of_null_is_none() -> None:
    assembler = assembled(*(dict(one, usage=None) for one in HELLO))
    assert assembler.usage is None
    assert "usage" not in assembler.body()


def test_the_usage_chunk_of_a_stream_is_told_as_it_came() -> None:
    answer = assembled(*HELLO, chunk(usage=USAGE, service_tier="x")).answer()
    assert json.loads(b"{" + openai.usage_chunk(answer, CHAT)) == {
        "object": "chat.completion.chunk",
        "model": "m1",
        "service_tier": "x",
        "choices": [],
        "usage": USAGE,
    }


def test_usage_is_told_only_to_those_who_ask() -> None:
    answer = assembled(*HELLO, chunk(usage=USAGE)).answer()
    assert b"prompt_tokens" not in openai.stream(answer, CHAT, b"n", 1, include_usage=False)
    assert b"prompt_tokens" in openai.stream(answer, CHAT, b"n", 1, include_usage=True)
    without = assembled(*HELLO).answer()
    assert b"usage" not in openai.stream(without, CHAT, b"n", 1, include_usage=True)


@pytest.mark.parametrize(
    "bad",
    [
        {"choices": "text"},
        {"choices": ["text"]},
        {"choices": [{"index": "0", "delta": {}}]},
        {"choices": [{"index": True, "delta": {}}]},
        {"choices": [{"index": None, "delta": {}}]},
    ],
)
def test_a_chunk_of_another_form_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="choice"):
        assembled(bad)


def test_a_chunk_that_tells_no_choices_changes_nothing() -> None:
    body = assembled(*HELLO, {"object": "chat.completion.chunk", "model": "m1"}).body()
    assert body == assembled(*HELLO).body()


def test_fields_that_come_late_or_change_are_replayed_when_they_came() -> None:
    stream = [
        chunk(delta(content="a")),
        chunk(delta(content="b"), system_fingerprint="fp"),
        {k: v for k, v in chunk(delta(content="c")).items() if k != "model"},
        chunk(delta("stop", content="d"), model="m2"),
    ]
    answer = assembled(*stream).answer()
    told = [json.loads(b"{" + one) for one in openai.chunks(answer, CHAT)]
    named = [{k: v for k, v in one.items() if k not in {"id", "created"}} for one in stream]
    assert told == named
    assert json.loads(openai.whole(answer, b"n", 1))["choices"][0]["message"]["content"] == "abcd"


HOLE = "\0"  # what stands for a plain piece's text while the rest of its chunk is rendered


def test_a_field_that_looks_like_the_mark_of_the_text_is_not_taken_for_it() -> None:
    stream = [
        chunk(delta(content="a"), model=HOLE),
        chunk(delta("stop"), model=HOLE),
    ]
    told = list(openai.chunks(assembled(*stream).answer(), CHAT))
    assert [json.loads(b"{" + one)["model"] for one in told] == [HOLE] * 2


def test_a_null_that_comes_late_does_not_undo_what_was_said() -> None:
    body = assembled(
        chunk(delta(content="a", refusal=None), system_fingerprint="fp"),
        chunk(delta("stop", content=None), system_fingerprint=None),
    ).body()
    assert body["system_fingerprint"] == "fp"
    assert body["choices"][0]["message"] == {"content": "a", "refusal": None}


def test_a_plain_piece_of_another_shape_is_replayed_in_its_own() -> None:
    odd = {**delta(content="b"), "logprobs": None}
    stream = [
        chunk(delta(content="a")),
        chunk(odd),
        chunk(delta(content="c")),
        chunk(delta("stop")),
    ]
    told = list(openai.chunks(assembled(*stream).answer(), CHAT))
    assert [json.loads(b"{" + one)["choices"] for one in told] == [one["choices"] for one in stream]


def test_a_stream_without_a_first_choice_is_replayed_too() -> None:
    stream = [chunk(delta(content="a", index=1)), chunk(delta("stop", index=1))]
    told = list(openai.chunks(assembled(*stream).answer(), CHAT))
    assert [json.loads(b"{" + one)["choices"] for one in told] == [one["choices"] for one in stream]


def test_a_field_of_two_types_has_no_whole() -> None:
    with pytest.raises(ValueError, match="two types"):
        assembled(chunk(delta(content="a")), chunk(delta(content=["b"])))


def test_a_message_without_a_role_is_streamed_without_one() -> None:
    choice = {"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}
    told = list(openai.chunks(openai.answer_of({"choices": [choice]}), CHAT))
    assert [json.loads(b"{" + one)["choices"] for one in told] == [
        [delta(content="Hello")],
        [delta("stop")],
    ]


# what Preheat says itself


def test_an_error_has_the_form_that_clients_know() -> None:
    text = openai.error_body("no", kind="invalid_request_error", code="too-deep", param="x")
    assert json.loads(text) == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": "x",
            "code": "too-deep",
        }
    }


@pytest.mark.parametrize(("dialect", "said"), [(CHAT, "message"), (COMPLETION, "text")])
def test_a_fallback_is_a_whole_answer(dialect: openai.Dialect, said: str) -> None:
    body = openai.fallback_body(dialect, "m1", "later")
    assert openai.why_incomplete(body) == ""
    assert body["object"] == dialect.whole
    told = body["choices"][0][said]
    assert told in ("later", {"role": "assistant", "content": "later"})
