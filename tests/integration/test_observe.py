"""`preheat observe` beside servers that are asked by others, and whose log it reads."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engines_faked import Engine, Reply, as_events, served
from harness import Fake
from kv_engine import Publisher
from ports import free_port
from preheat.cli import main
from preheat.cli.screen import Screen

pytestmark = pytest.mark.timeout(60)

SECRET = "xyzzy"
TRUNKS = [f"You are {name} and keep {SECRET}. " * 150 for name in ("Ada", "Bob", "Cyd")]
NOWHERE = "http://127.0.0.1:9"


class Vllm(Engine):
    """Also what a warm-up asks: token ids, computed."""

    def _vllm(self, method: str, path: str, body: dict[str, Any]) -> Reply:
        if path != "/v1/completions":
            return super()._vllm(method, path, body)
        tokens = list(body["prompt"])
        cached = self._compute(tokens, str(body.get("cache_salt") or ""))
        usage: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        if cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return 200, {"choices": [{"text": "a", "finish_reason": "length"}], "usage": usage}


class Stack:
    """Servers, somebody who asks them, and the log of that."""

    def __init__(self, log: Path, stack: ExitStack, engines: int = 2) -> None:
        self.log = log
        self.engines = [Vllm() for _ in range(engines)]
        self.urls = [stack.enter_context(served(one)) for one in self.engines]
        self.asked = 0

    def ask(self, at: int, trunk: int, *, ago_s: float = 0.0, **fields: Any) -> None:
        """One request of a session of its own. A new token takes 100 µs."""
        self.asked += 1
        messages = [
            {"role": "system", "content": TRUNKS[trunk]},
            {
                "role": "user",
                "content": f"question {self.asked} about {SECRET} " * (self.asked % 9),
            },
        ]
        body = {"model": "tiny", "messages": messages}
        status, answer = self.engines[at].answer("POST", "/v1/chat/completions", body)
        assert status == 200
        usage = answer["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        ttft_s = 1e-4 * (usage["prompt_tokens"] - cached)
        row = {
            "timestamp": time.time() - ago_s,
            "session": f"s{self.asked}",
            "api_base": f"{self.urls[at]}/v1",
            "request": body,
            "response": answer,
            "ttft_ms": 1e3 * ttft_s,
            "duration_s": ttft_s + 0.01,
            **fields,
        }
        self.write(json.dumps(row))

    def write(self, line: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def history(self, requests: int = 60) -> None:
        """In the last minutes, each trunk at a server of its own."""
        for number in range(requests):
            self.ask(number % 3 % len(self.engines), number % 3, ago_s=10.0 * (requests - number))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with ExitStack() as servers:
        yield Stack(tmp_path / "access.jsonl", servers)


def once(capsys: pytest.CaptureFixture[str], stack: Stack, *options: str) -> dict[str, Any]:
    assert main(["observe", str(stack.log), *stack.urls, "--once", "--json", *options]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


# What it sees


def test_a_log_that_is_read_once(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    stack.history()
    told = once(capsys, stack)
    assert told["schema"] == "preheat.observe/1"
    assert (told["lines"], told["bad"], told["unplaced"], told["is_over"]) == (60, 0, 0, True)
    assert [one["requests"] for one in told["servers"]] == [40, 20]
    for one, engine in zip(told["servers"], stack.engines, strict=True):
        assert (one["dialect"], one["down_why"], one["trust"]) == ("vllm", "", "confirmed")
        assert one["capacity_tokens"] == 4_096 * 16
        assert one["cached_tokens"] == engine.cached_tokens
        # vLLM says nothing of zero tokens: before its first hit nobody knows whether it tells any.
        assert 0 < engine.prompt_tokens - one["input_tokens"] < 3_000
        assert one["agreed"] >= one["told"] - 1
    assert told["repeats"]["repeated_tokens"] > 0.7 * told["repeats"]["input_tokens"]
    assert told["routing"]["agreed"] + told["routing"]["differed"] == 60
    ghosts = sum(one["ghost_tokens"] for one in told["servers"])
    assert 0 < ghosts < sum(one["cached_tokens"] for one in told["servers"])
    assert told["speeds"] == ["tiny"]
    assert len(told["prefixes"]) == 3
    for one in told["prefixes"]:
        (missing,) = one["missing"]
        assert missing["pays"] == (missing["gains_s"] > missing["spends_s"])
        # 100 µs a token is what it learned.
        assert missing["costs_s"] == pytest.approx(1e-4 * missing["missing_tokens"], rel=0.1)
        assert sorted(one["held"].values()) == [0.0, 1.0]


def test_no_text_is_ever_told(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.history()
    stack.write(f'{{"messages": [{{"role": "user", "content": "{SECRET}')
    stack.write(json.dumps({"timestamp": SECRET, "messages": [{"role": SECRET}]}))
    page = tmp_path / "seen.html"
    arguments = ["observe", str(stack.log), *stack.urls, "--once", "--html", str(page)]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert "60 requests" in shown.out
    assert "Hot prefixes" in shown.out
    assert f"skipped {stack.log}:61: " in shown.err
    assert f"skipped {stack.log}:62: " in shown.err
    assert main([*arguments, "--json"]) == 0
    again = capsys.readouterr()
    written = page.read_text(encoding="utf-8")
    assert "Hot prefixes" in written
    assert SECRET not in shown.out + shown.err + again.out + again.err + written


def test_a_log_that_says_not_who_answered_tells_of_repeats_and_what_to_do(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.history()
    asked = [engine.computed for engine in stack.engines]
    told = once(capsys, stack, "--worker-field", "nothing", "--warm")
    assert told["unplaced"] == 60
    # Nobody knows what is missing where, so nothing is warmed.
    assert all(set(one["held"].values()) == {None} for one in told["prefixes"])
    assert [engine.computed for engine in stack.engines] == asked
    assert told["repeats"]["repeated_tokens"] > 0
    assert any("--worker-field" in one for one in told["cautions"])


def test_servers_have_the_names_that_the_log_has_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as servers:
        stack = Stack(tmp_path / "log", servers)
        for number in range(4):
            stack.ask(number % 2, 0, api_base="", worker=f"pod-{number % 2}")
        stack.urls = [f"pod-{at}={url}" for at, url in enumerate(stack.urls)]
        told = once(capsys, stack)
    assert [one["name"] for one in told["servers"]] == ["pod-0", "pod-1"]
    assert [one["requests"] for one in told["servers"]] == [2, 2]


def test_a_server_that_is_dead_is_told_and_the_rest_goes_on(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.history()
    stack.urls.append(NOWHERE)
    told = once(capsys, stack, "--warm")
    assert [bool(one["down_why"]) for one in told["servers"]] == [False, False, True]
    assert [one["requests"] for one in told["servers"]] == [40, 20, 0]
    assert all(one["server"] != "127.0.0.1:9" for one in told["warming"]["booked"])


# Bad lines and wrong usage


def test_a_bad_line_is_fatal_only_on_request(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.history(3)
    stack.write("garbage")
    stack.ask(0, 0, timestamp=time.time() + 1e6)
    stack.ask(0, 0, duration_s=1e6)
    told = once(capsys, stack)
    assert [(one["line"], one["why"][:14]) for one in told["bad_lines"]] == [
        (4, "JSON is malfor"),
        (5, "a time that ha"),
        (6, "a duration of "),
    ]
    arguments = ["observe", str(stack.log), *stack.urls, "--once", "--on-bad", "fail"]
    assert main(arguments) == 1
    assert f"preheat: {stack.log}:4: " in capsys.readouterr().err


def test_a_log_without_any_request_is_an_error(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.write("garbage")
    assert main(["observe", str(stack.log), *stack.urls, "--once"]) == 1
    assert "no request in it; line 1: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.jsonl", NOWHERE], "can't read none.jsonl"),
        (["-", "gpu:8000"], "URL"),
        (["-", NOWHERE, NOWHERE], "named twice"),
        (["-", NOWHERE, "--api-key-env", "NOT_SET"], "NOT_SET is empty or not set"),
        (["-", NOWHERE, "--api-key-env", "HOME", "--api-key-env", "PATH"], "or one for each"),
        (["-", NOWHERE, "--kv-replay", "tcp://*:1"], "--kv-replay needs --kv-events"),
        (["-", NOWHERE, "--kv-events", "1", "--kv-events", "2"], "one endpoint for all"),
        (["-", NOWHERE, "--html", "none/page.html"], "its folder doesn't exist"),
    ],
)
def test_what_cannot_be_is_said_first(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["observe", *arguments]) == 1
    assert said in capsys.readouterr().err


# While it goes on


class Watcher:
    """The command in a process of its own, a sight every 0.2 s."""

    def __init__(self, log: str, urls: list[str], *options: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "preheat", "observe", log, *urls, "--json"),
                *("--every", "0.2", "--settle", "0", "--poll", "0.2", *options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def sight(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        document: dict[str, Any] = json.loads(self.process.stdout.readline())
        return document

    def until(
        self, holds: Callable[[dict[str, Any]], bool], within_s: float = 20.0
    ) -> dict[str, Any]:
        """The first sight of which it holds."""
        ends_at = time.monotonic() + within_s
        while not holds(told := self.sight()):
            assert time.monotonic() < ends_at, told
        return told

    def stop(self) -> tuple[int, dict[str, Any], str]:
        """Exit code, the last sight, and what was said beside them."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, json.loads(out.splitlines()[-1]), err


@pytest.fixture
def watch() -> Iterator[Callable[..., Watcher]]:
    begun: list[Watcher] = []

    def begin(log: str, urls: list[str], *options: str) -> Watcher:
        begun.append(Watcher(log, urls, *options))
        return begun[-1]

    yield begin
    for one in begun:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def test_a_log_that_grows_is_rotated_and_has_garbage_until_ctrl_c(
    stack: Stack, watch: Callable[..., Watcher]
) -> None:
    stack.history(6)
    watcher = watch(str(stack.log), stack.urls)
    assert watcher.until(lambda told: told["lines"] == 6)["repeats"]["requests"] == 6
    for number in range(6):
        stack.ask(number % 2, 0)
    stack.write("garbage")
    watcher.until(lambda told: told["repeats"]["requests"] == 12 and told["bad"] == 1)
    stack.log.rename(f"{stack.log}.1")
    stack.ask(0, 0)
    watcher.until(lambda told: told["repeats"]["requests"] == 13)
    stack.log.write_text("")  # cut in its place
    watcher.until(lambda told: told["at"] is not None)
    stack.ask(1, 0)
    told = watcher.until(lambda told: told["repeats"]["requests"] == 14)
    own = told["servers"][0]
    assert own["engine_input_tokens"] > 0  # counted since it is watched
    code, told, said = watcher.stop()
    assert code == 130
    assert said.count("skipped ") == 1
    assert f"{stack.log}:13: " in said
    assert (told["repeats"]["requests"], told["bad"], told["is_over"]) == (14, 1, False)


def test_standard_input_is_read_to_its_end(stack: Stack, watch: Callable[..., Watcher]) -> None:
    stack.history(30)
    watcher = watch("-", stack.urls)
    out, err = watcher.process.communicate(stack.log.read_text(encoding="utf-8"), timeout=20)
    told = json.loads(out.splitlines()[-1])
    assert watcher.process.returncode == 0, err
    assert (told["log"], told["is_over"], told["repeats"]["requests"]) == (
        "standard input",
        True,
        30,
    )


def test_ctrl_c_ends_it_while_standard_input_says_nothing(
    stack: Stack, watch: Callable[..., Watcher]
) -> None:
    watcher = watch("-", stack.urls)
    watcher.sight()
    code, told, said = watcher.stop()
    assert (code, told["lines"]) == (130, 0)
    assert "Traceback" not in said
    assert "Fatal" not in said


def test_a_server_that_was_restarted_has_lost_everything(
    stack: Stack, watch: Callable[..., Watcher]
) -> None:
    stack.history(30)
    watcher = watch(str(stack.log), stack.urls)
    before = watcher.until(lambda told: told["servers"][0]["held_tokens"] > 0)
    assert before["servers"][0]["restarts"] == 0
    engine = stack.engines[0]
    engine.blocks.clear()
    engine.prompt_tokens = 1
    stack.ask(1, 2)  # the log goes on
    told = watcher.until(
        lambda told: told["servers"][0]["restarts"] == 1 and not told["servers"][0]["held_tokens"]
    )
    assert told["servers"][1]["held_tokens"] > 0


def test_a_server_that_dies_has_lost_everything_too(
    stack: Stack, watch: Callable[..., Watcher]
) -> None:
    mortal = Fake()
    try:
        for number in range(5):
            stack.ask(0, 0, ago_s=50.0 - number, api_base=mortal.url)
        watcher = watch(str(stack.log), [mortal.url, *stack.urls])
        told = watcher.until(lambda told: told["servers"][0]["held_tokens"] > 0)
        assert not told["servers"][0]["down_why"]
    finally:
        mortal.stop()
    told = watcher.until(
        lambda told: told["servers"][0]["down_why"] and not told["servers"][0]["held_tokens"]
    )
    assert told["repeats"]["requests"] == 5


# KV events


def test_what_events_tell_counts_from_when_it_came(
    tmp_path: Path, watch: Callable[..., Watcher]
) -> None:
    pytest.importorskip("zmq", reason="the extra kv isn't installed")
    port = free_port()
    with ExitStack() as servers:
        stack = Stack(tmp_path / "log", servers, engines=1)
        stack.log.touch()
        publisher = Publisher(f"tcp://127.0.0.1:{port}")
        servers.callback(publisher.close)
        stack.engines[0].publish = lambda batch: publisher.publish(as_events(batch))
        watcher = watch(str(stack.log), stack.urls, "--kv-events", f"tcp://*:{port}")
        for trunk in (0, 1, 2):  # the first events say how large blocks are
            while not watcher.sight()["servers"][0]["events"]["received"]:
                stack.ask(0, trunk)
            stack.ask(0, trunk)
            watcher.until(lambda told: told["repeats"]["requests"] == stack.asked)
        for number in range(12):
            stack.ask(0, number % 3)
            told = watcher.until(lambda told: told["repeats"]["requests"] == stack.asked)
        one = told["servers"][0]
        assert one["trust"] in {"told", "confirmed", "estimated"}
        assert one["events"]["lost"] == 0
        # A prompt's own blocks, told before its line was written, weren't there before it.
        assert one["agreed"] >= one["told"] - 3
        assert one["thought_tokens"] == pytest.approx(one["cached_tokens"], rel=0.15)
        assert [list(prefix["held"].values()) for prefix in told["prefixes"]] == [[1.0]] * 3
        stack.engines[0].blocks.clear()
        assert watcher.stop()[0] == 130


# Warming


def warmed(told: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (one["server"], one["outcome"]["state"], (one["outcome"].get("proof") or {}).get("verdict"))
        for one in told["warming"]["booked"]
    ]


def test_what_is_hot_and_missing_is_warmed_and_proven(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.history()
    asked = [engine.computed for engine in stack.engines]
    told = once(capsys, stack, "--warm")
    names = [one["name"] for one in told["servers"]]
    # Trunks 0 and 2 were at the first server, 1 at the second.
    assert sorted(warmed(told)) == sorted(
        [(names[0], "done", "proven"), *[(names[1], "done", "proven")] * 2]
    )
    assert all(
        engine.computed > before for engine, before in zip(stack.engines, asked, strict=True)
    )
    assert all(not one["missing"] for one in told["prefixes"])
    totals = told["warming"]["totals"]
    assert totals["computed_tokens"] > 3 * 800
    assert told["warming"]["left_tokens"] <= 100_000 - totals["computed_tokens"]
    engine = stack.engines[1]
    cached = engine.cached_tokens
    stack.ask(1, 0)
    assert engine.cached_tokens - cached > 800


def test_nothing_is_warmed_unless_it_is_asked_for_or_beyond_the_budget(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.history()
    asked = [engine.computed for engine in stack.engines]
    assert once(capsys, stack)["warming"] is None
    for options in (["--tokens-per-hour", "500"], ["--idle-price", "1"]):
        assert warmed(once(capsys, stack, "--warm", *options)) == []
    assert [engine.computed for engine in stack.engines] == asked


def test_a_server_that_does_not_tell_its_load_is_not_warmed(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.history()
    for engine in stack.engines:
        engine.has_metrics = False
    asked = [engine.computed for engine in stack.engines]
    told = once(capsys, stack, "--warm")
    assert {state for _, state, _ in warmed(told)} == {"failed"}
    assert all("how busy" in one["outcome"]["why"] for one in told["warming"]["booked"])
    assert [engine.computed for engine in stack.engines] == asked


def test_a_refuted_warm_up_halves_the_budget_and_counts_as_missing(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.history()
    stack.engines[1].forgets_after = 1  # whatever is computed there is gone at once
    told = once(capsys, stack, "--warm")
    refuted = [one for one in warmed(told) if one[2] == "refuted"]
    assert len(refuted) == 2
    assert told["warming"]["budget_factor"] < 1.0
    second = told["servers"][1]["name"]
    assert sum(one["server"] == second for p in told["prefixes"] for one in p["missing"]) == 2


def test_the_first_use_of_what_was_warmed_is_booked(
    stack: Stack, watch: Callable[..., Watcher]
) -> None:
    stack.history()
    watcher = watch(str(stack.log), stack.urls, "--warm")
    told = watcher.until(lambda told: told["warming"]["totals"]["proven"] == 3)
    assert told["warming"]["totals"]["saved_s"] == 0.0
    stack.ask(1, 0)
    told = watcher.until(lambda told: told["warming"]["totals"]["used"] == 1)
    (used,) = [one for one in told["warming"]["booked"] if one["saved_s"] is not None]
    tokens = used["outcome"]["computed_tokens"]
    assert used["saved_s"] == pytest.approx(1e-4 * tokens, rel=0.2)
    stack.engines[1].blocks.clear()
    stack.ask(1, 2)  # it was gone by then
    told = watcher.until(
        lambda told: sum(one["saved_s"] is not None for one in told["warming"]["booked"]) == 2
    )
    assert told["warming"]["totals"]["used"] == 1
    assert watcher.stop()[0] == 130


# A real engine


class Real(Stack):
    """Two llama.cpp servers with a tiny model."""

    def __init__(self, log: Path, stack: ExitStack, weights: str) -> None:
        from preheat.engines.child import ChildSettings, EngineChild

        super().__init__(log, stack, engines=0)
        self.keys: list[str] = []
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        for _ in range(2):
            settings = ChildSettings(model=weights, slots=2, ctx_tokens=2 * 8_192)
            child = EngineChild(settings, on_event=lambda _name, _fields: None)
            stack.callback(lambda child: loop.run_until_complete(child.aclose()), child)
            loop.run_until_complete(child.start())
            assert child.url is not None
            self.urls.append(child.url)
            self.keys.append(child.api_key)

    def chat(self, at: int, trunk: int, user: str) -> int:
        """How many tokens were cached."""
        messages = [
            {"role": "system", "content": TRUNKS[trunk]},
            {"role": "user", "content": user},
        ]
        body = {"model": "tiny", "messages": messages, "max_tokens": 1}
        request = urllib.request.Request(
            f"{self.urls[at]}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.keys[at]}", "Content-Type": "application/json"},
        )
        began_at = time.time()
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.loads(reply.read())
        row = {"timestamp": began_at, "session": user, "worker": f"w{at}", "request": body}
        self.write(json.dumps(row | {"response": answer, "duration_s": time.time() - began_at}))
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


def test_a_prefix_that_one_real_server_lacks_is_warmed_there(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
    pytest.importorskip("gguf", reason="the tiny model is written with gguf")
    from tiny_model import write_tiny_gguf

    weights = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(weights)
    with ExitStack() as servers:
        stack = Real(tmp_path / "log", servers, str(weights))
        keys = []
        for at, key in enumerate(stack.keys):
            monkeypatch.setenv(f"KEY_{at}", key)
            keys += ["--api-key-env", f"KEY_{at}"]
        for number in range(12):
            stack.chat(0, 0, f"question {number}")
        urls = [f"w{at}={url}" for at, url in enumerate(stack.urls)]
        options = ["--once", "--json", "--warm", *keys, "--slack", "0.1"]
        assert main(["observe", str(stack.log), *urls, *options]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [one["dialect"] for one in told["servers"]] == ["llamacpp"] * 2
        assert told["servers"][0]["cached_tokens"] > 11 * 1_000
        assert told["servers"][0]["agreed"] >= 11
        assert warmed(told) == [("w1", "done", "proven")]
        assert stack.chat(1, 0, "another question") > 1_000


# The screen


def test_a_screen_is_shown_in_its_own_place_and_within_its_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((10, 4)))
    screen = Screen()
    screen.show("one\n" + "x" * 50 + "\nthree\nfour\nfive")
    screen.show("two")
    screen.clear()
    assert capsys.readouterr().out == f"one\n{'x' * 9}\nthree\n\x1b[3A\x1b[Jtwo\n\x1b[1A\x1b[J"
