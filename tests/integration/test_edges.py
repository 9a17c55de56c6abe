"""Faults that reviewers found, each with its whole kind: through TCP, with real processes."""

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Fake, Gateway, chat, running


@pytest.fixture
def apart(fake: Fake) -> Iterator[Gateway]:
    """A gateway of the test's own."""
    fake.reset()
    served = Gateway(upstream=fake.url)
    yield served
    served.stop()


def raw_post(body: bytes, target: str = "/v1/chat/completions", headers: str = "") -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_the_query_goes_upstream_and_is_part_of_the_key(apart: Gateway, fake: Fake) -> None:
    paths = [f"/v1/chat/completions{query}" for query in ("", "?v=1", "?v=2", "?v=1")]
    replies = [apart.post(path, chat("query")) for path in paths]
    assert [reply.cache for reply in replies] == ["miss", "miss", "miss", "hit"]
    assert fake.calls == 3


def test_readiness_comes_back_without_traffic(tmp_path: Path) -> None:
    engine = Fake()
    toml = f'[engines.a]\nurl = "{engine.url}"\nbreaker_failures = 1\nbreaker_open_s = 0.5\n'
    with Gateway.started(toml, tmp_path) as served:
        engine.stop()
        reply = served.post("/v1/chat/completions", chat())
        assert (reply.status, served.get("/readyz").status) == (502, 503)
        refused = served.post("/v1/chat/completions", chat())
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        deadline = time.monotonic() + 5
        while served.get("/readyz").status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_whole_follower_does_not_wait_for_a_leader_that_does_not_read(
    apart: Gateway, fake: Fake
) -> None:
    fake.script({"content": "x" * 6_000_000, "pieces": 3_000})
    leader = socket.create_connection(("127.0.0.1", apart.port), timeout=10)
    with leader:
        leader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        leader.sendall(raw_post(json.dumps(chat("big", stream=True)).encode()))
        leader.recv(10)
        time.sleep(0.5)
        reply = apart.request("POST", "/v1/chat/completions", chat("big"), timeout_s=15)
        assert reply.cache == "join"
        assert len(reply.json["choices"][0]["message"]["content"]) == 6_000_000


def test_a_stored_stream_is_told_at_the_clients_pace(apart: Gateway, fake: Fake) -> None:
    """What is kept at two bytes a token is told at two hundred: not all at once into memory."""
    fake.script({"content": "ab" * 20_000, "pieces": 20_000})
    first = apart.post("/v1/chat/completions", chat("many", stream=True))
    assert first.events[-1] == "[DONE]"
    before = resident_bytes(apart)
    sockets = []
    for _ in range(20):
        client = socket.create_connection(("127.0.0.1", apart.port), timeout=10)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.sendall(raw_post(json.dumps(chat("many", stream=True)).encode()))
        sockets.append(client)
    time.sleep(1.0)
    assert apart.get("/healthz").status == 200
    assert resident_bytes(apart) - before < 60_000_000
    for client in sockets:
        client.close()
    again = apart.post("/v1/chat/completions", chat("many", stream=True))
    assert again.cache == "hit"
    told = [event["choices"][0]["delta"] for event in again.events[:-1]]
    assert told == [event["choices"][0]["delta"] for event in first.events[:-1]]


def resident_bytes(served: Gateway) -> int:
    status = Path(f"/proc/{served.worker_pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1_024


def test_a_method_that_would_show_the_engines_key_is_not_passed_on(apart: Gateway) -> None:
    for method in ("TRACE", "PROPFIND"):
        assert apart.request(method, "/v1/files").status == 405


def test_a_request_that_comes_back_is_refused(tmp_path: Path) -> None:
    """Two gateways that are each other's engine: nobody's connections run out."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    first = Gateway(upstream=f"http://127.0.0.1:{port}")
    with running(first):
        second = Gateway("", "--listen", f"127.0.0.1:{port}", upstream=first.url)
        with running(second):
            for path, body in (
                ("/v1/chat/completions", chat()),
                ("/v1/embeddings", {"input": "x"}),
            ):
                reply = first.post(path, body)
                assert (reply.status, reply.json["error"]["code"]) == (508, "loop")


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": [{"index": 0, "message": "text", "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "message": {"tool_calls": [3, None]}, "finish_reason": "stop"}]},
        {"error": {"message": "x"}, "choices": [{"message": {}, "finish_reason": "stop"}]},
    ],
)
def test_what_can_not_be_told_again_is_not_kept(
    apart: Gateway, fake: Fake, odd: dict[str, object]
) -> None:
    fake.script({"body": odd}, {"body": odd})
    for is_stream in (False, True):
        reply = apart.post("/v1/chat/completions", chat("odd", stream=is_stream))
        assert (reply.status, reply.cache) == (200, "miss")
    assert apart.post("/v1/chat/completions", chat("odd")).json["choices"][0]["message"]


@pytest.mark.parametrize("number", ["1e-99999999999999999999", "0e9999999999999999999999", "1e400"])
def test_a_number_that_nothing_holds_is_passed_on_uncached(apart: Gateway, number: str) -> None:
    body = b'{"model":"m1","temperature":0,"messages":[],"x":%b}' % number.encode()
    for _ in range(2):
        assert apart.post("/v1/chat/completions", body).detail == "bypass-inexact"
    large = body[:-1] + b',"y":"%b"}' % (b"z" * 20_000)
    assert apart.post("/v1/chat/completions", large).detail == "bypass-inexact"


def test_a_body_of_very_many_values_holds_up_nobody(apart: Gateway) -> None:
    floats = b",".join([b"0.1"] * 400_000)
    body = b'{"model":"m1","temperature":0,"messages":[],"x":[%b]}' % floats
    assert apart.post("/v1/chat/completions", body).detail == "bypass-complex"
    names = b",".join(b'"k%d":1' % number for number in range(60_000))
    body = b'{"model":"m1","temperature":0,"messages":[],"x":{%b}}' % names
    assert apart.post("/v1/chat/completions", body).detail == "bypass-complex"


def test_nobody_gets_an_empty_list_of_models_from_a_dead_engine() -> None:
    with running(served := Gateway(upstream="http://127.0.0.1:1")):
        reply = served.get("/v1/models")
        assert (reply.status, reply.json["error"]["code"]) == (502, "engine-connect")


def test_a_model_has_its_engines_name_on_every_path(fake: Fake, tmp_path: Path) -> None:
    fake.reset()
    toml = f'[engines.a]\nurl = "{fake.url}"\n[models."/data/models/Qwen"]\nalias = "real"\n'
    with Gateway.started(toml, tmp_path) as served:
        served.post("/v1/chat/completions", chat(model="/data/models/Qwen"))
        served.post("/v1/embeddings", {"model": "/data/models/Qwen", "input": "x"})
        assert [json.loads(body)["model"] for body in fake.bodies] == ["real", "real"]


def test_the_fake_engine_is_a_kind_of_engine(tmp_path: Path) -> None:
    with Gateway.started('[engines.f]\nkind = "fake"\n', tmp_path) as served:
        replies = [served.post("/v1/chat/completions", chat()) for _ in range(2)]
        assert [reply.cache for reply in replies] == ["miss", "hit"]


def test_behind_a_proxy_on_this_machine_the_admin_routes_stay_shut(gateway: Gateway) -> None:
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-Ip", "Origin"):
        assert gateway.get("/preheat/v1/ledger", {header: "8.8.8.8"}).status == 403
    assert gateway.get("/preheat/v1/ledger").status == 200
