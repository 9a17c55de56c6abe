"""Our own request log as a trace: Parquet files, the spool beside them, and what is left out."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("pyarrow", reason="the request log needs the extra 'log'")

import pyarrow as pa
import pyarrow.parquet as pq

from preheat.errors import TraceError
from preheat.traces import own, spool
from preheat.traces.arrival import UNKNOWN
from preheat.traces.expansion import Expansion
from preheat.traces.reading import read
from preheat.traces.writing import write
from preheat.wire import journal
from trace_examples import small_trace

NOON_US = 1_767_355_200_000_000


class Log:
    """Writes a spool as the log process would, from what one worker says."""

    def __init__(self, folder: Path, process: str = "aaaa-") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        hello = journal.Hello(journal.VERSION, process, 0, "0.1", "text-512")
        self._voice = spool.Voice(hello, msgspec.msgpack.encode(hello))
        self._recorder = spool.Recorder()
        self._recorder.join(self._voice)
        self.path = folder / f"spool-{process}.arrows"
        self._spool = spool.Spool(self.path)
        self._asks = self._rows = 0

    def ask(self, blocks: list[int], prompt_bytes: int, **about: Any) -> int:
        said = msgspec.msgpack.encode(
            journal.About(
                **{
                    "tenant": "t",
                    "model": "m",
                    "path": "/v1/chat/completions",
                    "key": bytes([self._asks + 1]) * 16,
                    "prompt_bytes": prompt_bytes,
                    **about,
                }
            )
        )
        hashes = b"".join(block.to_bytes(8, "little") for block in blocks)
        head = journal.ASK_HEAD.pack(self._asks, len(said))
        self._recorder.hear(self._voice, journal.ASK, head + journal.NO_FACTS + said + hashes)
        self._asks += 1
        return self._asks - 1

    def row(self, at_s: float, ask: int, duration_s: float = 1.0, **row: Any) -> None:
        at_us = NOON_US + round(at_s * 1e6)
        head = journal.ROW_HEAD.pack(at_us, self._rows, ask, duration_s)
        told = journal.Row(**{"layer": "forward", "answer_bytes": 50, **row})
        self._recorder.hear(self._voice, journal.ROW, head + msgspec.msgpack.encode(told))
        self._rows += 1

    def save(self) -> None:
        batch, _ = self._recorder.take()
        self._spool.write(batch)
        self._recorder.keep()

    def compact(self) -> Path:
        """As a Parquet file, in place of the spool."""
        expansion = Expansion(spool.read(self.path)[0])
        path = self.path.with_name(own.name_of(expansion))
        own.write(expansion, path, self.path.name)
        self.path.unlink()
        return path


BIG = 2**63 + 5


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Two turns of a session, a hit, a request of somebody else, and what isn't an arrival."""
    found = Log(tmp_path / "log")
    first = found.ask([BIG, 2, 3], 3 * 512 + 100)
    second = found.ask([BIG, 2, 3, 4, 5], 5 * 512)
    other = found.ask([77], 512 + 3, tenant="u", key=b"", sampled=True)
    session = b"12345678"
    found.row(0, first, input_tokens=400, output_tokens=9, ttft_s=0.25, session=session)
    found.row(0.5, first, layer="forward", provenance="refresh")
    found.row(7, second, input_tokens=640, output_tokens=5, session=session)
    found.row(8, first, layer="exact", input_tokens=400, output_tokens=9)
    found.row(9, other, status=503, output_tokens=None)
    found.row(9.5, other, layer="", detail="invalid-json", status=400)
    found.save()
    return found


@pytest.mark.parametrize("form", ["spool", "parquet"])
def test_requests_are_arrivals(form: str, log: Log) -> None:
    path = log.path if form == "spool" else log.compact()
    for trace in (read([path]), read([path.parent])):
        assert (trace.format, trace.times, trace.skipped) == ("preheat", "measured", 0)
        first, second, hit, other = trace.arrivals
        assert [one.at for one in trace.arrivals] == [0.0, 7.0, 8.0, 9.0]
        assert first.id == "aaaa-0"
        assert first.blocks[:3] == second.blocks[:3] == hit.blocks[:3]
        assert first.blocks == hit.blocks
        assert (len(first.blocks), len(second.blocks), len(other.blocks)) == (4, 5, 1)
        assert not set(other.blocks) & set(first.blocks)
        assert all(0 <= block < 20 for one in trace.arrivals for block in one.blocks)
        assert (first.key, second.key, hit.key, other.key) == (0, 1, 0, UNKNOWN)
        assert first.session == second.session == b"12345678".hex()
        assert (first.turn, second.turn, second.think_s) == (0, 1, 6.0)
        assert (first.ttft_s, second.ttft_s) == (0.25, UNKNOWN)
        assert (other.tenant, other.stop, other.sampled) == ("u", "status-503", True)
        assert other.output_tokens == UNKNOWN
        assert first.kind == "/v1/chat/completions"
        assert any("left out" in rule for rule in trace.rules)


def test_tokens_are_those_that_were_counted_or_the_mean(log: Log) -> None:
    trace = read([log.path])
    known = 2 * 400 + 640
    size = 2 * (3 * 512 + 100) + 5 * 512
    assert trace.block_tokens == round(512 * known / size)
    assert trace.arrivals[0].input_tokens == 400
    assert trace.arrivals[3].input_tokens == round(515 * known / size)


def test_partitions_and_the_live_spool_are_merged_in_order(log: Log, tmp_path: Path) -> None:
    log.compact()
    day = Log(tmp_path / "log" / "day=2", "bbbb-")
    ask = day.ask([BIG, 2, 9], 3 * 512)
    day.row(3, ask)
    day.row(11, ask)
    day.save()
    trace = read([tmp_path / "log"])
    assert [one.at for one in trace.arrivals] == [0.0, 3.0, 7.0, 8.0, 9.0, 11.0]
    assert trace.arrivals[1].blocks[:2] == trace.arrivals[0].blocks[:2]
    assert [one.id for one in trace.arrivals if one.id.startswith("bbbb")] == ["bbbb-0", "bbbb-1"]


def test_a_spool_of_which_there_is_a_parquet_file_is_not_read_twice(log: Log) -> None:
    content = log.path.read_bytes()
    log.compact()
    log.path.write_bytes(content)
    assert len(read([log.path.parent]).arrivals) == 4


def test_a_torn_spool_gives_its_whole_batches(log: Log) -> None:
    ask = log.ask([1], 600)
    log.row(20, ask)
    log.save()
    assert len(read([log.path]).arrivals) == 5
    log.path.write_bytes(log.path.read_bytes()[:-40])
    assert len(read([log.path]).arrivals) == 4


def test_a_damaged_file_is_told_and_the_others_are_read(log: Log, tmp_path: Path) -> None:
    log.compact()
    broken = tmp_path / "log" / "log-20260102T000000.000000-x.parquet"
    broken.write_bytes(b"PAR1" + bytes(50))
    trace = read([tmp_path / "log"])
    assert len(trace.arrivals) == 4
    assert [(bad.path, bad.line) for bad in trace.bad] == [(str(broken), 1)]
    with pytest.raises(TraceError, match="cut off or damaged"):
        read([tmp_path / "log"], on_bad="fail")


@pytest.mark.parametrize("form", ["log", "written"])
def test_damage_anywhere_is_told_and_never_a_traceback(form: str, log: Log, tmp_path: Path) -> None:
    path = tmp_path / "written.parquet"
    if form == "log":
        path = log.compact()
    else:
        write(small_trace(), path)
    whole, told = path.read_bytes(), 0
    for seed in range(400):
        path.write_bytes(mutated(whole, random.Random(seed)))
        try:
            read([path])
        except TraceError:
            told += 1
    assert 300 < told < 400  # and some changes hurt nobody


def mutated(whole: bytes, chance: random.Random) -> bytes:
    """Up to three bytes changed, dropped or put in: half of them in the second half, where Parquet
    says what is where."""
    data = bytearray(whole)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(chance.choice((0, len(data) // 2)), len(data))
        kind = chance.random()
        if kind < 0.7:
            data[place] = chance.randrange(256)
        elif kind < 0.85:
            del data[place : place + chance.randint(1, 8)]
        else:
            data[place:place] = chance.randbytes(chance.randint(1, 8))
    return bytes(data)


def test_columns_of_other_types_are_read_as_the_logs(log: Log) -> None:
    path = log.compact()
    before = read([path]).arrivals
    table = pq.read_table(path)
    plain = [
        column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        for column in table.columns
    ]
    pq.write_table(pa.table(plain, table.schema.names), path)
    assert read([path]).arrivals == before
    broken = table.set_column(0, "at", pa.array(["noon"] * len(table)))
    pq.write_table(broken, path)
    with pytest.raises(TraceError, match="cut off or damaged"):
        read([path], on_bad="fail")


def test_what_is_written_is_a_log_to_others(tmp_path: Path) -> None:
    trace = small_trace()
    path = tmp_path / "log-20260102T000000.000000-x.parquet"
    write(trace, path)
    schema = pq.read_schema(path)
    assert schema.names[: len(own.SCHEMA.names)] == own.SCHEMA.names
    assert [schema.field(name).type for name in own.SCHEMA.names] == own.SCHEMA.types
    logged = list(own.requests(tmp_path))
    assert [tuple(request.blocks) for request in logged] == [
        one.blocks[: one.input_tokens // 100] for one in trace.arrivals
    ]
    assert [path.name for path in tmp_path.iterdir()] == [path.name]  # nothing half written


def test_an_answer_as_long_as_it_was_allowed_to_be_is_cut_off(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    limited, free = log.ask([1], 600, max_tokens=9), log.ask([2], 600)
    for at_s, (ask, said) in enumerate([(limited, 9), (limited, 8), (limited, None), (free, 9)]):
        log.row(at_s, ask, input_tokens=400, output_tokens=said)
    log.save()
    assert [one.stop for one in read([log.path]).arrivals] == ["length", "", "", ""]


def test_a_log_and_a_written_trace_are_not_mixed(log: Log, tmp_path: Path) -> None:
    write(small_trace(), tmp_path / "trace.parquet")
    with pytest.raises(TraceError, match="mixed"):
        read([log.path, tmp_path / "trace.parquet"])
