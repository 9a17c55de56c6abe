"""The kinds behind reported faults: not the one example, but all that are like it."""

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from answer_forms import FORMS, USAGE, Form

from harness import Fake, Gateway, Reply, chat, running
from openai_shapes import (
    CHAT,
    COMPLETIONS,
    assert_valid,
    is_stream,
    text_of,
    usage_of,
)

SHORT_TIMES = "[engines.upstream]\nfirst_byte_s = 1.0\nidle_s = 1.0\n"
WHOLE: dict[str, Any] = {}
STREAM: dict[str, Any] = {"stream": True}
STREAM_AND_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
WAYS = {"whole": WHOLE, "stream": STREAM, "stream and usage": STREAM_AND_USAGE}

JOINABLE_S = 0.25
"""An engine that takes this long before its first byte leaves time enough to join."""

_numbers = count()


@pytest.fixture(scope="module")
def gateway(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Its engine must answer quickly."""
    folder = tmp_path_factory.mktemp("gateway")
    with running(served := Gateway(SHORT_TIMES, upstream=fake.url, folder=folder)):
        yield served
    assert '"event":"bug"' not in served.stderr
    assert "Traceback" not in served.stderr


@pytest.fixture(autouse=True)
def _fresh(fake: Fake) -> None:
    fake.reset()


def question(form: Form | None = None, **fields: Any) -> dict[str, Any]:
    """A request that nobody has sent before."""
    text = f"Question {next(_numbers)}"
    path = form.path if form is not None else CHAT
    said = chat(text) if path == CHAT else {"model": "m1", "temperature": 0, "prompt": text}
    return said | (form.asked if form is not None else {}) | fields


def at_once(asks: Sequence[Callable[[], Reply]]) -> list[Reply]:
    with ThreadPoolExecutor(len(asks)) as pool:
        return [one.result() for one in [pool.submit(ask) for ask in asks]]


# 17, 18, 20: an answer has two forms, and each is whole -------------------------------------


def without_name(body: Any) -> Any:
    return {name: value for name, value in body.items() if name not in {"id", "created"}}


def without_padding(chunk: Any) -> Any:
    """Random letters that hide a chunk's length aren't part of what it says."""
    return {name: value for name, value in chunk.items() if name != "obfuscation"}


def chunks_of(reply: Reply) -> list[Any]:
    assert reply.events[-1] == "[DONE]"
    return [without_name(chunk) for chunk in reply.events[:-1]]


def put_together(reply: Reply) -> Any:
    """A stream as a whole body, for streams that repeat no field but the text."""
    body: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks_of(reply):
        body |= {k: v for k, v in chunk.items() if k != "choices"}
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"message": {}} if "delta" in piece else {})
            for name, value in piece.get("delta", {}).items():
                if name == "tool_calls":
                    value = [{k: v for k, v in call.items() if k != "index"} for call in value]
                choice["message"][name] = value
            text = choice.get("text", "") + piece.get("text", "")
            choice |= {k: v for k, v in piece.items() if k != "delta"}
            if "text" in piece:
                choice["text"] = text
    return body | {"choices": [choices[index] for index in sorted(choices)]}


def assert_says(form: Form, reply: Reply, way: str, *, came_as_stream: bool) -> None:
    """The reply says what the engine says in this form, field by field."""
    assert_valid(form.path, reply)
    assert is_stream(reply) is (way != "whole")
    if way == "whole":
        assert without_name(reply.json) == without_name(form.whole)
        return
    assert usage_of(reply) == (USAGE if way == "stream and usage" else None)
    if came_as_stream:
        chunks = [without_padding(chunk) for chunk in chunks_of(reply) if "usage" not in chunk]
        assert chunks == [without_padding(without_name(chunk)) for chunk in form.chunks]
    else:
        kind = form.whole["object"]
        said = without_name(form.whole) if way == "stream and usage" else _without_usage(form.whole)
        assert put_together(reply) | {"object": kind} == said


def _without_usage(whole: Any) -> Any:
    return {k: v for k, v in without_name(whole).items() if k != "usage"}


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("name", FORMS)
def test_a_hit_says_in_every_form_what_the_engine_says(
    name: str, first: str, fake: Fake, gateway: Gateway
) -> None:
    form = FORMS[name]
    fake.script(form.as_body() if first == "whole" else form.as_stream())
    asked = question(form)
    reply = gateway.post(form.path, asked | WAYS[first])
    assert reply.cache == "miss"
    assert_says(form, reply, first, came_as_stream=first != "whole")
    for way, said in WAYS.items():
        again = gateway.post(form.path, asked | said)
        assert again.cache == "hit", f"{way} after {first}: {again.cache_status}"
        assert_says(form, again, way, came_as_stream=first != "whole")
    assert fake.calls == 1


@pytest.mark.parametrize("name", FORMS)
def test_a_join_says_in_every_form_what_the_engine_says(
    name: str, fake: Fake, gateway: Gateway
) -> None:
    form = FORMS[name]
    fake.script(
        form.as_body() | {"delay_s": JOINABLE_S},
        form.as_stream(pause_s=0.01) | {"delay_s": JOINABLE_S},
    )
    wholly, streaming = question(form), question(form)
    with (
        leading(gateway, fake, form.path, wholly) as whole_leader,
        leading(gateway, fake, form.path, streaming | STREAM) as stream_leader,
    ):
        replies = at_once(
            [
                lambda asked=asked, said=said: gateway.post(form.path, asked | said)
                for asked in (wholly, streaming)
                for said in WAYS.values()
            ]
        )
    assert_says(form, whole_leader(), "whole", came_as_stream=False)
    assert_says(form, stream_leader(), "stream", came_as_stream=True)
    for position, reply in enumerate(replies):
        way = list(WAYS)[position % len(WAYS)]
        assert reply.cache == "join"
        assert_says(form, reply, way, came_as_stream=position >= len(WAYS))
    assert fake.calls == 2


@contextlib.contextmanager
def leading(gateway: Gateway, fake: Fake, path: str, body: Any) -> Iterator[Callable[[], Reply]]:
    """A request that is under way at the engine; its answer, once asked for."""
    with ThreadPoolExecutor(1) as pool:
        calls = fake.calls
        future = pool.submit(gateway.post, path, body)
        deadline = time.monotonic() + 5
        while fake.calls == calls and time.monotonic() < deadline:
            time.sleep(0.002)
        yield future.result


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_answers_in_the_other_form_is_understood(
    way: str, fake: Fake, gateway: Gateway
) -> None:
    form = FORMS["two parallel tool calls"]
    fake.script(form.as_stream() if way == "whole" else form.as_body())
    asked = question(form)
    for cache in ("miss", "hit"):
        reply = gateway.post(CHAT, asked | WAYS[way])
        assert reply.cache == cache
        assert_says(form, reply, way, came_as_stream=way == "whole")


def test_a_recorded_stream_is_cut_where_the_engine_cut_it(fake: Fake, gateway: Gateway) -> None:
    pieces = ["", "a", "\U0001f469", "\u200d", "", "bc" * 400, "é", "\n"]
    chunk = {"delta": {"role": "assistant", "content": ""}}
    fake.script(
        {
            "sse": [chunk]
            + [{"delta": {"content": piece}} for piece in pieces]
            + [{"delta": {}, "finish_reason": "stop"}, "[DONE]"]
        }
    )
    asked = question(stream=True)
    gateway.post(CHAT, asked)
    hit = gateway.post(CHAT, asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in hit.events[1:-2]]
    assert [delta["content"] for delta in deltas] == pieces


# 19: usage ----------------------------------------------------------------------------------


def sent_upstream(fake: Fake) -> bytes:
    return fake.bodies[-1]


@pytest.mark.parametrize(
    "habit",
    [
        "a chunk at the end",
        "null in every chunk",
        "counts in every chunk",
        "counts in the finishing chunk",
        "never",
    ],
)
@pytest.mark.parametrize("way", ["stream", "stream and usage"])
def test_usage_shows_only_where_it_was_asked_for(
    way: str, habit: str, fake: Fake, gateway: Gateway
) -> None:
    form = FORMS["plain"]
    in_chunks = {"null in every chunk": None, "counts in every chunk": USAGE}
    chunks = [
        chunk | ({"usage": in_chunks[habit]} if habit in in_chunks else {}) for chunk in form.chunks
    ]
    if habit == "counts in the finishing chunk":
        chunks[-1]["usage"] = USAGE
    tells = Form(form.path, form.whole, chunks)
    fake.script(tells.as_stream(usage=habit not in {"never", "counts in the finishing chunk"}))
    asked = question()
    replies = [gateway.post(CHAT, asked | WAYS[way]) for _ in range(2)]
    shown = USAGE if way == "stream and usage" and habit != "never" else None
    for reply in replies:
        assert_valid(CHAT, reply)
        assert usage_of(reply) == shown
        if way == "stream":
            assert not any("usage" in chunk for chunk in chunks_of(reply))
    whole = gateway.post(CHAT, asked)
    assert usage_of(whole) == (None if habit == "never" else USAGE)


def test_usage_is_asked_of_the_engine_without_touching_the_rest(
    fake: Fake, gateway: Gateway
) -> None:
    body = b'{ "model":"m1","stream" : true,\n"temperature":0.0,"messages":[],"x":"\\u00e9" }'
    gateway.request("POST", CHAT, body)
    sent = sent_upstream(fake)
    assert json.loads(sent)["stream_options"] == {"include_usage": True}
    assert sent.replace(b'"stream_options":{"include_usage":true},', b"") == body


@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"include_usage": False},
        {"include_usage": None},
        {"continuous_usage_stats": False},
    ],
    ids=str,
)
def test_a_field_that_the_client_sent_is_replaced_and_not_doubled(
    options: Any, fake: Fake, gateway: Gateway
) -> None:
    asked = question(stream=True, stream_options=options, top_k=1)
    reply = gateway.post(CHAT, asked)
    pairs = json.loads(sent_upstream(fake), object_pairs_hook=list)
    names = [name for name, _ in pairs]
    assert names == list(asked)
    assert json.loads(sent_upstream(fake))["stream_options"]["include_usage"] is True
    assert usage_of(reply) is None


@pytest.mark.parametrize("said", [WHOLE, STREAM_AND_USAGE, {"stream": False}], ids=str)
def test_bytes_go_up_as_they_came_where_nothing_must_be_injected(
    said: dict[str, Any], fake: Fake, gateway: Gateway
) -> None:
    """47, for every request that needs no change."""
    body = json.dumps(question(tools=[{"z": 1}, {"a": 0.0}], **said), indent=1).encode()
    gateway.request("POST", CHAT, body)
    assert sent_upstream(fake) == body


# 21: names ----------------------------------------------------------------------------------


def names_of(reply: Reply) -> set[tuple[str, int]]:
    bodies = reply.events[:-1] if is_stream(reply) else [reply.json]
    return {(body["id"], body["created"]) for body in bodies}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_reply_has_one_name_of_its_own_and_the_present_time(
    path: str, fake: Fake, gateway: Gateway
) -> None:
    form = FORMS["plain" if path == CHAT else "a plain text"]
    fake.script(form.as_stream() | {"delay_s": JOINABLE_S})
    asked = question(form)
    before = int(time.time())
    with leading(gateway, fake, path, asked | STREAM) as leader:
        joins = at_once([lambda: gateway.post(path, asked | STREAM_AND_USAGE)] * 3)
    hits = [gateway.post(path, asked | said) for said in (*WAYS.values(), *WAYS.values())]
    names = [names_of(reply) for reply in [leader(), *joins, *hits]]
    assert all(len(one) == 1 for one in names)
    assert len({name for one in names for name, _ in one}) == len(names)
    prefix = "chatcmpl-" if path == CHAT else "cmpl-"
    for ((name, created),) in names[1:]:
        assert name.startswith(prefix)
        assert before <= created <= time.time()


def test_the_calls_of_a_hit_keep_the_names_that_the_next_request_will_use(
    fake: Fake, gateway: Gateway
) -> None:
    """22: a tool's answer names the call it belongs to."""
    form = FORMS["two parallel tool calls"]
    fake.script(form.as_stream())
    asked = question(form)
    gateway.post(CHAT, asked | STREAM)
    calls = gateway.post(CHAT, asked).json["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in calls] == ["call_1", "call_2"]


# 13, 14, 15: only a complete success is stored ----------------------------------------------


class Ended:
    """An answer that may have broken off."""

    def __init__(self, reply: Reply, is_complete: bool) -> None:
        self.reply = reply
        self.is_complete = is_complete

    @property
    def events(self) -> list[Any]:
        return self.reply.events


def ask_to_the_end(gateway: Gateway, path: str, body: Any) -> Ended:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        try:
            data, is_complete = response.read(), True
        except http.client.IncompleteRead as broken:
            data, is_complete = broken.partial, False
        return Ended(Reply(response.status, dict(response.headers), data), is_complete)
    finally:
        connection.close()


def assert_nothing_was_stored(gateway: Gateway, fake: Fake, asked: Any) -> None:
    calls = fake.calls
    fake.script(default=RIGHT)
    replies = [gateway.post(CHAT, asked | way) for way in WAYS.values()]
    assert [reply.cache for reply in replies] == ["miss", "hit", "hit"]
    for reply in replies:
        assert_right(reply)
    assert fake.calls == calls + 1


def assert_right(reply: Reply) -> None:
    assert reply.status == 200
    assert_valid(CHAT, reply)
    assert text_of(reply) == RIGHT["content"]


def whole_reply(**choice: Any) -> dict[str, Any]:
    form = FORMS["plain"]
    return {"body": form.whole | {"choices": [form.whole["choices"][0] | choice]}}


def stream_reply(*events: Any, done: bool = True, **reply: Any) -> dict[str, Any]:
    start = [{"delta": {"role": "assistant"}}, {"delta": {"content": "Half an"}}]
    return {"sse": [*start, *events, *(["[DONE]"] if done else [])], **reply}


RIGHT = {"content": "the right answer"}
ERROR = {"error": {"message": "out of memory", "type": "server_error", "code": None}}
GZIP = {"headers": {"Content-Encoding": "gzip"}}

GOES_THROUGH = {
    "length": whole_reply(finish_reason="length"),
    "content_filter": whole_reply(finish_reason="content_filter"),
    "null": whole_reply(finish_reason=None),
    "an unknown finish": whole_reply(finish_reason="error"),
    "an empty finish": whole_reply(finish_reason=""),
    "a finish that is no word": whole_reply(finish_reason={"type": "stop"}),
    "one choice of two cut": {
        "body": FORMS["plain"].whole
        | {
            "choices": [
                {**FORMS["plain"].whole["choices"][0], "finish_reason": r}
                for r in ("stop", "length")
            ]
        }
    },
    "no choices": {"body": FORMS["plain"].whole | {"choices": []}},
    "choices of another type": {"body": FORMS["plain"].whole | {"choices": "none"}},
    "an error body": {"body": ERROR},
    "a list": {"body": [1, 2]},
    "null as a body": {"body": "null"},
    "cut JSON": {"body": '{"id":"x","choices":[{"index":0,"mess'},
    "one key twice": {
        "body": '{"choices":[{"finish_reason":"stop"}],"choices":[{"finish_reason":"stop"}]}'
    },
    "not a number": {"body": '{"choices":[{"finish_reason":"stop","logprobs":NaN}]}'},
    "a page": {"body": "<html>Bad gateway</html>", "content_type": "text/html"},
    "nothing": {"body": ""},
    "accepted": {"status": 202, "body": FORMS["plain"].whole},
    "partial content": {"status": 206, "body": FORMS["plain"].whole},
    "a redirect": {"status": 307, "body": {}, "headers": {"Location": "/elsewhere"}},
    "a bad request": {"status": 400, "body": ERROR},
    "an unknown model": {"status": 404, "body": ERROR},
    "too many requests": {"status": 429, "body": ERROR, "headers": {"Retry-After": "7"}},
    "a failure": {"status": 500, "body": ERROR},
    "an overload": {"status": 503, "body": "busy", "content_type": "text/plain"},
}
"""Whole answers that aren't complete successes: theirs to tell, not ours to keep."""


@pytest.mark.parametrize("name", GOES_THROUGH)
def test_an_answer_that_is_no_complete_success_goes_through_and_is_not_stored(
    name: str, fake: Fake, gateway: Gateway
) -> None:
    said = GOES_THROUGH[name]
    fake.script(said)
    asked = question()
    reply = gateway.post(CHAT, asked)
    body = said["body"] if isinstance(said["body"], str) else json.dumps(said["body"])
    assert reply.status == said.get("status", 200)
    assert reply.body == body.encode()
    assert reply.headers["content-type"] == said.get("content_type", "application/json")
    for header, value in said.get("headers", {}).items():
        assert reply.headers[header.lower()] == value
    assert reply.cache == "miss"
    assert_nothing_was_stored(gateway, fake, asked)


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ({"fault": "reset"}, 502, "engine-reset"),
        ({"fault": "garbage"}, 502, "engine-protocol"),
        ({"fault": "hang"}, 504, "engine-timeout-first-byte"),
        ({"body": FORMS["plain"].whole, **GZIP}, 502, "engine-protocol"),
        (stream_reply(**GZIP), 502, "engine-protocol"),
    ],
    ids=["reset", "garbage", "hang", "compressed", "a compressed stream"],
)
def test_an_engine_without_an_answer_is_an_error_with_its_reason(
    fault: dict[str, Any], status: int, code: str, way: str, fake: Fake, gateway: Gateway
) -> None:
    fake.script(default=fault)  # a reset of a connection used before is tried once more
    asked = question()
    reply = gateway.post(CHAT, asked | WAYS[way])
    assert reply.status == status
    assert reply.json["error"]["code"] == code
    assert_nothing_was_stored(gateway, fake, asked)


STREAMS_THROUGH = {
    "length": stream_reply({"delta": {}, "finish_reason": "length"}),
    "content_filter": stream_reply({"delta": {}, "finish_reason": "content_filter"}),
    "no finish": stream_reply(),
    "an unknown finish": stream_reply({"delta": {}, "finish_reason": "error"}),
    "an error event": stream_reply(json.dumps(ERROR)),
    "an error event after the finish": stream_reply(
        {"delta": {}, "finish_reason": "stop"}, json.dumps(ERROR)
    ),
    "nothing but an error event": {"sse": [json.dumps(ERROR), "[DONE]"]},
    "no chunks": {"sse": ["[DONE]"]},
    "invalid JSON": stream_reply('{"choices":[{"ind', {"delta": {}, "finish_reason": "stop"}),
    "half a letter": stream_reply(
        '{"choices":[{"index":0,"delta":{"content":"\\ud83d"},"finish_reason":null}]}',
        '{"choices":[{"index":0,"delta":{"content":"\\ude00"},"finish_reason":null}]}',
        {"delta": {}, "finish_reason": "stop"},
    ),
    "text of two types": stream_reply(
        {"delta": {"content": [{"type": "text", "text": "a"}]}},
        {"delta": {"content": "World"}},
        {"delta": {}, "finish_reason": "stop"},
    ),
    "choices of another type": stream_reply(
        {"choices": {"index": 0}}, {"delta": {}, "finish_reason": "stop"}
    ),
}
"""Streams that end properly but aren't complete successes."""


@pytest.mark.parametrize("name", STREAMS_THROUGH)
def test_a_stream_that_is_no_complete_success_goes_through_and_is_not_stored(
    name: str, fake: Fake, gateway: Gateway
) -> None:
    asked = question(stream_options={"include_usage": True})
    fake.script(STREAMS_THROUGH[name])
    direct = fake.post(CHAT, asked | STREAM)
    fake.reset()
    fake.script(STREAMS_THROUGH[name])
    reply = gateway.post(CHAT, asked | STREAM)
    assert reply.cache == "miss"
    assert reply.body == direct.body
    assert_nothing_was_stored(gateway, fake, asked)


BREAKS_OFF = {
    "a clean end without [DONE]": stream_reply(fault="end_after", after=2),
    "a finish, but no [DONE]": stream_reply({"delta": {}, "finish_reason": "stop"}, done=False),
    "a reset": stream_reply(fault="reset_after", after=2),
    "half an event": stream_reply(fault="half_event", after=2),
    "silence": stream_reply(chunk_delay_s=3.0),
}
"""Streams that end too early."""


@pytest.mark.parametrize("name", BREAKS_OFF)
def test_a_stream_that_breaks_off_ends_with_an_error_and_never_with_done(
    name: str, fake: Fake, gateway: Gateway
) -> None:
    fake.script(BREAKS_OFF[name])
    asked = question()
    ended = ask_to_the_end(gateway, CHAT, asked | STREAM)
    assert ended.reply.status == 200
    assert "[DONE]" not in ended.events
    assert not ended.is_complete
    assert ended.events[-1]["error"]["code"].startswith("engine-")
    assert sum("error" in event for event in ended.events) == 1
    assert_nothing_was_stored(gateway, fake, asked)


def test_an_error_event_is_the_last_word_of_a_stream_that_ends_with_it(
    fake: Fake, gateway: Gateway
) -> None:
    """Engines that fail midway say so and close; a second error of ours would only hide theirs."""
    fake.script(stream_reply(json.dumps(ERROR), done=False))
    asked = question()
    ended = ask_to_the_end(gateway, CHAT, asked | STREAM)
    assert ended.events[-1] == ERROR
    assert sum("error" in event for event in ended.events) == 1
    assert "[DONE]" not in ended.events
    assert_nothing_was_stored(gateway, fake, asked)


def test_a_client_of_a_stream_is_told_of_an_error_in_an_event(fake: Fake, gateway: Gateway) -> None:
    """Status 200 and a JSON body, where events were asked for: an SSE client would see nothing."""
    fake.script({"body": ERROR})
    asked = question()
    reply = gateway.post(CHAT, asked | STREAM)
    assert is_stream(reply)
    assert reply.events == [ERROR]
    assert_nothing_was_stored(gateway, fake, asked)


NO_ANSWER = {
    "a failure": {"status": 500, "body": ERROR},
    "too many requests": {"status": 429, "body": ERROR},
    "garbage": {"fault": "garbage"},
    "compressed": {"body": FORMS["plain"].whole, **GZIP},
    "an error body": {"body": ERROR},
    "cut JSON": {"body": '{"choices":[{"ind'},
    "a page": {"body": "<html>", "content_type": "text/html"},
    "nothing but an error event": {"sse": [json.dumps(ERROR), "[DONE]"]},
    "an error event and no more": {"sse": [json.dumps(ERROR)]},
    "no chunks": {"sse": ["[DONE]"]},
    "nothing": {"body": ""},
}
"""What fails before an answer has begun."""


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("name", NO_ANSWER)
def test_followers_do_not_share_a_failure_before_the_first_chunk(
    name: str, way: str, fake: Fake, gateway: Gateway
) -> None:
    """38: whoever had joined gets an answer after all, for one more call between them."""
    fake.script(NO_ANSWER[name] | {"delay_s": JOINABLE_S}, default=RIGHT | {"delay_s": 0.02})
    asked = question()
    with leading(gateway, fake, CHAT, asked | WAYS[way]) as leader:
        followers = at_once(
            [lambda said=said: gateway.post(CHAT, asked | said) for said in (*WAYS.values(), WHOLE)]
        )
    with contextlib.suppress(http.client.IncompleteRead):
        assert leader().cache in {"miss", "none"}
    for reply in followers:
        assert_right(reply)
    assert fake.calls == 2


UNREADABLE = {
    name: STREAMS_THROUGH[name] for name in ("invalid JSON", "half a letter", "text of two types")
}
WRONG_MIDWAY = {
    **UNREADABLE,
    "an error event": STREAMS_THROUGH["an error event"],
    **{
        name: BREAKS_OFF[name]
        for name in ("a clean end without [DONE]", "a reset", "half an event")
    },
}


@pytest.mark.parametrize("name", WRONG_MIDWAY)
def test_who_follows_a_stream_that_goes_wrong_sees_all_that_its_leader_sees(
    name: str, fake: Fake, gateway: Gateway
) -> None:
    """And who wants one body is never given a piece for the whole: what has failed is an error,
    and what only can't be read is asked for again in its own form."""
    fake.script(WRONG_MIDWAY[name] | {"delay_s": JOINABLE_S}, default=RIGHT)
    asked = question()
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(ask_to_the_end, gateway, CHAT, asked | STREAM_AND_USAGE)
        wait_for_a_call(fake)
        follower, whole = at_once(
            [
                lambda: ask_to_the_end(gateway, CHAT, asked | STREAM_AND_USAGE),
                lambda: ask_to_the_end(gateway, CHAT, asked),
            ]
        )
    assert [told(block) for block in blocks_of(follower)] == [
        told(block) for block in blocks_of(leader.result())
    ]
    assert follower.is_complete is leader.result().is_complete
    if name in UNREADABLE:
        assert_right(whole.reply)
        assert fake.calls == 2
    else:
        assert whole.reply.status == 502
        assert whole.reply.json["error"]["code"].startswith("engine-")
        assert fake.calls == 1


def wait_for_a_call(fake: Fake) -> None:
    deadline = time.monotonic() + 5
    while fake.calls == 0 and time.monotonic() < deadline:
        time.sleep(0.002)


def blocks_of(ended: Ended) -> list[bytes]:
    return ended.reply.body.split(b"\n\n")[:-1]


def told(block: bytes) -> Any:
    """What an event says, whatever its name; its bytes where it can't be read."""
    try:
        return without_name(json.loads(block.removeprefix(b"data: ")))
    except ValueError:
        return block


def test_a_last_event_without_its_blank_line_still_ends_the_stream(
    fake: Fake, gateway: Gateway
) -> None:
    """Some servers close right after the word: everything has been said by then."""
    form = FORMS["plain"]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in form.chunks)
    fake.script({"body": events + "data: [DONE]", "content_type": "text/event-stream"})
    asked = question()
    ended = ask_to_the_end(gateway, CHAT, asked | STREAM)
    assert ended.is_complete
    assert ended.events[-1] == "[DONE]"
    again = gateway.post(CHAT, asked)
    assert again.cache == "hit"
    assert text_of(again) == "Hello there."


@pytest.mark.parametrize("newline", ["\r\n", "\r", "\n"])
def test_events_of_every_spelling_are_understood(
    newline: str, fake: Fake, gateway: Gateway
) -> None:
    form = FORMS["plain"]
    lines = ["\ufeff: hello", "", "retry: 5", "", ": keep alive"]
    for chunk in form.chunks:
        first, second = json.dumps(chunk).split(", ", 1)
        lines += [
            "event: chunk",
            "id: 7",
            f"data:{first},",
            f"data: {second}",
            "",
            ": keep alive",
            "",
        ]
    body = newline.join([*lines, "data:[DONE]", "", ""])
    fake.script({"body": body, "content_type": "text/event-stream; charset=utf-8"})
    asked = question()
    first = gateway.post(CHAT, asked | STREAM)
    assert first.body.decode() in {body, body.removeprefix("\ufeff")}
    for way, said in WAYS.items():
        again = gateway.post(CHAT, asked | said)
        assert again.cache == "hit"
        assert_valid(CHAT, again)
        assert text_of(again) == "Hello there.", way


# 23: tenants --------------------------------------------------------------------------------

TENANTS = """
[tenants.red]
api_key_file = "{red}"
[tenants.blue]
api_key_env = "BLUE_KEY"
"""
RED, RED_TOO, BLUE = "red-key-1", "red-key-2", "blue-key-1"


@pytest.fixture(scope="module")
def shared_gateway(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two tenants before one engine."""
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "red"
    keys.write_text(f"{RED}\n{RED_TOO}\n")
    toml = TENANTS.format(red=keys)
    environment = {"BLUE_KEY": BLUE}
    with running(
        served := Gateway(toml, upstream=fake.url, folder=folder, environment=environment)
    ):
        yield served
    for key in (RED, RED_TOO, BLUE):
        assert key not in served.stderr


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} | headers


@pytest.mark.parametrize("first", WAYS)
def test_no_form_of_an_answer_reaches_another_tenant(
    first: str, fake: Fake, shared_gateway: Gateway
) -> None:
    asked = question()
    mine = shared_gateway.post(CHAT, asked | WAYS[first], bearer(RED))
    for way in WAYS.values():
        theirs = shared_gateway.post(CHAT, asked | way, bearer(BLUE))
        again = shared_gateway.post(CHAT, asked | way, bearer(RED))
        assert again.cache == "hit"
        assert text_of(again) == text_of(mine)
        assert text_of(theirs) != text_of(mine)
        assert cache_key(again) != cache_key(theirs)
    assert fake.calls == 2


def cache_key(reply: Reply) -> str:
    return reply.cache_status.partition('key="')[2].partition('"')[0]


def test_tenants_do_not_join_each_other(fake: Fake, shared_gateway: Gateway) -> None:
    fake.script(delay_s=0.15)
    asked = question()
    keys = [RED, BLUE] * 4
    replies = at_once(
        [lambda key=key: shared_gateway.post(CHAT, asked, bearer(key)) for key in keys]
    )
    assert len({text_of(reply) for reply in replies[::2]}) == 1
    assert len({text_of(reply) for reply in replies[1::2]}) == 1
    assert text_of(replies[0]) != text_of(replies[1])
    assert fake.calls == 2


def test_every_key_of_a_tenant_in_every_header_opens_the_same_cache(
    fake: Fake, shared_gateway: Gateway
) -> None:
    asked = question()
    shared_gateway.post(CHAT, asked, bearer(RED))
    for headers in (
        bearer(RED_TOO),
        {"X-Api-Key": RED},
        {"Authorization": f"bearer  {RED}"},
    ):
        assert shared_gateway.post(CHAT, asked, headers).cache == "hit"
    assert fake.calls == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings", "/v1/models"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("nobody's"),
        bearer(""),
        bearer(f"{RED}x"),
        {"Authorization": RED},
        {"X-Api-Key": ""},
    ],
    ids=["none", "unknown", "empty", "longer", "no scheme", "empty header"],
)
def test_who_has_no_key_gets_nothing_and_costs_nothing(
    headers: dict[str, str], path: str, fake: Fake, shared_gateway: Gateway
) -> None:
    method, body = ("GET", None) if path == "/v1/models" else ("POST", question())
    reply = shared_gateway.request(method, path, body, headers)
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json["error"]["code"] == "invalid-api-key"
    assert "nobody's" not in reply.body.decode()
    assert fake.calls == 0


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
def test_a_tenants_key_and_our_headers_end_at_the_gateway(
    path: str, fake: Fake, shared_gateway: Gateway
) -> None:
    ours = {"X-Preheat-Namespace": "n", "X-Preheat-Tags": "t", "X-Preheat-Session": "s"}
    shared_gateway.post(path, question(), bearer(RED, **ours))
    (sent,) = fake.log["requests"]
    assert RED not in json.dumps(sent["headers"])
    assert not [name for name in sent["headers"] if name.startswith("x-preheat")]


def test_namespaces_of_one_tenant_are_apart(fake: Fake, shared_gateway: Gateway) -> None:
    asked = question()
    spaces = ["", "a", "b", "A"]
    firsts, seconds = (
        [
            shared_gateway.post(
                CHAT, asked, bearer(RED, **({"X-Preheat-Namespace": space} if space else {}))
            )
            for space in spaces
        ]
        for _ in range(2)
    )
    assert [reply.cache for reply in firsts] == ["miss"] * 4
    assert [reply.cache for reply in seconds] == ["hit"] * 4
    assert len({text_of(reply) for reply in firsts}) == 4
    assert [text_of(reply) for reply in seconds] == [text_of(reply) for reply in firsts]


def test_what_one_tenant_invalidates_and_pays_is_its_own(
    fake: Fake, shared_gateway: Gateway
) -> None:
    asked = question()
    for key in (RED, BLUE):
        shared_gateway.post(CHAT, asked, bearer(key))
    before = {
        row["tenant"]: row["requests"]
        for row in shared_gateway.ledger["rows"]
        if row["layer"] == "exact"
    }
    removed = shared_gateway.post("/preheat/v1/invalidate", {"tenant": "red"}).json
    assert removed["matched"] >= 1
    assert shared_gateway.post(CHAT, asked, bearer(RED)).cache == "miss"
    assert shared_gateway.post(CHAT, asked, bearer(BLUE)).cache == "hit"
    after = {
        row["tenant"]: row["requests"]
        for row in shared_gateway.ledger["rows"]
        if row["layer"] == "exact"
    }
    assert after.get("red", 0) == before.get("red", 0)
    assert after["blue"] == before.get("blue", 0) + 1


# 24: nothing is swapped ---------------------------------------------------------------------


def test_a_crowd_of_different_and_equal_requests_in_every_form_is_never_mixed_up(
    fake: Fake, shared_gateway: Gateway
) -> None:
    fake.script(default="echo", delay_s=0.02)
    crowd = [
        (f"token {number} of {key}", key, way)
        for number in range(16)
        for key in (RED, BLUE)
        for way in WAYS.values()
        for _ in range(2)
    ]
    marker = next(_numbers)

    def ask(text: str, key: str, way: dict[str, Any]) -> Reply:
        return shared_gateway.post(CHAT, chat(f"{text} {marker}") | way, bearer(key))

    with ThreadPoolExecutor(48) as pool:
        replies = list(pool.map(lambda one: ask(*one), crowd))
    for (text, _, way), reply in zip(crowd, replies, strict=True):
        assert_valid(CHAT, reply)
        assert text_of(reply) == f"echo: {text} {marker}"
        assert is_stream(reply) is bool(way)
        assert (usage_of(reply) is None) is (way == STREAM)
    assert fake.calls == 32


# 1, 4, 5: what is in the key ----------------------------------------------------------------

MATTERS: list[dict[str, Any]] = [
    {"model": "m2"},
    {"max_tokens": 5},
    {"max_completion_tokens": 5},
    {"seed": 1},
    {"stop": "x"},
    {"stop": ["x"]},
    {"n": 2},
    {"top_p": 0.5},
    {"top_k": 5},
    {"min_p": 0.1},
    {"presence_penalty": 0.1},
    {"frequency_penalty": 0.1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"50": -100}},
    {"logprobs": True},
    {"logprobs": False},
    {"top_logprobs": 2},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "text"}},
    {"tools": []},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "none"},
    {"parallel_tool_calls": False},
    {"reasoning_effort": "low"},
    {"guided_choice": ["a"]},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"extra_body": {"x": 1}},
    {"modalities": ["text"]},
    {"verbosity": "low"},
    {"a_field_of_next_year": ""},
    {"": 1},
]
MATTERS_NOT: list[dict[str, Any]] = [
    {"stream": False},
    {"user": "u"},
    {"metadata": {"a": "b"}},
    {"safety_identifier": "s"},
    {"prompt_cache_key": "k"},
    {"prompt_cache_retention": "24h"},
    {"service_tier": "flex"},
    {"seed": None},
    {"temperature": 0.0},
    {"temperature": -0.0},
]


def test_every_field_that_may_change_an_answer_has_its_own(fake: Fake, gateway: Gateway) -> None:
    asked = question()
    bodies = [asked, *(asked | field for field in MATTERS)]
    for cache in ("miss", "hit"):
        for body in bodies:
            assert gateway.post(CHAT, body).cache == cache, body
    assert fake.calls == len(bodies)


def test_a_field_that_changes_nothing_costs_nothing(fake: Fake, gateway: Gateway) -> None:
    asked = question()
    gateway.post(CHAT, asked)
    for field in MATTERS_NOT:
        assert gateway.post(CHAT, asked | field).cache == "hit", field
    assert fake.calls == 1
