"""Every trace format: what is in the table is tested by that."""

import bz2
import gzip
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.errors import TraceError
from preheat.traces import FORMATS
from preheat.traces.arrival import UNKNOWN, Arrival, Trace
from preheat.traces.reading import read
from preheat.traces.rules import Rules
from trace_examples import BAD_LINES, EXAMPLES, SECRET, Example, small_trace

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}

every_format = pytest.mark.parametrize("name", EXAMPLES)


def put(folder: Path, example: Example, data: bytes | None = None, suffix: str = "") -> Path:
    path = folder / (example.name + suffix)
    path.write_bytes(example.data if data is None else data)
    return path


def lengths_are_possible(one: Arrival) -> bool:
    return all(
        value >= 0 or value == UNKNOWN
        for value in (one.input_tokens, one.output_tokens, one.think_s, one.ttft_s, one.service_s)
    )


def test_every_format_has_an_example() -> None:
    assert {*EXAMPLES, "preheat"} == set(FORMATS)


def test_every_format_and_every_rule_is_in_the_documents() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text()
    assert [name for name in (*FORMATS, *Rules.__struct_fields__) if f"`{name}`" not in page] == []


@every_format
@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_it_is_recognised_and_read_however_it_is_compressed(
    name: str, suffix: str, tmp_path: Path
) -> None:
    example = EXAMPLES[name]
    path = put(tmp_path, example, COMPRESSIONS[suffix](example.data), suffix)
    trace = read([path])
    assert trace.format == name
    assert (trace.skipped, trace.bad) == (0, ())
    assert len(trace.arrivals) == (example.requests or len(trace.arrivals)) > 0


@every_format
def test_arrivals_are_in_order_and_possible(name: str, tmp_path: Path) -> None:
    trace = read([put(tmp_path, EXAMPLES[name])])
    ats = [one.at for one in trace.arrivals]
    assert ats == sorted(ats)
    assert ats[0] >= 0
    for one in trace.arrivals:
        assert lengths_are_possible(one)
        assert -1 <= one.key < 2**63
        assert one.size_bytes > 0
        assert all(0 <= block < 2**63 for block in one.blocks)
        assert one.blocks == () or trace.block_tokens > 0
        if trace.block_tokens and one.blocks and name != "openai":
            assert len(one.blocks) == -(-one.input_tokens // trace.block_tokens)


@every_format
def test_a_prompts_blocks_are_chained(name: str, tmp_path: Path) -> None:
    before: dict[int, int] = {}
    for one in read([put(tmp_path, EXAMPLES[name])]).arrivals:
        for parent, block in zip((-1, *one.blocks), one.blocks, strict=False):
            assert before.setdefault(block, parent) == parent


@every_format
def test_the_same_rules_give_the_same_trace(name: str, tmp_path: Path) -> None:
    path = put(tmp_path, EXAMPLES[name])
    assert list(read([path]).arrivals) == list(read([path]).arrivals)


@pytest.mark.parametrize(("name", "number"), BAD_LINES)
def test_a_bad_line_is_told_with_its_number_and_left_out(
    name: str, number: int, tmp_path: Path
) -> None:
    example = EXAMPLES[name]
    place = 9 if name != "oracle-general" else 20
    data = b"".join((*example.lines[:place], example.bad[number], *example.lines[place:]))
    path = put(tmp_path, example, data)
    trace = read([path], format=name)
    assert trace.skipped == 1
    assert [(bad.path, bad.line) for bad in trace.bad] == [(str(path), place + 1)]
    assert list(trace.arrivals) == list(
        read([put(tmp_path, example)], format=name).arrivals
    ) or _named_by_line(trace)
    assert SECRET not in trace.bad[0].why


def _named_by_line(trace: Trace) -> bool:
    """An arrival whose id is its line's number isn't the same below the bad line."""
    return trace.format in ("mooncake", "azure", "alibaba", "bing", "lmcache", "openai")


@pytest.mark.parametrize(("name", "number"), BAD_LINES)
def test_a_bad_line_is_fatal_by_choice(name: str, number: int, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    place = 9 if name != "oracle-general" else 20
    data = b"".join((*example.lines[:place], example.bad[number], *example.lines[place:]))
    path = put(tmp_path, example, data)
    with pytest.raises(TraceError) as caught:
        read([path], format=name, on_bad="fail")
    assert str(caught.value).startswith(f"{path}:{place + 1}: ")
    assert str(caught.value).endswith("can be skipped instead (--on-bad skip)")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@every_format
def test_what_stands_before_the_damage_is_kept(name: str, suffix: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    packed = COMPRESSIONS[suffix](example.data)
    # Only the end is torn away: the checks of the whole, not the data.
    path = put(tmp_path, example, packed[:-6], suffix)
    trace = read([path])
    whole = read([put(tmp_path, example)])
    assert list(trace.arrivals) == list(whole.arrivals)
    assert trace.skipped == 1
    records = len(example.lines)
    assert trace.bad[0].line == records + 1
    with pytest.raises(TraceError, match="cut off or damaged"):
        read([path], on_bad="fail")


@every_format
def test_a_file_torn_in_the_middle_gives_its_beginning(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    packed = gzip.compress(example.data * 40, 1)
    path = put(tmp_path, example, packed[: len(packed) // 2], ".gz")
    try:
        trace = read([path], format=name)
    except TraceError as error:
        assert "no request in it" in str(error)  # noqa: PT017 (both ends are right)
        return
    assert trace.skipped >= 1


@every_format
def test_an_empty_file_is_a_clear_error(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    with pytest.raises(TraceError, match="the file is empty"):
        read([put(tmp_path, example, b"")])
    packed = put(tmp_path, example, gzip.compress(b""), ".gz")
    with pytest.raises(TraceError, match="nothing is in it"):
        read([packed])
    with pytest.raises(TraceError, match="no request in it"):
        read([packed], format=name)


@every_format
def test_a_folder_of_parts_is_one_trace(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    header = example.lines[: example.has_header]
    rows = example.lines[example.has_header :]
    half = len(rows) // 2
    folder = tmp_path / "log"
    for day, part in enumerate((rows[half:], rows[:half])):
        path = folder / f"day={day}" / "hour=3"
        path.mkdir(parents=True)
        put(path, example, gzip.compress(b"".join(header + part)), ".gz")
    (folder / "_SUCCESS").write_bytes(b"x")
    (folder / "README.md").write_text("# about\n")
    (folder / "day=0" / "empty.csv").write_bytes(b"")
    trace = read([folder])
    whole = read([put(tmp_path, example)])
    assert trace.format == name
    if whole.times != "rule":
        assert len(trace.arrivals) == len(whole.arrivals)
    ats = [one.at for one in trace.arrivals]
    assert ats == sorted(ats)
    assert len({one.id for one in trace.arrivals}) == len(ats)
    if whole.times == "measured":
        spread_alike = [one.at for one in whole.arrivals]
        assert ats == pytest.approx(spread_alike)


@every_format
def test_progress_is_told(name: str, tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    path = put(tmp_path, EXAMPLES[name])
    read([path], progress=lambda file, count: told.append((file, count)))
    assert told
    assert told[-1] == (str(path), len(EXAMPLES[name].lines))


# What isn't a trace


def test_an_unknown_format_is_told_with_those_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"colour": "red"}\n')
    with pytest.raises(TraceError) as caught:
        read([path])
    said = str(caught.value)
    assert str(path) in said
    assert all(name in said for name in FORMATS)
    assert "--format openai" in said
    example = said[said.index('{"timestamp"') : said.index(". If it is")]
    log = tmp_path / "log.jsonl"
    log.write_text(example.replace("…", '{"role": "user", "content": "x"}', 1).replace("…", ""))
    assert read([log]).format == "openai"
    with pytest.raises(TraceError, match="no trace format is called 'excel'; known: adaptsize"):
        read([path], format="excel")


@pytest.mark.parametrize(
    ("data", "hint"), [(b'[\n{"a": 1}\n]', "jq -c '.\\[\\]'"), (b'{\n "a": 1\n}\n', "jq -c .")]
)
def test_json_of_another_shape_is_told_how_to_be_lines(
    data: bytes, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "export.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=hint):
        read([path])


def test_a_binary_file_is_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9)
    with pytest.raises(TraceError, match="binary"):
        read([path])


def test_formats_are_not_mixed(tmp_path: Path) -> None:
    paths = [put(tmp_path, EXAMPLES[name]) for name in ("mooncake", "azure")]
    with pytest.raises(TraceError, match=r"mixed formats: mooncake \(.*\) and azure \(.*\)") as one:
        read(paths)
    assert "one by one" not in str(one.value)
    with pytest.raises(TraceError, match=r"mixed formats: .* has 2 files; .* named one by one"):
        read(tmp_path)


def test_a_foreign_file_in_a_folder_is_told_with_what_is_beside_it(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_bytes(EXAMPLES["azure"].data)
    (tmp_path / "notes.txt").write_text("bread, milk\n")
    with pytest.raises(TraceError) as caught:
        read(tmp_path)
    assert f"{tmp_path / 'notes.txt'}: no known format ({tmp_path} has 3 files;" in str(
        caught.value
    )
    assert len(read([tmp_path / "a.csv", tmp_path / "b.csv"]).arrivals) == 48


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("begins", [True, False])
def test_rubbish_that_is_named_as_packed_is_told_not_to_be_unpacked(
    suffix: str, begins: bool, tmp_path: Path
) -> None:
    if suffix == ".zst":
        pytest.importorskip("pyarrow")
    magics = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\0", ".bz2": b"BZh", ".zst": b"\x28\xb5\x2f\xfd"}
    path = tmp_path / f"log{suffix}"
    path.write_bytes(begins * magics[suffix] + b"rubbish " * 40)
    with pytest.raises(TraceError, match="it can't be unpacked: it is damaged, or not what"):
        read(path)


def test_a_log_that_was_unpacked_and_kept_its_name_is_read(tmp_path: Path) -> None:
    assert len(read(put(tmp_path, EXAMPLES["openai"], suffix=".gz")).arrivals) == 24


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file or folder"):
        read([tmp_path / "nothing"])
    with pytest.raises(TraceError, match="no trace in this folder"):
        read([tmp_path])
    with pytest.raises(TraceError, match="no trace was named"):
        read([])


def test_only_bad_lines_are_an_error_that_names_the_first(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"oh\n" * 3)
    with pytest.raises(TraceError, match=r"no request in it; first of 3 bad lines: .*:1: JSON"):
        read([path], format="mooncake")


def test_unsorted_times_are_sorted_and_told(tmp_path: Path) -> None:
    for name in ("mooncake", "azure", "alibaba", "lmcache", "openai", "adaptsize"):
        example = EXAMPLES[name]
        header, rows = example.lines[: example.has_header], example.lines[example.has_header :]
        trace = read([put(tmp_path, example, b"".join((*header, *reversed(rows))))])
        ats = [one.at for one in trace.arrivals]
        assert ats == sorted(ats)
        assert any("sorted" in rule for rule in trace.rules), name
        assert not any("sorted" in rule for rule in read([put(tmp_path, example)]).rules)


def test_equal_times_keep_the_files_order(tmp_path: Path) -> None:
    path = tmp_path / "a.tr"
    path.write_bytes(b"5 1 10\n2 2 10\n5 3 10\n2 4 10\n")
    assert [one.key for one in read([path]).arrivals] == [1, 3, 0, 2]


def test_a_written_trace_is_recognised_and_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from preheat.traces.writing import write

    trace = small_trace()
    write(trace, tmp_path / "trace.parquet")
    found = read([tmp_path / "trace.parquet"])
    assert found.format == "preheat"
    assert [one.id for one in found.arrivals] == [one.id for one in trace.arrivals]
    data = (tmp_path / "trace.parquet").read_bytes()
    (tmp_path / "torn.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(TraceError, match=r"torn.parquet:1: the file is cut off or damaged"):
        read([tmp_path / "torn.parquet"])
    with pytest.raises(TraceError, match=r"torn.parquet:1: the file is cut off or damaged"):
        read([tmp_path / "torn.parquet"], on_bad="fail")


def test_another_parquet_file_is_told_to_be_one(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    with pytest.raises(TraceError, match="no request log of ours"):
        read([tmp_path / "x.parquet"])


def test_zstd_is_read_with_pyarrow(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    chance = random.Random(1)
    lines = [b"%d 1 0 %d\n" % (chance.randrange(10**9), n) for n in range(40_000)]
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(b"".join(lines))
    packed = sink.getvalue().to_pybytes()
    path = put(tmp_path, EXAMPLES["arc"], packed, ".zst")
    assert len(read([path]).arrivals) == len(lines)
    path.write_bytes(packed[: len(packed) // 2])
    trace = read([path])
    assert 0 < len(trace.arrivals) < len(lines)
    assert [bad.line for bad in trace.bad] == [len(trace.arrivals) + 1]


# The recorded ones, with what their READMEs count

RECORDED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mooncake/conversation.part1.jsonl.gz": ("mooncake", 7_689, {}),
    "mooncake/synthetic.part1.jsonl.gz": ("mooncake", 2_600, {}),
    "weka_agentic/v6_global.jsonl.gz": ("weka", 17_483, {}),
    "weka_agentic/v8_local.jsonl.gz": ("weka", 18_391, {}),
    "lmcache_agent_traces/miniswe.jsonl.gz": ("lmcache", 247, {}),
    "lmcache_agent_traces/magagent.jsonl.gz": ("lmcache", 472, {}),
    "taubench_airline": ("taubench", 0, {}),
    "sharegpt_multiturn": ("sharegpt", 206, {}),
    "azure_llm_2023/code.part1.csv.gz": ("azure", 7_148, {}),
    "azure_llm_2023/conv.part1.csv.gz": ("azure", 13_828, {}),
    "servegen": ("servegen", 0, {"days": 0.02, "rate_scale": 0.01}),
    "burstgpt_aggregate/daily.d00-40.csv.gz": ("burstgpt", 0, {"days": 3.0}),
    "burstgpt_aggregate": ("burstgpt", 0, {}),
    "alibaba_genai_requests": ("alibaba", 17_882, {}),
    "bing_covid_queries": ("bing", 83_284, {}),
    "cache_traces/cache2k__web12.trace.xz": ("int32", 95_607, {}),
    "cache_traces/libcachesim__cloudPhysicsIO.oracleGeneral.bin.xz": (
        *("oracle-general", 113_872),
        {},
    ),
    "cache_traces/lirs__loop.trace.gz": ("lirs", 505_500, {}),
    "cache_traces/lirs__multi1.trace.gz": ("lirs", 15_858, {}),
    "cache_traces/lirs__multi2.trace.gz": ("lirs", 26_311, {}),
    "cache_traces/lirs__ps.trace.gz": ("lirs", 10_448, {}),
    "cache_traces/lirs__sprite.trace.gz": ("lirs", 133_996, {}),
}
SESSIONS = {
    "weka_agentic/v6_global.jsonl.gz": 297,
    "weka_agentic/v8_local.jsonl.gz": 272,
    "lmcache_agent_traces/miniswe.jsonl.gz": 13,
    "lmcache_agent_traces/magagent.jsonl.gz": 16,
    "taubench_airline": 132,
}
DISTINCT = {
    "cache_traces/cache2k__web12.trace.xz": 13_756,
    "cache_traces/libcachesim__cloudPhysicsIO.oracleGeneral.bin.xz": 48_974,
    "cache_traces/lirs__loop.trace.gz": 1_011,
    "cache_traces/lirs__multi1.trace.gz": 2_606,
    "cache_traces/lirs__multi2.trace.gz": 5_684,
    "cache_traces/lirs__ps.trace.gz": 3_083,
    "cache_traces/lirs__sprite.trace.gz": 7_075,
}
"""Keys, as the study of these files counted them."""


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_traces_are_read_whole(name: str, shared_data: Path) -> None:
    path = shared_data / name
    if not path.exists():
        pytest.skip(f"this trace isn't here ({path})")
    known, count, rules = RECORDED[name]
    trace = read([path], rules=Rules(**rules))
    assert (trace.format, trace.skipped) == (known, 0)
    assert len(trace.arrivals) == (count or len(trace.arrivals))
    before = 0.0
    keys, sessions = set(), set()
    for one in trace.arrivals:
        assert one.at >= before
        assert lengths_are_possible(one)
        before = one.at
        keys.add(one.key)
        sessions.add(one.session)
    if name in DISTINCT:
        assert len(keys) == DISTINCT[name]
    if name in SESSIONS:
        assert len(sessions) == SESSIONS[name]
