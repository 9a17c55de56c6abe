"""What engines may do to us, and what a client sees of it: faults over TCP, and the embedded one."""

import gzip
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import Gateway, chat, running
from memory import PeakMemory
from rawclient import Answer, Raw, chunked, get, post
from tiny_model import write_tiny_gguf
from upstream import End, Step, Upstream, answer, chunk, stream_head

Act = Sequence[Step]
WHOLE = {
    "id": "chatcmpl-engine",
    "object": "chat.completion",
    "created": 1,
    "model": "m1",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}
FINE = answer(json.dumps(WHOLE).encode())


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    fields = {"id": "e", "object": "chat.completion.chunk", "created": 1, "model": "m1"}
    return b"data: %b\n\n" % json.dumps({**fields, "choices": [choice]}).encode()


DONE = b"data: [DONE]\n\n"
FINE_STREAM = (
    stream_head() + chunk(event("fi") + event("ne") + event("", "stop") + DONE) + b"0\r\n\r\n"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Upstream]:
    with Upstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def fragile() -> Iterator[Upstream]:
    with Upstream() as upstream:
        yield upstream


def settings(engine: Upstream, fragile: Upstream) -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    limits = "connect_s = 0.5\nfirst_byte_s = 0.4\nidle_s = 0.4\n"
    return "\n".join(
        (
            f'[engines.first]\nurl = "{engine.url}"\napi_key_env = "ENGINE_KEY"',
            f"breaker_failures = 1000\n{limits}",
            f'[engines.gone]\nurl = "{nobody}"\nbreaker_failures = 1000\n{limits}',
            f'[engines.fragile]\nurl = "{fragile.url}/v1/"',
            f"breaker_failures = 2\nbreaker_open_s = 0.6\n{limits}",
            f'[engines.narrow]\nurl = "{engine.url}"\nmax_connections = 1\nqueue_s = 0.2',
            '[models.gone]\nengine = "gone"\n[models.fragile]\nengine = "fragile"',
            '[models.narrow]\nengine = "narrow"',
        )
    )


@pytest.fixture(scope="module")
def served(
    engine: Upstream, fragile: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    gateway = Gateway(
        settings(engine, fragile),
        folder=tmp_path_factory.mktemp("engines"),
        environment={"ENGINE_KEY": "key-of-the-engine"},
    )
    with running(gateway):
        yield gateway
        assert gateway.get("/healthz").status == 200
        assert "Traceback" not in gateway.stderr, gateway.stderr
        assert '"event":"bug"' not in gateway.stderr, gateway.stderr


@pytest.fixture(scope="module")
def kind(
    engine: Upstream, fragile: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway whose operator has words for when an engine gives no answer."""
    gateway = Gateway(
        '[engines]\nfallback_message = "Back soon."\n' + settings(engine, fragile),
        folder=tmp_path_factory.mktemp("kind"),
        environment={"ENGINE_KEY": "key-of-the-engine"},
    )
    with running(gateway):
        yield gateway
        assert '"event":"bug"' not in gateway.stderr, gateway.stderr


_turn = iter(range(1_000_000))


def ask(gateway: Gateway, *, stream: bool = False, text: str = "", **fields: Any) -> Answer:
    """Ask something new, unless a text is given."""
    with Raw(gateway.port) as client:
        client.send(post(chat(text or f"question {next(_turn)}", stream=stream, **fields)))
        return client.answer()


def said(answered: Answer) -> str:
    assert answered.status == 200, (answered.status, answered.body)
    if answered.headers["content-type"].startswith("text/event-stream"):
        assert answered.is_complete
        assert answered.events[-1] == "[DONE]"
        choices = [choice for one in answered.events[:-1] for choice in one["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    return str(answered.json["choices"][0]["message"]["content"])


def wait_for(condition: Callable[[], object], within_s: float = 8.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "it doesn't come true"
        time.sleep(0.02)


# Before the first byte -----------------------------------------------------------------------

NO_ANSWER: dict[str, tuple[Act, int, str]] = {
    "closed": ([End.CLOSE], 502, "engine-reset"),
    "reset": ([End.RESET], 502, "engine-reset"),
    "half-a-head": ([FINE[:30], End.CLOSE], 502, "engine-reset"),
    "hang": ([End.HANG], 504, "engine-timeout-first-byte"),
    "hang-in-head": ([FINE[:30], End.HANG], 504, "engine-timeout-first-byte"),
    "garbage": ([b"this is no HTTP\r\n\r\n"], 502, "engine-protocol"),
    "ssh": ([b"SSH-2.0-OpenSSH_9.2\r\n", End.HANG], 502, "engine-protocol"),
    "nul": ([b"\0" * 1_000, End.HANG], 502, "engine-protocol"),
    "endless-head": (
        [b"HTTP/1.1 200 OK\r\nX-A: " + b"x" * 400_000, End.HANG],
        502,
        "engine-protocol",
    ),
    "switching": ([b"HTTP/1.1 101 Switching Protocols\r\n\r\n", End.HANG], 502, "engine-protocol"),
    "two-lengths": (
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello"],
        502,
        "engine-protocol",
    ),
    "compressed": (
        [answer(gzip.compress(json.dumps(WHOLE).encode()), "Content-Encoding: gzip\r\n")],
        502,
        "engine-protocol",
    ),
    "truncated": ([FINE[:-20], End.CLOSE], 502, "engine-reset"),
    "truncated-chunks": (
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", End.RESET],
        502,
        "engine-reset",
    ),
    "silent-in-body": ([FINE[:-20], End.HANG], 504, "engine-timeout-idle"),
    "broken-chunks": (
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello"],
        502,
        "engine-protocol",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("act", "status", "code"), NO_ANSWER.values(), ids=NO_ANSWER)
def test_an_engine_that_gives_no_answer_is_a_clean_error(
    served: Gateway, engine: Upstream, act: Act, status: int, code: str, stream: bool
) -> None:
    engine.play(act)
    answered = ask(served, stream=stream)
    assert (answered.status, answered.code) == (status, code)
    assert answered.headers["cache-status"] == f"preheat; fwd=miss; detail={code}"
    engine.play([FINE])
    assert said(ask(served)) == "fine"


def test_an_engine_that_isn_t_there_is_a_clean_error(served: Gateway) -> None:
    answered = ask(served, model="gone")
    assert (answered.status, answered.code) == (502, "engine-connect")
    assert "check that the engine runs" in answered.json["error"]["message"]


def test_a_full_engine_is_waited_for_but_not_for_ever(served: Gateway, engine: Upstream) -> None:
    engine.play([0.1, FINE])
    with Raw(served.port) as first:
        first.send(post(chat(f"narrow {next(_turn)}", model="narrow")))
        wait_for(lambda: engine.calls == 1)
        assert said(ask(served, model="narrow")) == "fine"
    engine.play([0.5, FINE])
    with Raw(served.port) as first:
        first.send(post(chat(f"narrow {next(_turn)}", model="narrow")))
        wait_for(lambda: engine.calls == 1)
        answered = ask(served, model="narrow")
        assert (answered.status, answered.code) == (503, "engine-queue")
        assert "retry-after" in answered.headers
        assert said(first.answer()) == "fine"


def test_a_client_that_gives_up_ends_the_call_of_a_silent_engine(
    served: Gateway, engine: Upstream
) -> None:
    engine.play([stream_head() + chunk(event("one")), 0.1, chunk(event("two")), End.HANG])
    with Raw(served.port) as client:
        client.send(post(chat(f"give up {next(_turn)}", stream=True)))
        client.until(b"two")
    wait_for(lambda: engine.left == 1, within_s=0.3)  # before idle_s would have ended it


# In the middle -------------------------------------------------------------------------------

CUT: dict[str, tuple[Act, str]] = {
    "reset": ([chunk(event("fi")), End.RESET], "engine-reset"),
    "closed": ([chunk(event("fi")), End.CLOSE], "engine-reset"),
    "silence": ([chunk(event("fi")), End.HANG], "engine-timeout-idle"),
    "half-an-event": ([chunk(event("fi") + event("ne")[:20]), End.CLOSE], "engine-reset"),
    "half-a-chunk": ([chunk(event("fi")) + b"ff\r\nda", End.CLOSE], "engine-reset"),
    "no-done": ([chunk(event("fi") + event("ne", "stop")) + b"0\r\n\r\n"], "engine-reset"),
    "half-a-done": ([chunk(event("fi") + b"data: [DON") + b"0\r\n\r\n"], "engine-reset"),
    "broken-chunk": ([chunk(event("fi")) + b"zz\r\n", End.HANG], "engine-protocol"),
    "endless-event": (
        [chunk(event("fi")), *[chunk(b"x" * 1_048_576)] * 9, End.HANG],
        "engine-protocol",
    ),
}


@pytest.mark.parametrize(("act", "code"), CUT.values(), ids=CUT)
def test_a_stream_that_breaks_is_told_and_never_looks_complete(
    served: Gateway, engine: Upstream, act: Act, code: str
) -> None:
    engine.play([stream_head(), *act])
    text = f"broken stream {next(_turn)}"
    with Raw(served.port) as client:
        client.send(post(chat(text, stream=True)))
        answered = client.answer()
        assert answered.status == 200
        assert not answered.is_complete
        assert client.is_ended()
    assert answered.events[0]["choices"][0]["delta"]["content"] == "fi"
    assert answered.events[-1]["error"]["code"] == code
    assert "[DONE]" not in answered.events
    engine.play([FINE])
    assert ask(served, text=text).cache == "miss"


def test_http_1_0_can_tell_a_broken_stream_from_a_complete_one(
    served: Gateway, engine: Upstream
) -> None:
    """Its only end is the connection's, so that one is reset."""
    engine.play([stream_head() + chunk(event("fi")), 0.1, End.CLOSE])
    with Raw(served.port) as client:
        client.send(post(chat(f"old {next(_turn)}", stream=True), version="1.0"))
        client.until(b"}\n\n")
        with pytest.raises(ConnectionResetError):
            client.socket.makefile("rb").read()


def test_a_slow_engine_is_waited_for_as_long_as_it_says_something(
    served: Gateway, engine: Upstream
) -> None:
    """Longer than any limit as a whole, and cut wherever it pleases."""
    cuts = [FINE[place : place + 60] for place in range(0, len(FINE), 60)]
    engine.play([step for cut in cuts for step in (cut, 0.15)])
    slow = threading.Thread(target=lambda: heard.append(said(ask(served))))
    heard: list[str] = []
    slow.start()
    slow.join(10)
    dripping = b"".join(chunk(bytes([byte])) for byte in event("fi") + event("ne", "stop") + DONE)
    size = len(dripping) // 6
    parts = [dripping[place : place + size] for place in range(0, len(dripping), size)]
    engine.play([stream_head(), *[step for part in parts for step in (part, 0.1)], b"0\r\n\r\n"])
    heard.append(said(ask(served, stream=True)))
    assert heard == ["fine", "fine"]


# Strange but complete ------------------------------------------------------------------------

PASSED: dict[str, tuple[str, str, bytes]] = {
    "400": ("400 Bad Request", "", b'{"error":{"message":"max_tokens is too large"}}'),
    "401": ("401 Unauthorized", "WWW-Authenticate: Bearer\r\n", b'{"error":{"message":"no key"}}'),
    "403": ("403 Forbidden", "", b"no"),
    "404": ("404 Not Found", "", b'{"error":{"message":"no such model"}}'),
    "422": ("422 Unprocessable Entity", "", b'{"detail":[]}'),
    "429": ("429 Too Many Requests", "Retry-After: 7\r\nX-RateLimit-Remaining: 0\r\n", b"{}"),
    "500": ("500 Internal Server Error", "", b'{"error":{"message":"boom"}}'),
    "502": ("502 Bad Gateway", "", b"<html>"),
    "503": ("503 Service Unavailable", "Retry-After: 3\r\n", b"{}"),
    "529": ("529 Overloaded", "", b"{}"),
    "301": ("301 Moved Permanently", "Location: https://elsewhere.example/v1\r\n", b""),
    "307": ("307 Temporary Redirect", "Location: /other\r\n", b"moved"),
    "204": ("204 No Content", "", b""),
}


@pytest.mark.parametrize(("status", "headers", "body"), PASSED.values(), ids=PASSED)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_engine_s_refusal_is_passed_on_as_it_is_and_not_stored(
    served: Gateway, engine: Upstream, status: str, headers: str, body: bytes, stream: bool
) -> None:
    engine.play([answer(body, headers, status, "text/x-own")], [FINE])
    text = f"refused {next(_turn)}"
    with Raw(served.port) as client:
        client.send(post(chat(text, stream=stream)))
        answered = client.answer()
        assert (answered.status, answered.body) == (int(status[:3]), body)
        assert answered.headers["content-type"] == "text/x-own"
        for line in filter(None, headers.split("\r\n")):
            name, _, value = line.partition(": ")
            assert answered.headers[name.lower()] == value
        client.send(post(chat(text)))  # the connection is as good as before
        assert said(again := client.answer()) == "fine"
    assert (again.cache, engine.calls) == ("miss", 2)


ODD: dict[str, tuple[Act, str]] = {
    "html": ([answer(b"<html>", kind="text/html")], "not-json"),
    "json-called-html": ([answer(json.dumps(WHOLE).encode(), kind="text/html")], ""),
    "empty": ([answer(b"")], "not-json"),
    "array": ([answer(b"[]")], "not-json"),
    "no-choices": ([answer(b'{"id":"x","choices":[]}')], "no-choices"),
    "error-in-200": ([answer(b'{"error":{"message":"boom"}}')], "no-choices"),
    "no-type": ([FINE.replace(b"Content-Type", b"X-Type")], ""),
    "to-the-end": ([FINE.replace(b"Content-Length", b"X-Length"), End.CLOSE], ""),
    "http-1.0": ([FINE.replace(b"HTTP/1.1", b"HTTP/1.0"), End.CLOSE], ""),
    "interim": ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + FINE], ""),
    "trailers": (
        [
            FINE.partition(b"Content-Length")[0]
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + chunk(json.dumps(WHOLE).encode())
            + b"0\r\nContent-Type: text/x\r\nX-Evil: 1\r\n\r\n"
        ],
        "",
    ),
}


@pytest.mark.parametrize(("act", "why"), ODD.values(), ids=ODD)
def test_an_odd_answer_goes_through_and_only_a_complete_one_is_stored(
    served: Gateway, engine: Upstream, act: Act, why: str
) -> None:
    engine.play(act)
    text = f"odd {next(_turn)}"
    first, second = ask(served, text=text), ask(served, text=text)
    assert first.status == second.status == 200
    assert first.cache == "miss"
    assert (second.cache, second.detail) == (("miss", why) if why else ("hit", "exact"))
    assert "x-evil" not in first.headers


def test_a_stream_nobody_asked_for_is_put_together(served: Gateway, engine: Upstream) -> None:
    engine.play([FINE_STREAM])
    text = f"unasked {next(_turn)}"
    first = ask(served, text=text)
    assert first.headers["content-type"] == "application/json"
    assert said(first) == "fine"
    assert ask(served, text=text).cache == "hit"


def test_a_whole_answer_to_a_stream_is_told_as_one(served: Gateway, engine: Upstream) -> None:
    engine.play([FINE])
    first = ask(served, stream=True)
    assert first.headers["content-type"].startswith("text/event-stream")
    assert said(first) == "fine"


def test_bytes_that_nobody_asked_for_are_nobody_s_answer(served: Gateway, engine: Upstream) -> None:
    evil = answer(json.dumps(WHOLE).replace("fine", "evil").encode())
    engine.play([FINE + evil], [FINE])
    assert [said(ask(served)) for _ in range(3)] == ["fine"] * 3
    engine.play([FINE, 0.05, evil], [FINE])
    assert said(ask(served)) == "fine"
    time.sleep(0.1)
    assert [said(ask(served)) for _ in range(2)] == ["fine"] * 2


def test_an_engine_gets_its_own_key_and_nothing_that_is_between_us_and_the_client(
    served: Gateway, engine: Upstream
) -> None:
    engine.play([FINE])
    private = (
        "Authorization: Bearer client-key\r\nX-Api-Key: client-key\r\nCookie: session=1\r\n"
        "X-Preheat-Tags: a\r\nX-Preheat-Session: s1\r\nCache-Control: max-age=5\r\n"
        "Connection: X-Hop\r\nX-Hop: 1\r\nTE: trailers\r\nProxy-Authorization: Basic x\r\n"
    )
    for path in ("/v1/chat/completions", "/v1/embeddings"):
        with Raw(served.port) as client:
            assert client.ask(post(chat(f"keys {path}"), path, private)).status == 200
    for request in engine.requests:
        head = request.partition(b"\r\n\r\n")[0].lower()
        assert b"authorization: bearer key-of-the-engine" in head
        for hidden in (b"client-key", b"x-preheat", b"x-hop", b"trailers", b"basic x"):
            assert hidden not in head, (hidden, head)
    assert b"cookie" not in engine.requests[0].lower()


# What is passed through ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "response"),
    [
        ("DELETE", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\n"),
    ],
)
def test_an_answer_without_a_body_leaves_the_connection_in_order(
    served: Gateway, engine: Upstream, method: str, response: bytes
) -> None:
    engine.play([response], [FINE])
    with Raw(served.port) as client:
        client.send(get("/v1/files/f1", method=method) + get("/v1/files/f2"))
        first = client.answer(to=method)
        assert first.status == int(response.split()[1])
        second = client.answer()
        assert said(second) == "fine"
        assert client.unread == b""


def test_a_path_that_is_passed_through_keeps_its_bytes(served: Gateway, engine: Upstream) -> None:
    engine.play([FINE])
    body = b"\0\r\n\r\n" * 100_000
    with Raw(served.port) as client:
        assert (
            client.ask(post(body, "/v1/audio/a%20b?x=1&y=%2F")).body == json.dumps(WHOLE).encode()
        )
        assert client.ask(chunked(body[:70_000], body[70_000:])).status == 400
    request = engine.requests[0]
    assert request.startswith(b"POST /v1/audio/a%20b?x=1&y=%2F HTTP/1.1\r\n")
    assert request.endswith(b"\r\n\r\n" + body)


def test_a_large_answer_is_passed_through_as_it_comes(served: Gateway, engine: Upstream) -> None:
    engine.play([stream_head(), *[chunk(b"p" * 262_144)] * 40, b"0\r\n\r\n"])
    memory = PeakMemory(served.worker_pid)
    with Raw(served.port, receive_bytes=16_384) as client:
        answered = client.ask(get("/v1/files/large"))
    assert answered.is_complete
    assert answered.body == b"p" * 262_144 * 40
    assert memory.grown_bytes < 4_000_000


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_passed_answer_that_breaks_never_looks_complete(
    served: Gateway, engine: Upstream, version: str
) -> None:
    engine.play([stream_head() + chunk(b"p" * 100_000), 0.05, End.CLOSE])
    with Raw(served.port) as client:
        client.send(get("/v1/files/broken").replace(b"1.1", version.encode()))
        if version == "1.1":
            answered = client.answer()
            assert (answered.body, answered.is_complete) == (b"p" * 100_000, False)
        else:
            with pytest.raises(ConnectionResetError):
                client.socket.makefile("rb").read()


@pytest.mark.parametrize(
    "path", ["..", "a/../../b", "%2e%2e/b", ".%2E/b", "a//b", "a%5cb", "a/./b", "..%2fb", "a%00"]
)
def test_a_path_that_leaves_v1_goes_nowhere(served: Gateway, engine: Upstream, path: str) -> None:
    engine.play([FINE])
    with Raw(served.port) as client:
        answered = client.ask(get(f"/v1/{path}"))
    assert (answered.status, answered.code) == (400, "invalid-target")
    assert engine.calls == 0


def test_an_engine_s_headers_can_t_pose_as_ours(served: Gateway, engine: Upstream) -> None:
    headers = (
        "X-Preheat-Layer: exact\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: timeout=9\r\n"
        "Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nServer: engine\r\nX-Own: kept\r\n"
    )
    engine.play([answer(json.dumps(WHOLE).encode(), headers)])
    for request in (post(chat(f"pose {next(_turn)}")), get("/v1/files/f1")):
        with Raw(served.port) as client:
            answered = client.ask(request)
        assert answered.headers["x-preheat-layer"] == "forward"
        names = [name.lower() for name, _ in answered.lines]
        assert names.count("set-cookie") == 2
        assert {"x-hop", "keep-alive", "server", "connection"}.isdisjoint(names)
        assert names.count("cache-status") == names.count("content-length") == 1
        assert answered.headers["x-own"] == "kept"


def test_a_hit_has_nothing_of_the_first_asker_s_headers(served: Gateway, engine: Upstream) -> None:
    engine.play([answer(json.dumps(WHOLE).encode(), "Set-Cookie: a=1\r\nX-Request-Id: r1\r\n")])
    text = f"headers {next(_turn)}"
    assert ask(served, text=text).headers["set-cookie"] == "a=1"
    again = ask(served, text=text)
    assert again.cache == "hit"
    assert {"set-cookie", "x-request-id"}.isdisjoint(again.headers)


# The breaker ---------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [[End.CLOSE], [answer(b"{}", status="503 Busy")]])
def test_an_engine_that_keeps_failing_is_left_alone_for_a_while(
    served: Gateway, fragile: Upstream, failing: Act
) -> None:
    fragile.play([FINE])
    wait_for(lambda: ask(served, model="fragile").status == 200)  # closed to begin with
    fragile.play(failing)
    while (
        ask(served, model="fragile").headers["cache-status"]
        != "preheat; fwd=miss; detail=engine-breaker-open"
    ):
        assert fragile.calls < 5
    calls = fragile.calls
    answered = ask(served, model="fragile")
    assert (answered.status, answered.code) == (503, "engine-breaker-open")
    assert int(answered.headers["retry-after"]) >= 1
    assert fragile.calls == calls
    assert said(ask(served, text="another engine isn't concerned")) == "fine"
    assert ask(served, stream=True, model="fragile").code == "engine-breaker-open"
    fragile.play([FINE])
    wait_for(lambda: ask(served, model="fragile").status == 200)
    assert fragile.calls == 1  # the probe
    assert said(ask(served, model="fragile")) == "fine"


def test_an_error_of_the_request_s_opens_no_breaker(served: Gateway, fragile: Upstream) -> None:
    for status in ("400 Bad Request", "429 Too Many Requests", "500 Internal Server Error"):
        fragile.play([answer(b"{}", status=status)])
        for _ in range(4):
            assert ask(served, model="fragile").status == int(status[:3])
        assert fragile.calls == 4


# The operator's words ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "act",
    [
        [End.CLOSE],
        [End.HANG],
        [answer(b"no", status="503 Busy")],
        [answer(b"no", status="502 Bad")],
    ],
    ids=["closed", "hang", "503", "502"],
)
def test_the_fallback_is_told_instead_of_an_error_and_never_stored(
    kind: Gateway, engine: Upstream, act: Act, stream: bool
) -> None:
    engine.play(act)
    text = f"fallback {next(_turn)}"
    for _ in range(2):
        answered = ask(kind, text=text, stream=stream)
        assert said(answered) == "Back soon."
        assert (answered.cache, answered.detail) == ("bypass", "fallback")
    engine.play([FINE_STREAM if stream else FINE])
    answered = ask(kind, text=text, stream=stream)
    assert (said(answered), answered.cache) == ("fine", "miss")
    assert said(ask(kind, model="gone")) == "Back soon."


def test_the_fallback_stands_for_no_other_error(kind: Gateway, engine: Upstream) -> None:
    for status in (400, 401, 429, 500):
        engine.play([answer(b"{}", status=f"{status} No")])
        assert ask(kind).status == status
    engine.play([stream_head() + chunk(event("fi")), 0.05, End.CLOSE])
    answered = ask(kind, stream=True)
    assert not answered.is_complete
    assert "Back soon" not in answered.body.decode()


# The embedded engine -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="module")
def embedded(weights: Path) -> Iterator[Gateway]:
    gateway = Gateway("", "--model", str(weights))
    with running(gateway):
        yield gateway
        assert '"event":"bug"' not in gateway.stderr, gateway.stderr


def child_of(gateway: Gateway) -> int:
    """The engine that was started last."""
    found = re.findall(r'"event":"engine-ready".*"pid":(\d+)', gateway.stderr)
    return int(found[-1])


def is_running(pid: int) -> bool:
    """A zombie has ended, even where nobody reaps it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return sys.platform != "linux"


def test_the_embedded_engine_answers_and_a_repeat_is_a_hit(embedded: Gateway) -> None:
    """Random weights don't stop by themselves, so a stop word is taken from what they say."""
    cut = ask(embedded, text="the end", max_tokens=8)
    assert cut.json["choices"][0]["finish_reason"] == "length"
    word = said(cut)[:1]
    first = ask(embedded, text="the end", max_tokens=8, stop=[word])
    assert first.json["choices"][0]["finish_reason"] == "stop"
    again = ask(embedded, text="the end", max_tokens=8, stop=[word])
    assert (first.cache, again.cache) == ("miss", "hit")
    assert said(again) == said(first)
    streamed = ask(embedded, text="the end", max_tokens=8, stop=[word], stream=True)
    assert (streamed.cache, said(streamed)) == ("hit", said(first))


def test_an_answer_cut_by_its_length_isn_t_stored_but_its_prompt_is_cached_by_the_engine(
    embedded: Gateway,
) -> None:
    first, second = (ask(embedded, text="x" * 300, max_tokens=2) for _ in range(2))
    assert (second.cache, second.detail) == ("miss", "finish-length")
    assert int(first.headers["x-preheat-cached-tokens"]) < 50
    assert int(second.headers["x-preheat-cached-tokens"]) > 250
    assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 250


def test_the_embedded_engine_streams(embedded: Gateway) -> None:
    answered = ask(embedded, text="stream", stream=True, max_tokens=4)
    assert answered.is_complete
    assert answered.events[-1] == "[DONE]"
    assert not any(one.get("usage") for one in answered.events[:-1])  # nobody asked for it


def test_a_killed_engine_comes_back_and_meanwhile_errors_are_clean(embedded: Gateway) -> None:
    child = child_of(embedded)
    with Raw(embedded.port) as client:
        client.send(post(chat("long", stream=True, max_tokens=2_000)))
        client.until(b"data: ")
        os.kill(child, signal.SIGKILL)
        rest = client.rest()
        assert b'"code":"engine-reset"' in rest
        assert b"[DONE]" not in rest
    statuses = []
    give_up_at = time.monotonic() + 20
    while statuses[-1:] != [200]:
        assert time.monotonic() < give_up_at
        answered = ask(embedded, max_tokens=1)
        statuses.append(answered.status)
        if answered.status != 200:
            assert answered.status in {502, 503}
            assert answered.code in {"engine-start", "engine-connect", "engine-reset"}
            time.sleep(0.05)
    wait_for(lambda: child_of(embedded) != child)  # its line is written a moment later
    assert not is_running(child)
    assert embedded.get("/readyz").status == 200


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_gateway_s_end_is_its_engine_s_end(weights: Path, end: signal.Signals) -> None:
    gateway = Gateway("", "--model", str(weights))
    with running(gateway):
        child = child_of(gateway)
        assert is_running(child)
        gateway.process.send_signal(end)
        gateway.process.wait(10)
        wait_for(lambda: not is_running(child))
