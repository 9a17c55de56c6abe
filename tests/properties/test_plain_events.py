"""Events told by their stream's template: nothing tells them from events that were decoded."""

import json
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from preheat.wire import openai
from preheat.wire.openai import CHAT, COMPLETION, Assembler, Dialect
from preheat.wire.sse import SseDecoder, data_of
from preheat.wire.template import PlainEvents
from properties import json_bodies

keys = ["content", "delta", "choices", "text", "m", "stop", "null", "here stands the text"]
signs = ["", ",", ":", '"', "\\", "\n", "é", "😀", "\u2028", "\x7f", "{", '","content":"']
texts = (
    st.sampled_from(["a", " word", "seven"]) | st.sampled_from([*keys, *signs]) | json_bodies.texts
)

outer = st.fixed_dictionaries(
    {},
    optional={
        "created": st.integers(1, 3),
        "model": st.sampled_from(["m", "n"]),
        "usage": st.sampled_from([None, {"prompt_tokens": 3}, {"prompt_tokens": 4}, {}]),
        "x_float": st.just("FLOAT"),
        "obfuscation": st.sampled_from(["a", "bcd"]),
        "error": st.none(),
    },
)
beside = st.fixed_dictionaries(
    {},
    optional={
        "finish_reason": st.sampled_from([None, None, None, "stop", "length"]),
        "logprobs": st.sampled_from([None, {"content": []}, {"content": [{"token": "a"}]}, "x"]),
        "token_ids": st.sampled_from([None, [], [1, 2]]),
        "filter": st.sampled_from([None, {}, {"hate": "safe"}, "word", 3, False]),
        "message": st.sampled_from([None, {"content": "other"}]),
        "text": st.sampled_from([None, "more"]),
        "index": st.sampled_from([0, 0, 0, 1, "one"]),
    },
)
rarely = st.sampled_from([False] * 7 + [True])
deltas = st.sampled_from(
    [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {"content": ["no", "text"]},
        {"content": None},
        {},
        None,
    ]
)


@st.composite
def chunks(
    draw: st.DrawFn, dialect: Dialect, usual: dict[str, Any], usual_beside: dict[str, Any]
) -> dict[str, Any]:
    """A plain chunk most of the time, and everything else that engines send between."""
    fields = {**usual, **draw(outer)} if draw(rarely) else usual
    choice: dict[str, Any] = {"index": 0}
    if dialect is COMPLETION:
        choice["text"] = draw(texts)
    elif draw(rarely):
        choice["delta"] = draw(deltas)
    else:
        choice["delta"] = {"content": draw(texts)}
    choice |= usual_beside
    if draw(rarely):
        choice |= draw(beside)
    count = draw(st.sampled_from([0, 2])) if draw(rarely) else 1
    return {"id": "c", **fields, "choices": [choice] * count}


@st.composite
def streams(draw: st.DrawFn, dialect: Dialect) -> list[bytes]:
    blocks = []
    is_ascii, start = draw(st.booleans()), draw(st.sampled_from([b"data: ", b"event: e\ndata:"]))
    end = draw(st.sampled_from([b"\n\n", b"\n\n", b"\r\n\r\n", b"\r\r"]))
    usual = {"object": "o", "created": 1, "model": "m"} | (draw(outer) if draw(rarely) else {})
    usual_beside = draw(beside) if draw(st.booleans()) else {"finish_reason": None}
    for chunk in draw(st.lists(chunks(dialect, usual, usual_beside), min_size=1, max_size=12)):
        said = json.dumps(chunk, ensure_ascii=is_ascii).replace('"FLOAT"', "1.50")
        data = said.encode(errors="surrogatepass")
        if draw(rarely) and draw(rarely):  # a byte of it is broken
            place = draw(st.integers(0, len(data) - 1))
            data = data[:place] + draw(st.sampled_from([b'"', b"\\", b"\xff", b""])) + data[place:]
        blocks.append(start + data + end)
    return blocks


def outcome(assembler: Assembler) -> Any:
    """All that it tells of a stream, floats as spelled."""
    assembler.end()
    answer = assembler.answer()
    return answer, assembler.usage, assembler.why_incomplete()


both = pytest.mark.parametrize("dialect", [CHAT, COMPLETION], ids=["chat", "completion"])


@both
@settings(deadline=None, max_examples=600)
@given(data=st.data())
def test_a_stream_read_by_its_template_is_the_stream_that_was_decoded(
    dialect: Dialect, data: st.DataObject
) -> None:
    blocks = data.draw(streams(dialect))
    decoded, quick = Assembler(dialect), Assembler(dialect)
    events = PlainEvents(quick, dialect)
    for block in blocks:
        is_fed, chunk = True, None
        try:
            chunk = openai.decode(data_of(block) or b"")
            decoded.feed(chunk)
        except ValueError:
            is_fed = False
        if events.take(block):
            event("by the template")
            assert is_fed
            assert chunk is not None
            assert chunk["choices"]
            assert events.tells_usage == ("usage" in chunk)
            continue
        try:
            events.feed(block, openai.decode(data_of(block) or b""))
            assert is_fed
        except ValueError:
            assert not is_fed
    assert outcome(quick) == outcome(decoded)


plain_block = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":%b}}]}\n\n'


def after(*said: bytes) -> PlainEvents:
    events = PlainEvents(Assembler(CHAT), CHAT)
    for text in said:
        block = plain_block % text
        events.feed(block, openai.decode(data_of(block) or b""))
    return events


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=12) | json_bodies.texts.map(lambda text: json.dumps(text)[1:-1].encode()))
@example(b"\\ud800")
@example(b"\\ud83d\\ude00")
@example(b"\xed\xa0\x80")
@example(b'"')
@example(b'","role":"')
@example(b"\n\n")
def test_whatever_stands_in_its_place_is_taken_only_as_the_text_of_one_event(hole: bytes) -> None:
    block = plain_block % (b'"%b"' % hole)
    try:
        text = openai.decode(data_of(block) or b"")["choices"][0]["delta"]
    except (ValueError, LookupError):
        text = {}
    is_plain = set(text) == {"content"} and SseDecoder().feed(block) == [block]
    assert after(b'"a"').take(block) == is_plain


@pytest.mark.parametrize("text", ["", " b", "\n", '"quoted"', "\\", "é", "😀"])
def test_a_plain_event_is_taken_however_its_text_is_spelled(text: str) -> None:
    for spelled in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
        assert after(b'"a"').take(plain_block % spelled.encode())


def test_half_an_event_or_two_are_not_taken() -> None:
    block = plain_block % b'"b"'
    assert not after(b'"a"').take(block[:-1])
    assert not after(b'"a"').take(block[1:])
    assert not after(b'"a"').take(block * 2)
    assert not after(b'"a"').take(block.replace(b'"b"', b'"'))
    assert not after(b'"a"').take(block.replace(b"]}", b"}]"))
    assert not after(b'"a"').take(b"")


def test_an_event_whose_last_line_end_may_go_on_is_no_model() -> None:
    events = PlainEvents(Assembler(CHAT), CHAT)
    block = (plain_block % b'"a"')[:-1] + b"\r"
    events.feed(block, openai.decode(data_of(block) or b""))
    assert not events.take(block)


def test_a_text_that_is_also_a_key_teaches_nothing_wrong() -> None:
    events = after(b'"content"')
    assert not events.take(plain_block % b'"b"')
    assert not events.take((plain_block % b'"b"').replace(b'"content"', b'"refusal"'))


def test_a_text_said_elsewhere_too_teaches_nothing_wrong() -> None:
    for text in (b'"a"', b'"here stands the text"'):
        block = (plain_block % text).replace(b'"c"', text)
        events = PlainEvents(Assembler(CHAT), CHAT)
        events.feed(block, openai.decode(data_of(block) or b""))
        assert not events.take((plain_block % text).replace(b'"c"', b'"d"'))


def test_a_new_time_of_creation_is_learnt() -> None:
    events = PlainEvents(Assembler(CHAT), CHAT)
    taken = []
    for created in range(40):
        for _ in range(3):
            head = b'data: {"created":%d,' % created
            block = (plain_block % b'" a"').replace(b"data: {", head)
            taken.append(events.take(block))
            if not taken[-1]:
                events.feed(block, openai.decode(data_of(block) or b""))
    assert taken == [False, True, True] * 40


def test_a_stream_without_a_form_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    real = openai.encode
    monkeypatch.setattr(openai, "encode", lambda value: tried.append(value) or real(value))
    events = PlainEvents(Assembler(CHAT), CHAT)
    for number in range(100):
        block = (plain_block % b'" a"').replace(b'"c"', b'"%d"' % number)
        assert not events.take(block)
        events.feed(block, openai.decode(data_of(block) or b""))
    assert len(tried) < 20
