"""`preheat replay --service`: speeds fitted to a log, kept in a file, read back, and why they can't."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from preheat.cli import main
from preheat.core.costs import ServiceModel
from preheat.replay import report
from preheat.replay.fitting import served_in

own = pytest.importorskip(
    "preheat.traces.own", reason="the request log needs the extra 'log'", exc_type=ImportError
)

TRUE = ServiceModel(token_s=2e-3, attention_s=1e-6, step_s=0.01, sequence_s=0.0, context_s=0.0)
SMALL = ["--workers", "2", "--worker-tokens", "8000", "--tier-tokens", "0"]


def row(number: int, **changes: object) -> dict[str, object]:
    """A request that had an engine to itself, and what that took."""
    tokens, cached = 128 * (2 + number * 7 % 11), 128 * (number % 2)
    ttft_s = TRUE.step_s + TRUE.prefill_s(tokens - cached, cached)
    return {
        "at": datetime.fromtimestamp(1_760_000_000 + 60 * number, UTC),
        "process": "p",
        "number": number,
        "model": "m" if number % 2 else "n",
        "key": number.to_bytes(16, "big"),
        "stream": True,
        "sampled": False,
        "layer": "forward",
        "provenance": "client",
        "status": 200,
        "engine_worker": f"up.{number % 2}",
        "input_tokens": tokens,
        "output_tokens": 6,
        "cached_tokens": cached,
        "prompt_bytes": 4 * tokens,
        "ttft_s": ttft_s,
        "service_s": ttft_s + 5 * TRUE.step_s,
        "shared_blocks": 0,
        "new_blocks": [1, *range(100 * number + 2, 100 * number + tokens // 128)],
        "block_unit": "tokens-128",
    } | changes


def write(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir(exist_ok=True)
    name = "log-20251009T085320.000000-20251009T185320.000000.parquet"
    own.pq.write_table(own.pa.Table.from_pylist(rows, schema=own.SCHEMA), folder / name)
    return folder


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write(tmp_path / "log", [row(number) for number in range(60)])


@pytest.mark.parametrize("is_folder", [True, False])
def test_speeds_are_fitted_told_used_and_kept(
    log: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], *, is_folder: bool
) -> None:
    kept = tmp_path / "speeds.json"
    trace = str(log if is_folder else next(log.iterdir()))
    options = [trace, *SMALL, "--json"]
    assert main(["replay", *options, "--service", "fit", "--save-service", str(kept)]) == 0
    said = capsysbinary.readouterr()
    made = report.decode(said.out)
    assert made.settings is not None
    assert made.saved is not None
    found = made.settings.service
    assert found["token_s"] == pytest.approx(TRUE.token_s, rel=0.01)
    assert found["step_s"] == pytest.approx(TRUE.step_s, rel=0.05)
    assert made.saved.no_cache_gpu_s == pytest.approx(
        sum(TRUE.prefill_s(int(str(row(number)["input_tokens"]))) for number in range(60)), rel=0.01
    )
    about = made.settings.service_fit
    assert about is not None
    assert about.requests == 60
    assert about.ttft_error_p90_share < 0.01
    assert about.decode_error_p50_share is not None
    assert any("was fitted to 60 answers of this log" in caution for caution in made.cautions)
    assert b"60 requests; error as a share, p50 / p90 / p99" in said.err
    assert b"2 models are in the log" in said.err

    assert json.loads(kept.read_bytes()) == found
    assert main(["replay", *options, "--service", str(kept)]) == 0
    again = report.decode(capsysbinary.readouterr().out)
    assert again.settings is not None
    assert (again.settings.service, again.settings.service_fit) == (found, None)
    assert again.saved == made.saved
    assert any("given, not fitted" in caution for caution in again.cautions)


def test_the_fit_stands_above_the_tables(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), *SMALL, "--service", "fit"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Service model, fitted to {log}: token_s 0.002")
    assert "speeds fitted to this log" in said
    assert "rough" not in said


def test_a_rough_fit_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(number) for number in range(60)]
    for number, one in enumerate(rows[40:]):
        slower = 1 + number % 3
        for name in ("ttft_s", "service_s"):
            one[name] = slower * float(str(one[name]))
    log = write(tmp_path / "log", rows)
    assert main(["replay", str(log), *SMALL, "--service", "fit"]) == 0
    assert "That is rough" in capsys.readouterr().out


def failing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["replay", *arguments]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def as_others_write_it(folder: Path) -> None:
    """Folders of days, and times in nanoseconds."""
    table = own.pa.Table.from_pylist([row(number) for number in range(60)], schema=own.SCHEMA)
    at = table["at"].cast(own.pa.timestamp("ns", "UTC"))
    table = table.set_column(table.schema.get_field_index("at"), "at", at)
    for day in range(2):
        part = folder / f"day={day}"
        part.mkdir(parents=True)
        own.pq.write_table(table.slice(30 * day, 30), part / "part-0.parquet")


def with_a_damaged_one(folder: Path) -> None:
    write(folder, [row(number) for number in range(60)])
    (folder / "log-late.parquet").write_bytes(b"PAR1" + 100 * b"x")


@pytest.mark.parametrize("made", [as_others_write_it, with_a_damaged_one])
def test_speeds_are_fitted_to_all_that_the_replay_reads(
    tmp_path: Path, made: Callable[[Path], None]
) -> None:
    made(tmp_path / "log")
    served = served_in([tmp_path / "log"])
    assert [one.asked_at for one in served] == [1_760_000_000 + 60 * n for n in range(60)]
    assert main(["replay", str(tmp_path / "log"), *SMALL, "--service", "fit"]) == 0


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row(n, ttft_s=None) for n in range(60)], "no measured times: none of its 60 requests"),
        ([row(n, stream=False) for n in range(60)], "no measured times"),
        ([row(n) for n in range(9)], "at least 15 answered requests"),
        (
            [row(n, ttft_s=1.0, service_s=1.0) for n in range(60)],
            "didn't come in one piece",
        ),
        (
            [row(n, ttft_s=1.0, service_s=1.2) for n in range(60)],
            "what a token costs can't be told",
        ),
    ],
)
def test_a_log_that_tells_too_little_is_told_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, object]], why: str
) -> None:
    said = failing([str(write(tmp_path / "log", rows)), "--service", "fit"], capsys)
    assert why in said
    assert "--service FILE" in said


def test_a_trace_without_measured_times_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 512, "output_length": 2, "hash_ids": [1]}
    path.write_text(f"{json.dumps(line)}\n" * 20)
    said = failing([str(path), "--service", "fit"], capsys)
    assert "trace (mooncake) without its engines' measured times" in said


def test_a_place_to_keep_them_is_looked_at_before_the_work(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = [str(log), "--service", "fit", "--save-service"]
    assert "it is a folder" in failing([*fit, str(tmp_path)], capsys)
    assert "its folder doesn't exist" in failing([*fit, str(tmp_path / "no" / "s.json")], capsys)
    kept = str(tmp_path / "s.json")
    assert "give both" in failing([str(log), "--save-service", kept], capsys)
    assert "--service fit" in failing([str(log), "--service", kept], capsys)


def test_a_file_without_prices_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "speeds.json"
    path.write_text('{"token_s": 0, "attention_s": 0}')
    assert main(["replay", str(tmp_path), "--service", str(path)]) == 1
    assert "a prompt takes no time by it" in capsys.readouterr().err
