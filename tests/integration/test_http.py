"""What clients may send, and what they get for it: HTTP/1.1 to the byte, over real sockets."""

import json
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from harness import Fake, Gateway, chat, running
from memory import PeakMemory
from rawclient import Answer, Raw, chunked, get, post

MIB = 1_048_576
EVIL = get("/v1/evil")
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def small(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that takes little: bodies of 200 kB, 8 connections."""
    served = Gateway(
        "[listen]\nbody_bytes = 200_000\nbodies_bytes = 500_000\nconnections = 8\n",
        upstream=fake.url,
        folder=tmp_path_factory.mktemp("small"),
    )
    with running(served):
        yield served


@pytest.fixture(scope="module")
def hasty(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that waits for nobody."""
    served = Gateway(
        "[listen]\nhead_s = 0.4\nbody_s = 0.4\nidle_s = 0.4\nwrite_s = 0.6\n",
        upstream=fake.url,
        folder=tmp_path_factory.mktemp("hasty"),
    )
    with running(served):
        yield served


@pytest.fixture(autouse=True)
def _clean(fake: Fake) -> None:
    fake.reset()
    fake.script(default="echo")


@pytest.fixture(autouse=True, scope="module")
def _sound(gateway: Gateway, small: Gateway, hasty: Gateway) -> Iterator[None]:
    """After all of it nobody has seen a bug, and everybody is still well."""
    yield
    for served in (gateway, small, hasty):
        assert served.get("/healthz").status == 200
        assert_no_bug(served)


def assert_no_bug(served: Gateway) -> None:
    assert "Traceback" not in served.stderr, served.stderr
    assert '"event":"bug"' not in served.stderr, served.stderr


def said(answer: Answer) -> str:
    """The text of a chat answer, streamed or whole."""
    assert answer.status == 200, (answer.status, answer.body)
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.is_complete
        assert answer.events[-1] == "[DONE]"
        choices = [event["choices"][0]["delta"] for event in answer.events[:-1] if event["choices"]]
        return "".join(delta.get("content") or "" for delta in choices)
    return str(answer.json["choices"][0]["message"]["content"])


def one(served: Gateway, data: bytes) -> Answer:
    """The answer to these bytes, which must be the only one before the connection ends."""
    with Raw(served.port) as client:
        client.try_send(data)
        answer = client.answer()
        assert client.is_ended(), (answer.status, client.unread)
        return answer


# Connections that stay -----------------------------------------------------------------------


def test_a_connection_serves_one_request_after_the_other(gateway: Gateway) -> None:
    with Raw(gateway.port) as client:
        for text, cache in (("keep a", "miss"), ("keep b", "miss"), ("keep a", "hit")):
            answer = client.ask(post(chat(text)))
            assert (said(answer), answer.cache) == (f"echo: {text}", cache)
            assert "connection" not in answer.headers
        assert client.ask(get()).body == b"ok\n"


def test_pipelined_requests_are_answered_in_their_order(gateway: Gateway, fake: Fake) -> None:
    """A slow miss holds back hits, streams and errors behind it; none of them overtakes."""
    gateway.post("/v1/chat/completions", chat("pipe hit"))
    fake.script({"content": "slow", "delay_s": 0.3, "pieces": 3}, default="echo")
    requests = [
        post(chat("pipe slow", stream=True)),
        post(chat("pipe hit")),
        post(chat("pipe hit", stream=True)),
        post(b"{"),
        get(),
        get("/nothing"),
        post(chat("pipe miss")),
        get("/v1/models", method="HEAD"),
        chunked(json.dumps(chat("pipe miss")).encode()),
        post(chat("pipe stream", stream=True)),
    ]
    with Raw(gateway.port) as client:
        client.send(b"".join(requests))
        answers = [
            client.answer(to="HEAD" if request.startswith(b"HEAD") else "POST")
            for request in requests
        ]
    assert [answer.status for answer in answers] == [
        200,
        200,
        200,
        400,
        200,
        404,
        200,
        200,
        200,
        200,
    ]
    assert [said(answers[place]) for place in (0, 1, 2, 6, 8, 9)] == [
        "slow",
        "echo: pipe hit",
        "echo: pipe hit",
        "echo: pipe miss",
        "echo: pipe miss",
        "echo: pipe stream",
    ]
    assert [answers[place].cache for place in (0, 1, 2, 6, 8)] == [
        "miss",
        "hit",
        "hit",
        "miss",
        "hit",
    ]
    assert fake.log["most_at_once"] == 1


def test_a_refusal_waits_for_its_turn_behind_a_pending_answer(gateway: Gateway, fake: Fake) -> None:
    fake.script({"content": "first", "delay_s": 0.2}, default="echo")
    with Raw(gateway.port) as client:
        client.send(post(chat("turn")) + b"NONSENSE\r\n\r\n" + EVIL)
        assert said(client.answer()) == "first"
        assert client.answer().code == "invalid-http"
        assert client.is_ended()
    assert fake.calls == 1


def test_a_client_that_pipelines_without_end_is_refused_in_its_turn(
    gateway: Gateway, fake: Fake
) -> None:
    fake.script({"content": "first", "delay_s": 0.2}, default="echo")
    with Raw(gateway.port) as client:
        client.send(post(chat("endless")) + get() * 200)
        assert said(client.answer()) == "first"
        statuses = []
        while 429 not in statuses:
            statuses.append(client.answer().status)
        assert statuses[:-1] == [200] * (len(statuses) - 1)
        assert len(statuses) <= 66
        assert client.is_ended()


def test_a_large_body_doesn_t_count_towards_the_head_behind_it(gateway: Gateway) -> None:
    """Both come in one read, the second head only half."""
    large, second = post(chat("x" * 150_000)), get()
    with Raw(gateway.port) as client:
        client.send(large + second[:20])
        assert client.answer().status == 200
        assert client.ask(second[20:]).body == b"ok\n"


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_one_answer_and_the_end(gateway: Gateway, stream: bool) -> None:
    answer = one(gateway, post(chat("old", stream=stream), version="1.0"))
    assert said(answer) == "echo: old"
    assert answer.headers["connection"] == "close"
    assert "transfer-encoding" not in answer.headers


def test_http_1_0_may_keep_its_connection(gateway: Gateway) -> None:
    asked = post(chat("old, kept"), headers="Connection: keep-alive\r\n", version="1.0")
    with Raw(gateway.port) as client:
        for _ in range(2):
            answer = client.ask(asked)
            assert said(answer) == "echo: old, kept"
            assert answer.headers["connection"] == "keep-alive"


def test_http_1_0_gets_a_forwarded_stream_to_the_end_of_the_connection(
    gateway: Gateway, fake: Fake
) -> None:
    """And a request behind it, which expects a word, doesn't hurt."""
    fake.script({"content": "a b c", "pieces": 3}, default="echo")
    asked = post(
        chat("old stream", stream=True), headers="Connection: keep-alive\r\n", version="1.0"
    )
    expecting = HEAD + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    with Raw(gateway.port) as client:
        client.send(asked + expecting)
        answer = client.answer()
    assert said(answer) == "a b c"
    assert answer.headers["connection"] == "close"


def test_connection_close_ends_it_and_what_follows_is_never_read(
    gateway: Gateway, fake: Fake
) -> None:
    answer = one(gateway, post(chat("last"), headers="Connection: close\r\n") + EVIL)
    assert said(answer) == "echo: last"
    assert answer.headers["connection"] == "close"
    assert fake.calls == 1


# Expect, HEAD, OPTIONS, upgrades -------------------------------------------------------------


def expecting(body: bytes, expected: str = "100-continue") -> bytes:
    lines = f"Expect: {expected}\r\nContent-Length: {len(body)}\r\n\r\n"
    return HEAD + lines.encode()


def test_a_client_that_expects_100_continue_is_told_to_go_on(gateway: Gateway) -> None:
    body = json.dumps(chat("expecting")).encode()
    with Raw(gateway.port) as client:
        for expected in ("100-continue", "100-Continue"):
            assert client.ask(expecting(body, expected)).status == 100
            assert said(client.ask(body)) == "echo: expecting"


def test_100_continue_waits_for_the_answer_before_it(gateway: Gateway, fake: Fake) -> None:
    fake.script({"content": "first", "delay_s": 0.2}, default="echo")
    body = json.dumps(chat("expecting behind")).encode()
    with Raw(gateway.port) as client:
        client.send(post(chat("before expecting")) + expecting(body))
        assert said(client.answer()) == "first"
        assert client.answer().status == 100
        assert said(client.ask(body)) == "echo: expecting behind"


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(gateway: Gateway) -> None:
    lines = f"Expect: 100-continue\r\nContent-Length: {33 * MIB}\r\n\r\n"
    answer = one(gateway, HEAD + lines.encode())
    assert (answer.status, answer.code) == (413, "body-too-large")


def test_an_unknown_expectation_is_refused(gateway: Gateway) -> None:
    answer = one(gateway, expecting(b"{}", "a-miracle"))
    assert (answer.status, answer.code) == (417, "unknown-expectation")


@pytest.mark.parametrize(
    ("path", "status"), [("/healthz", 200), ("/v1/models", 200), ("/v1/chat/completions", 405)]
)
def test_head_gets_the_head_alone(gateway: Gateway, path: str, status: int) -> None:
    with Raw(gateway.port) as client:
        client.send(get(path, method="HEAD"))
        answer = client.answer(to="HEAD")
        assert answer.status == status
        assert int(answer.headers["content-length"]) > 0
        assert client.ask(get()).body == b"ok\n"


@pytest.mark.parametrize("path", ["*", "/v1/chat/completions", "/healthz", "/v1/files"])
def test_options_tell_what_is_allowed_without_a_body(gateway: Gateway, path: str) -> None:
    with Raw(gateway.port) as client:
        answer = client.ask(get(path, method="OPTIONS"))
        assert answer.status == 204
        assert "POST" in answer.headers["allow"]
        assert not {"content-length", "transfer-encoding"} & answer.headers.keys()
        assert client.ask(get()).body == b"ok\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999\r\n\r\n",
        get("/v1/realtime", "Connection: Upgrade\r\nUpgrade: websocket\r\n"),
        get("/v1/realtime", "Connection: keep-alive, upgrade\r\nUpgrade: WebSocket\r\n"),
        post(chat(), headers="Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n"),
    ],
    ids=["connect", "connect-with-length", "websocket", "websocket-in-list", "tls"],
)
def test_tunnels_and_websockets_are_refused(
    gateway: Gateway, fake: Fake, request_bytes: bytes
) -> None:
    answer = one(gateway, request_bytes + EVIL)
    assert (answer.status, answer.code) == (501, "upgrade-refused")
    assert fake.calls == 0


OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"


def test_an_offer_of_http_2_is_declined_and_the_request_served(
    gateway: Gateway, fake: Fake
) -> None:
    """As Java's client makes it on each first request, with its body."""
    body = json.dumps(chat("h2c " + "x" * 100_000)).encode()
    with Raw(gateway.port) as client:
        for request in (post(body, headers=OFFER), chunked(body, headers=OFFER), post(body)):
            assert said(client.ask(request)).startswith("echo: h2c")
        client.send(post(b"", headers=OFFER + "Expect: 100-continue\r\n") + get())
        assert [client.answer().status for _ in range(3)] == [100, 400, 200]
    assert {"upgrade", "http2-settings", "connection"}.isdisjoint(
        fake.log["requests"][0]["headers"]
    )


def test_an_offer_of_http_2_changes_no_other_rule(gateway: Gateway) -> None:
    closing = one(gateway, post(chat("h2c"), headers=OFFER.replace("HTTP2-S", "close, S", 1)))
    assert closing.headers["connection"] == "close"
    doubled = one(gateway, post(chat("h2c"), headers="Host: other\r\n" + OFFER))
    assert doubled.code == "invalid-host"
    old = one(gateway, post(chat("h2c"), headers=OFFER, version="1.0"))
    assert said(old) == "echo: h2c"
    length = f"Content-Length: {33 * MIB}\r\n\r\n".encode()
    assert one(gateway, HEAD + OFFER.encode() + length).status == 413


# Targets, hosts, versions, sizes -------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400, "invalid-host"),
        (get(headers="Host: other\r\n"), 400, "invalid-host"),
        (get(headers="Host: localhost\r\n"), 400, "invalid-host"),
        (get("*"), 400, "invalid-target"),
        (get("ftp://localhost/healthz"), 400, "invalid-target"),
        (get("healthz"), 400, "invalid-http"),
        (b"GET /healthz HTTP/0.9\r\nHost: a\r\n\r\n", 505, "unknown-version"),
        (b"GET /healthz\r\n\r\n", 505, "unknown-version"),
        (b"GET /healthz HTTP/2.0\r\nHost: a\r\n\r\n", 505, "unknown-version"),
        (b"GET /healthz HTTP/1.2\r\nHost: a\r\n\r\n", 400, "invalid-http"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid-http"),
        (b"GET /healthz http/1.1\r\nHost: a\r\n\r\n", 400, "invalid-http"),
        (b"MAKE /healthz HTTP/1.1\r\nHost: a\r\n\r\n", 400, "invalid-http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid-http"),
        (get("/v1/" + "x" * 9_000), 414, "target-too-long"),
        (get(headers="X-A: " + "x" * 66_000 + "\r\n"), 431, "head-too-large"),
        (get(headers="X-A: 1\r\n" * 100), 431, "head-too-large"),
        (get(headers="".join(f"X-{n}: 1\r\n" for n in range(100))), 431, "head-too-large"),
    ],
)
def test_a_request_of_the_wrong_form_is_refused(
    gateway: Gateway, request_bytes: bytes, status: int, code: str
) -> None:
    answer = one(gateway, request_bytes)
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers["connection"] == "close"


def test_what_is_just_within_the_limits_is_served(gateway: Gateway) -> None:
    with Raw(gateway.port) as client:
        assert client.ask(get(headers="X-A: " + "x" * 65_000 + "\r\n")).status == 200
        assert client.ask(get(headers="".join(f"X-{n}: 1\r\n" for n in range(99)))).status == 200
        assert client.ask(get("/" + "x" * 8_000)).status == 404


def test_an_absolute_target_is_taken_apart(gateway: Gateway) -> None:
    with Raw(gateway.port) as client:
        assert client.ask(get("http://localhost/healthz?a=1")).body == b"ok\n"
        assert client.ask(get("HTTP://localhost:80/v1/models")).status == 200
        assert client.ask(get("http://localhost")).status == 404
        assert client.ask(get("http://localhost/preheat/v1/stats")).status == 200
        # RFC 9112, 3.2.2: its host counts, not the header.
        assert client.ask(get("http://evil.example/preheat/v1/stats")).status == 403


def test_a_header_line_of_13_mb_ends_the_connection_and_takes_no_memory(gateway: Gateway) -> None:
    memory = PeakMemory(gateway.process.pid)
    with Raw(gateway.port) as client:
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\nX-A: ")
        for _ in range(200):
            if not client.try_send(b"x" * 65_536):
                break
        answer = client.answer()
        assert (answer.status, answer.code) == (431, "head-too-large")
        assert client.is_ended()
    assert memory.grown_bytes < 4 * MIB


@pytest.mark.parametrize(
    "start", [b"5;x=", b"5\r\nhello\r\n0\r\nX-Trailer: "], ids=["extension", "trailer"]
)
def test_what_surrounds_chunks_is_bounded_too(gateway: Gateway, start: bytes) -> None:
    memory = PeakMemory(gateway.process.pid)
    with Raw(gateway.port) as client:
        client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + start)
        for _ in range(200):
            if not client.try_send(b"x" * 65_536):
                break
        assert client.answer().status == 431
        assert client.is_ended()
    assert memory.grown_bytes < 4 * MIB


# Bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
def test_a_client_that_is_still_sending_can_read_why_it_is_refused(
    small: Gateway, is_chunked: bool
) -> None:
    piece = b"x" * 50_000
    with Raw(small.port) as client:
        if is_chunked:
            client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        else:
            client.send(HEAD + b"Content-Length: 5000000\r\n\r\n")
        for _ in range(100):
            client.send(piece)
        answer = client.answer()
        assert (answer.status, answer.code) == (413, "body-too-large")
        assert client.is_ended()


def test_a_body_of_50_mb_is_refused_and_one_of_30_mb_served(gateway: Gateway, fake: Fake) -> None:
    memory = PeakMemory(gateway.process.pid)
    with Raw(gateway.port) as client:
        client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(50):
            if not client.try_send(b"%x\r\n%b\r\n" % (MIB, b"x" * MIB)):
                break
        assert client.answer().status == 413
    assert memory.grown_bytes < 48 * MIB
    fake.script({"body": {"choices": []}})  # told without looking at 30 MB of prompt
    answer = gateway.post("/v1/chat/completions", chat("y" * 30_000_000))
    assert answer.status == 200
    assert fake.calls == 1


def test_many_large_bodies_at_once_are_refused_beyond_their_budget(small: Gateway) -> None:
    """Five of 150 kB don't fit into 500 kB; once some are gone, others do."""
    half = HEAD + b"Content-Length: 200000\r\n\r\n" + b"x" * 75_000
    clients = [Raw(small.port) for _ in range(5)]
    for client in clients:
        client.send(half)
    statuses = []
    for client in clients:
        client.send(b"x" * 75_000)
        statuses.append(small.get("/healthz").status)
    refused = clients[-1].answer()
    assert (refused.status, refused.code) == (503, "bodies-too-large")
    for client in clients:
        client.close()
    for _ in range(4):
        with Raw(small.port) as client:
            client.send(half)
            assert client.ask(b"x" * 125_000).code == "invalid-json"


def test_chunk_extensions_and_trailers_change_nothing(gateway: Gateway, fake: Fake) -> None:
    body = json.dumps(chat("trailers")).encode()
    trailers = (
        b"0;last\r\nCache-Control: no-store\r\nAuthorization: Bearer x\r\nHost: other\r\n"
        b"X-Preheat-Ttl: nonsense\r\nX-Preheat-Namespace: elsewhere\r\nContent-Encoding: gzip\r\n"
        b"Expect: nothing\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    extended = b"".join(
        b'%x;name=1;other="2"\r\n%b\r\n' % (1, body[i : i + 1]) for i in range(len(body))
    )
    with Raw(gateway.port) as client:
        first = client.ask(chunked(body, end=trailers))
        assert (said(first), first.cache) == ("echo: trailers", "miss")
        assert client.ask(chunked(end=extended + trailers)).cache == "hit"
        assert client.ask(post(body)).cache == "hit"
    sent = fake.log["requests"][0]["headers"]
    assert {"cache-control", "x-preheat-ttl", "content-encoding"}.isdisjoint(sent)


AMBIGUOUS = {
    "length-and-chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks-and-length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two-lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "two-equal-lengths": b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "list-of-lengths": b"Content-Length: 5, 5\r\n\r\nhello",
    "length-plus": b"Content-Length: +3\r\n\r\nabc",
    "length-minus": b"Content-Length: -3\r\n\r\nabc",
    "length-hexadecimal": b"Content-Length: 0x3\r\n\r\nabc",
    "length-with-space": b"Content-Length: 3 3\r\n\r\nabc",
    "length-empty": b"Content-Length:\r\n\r\n",
    "length-overflow": b"Content-Length: 18446744073709551621\r\n\r\nhello",
    "coding-unknown": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "coding-identity": b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "coding-after-chunked": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "coding-before-chunked": b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding-twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding-space-before-colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "coding-folded": b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "coding-vertical-tab": b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "folded-line": b"X-A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
    "bare-line-feed": b"X-A: b\nContent-Length: 5\r\n\r\nhello",
    "bare-line-feed-at-end": b"Content-Length: 5\r\n\nhello",
    "nul-in-value": b"X-A: b\0c\r\nContent-Length: 0\r\n\r\n",
    "nul-in-name": b"X\0A: b\r\nContent-Length: 0\r\n\r\n",
    "control-in-value": b"X-A: b\x01c\r\nContent-Length: 0\r\n\r\n",
    "return-in-value": b"X-A: b\rc\r\nContent-Length: 0\r\n\r\n",
    "return-in-name": b"X-A\r: b\r\nContent-Length: 0\r\n\r\n",
    "name-empty": b": b\r\nContent-Length: 0\r\n\r\n",
    "no-colon": b"X-A\r\nContent-Length: 0\r\n\r\n",
    "chunk-overflow": b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc",
    "chunk-wraps": b"Transfer-Encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
    "chunk-minus": b"Transfer-Encoding: chunked\r\n\r\n-1\r\nabc",
    "chunk-hexadecimal": b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "chunk-space": b"Transfer-Encoding: chunked\r\n\r\n5 \r\nhello\r\n0\r\n\r\n",
    "chunk-line-feed": b"Transfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n",
    "chunk-without-end": b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
    "chunk-extension-line-feed": b"Transfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n0\r\n\r\n",
    "chunk-extension-return": b"Transfer-Encoding: chunked\r\n\r\n5;a\rb\r\nhello\r\n0\r\n\r\n",
    "trailer-length": b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 5\r\n\r\nhello",
    "trailer-coding": b"Transfer-Encoding: chunked\r\n\r\n0\r\nTransfer-Encoding: gzip\r\n\r\n",
    "trailer-folded": b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-A: b\r\n c\r\n\r\n",
}


@pytest.mark.parametrize("rest", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_a_request_that_two_servers_might_read_differently_is_refused(
    gateway: Gateway, fake: Fake, rest: bytes
) -> None:
    answer = one(gateway, HEAD + rest + EVIL)
    assert answer.status in {400, 501}
    assert answer.code in {"invalid-http", "unknown-coding"}
    assert fake.calls == 0


def test_http_1_0_has_no_chunks(gateway: Gateway, fake: Fake) -> None:
    old = HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert one(gateway, old + EVIL).code == "invalid-http"
    assert fake.calls == 0


# Splits --------------------------------------------------------------------------------------


class Pacer(Raw):
    """A second connection, to wait until the gateway has read what was sent over the first."""

    def wait(self) -> None:
        assert self.ask(get()).status == 200


SPLITS = {
    "length": post(chat("split"), headers="X-A: 1\r\n"),
    "chunks": chunked(
        b'{"model":"m1","messages":', b'[],"temperature":0}', end=b"0;x\r\nX-T: 1\r\n\r\n"
    ),
    "upgrade": post(chat("split"), headers=OFFER),
    "two": post(b"{}") + post(chat("split")),
}


@pytest.mark.parametrize("request_bytes", SPLITS.values(), ids=SPLITS)
def test_a_request_means_the_same_wherever_it_is_cut(
    gateway: Gateway, request_bytes: bytes
) -> None:
    count = request_bytes.count(b"POST ")
    with Raw(gateway.port) as client:
        for _ in range(2):  # the second time its head is known
            whole = [client.ask(request_bytes)] + [client.answer() for _ in range(count - 1)]
    with Pacer(gateway.port) as pacer, Raw(gateway.port) as client:
        for cut in range(1, len(request_bytes)):
            client.send(request_bytes[:cut])
            pacer.wait()
            client.send(request_bytes[cut:])
            for expected in whole:
                answer = client.answer()
                assert (answer.status, answer.cache) == (expected.status, expected.cache), cut
        for place in range(len(request_bytes)):
            client.send(request_bytes[place : place + 1])
            pacer.wait()
        assert [client.answer().status for _ in whole] == [answer.status for answer in whole]


def test_the_end_of_a_head_is_never_taken_for_a_head(gateway: Gateway) -> None:
    """Heads are remembered; a part of one must not speak for the whole, with its credentials."""
    secret = "X-Preheat-Namespace: secret\r\nAuthorization: Bearer secret\r\n"
    request = post(chat("cut"), headers=secret)
    for mark in (b"Content-Length", b"Authorization", b"Content-Type", b"Host"):
        cut = request.index(mark)
        with Pacer(gateway.port) as pacer, Raw(gateway.port) as victim:
            victim.send(request[:cut])
            pacer.wait()
            assert victim.ask(request[cut:]).status == 200
        assert one(gateway, request[cut:]).status == 400


def test_a_known_head_before_another_length_of_body_is_read_anew(gateway: Gateway) -> None:
    """Less than the body it promises: wait; more: the next request."""
    request = post(chat("known"))
    with Pacer(gateway.port) as pacer, Raw(gateway.port) as client:
        for _ in range(2):
            assert client.ask(request).status == 200
        client.send(request[:-10])
        pacer.wait()
        assert said(client.ask(request[-10:])) == "echo: known"
        client.send(request + get())
        assert said(client.answer()) == "echo: known"
        assert client.answer().body == b"ok\n"
        client.send(request + request[:30])
        assert said(client.answer()) == "echo: known"
        assert said(client.ask(request[30:])) == "echo: known"
