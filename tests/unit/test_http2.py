"""The HTTP/2 client against real servers over TLS: one of ours that misbehaves, and nginx."""

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from certificate import make_certificate
from harness import Gateway, chat
from preheat.engines.openai import OpenAi
from preheat.errors import ConfigError, EngineError
from preheat.transport.client import Client, Response, Timeouts

pytest.importorskip("h2", reason="needs the extra: pip install 'preheat[http2]'")

from http2_peer import Http2Peer
from preheat.transport.http2 import Http2Client

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

MIB = 1024 * 1024
Tls = tuple[ssl.SSLContext, Path]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_certificate(tmp_path_factory.mktemp("tls"), "h2", "http/1.1")


@pytest_asyncio.fixture
async def peer(tls: Tls) -> AsyncIterator[Http2Peer]:
    async with Http2Peer(tls[0]) as one:
        yield one


@contextlib.asynccontextmanager
async def client_of(
    url: str,
    tls: Tls,
    timeouts: Timeouts = Timeouts(connect_s=2.0, first_byte_s=5.0, idle_s=5.0),  # noqa: B008 - frozen
    max_connections: int = 64,
) -> AsyncIterator[Http2Client]:
    trusting = ssl.create_default_context(cafile=tls[1])
    client = Http2Client(url, timeouts=timeouts, max_connections=max_connections, tls=trusting)
    try:
        yield client
    finally:
        await client.aclose()


async def post(client: Http2Client, act: str, body: bytes = b"hello") -> Response:
    return await client.request(b"POST", b"/v1/" + act.encode(), [(b"X-A", b"b")], body)


async def said(client: Http2Client, act: str, body: bytes = b"hello") -> bytes:
    response = await post(client, act, body)
    return await response.read(64 * MIB)


async def failure(client: Http2Client, act: str) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await said(client, act)
    return caught.value


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_requests_and_answers_are_carried_whole(peer: Http2Peer, tls: Tls) -> None:
    async with client_of(peer.url, tls) as client:
        response = await post(client, "echo?q=%41")
        assert response.status == 200
        assert response.headers == [(b"content-type", b"text/plain"), (b"x-n", b"1")]
        assert await response.read(99) == b"hello"
    head, body = peer.requests[0]
    assert body == b"hello"
    assert head == {
        b":method": b"POST",
        b":scheme": b"https",
        b":authority": b"127.0.0.1:%d" % peer.port,
        b":path": b"/v1/echo?q=%41",
        b"x-a": b"b",
        b"content-length": b"5",
    }


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 5 * MIB])
async def test_bodies_of_any_size_go_both_ways(peer: Http2Peer, tls: Tls, size: int) -> None:
    body = os.urandom(size)
    async with client_of(peer.url, tls) as client:
        assert await said(client, "echo", body) == body


async def test_requests_at_once_share_one_connection(peer: Http2Peer, tls: Tls) -> None:
    async with client_of(peer.url, tls) as client:
        bodies = [b"%d" % number for number in range(50)]
        assert await asyncio.gather(*(said(client, "echo", body) for body in bodies)) == bodies
        assert client.in_flight == 0
    assert peer.connections == 1
    assert peer.most_at_once > 1


async def test_more_than_a_connection_takes_open_another(tls: Tls) -> None:
    async with Http2Peer(tls[0], most_streams=4) as peer, client_of(peer.url, tls) as client:
        await said(client, "echo")  # now it is known how many it takes
        asking = [asyncio.create_task(said(client, "held")) for _ in range(10)]
        await until(lambda: len(peer.paths) == 11)
        assert peer.connections == 3
        assert client.in_flight == 10
        peer.release.set()
        assert await asyncio.gather(*asking) == [b"hello"] * 10
        assert peer.most_at_once <= 4


async def test_at_most_so_many_are_under_way(peer: Http2Peer, tls: Tls) -> None:
    limits = Timeouts(queue_s=0.1)
    async with client_of(peer.url, tls, limits, max_connections=2) as client:
        asking = [asyncio.create_task(said(client, "held")) for _ in range(2)]
        await until(lambda: len(peer.paths) == 2)
        assert not client.has_room
        assert (await failure(client, "echo")).kind == "queue"
        peer.release.set()
        await asyncio.gather(*asking)
        assert await said(client, "echo") == b"hello"


async def test_pieces_arrive_as_they_are_sent(peer: Http2Peer, tls: Tls) -> None:
    async with client_of(peer.url, tls) as client:
        response = await post(client, "slow")
        assert [piece async for piece in response] == [b"first", b"second"]


async def test_a_slow_reader_holds_up_only_its_own_stream(peer: Http2Peer, tls: Tls) -> None:
    async with client_of(peer.url, tls) as client:
        slow = await post(client, "large")
        await asyncio.sleep(0.1)
        assert slow._exchange.buffered_bytes <= 256 * 1024
        assert len(await said(client, "large")) == 4 * MIB
        assert len(await slow.read(64 * MIB)) == 4 * MIB
    assert peer.connections == 1


async def test_what_a_sink_takes_is_given_back_to_the_window(peer: Http2Peer, tls: Tls) -> None:
    async with client_of(peer.url, tls) as client:
        response = await post(client, "large")
        taken = [len(await anext(response))]
        response.hand_to(lambda piece: taken.append(len(piece)) or True)
        missed = [len(piece) async for piece in response]
        assert sum(taken) + sum(missed) == 4 * MIB


async def test_what_a_sink_takes_puts_off_the_deadline_by_idle_s(peer: Http2Peer, tls: Tls) -> None:
    async with client_of(peer.url, tls, Timeouts(idle_s=0.3)) as client:
        response = await post(client, "stuck")
        assert await anext(response) == b"first"
        response.hand_to(lambda _: True)
        waiting = asyncio.ensure_future(anext(response))
        for _ in range(5):
            await asyncio.sleep(0.1)
            response._exchange.on_body(b"more")  # as the connection does
        assert not waiting.done()
        with pytest.raises(EngineError) as caught:
            await waiting
        assert caught.value.kind == "timeout-idle"


async def test_who_is_cancelled_before_the_head_resets_the_stream(
    peer: Http2Peer, tls: Tls
) -> None:
    async with client_of(peer.url, tls) as client:
        await said(client, "echo")
        asking = asyncio.create_task(said(client, "hang"))
        await until(lambda: len(peer.paths) == 2)
        asking.cancel()
        await until(lambda: peer.resets)
        assert client.in_flight == 0
        assert await said(client, "echo") == b"hello"


async def test_an_answer_that_is_closed_resets_the_stream(peer: Http2Peer, tls: Tls) -> None:
    async with client_of(peer.url, tls) as client:
        response = await post(client, "stuck")
        assert await anext(response) == b"first"
        response.close()
        await until(lambda: peer.resets)
        for _ in range(20):  # what was never read is given back to the connection's window
            (await post(client, "large")).close()
        assert len(await said(client, "large")) == 4 * MIB
    assert peer.connections == 1


@pytest.mark.parametrize(
    ("act", "kind", "before"),
    [
        ("reset", "reset", True),
        ("cut", "reset", True),
        ("half", "reset", False),
        ("refuse", "reset", True),
        ("garbage", "protocol", True),
        ("hang", "timeout-first-byte", True),
        ("stuck", "timeout-idle", False),
    ],
)
async def test_each_failure_has_its_kind(
    peer: Http2Peer, tls: Tls, act: str, kind: str, before: bool
) -> None:
    async with client_of(peer.url, tls, Timeouts(first_byte_s=0.2, idle_s=0.2)) as client:
        error = await failure(client, act)
        assert (error.kind, error.before_first_byte) == (kind, before)
        assert f"127.0.0.1:{peer.port}" in str(error)
        assert client.in_flight == 0
        assert await said(client, "echo") == b"hello"


@pytest.mark.parametrize("act", ["refuse-once", "goaway-once"])
async def test_what_the_engine_has_not_begun_is_sent_once_more(
    peer: Http2Peer, tls: Tls, act: str
) -> None:
    async with client_of(peer.url, tls) as client:
        assert await said(client, act) == b"hello"
    assert len(peer.paths) == 2
    assert peer.connections == 2


async def test_a_connection_about_to_close_ends_what_it_has_and_takes_nothing_more(
    peer: Http2Peer, tls: Tls
) -> None:
    async with client_of(peer.url, tls) as client:
        held = asyncio.create_task(said(client, "held"))
        await until(lambda: peer.paths)
        large = os.urandom(MIB)
        assert await said(client, "goaway-and-answer", large) == large
        assert await said(client, "echo") == b"hello"
        assert peer.connections == 2
        peer.release.set()
        assert await held == b"hello"
        await until(lambda: peer.open == 1)


async def test_a_connection_that_was_idle_and_is_gone_is_replaced(
    peer: Http2Peer, tls: Tls
) -> None:
    async with client_of(peer.url, tls) as client:
        for _ in range(5):
            await said(client, "echo")
            for one in tuple(peer.live):
                one.end()
            assert await said(client, "echo") == b"hello"


async def test_a_connection_on_which_nothing_came_is_used_no_more(
    peer: Http2Peer, tls: Tls
) -> None:
    async with client_of(peer.url, tls, Timeouts(first_byte_s=0.1)) as client:
        await said(client, "echo")
        await asyncio.sleep(0.05)
        await failure(client, "hang")
        await said(client, "echo")
    assert peer.connections == 2


async def test_nobody_listens_there(tls: Tls) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with client_of(f"https://127.0.0.1:{taken.getsockname()[1]}", tls) as client:
            errors = await asyncio.gather(*(failure(client, "echo") for _ in range(5)))
            assert {one.kind for one in errors} == {"connect"}
            assert client.in_flight == 0


async def test_a_certificate_nobody_vouches_for_is_a_tls_error(peer: Http2Peer) -> None:
    client = Http2Client(peer.url)
    assert (await failure(client, "echo")).kind == "tls"
    await client.aclose()


async def test_who_takes_no_connection_in_time_is_told_so(tls: Tls) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        async with client_of(url, tls, Timeouts(connect_s=0.1)) as client:
            assert (await failure(client, "echo")).kind == "timeout-connect"


async def test_a_server_without_http2_is_named(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path, "http/1.1")
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=tls[0])
    async with client_of(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", tls) as client:
        error = await failure(client, "echo")
        # A server may refuse in the handshake, or go on without.
        assert error.kind in {"protocol", "tls"}
    server.close()


async def test_a_closed_client_fails_what_is_under_way_and_what_comes_later(
    peer: Http2Peer, tls: Tls
) -> None:
    async with client_of(peer.url, tls) as client:
        asking = asyncio.create_task(said(client, "hang"))
        await until(lambda: peer.paths)
        await client.aclose()
        with pytest.raises(EngineError, match="shutting down"):
            await asking
        with pytest.raises(EngineError, match="shutting down"):
            await said(client, "echo")
    await until(lambda: peer.open == 0)


@pytest.mark.parametrize(
    "headers", [[(b"a\n", b"b")], [(b"a", b"b\r\nc: d")], [(b"content-length", b"1")]]
)
async def test_what_reads_as_more_headers_than_meant_is_refused(
    peer: Http2Peer, tls: Tls, headers: list[tuple[bytes, bytes]]
) -> None:
    async with client_of(peer.url, tls) as client:
        with pytest.raises(ValueError, match="header"):
            await client.request(b"POST", b"/", headers, b"")
        assert client.in_flight == 0


async def test_proxies_named_in_the_environment_are_not_used(
    peer: Http2Peer, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with client_of(peer.url, tls) as client:
        assert await said(client, "echo") == b"hello"


# In an engine -------------------------------------------------------------------------------


async def test_an_engine_speaks_it_to_https_urls_only_where_asked(
    peer: Http2Peer, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tls[1]))
    engine = OpenAi("e", peer.url, http2=True, api_key="k")
    response = await engine.send(b"POST", b"/echo", [], b"hello")
    assert (await response.read(9), response.worker) == (b"hello", "e")
    assert peer.requests[0][0][b"authorization"] == b"Bearer k"
    await engine.aclose()
    plain = OpenAi("p", "http://127.0.0.1:1", http2=True)
    assert isinstance(plain._group._workers[0].client, Client)


async def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "preheat.transport.http2", None)
    with pytest.raises(ConfigError, match=r"preheat\[http2\]"):
        OpenAi("e", "https://127.0.0.1:1", http2=True)


async def test_a_gateway_asks_over_it(peer: Http2Peer, tls: Tls, tmp_path: Path) -> None:
    toml = f'[engines.e]\nurl = "{peer.url}"\nhttp2 = true\n'
    trust = {"SSL_CERT_FILE": str(tls[1])}
    gateway = await asyncio.to_thread(Gateway, toml, folder=tmp_path, environment=trust)
    try:
        reply = await asyncio.to_thread(gateway.post, "/v1/chat/completions", chat("hello"))
        assert (reply.status, reply.headers["x-preheat-worker"]) == (200, "e")
        assert reply.json == chat("hello")
    finally:
        await asyncio.to_thread(gateway.stop)
    assert peer.paths == [b"/v1/chat/completions"]


# nginx --------------------------------------------------------------------------------------

NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
  uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
  server {{
    listen 127.0.0.1:{port} ssl http2;
    ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
    keepalive_requests 60;
    location / {{ return 200 "fine"; }}
  }}
}}
"""


@pytest_asyncio.fixture
async def nginx(tmp_path: Path) -> AsyncIterator[tuple[str, Tls]]:
    program = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if program is None:
        pytest.skip("needs nginx")
    tls = make_certificate(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = tmp_path / "nginx.conf"
    settings.write_text(NGINX.format(folder=tmp_path, port=port))
    process = await asyncio.create_subprocess_exec(program, "-c", str(settings), stderr=-3)
    give_up_at = time.monotonic() + 5
    while time.monotonic() < give_up_at:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        await asyncio.sleep(0.02)
    yield f"https://127.0.0.1:{port}", tls
    process.terminate()
    await asyncio.wait_for(process.wait(), 10)


async def test_nginx_is_understood(nginx: tuple[str, Tls]) -> None:
    url, tls = nginx
    async with client_of(url, tls, max_connections=256) as client:
        answers = await asyncio.gather(*(said(client, "x", b"y" * 1_000) for _ in range(200)))
        assert set(answers) == {b"fine"}
