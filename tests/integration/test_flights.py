"""Equal requests at once: one engine call, everybody's answer, whoever comes, leaves or fails."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from harness import Fake, Gateway, chat, running
from memory import PeakMemory
from rawclient import Answer, Raw, post
from upstream import End, Step, Upstream

MIB = 1_048_576
USAGE = {"include_usage": True}


@pytest.fixture(autouse=True)
def _clean(fake: Fake) -> None:
    fake.reset()


@pytest.fixture(autouse=True, scope="module")
def _sound(gateway: Gateway, narrow: Gateway) -> Iterator[None]:
    """After all of it nobody has seen a bug, and no call is left over."""
    yield
    for served in (gateway, narrow):
        assert served.get("/healthz").status == 200
        assert "Traceback" not in served.stderr, served.stderr
        assert '"event":"bug"' not in served.stderr, served.stderr
        assert "preheat_flights 0.0" in served.get("/metrics").body.decode()
        assert served.ledger["residual"] == 0


@contextmanager
def clients(served: Gateway, count: int) -> Iterator[list[Raw]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Raw(served.port)) for _ in range(count)]


def wait_for(condition: Callable[[], object], within_s: float = 8.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "it doesn't come true"
        time.sleep(0.01)


def lead(client: Raw, fake: Fake, request: bytes, calls: int = 1) -> None:
    """Send it and wait until its engine call is under way."""
    client.send(request)
    wait_for(lambda: fake.calls == calls)


def follow(served: Gateway, followers: Sequence[Raw], requests: Sequence[bytes]) -> None:
    """Send these and wait until the gateway has read them: it has answered a later one."""
    for client, request in zip(followers, requests, strict=True):
        client.send(request)
    assert served.get("/healthz").status == 200


def deltas(answer: Answer) -> list[Any]:
    return [event["choices"] for event in answer.events if event != "[DONE]"]


def said(answer: Answer) -> str:
    assert answer.status == 200, (answer.status, answer.body)
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.is_complete
        assert answer.events[-1] == "[DONE]"
        choices = [choice for choices in deltas(answer) for choice in choices]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    return str(answer.json["choices"][0]["message"]["content"])


def name(answer: Answer) -> str:
    """The one id that its body bears."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return str(answer.json["id"])
    names = {event["id"] for event in answer.events if event != "[DONE]"}
    assert len(names) == 1
    return str(names.pop())


def usage(answer: Answer) -> bool:
    """Whether it tells its usage, where OpenAI's does: in the body, or in a last chunk alone."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return bool(answer.json.get("usage"))
    telling = [event for event in answer.events if event != "[DONE]" and event.get("usage")]
    assert all(event["choices"] == [] for event in telling)
    assert telling in ([], [answer.events[-2]])
    return bool(telling)


# All at once ---------------------------------------------------------------------------------

MIXES: dict[str, list[dict[str, Any]]] = {
    "streams": [{"stream": True}],
    "wholes": [{}],
    "stream-leads": [{"stream": True}, {}],
    "whole-leads": [{}, {"stream": True}],
    "usage-mixed": [
        {"stream": True},
        {"stream": True, "stream_options": USAGE},
        {},
        {"stream": True, "stream_options": {"include_usage": False}},
    ],
    "usage-leads": [{"stream": True, "stream_options": USAGE}, {"stream": True}, {}],
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_100_equal_requests_at_once_cost_one_call(
    gateway: Gateway, fake: Fake, mix: list[dict[str, Any]]
) -> None:
    text = f"all at once {mix}"
    fake.script({"content": "one for all", "pieces": 4, "delay_s": 0.4})
    wanted = [mix[place % len(mix)] for place in range(100)]
    with clients(gateway, 100) as crowd:
        lead(crowd[0], fake, post(chat(text, **wanted[0])))
        follow(gateway, crowd[1:], [post(chat(text, **fields)) for fields in wanted[1:]])
        answers = [client.answer() for client in crowd]
    assert fake.calls == 1
    assert {said(answer) for answer in answers} == {"one for all"}
    assert answers[0].cache == "miss"
    assert {answer.cache for answer in answers[1:]} == {"join"}
    assert {answer.detail for answer in answers[1:]} == {"join"}
    assert len({name(answer) for answer in answers}) == 100
    assert len({answer.headers["x-preheat-request"] for answer in answers}) == 100
    for answer, fields in zip(answers, wanted, strict=True):
        assert answer.headers["content-type"].startswith(
            "text/event-stream" if fields.get("stream") else "application/json"
        )
        is_told = fields.get("stream_options") == USAGE or not fields.get("stream")
        assert usage(answer) == is_told, fields
    streams = [
        deltas(answer)
        for answer, fields in zip(answers, wanted, strict=True)
        if fields.get("stream")
    ]
    assert all(
        [part for part in stream if part] == [part for part in streams[0] if part]
        for stream in streams
    )


def test_100_equal_sampled_requests_are_100_calls(gateway: Gateway, fake: Fake) -> None:
    fake.script(delay_s=0.3)
    with clients(gateway, 100) as crowd:
        for client in crowd:
            client.send(post(chat("sampled", temperature=0.7)))
        answers = [client.answer() for client in crowd]
    assert fake.calls == 100
    assert len({said(answer) for answer in answers}) == 100
    assert {answer.cache for answer in answers} == {"bypass"}


@pytest.mark.parametrize("who", ["leader", "follower", "both"])
def test_a_request_that_wants_nothing_stored_never_joins(
    gateway: Gateway, fake: Fake, who: str
) -> None:
    fake.script(delay_s=0.2)
    private = "Cache-Control: no-store\r\n"
    with clients(gateway, 2) as (first, second):
        lead(first, fake, post(chat(f"store {who}"), headers=private if who != "follower" else ""))
        second.send(post(chat(f"store {who}"), headers=private if who != "leader" else ""))
        answers = [first.answer(), second.answer()]
    assert fake.calls == 2
    assert said(answers[0]) != said(answers[1])


def test_equal_requests_of_two_namespaces_don_t_meet(gateway: Gateway, fake: Fake) -> None:
    fake.script(delay_s=0.2)
    with clients(gateway, 3) as crowd:
        for client, namespace in zip(crowd, ("a", "b", "a"), strict=True):
            client.send(post(chat("namespaces"), headers=f"X-Preheat-Namespace: {namespace}\r\n"))
        answers = [said(client.answer()) for client in crowd]
    assert fake.calls == 2
    assert answers[0] == answers[2] != answers[1]


# Coming late and leaving early ---------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_who_joins_in_mid_stream_gets_everything_from_the_first_chunk(
    gateway: Gateway, fake: Fake, stream: bool
) -> None:
    fake.script({"content": "a b c d e f g h", "pieces": 8, "chunk_delay_s": 0.05})
    text = f"late {stream}"
    with clients(gateway, 2) as (leader, late):
        leader.send(post(chat(text, stream=True)))
        start = b"".join(b"".join(leader.until(b"\n\n\r\n")) for _ in range(4))
        late.send(post(chat(text, stream=stream)))
        leader.unread = start + leader.unread
        answers = [leader.answer(), late.answer()]
    assert fake.calls == 1
    assert [said(answer) for answer in answers] == ["a b c d e f g h"] * 2
    assert answers[1].cache == "join"
    assert name(answers[0]) != name(answers[1])
    if stream:
        assert deltas(answers[1]) == deltas(answers[0])


ONE_OF_EACH: list[dict[str, Any]] = [
    {"delta": {"role": "assistant", "content": ""}},
    *({"delta": {"content": text}} for text in ["one", " two", ' "three"', "\n", " é", " 😀", ""]),
    {"created": 7, "choices": [{"index": 0, "delta": {"content": " later"}}]},
    *({"created": 8, "choices": [{"index": 0, "delta": {"content": text}}]} for text in "abc"),
    {"delta": {"tool_calls": [{"index": 0, "id": "t", "function": {"name": "f"}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}},
    *({"delta": {"content": text}} for text in [" and", " on"]),
    {"choices": [{"index": 0, "delta": {"content": "!"}}], "usage": None},
    {"choices": [{"index": 0, "delta": {"content": "?"}}], "usage": None},
    {"delta": {}, "finish_reason": "stop"},
]


@pytest.mark.parametrize("chunk_delay_s", [0.0, 0.02], ids=["at-once", "one-by-one"])
def test_every_listener_is_told_each_event_as_the_engine_said_it(
    gateway: Gateway, fake: Fake, chunk_delay_s: float
) -> None:
    reply = {"sse": [*ONE_OF_EACH, "[DONE]"], "chunk_delay_s": chunk_delay_s, "delay_s": 0.1}
    fake.script(reply)
    text = f"one of each {chunk_delay_s}"
    with clients(gateway, 3) as (leader, early, late):
        lead(leader, fake, post(chat(text, stream=True)))
        follow(gateway, [early], [post(chat(text, stream=True))])
        start = b"".join(b"".join(leader.until(b"\n\n\r\n")) for _ in range(4))
        follow(gateway, [late], [post(chat(text, stream=True))])
        leader.unread = start + leader.unread
        answers = [leader.answer(), early.answer(), late.answer()]
        answers.append(late.ask(post(chat(text, stream=True))))
        whole = late.ask(post(chat(text)))
    assert fake.calls == 1
    told = [event.get("choices") or [{"index": 0, **event}] for event in ONE_OF_EACH]
    for answer in answers:
        assert answer.events[-1] == "[DONE]"
        assert [[{"finish_reason": None, **choices[0]}] for choices in deltas(answer)] == [
            [{"finish_reason": None, **choices[0]}] for choices in told
        ]
    times = [event.get("created") for event in ONE_OF_EACH]
    first = answers[0].events[0]["created"]
    assert [e["created"] for e in answers[0].events[:-1]] == [one or first for one in times]
    message = whole.json["choices"][0]["message"]
    assert message["content"] == 'one two "three"\n é 😀 laterabc and on!?'
    assert message["tool_calls"] == [{"id": "t", "function": {"name": "f", "arguments": "{}"}}]


def plain(text: str, finish: str = "null") -> bytes:
    said = f'"delta":{{"content":"{text}"}},"finish_reason":{finish}'
    return f'data: {{"id":"c","created":1,"choices":[{{"index":0,{said}}}]}}\n\n'.encode()


def test_a_stream_goes_through_byte_by_byte_however_the_network_cuts_it() -> None:
    parts = [
        *(plain("a"), plain("b"), b": the next line goes on with ", plain("a comment"), plain("c")),
        *(plain("d")[:30], plain("d")[30:], plain("e") + plain("f"), b": still there\n\n"),
        *(plain("g"), b"\n", plain("h"), b"data:\n", plain("i"), plain("j", '"stop"')),
        b"data: [DONE]\n\n",
    ]
    steps: list[Step] = [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"]
    for part in parts:
        steps += [part, 0.02]
    with Upstream() as engine:
        engine.play([*steps, End.CLOSE])
        served = Gateway(upstream=engine.url)
        with running(served), Raw(served.port) as client:
            answer = client.ask(post(chat(stream=True)))
            assert answer.body == b"".join(parts)
            assert said(client.ask(post(chat()))) == "abcdefghij"
        assert engine.calls == 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("leave", ["close", "reset"])
def test_a_leader_that_leaves_harms_nobody(
    gateway: Gateway, fake: Fake, stream: bool, leave: str
) -> None:
    fake.script({"content": "still here", "pieces": 5, "delay_s": 0.2, "chunk_delay_s": 0.05})
    request = post(chat(f"leader {leave} {stream}", stream=stream))
    with clients(gateway, 3) as (leader, follower, late):
        lead(leader, fake, request)
        follow(gateway, [follower], [request])
        getattr(leader, leave)()
        wait_for(lambda: "preheat_connections 3.0" in gateway.get("/metrics").body.decode())
        late.send(request)
        assert [said(follower.answer()), said(late.answer())] == ["still here"] * 2
        again = late.ask(request)
    assert (said(again), again.cache) == ("still here", "hit")
    assert (fake.calls, fake.log["cancelled"]) == (1, 0)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_when_everyone_leaves_the_call_is_cancelled_and_the_next_one_asks_anew(
    gateway: Gateway, fake: Fake, stream: bool
) -> None:
    fake.script({"content": "for nobody", "pieces": 2, "delay_s": 20})
    request = post(chat(f"everyone {stream}", stream=stream))
    with clients(gateway, 4) as crowd:
        lead(crowd[0], fake, request)
        follow(gateway, crowd[1:], [request] * 3)
        for client in crowd:
            client.close()
        wait_for(lambda: fake.log["cancelled"] == 1)
    with Raw(gateway.port) as client:
        answer = client.ask(request)
    assert (said(answer), answer.cache) == ("A2", "miss")


def test_who_comes_in_the_moment_when_the_last_one_leaves_is_answered(
    gateway: Gateway, fake: Fake
) -> None:
    """It may find the flight that is being cancelled, and mustn't wait for it for ever."""
    fake.script(default={"content": "for somebody", "delay_s": 0.1})
    for turn in range(20):
        request = post(chat(f"moment {turn}"))
        with clients(gateway, 17) as (leaving, *coming):
            lead(leaving, fake, request, calls=fake.calls + 1)
            leaving.reset()
            for client in coming:
                client.send(request)
            assert {said(client.answer()) for client in coming} == {"for somebody"}


# Failures ------------------------------------------------------------------------------------

ERROR_EVENT = {"error": {"message": "overloaded", "type": "server_error", "code": 503}}
EARLY: dict[str, dict[str, Any]] = {
    "reset": {"fault": "reset"},
    "status-500": {"status": 500, "body": {"error": {"message": "no", "code": "x"}}},
    "status-429": {
        "status": 429,
        "body": {"error": {"message": "slow down"}},
        "headers": {"Retry-After": "7"},
    },
    "garbage": {"fault": "garbage"},
    "error-event": {"sse": [json.dumps(ERROR_EVENT), "[DONE]"]},
    "nothing": {"sse": []},
}


def fails(answer: Answer) -> bool:
    """Whether it tells a failure: by its status, or in its only event."""
    if answer.status != 200:
        return "error" in answer.json
    return not answer.is_complete or "error" in answer.events[0]


@pytest.fixture(scope="module")
def narrow(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with one connection to its engine, so that it is known whether a call meets a
    used one: where that is reset before its answer, the client repeats the call on a fresh one."""
    served = Gateway(
        f'[engines.one]\nurl = "{fake.url}"\nmax_connections = 1\nbreaker_failures = 1000\n',
        folder=tmp_path_factory.mktemp("narrow"),
    )
    with running(served):
        yield served


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("fault", EARLY.values(), ids=EARLY)
def test_a_failure_before_the_first_chunk_is_the_leader_s_alone(
    narrow: Gateway, fake: Fake, fault: dict[str, Any], stream: bool
) -> None:
    """One of the followers leads once more, the others join it."""
    narrow.get("/v1/models")
    failing = [{**fault, "delay_s": 0.1}] * (2 if fault.get("fault") == "reset" else 1)
    fake.script(*failing, {"content": "second try", "pieces": 3, "delay_s": 0.1})
    text = f"early {fault} {stream}"
    with clients(narrow, 6) as crowd:
        lead(crowd[0], fake, post(chat(text, stream=stream)))
        follow(narrow, crowd[1:], [post(chat(text, stream=place % 2 == 0)) for place in range(5)])
        answers = [client.answer() for client in crowd]
    assert fails(answers[0])
    assert [said(answer) for answer in answers[1:]] == ["second try"] * 5
    assert sorted(answer.cache for answer in answers[1:]) == ["join"] * 4 + ["miss"]
    assert fake.calls == len(failing) + 1


@pytest.mark.parametrize("fault", EARLY.values(), ids=EARLY)
def test_a_second_failure_is_shared(narrow: Gateway, fake: Fake, fault: dict[str, Any]) -> None:
    narrow.get("/v1/models")
    failing = [{**fault, "delay_s": 0.1}] * (3 if fault.get("fault") == "reset" else 2)
    fake.script(*failing)
    text = f"second {fault}"
    with clients(narrow, 5) as crowd:
        lead(crowd[0], fake, post(chat(text, stream=True)))
        follow(narrow, crowd[1:], [post(chat(text, stream=place < 3)) for place in range(4)])
        answers = [client.answer() for client in crowd]
        assert all(fails(answer) for answer in answers), [answer.body for answer in answers]
        assert fake.calls == len(failing)
    with Raw(narrow.port) as client:  # nothing of it stays behind
        answer = client.ask(post(chat(text)))
    assert (said(answer), answer.cache) == (f"A{len(failing) + 1}", "miss")


@pytest.mark.parametrize("fault", ["reset_after", "end_after", "half_event"])
def test_a_failure_in_mid_stream_is_told_to_everyone_and_never_looks_complete(
    gateway: Gateway, fake: Fake, fault: str
) -> None:
    fake.script(
        {"content": "a b c d e f", "pieces": 6, "delay_s": 0.2, "chunk_delay_s": 0.02}
        | {"fault": fault, "after": 3}
    )
    kinds = [True, True, False, True, False]
    with clients(gateway, 5) as crowd:
        lead(crowd[0], fake, post(chat(fault, stream=True)))
        follow(gateway, crowd[1:], [post(chat(fault, stream=stream)) for stream in kinds[1:]])
        answers = [client.answer() for client in crowd]
        for client, answer, stream in zip(crowd, answers, kinds, strict=True):
            if stream:
                assert answer.status == 200
                assert not answer.is_complete
                assert "[DONE]" not in answer.events
                assert [event for event in answer.events if "error" in event] == answer.events[-1:]
                assert answer.events[-1]["error"]["code"] == "engine-reset"
                assert client.is_ended()
            else:
                assert (answer.status, answer.code) == (502, "engine-reset")
    assert fake.calls == 1
    with Raw(gateway.port) as client:
        assert client.ask(post(chat(fault))).cache == "miss"


# Too much ------------------------------------------------------------------------------------


def events_of(size: int, pieces: int) -> dict[str, Any]:
    return {"content": "o" * size, "pieces": pieces}


def test_a_stream_beyond_the_buffer_goes_through_to_the_last_byte(
    gateway: Gateway, fake: Fake
) -> None:
    """It takes no joins any more, isn't stored, and memory stays bounded."""
    fake.script({**events_of(24_000_000, 240), "chunk_delay_s": 0.004})
    request = post(chat("overflow", stream=True))
    memory = PeakMemory(gateway.worker_pid)
    with clients(gateway, 3) as (leader, early, late):
        lead(leader, fake, request)
        follow(gateway, [early], [request])
        answers = []
        job = threading.Thread(target=lambda: answers.append(early.answer()))
        job.start()
        while len(leader.unread) < 10 * MIB:
            leader.unread += leader.read()
        assert fake.log["running"] == 1
        assert said(late.ask(request)) == "A2"
        answers.append(leader.answer())
        job.join()
        assert [len(said(answer)) for answer in answers] == [24_000_000] * 2
        assert memory.grown_bytes < 64 * MIB
        assert said(late.ask(request)) == "A2"  # the small one that came in between


def test_a_whole_body_beyond_the_buffer_goes_through_to_the_last_byte(
    gateway: Gateway, fake: Fake
) -> None:
    fake.script({"content": "o" * 12_000_000, "delay_s": 0.2}, {"content": "small"})
    memory = PeakMemory(gateway.worker_pid)
    text = "overflow of a whole body"
    with clients(gateway, 3) as (leader, whole, stream):
        lead(leader, fake, post(chat(text)))
        follow(gateway, [whole, stream], [post(chat(text)), post(chat(text, stream=True))])
        answers = [leader.answer(), whole.answer(), stream.answer()]
        assert [len(said(answer)) for answer in answers[:2]] == [12_000_000] * 2
        assert said(answers[2]) == "small"  # it can't be told as a stream: that one asked again
        assert fake.calls == 2
    assert memory.grown_bytes < 64 * MIB


def test_a_listener_that_is_slower_than_the_buffer_is_cut_and_the_fast_one_completes(
    gateway: Gateway, fake: Fake
) -> None:
    fake.script(events_of(30_000_000, 300))
    request = post(chat("slow and fast", stream=True))
    with Raw(gateway.port) as fast, Raw(gateway.port, receive_bytes=16_384) as slow:
        lead(fast, fake, request)
        follow(gateway, [slow], [request])
        assert len(said(fast.answer())) == 30_000_000
        answer = slow.answer()
    assert not answer.is_complete
    assert 0 < len(answer.body) < 30_000_000
    assert fake.calls == 1


def test_a_client_that_takes_nothing_holds_the_engine_up(gateway: Gateway, fake: Fake) -> None:
    fake.script(events_of(30_000_000, 8_000))
    memory = PeakMemory(gateway.worker_pid)
    with Raw(gateway.port, receive_bytes=16_384) as slow:
        lead(slow, fake, post(chat("held up", stream=True)))
        slow.unread = slow.read()
        time.sleep(1.0)  # more than it takes to send all of it
        assert fake.log["running"] == 1
        assert memory.grown_bytes < 6 * MIB
        assert len(said(slow.answer())) == 30_000_000


# Stored, and when ----------------------------------------------------------------------------


def test_what_is_invalidated_during_its_flight_isn_t_stored(gateway: Gateway, fake: Fake) -> None:
    fake.script({"content": "stale already", "delay_s": 0.3})
    request = post(chat("invalidated"), headers="X-Preheat-Tags: soon\r\n")
    with Raw(gateway.port) as client:
        lead(client, fake, request)
        assert gateway.post("/preheat/v1/invalidate", {"tags": ["soon"]}).json["matched"] == 0
        assert said(client.answer()) == "stale already"
        again = client.ask(request)
    assert (said(again), again.cache, again.detail) == ("A2", "miss", "invalidated")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_who_repeats_in_the_moment_of_the_last_byte_always_hits(
    gateway: Gateway, fake: Fake, stream: bool
) -> None:
    """Over the same connection and over another one, 200 times."""
    fake.script(default="echo")
    with clients(gateway, 2) as (client, other):
        for turn in range(200):
            request = post(chat(f"moment of {turn} {stream}", stream=stream))
            first = client.ask(request)
            again = (client, other)[turn % 2].ask(request)
            assert (first.cache, again.cache) == ("miss", "hit"), turn
            assert said(first) == said(again)
