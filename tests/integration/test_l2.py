"""L2 in LMDB, seen from a client: what outlives a process, and what two workers do once."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from crowd import (
    ask,
    at_once,
    clients,
    kinds,
    one_at_each,
    process_of,
    said,
    server_of,
    wait_for,
)
from harness import Fake, Gateway, Reply, chat, running
from rawclient import Raw, post

CHAT = "/v1/chat/completions"
ONLY = {"Cache-Control": "only-if-cached"}
LAST_S = 3.0  # a lease without renewal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc who serves whom")

# A process of its own that takes the lease of a key, and says so.
HOLDER = """
import asyncio, sys
from pathlib import Path
from preheat.stores.lmdb import Lmdb

async def hold(folder, key):
    store = Lmdb(Path(folder), budget_bytes=64 << 20, queue_bytes=1 << 20)
    await store.start()
    assert await store.take(bytes.fromhex(key), 600.0)
    print("held", flush=True)
    await asyncio.sleep(600)

asyncio.run(hold(*sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _clean(fake: Fake) -> None:
    fake.reset()


def settings(fake: Fake, folder: Path, more: str = "", workers: int = 2) -> str:
    return (
        f"[listen]\nworkers = {workers}\ndrain_s = 5\n"
        f'[l2]\npath = "{folder / "l2"}"\nbytes = 67108864\n'
        f'[engines.up]\nurl = "{fake.url}"\n{more}'
    )


@contextlib.contextmanager
def served(
    fake: Fake, folder: Path, more: str = "", workers: int = 2, secret: str = ""
) -> Iterator[Gateway]:
    """A gateway whose L2 is in that folder; at its end it has met no bug of its own."""
    environment = {"KEY_SECRET": secret} if secret else None
    gateway = Gateway(settings(fake, folder, more, workers), folder=folder, environment=environment)
    with running(gateway):
        yield gateway
    assert_no_bug(gateway)


def assert_no_bug(gateway: Gateway) -> None:
    assert '"event":"bug"' not in gateway.stderr, gateway.stderr
    assert "Traceback" not in gateway.stderr, gateway.stderr


def events(gateway: Gateway) -> dict[str, int]:
    found = gateway.stats["l2"]["events"]
    assert isinstance(found, dict)
    return found


def puts(gateway: Gateway, count: int) -> None:
    """Return when so many answers have arrived in L2."""
    wait_for(lambda: events(gateway).get("put", 0) >= count)


def pids(gateway: Gateway) -> list[int]:
    return [
        one["pid"]
        for one in gateway.get("/preheat/v1/workers").json["workers"]
        if one["state"] == "ready"
    ]


def ttl_of(reply: Reply) -> int:
    match = re.search(r"ttl=(-?\d+)", reply.cache_status)
    assert match is not None, reply.cache_status
    return int(match[1])


def key_of(reply: Reply) -> bytes:
    match = re.search(r'key="([0-9a-f]{32})"', reply.cache_status)
    assert match is not None, reply.cache_status
    return bytes.fromhex(match[1])


def flights(gateway: Gateway) -> float:
    match = re.search(
        r"^preheat_flights (\S+)$", gateway.get("/metrics").body.decode(), re.MULTILINE
    )
    assert match is not None
    return float(match[1])


@contextlib.contextmanager
def environment_in(folder: Path, name: str) -> Iterator["lmdb.Environment"]:
    env = lmdb.open(str(folder / "l2" / name), map_size=2**30, create=False, sync=False)
    try:
        yield env
    finally:
        env.close()


def leases(folder: Path) -> int:
    with environment_in(folder, "board") as env, env.begin() as txn:
        return sum(key[:1] == b"l" for key, _ in txn.cursor())


# What outlives a process -----------------------------------------------------------------------


def test_an_answer_survives_a_restart_for_the_rest_of_its_life(fake: Fake, tmp_path: Path) -> None:
    with served(fake, tmp_path) as gateway:
        asked_at = time.monotonic()
        first = gateway.post(CHAT, chat("lasts"), {"X-Preheat-Ttl": "60"})
        stored_at = time.monotonic()
        puts(gateway, 1)
    time.sleep(max(0.0, asked_at + 2.5 - time.monotonic()))
    with served(fake, tmp_path) as gateway:
        before_s = time.monotonic() - stored_at
        again = [gateway.post(CHAT, chat("lasts")) for _ in range(8)]
        after_s = time.monotonic() - asked_at
    assert {reply.cache for reply in again} == {"hit"}
    assert {reply.json["choices"][0]["message"]["content"] for reply in again} == {
        first.json["choices"][0]["message"]["content"]
    }
    for reply in again:
        assert 60 - after_s - 1 <= ttl_of(reply) <= 60 - before_s + 1
        assert before_s - 1 <= int(reply.headers["age"]) <= after_s + 1
    assert fake.calls == 1


def test_an_expired_answer_is_none_after_a_restart_either(fake: Fake, tmp_path: Path) -> None:
    with served(fake, tmp_path) as gateway:
        gateway.post(CHAT, chat("short"), {"X-Preheat-Ttl": "1"})
        puts(gateway, 1)
    time.sleep(1.0)
    with served(fake, tmp_path) as gateway:
        assert gateway.post(CHAT, chat("short")).cache == "miss"


@pytest.mark.parametrize("victim", ["worker", "supervisor", "all"])
def test_an_answer_survives_kill_9(fake: Fake, tmp_path: Path, victim: str) -> None:
    with served(fake, tmp_path) as gateway:
        for number in range(20):
            gateway.post(CHAT, chat(f"{number}"))
        puts(gateway, 20)
        workers = pids(gateway)
        if victim == "worker":
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: len(set(pids(gateway)) - set(workers)) == 2)
            assert_all_there(gateway, fake)
            return
        gateway.process.kill()
        if victim == "all":
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
    with served(fake, tmp_path) as gateway:
        assert_all_there(gateway, fake)


def assert_all_there(gateway: Gateway, fake: Fake) -> None:
    replies = [gateway.post(CHAT, chat(f"{number}")) for number in range(20)]
    assert [reply.cache for reply in replies] == ["hit"] * 20
    assert fake.calls == 20


def test_another_secret_finds_nothing(fake: Fake, tmp_path: Path) -> None:
    more = '[exact]\nsecret_env = "KEY_SECRET"\n'
    for secret, cache in (("a" * 32, "miss"), ("a" * 32, "hit"), ("b" * 32, "miss")):
        with served(fake, tmp_path, more, workers=1, secret=secret) as gateway:
            reply = gateway.post(CHAT, chat("a secret's"))
            assert reply.cache == cache
            if cache == "miss":
                puts(gateway, 1)


# What is void ----------------------------------------------------------------------------------


def test_an_invalidation_holds_in_every_worker_and_after_a_restart(
    fake: Fake, tmp_path: Path
) -> None:
    kept, gone = chat("kept", model="other"), chat("gone")
    with served(fake, tmp_path) as gateway, one_at_each(gateway) as both:
        for client in both:
            for body in (kept, gone):
                assert ask(client, body).status == 200
        puts(gateway, 2)
        only = "Cache-Control: only-if-cached\r\n"
        assert [ask(client, gone, only).status for client in both] == [200, 200]
        assert gateway.post("/preheat/v1/invalidate", {"model": "m1"}).json["matched"] == 1
        assert [ask(client, gone, only).status for client in both] == [504, 504]
        assert [ask(client, kept, only).status for client in both] == [200, 200]
    with served(fake, tmp_path) as gateway:
        assert gateway.post(CHAT, gone, ONLY).status == 504
        assert gateway.post(CHAT, kept, ONLY).cache == "hit"
        assert events(gateway)["void"] >= 1
        assert gateway.post(CHAT, gone).cache == "miss"
        assert gateway.post(CHAT, gone).cache == "hit"
    assert fake.calls == 3


# Once for all ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["whole", "streaming", "mixed"])
def test_a_hundred_equal_requests_at_two_workers_cost_one_call(
    fake: Fake, tmp_path: Path, form: str
) -> None:
    bodies = requests(form, "everybody's question")
    with served(fake, tmp_path) as gateway:
        fake.script(delay_s=0.3)
        with clients(gateway.port, 100) as crowd:
            answers = at_once(crowd, bodies)
        assert fake.calls == 1
        assert said(answers) == {"A1"}
        assert len({process_of(one) for one in answers}) == 2
        assert kinds(answers)["miss"] == 1  # the others joined it, or found what it left
        ledger = gateway.ledger
        assert (ledger["requests"], ledger["residual"]) == (100, 0)
        wait_for(lambda: flights(gateway) == 0)
    assert leases(tmp_path) == 0


def requests(form: str, text: str, count: int = 100) -> list[bytes]:
    streams = {"whole": [False], "streaming": [True], "mixed": [False, True]}[form]
    return [post(chat(text, stream=streams[n % len(streams)])) for n in range(count)]


@pytest.mark.parametrize("why", ["expired", "invalidated"])
def test_an_answer_that_is_of_no_use_any_more_is_replaced_by_one_call(
    fake: Fake, tmp_path: Path, why: str
) -> None:
    """What is still in L2 then must not look like an answer to those who wait for one."""
    more = "[exact]\nstale_s = 60\n"
    with served(fake, tmp_path, more) as gateway, clients(gateway.port, 40) as crowd:
        ttl = "X-Preheat-Ttl: 1\r\n" if why == "expired" else ""
        ask(crowd[0], chat("again"), ttl)
        puts(gateway, 1)
        if why == "expired":
            time.sleep(1.05)
        else:
            gateway.post("/preheat/v1/invalidate", {"model": "m1"})
        fake.script(delay_s=0.3)
        answers = at_once(crowd, requests("mixed", "again", 40))
        assert len({process_of(one) for one in answers}) == 2
        assert fake.calls == 2
        assert said(answers) == {"A2"}


@pytest.mark.parametrize("how", ["stale", "early"])
def test_a_refresh_is_made_once_for_all_workers(fake: Fake, tmp_path: Path, how: str) -> None:
    more = "[exact]\nstale_while_revalidate_s = 60\n"
    if how == "early":
        more = "[exact]\nearly_refresh = 100\n"
    fake.script(delay_s=0.5)
    with served(fake, tmp_path, more) as gateway, clients(gateway.port, 40) as crowd:
        ttl = "X-Preheat-Ttl: 1\r\n" if how == "stale" else "X-Preheat-Ttl: 30\r\n"
        for client in crowd:
            ask(client, chat("fresh?"), ttl)
        wait_for(lambda: flights(gateway) == 0)
        before = fake.calls
        time.sleep(1.1)
        answers = at_once(crowd, [post(chat("fresh?"), headers=ttl)] * 40)
        assert kinds(answers) == {"hit": 40}
        assert len({process_of(one) for one in answers}) == 2
        wait_for(lambda: flights(gateway) == 0)
        assert fake.calls == before + 1
        # Each worker has heard of the new one, or finds it now.
        if how == "stale":
            again = at_once(crowd, [post(chat("fresh?"), headers=ttl)] * 40)
            assert said(again) == {f"A{before + 1}"}


def test_who_wants_it_fresher_than_the_one_being_refreshed_waits_for_the_new_one(
    fake: Fake, tmp_path: Path
) -> None:
    more = "[exact]\nstale_while_revalidate_s = 60\n"
    with served(fake, tmp_path, more) as gateway, one_at_each(gateway) as (here, there):
        body, ttl = chat("newer"), "X-Preheat-Ttl: 1\r\n"
        for client in (here, there):
            ask(client, body, ttl)
        puts(gateway, 1)
        time.sleep(1.1)
        fake.script(delay_s=0.5)
        # One worker refreshes; at the other, whose refresh waits for it, somebody waits too.
        assert [ask(client, body, ttl).cache for client in (here, there)] == ["hit", "hit"]
        answers = at_once([here, there], [post(body, headers="Cache-Control: max-age=1\r\n")] * 2)
        assert said(answers) == {"A2"}
        assert fake.calls == 2


def test_counts_over_both_workers_add_up(fake: Fake, tmp_path: Path) -> None:
    with served(fake, tmp_path) as gateway, one_at_each(gateway) as (here, there):
        for number in range(30):
            body = chat(f"{number}")
            assert ask(here, body).cache == "miss"
            puts(gateway, number + 1)
            assert ask(there, body).cache == "hit"  # from L2
            assert ask(there, body).cache == "hit"  # from L1
            assert ask(here, body).cache == "hit"
        stats, ledger = gateway.stats, gateway.ledger
        assert stats["answers"] == {
            "exact/exact": 60,
            "exact/l2": 30,
            "forward/key-first-seen": 30,
        }
        assert stats["l2"]["events"] == {"miss": 30, "put": 30, "hit": 30}
        assert (ledger["requests"], ledger["residual"]) == (120, 0)
        pages = {b"\n".join(own_lines(client)) for client in (here, there)}
        assert len(pages) == 1
        assert b'preheat_l2_events_total{event="put"} 30.0' in pages.pop()


def own_lines(client: Raw) -> list[bytes]:
    page = client.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").body
    return [
        line for line in page.splitlines() if line.startswith((b"preheat_l2_ev", b"preheat_requ"))
    ]


# Leaders that die, leave or have nothing to share ----------------------------------------------


def test_a_killed_leaders_followers_go_on_at_the_other_worker(fake: Fake, tmp_path: Path) -> None:
    fake.script({"delay_s": 60.0, "content": "never"}, {"content": "soon"})
    with served(fake, tmp_path) as gateway, one_at_each(gateway) as (here, there):
        here.send(post(chat("who dies?")))
        wait_for(lambda: fake.calls == 1)
        there.send(post(chat("who dies?")))
        time.sleep(0.3)
        assert fake.calls == 1  # it waits
        os.kill(server_of(here), signal.SIGKILL)
        killed_at = time.monotonic()
        answer = there.answer()
        assert time.monotonic() - killed_at < 5.0
        assert said([answer]) == {"soon"}
        assert fake.calls == 2
        wait_for(lambda: len(pids(gateway)) == 2)
        assert gateway.post(CHAT, chat("who dies?")).cache == "hit"


def test_a_stopped_leaders_lease_ends_without_it(fake: Fake, tmp_path: Path) -> None:
    fake.script({"delay_s": 60.0, "content": "never"}, {"content": "soon"})
    with served(fake, tmp_path) as gateway, one_at_each(gateway) as (here, there):
        here.send(post(chat("who sleeps?")))
        wait_for(lambda: fake.calls == 1)
        stopped = server_of(here)
        os.kill(stopped, signal.SIGSTOP)
        try:
            stopped_at = time.monotonic()
            assert said([ask(there, chat("who sleeps?"))]) == {"soon"}
            assert time.monotonic() - stopped_at < 5.0
        finally:
            os.kill(stopped, signal.SIGCONT)


@pytest.mark.parametrize("reply", [{"finish_reason": "length", "content": "cut"}, {"status": 500}])
def test_what_cannot_be_stored_is_waited_for_by_nobody(
    fake: Fake, tmp_path: Path, reply: dict[str, Any]
) -> None:
    with served(fake, tmp_path) as gateway, one_at_each(gateway) as (here, there):
        fake.script(reply, delay_s=0.5)
        here.send(post(chat("unstorable")))
        wait_for(lambda: fake.calls == 1)
        began_at = time.monotonic()
        answer = ask(there, chat("unstorable"))
        assert time.monotonic() - began_at < 0.5 + 0.5 + LAST_S / 3
        assert here.answer().status == reply.get("status", 200)
        assert said([answer]) == {"A2"}
        assert fake.calls == 2
        wait_for(lambda: leases(tmp_path) == 0, within_s=LAST_S / 2)


@pytest.mark.parametrize("how", ["no-store", "sampled"])
def test_what_is_not_cached_takes_no_lease(fake: Fake, tmp_path: Path, how: str) -> None:
    body = chat("alone") if how == "no-store" else chat("alone", temperature=1)
    headers = "Cache-Control: no-store\r\n" if how == "no-store" else ""
    with served(fake, tmp_path) as gateway, one_at_each(gateway) as both:
        fake.script(delay_s=0.4)
        for client in both:
            client.send(post(body, headers=headers))
        wait_for(lambda: fake.calls == 2)
        assert leases(tmp_path) == 0
        assert fake.log["most_at_once"] == 2
        assert kinds([client.answer() for client in both]) == {"bypass": 2}
        assert "miss" not in events(gateway)


def test_a_client_that_leaves_its_flight_frees_the_lease(fake: Fake, tmp_path: Path) -> None:
    with served(fake, tmp_path) as gateway, one_at_each(gateway) as (here, there):
        fake.script(delay_s=30.0)
        here.send(post(chat("left")))
        wait_for(lambda: fake.calls == 1)
        assert leases(tmp_path) == 1
        there.send(post(chat("left")))
        time.sleep(0.2)
        fake.script(delay_s=0.0)
        here.close()
        began_at = time.monotonic()
        assert there.answer().status == 200
        assert time.monotonic() - began_at < LAST_S / 2
        wait_for(lambda: flights(gateway) == 0)
        wait_for(lambda: leases(tmp_path) == 0, within_s=LAST_S / 2)


# A lease that somebody else holds --------------------------------------------------------------


@contextlib.contextmanager
def held(folder: Path, key: bytes) -> Iterator[None]:
    """The lease of that key is a stopped process's, for ten minutes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder / "l2"), key.hex()], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"held\n"
        process.send_signal(signal.SIGSTOP)
        yield
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def known_key(gateway: Gateway, body: Any) -> bytes:
    """The key of a request whose answer isn't there any more."""
    ttl = {"X-Preheat-Ttl": "1"}
    gateway.post(CHAT, body, ttl)
    key = key_of(gateway.post(CHAT, body, ttl))
    time.sleep(1.05)
    return key


def test_followers_go_alone_when_their_patience_ends(fake: Fake, tmp_path: Path) -> None:
    """Twice what the model takes, once ten answers have told."""
    with served(fake, tmp_path) as gateway, one_at_each(gateway) as (here, _):
        key = known_key(gateway, chat("whose?"))
        fake.script(delay_s=0.2)
        for number in range(12):
            ask(here, chat(f"learn {number}"))
        with held(tmp_path, key):
            began_at = time.monotonic()
            calls = fake.calls
            here.send(post(chat("whose?")))
            time.sleep(0.2)
            assert fake.calls == calls  # it waits
            assert said([here.answer()]) == {f"A{calls + 1}"}
            assert 0.5 < time.monotonic() - began_at < 2.0


def test_clients_that_leave_while_waiting_leave_nothing_behind(fake: Fake, tmp_path: Path) -> None:
    with served(fake, tmp_path) as gateway:
        key = known_key(gateway, chat("left alone"))
        calls = fake.calls
        with held(tmp_path, key):
            with clients(gateway.port, 30) as crowd:
                for client in crowd:
                    client.send(post(chat("left alone")))
                wait_for(lambda: flights(gateway) == 2)
                time.sleep(0.3)
            wait_for(lambda: flights(gateway) == 0)
            assert fake.calls == calls
            assert leases(tmp_path) == 1
        assert gateway.post(CHAT, chat("left alone")).cache == "miss"
        assert fake.calls == calls + 1
        wait_for(lambda: leases(tmp_path) == 0)


def test_clients_that_come_and_go_leave_no_lease(fake: Fake, tmp_path: Path) -> None:
    with served(fake, tmp_path) as gateway:
        fake.script(delay_s=0.05)
        for wave in range(15):
            with clients(gateway.port, 12) as crowd:
                for number, client in enumerate(crowd):
                    client.send(post(chat(f"{wave} {number % 4}")))
                    if number % 3 == 0:
                        client.reset()
                time.sleep(0.004 * wave)
        wait_for(lambda: flights(gateway) == 0)
        wait_for(lambda: leases(tmp_path) == 0, within_s=LAST_S / 2)
        assert gateway.ledger["residual"] == 0


# Values that aren't answers --------------------------------------------------------------------


@pytest.mark.parametrize("forgery", ["garbage", "damaged", "another's", "unsigned"])
def test_a_torn_or_forged_value_is_a_miss(fake: Fake, tmp_path: Path, forgery: str) -> None:
    with served(fake, tmp_path, workers=1) as gateway:
        gateway.post(CHAT, chat("right"))
        gateway.post(CHAT, chat("wrong"))
        puts(gateway, 2)
        keys = [key_of(gateway.post(CHAT, chat(text))) for text in ("right", "wrong")]
    forge(tmp_path, keys[0], keys[1], forgery)
    with served(fake, tmp_path, workers=1) as gateway:
        fake.script(default="echo")
        reply = gateway.post(CHAT, chat("right"))
        assert reply.cache == "miss"
        assert reply.json["choices"][0]["message"]["content"] == "echo: right"
        assert events(gateway)["torn"] == 1
        assert "hit" not in events(gateway)
        # Whatever had to be set aside for it: the next answer is kept again.
        wait_for(lambda: is_kept(gateway))


def is_kept(gateway: Gateway) -> bool:
    before = events(gateway).get("put", 0)
    gateway.post(CHAT, chat(f"kept again {time.monotonic()}"))
    time.sleep(0.05)
    return events(gateway).get("put", 0) > before


def forge(folder: Path, key: bytes, other: bytes, forgery: str) -> None:
    """Put something else under the key; all but the first two have the store's check sum."""
    from preheat.stores.lmdb_values import Values

    with environment_in(folder, "values") as env, env.begin(write=True) as txn:
        row = txn.get(b"v" + key)
        assert row is not None
        if forgery == "garbage":
            txn.put(b"v" + key, b"\x00garbage" * 20)
            return
        if forgery == "damaged":
            txn.put(b"v" + key, row[:-1] + bytes([row[-1] ^ 1]))
            return
        stolen = txn.get(b"v" + other)
        assert stolen is not None
        value = stolen[24:] if forgery == "another's" else b"\x01" + bytes(16) + row[41:]
        values = Values(txn, budget_bytes=2**26, now=time.time())
        values.put(key, value, time.time() + 600)
        values.close()
