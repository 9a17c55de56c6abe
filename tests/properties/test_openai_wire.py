"""Streams cut anywhere, answers told in either form, bodies changed in one place: nothing is lost."""

import json
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from preheat.core.keys import Keyring
from preheat.wire import openai
from preheat.wire.openai import CHAT, COMPLETION, Answer, Assembler, Dialect
from preheat.wire.splice import change_field, insert_field, set_field
from preheat.wire.sse import SseDecoder, data_of
from properties import json_bodies
from properties.json_bodies import Writer, bodies, seeds, values

# Events ----------------------------------------------------------------------------------------

_fields = "data: a|data:b|data|data: |data:  c|data: [DONE]|data: ü€😀|data: \ufeff"
_others = ": comment|:|event: ping|id: 1|retry: 10|database: d|data : e||||"
lines = st.sampled_from([line.encode() for line in f"{_fields}|{_others}".split("|")])
line_ends = [b"\n", b"\r\n", b"\r"]


def by_the_standard(stream: bytes) -> list[bytes]:
    """WHATWG HTML, section 9.2.6, line by line: the data of every complete event."""
    found, data = [], None
    *complete, _ = re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))
    for line in complete:
        field, _, value = line.partition(b":")
        if not line:
            if data is not None:
                found.append(data)
            data = None
        elif field == b"data":
            value = value.removeprefix(b" ")
            data = value if data is None else data + b"\n" + value
    return found


def pieces_of(stream: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        yield stream[start:end]


def decoded(stream: bytes, cuts: list[int]) -> list[bytes]:
    decoder = SseDecoder()
    blocks = [block for piece in pieces_of(stream, cuts) for block in decoder.feed(piece)]
    assert b"".join(blocks) + decoder.rest == stream.removeprefix(b"\xef\xbb\xbf")
    return [data for data in map(data_of, blocks) if data is not None]


any_cuts = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.parametrize("end", line_ends)
@settings(deadline=None, max_examples=150)
@given(said=st.lists(lines, max_size=12), cuts=any_cuts, has_mark=st.booleans())
def test_a_stream_says_the_same_wherever_the_network_cuts_it(
    end: bytes, said: list[bytes], cuts: list[int], has_mark: bool
) -> None:
    # The blank line's own end may be one whose other half never comes: a byte more decides it.
    stream = (b"\xef\xbb\xbf" if has_mark else b"") + b"".join(one + end for one in said) + b":"
    expected = by_the_standard(stream)
    assert decoded(stream, cuts) == expected
    assert decoded(stream, list(range(len(stream)))) == expected


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(lines, st.sampled_from(line_ends)), max_size=12), any_cuts)
@example([(b"data: [DONE]", b"\r\n"), (b"", b"\n")], [])
@example([(b"data: a", b"\r"), (b"data: b", b"\n"), (b"", b"\n")], [])
def test_line_ends_may_be_mixed(said: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(line + end for line, end in said) + b":"
    assert decoded(stream, cuts) == by_the_standard(stream)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(lines, st.sampled_from(line_ends)), max_size=12), any_cuts, any_cuts)
def test_mixed_line_ends_say_the_same_wherever_they_are_cut(
    said: list[tuple[bytes, bytes]], cuts: list[int], others: list[int]
) -> None:
    stream = b"".join(line + end for line, end in said) + b":"
    plain = [data for data in decoded(stream, cuts) if b"\r" not in data]
    assert plain == [data for data in decoded(stream, others) if b"\r" not in data]


# Answers ---------------------------------------------------------------------------------------

texts = json_bodies.texts
floats = st.sampled_from(["0.10", "-1.50e-3", "2E+2", "7.0", "-0.0"])
extras = st.dictionaries(
    st.sampled_from(["x_vendor", "reasoning_content", "refusal", "annotations", "audio"]),
    values,
    max_size=3,
)
calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": texts,
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": texts, "arguments": texts}),
        }
    ),
    max_size=3,
)
finish_reasons = st.sampled_from(["stop", "tool_calls", "length", "content_filter"])
base_fields = st.fixed_dictionaries(
    {"model": texts}, optional={"system_fingerprint": texts | st.none(), "service_tier": texts}
)
usages = st.none() | st.fixed_dictionaries(
    {"prompt_tokens": st.integers(0, 99), "completion_tokens": st.integers(0, 99)}
)


@st.composite
def whole_bodies(draw: st.DrawFn, dialect: Dialect) -> dict[str, Any]:
    """A complete answer as an engine gives it in one piece."""
    choices = []
    for index in range(draw(st.integers(1, 3))):
        choice: dict[str, Any] = {"index": index, "finish_reason": draw(finish_reasons)}
        if dialect is CHAT:
            message = {"role": "assistant", "content": draw(texts | st.none()), **draw(extras)}
            if draw(st.booleans()):
                message["tool_calls"] = draw(calls)
            choice["message"] = message
        else:
            choice["text"] = draw(texts)
        choice["logprobs"] = draw(st.none() | st.fixed_dictionaries({"content": st.just([])}))
        choices.append(choice)
    body = {"object": dialect.whole, **draw(base_fields), "choices": choices}
    usage = draw(usages)
    return body if usage is None else {**body, "usage": usage}


def spelled(value: Any, spelling: str) -> Any:
    """As a parser that keeps spellings decodes it, with one such float in it."""
    mark = "here stands a float"
    text = json.dumps({**value, "x_time": mark}).replace(json.dumps(mark), spelling)
    return openai.decode(text.encode())


def comparable(data: bytes) -> Any:
    """A chunk or body as a value, floats as spelled."""
    return json.loads(data, parse_float=lambda text: f"float {text}")


def parsed(events: bytes) -> list[bytes]:
    return [data for block in SseDecoder().feed(events) if (data := data_of(block)) is not None]


def put_together(events: bytes, dialect: Dialect) -> Answer:
    *chunks, done = parsed(events)
    assert done == openai.DONE
    assembler = Assembler(dialect)
    for chunk in chunks:
        assembler.feed(openai.decode(chunk))
    assembler.end()
    assert assembler.why_incomplete() in {"", "finish-length", "finish-content_filter"}
    return assembler.answer()


both = pytest.mark.parametrize("dialect", [CHAT, COMPLETION], ids=["chat", "completion"])


@both
@settings(deadline=None, max_examples=150)
@given(data=st.data(), spelling=floats)
def test_a_whole_answer_told_as_a_stream_is_the_same_answer(
    dialect: Dialect, data: st.DataObject, spelling: str
) -> None:
    body = spelled(data.draw(whole_bodies(dialect)), spelling)
    answer = openai.answer_of(body)
    again = put_together(openai.stream(answer, dialect, b"n", 1, include_usage=True), dialect)
    assert comparable(openai.whole(again, b"n", 1)) == comparable(openai.whole(answer, b"n", 1))
    assert openai.usage_chunk(again, dialect) == openai.usage_chunk(answer, dialect)


@st.composite
def recorded(draw: st.DrawFn, dialect: Dialect) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An answer, and the chunks of one of the streams that would give it."""
    body = draw(whole_bodies(dialect))
    rng = random.Random(draw(seeds))
    base = {k: v for k, v in body.items() if k not in {"choices", "usage"}}
    base["object"] = dialect.chunk
    lanes = [list(_said(rng, choice, dialect)) for choice in body["choices"]]
    chunks = []
    while any(lanes):
        lane = rng.choice([lane for lane in lanes if lane])
        chunk = {"id": "theirs", "created": 1, **base, "choices": [lane.pop(0)]}
        if rng.random() < 0.2:
            chunk["usage"] = None
        if rng.random() < 0.1:
            chunk["x_now"] = rng.randrange(9)
            body["x_now"] = chunk["x_now"]
        chunks.append(chunk)
    if body.get("usage") is not None:
        chunks.append({"id": "theirs", "created": 1, **base, "choices": [], "usage": body["usage"]})
    return body, chunks


def _said(rng: random.Random, choice: dict[str, Any], dialect: Dialect) -> Iterator[dict[str, Any]]:
    """One choice's chunks: its text in pieces, calls piece by piece, the rest as it is."""
    index = choice["index"]
    going_on: dict[str, Any] = {"finish_reason": None}
    rest = {"logprobs": choice["logprobs"]}
    if dialect is COMPLETION:
        for piece in _cut(rng, choice["text"]):
            yield {"index": index, "text": piece, **going_on}
        yield {"index": index, "text": "", **rest, "finish_reason": choice["finish_reason"]}
        return
    message = dict(choice["message"])
    content, tool_calls = message.pop("content"), message.pop("tool_calls", None)
    first = {"role": message.pop("role"), "content": None if content is None else ""}
    yield {"index": index, "delta": first, **going_on}
    for piece in _cut(rng, content or ""):
        yield {"index": index, "delta": {"content": piece}, **going_on}
    for name, value in message.items():
        yield {"index": index, "delta": {name: value}, **going_on}
    if tool_calls is not None:
        yield {"index": index, "delta": {"tool_calls": []}, **going_on}
    for position, call in enumerate(tool_calls or ()):
        function = {**call["function"], "arguments": ""}
        begun = {"index": position, **call, "function": function}
        yield {"index": index, "delta": {"tool_calls": [begun]}, **going_on}
        for piece in _cut(rng, call["function"]["arguments"]):
            more = {"index": position, "function": {"arguments": piece}}
            yield {"index": index, "delta": {"tool_calls": [more]}, **going_on}
    yield {"index": index, "delta": {}, **rest, "finish_reason": choice["finish_reason"]}


def _cut(rng: random.Random, text: str) -> Iterator[str]:
    while text:
        size = rng.randint(1, len(text))
        yield text[:size]
        text = text[size:]


def named(chunk: Any, name: str, created: int) -> Any:
    """What a listener is told of a recorded chunk: under our name, its usage left out."""
    told = {k: v for k, v in chunk.items() if k != "usage" or not chunk["choices"]}
    return {**told, "id": name, "created": created}


@both
@settings(deadline=None, max_examples=120)
@given(data=st.data(), spelling=floats)
def test_a_recorded_stream_is_replayed_chunk_by_chunk_and_field_by_field(
    dialect: Dialect, data: st.DataObject, spelling: str
) -> None:
    body, chunks = data.draw(recorded(dialect))
    chunks = [spelled(chunk, spelling) for chunk in chunks]
    assembler = Assembler(dialect)
    for chunk in chunks:
        assembler.feed(chunk)
    assembler.end()
    answer = assembler.answer()
    told = parsed(openai.stream(answer, dialect, b"ours", 7, include_usage=True))[:-1]
    expected = [openai.encode(named(chunk, "ours", 7)) for chunk in chunks]
    assert [comparable(one) for one in told] == [comparable(one) for one in expected]
    told_whole = comparable(openai.whole(answer, b"ours", 7))
    expected_whole = spelled({"id": "ours", "created": 7, **body}, spelling)
    assert told_whole == comparable(openai.encode(expected_whole))


@both
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_a_replayed_stream_put_together_is_the_answer_that_was_stored(
    dialect: Dialect, data: st.DataObject
) -> None:
    _, chunks = data.draw(recorded(dialect))
    assembler = Assembler(dialect)
    for chunk in chunks:
        assembler.feed(openai.decode(json.dumps(chunk).encode()))
    assembler.end()
    answer = assembler.answer()
    again = put_together(openai.stream(answer, dialect, b"n", 1, include_usage=True), dialect)
    for one, other in (
        (b"{" + again.body, b"{" + answer.body),
        (again.cuts, answer.cuts),
        (b"{" + (again.usage_tail or b"}"), b"{" + (answer.usage_tail or b"}")),
    ):
        assert comparable(one) == comparable(other)


@settings(deadline=None, max_examples=100)
@given(st.lists(texts, max_size=8))
def test_a_plain_stream_keeps_its_text_once_and_a_number_a_piece(pieces: list[str]) -> None:
    assembler = Assembler(CHAT)
    for piece in pieces:
        assembler.feed({"choices": [{"index": 0, "delta": {"content": piece}}]})
    answer = assembler.answer()
    assert json.loads(answer.cuts)["steps"] == [len(piece) for piece in pieces]


# Splicing --------------------------------------------------------------------------------------


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "two equal keys"
    return dict(pairs)


def read(body: bytes) -> Any:
    return json.loads(body, object_pairs_hook=without_doubles, parse_float=str, parse_int=str)


@settings(deadline=None, max_examples=120)
@given(bodies, texts, values, seeds)
def test_an_inserted_field_leaves_every_other_byte(
    fields: dict[str, Any], name: str, value: Any, seed: int
) -> None:
    assume(name not in fields)
    body = Writer(seed).body(fields)
    changed = insert_field(body, name, json.dumps(value).encode())
    assert read(changed) == {name: read(json.dumps(value).encode()), **read(body)}
    brace = body.index(b"{") + 1
    inserted = len(changed) - len(body)
    assert changed[:brace] + changed[brace + inserted :] == body


@settings(deadline=None, max_examples=120)
@given(bodies, st.data(), values, seeds)
def test_a_replaced_value_leaves_every_other_byte(
    fields: dict[str, Any], data: st.DataObject, value: Any, seed: int
) -> None:
    name = data.draw(st.sampled_from(sorted(fields)))
    body = Writer(seed).body(fields)
    new = json.dumps(value, separators=(",", ":")).encode()
    changed = change_field(body, name, lambda _: new)
    assert read(changed) == {**read(body), name: read(new)}
    old = _replaced(body, changed, new)
    assert read(b'{"x":%b}' % old)["x"] == read(body)[name]


def _replaced(body: bytes, changed: bytes, new: bytes) -> bytes:
    """The bytes that `new` stands for: the bodies are alike before and after them."""
    for start in (match.start() for match in re.finditer(re.escape(new), changed)):
        after = changed[start + len(new) :]
        end = len(body) - len(after)
        if end > start and body[:start] == changed[:start] and body[end:] == after:
            try:
                json.loads(body[start:end])
            except ValueError:
                continue
            return body[start:end]
    raise AssertionError("more than one place has changed")


@settings(deadline=None, max_examples=100)
@given(bodies, texts, values, seeds)
def test_what_is_not_there_is_not_replaced(
    fields: dict[str, Any], name: str, value: Any, seed: int
) -> None:
    assume(name not in fields)
    body = Writer(seed).body(fields)
    assert change_field(body, name, lambda _: json.dumps(value).encode()) == body


@settings(deadline=None, max_examples=120)
@given(bodies, seeds)
def test_asking_for_usage_never_makes_two_equal_keys(fields: dict[str, Any], seed: int) -> None:
    keyring = Keyring(b"s" * 32, lambda model: model)
    body = Writer(seed).body(fields)
    ask = keyring.ask(body, keyring.partition("t", "/p", ""))
    assert ask.has_stream_options is ("stream_options" in fields)
    if ask.has_stream_options:
        changed = change_field(
            body, "stream_options", lambda old: set_field(old, "include_usage", b"true")
        )
    else:
        changed = insert_field(body, "stream_options", b'{"include_usage":true}')
    theirs = read(body).get("stream_options") or {}
    assert read(changed) == {**read(body), "stream_options": {**theirs, "include_usage": True}}
    again = keyring.ask(changed, keyring.partition("t", "/p", ""))
    assert (again.key, again.include_usage) == (ask.key, True)
