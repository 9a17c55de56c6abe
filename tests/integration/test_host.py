"""The supervisor and its workers: real processes, killed, stopped, replaced and reloaded."""

import asyncio
import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from harness import Fake, Gateway, Reply, chat, running
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


def maps_removed(pid: int) -> bool:
    """Whether the process still reads a file that isn't there any more."""
    return "data.mdb (deleted)" in Path(f"/proc/{pid}/maps").read_text()


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


def answered_by_another(gateway: Gateway, path: str, body: Any) -> Reply:
    """The reply of a worker that isn't stuck: the kernel gives a connection to any of them."""
    for _ in range(30):
        with contextlib.suppress(TimeoutError):
            return gateway.request("POST", path, body, timeout_s=2.5)
    raise AssertionError("nobody answers")


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


@contextlib.contextmanager
def group(*options: str) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    """A gateway whose processes are a group of their own, its port, and the lines of its log."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        process = subprocess.Popen(
            [sys.executable, "-m", "preheat", "serve", "--listen", "127.0.0.1:0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "XDG_CACHE_HOME": home, "XDG_STATE_HOME": home},
        )
        lines: list[str] = []
        assert process.stdout is not None
        assert process.stderr is not None
        reading = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
        reading.start()
        with process:
            try:
                match = re.search(r":(\d+) ", process.stdout.readline())
                assert match is not None, lines
                yield process, int(match[1]), lines
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(5)
                reading.join(5)


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


@pytest.mark.asyncio
async def test_many_questions_at_once_hold_up_no_invalidation(two: Gateway) -> None:
    for number in range(40):
        assert two.post("/v1/chat/completions", chat(f"{number}")).status == 200

    async def ask(line: bytes, body: bytes = b"") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", two.port)
        head = b"Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(b"%b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (line, head, len(body)))
        writer.write(body)
        reply = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert reply.startswith(b"HTTP/1.1 200 "), reply
        return reply

    asking = [asyncio.create_task(ask(b"GET /preheat/v1/ledger")) for _ in range(700)]
    await asyncio.sleep(0.02)
    began_at = time.monotonic()
    told = await ask(b"POST /preheat/v1/invalidate", b'{"model": "m1"}')
    assert time.monotonic() - began_at < 0.9
    assert b'"matched":40,' in told
    assert b'"workers_unheard":0,' in told
    for ledger in await asyncio.gather(*asking):
        assert b'"requests":40,' in ledger


def test_what_the_board_made_workers_forget_first_is_counted_too(two: Gateway) -> None:
    for number in range(40):
        assert two.post("/v1/chat/completions", chat(f"{number}")).status == 200
    timer = threading.Timer(0.8, two.process.send_signal, (signal.SIGCONT,))
    two.process.send_signal(signal.SIGSTOP)  # the supervisor: the board is faster
    timer.start()
    assert two.post("/preheat/v1/invalidate", {"model": "m1"}).json["matched"] == 40
    assert two.post("/preheat/v1/invalidate", {"model": "m1"}).json["matched"] == 0
    timer.join()


def test_an_invalidation_says_whom_it_did_not_reach(two: Gateway) -> None:
    body = {"model": "m1"}
    stuck, _ = sorted(pids(two))
    os.kill(stuck, signal.SIGSTOP)
    try:
        reply = answered_by_another(two, "/preheat/v1/invalidate", body)
        assert reply.json["workers_unheard"] == 1
        wait_for(lambda: log_has(two, "invalidate", '"workers_unheard":1'))
    finally:
        os.kill(stuck, signal.SIGCONT)
    assert two.post("/preheat/v1/invalidate", body).json["workers_unheard"] == 0


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
        wait_for(lambda: stuck not in pids(gateway) and are_ready(gateway))
        wait_for(lambda: log_has(gateway, "worker-killed", "it is stuck"))
        assert_no_bug(gateway)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("found", [b"", b"x" * 32], ids=["removed", "made-by-another"])
def test_workers_have_one_secret_whatever_becomes_of_its_file(
    found: bytes, fake: Fake, tmp_path: Path
) -> None:
    fake.reset()
    fake.script(default="echo")
    cache = tmp_path / "cache"
    text = TWO + f'[l2]\npath = "{cache}"\n' + UP.format(url=fake.url)
    gateway = Gateway(text, folder=tmp_path)

    def is_shared(text: str) -> bool:
        before = fake.calls
        for _ in range(8):
            assert gateway.post("/v1/chat/completions", chat(text)).status == 200
        return fake.calls - before == 1

    with running(gateway):
        secret = (cache / "secret").read_bytes()
        shutil.rmtree(cache)
        wait_for(lambda: not any(maps_removed(pid) for pid in pids(gateway)))
        if found:
            (cache / "secret").touch(0o600)
            (cache / "secret").write_bytes(found)
        victim = min(pids(gateway))
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: victim not in pids(gateway) and are_ready(gateway))
        assert (cache / "secret").read_bytes() == (found or secret)
        wait_for(lambda: log_has(gateway, "secret-not-kept") == bool(found))
        texts = (f"{number}" for number in range(100))
        wait_for(lambda: is_shared(next(texts)))  # the survivor has seen that L2 is another
        fake.script({"content": "slow", "delay_s": 0.4}, default="echo")
        calls = fake.calls
        clients = [Raw(gateway.port) for _ in range(40)]
        for client in clients:
            client.send(post(chat("all of them")))
        assert {client.answer().status for client in clients} == {200}
        for client in clients:
            client.close()
        assert fake.calls - calls == 1
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_that_all_processes_are_told_of_is_a_drain_all_the_same(
    number: signal.Signals, fake: Fake
) -> None:
    """A terminal and a service manager send it to the whole group."""
    fake.reset()
    fake.script({"content": "whole", "delay_s": 0.6})
    with group("--workers", "2", "--upstream", fake.url) as (process, port, lines):
        with Raw(port) as client:
            client.send(post(chat("whole")))
            wait_for(lambda: fake.calls == 1)
            os.killpg(process.pid, number)
            assert client.answer().status == 200
        assert process.wait(10) == 0
    assert "Traceback" not in "".join(lines)


def test_an_end_that_all_processes_are_told_of_leaves_the_engine_its_requests(
    tmp_path: Path,
) -> None:
    pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with group("--model", str(tmp_path / "tiny.gguf")) as (process, port, lines):
        with Raw(port, within_s=20) as client:
            client.send(post(chat("long", max_tokens=2_000, stream=True)))
            client.until(b"data: ")
            os.killpg(process.pid, signal.SIGTERM)
            assert client.rest().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert process.wait(10) == 0
    assert any('"engine-ended"' in line and '"by":"eof"' in line for line in lines), lines


def test_a_hang_up_that_all_processes_are_told_of_is_one_reload(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
    pytest.importorskip("pyarrow", reason="the request log's extra isn't installed")
    write_tiny_gguf(tmp_path / "tiny.gguf")
    path = tmp_path / "preheat.toml"
    path.write_text(f'{TWO}[log]\nenabled = true\npath = "{tmp_path / "log"}"\n')
    options = ("--config", str(path), "--model", str(tmp_path / "tiny.gguf"))
    with group(*options) as (process, port, lines):
        wait_for(lambda: any('"request-log-started"' in line for line in lines))
        os.killpg(process.pid, signal.SIGHUP)
        wait_for(lambda: any('"reloaded"' in line for line in lines))
        os.killpg(process.pid, signal.SIGUSR2)
        wait_for(lambda: any('"restarted"' in line for line in lines), 30)
        with Raw(port) as client:
            assert client.ask(post(chat("still", max_tokens=1))).status == 200
        process.terminate()
        assert process.wait(10) == 0
    assert not [line for line in lines if re.search(r"-died|-killed|-failed|refused", line)]


# A start that is cut short -------------------------------------------------------------------

SIGNALLED = """
import os, signal, sys
from preheat.cli import main, serve

def read(options, real=serve._read):
    for number in {numbers}:
        os.kill(os.getpid(), number)
    return real(options)

serve._read = read
sys.exit(main())
"""


def test_a_change_that_is_asked_for_during_the_start_does_no_harm(fake: Fake) -> None:
    launcher = ("-c", SIGNALLED.format(numbers=[int(signal.SIGHUP), int(signal.SIGUSR2)]))
    gateway = Gateway("", upstream=fake.url, launcher=launcher)
    with running(gateway):
        assert gateway.get("/healthz").status == 200
        assert gateway.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_before_the_start_is_a_good_end(number: signal.Signals, fake: Fake) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", SIGNALLED.format(numbers=[int(number)]), "serve"),
            *("--listen", "127.0.0.1:0", "--upstream", fake.url),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0
    assert '"event":"stopped-while-starting"' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_that_all_processes_are_told_of_during_the_start_is_a_good_end(
    number: signal.Signals, fake: Fake
) -> None:
    program = (
        "import sys; from preheat.host import worker_process; "
        "worker_process.PROGRAM = ('-c', 'import time; print(1, flush=True); time.sleep(60)'); "
        "from preheat.cli import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", program, "serve", "--workers", "2"),
            *("--listen", "127.0.0.1:0", "--upstream", fake.url),
        ],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("1")
        os.killpg(process.pid, number)
        assert process.wait(10) == 0
        said = process.stderr.read()
    assert '"event":"stopped-while-starting"' in said
    assert "Traceback" not in said


# Changes -------------------------------------------------------------------------------------


def settings_of(gateway: Gateway, tmp_path: Path, text: str, signal_number: int) -> None:
    (tmp_path / "preheat.toml").write_text(text)
    gateway.process.send_signal(signal_number)


NOWHERE = UP.format(url="http://127.0.0.1:1")
FALLBACK = '[engines]\nfallback_message = "try later"\n'


def asked(gateway: Gateway, count: int = 12) -> set[str]:
    """Which servers answer requests on connections of their own, at all workers."""
    replies = [gateway.post("/v1/embeddings", {"input": "x"}) for _ in range(count)]
    assert {reply.status for reply in replies} == {200}
    return {reply.headers["x-preheat-worker"] for reply in replies}


def drained(gateway: Gateway) -> dict[str, bool]:
    found = gateway.get("/preheat/v1/workers").json["upstreams"]
    return {one["name"]: one["draining"] for one in found}


def test_a_drain_holds_in_all_workers_and_their_successors(tmp_path: Path) -> None:
    one, two, three = Fake(), Fake(), Fake()
    with running(one, two, three):
        in_turn = 'routing.name = "round_robin"\n'
        text = TWO + f'[engines.gpu]\nurls = ["{one.url}", "{two.url}"]\n{in_turn}'
        gateway = Gateway(text, folder=tmp_path)
        with running(gateway):
            assert asked(gateway) == {"gpu.0", "gpu.1"}
            body = {"upstream": "gpu.1", "drain": True}
            assert gateway.post("/preheat/v1/workers", body).status == 200
            assert drained(gateway) == {"gpu.0": False, "gpu.1": True}
            assert asked(gateway) == {"gpu.0"}
            for pid in pids(gateway):
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: are_ready(gateway) and workers(gateway)[0]["generation"] == 2)
            assert asked(gateway) == {"gpu.0"}
            # It is the server that is drained, whatever its name; new engine objects know it too.
            urls = f'["{two.url}", "{three.url}"]'
            text = TWO + f"[engines.gpu]\nurls = {urls}\nconnect_s = 4\n{in_turn}"
            settings_of(gateway, tmp_path, text, signal.SIGHUP)
            wait_for(lambda: log_has(gateway, "reloaded"))
            assert asked(gateway) == {"gpu.1"}
            os.kill(pids(gateway).pop(), signal.SIGKILL)
            wait_for(lambda: are_ready(gateway))
            assert asked(gateway) == {"gpu.1"}
            body = {"upstream": "gpu.0", "drain": False}
            assert gateway.post("/preheat/v1/workers", body).status == 200
            assert asked(gateway) == {"gpu.0", "gpu.1"}
            body = {"upstream": "gpu.2", "drain": True}
            assert gateway.post("/preheat/v1/workers", body).status == 404
            assert_no_bug(gateway)


def test_upstreams_are_counted_over_all_workers_and_beyond_their_end(tmp_path: Path) -> None:
    gateway = Gateway(TWO + NOWHERE, folder=tmp_path)
    with running(gateway):

        def failures() -> int:
            (one,) = gateway.get("/preheat/v1/workers").json["upstreams"]
            assert one["name"] == "up"
            return int(one["failures"])

        for number in range(4):
            gateway.post("/v1/chat/completions", chat(f"{number}"))
        assert failures() == 4
        for pid in pids(gateway):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: are_ready(gateway) and workers(gateway)[1]["generation"] == 2)
        assert failures() == 4


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


SECOND_TIME_STUCK = """
import os, pathlib, sys, time
from preheat.host import worker
started = pathlib.Path({folder!r})
(started / str(os.getpid())).touch()
if len(list(started.iterdir())) == 3:
    time.sleep(60)
sys.exit(worker.main())
"""


def test_a_successor_that_never_starts_holds_up_changes_for_a_short_time(
    fake: Fake, tmp_path: Path
) -> None:
    fake.reset()
    (tmp_path / "started").mkdir()
    program = SECOND_TIME_STUCK.format(folder=str(tmp_path / "started"))
    launcher = (
        "-c",
        "import sys; from preheat.host import pool, worker_process; pool.SUCCESSOR_S = 0.5; "
        f"worker_process.PROGRAM = ('-c', {program!r}); "
        "from preheat.cli import main; sys.exit(main())",
    )
    gateway = Gateway(TWO + UP.format(url=fake.url), folder=tmp_path, launcher=launcher)
    with running(gateway):
        known = pids(gateway)
        gateway.process.send_signal(signal.SIGUSR2)
        wait_for(lambda: log_has(gateway, "restart-refused", "wasn't ready within"), 20)
        assert pids(gateway) == known
        gateway.process.send_signal(signal.SIGHUP)
        wait_for(lambda: log_has(gateway, "reloaded"))
        gateway.process.send_signal(signal.SIGUSR2)
        wait_for(lambda: log_has(gateway, "restarted"), 20)
        assert not pids(gateway) & known


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
