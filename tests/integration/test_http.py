"""What clients may send, and what they get for it: HTTP/1.1 to the byte, over real sockets."""

import json
import random
import re
import signal
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
from ports import free_port
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
    """Both come in one read (once the kernel's window has grown), the second head only half."""
    large, second = post(chat("x" * 150_000)), get()
    with Raw(gateway.port) as client:
        for _ in range(10):
            client.send(large + second[:20])
            assert client.answer().status == 200
            assert client.ask(second[20:]).body == b"ok\n"


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_one_answer_and_the_end(gateway: Gateway, stream: bool) -> None:
    answer = one(gateway, post(chat("old", stream=stream), version="1.0"))
    assert said(answer) == "echo: old"
    assert answer.headers["connection"] == "close"
    assert "transfer-encoding" not in answer.headers


def test_http_1_0_needs_no_host(gateway: Gateway) -> None:
    assert one(gateway, b"GET /healthz HTTP/1.0\r\n\r\n").body == b"ok\n"


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
    memory = PeakMemory(gateway.worker_pid)
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
    memory = PeakMemory(gateway.worker_pid)
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
    memory = PeakMemory(gateway.worker_pid)
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


# Slow clients --------------------------------------------------------------------------------


def trickle(client: Raw, data: bytes, pause_s: float = 0.05) -> None:
    """A byte at a time, until the other side has enough of it."""
    for place in range(len(data)):
        if not client.try_send(data[place : place + 1]):
            return
        time.sleep(pause_s)


def sip(client: Raw, for_s: float = 3.3, pause_s: float = 0.02) -> bytes:
    """Read slowly, but without a stop; once all limits are over, the rest at once."""
    pieces = []
    gulp_at = time.monotonic() + for_s
    while piece := client.socket.recv(16_384):
        pieces.append(piece)
        if time.monotonic() < gulp_at:
            time.sleep(pause_s)
    return b"".join(pieces)


SLOW_BYTES = 5_000_000  # more than the client has read by then


@pytest.fixture(scope="module")
def slow(hasty: Gateway, fake: Fake) -> Iterator[dict[str, Any]]:
    """What became of slow clients of many kinds, all at once."""
    fake.reset()
    fake.script(
        {"content": "at last", "delay_s": 2.5},
        {"content": "s" * 20_000_000, "pieces": 200},
        default={"content": "w" * SLOW_BYTES},
    )
    outcomes: dict[str, Any] = {}
    clients: dict[str, Raw] = {}

    def connect(*names: str) -> None:
        """Right before they speak: the gateway doesn't wait long for a first byte either."""
        for name in names:
            few = 16_384 if name in {"deaf", "gone", "sip", "sip-close"} else None
            clients[name] = Raw(hasty.port, receive_bytes=few)

    def patient(client: Raw) -> None:
        outcomes["patient"] = said(client.answer())

    def hear(name: str) -> None:
        outcomes[name] = clients[name].rest()

    def dribble(client: Raw) -> None:
        trickle(client, get(headers="X-A: " + "x" * 500 + "\r\n"))
        hear("trickle")

    def drink(name: str) -> None:
        outcomes[name] = sip(clients[name])

    connect("patient")
    clients["patient"].send(post(chat("patient")))
    wait_for(lambda: fake.calls == 1)
    connect("deaf")
    clients["deaf"].send(post(chat("deaf", stream=True)))
    wait_for(lambda: fake.calls == 2)
    connect("idle", "served", "head", "body", "trickle", "sip", "sip-close", "gone")
    clients["served"].send(get())
    clients["head"].send(get()[:-3])
    clients["body"].send(post(chat("body"))[:-3])
    clients["sip"].send(post(chat("sip")))
    clients["sip-close"].send(post(chat("sip-close"), headers="Connection: close\r\n"))
    clients["gone"].send(post(chat("gone"), headers="Connection: close\r\n"))
    jobs = [
        threading.Thread(target=patient, args=(clients["patient"],)),
        threading.Thread(target=dribble, args=(clients["trickle"],)),
        *(
            threading.Thread(target=hear, args=(name,))
            for name in ("idle", "served", "head", "body")
        ),
        *(threading.Thread(target=drink, args=(name,)) for name in ("sip", "sip-close")),
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    wait_for(lambda: fake.log["running"] == 0)
    outcomes["cancelled"] = fake.log["cancelled"]
    try:
        wait_for(lambda: is_alone(hasty))
        yield outcomes
    finally:
        for client in clients.values():
            client.close()


def is_alone(served: Gateway) -> bool:
    """Whether there is no connection but the one that asks. A gateway that waits for nobody may be
    faster than the asking on a machine that is busy."""
    try:
        return gauge(served, "preheat_connections") == 1
    except ConnectionError:
        return False


def wait_for(condition: Any, within_s: float = 8.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "it doesn't come true"
        time.sleep(0.02)


def gauge(served: Gateway, name: str) -> float:
    line = re.search(rf"^{name} (\S+)$", served.get("/metrics").body.decode(), re.MULTILINE)
    assert line is not None
    return float(line[1])


def test_a_slow_engine_isn_t_a_slow_client(slow: dict[str, Any]) -> None:
    assert slow["patient"] == "at last"


def test_an_idle_connection_is_closed_without_a_word(slow: dict[str, Any]) -> None:
    assert slow["idle"] == b""
    assert slow["served"].startswith(b"HTTP/1.1 200 OK\r\n")
    assert slow["served"].endswith(b"\r\n\r\nok\n")


@pytest.mark.parametrize(
    ("client", "code"),
    [("head", b"head-timeout"), ("trickle", b"head-timeout"), ("body", b"body-timeout")],
)
def test_a_request_that_doesn_t_come_to_its_end_is_ended(
    slow: dict[str, Any], client: str, code: bytes
) -> None:
    assert slow[client].startswith(b"HTTP/1.1 408 ")
    assert b'"code":"%b"' % code in slow[client]


@pytest.mark.parametrize("client", ["sip", "sip-close"])
def test_a_client_that_reads_slowly_gets_all_of_its_answer(
    slow: dict[str, Any], client: str
) -> None:
    assert slow[client].count(b"w") >= SLOW_BYTES


def test_a_client_that_doesn_t_read_is_dropped_and_its_engine_call_ended(
    slow: dict[str, Any],
) -> None:
    assert slow["cancelled"] == 1


@pytest.mark.parametrize(
    ("size", "pieces"), [(20_000_000, 1_000), (10_000_000, 25_000)], ids=["large", "small"]
)
def test_a_slow_reader_holds_the_engine_back_and_takes_a_bounded_memory(
    gateway: Gateway, fake: Fake, size: int, pieces: int
) -> None:
    """The flight's buffer of 8 MiB, its events decoded, and the answer as far as it is known: a
    few times the buffer, however long the stream."""
    fake.script({"content": "m" * size, "pieces": pieces}, default="echo")
    memory = PeakMemory(gateway.worker_pid)
    with Raw(gateway.port, receive_bytes=16_384) as client:
        client.send(post(chat(f"slow {pieces}", stream=True)))
        client.unread = client.read()
        time.sleep(1.0)  # time enough for all of it, if nobody held it back
        assert fake.log["running"] == 1
        answer = client.answer()
    assert len(said(answer)) == size
    assert memory.grown_bytes < 60 * MIB


# Clients that come and go --------------------------------------------------------------------


def test_connections_beyond_the_limit_are_told_so_and_others_served(small: Gateway) -> None:
    clients = [Raw(small.port) for _ in range(8)]
    try:
        for client in clients:
            assert client.ask(get()).status == 200
        for _ in range(3):
            with Raw(small.port) as late:
                late.try_send(get())
                answer = late.answer()
                assert (answer.status, answer.code) == (503, "too-many-connections")
                assert late.is_ended()
        for client in clients:
            assert client.ask(get()).status == 200
        clients.pop().close()
        wait_for(lambda: small.get("/healthz").status == 200)
    finally:
        for client in clients:
            client.close()


def test_a_client_that_closes_its_side_gets_what_is_ready(gateway: Gateway) -> None:
    gateway.post("/v1/chat/completions", chat("half"))
    with Raw(gateway.port) as client:
        client.send(post(chat("half")) + get())
        client.half_close()
        assert said(client.answer()) == "echo: half"
        assert client.answer().body == b"ok\n"
        assert client.is_ended()


@pytest.mark.parametrize("leave", ["half_close", "close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_engine_call(
    gateway: Gateway, fake: Fake, leave: str, stream: bool
) -> None:
    fake.script(
        {
            "content": "x" * 1_000,
            "pieces": 100,
            "delay_s": 0.0 if stream else 10,
            "chunk_delay_s": 0.1,
        }
    )
    before = gateway.stats["engine_errors"]
    with Raw(gateway.port) as client:
        client.send(post(chat(f"leave {leave} {stream}", stream=stream)))
        wait_for(lambda: fake.calls == 1)
        if stream:
            client.until(b"data: ")
        getattr(client, leave)()
        wait_for(lambda: fake.log["cancelled"] == 1)
    after = before | {"cancelled": before.get("cancelled", 0) + 1}
    assert gateway.stats["engine_errors"] == after


# TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secure(
    fake: Fake, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Gateway, ssl.SSLContext]]:
    openssl = which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split()
        + f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {key}".split()
        + ["-out", str(certificate)],
        check=True,
        capture_output=True,
        timeout=30,
    )
    served = Gateway(
        f'[listen]\ntls_cert = "{certificate}"\ntls_key = "{key}"\nhead_s = 0.5\n',
        upstream=fake.url,
        folder=folder,
    )
    with running(served):
        yield served, ssl.create_default_context(cafile=certificate)
    assert_no_bug(served)


def test_tls_serves_hits_misses_streams_and_large_bodies(
    secure: tuple[Gateway, ssl.SSLContext], fake: Fake
) -> None:
    served, context = secure
    assert served.url.startswith("https://")
    with Raw(served.port, tls=context) as client:
        assert said(client.ask(post(chat("tls")))) == "echo: tls"
        assert client.ask(post(chat("tls"))).cache == "hit"
        client.send(post(chat("tls", stream=True)) + get())
        assert said(client.answer()) == "echo: tls"
        assert client.answer().status == 200
        fake.script({"content": "z" * 2_000_000, "pieces": 10})
        assert len(said(client.ask(post(chat("t" * 500_000, stream=True))))) == 2_000_000


def test_a_last_answer_over_tls_comes_whole_however_slowly_it_is_read(
    secure: tuple[Gateway, ssl.SSLContext], fake: Fake
) -> None:
    served, context = secure
    fake.script({"content": "z" * 7_000_000})
    with Raw(served.port, tls=context, receive_bytes=16_384) as client:
        client.send(post(chat("last over tls"), headers="Connection: close\r\n"))
        assert sip(client).count(b"z") >= 7_000_000


def test_what_isn_t_tls_or_never_shakes_hands_is_let_go(
    secure: tuple[Gateway, ssl.SSLContext],
) -> None:
    served, context = secure
    with Raw(served.port) as silent, Raw(served.port) as plain:
        plain.send(get())
        assert b"HTTP/" not in plain.rest()
        assert silent.is_ended()
    with Raw(served.port, tls=context) as client:
        assert client.ask(get()).status == 200


# The end -------------------------------------------------------------------------------------


def test_a_drain_lets_requests_under_way_end_and_takes_no_more(fake: Fake, tmp_path: Path) -> None:
    fake.script(
        {"content": "whole", "delay_s": 0.6},
        {"content": "a b c d", "pieces": 4, "chunk_delay_s": 0.2},
        default="echo",
    )
    served = Gateway('[admin]\nlisten = "127.0.0.1:0"\n', upstream=fake.url, folder=tmp_path)
    with running(served):
        whole, stream, idle, part = (Raw(served.port) for _ in range(4))
        whole.send(post(chat("whole")))
        wait_for(lambda: fake.calls == 1)
        stream.send(post(chat("stream", stream=True)))
        stream.until(b"data: ")
        part.send(post(chat("part"))[:-5])
        assert idle.ask(get("/v1/models")).status == 200
        served.process.send_signal(signal.SIGTERM)
        assert idle.is_ended()
        with pytest.raises(ConnectionRefusedError):
            Raw(served.port)
        part.send(post(chat("part"))[-5:])
        late = part.answer()
        assert (said(late), late.headers["connection"]) == ("echo: part", "close")
        last = whole.answer()
        assert (said(last), last.headers["connection"]) == ("whole", "close")
        assert stream.rest().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        for client in (whole, stream, idle, part):
            client.close()
        assert served.process.wait(5) == 0
        assert_no_bug(served)


def test_readiness_ends_when_a_drain_begins(gateway: Gateway, fake: Fake, tmp_path: Path) -> None:
    """On the admin port, which stays open; liveness goes on."""
    fake.script({"content": "slow", "delay_s": 1.0}, default="echo")
    port = free_port()
    served = Gateway(f'[admin]\nlisten = "127.0.0.1:{port}"\n', upstream=fake.url, folder=tmp_path)
    with running(served), Raw(served.port) as slow, Raw(port) as admin:
        assert admin.ask(get("/readyz")).status == 200
        slow.send(post(chat("slow drain")))
        wait_for(lambda: fake.calls == 1)
        served.process.send_signal(signal.SIGTERM)
        wait_for(lambda: admin.ask(get("/readyz")).status == 503)
        assert admin.ask(get("/healthz")).status == 200
        assert said(slow.answer()) == "slow"


@pytest.mark.parametrize("how", ["second-signal", "time-limit"])
def test_a_drain_has_an_end(fake: Fake, tmp_path: Path, how: str) -> None:
    fake.script({"fault": "hang"})
    drain_s = 30 if how == "second-signal" else 0.3
    served = Gateway(f"[listen]\ndrain_s = {drain_s}\n", upstream=fake.url, folder=tmp_path)
    with running(served), Raw(served.port) as client:
        client.send(post(chat("hang")))
        wait_for(lambda: fake.calls == 1)
        served.process.send_signal(signal.SIGTERM)
        if how == "second-signal":
            wait_for(lambda: '"event":"draining"' in served.stderr)
            served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(5) == 0
        assert client.is_ended()
        wait_for(lambda: fake.log["cancelled"] == 1)
        assert_no_bug(served)


# What isn't a request ------------------------------------------------------------------------


def deep(levels: int) -> bytes:
    return b'{"messages":' + b"[" * levels + b"]" * levels + b"}"


BAD_BODIES = {
    "empty": (b"", "invalid-json"),
    "space": (b" \r\n", "invalid-json"),
    "half": (b'{"model": "m1', "invalid-json"),
    "more": (b"{} {}", "invalid-json"),
    "comma": (b'{"model": "m1",}', "invalid-json"),
    "comment": (b'{"model": "m1"} // x', "invalid-json"),
    "single-quotes": (b"{'model': 'm1'}", "invalid-json"),
    "control": (b'{"model": "m\x01"}', "invalid-json"),
    "bom": (b'\xef\xbb\xbf{"model": "m1"}', "invalid-json"),
    "utf-16": ('{"model": "m1"}'.encode("utf-16"), "invalid-json"),
    "broken-utf-8": (b'{"model": "\xff\xfe"}', "invalid-json"),
    "cut-utf-8": (b'{"model": "\xe2\x82"}', "invalid-json"),
    "utf-8-surrogate": (b'{"model": "\xed\xa0\x80"}', "invalid-json"),
    "nan": (b'{"temperature": NaN}', "invalid-json"),
    "infinity": (b'{"temperature": -Infinity}', "invalid-json"),
    "nul": (b"\0" * 100, "invalid-json"),
    "leading-zero": (b'{"temperature": 01}', "invalid-json"),
    "bad-escape": (b'{"model": "\\x41"}', "invalid-json"),
    "array": (b'[{"model": "m1"}]', "invalid-body"),
    "string": (b'"m1"', "invalid-body"),
    "number": (b"1", "invalid-body"),
    "null": (b"null", "invalid-body"),
    "deep-array": (deep(100_000), "too-deep"),
    "deep-object": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "too-deep"),
    "deep-just": (deep(300), "too-deep"),
    "doubled": (b'{"model": "m1", "model": "m2"}', "duplicate-key"),
    "doubled-inside": (b'{"messages": [{"role": "user", "role": "system"}]}', "duplicate-key"),
    "doubled-by-escape": (b'{"model": "m1", "mod\\u0065l": "m2"}', "duplicate-key"),
    "form": (b"model=m1&temperature=0", "invalid-json"),
}


@pytest.mark.parametrize(("body", "code"), BAD_BODIES.values(), ids=BAD_BODIES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_body_that_isn_t_a_request_is_a_400_with_a_stable_code(
    gateway: Gateway, fake: Fake, path: str, body: bytes, code: str
) -> None:
    with Raw(gateway.port) as client:
        answer = client.ask(post(body, path))
        assert (answer.status, answer.code) == (400, code)
        assert client.ask(get()).status == 200
    assert fake.calls == 0


WRONG = {
    "model": [1, True, [], {}, ["m1"]],
    "stream": [1, "true", [], {}],
    "stream_options": [1, "x", True, [{"include_usage": True}]],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_a_field_of_the_wrong_type_is_named(gateway: Gateway, field: str, value: Any) -> None:
    answer = gateway.post("/v1/chat/completions", {**chat("wrong"), field: value})
    assert answer.status == 400
    assert answer.json["error"]["code"] == "invalid-field"
    assert answer.json["error"]["param"] == field


HUGE = {
    "exponent": b"1e400",
    "digits": b"0." + b"1" * 5_000,
    "integer": b"1" + b"0" * 400,
    "long-integer": b"9" * 6_000,
    "negative": b"-1" + b"0" * 400,
    "exponent-of-exponents": b"1e999999999999",
}


@pytest.mark.parametrize("number", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("field", ["temperature", "seed", "max_tokens", "n"])
def test_a_number_without_bounds_is_the_engine_s_business(
    gateway: Gateway, fake: Fake, field: str, number: bytes
) -> None:
    fake.script(default={"content": "fine"})
    body = b'{"model":"m1","messages":[],"temperature":0,"%b":%b}' % (field.encode(), number)
    if field == "temperature":
        body = body.replace(b'"temperature":0,', b"")
    with Raw(gateway.port) as client:
        for _ in range(2):
            answer = client.ask(post(body))
            assert (answer.status, answer.cache) == (200, "bypass")
    assert fake.bodies == [body, body]


def test_any_bytes_at_all_leave_the_gateway_well(gateway: Gateway) -> None:
    """A fixed seed: the same nonsense every time."""
    chance = random.Random(7)
    good = post(chat("noise"), headers=OFFER) + chunked(b'{"model":"m1"}') + get()
    for _ in range(300):
        data = bytearray(good)
        for _ in range(chance.randint(1, 8)):
            place = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[place] = chance.randrange(256)
                case 1:
                    del data[place : place + chance.randint(1, 30)]
                case _:
                    data[place:place] = chance.randbytes(chance.randint(1, 30))
        with Raw(gateway.port) as client:
            client.try_send(bytes(data))
            client.half_close()
            for line in re.findall(rb"HTTP/1.1 (\d+)", client.rest()):
                assert int(line) not in {500, 502, 503, 504}
    assert gateway.get("/healthz").status == 200
