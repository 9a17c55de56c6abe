"""`preheat replay` and `preheat headroom` as a user meets them: good traces, and every kind of bad one."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.cli import main
from preheat.cli.pages import write_page
from preheat.errors import ConfigError
from preheat.replay import report


def rows(count: int = 60) -> list[dict[str, object]]:
    """Mooncake's form: six conversations that take turns and grow."""
    made = []
    for number in range(count):
        session, turn = number % 6, number // 6
        blocks = [1, *(1000 * session + 10 + i for i in range(turn + 1))]
        made.append(
            {
                "timestamp": number * 700 + 3 * (number % 5),
                "input_length": 512 * len(blocks) + 7,
                "output_length": 20,
                "hash_ids": [*blocks, 900_000 + number],
            }
        )
    return made


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write(tmp_path / "t.jsonl", [json.dumps(row) for row in rows()])


SMALL = ["--workers", "2", "--worker-tokens", "8000", "--tier-tokens", "30000"]


def test_the_saving_is_told_in_words_and_in_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "t.jsonl", [json.dumps(row) for row in rows(120)])
    options = ["--workers", "2", "--worker-tokens", "16000", "--tier-tokens", "60000"]
    assert main(["replay", trace, *options, "--gpu-hour", "3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("t.jsonl: 120 requests (mooncake)")
    assert (
        "On 2 simulated workers of 16,000 tokens (--workers, --worker-tokens), a tier of 60,000, "
        "an 8B model's speeds, answers kept 3,600 s."
    ) in said
    assert "GPU-seconds (" in said
    assert "USD" in said
    for word in ("round robin, no response cache", "all together", "belady", "gap closed"):
        assert word in said
    for word in ("The engines' own prefix caches save", "The response cache answers 0 of 120"):
        assert word in said
    assert "- A tier needs an engine that has one." in said
    levers = said.split("Levers, each alone and all together\n")[1].split("\n\n")[0].splitlines()
    assert len(levers) == 6
    assert len({len(line) for line in levers}) == 1
    assert re.search(r"-0\b(?!\.)", said) is None


def test_lengths_alone_tell_waits_and_no_saving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"2023-11-16 18:15:{second}.0,{400 + second},44" for second in range(10, 50)]
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    assert main(["replay", write(tmp_path / "a.csv", [head, *lines])]) == 0
    said = capsys.readouterr().out
    assert "This trace can't say what a cache would save" in said
    assert "GPU-s" not in said
    assert "no-cache prefill" not in said
    assert "p99 s" in said


def test_one_document_and_one_page(
    trace: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    page = tmp_path / "r.html"
    assert main(["replay", trace, *SMALL, "--json", "--html", str(page)]) == 0
    made = report.decode(capsysbinary.readouterr().out)
    assert made.trace is not None
    assert made.trace.requests == 60
    assert b"preheat.report/1" in page.read_bytes()


def failing(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    if code == 2:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    else:
        assert main(arguments) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


def test_an_empty_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "empty" in failing(["replay", write(tmp_path / "t.jsonl", [])], capsys)


def test_a_trace_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere" in failing(["replay", str(tmp_path / "nowhere")], capsys)


def test_an_unknown_format_names_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = failing(["replay", write(tmp_path / "t.csv", ["a;b", "1;2"])], capsys)
    assert "mooncake" in said
    assert "--format" in said or "format" in said


def test_a_torn_line_is_named_and_skipped_or_fatal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(row) for row in rows()]
    path = write(tmp_path / "t.jsonl", [*lines[:30], lines[30][:-9], *lines[31:]])
    assert main(["replay", path, *SMALL]) == 0
    told = capsys.readouterr()
    assert "59 requests" in told.out
    assert "t.jsonl:31" in told.err
    assert "31" in failing(["replay", path, "--on-bad", "fail"], capsys)


@pytest.mark.parametrize(
    ("field", "value"), [("input_length", -5), ("timestamp", -1), ("output_length", "x")]
)
def test_a_negative_or_wrong_field_is_a_bad_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    made = rows()
    made[10][field] = value
    path = write(tmp_path / "t.jsonl", [json.dumps(row) for row in made])
    assert main(["replay", path, *SMALL]) == 0
    assert "t.jsonl:11" in capsys.readouterr().err


def test_a_truncated_file_is_used_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(f"{json.dumps(row)}\n" for row in rows(600)).encode()
    whole = gzip.compress(text)
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    assert main(["replay", str(path), *SMALL]) == 0
    told = capsys.readouterr()
    assert " requests (mooncake)" in told.out
    assert "skipped" in told.err
    failing(["replay", str(path), "--on-bad", "fail"], capsys)


def test_unsorted_times_are_sorted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = rows()
    path = write(tmp_path / "t.jsonl", [json.dumps(row) for row in reversed(made)])
    assert main(["replay", path, *SMALL]) == 0
    assert "order" in capsys.readouterr().out


def test_mixed_formats_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "a.jsonl", [json.dumps(row) for row in rows()])
    other = write(
        tmp_path / "b.csv",
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"],
    )
    said = failing(["replay", one, other], capsys)
    assert "b.csv" in said


@pytest.mark.parametrize(
    "option",
    [
        ["--workers", "0"],
        ["--worker-tokens", "0"],
        ["--worker-tokens", "-3"],
        ["--worker-tokens", "inf"],
        ["--tier-tokens", "-1"],
        ["--speed", "0"],
        ["--speed", "1e-320"],
        ["--gpu-hour", "nan"],
        ["--ttl", "-1"],
    ],
)
def test_impossible_numbers_are_refused(
    trace: str, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    assert option[0] in failing(["replay", trace, *option], capsys, code=2)


def test_a_memory_smaller_than_a_block_refuses_everything_and_says_so(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, "--worker-tokens", "100", "--workers", "1"]) == 0
    assert "longer than a worker's memory" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--routing", "best"], ["--policy", "magic"]])
def test_unknown_names_are_told_with_the_known(
    trace: str, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    said = failing(["replay", trace, *option], capsys)
    assert option[1] in said
    assert "known:" in said


def test_a_page_that_cannot_be_written_is_told_before_the_work(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "folder" in failing(["replay", trace, "--html", "/no/where/r.html"], capsys)


def test_headroom_prints_its_tables(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workers", "2", "--worker-tokens", "8000", "--alone-tokens", "8000"]
    assert main(["headroom", trace, *options, "--switches", "2"]) == 0
    said = capsys.readouterr().out
    for word in (
        "Block hit ratio of one memory",
        "clairvoyant",
        "one restarts: 2 x",
        "rolling deploy",
        "one shared cache",
    ):
        assert word in said


def test_headroom_makes_a_page_and_a_document(
    trace: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    page = tmp_path / "h.html"
    options = ["--workers", "2", "--worker-tokens", "8000", "--quick", "--part", "events"]
    assert main(["headroom", trace, *options, "--json", "--html", str(page)]) == 0
    made = report.decode(capsysbinary.readouterr().out)
    assert made.headroom[0].title == "In short"
    assert [event.name for event in made.events] == [
        "one restarts: 2 x 0.008 M tokens",
        "rolling deploy: 2 x 0.008 M tokens",
    ]
    assert {arm.role for arm in made.events[0].arms} == {"bound", "baseline", "ours", "other"}
    held = page.read_bytes()
    assert held.startswith(b"<!doctype html>")
    assert b"rolling deploy" in held


def test_headroom_looks_at_its_options_before_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent.jsonl")
    said = failing(["headroom", absent, "--part", "events", "--part", "magic"], capsys)
    assert "unknown part 'magic'; known: capacity," in said
    assert "folder" in failing(["headroom", absent, "--html", "/no/where/h.html"], capsys)
    assert "off-peak" in failing(["headroom", absent, "--off-peak-price", "x"], capsys, code=2)


def test_headroom_says_what_a_trace_cannot_tell(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "residency" in failing(["headroom", trace, "--part", "residency"], capsys)
    assert "known:" in failing(["headroom", trace, "--part", "magic"], capsys)
    bare = write(
        tmp_path / "b.csv",
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"],
    )
    assert "neither prompts' blocks nor keys" in failing(["headroom", bare], capsys)


@pytest.mark.parametrize(
    ("rule", "said"), [("seeds=1", "no such rule"), ("seed=x", "seed"), ("hours=-2", "hours")]
)
def test_a_rule_that_cannot_be_is_told(
    trace: str, capsys: pytest.CaptureFixture[str], rule: str, said: str
) -> None:
    assert said in failing(["replay", trace, "--rule", rule], capsys)


def test_a_models_configuration_says_how_much_a_worker_holds(
    trace: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    config = tmp_path / "config.json"
    llama = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    }
    config.write_text(json.dumps(llama))
    options = ["--model-config", str(config), "--kv-gib", "4", "--workers", "2", "--json"]
    assert main(["replay", trace, *options]) == 0
    made = report.decode(capsysbinary.readouterr().out)
    assert made.settings is not None
    assert made.settings.hbm_tokens == 4 * 2**30 // (128 * 1024)


def test_half_a_model_or_a_broken_one_is_told(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{")
    assert "--kv-gib" in failing(["replay", trace, "--model-config", str(config)], capsys)
    assert "config.json" in failing(
        ["replay", trace, "--model-config", str(config), "--kv-gib", "4"], capsys
    )
    config.write_text("{}")
    said = failing(["replay", trace, "--model-config", str(config), "--kv-gib", "4"], capsys)
    assert "no num_attention_heads" in said
    heads = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": "many"}
    for wrong in (heads, {**heads, "num_key_value_heads": 8, "num_hidden_layers": -1}):
        config.write_text(json.dumps(wrong))
        said = failing(["replay", trace, "--model-config", str(config), "--kv-gib", "4"], capsys)
        assert "would take no memory" in said


@pytest.mark.parametrize("command", ["replay", "headroom"])
def test_more_workers_than_anybody_has_are_refused(
    trace: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit):
        main([command, trace, "--workers", "1e9"])
    assert "--workers: must be a whole number from 1 to 10000" in capsys.readouterr().err


def test_a_trace_of_one_moment_has_no_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [row | {"timestamp": 0} for row in rows()]
    path = write(tmp_path / "t.jsonl", [json.dumps(row) for row in made])
    assert "one moment" in failing(["headroom", path], capsys)
    assert main(["replay", path, *SMALL]) == 0


@pytest.mark.parametrize(
    "option",
    [["--budget-s", "nan"], ["--session-tokens", "inf"], ["--worker-tokens", "1.5"]],
)
def test_headroom_refuses_impossible_numbers(
    trace: str, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    assert option[0] in failing(["headroom", trace, *option], capsys, code=2)


def test_an_engines_speeds_may_be_given(
    trace: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    service = tmp_path / "service.json"
    service.write_text('{"token_s": 1e-4, "attention_s": 0}')
    assert main(["replay", trace, *SMALL, "--service", str(service), "--json"]) == 0
    made = report.decode(capsysbinary.readouterr().out)
    assert made.settings is not None
    assert made.settings.service["token_s"] == 1e-4
    assert made.saved is not None
    tokens = sum(int(str(row["input_length"])) for row in rows())
    assert made.saved.no_cache_gpu_s == pytest.approx(tokens * 1e-4)


@pytest.mark.parametrize("text", ["{", '{"tokens_s": 1}', '{"token_s": -1}', '{"token_s": "x"}'])
def test_speeds_that_cannot_be_are_told(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    service = tmp_path / "service.json"
    service.write_text(text)
    assert "service.json" in failing(["replay", trace, "--service", str(service)], capsys)


def test_a_page_in_the_place_of_a_folder_is_told_before_the_work(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "folder" in failing(["replay", trace, "--html", str(tmp_path)], capsys)


def test_a_full_disk_loses_the_page_and_not_the_result(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, *SMALL, "--html", "/dev/full"]) == 1
    said = capsys.readouterr()
    assert "would have been saved" in said.out
    assert "/dev/full" in said.err


def test_a_name_that_is_no_text_is_shown_as_far_as_it_is(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / os.fsdecode(b"t\xff\x1b[2J.jsonl")
    write(path, [json.dumps(row) for row in rows()])
    assert main(["replay", str(path), *SMALL, "--json"]) == 0
    made = report.decode(capsysbinary.readouterr().out)
    assert made.trace is not None
    assert made.trace.name.endswith("t??[2J.jsonl")


def test_a_worker_into_which_nothing_fits_is_told(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--worker-tokens", "100", "--alone-tokens", "100", "--part", "events"]
    assert main(["headroom", trace, *options]) == 1
    said = capsys.readouterr().err
    assert "no request fits" in said
    assert "Traceback" not in said


def test_a_request_whose_answer_cant_fit_costs_nothing_before_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rows(20)
    lines[3]["output_length"] = 120_000
    trace = write(tmp_path / "long.jsonl", [json.dumps(row) for row in lines])
    assert main(["replay", trace, "--workers", "2", "--worker-tokens", "100000", "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)["saved"]
    assert saved["baseline_gpu_s"] <= saved["no_cache_gpu_s"]


def test_a_disk_that_takes_no_page_keeps_the_one_that_was_there(tmp_path: Path) -> None:
    page = tmp_path / "kept.html"
    page.write_text("before")
    (tmp_path / ".kept.html.new").mkdir()  # so it can't be written
    with pytest.raises(ConfigError, match=r"kept\.html"):
        write_page(page, b"{}")
    assert page.read_text() == "before"


def test_a_device_is_told_from_a_file_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "/dev/null"]) == 1
    assert "it is a pipe or a device" in capsys.readouterr().err


def test_a_full_disk_behind_the_output_is_told(trace: str) -> None:
    command = [sys.executable, "-m", "preheat", "replay", trace, *SMALL]
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert ran.returncode == 1
    assert "No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_time_that_cant_be_one_is_a_bad_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rows(30)
    lines[7]["timestamp"] = 1e300
    trace = write(tmp_path / "far.jsonl", [json.dumps(row) for row in lines])
    assert main(["replay", trace, *SMALL]) == 0
    said = capsys.readouterr()
    assert "29 requests" in said.out
    assert "far.jsonl:8: " in said.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cant_be_read_isnt_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shut"
    folder.mkdir(mode=0)
    assert main(["replay", str(tmp_path)]) == 1
    assert "can't read" in capsys.readouterr().err
    folder.chmod(0o700)
