"""The options by which commands read traces, and what they tell while they do."""

import argparse
import os
import pty
from pathlib import Path

import pytest

from preheat.cli import progress
from preheat.cli.reading import add_reading_arguments, read_trace
from preheat.errors import TraceError
from preheat.traces.arrival import Trace
from trace_examples import EXAMPLES, text, weka


def read(*arguments: str | Path) -> Trace:
    parser = argparse.ArgumentParser()
    add_reading_arguments(parser)
    return read_trace(parser.parse_args([str(one) for one in arguments]))


def saved(folder: Path, name: str) -> Path:
    path = folder / EXAMPLES[name].name
    path.write_bytes(EXAMPLES[name].data)
    return path


def test_what_cannot_be_drawn_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, sessions = saved(tmp_path, "mooncake"), saved(tmp_path, "weka")
    read(plain, "--open-sessions", "3")
    assert capsys.readouterr().err == (
        "--open-sessions draws nothing here: the trace has its own times\n"
    )
    read(plain)
    read(sessions, "--open-sessions", "3")
    assert capsys.readouterr().err == ""


def test_a_bad_line_ends_it_by_choice_and_the_choice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_bytes(text(weka(1)) + b"oh\n")
    assert read(path).skipped == 1
    with pytest.raises(
        TraceError, match=r"sessions.jsonl:2: .* skipped instead \(--on-bad skip\)$"
    ):
        read(path, "--on-bad", "fail")


def test_how_far_it_is_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LINE_S", 0.0)
    path = tmp_path / "log.csv"
    example = EXAMPLES["azure"]
    path.write_bytes(example.lines[0] + b"".join(example.lines[1:]) * 30)
    read(path)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("  reading ")[2] for line in lines] == [
        f"{path}: {count} lines" for count in (256, 512, 721)
    ]
    days = tmp_path / "days.csv"
    days.write_bytes(b"day,requests,total_tokens\n0,9000,90000\n")
    read(days)
    assert "4,096 requests drawn" in capsys.readouterr().err


def test_the_line_is_cleared_also_before_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LIVE_S", 0.0)
    path = tmp_path / "sessions.jsonl"
    path.write_bytes(text(weka(1)) * 300 + b"oh\n")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with pytest.raises(TraceError):
            read(path, "--on-bad", "fail")
        shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert f"reading {path}: 256 lines" in shown
    assert shown.endswith("\r\x1b[K")
