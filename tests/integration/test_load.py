"""`preheat load` against real servers: paced, measured, told."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import Fake, Gateway, running
from preheat.cli import main
from preheat.lab.load.pairs import PairedSummary
from preheat.lab.load.summary import Summary
from upstream import End, Upstream, answer, chunk, stream_head

CHAT = [{"role": "user", "content": "hi"}]
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _fresh(fake: Fake) -> None:
    fake.reset()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def write(trace: Path, *lines: dict[str, Any]) -> None:
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))


def ask(at: float, text: str = "hi", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"at": at, "messages": messages, "model": "m1", "temperature": 0, **fields}


class Loads:
    """Runs the command in this process."""

    def __init__(self, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._trace = trace
        self._capsys = capsys
        self.code = 0
        self.err = ""

    def __call__(self, url: str, *options: str) -> Summary:
        self.code = main(["load", str(self._trace), url, "--json", *options])
        told = self._capsys.readouterr()
        self.err = told.err
        return msgspec.json.decode(told.out, type=Summary)


@pytest.fixture
def load(trace: Path, capsys: pytest.CaptureFixture[str]) -> Loads:
    return Loads(trace, capsys)


# pace


def test_requests_leave_at_their_time_whatever_the_server_does(
    fake: Fake, trace: Path, load: Loads
) -> None:
    fake.script(delay_s=0.5)
    write(trace, *(ask(0.05 * number, str(number)) for number in range(6)))
    summary = load(fake.url)
    assert summary.answered == 6
    assert fake.log["most_at_once"] == 6
    assert 0.75 <= summary.duration_s < 2.0
    assert summary.late_p99_s == summary.late_s.p99
    assert summary.late_p99_s < 0.1
    assert load.code == 0


def test_lines_out_of_order_are_sent_in_order(fake: Fake, trace: Path, load: Loads) -> None:
    write(trace, *(ask(at, str(at)) for at in (0.2, 0.0, 0.1)))
    assert load(fake.url).answered == 3
    told = [json.loads(body)["messages"][0]["content"] for body in fake.bodies]
    assert told == ["0.0", "0.1", "0.2"]


def test_time_can_run_faster(fake: Fake, trace: Path, load: Loads) -> None:
    write(trace, ask(0), ask(2.0))
    summary = load(fake.url, "--speed", "20")
    assert summary.answered == 2
    assert 0.1 <= summary.duration_s < 1.0


def test_a_load_can_be_cut_short_by_number_or_time(fake: Fake, trace: Path, load: Loads) -> None:
    write(trace, *(ask(at) for at in (0, 0.01, 0.02, 60)))
    assert load(fake.url, "--limit", "2").sent == 2
    assert load(fake.url, "--duration", "0.5").sent == 3


def test_what_finds_too_many_open_is_unsent_and_not_delayed(
    fake: Fake, trace: Path, load: Loads
) -> None:
    fake.script(delay_s=0.4)
    write(trace, *(ask(0.02 * number) for number in range(5)))
    summary = load(fake.url, "--concurrency-limit", "2")
    assert (summary.requests, summary.sent, summary.unsent) == (5, 2, 3)
    assert summary.answered == fake.calls == 2
    assert summary.goodput_share == 2 / 5
    assert any("3 requests found too many others open" in one for one in summary.warnings)


def test_a_generator_that_is_late_says_so(trace: Path, load: Loads, fake: Fake) -> None:
    write(trace, *(ask(0.0, str(number)) for number in range(400)))  # all of them at once
    summary = load(fake.url)
    assert summary.answered == 400
    if summary.late_p99_s > 0.010:
        assert any("the generator was late" in one for one in summary.warnings)
    else:
        assert summary.warnings == []


# what is measured


def test_the_first_content_ends_the_time_to_first_token(
    fake: Fake, trace: Path, load: Loads
) -> None:
    # The first chunk has a role only; content comes with the second to fifth.
    fake.script({"content": "abcd" * 5, "pieces": 4, "chunk_delay_s": 0.1})
    write(trace, ask(0, stream=True))
    summary = load(fake.url)
    assert summary.ttft_s.p50 is not None
    assert summary.e2e_s.p50 is not None
    assert summary.tpot_s.p50 is not None
    assert 0.1 <= summary.ttft_s.p50 < 0.3
    assert summary.e2e_s.p50 >= summary.ttft_s.p50 + 0.4
    assert summary.output_tokens == 5
    assert summary.tpot_s.p50 == pytest.approx(
        (summary.e2e_s.p50 - summary.ttft_s.p50) / 4, rel=1e-6
    )


def test_a_whole_answer_has_its_first_content_at_its_end(
    fake: Fake, trace: Path, load: Loads
) -> None:
    fake.script(delay_s=0.1)
    write(trace, ask(0))
    summary = load(fake.url)
    assert summary.ttft_s.p50 is not None
    assert summary.ttft_s.p50 >= 0.1
    assert summary.tpot_s.count == 0
    assert (summary.input_tokens, summary.output_tokens) == (len("<user>hi"), 1)


def test_the_targets_of_the_trace_go_before_those_of_the_command(
    fake: Fake, trace: Path, load: Loads
) -> None:
    fake.script(delay_s=0.2)
    write(trace, ask(0), ask(0, slo_ttft_s=5), ask(0, slo_e2e_s=0.01, slo_ttft_s=5))
    summary = load(fake.url, "--slo-ttft-s", "0.05", "--slo-e2e-s", "5")
    assert summary.answered == 3
    assert summary.good == 1
    assert summary.goodput_share == 1 / 3
    assert summary.goodput_per_s == pytest.approx(1 / summary.duration_s)


def test_it_tells_from_which_layer_answers_came(
    gateway: Gateway, fake: Fake, trace: Path, load: Loads, tmp_path: Path
) -> None:
    fake.script({"content": "slow", "delay_s": 0.3})
    words = str(time.monotonic_ns())
    write(
        trace, ask(0, words), ask(0.1, words, stream=True), ask(0.6, words), ask(0.6, temperature=1)
    )
    out = tmp_path / "out.jsonl"
    summary = load(f"{gateway.url}/v1", "--out", str(out))
    assert summary.layers == {"forward": 2, "join": 1, "exact": 1}
    assert summary.details["key-first-seen"] == summary.details["bypass-sampled"] == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    hit = next(row for row in rows if row["layer"] == "exact")
    assert hit["cache_status"].startswith("preheat; hit; ttl=")
    assert {row["id"] for row in rows} == {"1", "2", "3", "4"}
    assert words not in out.read_text()
    assert "slow" not in out.read_text()


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ({"status": 500, "body": {"error": {}}}, "status-500"),
        ({"status": 429, "body": {"error": {}}}, "status-429"),
        ({"fault": "reset"}, "reset"),
        ({"fault": "garbage"}, "protocol"),
        ({"fault": "hang"}, "timeout"),
        ({"fault": "reset_after"}, "reset"),
        ({"fault": "end_after"}, "no-done"),
        ({"sse": ['{"error": {"message": "x"}}']}, "error-event"),
        ({"sse": ["no json"]}, "not-json"),
    ],
)
def test_what_is_no_whole_answer_is_an_error_of_its_kind(
    reply: dict[str, Any], kind: str, fake: Fake, trace: Path, load: Loads
) -> None:
    fake.script({"content": "words", **reply}, {"content": "fine"})
    write(trace, ask(0, stream=True), ask(0.1, stream=True))
    summary = load(fake.url, "--timeout", "1")
    assert summary.errors == {kind: 1}
    assert summary.answered == summary.good == 1
    assert summary.ttft_s.count == summary.e2e_s.count == 1
    assert load.code == 0


def test_an_error_in_a_whole_body_is_an_error(trace: Path, load: Loads) -> None:
    write(trace, ask(0), ask(0.1))
    with Upstream() as server:
        server.play([answer(b'{"error": {"message": "no"}}')], [answer(b"<html>")])
        assert load(server.url).errors == {"error-body": 1, "not-json": 1}
    assert load.code == 1


def test_hostile_answers_are_outcomes_too(trace: Path, load: Loads) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    choices = b'{"choices":[{"message":{"content":"x"}}],'
    many = b'"usage":{"prompt_tokens":1,"completion_tokens":%b}}' % (b"9" * 400)
    odd = b'data: {"type":[],"choices":[]}\n\ndata: [DONE]\n\n'
    write(trace, *(ask(0.1 * number) for number in range(5)))
    with Upstream() as server:
        server.play(
            [answer(b'{"usage":%b}' % deep)],
            [answer(b'{"choices":%b}' % deep)],
            [answer(b'{"x":%b}' % deep)],
            [answer(choices + many)],
            [stream_head(), chunk(odd), chunk(b"")],
        )
        summary = load(server.url)
    assert summary.errors == {"not-json": 3}
    assert summary.answered == 2
    assert summary.output_tokens == 0


def test_a_server_that_is_not_there_is_an_error_of_each_request(trace: Path, load: Loads) -> None:
    write(trace, ask(0), ask(0))
    summary = load(NOWHERE)
    assert summary.errors == {"connect": 2}
    assert load.code == 1


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        (
            [
                {"type": "message_start", "message": {"usage": {"input_tokens": 7}}},
                {"type": "content_block_delta", "delta": {"text": "a"}},
                {"type": "message_delta", "usage": {"output_tokens": 3}},
                {"type": "message_stop"},
            ],
            (7, 3),
        ),
        (
            [
                {"type": "response.output_text.delta", "delta": "a"},
                {
                    "type": "response.completed",
                    "response": {
                        "usage": {
                            "input_tokens": 9,
                            "output_tokens": 2,
                            "input_tokens_details": {"cached_tokens": 8},
                        }
                    },
                },
            ],
            (9, 2),
        ),
    ],
    ids=["messages", "responses"],
)
def test_streams_of_other_paths_are_understood(
    events: list[Any], tokens: tuple[int, int], trace: Path, load: Loads
) -> None:
    write(trace, {"at": 0, "path": "/v1/x", "body": {"stream": True}})
    stream = [chunk(f"data: {json.dumps(event)}\n\n".encode()) for event in events]
    with Upstream() as server:
        server.play([stream_head(), *stream, chunk(b"")])
        summary = load(server.url)
        assert server.requests[0].startswith(b"POST /v1/x HTTP/1.1\r\n")
    assert summary.errors == {}
    assert (summary.input_tokens, summary.output_tokens) == tokens
    assert summary.tpot_s.count == 1


def test_answers_without_usage_are_warned_of(trace: Path, load: Loads) -> None:
    write(trace, ask(0))
    with Upstream() as server:
        server.play([answer(b'{"choices": []}')])
        summary = load(server.url)
    assert summary.without_usage == 1
    assert any("told no usage" in one for one in summary.warnings)


# what is sent


def test_headers_key_and_model_are_sent(
    fake: Fake, trace: Path, load: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOAD_KEY", "sk-hunter2")
    write(trace, ask(0, headers={"X-Preheat-Tags": "a", "User-Agent": "mine"}), ask(0.1))
    load(fake.url, "--api-key-env", "LOAD_KEY", "--model", "other")
    first, second = fake.log["requests"]
    assert first["headers"]["authorization"] == "Bearer sk-hunter2"
    assert first["headers"]["x-preheat-tags"] == "a"
    assert first["headers"]["user-agent"] == "mine"
    assert second["headers"]["user-agent"] == "preheat-load"
    assert [json.loads(body)["model"] for body in fake.bodies] == ["other", "other"]
    assert "hunter2" not in load.err


def test_nothing_is_sent_where_any_line_is_wrong(
    fake: Fake, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(trace, ask(0), {"at": 1})
    assert main(["load", str(trace), fake.url]) == 1
    assert f"{trace}:2: give a `body`" in capsys.readouterr().err
    assert fake.calls == 0


# commands on the way


def test_a_command_runs_at_its_moment_and_its_exit_code_is_told(
    fake: Fake, trace: Path, load: Loads, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    write(trace, ask(0), ask(0.4))
    summary = load(
        fake.url,
        "--run-at",
        "0.2",
        f"touch {mark}",
        "--run-at",
        "0.2",
        "exit 3",
        "--run-at",
        "9",
        "x",
    )
    assert mark.exists()
    assert sorted(one.exit_code or 0 for one in summary.commands) == [0, 3]
    assert all(0.2 <= one.at_s + one.took_s < 1.5 for one in summary.commands)
    assert any("1 of the commands lay after the end" in one for one in summary.warnings)
    assert load.code == 1


def test_an_engine_can_be_restarted_under_load(trace: Path, load: Loads) -> None:
    with running(first := Fake()):
        write(trace, *(ask(0.05 * number, str(number)) for number in range(20)))
        again = f"{sys.executable} -m preheat.engines.fake --listen 127.0.0.1:{first.port}"
        summary = load(
            first.url,
            "--run-at", "0.2", f"kill {first.process.pid}",
            "--run-at", "0.4", f"timeout 20 {again} > /dev/null & sleep 0.5; kill $!",
        )  # fmt: skip
    assert summary.errors.get("connect", 0) + summary.errors.get("reset", 0) > 0
    assert summary.answered + sum(summary.errors.values()) == 20


# cold starts, paired

LONG = "a system prompt that all of them begin with " * 10


@pytest.fixture
def emptied(fake: Fake, tmp_path: Path) -> str:
    """A command that empties the fake's KV cache and has it take a millisecond a token."""
    file = tmp_path / "emptied.py"
    script = json.dumps({"default": {"content": "fine"}, "flaws": {"token_s": 0.001}})
    file.write_text(
        "import urllib.request as u\n"
        f"for path, data in (('reset', b''), ('script', {script.encode()!r})):\n"
        f"    u.urlopen('{fake.url}/fake/' + path, data, timeout=10).read()\n"
    )
    return f"{sys.executable} {file}"


def test_cold_starts_are_compared_with_a_run_without_them(
    fake: Fake,
    trace: Path,
    emptied: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(trace, *(ask(0.15 * number, f"{LONG}{number}", stream=True) for number in range(14)))
    out = tmp_path / "out.jsonl"
    commands = ["--before", emptied, "--cold-at", "1", emptied, "--run-at", "0.1", "true"]
    code = main(["load", str(trace), fake.url, "--json", "--paired", *commands, "--out", str(out)])
    report = msgspec.json.decode(capsys.readouterr().out, type=PairedSummary)
    assert code == 0
    assert report.cold is not None
    assert report.paired is not None
    assert report.warm.answered == report.cold.answered == 14
    assert [one.command for one in report.warm.commands] == ["true"]
    assert [one.command for one in report.cold.commands] == ["true", emptied]
    # Each run has one prompt that nothing is cached of; the second one more. 450 tokens are 0.45 s.
    lost = report.warm.cached_tokens - report.cold.cached_tokens
    assert len(LONG) - 16 <= lost <= len(LONG) + 16
    assert report.paired.before.pairs == 7
    assert report.paired.after.pairs == 7
    most = report.paired.after.p95_s.value
    assert most is not None
    assert most >= 0.3
    assert report.paired.before.p95_s.value == pytest.approx(0.0, abs=0.25)
    (start,) = report.paired.cold_starts
    assert (start.at_s, start.commands, len(start.minutes)) == (1.0, [emptied], 1)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["run"] for row in rows] == ["warm"] * 14 + ["cold"] * 14
    assert sorted(row.get("number", 0) for row in rows[:14]) == list(range(14))


def test_a_cold_start_alone_is_a_command_on_the_way(
    fake: Fake, trace: Path, load: Loads, emptied: str
) -> None:
    write(trace, ask(0), ask(0.6))
    summary = load(fake.url, "--cold-at", "0.1", emptied)
    assert [one.command for one in summary.commands] == [emptied]
    assert summary.commands[0].exit_code == 0


def test_pairs_in_a_table(
    gateway: Gateway, fake: Fake, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = str(time.monotonic_ns())
    write(trace, *(ask(0.1 * number, f"{words}{number}") for number in range(4)))
    code = main(["load", str(trace), gateway.url, "--paired", "--cold-at", "0.2", "exit 0"])
    told = capsys.readouterr().out
    assert code == 0
    assert told.startswith("Warm run\nrequests   4 due in ")
    assert "\n\nWith cold starts\nrequests   4 due in " in told
    assert "\nat 0.2 s: exit 0\n  minute 1 " in told
    assert "\nwarning: 4 more answers of the second run came from a cache of answers" in told


def test_ctrl_c_in_the_first_of_two_runs_ends_both(fake: Fake, trace: Path) -> None:
    write(trace, ask(0), ask(600))
    process = started(
        str(trace), fake.url, "--json", "--paired", "--cold-at", "1", "touch /nowhere/at/all"
    )
    until = time.monotonic() + 20
    while fake.calls < 1 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    report = msgspec.json.decode(told, type=PairedSummary)
    assert report.warm.is_interrupted
    assert report.cold is report.paired is None


def test_nothing_is_sent_where_the_command_before_fails(
    fake: Fake, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(trace, ask(0))
    assert main(["load", str(trace), fake.url, "--before", "exit 7"]) == 1
    assert "--before: exit code 7 of 'exit 7'" in capsys.readouterr().err
    assert fake.calls == 0


# the command


def started(*options: str, stderr: int = subprocess.PIPE) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "preheat", "load", *options],
        stdout=subprocess.PIPE,
        stderr=stderr,
    )


def test_ctrl_c_prints_what_there_is(fake: Fake, trace: Path) -> None:
    fake.script({"content": "a"}, default={"fault": "hang"})
    write(trace, ask(0, "a"), ask(0.01, "b"), ask(600))
    process = started(str(trace), fake.url, "--json")
    until = time.monotonic() + 20
    while fake.calls < 2 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    told, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in error
    summary = msgspec.json.decode(told, type=Summary)
    assert (summary.sent, summary.answered, summary.cut) == (2, 1, 1)
    assert summary.is_interrupted


def test_the_table_tells_the_same(
    fake: Fake, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(trace, ask(0), ask(0, stream=True))
    assert main(["load", str(trace), fake.url]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("requests   2 due in ")
    assert [line.split()[0] for line in shown.out.splitlines() if line][-4:] == [
        "TTFT", "E2E", "TPOT", "late",
    ]  # fmt: skip
    assert shown.err == ""  # progress is for terminals


def test_progress_goes_to_a_terminal(fake: Fake, trace: Path) -> None:
    write(trace, ask(0), ask(1.2))
    reading, writing = pty.openpty()
    process = started(str(trace), fake.url, stderr=writing)
    process.communicate(timeout=20)
    shown = os.read(reading, 65_536)
    os.close(reading)
    os.close(writing)
    assert process.returncode == 0
    assert b"1 of 2 sent, 1 answered" in shown


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["gpu:8000"], 1, "URL: expected http"),
        (["http://h/v1/chat/completions"], 1, "no path of an endpoint"),
        (["http://h", "--api-key-env", "NOT_SET"], 1, "NOT_SET is empty or not set"),
        (["http://h", "--run-at", "soon", "x"], 1, "--run-at: expected seconds"),
        (["http://h", "--cold-at", "soon", "x"], 1, "--cold-at: expected seconds"),
        (["http://h", "--paired"], 1, "give --cold-at S COMMAND"),
        (["http://h", "--out", "/nowhere/at/all"], 1, "--out: can't write"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_sent(
    options: Sequence[str], code: int, said: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(trace, ask(0))
    assert main(["load", str(trace), *options]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [[], ["x"], ["x", "http://h", "--speed", "0"], ["x", "http://h", "--limit", "0"]]
)
def test_wrong_usage_is_exit_code_2(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["load", *options])
    assert ended.value.code == 2
    assert "usage: preheat load" in capsys.readouterr().err


def test_a_server_that_hangs_up_at_the_end_of_each_answer_is_fine(trace: Path, load: Loads) -> None:
    write(trace, ask(0), ask(0.1), ask(0.2))
    with Upstream() as server:
        server.play([answer(b'{"choices": []}', "Connection: close\r\n"), End.CLOSE])
        assert load(server.url).answered == 3
