"""The scripts of the `pause_return` benchmark: runs of real pauses, each scaled by one factor."""

import gzip
import json
import statistics
from pathlib import Path

import pytest

from benchmarks.pause_script import LONGEST, Drawn, Turn, drawn
from benchmarks.report import BenchmarkError


def test_one_factor_for_lengths_and_one_for_pauses() -> None:
    was = Drawn([[Turn(5.0, 1_000), Turn(10.0, 400)], [Turn(1.0, 3_000), Turn(30.0, 100)]])
    first, second = was.scaled(first_tokens=200, most_tokens=1_000, mean_pause_s=4.0)
    assert [turn.tokens for turn in first] == [100, 40]
    assert [turn.tokens for turn in second] == [300, 10]
    assert [turn.pause_s for turn in first] == [1.0, 2.0]
    assert [turn.pause_s for turn in second] == pytest.approx([0.2, 6.0])


def test_what_is_too_long_is_cut_and_what_is_too_short_is_filled() -> None:
    turns = [Turn(1.0, 10_000), Turn(1.0, 1), *[Turn(1.0, 50)] * 3, Turn(1e6, 50)]
    (script,) = Drawn([turns]).scaled(first_tokens=500, most_tokens=508, mean_pause_s=1.0)
    assert [turn.tokens for turn in script] == [500, 8, 8, 8, 8, 8]
    assert script[-1].pause_s == pytest.approx(LONGEST * script[1].pause_s)
    assert statistics.fmean(turn.pause_s for turn in script[1:]) == pytest.approx(1.0)


def log(path: Path, sessions: int, requests: int) -> Path:
    with gzip.open(path, "wt") as file:
        for number in range(sessions):
            made = [
                {"t": 10.0 * place, "in": 100 * (number + 1) + place, "api": 4.0}
                for place in range(requests)
            ]
            made.insert(3, {"t": 25.0, "in": 9_999_999, "agent": "helper"})
            file.write(json.dumps({"requests": made}) + "\n")
    return path


def test_a_run_is_consecutive_and_its_own(tmp_path: Path) -> None:
    path = log(tmp_path / "log.gz", 6, 20)
    script = drawn(4, 5, 1, path=path)
    assert len({turns[0].tokens // 100 for turns in script.sessions}) == 4
    for turns in script.sessions:
        assert [turn.pause_s for turn in turns[1:]] == [6.0] * 5
        assert [turn.tokens for turn in turns[1:]] == [1] * 5
        assert 0.0 <= turns[0].pause_s <= 6.0
    assert drawn(4, 5, 1, path=path) == script
    assert drawn(4, 5, 2, path=path) != script


def test_too_few_sessions_are_told(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="only 2"):
        drawn(3, 5, 1, path=log(tmp_path / "log.gz", 2, 20))
    with pytest.raises(BenchmarkError, match="only 0"):
        drawn(1, 5, 1, path=log(tmp_path / "short.gz", 2, 6))
    with pytest.raises(BenchmarkError, match="isn't there"):
        drawn(1, 5, 1, path=tmp_path / "nothing.gz")
