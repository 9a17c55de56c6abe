"""The supervisor's smaller parts: sockets, pauses, changes of settings, the keeper's thread, children."""

import asyncio
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from preheat.config import NAMED, Settings, check, fields_of
from preheat.errors import ConfigError
from preheat.host import child, restarts, sockets
from preheat.host.changes import applied_by, check_reload, check_restart
from preheat.host.child import Child
from preheat.host.keeping import Keeping
from preheat.host.restarts import Restarts
from preheat.host.rounds import Rounds
from preheat.host.secret import Secret
from preheat.telemetry.logs import Log

# sockets


def bound(port: int, slots: int, host: str = "127.0.0.1") -> list[sockets.Set]:
    return sockets.bind(host, port, slots, key="listen.address", shown=f"{host}:{port}")


@pytest.mark.parametrize("slots", [1, 3])
def test_all_slots_listen_on_the_port_that_was_taken(slots: int) -> None:
    sets = bound(0, slots)
    port = sockets.port_of(sets)
    assert len(sets) == slots
    assert {one[0].getsockname()[1] for one in sets} == {port}
    with socket.create_connection(("127.0.0.1", port), timeout=2):
        pass
    sockets.close(sets)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_port_has_one_gateway(first: int, second: int) -> None:
    sets = bound(0, first)
    port = sockets.port_of(sets)
    expected = (
        f"can't listen on 127.0.0.1:{port}: Address already in use, by another program, or by a "
        ".* killed, .*; choose another one with --listen HOST:PORT$"
    )
    with pytest.raises(ConfigError, match=expected):
        bound(port, second)
    sockets.close(sets)
    sockets.close(bound(port, second))  # free again at once


def test_a_name_with_two_addresses_has_one_port() -> None:
    sets = bound(0, 2, "localhost")
    assert {one.getsockname()[1] for pair in sets for one in pair} == {sockets.port_of(sets)}
    sockets.close(sets)


def test_an_address_of_nobody_s_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"listen\.address: can't listen on 192\.0\.2\.1:0"):
        bound(0, 1, "192.0.2.1")


# rounds


@pytest.mark.asyncio
async def test_who_asks_together_shares_a_round_that_begins_after_the_question() -> None:
    begun = 0

    async def work() -> int:
        nonlocal begun
        begun += 1
        found = begun
        await asyncio.sleep(0.02)
        return found

    rounds = Rounds(work)
    first = [asyncio.create_task(rounds.result()) for _ in range(5)]
    await asyncio.sleep(0.005)
    later = [asyncio.create_task(rounds.result()) for _ in range(500)]
    later[0].cancel()  # one that gives up takes nothing from the others
    async with asyncio.timeout(2):
        assert set(await asyncio.gather(*first)) == {1}
        assert set(await asyncio.gather(*later[1:])) == {2}
        assert await rounds.result() == 3


@pytest.mark.asyncio
async def test_a_round_that_fails_is_followed_by_another() -> None:
    answers: list[Any] = [ConfigError("no"), 7]

    async def work() -> Any:
        await asyncio.sleep(0)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    rounds = Rounds(work)
    failing = asyncio.create_task(rounds.result())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    following = asyncio.create_task(rounds.result())
    with pytest.raises(ConfigError, match="no"):
        await failing
    assert await following == 7


# secret


def test_a_secret_outlives_its_file(tmp_path: Path) -> None:
    stream = io.BytesIO()
    log = Log(stream)
    settings = check({**BASE, "l2": {"path": str(tmp_path / "cache")}})
    file = tmp_path / "cache" / "secret"
    secret = Secret(log)
    known = secret.told(settings)
    assert known == file.read_bytes()
    shutil.rmtree(tmp_path / "cache")
    assert secret.told(settings) == known
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (known, 0o600)
    file.write_bytes(b"x" * 32)  # another gateway's
    assert secret.told(settings) == known
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("in the way")
    assert secret.told(settings) == known
    log.close()
    assert stream.getvalue().count(b'"event":"secret-not-kept"') == 2
    assert repr(known)[2:-1].encode() not in stream.getvalue()


def test_a_secret_of_the_environment_is_found_by_who_has_it(tmp_path: Path) -> None:
    settings = check(
        {**BASE, "l2": {"path": str(tmp_path / "cache")}, "exact": {"secret_env": "S"}}
    )
    assert Secret(Log(io.BytesIO())).told(settings) == b""
    assert not (tmp_path / "cache").exists()


# restarts


def test_the_first_death_costs_no_pause_and_a_series_ever_more() -> None:
    working, failing = Restarts(), Restarts()
    pauses = [working.pause_s(0.5, worked=True) for _ in range(8)]
    assert pauses[0] == 0
    assert pauses == sorted(pauses)
    assert pauses[-1] == restarts.LONGEST_PAUSE_OF_WORKING_S
    pauses = [failing.pause_s(0.5, worked=False) for _ in range(10)]
    assert pauses[0] == restarts.FIRST_PAUSE_S
    assert pauses[-1] == restarts.LONGEST_PAUSE_S


def test_a_child_that_never_comes_up_is_tried_ever_more_seldom() -> None:
    failing = Restarts(child.LONGEST_PAUSE_S)
    pauses = [failing.pause_s(0.5, worked=False) for _ in range(12)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30.0


def test_a_long_life_is_a_new_beginning() -> None:
    series = Restarts()
    for _ in range(5):
        series.pause_s(0.5, worked=True)
    assert series.pause_s(restarts.STEADY_S, worked=True) == 0
    assert series.pause_s(0.5, worked=True) == 0


# changes

BASE = {"engines": {"up": {"url": "http://a:1"}}}


def changed(**sections: Any) -> Settings:
    return check({**BASE, **sections})


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"engines": {"up": {"url": "http://b:1"}, "other": {"url": "http://c:1"}}},
        {"engines": {"up": {"url": "http://a:1"}, "fallback_message": "later"}},
        {"models": {"m": {"input": 2.0, "version": "2"}}},
        {"namespaces": {"n": {"ttl_s": 5.0}}},
        {"exact": {"ttl_s": 5.0, "stale_s": 1.0}},
    ],
)
def test_these_change_in_place(sections: dict[str, Any]) -> None:
    check_reload(check(BASE), changed(**sections))


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"listen": {"idle_s": 5, "head_s": 1}}, "listen.idle_s, listen.head_s"),
        ({"l1": {"bytes": 5}}, "l1.bytes"),
        ({"tenants": {"a": {"api_key_env": "A"}}}, "tenants"),
        ({"telemetry": {"log_requests": "all"}}, "telemetry.log_requests"),
        ({"exact": {"secret_env": "S", "ttl_s": 1}}, "exact.secret_env"),
    ],
)
def test_these_need_new_workers(sections: dict[str, Any], keys: str) -> None:
    check_restart(check(BASE), changed(**sections))
    with pytest.raises(ConfigError, match=f"^{keys}: .*SIGUSR2"):
        check_reload(check(BASE), changed(**sections))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"listen": {"address": "127.0.0.1:1"}}, "listen.address"),
        ({"listen": {"workers": 2}}, "listen.workers"),
        ({"admin": {"listen": "127.0.0.1:0"}}, "admin.listen"),
        ({"l2": {"kind": "off"}}, "l2"),
        ({"log": {"enabled": True}}, "log"),
        ({"engines": {"up": {"url": "http://a:1"}, "e": {"kind": "embedded"}}}, "engines.e"),
    ],
)
def test_these_need_a_new_start(sections: dict[str, Any], key: str) -> None:
    for refuses in (check_reload, check_restart):
        with pytest.raises(ConfigError, match=f"^{key}: only a new start"):
            refuses(check(BASE), changed(**sections))


def settings_of(section: str) -> list[str]:
    default = getattr(Settings(), section)
    return [name for name, _, _ in fields_of(NAMED.get(section) or type(default))]


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (section, field)
        for section, _, _ in fields_of(Settings)
        if section != "fallback_message"
        for field in settings_of(section)
    ],
)
def test_what_applies_a_setting_is_what_the_documents_say(section: str, field: str) -> None:
    by = applied_by(section, field)
    kind = "embedded" if section == "engines" and by == "start" else "openai"
    before: Any = NAMED[section]() if section in NAMED else getattr(Settings(), section)
    before = replace(before, kind=kind) if section == "engines" else before
    after = replace(before, **{field: object() if field != "kind" else "openai"})
    old, new = (
        replace(check(BASE), **{section: {"a": one} if section in NAMED else one})
        for one in (before, after)
    )
    refused = []
    for name, refuses in (("SIGHUP", check_reload), ("SIGUSR2", check_restart)):
        try:
            refuses(old, new)
        except ConfigError:
            refused.append(name)
    assert by == {0: "SIGHUP", 1: "SIGUSR2", 2: "start"}[len(refused)]
    assert refused in ([], ["SIGHUP"], ["SIGHUP", "SIGUSR2"])


def test_the_engine_of_no_configuration_is_one_too() -> None:
    check_reload(check({}), check({"exact": {"ttl_s": 1}}))
    with pytest.raises(ConfigError, match="only a new start"):
        check_reload(check({}), check(BASE))


# keeping


class Told:
    def __init__(self, *, failing: bool = False, blocks_s: float = 0.0) -> None:
        self.said: list[Any] = []
        self.ticked = threading.Event()
        self._failing = failing
        self._blocks_s = blocks_s

    def start(self) -> None:
        self.said.append("start")

    def tick(self) -> None:
        self.said.append("tick")
        self.ticked.set()
        time.sleep(self._blocks_s)
        if self._failing:
            raise OSError("disk")

    def after_death(self, by_signal: int = 0) -> None:
        self.said.append(by_signal)

    def close(self) -> None:
        self.said.append("close")


def test_the_keeper_is_told_of_every_death_soon_and_closed_last() -> None:
    keeper = Told()
    keeping = Keeping(keeper, Log(io.BytesIO()), tick_s=30)
    keeping.start()
    keeping.after_death(9)
    keeping.after_death(0)
    assert keeper.ticked.wait(5)
    keeping.close()
    assert keeper.said[0] == "start"
    assert [one for one in keeper.said if isinstance(one, int)] == [9, 0]
    assert keeper.said[-1] == "close"


def test_a_keeper_that_fails_is_called_again() -> None:
    stream = io.BytesIO()
    log = Log(stream)
    keeper = Told(failing=True)
    keeping = Keeping(keeper, log, tick_s=0.01)
    keeping.start()
    give_up_at = time.monotonic() + 5
    while keeper.said.count("tick") < 3:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    keeping.close()
    log.close()
    assert b'"event":"bug","type":"OSError","where":"keeper"' in stream.getvalue()


def test_a_keeper_that_hangs_holds_up_nobody() -> None:
    keeper = Told(blocks_s=3)
    keeping = Keeping(keeper, Log(io.BytesIO()), tick_s=0.01)
    keeping.start()
    assert keeper.ticked.wait(5)
    began_at = time.monotonic()
    keeping.after_death(9)
    keeping.close(within_s=0.1)
    assert time.monotonic() - began_at < 1


# children

PROGRAM = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
order = sys.stdin.readline()
number = len(list(folder.iterdir()))
(folder / "being-written").write_text(order)
(folder / "being-written").rename(folder / f"started-{number}")
sys.stdin.read()
(folder / "ended").write_text("")
"""


@pytest.mark.asyncio
async def test_a_child_gets_its_order_comes_back_and_ends_with_its_input(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    child = Child("log", command, Log(io.BytesIO()), order=b"do it\n")

    async def wait_for(name: str) -> None:
        async with asyncio.timeout(10):
            while not (tmp_path / name).exists():
                await asyncio.sleep(0.02)

    await child.start()
    await wait_for("started-0")
    first = child.pid
    assert first is not None

    os.kill(first, signal.SIGKILL)
    await wait_for("started-1")
    assert child.pid not in {None, first}
    assert (tmp_path / "started-1").read_text() == "do it\n"
    await child.aclose()
    assert (tmp_path / "ended").exists()
    assert child.pid is None


@pytest.mark.asyncio
async def test_a_child_that_will_not_end_is_ended() -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    child = Child("log", [sys.executable, "-c", program], Log(io.BytesIO()), end_s=0.1)
    await child.start()
    await asyncio.sleep(0.2)
    async with asyncio.timeout(8):
        await child.aclose()


@pytest.mark.asyncio
async def test_a_child_that_cannot_be_is_a_mistake_in_the_settings() -> None:
    with pytest.raises(ConfigError, match="no process could be made for the log"):
        await Child("log", ["/nowhere/program"], Log(io.BytesIO())).start()


# weight


def test_the_supervisor_is_light() -> None:
    heavy = ["starlette", "prometheus_client", "uvloop", "pyarrow", "preheat.wiring", "lmdb"]
    heavy += ["preheat.gateway.app", "preheat.host.worker"]
    script = f"import sys, preheat.host.supervisor; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "[]\n"
