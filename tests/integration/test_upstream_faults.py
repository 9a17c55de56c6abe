"""Two upstreams of one group, one of them at fault in every way there is: what a client of the
gateway sees of it. (A single one's faults: test_engines.py.)"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from certificate import make_certificate
from harness import Fake, Gateway, Reply, chat, running
from rawclient import Answer, Raw, post
from upstream import End, Step, Upstream, answer, chunk, stream_head

Act = Sequence[Step]
CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "fine"},
    "finish_reason": "stop",
}
WHOLE = {"id": "c", "object": "chat.completion", "created": 1, "model": "m1", "choices": [CHOICE]}
FINE = answer(json.dumps(WHOLE).encode())
_turn = iter(range(1_000_000))


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    fields = {"id": "e", "object": "chat.completion.chunk", "created": 1, "model": "m1"}
    return b"data: %b\n\n" % json.dumps({**fields, "choices": [choice]}).encode()


FINE_STREAM = stream_head() + chunk(event("fine", "stop") + b"data: [DONE]\n\n") + b"0\r\n\r\n"


def nobody() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def log_lines(gateway: Gateway) -> list[dict[str, str]]:
    told = [json.loads(line) for line in gateway.stderr.splitlines()]
    return [line for line in told if line["event"] == "request"]


def settings(*urls: str, more: str = "") -> str:
    return (
        f'[engines.pair]\nurls = {json.dumps(urls)}\nrouting.name = "round_robin"\npoll_s = 0\nconnect_s = 1.0\nfirst_byte_s = 0.4\n'
        f"idle_s = 0.4\nhealth_s = 0.1\n{more}"
    )


@pytest.fixture(scope="module")
def bad() -> Iterator[Upstream]:
    with Upstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def good() -> Iterator[Upstream]:
    with Upstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def served(
    bad: Upstream, good: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """One that never gives up on the bad one, so that each request may meet it."""
    toml = settings(bad.url, good.url, more="breaker_failures = 100000\n")
    with Gateway.started(toml, tmp_path_factory.mktemp("faults")) as gateway:
        yield gateway
        assert '"event":"bug"' not in gateway.stderr, gateway.stderr


def ask(gateway: Gateway, *, stream: bool = False) -> Answer:
    with Raw(gateway.port) as client:
        client.send(post(chat(f"question {next(_turn)}", stream=stream)))
        return client.answer()


def ask_until(gateway: Gateway, bad: Upstream, *, stream: bool = False) -> Answer:
    """Two in turn: one of them is asked of the bad one first."""
    calls = bad.calls
    for _ in range(4):
        answered = ask(gateway, stream=stream)
        if bad.calls > calls:
            return answered
    raise AssertionError("the bad one wasn't asked")


def all_fine(gateway: Gateway, count: int, clients: int = 8) -> list[Answer]:
    """Ask so often, several at once; every answer must be a good one."""
    answers: list[Answer] = []

    def run() -> None:
        answers.extend(ask(gateway) for _ in range(count // clients))

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == count // clients * clients
    assert {one.status for one in answers} == {200}
    return answers


def upstreams(gateway: Gateway) -> dict[str, Any]:
    found = gateway.get("/preheat/v1/workers").json["upstreams"]
    return {one["name"]: one for one in found}


def workers_of(answers: Sequence[Answer]) -> set[str]:
    return {one.headers["x-preheat-worker"] for one in answers}


# What can be retried ------------------------------------------------------------------------

REFUSED: dict[str, bytes] = {
    "429": answer(b"{}", "Retry-After: 0\r\n", "429 Too Many Requests"),
    "502": answer(b"<html>", status="502 Bad Gateway"),
    "503": answer(b"{}", "Retry-After: 0\r\n", "503 Service Unavailable"),
    "504": answer(b"", status="504 Gateway Timeout"),
}


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_one_refuses_the_other_answers(
    served: Gateway, bad: Upstream, good: Upstream, refusal: bytes, stream: bool
) -> None:
    bad.play([refusal])
    good.play([FINE_STREAM if stream else FINE])
    answered = ask_until(served, bad, stream=stream)
    assert answered.status == 200
    assert answered.headers["x-preheat-worker"] == "pair.1"
    assert b"fine" in answered.body


def test_no_request_fails_with_one_of_two_dead(good: Upstream, tmp_path: Path) -> None:
    good.play([FINE])
    with Gateway.started(settings(nobody(), good.url), tmp_path) as gateway:
        assert workers_of(all_fine(gateway, 80)) == {"pair.1"}


def test_no_request_fails_with_one_of_two_whose_certificate_is_unknown(
    good: Upstream, tmp_path: Path
) -> None:
    context, _ = make_certificate(tmp_path)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    context.wrap_socket(connection, server_side=True).close()
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    good.play([FINE])
    try:
        with Gateway.started(settings(url, good.url), tmp_path) as gateway:
            all_fine(gateway, 40)
        with Gateway.started(settings(url), tmp_path) as alone:
            answered = ask(alone)
            assert (answered.status, answered.code) == (502, "engine-tls")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


@pytest.mark.parametrize("refusal", [REFUSED["429"], REFUSED["503"]], ids=["429", "503"])
def test_no_request_fails_with_one_of_two_refusing(
    bad: Upstream, good: Upstream, refusal: bytes, tmp_path: Path
) -> None:
    bad.play([refusal])
    good.play([FINE])
    with Gateway.started(settings(bad.url, good.url), tmp_path) as gateway:
        all_fine(gateway, 80)


def test_one_that_is_killed_under_load_costs_at_most_what_it_was_answering(tmp_path: Path) -> None:
    one, two = Fake(), Fake()
    with running(one, two):
        for fake in (one, two):
            fake.script(default={"content": "fine", "delay_s": 0.02})
        with Gateway.started(settings(one.url, two.url), tmp_path) as gateway:
            statuses: list[int] = []

            def run() -> None:
                statuses.extend(ask(gateway).status for _ in range(40))

            clients = [threading.Thread(target=run) for _ in range(8)]
            for client in clients:
                client.start()
            wait_for(lambda: len(statuses) > 80)
            one.process.kill()
            for client in clients:
                client.join(30)
            assert len(statuses) == 320
            # What was under way there was sent, and may have been worked on: 502, not again.
            assert set(statuses) <= {200, 502}
            assert statuses.count(502) <= 8
            assert statuses[-100:] == [200] * 100


def test_one_that_comes_back_is_asked_again(tmp_path: Path) -> None:
    one, two = Fake(), Fake()
    with running(one, two), Gateway.started(settings(one.url, two.url), tmp_path) as gateway:
        one.stop()
        all_fine(gateway, 24)
        address = f"127.0.0.1:{one.port}"
        down = f'"event":"upstream-down","engine":"pair","worker":"pair.0","address":"{address}"'
        wait_for(lambda: down in gateway.stderr)
        assert upstreams(gateway)["pair.0"]["up"] == 0
        assert b'preheat_upstream_up{upstream="pair.0"} 0.0' in gateway.get("/metrics").body
        again = Fake("--listen", f"127.0.0.1:{one.port}")
        with running(again):
            wait_for(lambda: workers_of([ask(gateway)]) == {"pair.0"})
        assert gateway.stderr.count("upstream-down") == gateway.stderr.count("upstream-well") == 1
        found = upstreams(gateway)
        assert [one["up"] for one in found.values()] == [1, 1]
        assert found["pair.0"]["failures"] >= 1


# What can't ---------------------------------------------------------------------------------

LOST: dict[str, tuple[Act, int, str]] = {
    "hang": ([End.HANG], 504, "engine-timeout-first-byte"),
    "garbage": ([b"this is no HTTP\r\n\r\n"], 502, "engine-protocol"),
    "truncated": ([FINE[:-20], End.CLOSE], 502, "engine-reset"),
    "half-a-body-then-silence": ([FINE[:-20], End.HANG], 504, "engine-timeout-idle"),
}


@pytest.mark.parametrize(("act", "status", "code"), LOST.values(), ids=LOST)
def test_what_may_have_been_worked_on_is_asked_once(
    served: Gateway, bad: Upstream, good: Upstream, act: Act, status: int, code: str
) -> None:
    good.play([FINE])
    bad.play([answer(b"{}", status="400 Bad"), End.CLOSE])  # no idle connection is left
    ask_until(served, bad)
    bad.play(act)
    answered = ask_until(served, bad)
    assert (answered.status, answered.code) == (status, code)
    assert bad.calls == 1


@pytest.mark.parametrize("end", [End.RESET, End.CLOSE], ids=["reset", "closed"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_broke_before_one_byte_of_an_answer_is_asked_elsewhere(
    served: Gateway, bad: Upstream, good: Upstream, end: End, stream: bool
) -> None:
    good.play([FINE])
    bad.play([answer(b"{}", status="400 Bad"), End.CLOSE])
    ask_until(served, bad)
    bad.play([end])
    good.play([FINE_STREAM if stream else FINE])
    answered = ask_until(served, bad, stream=stream)
    assert (answered.status, answered.headers["x-preheat-worker"]) == (200, "pair.1")
    assert b"fine" in answered.body
    assert bad.calls == 1


@pytest.mark.parametrize(
    "act",
    [
        [chunk(event("fi")), 0.05, End.RESET],
        [chunk(event("fi") + event("ne")[:20]), 0.05, End.CLOSE],
        [chunk(event("fi")), End.HANG],
    ],
    ids=["reset", "half-an-event", "silence"],
)
def test_a_stream_that_breaks_is_not_begun_again(
    served: Gateway, bad: Upstream, good: Upstream, act: Act
) -> None:
    good.play([FINE_STREAM])
    bad.play([stream_head(), *act])
    answered = ask_until(served, bad, stream=True)
    assert not answered.is_complete
    assert answered.headers["x-preheat-worker"] == "pair.0"
    assert answered.events[0]["choices"][0]["delta"]["content"] == "fi"
    assert answered.events[-1]["error"]["code"] in {"engine-reset", "engine-timeout-idle"}
    assert bad.calls == 1


def passed(gateway: Gateway, bad: Upstream, method: str) -> Reply:
    """Two in turn, as above."""
    calls = bad.calls
    for _ in range(4):
        body = {"model": "m1"} if method == "POST" else None
        reply = gateway.request(method, "/v1/batches", body)
        if bad.calls > calls:
            return reply
    raise AssertionError("the bad one wasn't asked")


@pytest.mark.parametrize("refusal", ["502", "503", "504"])
def test_what_is_passed_through_and_may_have_been_done_is_asked_once(
    served: Gateway, bad: Upstream, good: Upstream, refusal: str
) -> None:
    bad.play([REFUSED[refusal]])
    good.play([FINE])
    reply = passed(served, bad, "POST")
    assert reply.status == int(refusal)
    assert reply.headers["x-preheat-worker"] == "pair.0"
    assert bad.calls == 1


@pytest.mark.parametrize(("method", "refusal"), [("POST", "429"), ("GET", "502")])
def test_what_is_passed_through_and_does_no_harm_twice_the_other_answers(
    served: Gateway, bad: Upstream, good: Upstream, method: str, refusal: str
) -> None:
    bad.play([REFUSED[refusal]])
    good.play([FINE])
    reply = passed(served, bad, method)
    assert (reply.status, reply.headers["x-preheat-worker"]) == (200, "pair.1")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_the_log_names_the_server_that_failed(
    served: Gateway, bad: Upstream, good: Upstream, path: str
) -> None:
    good.play([FINE])
    bad.play([answer(b"{}", status="400 Bad"), End.CLOSE])
    ask_until(served, bad)
    bad.play([End.HANG])
    failed = []
    for _ in range(4):
        reply = served.post(path, chat(f"question {next(_turn)}"))
        if reply.status == 504:
            failed.append(reply.headers["x-preheat-request"])
    assert failed
    line = f'"request":"{failed[0]}","engine":"pair.0","kind":"timeout-first-byte"'
    wait_for(lambda: line in served.stderr)


@pytest.mark.parametrize("status", ["500 Internal Server Error", "400 Bad Request"])
def test_other_answers_are_passed_on(
    served: Gateway, bad: Upstream, good: Upstream, status: str
) -> None:
    good.play([FINE])
    bad.play([answer(b'{"error":{"message":"boom"}}', status=status)])
    answered = ask_until(served, bad)
    assert (answered.status, answered.body) == (int(status[:3]), b'{"error":{"message":"boom"}}')


def test_an_answer_of_another_type_is_passed_on_and_not_stored(
    served: Gateway, bad: Upstream, good: Upstream
) -> None:
    page = answer(b"<html>hello</html>", kind="text/html")
    good.play([page])
    bad.play([page])
    with Raw(served.port) as client:
        for _ in range(2):
            client.send(post(chat("a page")))
            answered = client.answer()
            assert (answered.status, answered.body) == (200, b"<html>hello</html>")
            assert answered.headers["content-type"] == "text/html"
            assert answered.cache == "miss"


def test_the_last_refusal_is_passed_on_with_its_limits(
    served: Gateway, bad: Upstream, good: Upstream
) -> None:
    headers = "Retry-After: 1\r\nX-RateLimit-Remaining-Requests: 0\r\n"
    for upstream in (bad, good):
        upstream.play([answer(b"{}", headers, "429 Too Many Requests")])
    answered = ask(served)
    assert answered.status == 429
    assert answered.headers["retry-after"] == "1"
    assert answered.headers["x-ratelimit-remaining-requests"] == "0"
    assert bad.calls + good.calls == 2


def test_with_all_of_them_dead_the_error_says_what_to_do(tmp_path: Path) -> None:
    toml = settings(nobody(), nobody(), more="breaker_failures = 1\nbreaker_open_s = 5.0\n")
    with Gateway.started(toml, tmp_path) as gateway:
        answered = ask(gateway)
        assert (answered.status, answered.code) == (502, "engine-connect")
        answered = ask(gateway)
        assert (answered.status, answered.code) == (503, "engine-breaker-open")
        assert 1 <= int(answered.headers["retry-after"]) <= 5
        assert gateway.get("/readyz").status == 503


def wait_for(condition: Callable[[], object], within_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "it doesn't come true"
        time.sleep(0.02)


# what the log says of it


@pytest.mark.parametrize("more", ["", 'fallback_message = "later"'])
def test_the_log_line_of_a_failure_has_the_details_that_the_client_got(
    more: str, tmp_path: Path
) -> None:
    toml = f"[engines]\n{more}\n{settings(nobody())}"
    with Gateway.started(toml, tmp_path) as gateway:
        replies = [
            gateway.post("/v1/chat/completions", chat("log", stream=one)) for one in (False, True)
        ]
        detail = "fwd=bypass; detail=fallback" if more else "fwd=miss; detail=engine-connect"
    for reply in replies:
        assert reply.cache_status == f"preheat; {detail}"
    lines = log_lines(gateway)
    assert [line["detail"] for line in lines] == [detail] * 2
    assert [line["status"] for line in lines] == [reply.status for reply in replies]


def test_a_streams_first_token_is_its_first_event_not_its_head(tmp_path: Path) -> None:
    """llama.cpp sends the head before it computes."""
    pytest.importorskip("pyarrow", reason="the request log needs the extra 'log'")
    from preheat.traces import own

    log = tmp_path / "log"
    with Upstream() as slow:
        slow.play(
            (
                stream_head(),
                *(0.3, chunk(event("fine", "stop"))),
                *(0.2, chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"),
            )
        )
        toml = f'[engines.slow]\nurl = "{slow.url}"\n[log]\nenabled = true\npath = "{log}"\n'
        with Gateway.started(toml, tmp_path) as gateway:
            reply = gateway.post("/v1/chat/completions", chat("slow", stream=True))
            assert reply.status == 200
    (row,) = own.requests(log)
    assert 0.3 <= row.fields["ttft_s"] < 0.45
    assert row.fields["service_s"] >= 0.5
