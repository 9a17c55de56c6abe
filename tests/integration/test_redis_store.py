"""The Redis store against a real server, healthy and in every way of failing."""

import asyncio
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from ports import free_port
from preheat.core.types import Epoch, Invalidation, Key
from preheat.errors import ConfigError, StoreError
from preheat.stores.redis import Redis, _findings
from redis_server import RedisServer, SlowWay

LATER = time.time() + 1000


def key(number: int) -> Key:
    return Key(number.to_bytes(16, "big"))


class Told(list[tuple[str, dict[str, object]]]):
    """What the store had to say."""

    def __call__(self, event: str, fields: dict[str, object]) -> None:
        self.append((event, fields))

    def of(self, event: str) -> list[dict[str, object]]:
        return [fields for name, fields in self if name == event]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with RedisServer("--maxmemory", "128mb", "--maxmemory-policy", "volatile-ttl") as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    shared_server.ask("FLUSHALL")
    return shared_server


@asynccontextmanager
async def opened(
    url: str, *, timeout_s: float = 1.0, password: str = "", told: Told | None = None
) -> AsyncIterator[Redis]:
    store = Redis(
        url, password=password, timeout_s=timeout_s, on_event=Told() if told is None else told
    )
    await store.start()
    try:
        yield store
    finally:
        begun = time.monotonic()
        await store.aclose()
        assert time.monotonic() - begun < 1.2


async def eventually(check: Callable[[], Any], within_s: float = 5.0) -> None:
    until = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < until, "it never came true"
        await asyncio.sleep(0.01)


async def until_it_works(store: Redis, within_s: float = 5.0) -> None:
    until = time.monotonic() + within_s
    while True:
        try:
            await store.get([key(1)])
            await store.size()
        except StoreError:
            assert time.monotonic() < until, "it never came back"
            await asyncio.sleep(0.02)
        else:
            return


async def kind_of(call: Any, within_s: float = 0.5) -> str:
    """The kind of its failure, which must come in time."""
    begun = time.monotonic()
    with pytest.raises(StoreError) as caught:
        await call
    assert time.monotonic() - begun < within_s
    return caught.value.kind


# Values ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_value_is_kept_until_it_expires(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await store.put(key(1), b"\0\r\nany bytes" * 10_000, LATER)
        await store.put(key(2), b"brief", time.time() + 0.05)
        await store.put(key(3), b"over", time.time() - 1)
        first, _, third, fourth = await store.get([key(1), key(2), key(3), key(4)])
        assert first == b"\0\r\nany bytes" * 10_000
        assert third is None
        assert fourth is None
        await asyncio.sleep(0.06)
        assert await store.get([key(2)]) == [None]
        left_ms = server.ask("PTTL", b"{preheat}:v:" + key(1))
        wanted_ms = (LATER - time.time()) * 1_000
        assert wanted_ms - 1_000 < left_ms <= wanted_ms + 1_000


@pytest.mark.asyncio
async def test_an_expired_value_takes_the_place_of_a_live_one(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await store.put(key(1), b"old", LATER)
        await store.put(key(1), b"new", time.time() - 1)
        assert await store.get([key(1)]) == [None]


@pytest.mark.asyncio
@pytest.mark.parametrize("form", ["unix", "named database"])
async def test_it_is_reached_by_every_form_of_address(server: RedisServer, form: str) -> None:
    url = f"unix://{server.socket_path}?db=3" if form == "unix" else server.url[:-1] + "3"
    async with opened(url) as store:
        await store.put(key(1), b"value", LATER)
        assert await store.get([key(1)]) == [b"value"]
    assert server.ask("DBSIZE") == 0


@pytest.mark.asyncio
async def test_it_speaks_tls_and_checks_the_certificate(
    server: RedisServer, tmp_path: Path
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate")
    certificate, secret = tmp_path / "cert.pem", tmp_path / "key.pem"
    asked = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=redis"
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", secret, "-out", certificate]
    subprocess.run([openssl, *asked.split(), *files], check=True, capture_output=True, timeout=20)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, secret)
    async with SlowWay(server.port, tls=tls) as way:
        url = f"rediss://localhost:{way.port}/0"
        async with opened(url + f"?ssl_ca_certs={certificate}") as store:
            await store.put(key(1), b"value" * 100_000, LATER)
            assert await store.get([key(1)]) == [b"value" * 100_000]
        async with opened(url) as store:
            assert await kind_of(store.get([key(1)])) == "connect"


@pytest.mark.asyncio
async def test_size_is_the_servers(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await store.put(key(1), bytes(1_000_000), LATER)
        size = await store.size()
    assert size.entries == 1
    assert 1_000_000 < size.size_bytes < size.budget_bytes == 128 * 1_048_576


@pytest.mark.asyncio
async def test_what_was_put_reaches_the_server_before_it_closes(server: RedisServer) -> None:
    async with opened(server.url) as store:
        puts = [asyncio.create_task(store.put(key(i), bytes(10_000), LATER)) for i in range(500)]
        await asyncio.sleep(0)
    await asyncio.gather(*puts)
    assert server.ask("DBSIZE") == 500


@pytest.mark.asyncio
async def test_a_key_of_another_type_is_a_miss_and_is_healed(server: RedisServer) -> None:
    server.ask("LPUSH", b"{preheat}:v:" + key(1), "intruder")
    async with opened(server.url) as store:
        assert await store.get([key(1)]) == [None]
        await store.put(key(1), b"value", LATER)
        assert await store.get([key(1)]) == [b"value"]


@pytest.mark.parametrize(
    "url", ["", "http://127.0.0.1:1", "redis://127.0.0.1/?no_such=1", "127.0.0.1:6379"]
)
def test_an_address_that_cannot_work_is_refused_with_its_form(url: str) -> None:
    with pytest.raises(ConfigError, match=r"l2\.url: expected redis://"):
        Redis(url, password="", timeout_s=1.0, on_event=Told())


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preheat.transport.redis_lane", "redis"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'preheat\[redis\]'"):
        Redis("redis://127.0.0.1", password="", timeout_s=1.0, on_event=Told())


# Leases ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_one_of_two_gateways_has_a_lease(server: RedisServer) -> None:
    async with opened(server.url) as one, opened(server.url) as other:
        taken = await asyncio.gather(*(s.take(key(1), 30) for s in (one, other) * 50))
        assert sum(taken) == 1
        holder, waiter = (one, other) if taken[0] else (other, one)
        await waiter.release([key(1)])
        assert not await waiter.take(key(1), 30)
        await holder.release([key(1), key(2)])
        assert await waiter.take(key(1), 30)


@pytest.mark.asyncio
async def test_a_lease_ends_unless_its_holder_renews_it(server: RedisServer) -> None:
    async with opened(server.url) as one, opened(server.url) as other:
        assert await one.take(key(1), 0.15)
        assert await one.take(key(2), 0.15)
        await one.renew([key(1)], 30)
        await other.renew([key(2)], 30)
        await asyncio.sleep(0.2)
        assert not await other.take(key(1), 30)
        assert await other.take(key(2), 30)


@pytest.mark.asyncio
async def test_a_lease_that_came_too_late_is_given_back(server: RedisServer) -> None:
    async with SlowWay(server.port) as way, opened(way.url, timeout_s=0.03) as store:
        way.delay_s = 0.1
        assert await kind_of(store.take(key(1), 60)) == "timeout"
        assert server.ask("DBSIZE") == 1
        await eventually(lambda: server.ask("DBSIZE") == 0)


# Invalidations ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_two_gateways_read_the_same_invalidations(server: RedisServer) -> None:
    async with opened(server.url) as one, opened(server.url) as other:
        start, same = await asyncio.gather(one.news(Epoch()), other.news(Epoch()))
        assert start.epoch == same.epoch
        assert start.epoch.generation
        assert start.epoch.number == 0
        assert start.is_all
        nothing = await one.news(start.epoch)
        assert nothing.epoch == start.epoch
        assert not nothing.invalidations
        assert not nothing.is_all
        first = Invalidation(keys=frozenset({key(1)}), tenant="t")
        second = Invalidation(tags=frozenset({"a", "b"}))
        assert (await one.publish(first)).number == 1
        assert (await other.publish(second)).number == 2
        news = await other.news(start.epoch)
        assert news.invalidations == ((1, first), (2, second))
        assert not news.is_all
        rest = await one.news(Epoch(start.epoch.generation, 1))
        assert rest.invalidations == ((2, second),)
        assert not (await one.news(rest.epoch)).invalidations


@pytest.mark.asyncio
async def test_a_late_reader_gets_all_there_are_in_many_pages(server: RedisServer) -> None:
    async with opened(server.url) as one, opened(server.url) as other:
        for round_ in range(5):
            await asyncio.gather(
                *(one.publish(Invalidation(model=f"{round_}-{i}")) for i in range(50))
            )
        news = await other.news(Epoch())
        assert [number for number, _ in news.invalidations] == list(range(1, 251))
        part = await other.news(Epoch(news.epoch.generation, 100))
        assert not part.is_all
        assert [number for number, _ in part.invalidations] == list(range(101, 251))


@pytest.mark.asyncio
async def test_a_reader_older_than_the_record_is_told_so(server: RedisServer) -> None:
    async with opened(server.url) as store:
        begin = (await store.news(Epoch())).epoch
        for _ in range(20):
            await store.publish(Invalidation(model="m"))
        server.ask("XTRIM", "{preheat}:board", "MAXLEN", "5")
        news = await store.news(begin)
        assert news.is_all
        assert [number for number, _ in news.invalidations] == [16, 17, 18, 19, 20]
        assert news.epoch == Epoch(begin.generation, 20)
        assert news.floor == 15
        assert not (await store.news(Epoch(begin.generation, 15))).is_all
        assert (await store.news(Epoch(begin.generation, 14))).is_all


@pytest.mark.asyncio
async def test_the_record_stays_bounded(server: RedisServer) -> None:
    async with opened(server.url) as store:
        begin = (await store.news(Epoch())).epoch
        # As if ten thousand had been published: each costs a round trip.
        server.ask(
            "EVAL",
            "for i = 1, 12000 do redis.call('XADD', KEYS[1], i .. '-1', 'g', ARGV[1], 'i', '') end",
            1,
            "{preheat}:board",
            begin.generation,
        )
        assert (await store.publish(Invalidation(model="m"))).number == 12_001
        assert server.ask("XLEN", "{preheat}:board") < 10_200


@pytest.mark.asyncio
async def test_a_record_nobody_can_read_voids_everything(server: RedisServer) -> None:
    async with opened(server.url) as store:
        begin = (await store.news(Epoch())).epoch
        server.ask("XADD", "{preheat}:board", "1-1", "g", begin.generation, "i", b"\xc1")
        assert (await store.news(begin)).invalidations == ((1, Invalidation()),)


@pytest.mark.asyncio
async def test_a_server_that_forgot_invalidations_begins_a_new_generation(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store:
        begin = (await store.news(Epoch())).epoch
        await store.publish(Invalidation(model="m"))
        seen = await store.publish(Invalidation(model="n"))
        server.ask("XDEL", "{preheat}:board", "2-1")  # as an old snapshot, or a replica behind
        news = await store.news(seen)
        assert news.epoch.generation != begin.generation
        assert news.is_all


@pytest.mark.asyncio
async def test_scripts_are_sent_anew_after_the_server_forgot_them(server: RedisServer) -> None:
    told = Told()
    async with opened(server.url, told=told) as store:
        await store.publish(Invalidation(model="m"))
        assert await store.take(key(1), 60)
        server.ask("SCRIPT", "FLUSH")
        await store.publish(Invalidation(model="m"))
        await store.release([key(1)])
        assert await store.take(key(1), 60)
    assert not told.of("redis-refused")


# Faults ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_server_that_comes_up_later_is_found(tmp_path: object) -> None:
    told = Told()
    port = free_port()
    async with opened(f"redis://127.0.0.1:{port}", told=told, timeout_s=0.5) as store:
        assert await kind_of(store.get([key(1)])) == "connect"
        assert await kind_of(store.put(key(1), b"", LATER)) == "connect"
        assert await kind_of(store.news(Epoch())) == "connect"
        assert await kind_of(store.size()) == "connect"
        with RedisServer(port=port):
            await until_it_works(store)
            await store.put(key(1), b"value", LATER)
            assert await store.get([key(1)]) == [b"value"]
    assert [event for event, _ in told][:2] == ["redis-down", "redis-connected"]


@pytest.mark.asyncio
async def test_it_stops_under_load_and_comes_back_empty() -> None:
    told = Told()
    wrong: list[object] = []
    kinds: set[str] = set()
    is_over = False

    async def load(store: Redis, number: int) -> None:
        while not is_over:
            try:
                await store.put(key(number), key(number) * 100, LATER)
                got = (await store.get([key(number)]))[0]
                if got not in {None, key(number) * 100}:
                    wrong.append(got)
            except StoreError as error:
                kinds.add(error.kind)
                await asyncio.sleep(0.005)

    with RedisServer() as server:
        async with opened(server.url, told=told) as store:
            before = (await store.news(Epoch())).epoch
            await store.publish(Invalidation(model="m"))
            loads = [asyncio.create_task(load(store, i)) for i in range(16)]
            await asyncio.sleep(0.1)
            server.stop()
            await asyncio.sleep(0.3)
            assert await kind_of(store.get([key(1)])) == "connect"
            server.start()
            await until_it_works(store)
            is_over = True
            await asyncio.gather(*loads)
            after = await store.news(before)
            assert after.is_all
            assert after.epoch.generation not in {"", before.generation}
            assert not after.invalidations
    assert not wrong
    assert kinds == {"connect"}
    assert len(told.of("redis-down")) == 1
    assert len(told.of("redis-connected")) == 2


@pytest.mark.asyncio
async def test_a_hung_server_costs_the_time_limit_and_then_nothing() -> None:
    with RedisServer() as server:
        async with opened(server.url, timeout_s=0.02) as store:
            await store.put(key(1), b"value", LATER)
            server.pause()
            try:
                begun = time.monotonic()
                for call in (store.get([key(1)]), store.take(key(2), 9), store.news(Epoch())):
                    assert await kind_of(call) == "timeout"
                while time.monotonic() - begun < 1.5:
                    await kind_of(store.get([key(1)]))
                begun = time.monotonic()
                assert (
                    await kind_of(store.get([key(1)])) == "connect"
                )  # its connection was given up
                assert time.monotonic() - begun < 0.05
            finally:
                server.resume()
            await until_it_works(store)
            assert await store.get([key(1)]) == [b"value"]


@pytest.mark.asyncio
async def test_a_put_to_a_hung_server_ends_within_a_second() -> None:
    with RedisServer() as server:
        async with opened(server.url, timeout_s=0.02) as store:
            server.pause()
            try:
                puts = (store.put(key(i), bytes(1_000_000), LATER) for i in range(100))
                begun = time.monotonic()
                ends = await asyncio.gather(*puts, return_exceptions=True)
                assert time.monotonic() - begun < 1.5
                assert {end.kind for end in ends if isinstance(end, StoreError)} == {"timeout"}
                assert sum(isinstance(end, StoreError) for end in ends) == 100
            finally:
                server.resume()


@pytest.mark.asyncio
async def test_late_replies_never_answer_another_key(server: RedisServer) -> None:
    async with opened(server.url) as direct:
        for i in range(200):
            await direct.put(key(i), key(i), LATER)
    async with SlowWay(server.port) as way, opened(way.url, timeout_s=0.02) as store:
        late = right = 0
        for turn in range(30):
            way.delay_s = 0.2 if turn % 3 == 0 else 0.0 if turn % 3 == 1 else 0.015
            calls = [asyncio.create_task(store.get([key((turn * 7 + i) % 200)])) for i in range(20)]
            await asyncio.sleep(0.001)
            calls[3].cancel()  # a client that went away
            for i, got in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
                if isinstance(got, BaseException):
                    late += 1
                else:
                    assert got == [key((turn * 7 + i) % 200)]
                    right += 1
        assert late > 100
        way.delay_s = 0.0
        await asyncio.sleep(0.25)
        for i in range(200):
            assert await store.get([key(i)]) == [key(i)]
        assert way.connections == 2  # a slow server costs no new connections


@pytest.mark.asyncio
async def test_a_slow_server_costs_each_call_its_limit_only(server: RedisServer) -> None:
    async with SlowWay(server.port) as way, opened(way.url, timeout_s=0.005) as store:
        way.delay_s = 0.2
        begun = time.monotonic()
        for _ in range(20):
            assert await kind_of(store.get([key(1)])) == "timeout"
        assert time.monotonic() - begun < 1.0  # not 20 times the delay
        await store.put(key(1), b"value", LATER)  # nobody waits for it, so it has a second
        assert server.ask("GET", b"{preheat}:v:" + key(1)) == b"value"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_busy_loop_does_not_make_a_reply_late(
    server: RedisServer, run: Callable[[Any], None]
) -> None:
    async def main() -> None:
        async with opened(server.url, timeout_s=0.005) as store:
            await store.put(key(1), b"value", LATER)
            loop = asyncio.get_running_loop()
            for busy_s in (0.006, 0.02, 0.05):
                for turns in range(6):
                    call = asyncio.create_task(store.get([key(1)]))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    loop.call_soon(time.sleep, busy_s)
                    assert await call == [b"value"]

    run(main())


@pytest.mark.asyncio
async def test_a_full_server_that_never_evicts_says_so() -> None:
    told = Told()
    with RedisServer("--maxmemory", "2mb", "--maxmemory-policy", "noeviction") as server:
        async with opened(server.url, told=told) as store:
            await store.put(key(0), b"early", LATER)
            kinds = set()
            for i in range(1, 30):
                try:
                    await store.put(key(i), bytes(200_000), LATER)
                except StoreError as error:
                    kinds.add(error.kind)
            assert kinds == {"full"}
            assert await store.get([key(0)]) == [b"early"]
            await eventually(lambda: told.of("redis-policy"))
    (refused,) = told.of("redis-refused")
    assert refused["found"] == "OOM"
    assert "volatile-ttl" in str(refused["remedy"])
    assert [finding["found"] for finding in told.of("redis-policy")] == ["noeviction"]


@pytest.mark.asyncio
async def test_a_full_server_with_a_right_policy_keeps_the_board_and_takes_values() -> None:
    with RedisServer("--maxmemory", "3mb", "--maxmemory-policy", "volatile-ttl") as server:
        async with opened(server.url) as store:
            await store.publish(Invalidation(model="m"))
            for i in range(100):
                await store.put(key(i), bytes(100_000), LATER + i)
            assert (await store.news(Epoch())).epoch.number == 1
            assert (await store.get([key(99)]))[0] is not None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--maxmemory", "0"), ["maxmemory 0"]),
        (("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru"), ["allkeys-lru"]),
        (("--maxmemory", "50mb", "--maxmemory-policy", "noeviction"), ["noeviction"]),
        (("--maxmemory", "50mb", "--maxmemory-policy", "volatile-lru"), []),
        (("--user", "default", "on", "nopass", "~*", "+@all", "-info"), ["unknown"]),
    ],
)
async def test_what_is_wrong_with_the_servers_policy_is_told_with_a_remedy(
    options: tuple[str, ...], found: list[str]
) -> None:
    told = Told()
    with RedisServer(*options) as server:
        async with opened(server.url, told=told) as store:
            checking = store._checking
            assert checking is not None
            await checking
    assert [finding["found"] for finding in told.of("redis-policy")] == found
    assert all(finding["remedy"] for finding in told.of("redis-policy"))


@pytest.mark.parametrize(
    ("version", "is_told"), [("5.0.14", True), ("", True), ("6.2.0", False), ("7.2.4", False)]
)
def test_a_version_that_is_too_old_is_told(version: str, is_told: bool) -> None:
    info = {"redis_version": version, "maxmemory": "1", "maxmemory_policy": "volatile-ttl"}
    assert [event for event, _, _ in _findings(info)] == ["redis-version"] * is_told


@pytest.mark.asyncio
@pytest.mark.parametrize("password", ["", "hunter2-wrong"])
async def test_a_wrong_password_is_told_once_and_never_shown(password: str) -> None:
    told = Told()
    with RedisServer("--requirepass", "right-secret") as server:
        async with opened(server.url, password=password, told=told) as store:
            for _ in range(20):
                assert await kind_of(store.get([key(1)])) == "auth"
                await asyncio.sleep(0.02)
        async with opened(server.url, password="right-secret") as store:
            await store.put(key(1), b"value", LATER)
    (refused,) = told.of("redis-refused")
    assert refused["found"] == ("WRONGPASS" if password else "NOAUTH")
    assert "hunter2" not in str(told)


@pytest.mark.asyncio
async def test_a_database_that_is_not_there_is_told(server: RedisServer) -> None:
    told = Told()
    async with opened(server.url[:-1] + "99", told=told) as store:
        assert await kind_of(store.get([key(1)])) == "refused"
    assert [refused["found"] for refused in told.of("redis-refused")] == ["ERR"]


@pytest.mark.asyncio
async def test_a_replica_is_told_once_and_left_when_it_is_promoted(server: RedisServer) -> None:
    told = Told()
    replica_of = ("--replicaof", "127.0.0.1", str(server.port))
    with RedisServer(*replica_of) as replica:
        async with opened(replica.url, told=told) as store:
            for _ in range(30):
                with pytest.raises(StoreError):
                    await store.put(key(1), b"value", LATER)
                await asyncio.sleep(0.005)
            (refused,) = told.of("redis-refused")
            assert refused["found"] == "READONLY"
            replica.ask("REPLICAOF", "NO", "ONE")
            await until_it_works(store)
            await store.put(key(1), b"value", LATER)


@pytest.mark.asyncio
async def test_an_intruder_on_the_board_is_refused_with_a_remedy(server: RedisServer) -> None:
    told = Told()
    server.ask("SET", "{preheat}:board", "intruder")
    async with opened(server.url, told=told) as store:
        assert await kind_of(store.news(Epoch())) == "refused"
        assert await kind_of(store.publish(Invalidation(model="m"))) == "refused"
    assert told.of("redis-refused")[0]["found"] == "WRONGTYPE"


@pytest.mark.asyncio
async def test_errors_quote_neither_keys_nor_values(server: RedisServer) -> None:
    secret = b"secret-prompt-text"
    told = Told()
    server.ask("ACL", "SETUSER", "little", "on", "nopass", "~*", "+ping", "+info")
    url = server.url.replace("//", "//little@")
    async with opened(url, told=told, password="any") as store:
        with pytest.raises(StoreError) as caught:
            await store.put(Key(secret[:16]), secret, LATER)
        assert caught.value.kind == "auth"
        assert "secret" not in str(caught.value) + str(told)
    server.ask("ACL", "DELUSER", "little")


@pytest.mark.asyncio
async def test_it_needs_no_more_rights_than_the_remedy_says(server: RedisServer) -> None:
    told = Told()
    server.ask("ACL", "SETUSER", "little", "on", "nopass", "+ping")
    url = server.url.replace("//", "//little@")
    async with opened(url, told=told, password="any") as store:
        assert await kind_of(store.get([key(1)])) == "auth"
        remedy = str(told.of("redis-refused")[0]["remedy"])
        server.ask("ACL", "SETUSER", "little", *remedy.partition(": ")[2].split())
        await store.put(key(1), b"value", LATER)
        assert await store.get([key(1)]) == [b"value"]
        await store.put(key(1), b"value", 0.0)
        await store.size()
        assert await store.take(key(1), 9)
        await store.renew([key(1)], 9)
        await store.release([key(1)])
        start = (await store.news(Epoch())).epoch
        await store.publish(Invalidation(model="m"))
        assert len((await store.news(start)).invalidations) == 1
    server.ask("ACL", "DELUSER", "little")


@pytest.mark.asyncio
async def test_calls_beyond_the_bound_are_refused_at_once() -> None:
    with RedisServer() as server:
        async with opened(server.url, timeout_s=1.0) as store:
            server.pause()
            try:
                calls = [asyncio.create_task(store.get([key(i)])) for i in range(5000)]
                puts = [
                    asyncio.create_task(store.put(key(i), bytes(8_000_000), LATER))
                    for i in range(12)
                ]
                begun = time.monotonic()
                await asyncio.wait([*calls, *puts], return_when=asyncio.FIRST_EXCEPTION)
                assert time.monotonic() - begun < 0.9
                assert 900 <= sum(call.done() for call in calls) <= 904
                assert sum(put.done() for put in puts) == 4
                ends = await asyncio.gather(*calls, *puts, return_exceptions=True)
                assert {getattr(end, "kind", "") for end in ends} == {"timeout"}
            finally:
                server.resume()


@pytest.mark.asyncio
async def test_in_a_cluster_it_goes_to_the_node_that_has_its_keys() -> None:
    cluster = ("--cluster-enabled", "yes")
    with RedisServer(*cluster) as empty, RedisServer(*cluster) as holder:
        holder.ask("CLUSTER ADDSLOTS", *range(16384))
        empty.ask("CLUSTER MEET", "127.0.0.1", holder.port)
        await eventually(lambda: empty.ask("CLUSTER INFO")["cluster_state"] == "ok", within_s=20)
        async with opened(empty.url) as store:
            for call in (store.put(key(1), b"value", LATER), store.get([key(1)])):
                assert await kind_of(call) == "refused"
            await until_it_works(store)
            await store.put(key(1), b"value", LATER)
            assert await store.get([key(1)]) == [b"value"]
            assert await store.take(key(1), 9)
            assert (await store.publish(Invalidation(model="m"))).number == 1
        assert holder.ask("DBSIZE") == 3
