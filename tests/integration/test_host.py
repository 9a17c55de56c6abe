"""The supervisor and its workers: real processes, killed, stopped, replaced and reloaded."""

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from harness import Fake, Gateway, chat, running
from rawclient import Raw, post
from tiny_model import write_tiny_gguf

TWO = "[listen]\nworkers = 2\ndrain_s = 5\n"
UP = '[engines.up]\nurl = "{url}"\n'


def impatient(module: str, **constants: float) -> tuple[str, ...]:
    """A launcher of `preheat` in which these constants of a module of the host are others."""
    changes = "; ".join(f"changed.{name} = {value!r}" for name, value in constants.items())
    return (
        "-c",
        f"import sys; from preheat.host import {module} as changed; {changes}; "
        "from preheat.cli import main; sys.exit(main())",
    )


def wait_for(condition: Callable[[], Any], within_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def workers(gateway: Gateway) -> list[Any]:
    found = gateway.get("/preheat/v1/workers").json["workers"]
    assert isinstance(found, list), found
    return found


def pids(gateway: Gateway) -> set[int]:
    return {one["pid"] for one in workers(gateway)}


def are_ready(gateway: Gateway, count: int = 2) -> bool:
    return [one["state"] for one in workers(gateway)] == ["ready"] * count


def log_has(gateway: Gateway, event: str, text: str = "") -> bool:
    return any(
        f'"event":"{event}"' in line and text in line for line in gateway.stderr.splitlines()
    )


def assert_no_bug(gateway: Gateway) -> None:
    assert '"event":"bug"' not in gateway.stderr, gateway.stderr
    assert "Traceback" not in gateway.stderr, gateway.stderr


class Load:
    """Clients that ask without a pause, for new things and old; `failures` tells what went wrong."""

    def __init__(self, gateway: Gateway, *, clients: int = 4, keep_alive: bool) -> None:
        self._port = gateway.port
        self._keep_alive = keep_alive
        self._stop = threading.Event()
        self.answered = 0
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True)
            for number in range(clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        wait_for(lambda: self.answered > 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def more(self, count: int, within_s: float = 15.0) -> None:
        """Return after so many more answers."""
        enough = self.answered + count
        wait_for(lambda: self.answered >= enough, within_s)

    def _ask(self, number: int) -> None:
        connection: Raw | None = None
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                if connection is None:
                    connection = Raw(self._port, within_s=20)
                reply = connection.ask(post(chat(f"{number} {count // 2}")))
                if reply.status != 200:
                    self.failures.append(f"status {reply.status}: {reply.body[:200]!r}")
                self.answered += 1
                is_over = not self._keep_alive or reply.headers.get("connection") == "close"
            except (OSError, EOFError) as error:
                self.failures.append(repr(error))
                is_over = True
            if is_over and connection is not None:
                connection.close()
                connection = None
            time.sleep(0.002)
        if connection is not None:
            connection.close()


@pytest.fixture
def two(fake: Fake, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway of two workers before an engine that repeats what it is told."""
    fake.reset()
    fake.script(default="echo")
    gateway = Gateway(TWO + UP.format(url=fake.url), folder=tmp_path)
    with running(gateway):
        yield gateway


# Together ------------------------------------------------------------------------------------


def test_workers_are_told_apart(two: Gateway) -> None:
    found = workers(two)
    assert [(one["slot"], one["generation"], one["state"]) for one in found] == [
        (0, 1, "ready"),
        (1, 1, "ready"),
    ]
    assert two.process.pid not in pids(two)
    assert all(one["rss_bytes"] > 1_000_000 for one in found)
    assert all(0 < one["uptime_s"] < 60 for one in found)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they share one socket")
def test_two_workers_share_the_connections(two: Gateway) -> None:
    def open_sockets() -> list[int]:
        return [
            sum(
                str(file.readlink()).startswith("socket:")
                for file in Path(f"/proc/{pid}/fd").iterdir()
            )
            for pid in sorted(pids(two))
        ]

    before = open_sockets()
    clients = [Raw(two.port) for _ in range(60)]
    wait_for(lambda: sum(open_sockets()) >= sum(before) + 60)
    more = [now - was for now, was in zip(open_sockets(), before, strict=True)]
    for client in clients:
        client.close()
    assert min(more) >= 10


def test_any_worker_tells_and_forgets_for_all(two: Gateway) -> None:
    for number in range(40):
        assert two.post("/v1/chat/completions", chat(f"{number}")).status == 200
    assert [two.ledger["requests"] for _ in range(6)] == [40] * 6
    body = {"model": "m1"}
    dry = two.post("/preheat/v1/invalidate", {**body, "dry_run": True}).json
    assert dry["matched"] == 40
    assert two.post("/preheat/v1/invalidate", body).json["matched"] == 40
    again = [two.post("/v1/chat/completions", chat(f"{number}")).cache for number in range(40)]
    assert "hit" not in again


def test_a_second_gateway_on_the_same_port_is_refused(two: Gateway, fake: Fake) -> None:
    for count in ("1", "2"):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "preheat", "serve", "--workers", count),
                *("--listen", f"127.0.0.1:{two.port}", "--upstream", fake.url),
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 1
        assert f"can't listen on 127.0.0.1:{two.port}" in done.stderr
    assert two.get("/healthz").status == 200


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_that_cannot_start_says_why(count: int, tmp_path: Path, fake: Fake) -> None:
    path = tmp_path / "preheat.toml"
    path.write_text(
        f'[listen]\naddress = "127.0.0.1:0"\nworkers = {count}\n'
        '[exact]\nsecret_env = "NOT_THERE"\n' + UP.format(url=fake.url)
    )
    done = subprocess.run(
        [sys.executable, "-m", "preheat", "serve", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "preheat: exact.secret_env: the environment variable NOT_THERE" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_that_falls_over_at_its_start_ends_the_start(fake: Fake) -> None:
    program = (
        "import sys; from preheat.host import worker_process; "
        "worker_process.PROGRAM = ('-c', 'raise SystemExit(3)'); "
        "from preheat.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, "serve"),
            *("--listen", "127.0.0.1:0", "--upstream", fake.url),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "a worker ended before it was ready (exit code 3)" in done.stderr


# Death ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_alive", [True, False])
def test_a_killed_worker_costs_only_what_was_on_it(two: Gateway, keep_alive: bool) -> None:
    with Load(two, keep_alive=keep_alive) as load:
        victim = workers(two)[0]
        os.kill(victim["pid"], signal.SIGKILL)
        load.more(100)
        wait_for(lambda: victim["pid"] not in pids(two) and are_ready(two))
        load.more(50)
    assert len(load.failures) <= 4, load.failures  # at most what each client had under way
    successor = next(one for one in workers(two) if one["slot"] == victim["slot"])
    assert successor["generation"] == 2
    assert log_has(two, "worker-died", '"how":"signal SIGKILL"')
    assert_no_bug(two)


def test_a_lone_worker_s_successor_answers_who_waited(fake: Fake) -> None:
    fake.reset()
    gateway = Gateway(upstream=fake.url)
    with running(gateway):
        os.kill(pids(gateway).pop(), signal.SIGKILL)
        assert gateway.get("/healthz").status == 200  # nothing is refused meanwhile


def test_numbers_do_not_go_backwards_when_a_worker_dies(two: Gateway) -> None:
    for number in range(30):
        two.post("/v1/chat/completions", chat(f"{number}"))
    assert two.ledger["requests"] == 30
    for pid in pids(two):
        os.kill(pid, signal.SIGKILL)
        assert two.ledger["requests"] == 30
    wait_for(lambda: are_ready(two) and all(one["generation"] == 2 for one in workers(two)))
    assert two.ledger["requests"] == 30
    two.post("/v1/chat/completions", chat("one more"))
    assert two.ledger["requests"] == 31


def test_a_stuck_worker_is_replaced(fake: Fake, tmp_path: Path) -> None:
    fake.reset()
    gateway = Gateway(
        TWO + UP.format(url=fake.url),
        folder=tmp_path,
        launcher=impatient("pool", SILENT_TICKS=2, COLLECT_S=0.3),
    )
    with running(gateway):
        stuck = pids(gateway).pop()
        os.kill(stuck, signal.SIGSTOP)
        wait_for(lambda: not is_running(stuck))
        wait_for(lambda: are_ready(gateway))
        assert log_has(gateway, "worker-killed", "it is stuck")
        assert_no_bug(gateway)


def test_the_supervisor_s_death_ends_the_workers_and_frees_the_port(
    two: Gateway, fake: Fake
) -> None:
    fake.script({"content": "a b c d e", "pieces": 5, "chunk_delay_s": 0.2}, default="echo")
    known = pids(two)
    with Raw(two.port) as stream, Raw(two.port) as idle:
        stream.send(post(chat("stream", stream=True)))
        stream.until(b"data: ")
        two.process.kill()
        two.process.wait(5)
        assert stream.rest().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert idle.is_ended()
    wait_for(lambda: not any(is_running(pid) for pid in known), 5)
    next_one = Gateway("", "--listen", f"127.0.0.1:{two.port}", upstream=fake.url)
    with running(next_one):
        assert next_one.get("/healthz").status == 200


def test_an_embedded_engine_is_one_for_all_workers_and_its_successor_too(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
    write_tiny_gguf(tmp_path / "tiny.gguf")
    gateway = Gateway("", "--workers", "2", "--model", str(tmp_path / "tiny.gguf"))

    def engines() -> list[int]:
        return [int(pid) for pid in re.findall(r'"engine-ready".*"pid":(\d+)', gateway.stderr)]

    def ask(text: str) -> int:
        return gateway.post("/v1/chat/completions", chat(text, max_tokens=1)).status

    with running(gateway):
        assert [ask(f"before {number}") for number in range(8)] == [200] * 8
        assert len(engines()) == 1
        os.kill(engines()[0], signal.SIGKILL)
        wait_for(lambda: len(engines()) == 2, 20)
        assert [ask(f"after {number}") for number in range(8)] == [200] * 8
        os.kill(pids(gateway).pop(), signal.SIGKILL)  # a worker: the engine stays
        wait_for(lambda: are_ready(gateway))
        assert [ask(f"later {number}") for number in range(8)] == [200] * 8
        assert len(engines()) == 2
        assert_no_bug(gateway)


# The end -------------------------------------------------------------------------------------


def test_a_drain_lets_the_streams_of_all_workers_end(two: Gateway, fake: Fake) -> None:
    slow = {"content": "a b c d e", "pieces": 5, "chunk_delay_s": 0.2}
    fake.script(*[slow] * 8, default="echo")
    streams = [Raw(two.port) for _ in range(8)]
    for number, stream in enumerate(streams):
        stream.send(post(chat(f"stream {number}", stream=True)))
    for stream in streams:
        stream.until(b"data: ")
    two.process.terminate()
    for stream in streams:
        assert stream.rest().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        stream.close()
    assert two.process.wait(5) == 0
    assert_no_bug(two)


def test_ctrl_c_reaches_all_processes_and_drains_all_the_same(fake: Fake) -> None:
    """A terminal sends it to the whole group."""
    fake.reset()
    fake.script({"content": "whole", "delay_s": 0.6})
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "preheat", "serve", "--workers", "2"),
            *("--listen", "127.0.0.1:0", "--upstream", fake.url),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        match = re.search(rb":(\d+) ", process.stdout.readline())
        assert match is not None
        with Raw(int(match[1])) as client:
            client.send(post(chat("whole")))
            wait_for(lambda: fake.calls == 1)
            os.killpg(process.pid, signal.SIGINT)
            assert client.answer().status == 200
        assert process.wait(10) == 0
        assert b"Traceback" not in process.stderr.read()


# Changes -------------------------------------------------------------------------------------


def settings_of(gateway: Gateway, tmp_path: Path, text: str, signal_number: int) -> None:
    (tmp_path / "preheat.toml").write_text(text)
    gateway.process.send_signal(signal_number)


NOWHERE = UP.format(url="http://127.0.0.1:1")
FALLBACK = '[engines]\nfallback_message = "try later"\n'


def test_a_reload_reaches_all_workers_without_a_new_process(tmp_path: Path) -> None:
    gateway = Gateway(TWO + NOWHERE, folder=tmp_path)
    with running(gateway):
        known = pids(gateway)
        assert gateway.post("/v1/chat/completions", chat()).status == 502
        settings_of(gateway, tmp_path, TWO + FALLBACK + NOWHERE, signal.SIGHUP)
        wait_for(lambda: log_has(gateway, "reloaded"))
        replies = [gateway.post("/v1/chat/completions", chat(f"{n}")) for n in range(10)]
        assert all(b"try later" in reply.body for reply in replies)
        os.kill(known.pop(), signal.SIGKILL)  # its successor has them too
        wait_for(lambda: are_ready(gateway))
        replies = [gateway.post("/v1/chat/completions", chat(f"{n}")) for n in range(10)]
        assert all(b"try later" in reply.body for reply in replies)
        assert_no_bug(gateway)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[listen\n", "isn't valid TOML"),
        (TWO + FALLBACK + "[engines.up]\nurl = 5\n", "engines.up.url"),
        (TWO + "idle_s = 5\n" + FALLBACK + NOWHERE, "listen.idle_s: can't change in place"),
        (TWO.replace("2", "3") + FALLBACK + NOWHERE, "listen.workers: only a new start"),
        (TWO + FALLBACK + NOWHERE + 'api_key_env = "NOT_THERE"\n', "NOT_THERE is empty"),
    ],
    ids=["toml", "type", "not-in-place", "fixed", "refused-by-the-workers"],
)
def test_a_reload_that_cannot_be_changes_nothing(text: str, why: str, tmp_path: Path) -> None:
    gateway = Gateway(TWO + NOWHERE, folder=tmp_path)
    with running(gateway):
        settings_of(gateway, tmp_path, text, signal.SIGHUP)
        wait_for(lambda: log_has(gateway, "reload-refused", why))
        statuses = [gateway.post("/v1/chat/completions", chat(f"{n}")).status for n in range(6)]
        assert 200 not in statuses
        assert_no_bug(gateway)


def test_a_reload_is_refused_by_all_where_one_worker_gives_no_answer(tmp_path: Path) -> None:
    gateway = Gateway(TWO + NOWHERE, folder=tmp_path, launcher=impatient("pool", PREPARE_S=0.5))
    with running(gateway):
        stuck = pids(gateway).pop()
        os.kill(stuck, signal.SIGSTOP)
        settings_of(gateway, tmp_path, TWO + FALLBACK + NOWHERE, signal.SIGHUP)
        wait_for(lambda: log_has(gateway, "reload-refused", "no answer"))
        os.kill(stuck, signal.SIGCONT)
        statuses = [gateway.post("/v1/chat/completions", chat(f"{n}")).status for n in range(10)]
        assert 200 not in statuses


def test_a_rolling_restart_loses_no_request(two: Gateway, fake: Fake, tmp_path: Path) -> None:
    known = pids(two)
    with Load(two, keep_alive=True) as kept, Load(two, keep_alive=False) as fresh:
        text = TWO + "head_lines = 50\n" + UP.format(url=fake.url)
        settings_of(two, tmp_path, text, signal.SIGUSR2)
        wait_for(lambda: log_has(two, "restarted"), 30)
        kept.more(50)
        fresh.more(50)
    assert kept.failures + fresh.failures == []
    assert not known & pids(two)
    assert not any(is_running(pid) for pid in known)
    assert two.get("/preheat/v1/config").json["listen"]["head_lines"] == 50
    assert two.ledger["requests"] == kept.answered + fresh.answered
    assert_no_bug(two)


def test_a_stream_survives_a_rolling_restart(two: Gateway, fake: Fake) -> None:
    fake.script({"content": "a b c d e f", "pieces": 6, "chunk_delay_s": 0.4}, default="echo")
    with Raw(two.port) as stream:
        stream.send(post(chat("stream", stream=True)))
        stream.until(b"data: ")
        two.process.send_signal(signal.SIGUSR2)
        assert stream.rest().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    wait_for(lambda: log_has(two, "restarted"), 20)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TWO + '[exact]\nsecret_env = "NOT_THERE"\n', "NOT_THERE is empty"),
        (TWO + '[admin]\nlisten = "127.0.0.1:0"\n', "admin.listen: only a new start"),
    ],
)
def test_a_rolling_restart_that_cannot_be_leaves_the_workers(
    text: str, why: str, two: Gateway, fake: Fake, tmp_path: Path
) -> None:
    known = pids(two)
    settings_of(two, tmp_path, text + UP.format(url=fake.url), signal.SIGUSR2)
    wait_for(lambda: log_has(two, "restart-refused", why))
    assert pids(two) == known
    assert two.post("/v1/chat/completions", chat()).status == 200
    assert_no_bug(two)


def test_the_admin_routes_of_several_workers_can_have_a_port_of_their_own(
    fake: Fake, tmp_path: Path
) -> None:
    fake.reset()
    text = TWO + '[admin]\nlisten = "127.0.0.1:0"\n' + UP.format(url=fake.url)
    gateway = Gateway(text, folder=tmp_path)
    with running(gateway):
        wait_for(lambda: log_has(gateway, "listening"))
        match = re.search(r'"admin_url":"http://127.0.0.1:(\d+)"', gateway.stderr)
        assert match is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=5)
        connection.request("GET", "/preheat/v1/workers")
        assert connection.getresponse().status == 200
        connection.close()
        assert gateway.get("/preheat/v1/workers").status == 404
