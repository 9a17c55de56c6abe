"""L2 in Redis, through real gateways under load: whatever the server does, no request fails."""

import asyncio
import contextlib
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from comparison import Comparison, shown
from crowd import at_once, clients, kinds, said, wait_for
from harness import Fake, Gateway, chat, running
from ports import free_port
from rawclient import post
from redis_server import RedisServer, SlowWay

CHAT = "/v1/chat/completions"
ONLY = {"Cache-Control": "only-if-cached"}
SECRET = {"KEY_SECRET": "a secret that two gateways share"}
BEFORE_S, AFTER_S = 0.25, 0.005
"""What a request may take longer until the breaker opens, and from then on."""


@pytest.fixture(autouse=True)
def _clean(fake: Fake) -> None:
    fake.reset()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "volatile-ttl") as one:
        yield one


@contextlib.contextmanager
def served(fake: Fake, folder: Path, url: str, more: str = "") -> Iterator[Gateway]:
    """A gateway with its L2 there, or without one; at its end it has met no bug of its own."""
    l2 = f'kind = "redis"\nurl = "{url}"\nbreaker_open_s = 1.0' if url else 'kind = "off"'
    toml = (
        f'[l2]\n{l2}\n[exact]\nsecret_env = "KEY_SECRET"\n[engines.up]\nurl = "{fake.url}"\n{more}'
    )
    gateway = Gateway(toml, folder=folder, environment=SECRET)
    with running(gateway):
        yield gateway
    assert '"event":"bug"' not in gateway.stderr, gateway.stderr
    assert "Traceback" not in gateway.stderr, gateway.stderr


@contextlib.contextmanager
def compared(fake: Fake, folder: Path, url: str) -> Iterator[tuple[Gateway, Comparison]]:
    """A gateway under load, beside one without L2."""
    with served(fake, folder, url) as tested, served(fake, folder, "") as plain:
        with Comparison(tested, plain) as comparison:
            yield tested, comparison
        assert comparison.failures == []
        assert comparison.answered > 100


def is_up(gateway: Gateway) -> bool:
    return bool(gateway.stats["l2"]["up"])


def stores(gateway: Gateway) -> bool:
    """Whether an answer arrives in L2."""
    before = gateway.stats["l2"]["events"].get("put", 0)
    gateway.post(CHAT, chat(f"stored? {time.monotonic()}"))
    time.sleep(0.05)
    return bool(gateway.stats["l2"]["events"].get("put", 0) > before)


def assert_cheap_failure(
    gateway: Gateway, comparison: Comparison, fail: Callable[[], None]
) -> None:
    """From when it fails until the breaker opens, and afterwards, over some of its probes."""
    fail()
    before = comparison.added_s(500, until=lambda: '"event":"l2-failing"' in gateway.stderr)
    print(shown("before the breaker opens", before))
    assert not is_up(gateway)
    after = comparison.added_s(150)
    print(shown("after", after))
    assert max(before) <= BEFORE_S
    assert statistics.median(after) <= AFTER_S


def assert_recovers(gateway: Gateway) -> None:
    wait_for(lambda: is_up(gateway))
    wait_for(lambda: stores(gateway))


def test_without_a_fault_it_costs_little(fake: Fake, tmp_path: Path, server: RedisServer) -> None:
    with compared(fake, tmp_path, server.url) as (gateway, comparison):
        added = comparison.added_s(150)
        print(shown("well", added))
        assert statistics.median(added) <= AFTER_S
        wait_for(lambda: is_up(gateway))


def test_a_stopped_server(fake: Fake, tmp_path: Path, server: RedisServer) -> None:
    with compared(fake, tmp_path, server.url) as (gateway, comparison):
        assert stores(gateway)
        assert_cheap_failure(gateway, comparison, server.stop)
        server.start()
        assert_recovers(gateway)


def test_a_hung_server(fake: Fake, tmp_path: Path, server: RedisServer) -> None:
    with compared(fake, tmp_path, server.url) as (gateway, comparison):
        assert stores(gateway)
        assert_cheap_failure(gateway, comparison, server.pause)
        server.resume()
        assert_recovers(gateway)


def test_a_short_pause_does_not_open_the_breaker(
    fake: Fake, tmp_path: Path, server: RedisServer
) -> None:
    """However many requests wait for it meanwhile."""
    with served(fake, tmp_path, server.url) as gateway, clients(gateway.port, 20) as crowd:
        server.pause()
        answers = at_once(crowd, [post(chat(f"{number}")) for number in range(20)])
        server.resume()
        assert {answer.status for answer in answers} == {200}
        events = gateway.stats["l2"]["events"]
        assert events["error-timeout"] >= 20
        assert '"event":"l2-failing"' not in gateway.stderr
        assert is_up(gateway)


def test_a_slow_server(fake: Fake, tmp_path: Path, server: RedisServer) -> None:
    with slow_way(server.port) as way, compared(fake, tmp_path, way.url) as (gateway, comparison):
        assert stores(gateway)

        def slow_down() -> None:
            way.delay_s = 0.2

        assert_cheap_failure(gateway, comparison, slow_down)
        way.delay_s = 0.06  # too slow for requests, not for what may take its time
        for _ in range(25):
            assert not is_up(gateway)
            time.sleep(0.1)
        way.delay_s = 0.0
        assert_recovers(gateway)


@contextlib.contextmanager
def slow_way(port: int) -> Iterator[SlowWay]:
    """A way to that port, run by a thread of its own."""
    way, loop, end = SlowWay(port), asyncio.new_event_loop(), asyncio.Event()
    is_open = threading.Event()

    async def run() -> None:
        async with way:
            is_open.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert is_open.wait(10)
        yield way
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(10)
        loop.close()


def test_a_full_server(fake: Fake, tmp_path: Path, server: RedisServer) -> None:
    with compared(fake, tmp_path, server.url) as (gateway, comparison):
        assert stores(gateway)
        server.config_set("maxmemory-policy", "noeviction")
        server.ask("SET", "somebody's", "x" * 4_000_000)
        server.config_set("maxmemory", "2mb")
        wait_for(lambda: gateway.stats["l2"]["events"].get("put-full", 0) > 0)
        added = comparison.added_s(150)
        print(shown("full", added))
        assert statistics.median(added) <= AFTER_S
        assert max(added) <= BEFORE_S
        refused = gateway.post("/preheat/v1/invalidate", {"model": "none"})
        assert (refused.status, refused.json["error"]["code"]) == (503, "store-unreachable")
        server.config_set("maxmemory", "64mb")
        assert_recovers(gateway)


def test_a_server_that_starts_again_empty(fake: Fake, tmp_path: Path, server: RedisServer) -> None:
    with compared(fake, tmp_path, server.url) as (gateway, comparison):
        assert stores(gateway)
        server.restart()
        assert max(comparison.added_s(100)) <= BEFORE_S
        assert_recovers(gateway)
        # It may have forgotten invalidations too: what L1 holds of before is asked for anew.
        assert gateway.stats["l1"]["invalidated"] > 0
        reply = [gateway.post(CHAT, chat("new count")) for _ in range(2)]
        assert [one.cache for one in reply] == ["miss", "hit"]


def test_a_server_that_is_not_there_at_the_start(fake: Fake, tmp_path: Path) -> None:
    server = RedisServer(port=free_port(), start=False)
    with server, compared(fake, tmp_path, server.url) as (gateway, comparison):
        added = comparison.added_s(150)
        print(shown("refused at start", added))
        assert statistics.median(added) <= AFTER_S
        assert max(added) <= BEFORE_S
        refused = gateway.post("/preheat/v1/invalidate", {"model": "none"})
        assert (refused.status, refused.json["error"]["code"]) == (503, "store-unreachable")
        server.start()
        assert_recovers(gateway)


def test_an_invalidation_that_cannot_be_told_forgets_nothing(
    fake: Fake, tmp_path: Path, server: RedisServer
) -> None:
    with served(fake, tmp_path, server.url) as gateway:
        gateway.post(CHAT, chat("stays"))
        for fail in (server.pause, server.stop):
            fail()
            refused = gateway.post("/preheat/v1/invalidate", {"model": "m1"})
            assert refused.status == 503
            assert refused.json["error"]["code"] == "store-unreachable"
            assert gateway.post(CHAT, chat("stays"), ONLY).cache == "hit"


# Two gateways ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hundred_equal_requests_at_two_gateways_cost_one_call(
    fake: Fake, tmp_path: Path, server: RedisServer, workers: int
) -> None:
    more = f"[listen]\nworkers = {workers}\n"
    with (
        served(fake, tmp_path, server.url, more) as one,
        served(fake, tmp_path, server.url, more) as other,
        clients(one.port, 50) as here,
        clients(other.port, 50) as there,
    ):
        for text, streams in (("a", [False]), ("b", [True]), ("c", [False, True])):
            calls = fake.calls
            fake.script(default={"content": text}, delay_s=0.3)
            bodies = [post(chat(text, stream=streams[n % len(streams)])) for n in range(100)]
            answers = at_once([*here, *there], bodies)
            assert fake.calls == calls + 1
            assert said(answers) == {text}
            assert kinds(answers)["miss"] == 1
        assert one.ledger["requests"] + other.ledger["requests"] == 300
        wait_for(lambda: server.ask("KEYS", "{preheat}:l:*") == [])
        for gateway in (one, other):
            page = gateway.get("/metrics").body.decode()
            assert re.search(r"^preheat_flights 0\.0$", page, re.MULTILINE)


def test_a_killed_gateways_followers_go_on_at_the_other(
    fake: Fake, tmp_path: Path, server: RedisServer
) -> None:
    fake.script({"delay_s": 60.0, "content": "never"}, {"content": "soon"})
    with (
        served(fake, tmp_path, server.url) as one,
        served(fake, tmp_path, server.url) as other,
        clients(one.port, 1) as (here,),
        clients(other.port, 1) as (there,),
    ):
        here.send(post(chat("who dies?")))
        wait_for(lambda: fake.calls == 1)
        worker = one.get("/preheat/v1/workers").json["workers"][0]["pid"]
        there.send(post(chat("who dies?")))
        os.kill(worker, signal.SIGKILL)
        killed_at = time.monotonic()
        assert said([there.answer()]) == {"soon"}
        assert time.monotonic() - killed_at < 5.0


def test_an_invalidation_reaches_the_other_gateways_l1_within_a_second(
    fake: Fake, tmp_path: Path, server: RedisServer
) -> None:
    with (
        served(fake, tmp_path, server.url) as one,
        served(fake, tmp_path, server.url) as other,
    ):
        for number in range(20):
            for gateway in (one, other):
                gateway.post(CHAT, chat(f"{number}"), {"X-Preheat-Tags": f"tag-{number}"})
        wait_for(lambda: other.stats["l1"]["entries"] == 20)
        for number in range(20):
            headers = {**ONLY, "X-Preheat-Tags": f"tag-{number}"}
            assert other.post(CHAT, chat(f"{number}"), headers).cache == "hit"
            one.post("/preheat/v1/invalidate", {"tags": [f"tag-{number}"]})
            told_at = time.monotonic()
            wait_for(lambda: other.post(CHAT, chat(f"{number}"), ONLY).status == 504)  # noqa: B023  called at once
            assert time.monotonic() - told_at < 1.0
        # One that comes while nobody can be told of it is heard of afterwards.
        assert one.post(CHAT, chat("0"), ONLY).status == 504
    assert fake.calls == 20
