"""The request log, with a log process of its own: what is told is what is read, whoever is killed."""

import asyncio
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("pyarrow", reason="the request log needs the extra 'log'")

import pyarrow.parquet as pq

from preheat.core.types import NOTHING_SPECIAL, Ask, Check, Hit, Key, Request, RequestId, Want
from preheat.telemetry.requestlog import RequestFeed
from preheat.traces import own, spool
from preheat.traces.expansion import Expansion
from preheat.wire import journal
from preheat.wire.journal import Row
from preheat.wire.openai import Answer

SECRET = b"s" * 32
MARKER = "PLANTEDMARKER"
WITHIN_S = 20.0


class Source(msgspec.Struct):
    path: bytes
    body: bytes


class Log:
    """A log process and its folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder / "log"
        self.socket = folder / "s"
        self.errors = folder / "errors"
        self._command = [
            *(sys.executable, "-m", "preheat.host.logger", "--folder", str(self.folder)),
            *("--socket", str(self.socket), *options),
        ]
        self.child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it listens."""
        self.socket.unlink(missing_ok=True)
        with self.errors.open("ab") as errors:
            self.child = subprocess.Popen(self._command, stderr=errors)
        until(self._listens)

    def kill(self) -> None:
        assert self.child is not None
        self.child.kill()
        self.child.wait(WITHIN_S)

    def stop(self) -> None:
        assert self.child is not None
        self.child.send_signal(signal.SIGTERM)
        self.child.wait(WITHIN_S)

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.errors.read_text().splitlines()]

    def spools(self) -> list[Path]:
        return sorted(self.folder.glob("spool-*.arrows"))

    def parquets(self) -> list[Path]:
        return sorted(self.folder.glob("log-*.parquet"))

    def requests(self) -> dict[str, own.Logged]:
        found = list(own.requests(self.folder))
        assert [request.at_us for request in found] == sorted(r.at_us for r in found)
        assert len({request.id for request in found}) == len(found)
        return {request.id: request for request in found}

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0


def until(is_so: Callable[[], object], within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


async def soon(is_so: Callable[[], object], within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "it took too long"
        await asyncio.sleep(0.02)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with opened(tmp_path) as process:
        yield process


class opened:  # noqa: N801  (used like a function)
    def __init__(self, folder: Path, *options: str) -> None:
        self._log = Log(folder, *options)

    def __enter__(self) -> Log:
        self._log.start()
        return self._log

    def __exit__(self, *_: object) -> None:
        child = self._log.child
        assert child is not None
        if child.poll() is None:
            child.kill()
            child.wait(WITHIN_S)


@asynccontextmanager
async def feeding(log: Log, process: str = "aaaa-", **options: int) -> AsyncIterator["Worker"]:
    events: list[str] = []
    feed = RequestFeed(str(log.socket), process, SECRET, events.append, **options)
    feed.start()
    worker = Worker(feed, process, events)
    try:
        yield worker
    finally:
        await feed.aclose()


class Worker:
    """Tells a feed of requests, and remembers what it told."""

    def __init__(self, feed: RequestFeed, process: str, events: list[str]) -> None:
        self.feed = feed
        self.events = events
        self.told: dict[str, tuple[str, int]] = {}
        self._process = process
        self._number = 0
        self._asks: dict[int, tuple[Request, Source]] = {}

    def miss(self, prompt: int, output_tokens: int = 7) -> str:
        request, source = self._asked(prompt)
        row = Row("forward", "miss", "key-first-seen", 200, 5, output_tokens, 2, 40, 0.1, 0.2)
        row.engine_worker = "gpu-1:8000"
        name = self._next("forward", prompt)
        self.feed.row(self._number, request, source, row, time.monotonic(), 0.25)
        return name

    def hit(self, prompt: int, want: Want = NOTHING_SPECIAL, kept: Hit | None = None) -> str:
        request, source = self._asked(prompt)
        request = msgspec.structs.replace(request, want=want)
        name, now = self._next("exact", prompt), time.monotonic()
        if kept is None:
            self.feed.hit(self._number, request, HIT, source, now, 0.000_015)
        else:
            row = Row("exact", detail="l2")
            self.feed.kept(self._number, request, kept, source, row, now, 0.000_015)
        return name

    def _asked(self, prompt: int) -> tuple[Request, Source]:
        if prompt not in self._asks:
            ask = Ask(Key(b"%016d" % prompt), Check(b""), "m")
            source = Source(b"/v1/chat/completions", body_of(prompt))
            self._asks[prompt] = (Request(RequestId(b""), "t", "n", ask), source)
        return self._asks[prompt]

    def _next(self, layer: str, prompt: int) -> str:
        self._number += 1
        name = f"{self._process}{self._number:x}"
        self.told[name] = (layer, prompt)
        return name


HIT = Hit(
    Key(b"k" * 16),
    b"",
    0.0,
    3600.0,
    Answer(b'"usage":{"prompt_tokens":5,"completion_tokens":7}}', b"", b""),
    3600.0,
)


def body_of(prompt: int) -> bytes:
    """Prompts of a hundred conversations, each of which grows."""
    text = f"{MARKER} {prompt % 100} " + "x" * 1500
    turns = [{"role": "user", "content": f"{text} {turn}"} for turn in range(1 + prompt // 100)]
    return json.dumps({"model": "m", "messages": turns, "max_tokens": 64}).encode()


def check(log: Log, told: dict[str, tuple[str, int]]) -> dict[str, own.Logged]:
    """Whatever is in the log is as it was told, with its whole chain."""
    found = log.requests()
    chains: dict[int, bytes] = {}
    for name, request in found.items():
        layer, prompt = told[name]
        assert request.layer == layer
        assert request.fields["body_bytes"] == len(body_of(prompt))
        assert request.fields["key"] == b"%016d" % prompt
        assert request.fields["output_tokens"] == 7
        assert len(request.blocks) == request.fields["prompt_bytes"] // 512
        assert chains.setdefault(prompt, request.blocks.tobytes()) == request.blocks.tobytes()
    for prompt, chain in chains.items():
        if prompt + 100 in chains:
            assert chains[prompt + 100].startswith(chain)
    return found


@pytest.mark.asyncio
async def test_what_is_told_is_what_is_read_live_and_compacted(log: Log) -> None:
    async with feeding(log) as worker:
        for prompt in range(300):
            worker.miss(prompt)
        for turn in range(3_000):
            worker.hit(turn % 300)
            if turn % 500 == 0:
                await asyncio.sleep(0.1)
    until(lambda: len(log.requests()) == len(worker.told))
    live = check(log, worker.told)
    assert worker.feed.dropped == 0
    log.stop()
    assert not log.spools()
    (file,) = log.parquets()
    compacted = check(log, worker.told)
    assert live.keys() == compacted.keys()
    for name, request in live.items():
        assert request.fields == compacted[name].fields
        assert request.parent == compacted[name].parent
    about = pq.read_metadata(file).metadata
    assert about[b"preheat.log_version"] == b"1"


@pytest.mark.asyncio
async def test_what_was_sent_before_the_end_is_written_however_much_it_is(log: Log) -> None:
    async with feeding(log) as worker:
        await asyncio.sleep(0.3)
        for prompt in range(5_000):
            worker.miss(prompt)
        assert log.child is not None
        log.child.send_signal(signal.SIGTERM)  # it hasn't read a byte of them
    until(lambda: log.child.poll() is not None)
    assert check(log, worker.told).keys() == worker.told.keys()


@pytest.mark.asyncio
async def test_a_row_says_all_that_was_known(log: Log) -> None:
    async with feeding(log, worker=3) as worker:
        first = worker.miss(1)
        second = worker.hit(1)
        third = worker.hit(1, Want(session="s1", priority=-4, tags=("a", "b")))
    log.stop()
    found = log.requests()
    row = found[first].fields
    assert abs(found[first].at_us / 1e6 - time.time()) < 60
    expected = {
        "process": "aaaa-",
        "number": 1,
        "worker": 3,
        "tenant": "t",
        "namespace": "n",
        "model": "m",
        "path": "/v1/chat/completions",
        "stream": False,
        "sampled": False,
        "max_tokens": 64,
        "layer": "forward",
        "fwd": "miss",
        "detail": "key-first-seen",
        "provenance": "client",
        "status": 200,
        "engine_worker": "gpu-1:8000",
        "input_tokens": 5,
        "output_tokens": 7,
        "cached_tokens": 2,
        "answer_bytes": 40,
        "block_unit": "text-512",
        "embedding": None,
        "session": None,
        "shared_blocks": 0,
    }
    assert {name: row[name] for name in expected} == expected
    assert row["ttft_s"] == pytest.approx(0.1)
    assert row["service_s"] == pytest.approx(0.2)
    assert row["duration_s"] == pytest.approx(0.25)
    assert found[first].parent is None
    assert found[second].parent == first
    assert found[second].fields["detail"] == "exact"
    assert found[second].fields["cached_tokens"] is None
    special = found[third].fields
    assert (special["priority"], special["tags"]) == (-4, 2)
    assert len(special["session"]) == 8
    assert special["output_tokens"] == 7


@pytest.mark.asyncio
async def test_a_growing_conversation_names_the_turn_before_and_only_new_blocks(log: Log) -> None:
    async with feeding(log) as worker:
        names = [worker.miss(prompt) for prompt in (1, 101, 201)]
    log.stop()
    found = log.requests()
    assert [found[name].parent for name in names] == [None, *names[:2]]
    for before, after in pairwise(names):
        new = found[after].fields["new_blocks"]
        assert 0 < len(new) < len(found[after].blocks)
        assert found[after].fields["shared_blocks"] == len(found[before].blocks)


@pytest.mark.asyncio
async def test_hits_after_a_new_answer_have_its_lengths(log: Log) -> None:
    async with feeding(log) as worker:
        worker.miss(1, output_tokens=7)
        before = worker.hit(1)
        worker.miss(1, output_tokens=9)
        after = worker.hit(1)
        other = msgspec.structs.replace(
            HIT, answer=Answer(b'"usage":{"completion_tokens":3}}', b"", b"")
        )
        elsewhere = worker.hit(1, kept=other)
        later = worker.hit(1)
    log.stop()
    found = log.requests()
    assert found[before].fields["output_tokens"] == 7
    assert found[after].fields["output_tokens"] == 9
    assert found[elsewhere].fields["detail"] == "l2"
    assert found[elsewhere].fields["output_tokens"] == 3
    assert found[later].fields["output_tokens"] == 3
    assert found[after].blocks.tobytes() == found[before].blocks.tobytes()


@pytest.mark.asyncio
async def test_the_usage_of_a_very_long_stored_answer_is_not_looked_for(log: Log) -> None:
    async with feeding(log) as worker:
        usage = b'"usage":{"completion_tokens":3}'
        for prompt, size in ((1, 1_000_000), (2, 1_100_000)):
            body = usage + b',"x":"' + b"x" * size + b'"}'
            long = msgspec.structs.replace(HIT, answer=Answer(body, b"", b""))
            worker.hit(prompt, kept=long)
    log.stop()
    told = [request.fields["output_tokens"] for request in log.requests().values()]
    assert told == [3, None]


@pytest.mark.asyncio
async def test_a_refusal_has_a_row_though_nothing_could_be_read(log: Log) -> None:
    async with feeding(log) as worker:
        source = Source(b"/v1/completions", b"{")
        row = Row("refused", detail="invalid-json", status=400, answer_bytes=90)
        worker.feed.refusal(1, "t", source, row, time.monotonic(), 0.001)
    log.stop()
    (request,) = log.requests().values()
    assert request.fields["status"] == 400
    assert request.fields["path"] == "/v1/completions"
    assert request.fields["key"] is None
    assert len(request.blocks) == 0


@pytest.mark.asyncio
async def test_a_killed_log_process_takes_at_most_a_second_along(log: Log) -> None:
    sent_at: dict[str, float] = {}
    async with feeding(log) as worker:
        await asyncio.sleep(0.3)
        for turn in range(200):
            name = worker.miss(turn) if turn % 4 == 0 else worker.hit(turn - turn % 4)
            sent_at[name] = time.monotonic()
            if turn == 120:
                killed_at = time.monotonic()
                log.kill()
                restarting = asyncio.create_task(asyncio.to_thread(log.start))
            await asyncio.sleep(0.015)
        await restarting
        await soon(lambda: worker.events[-2:] == ["request-log-away", "request-log-back"])
    log.stop()
    found = check(log, worker.told)
    lost = worker.told.keys() - found.keys()
    assert all(killed_at - 1 < sent_at[name] < killed_at + 0.5 for name in lost)
    assert len(found) > 100
    assert not log.spools()


_WORKER = """
import asyncio, sys, time
from pathlib import Path

sys.path[:0] = sys.argv[2:]
from test_request_log import Log, feeding

async def main():
    async with feeding(Log(Path(sys.argv[1]))) as worker:
        for turn in range(100_000):
            name = worker.hit(0) if turn else worker.miss(0)
            print(name, time.time(), flush=True)
            await asyncio.sleep(0.01)

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_a_killed_worker_takes_at_most_a_second_along(log: Log) -> None:
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    command = [sys.executable, "-c", _WORKER, str(log.socket.parent), *folders]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            lines = [child.stdout.readline() for _ in range(150)]
        finally:
            child.kill()
        lines += child.stdout.read().splitlines()
    log.stop()
    sent = [(name.decode(), float(at)) for name, at in map(bytes.split, lines)]
    found = log.requests()
    assert {name for name, at in sent if at < sent[-1][1] - 1} <= found.keys()


@pytest.mark.asyncio
async def test_the_log_process_ends_with_the_workers_when_its_owner_is_killed(
    tmp_path: Path,
) -> None:
    ours, theirs = os.pipe()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen()
    fds = (ours, listening.fileno())
    command = [
        *(sys.executable, "-m", "preheat.host.logger", "--folder", str(tmp_path / "log")),
        *("--listen-fd", str(fds[1]), "--lifeline-fd", str(fds[0])),
    ]
    child = subprocess.Popen(command, pass_fds=fds, stderr=subprocess.DEVNULL)
    try:
        os.close(ours)
        log = Log(tmp_path)
        async with feeding(log) as worker:
            worker.miss(1)
            await soon(lambda: list(log.folder.glob("spool-*")))
            os.close(theirs)
            worker.hit(1)
            await asyncio.sleep(0.6)
            assert child.poll() is None  # somebody still talks
        await soon(lambda: child.poll() is not None)
    finally:
        listening.close()
        if child.poll() is None:
            child.kill()
        child.wait(WITHIN_S)
    assert len(check(log, worker.told)) == 2


@pytest.mark.asyncio
async def test_a_torn_spool_is_read_up_to_where_it_is_torn(log: Log) -> None:
    async with feeding(log) as worker:
        for turn in range(4):
            worker.miss(turn)
            await asyncio.sleep(0.6)
    until(lambda: len(log.requests()) == 4)
    log.kill()
    (path,) = log.spools()
    content = path.read_bytes()
    for cut in (1, 100, 300):
        path.write_bytes(content[:-cut])
        assert len(check(log, worker.told)) == 3
    path.write_bytes(content[:-1])
    log.start()
    until(log.parquets)
    log.stop()
    assert "request-log-torn" in log.events()
    assert len(check(log, worker.told)) == 3


@pytest.mark.asyncio
async def test_a_spool_that_was_compacted_but_not_deleted_is_not_read_twice(log: Log) -> None:
    async with feeding(log) as worker:
        worker.miss(1)
        worker.hit(1)
    until(lambda: len(log.requests()) == 2)
    log.kill()
    (path,) = log.spools()
    expansion = Expansion(spool.read(path)[0])
    own.write(expansion, log.folder / own.name_of(expansion), path.name)
    assert len(check(log, worker.told)) == 2
    log.start()
    until(lambda: not log.spools())
    assert len(log.parquets()) == 1
    assert len(check(log, worker.told)) == 2


@pytest.mark.asyncio
async def test_a_file_is_made_so_often_and_each_makes_sense_by_itself(tmp_path: Path) -> None:
    with opened(tmp_path, "--roll-s", "0.5") as log:
        async with feeding(log) as worker:
            for turn in range(3):
                worker.miss(1 + 100 * turn)
                worker.hit(1)
                await asyncio.sleep(1.0)
        log.stop()
        assert len(log.parquets()) >= 3
        check(log, worker.told)
        assert len(log.requests()) == 6
        for path in log.parquets():
            rows = list(own.logged(pq.read_table(path)))
            names = {row.id for row in rows}
            assert all(row.parent is None or row.parent in names for row in rows)


@pytest.mark.asyncio
async def test_old_files_go_but_not_those_that_are_read(tmp_path: Path) -> None:
    options = ("--roll-s", "0.3", "--bytes", "30000")
    with opened(tmp_path, *options) as log:
        async with feeding(log) as worker:
            worker.miss(1)
            await soon(log.parquets)
            first = log.parquets()[0]
            with first.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                for turn in range(2, 8):
                    worker.miss(turn)
                    await asyncio.sleep(0.6)
                assert first.exists()
            worker.miss(9)
            await soon(lambda: not first.exists())
            await soon(lambda: sum(path.stat().st_size for path in log.parquets()) <= 30_000)
        assert log.requests()
        assert "request-log-deleted" in log.events()


@pytest.mark.asyncio
async def test_files_that_are_too_old_go(log: Log) -> None:
    async with feeding(log) as worker:
        worker.miss(1)
    log.stop()
    (old,) = log.parquets()
    os.utime(old, (time.time() - 31 * 86_400,) * 2)
    log.start()
    async with feeding(log, "bbbb-") as worker:
        worker.miss(2)
    log.stop()
    assert old not in log.parquets()
    assert len(log.parquets()) == 1


@pytest.mark.asyncio
async def test_workers_share_a_file(log: Log) -> None:
    async with feeding(log, "aaaa-") as one, feeding(log, "bbbb-", worker=1) as other:
        for prompt in range(50):
            one.miss(prompt)
            await asyncio.sleep(0)
            other.hit(prompt)
    log.stop()
    told = one.told | other.told
    found = check(log, told)
    assert found.keys() == told.keys()
    assert {request.fields["worker"] for request in found.values()} == {0, 1}
    parents = [request.parent for name, request in found.items() if name.startswith("bbbb-")]
    assert all(parent is not None for parent in parents)


@pytest.mark.asyncio
async def test_a_worker_describes_anew_when_it_has_described_too_many(log: Log) -> None:
    async with feeding(log, most_asks=10) as worker:
        for turn in range(100):
            worker.miss(turn % 25)
            worker.hit((turn * 7) % 25)
    log.stop()
    assert check(log, worker.told).keys() == worker.told.keys()


@pytest.mark.asyncio
async def test_while_nobody_reads_rows_wait_up_to_a_bound_and_are_counted(tmp_path: Path) -> None:
    log = Log(tmp_path)
    async with feeding(log, waiting_bytes=20_000) as worker:
        for turn in range(1_000):
            worker.miss(turn % 100)
            worker.hit(turn % 100)
        await asyncio.sleep(0.5)
        assert worker.events == ["request-log-away"]
        dropped = worker.feed.dropped
        assert 0 < dropped < 2_000
        assert len(worker.feed._waiting) < 40_000
        await asyncio.to_thread(log.start)
        await soon(lambda: "request-log-back" in worker.events)
        last = worker.hit(0)
    log.stop()
    found = check(log, worker.told)
    assert last in found
    assert len(found) == 2_001 - dropped


@pytest.mark.asyncio
async def test_a_full_disk_drops_rows_counts_them_and_goes_on(log: Log) -> None:
    assert log.child is not None
    async with feeding(log) as worker:
        before = worker.miss(1)
        await soon(lambda: before in log.requests())
        limit = log.spools()[0].stat().st_size + 100
        # A limit on the size of files: the nearest to a full disk that needs no privileges.
        _, hard = resource.prlimit(log.child.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(log.child.pid, resource.RLIMIT_FSIZE, (limit, hard))
        lost = worker.miss(2)
        await soon(lambda: worker.feed.dropped == 1)
        resource.prlimit(log.child.pid, resource.RLIMIT_FSIZE, (hard, hard))
        after = [worker.hit(2), worker.hit(1)]
        await soon(lambda: set(after) <= log.requests().keys())
    log.stop()
    found = check(log, worker.told)
    assert lost not in found
    assert found.keys() == {before, *after}
    assert [name for name in log.events() if "lost" in name or "again" in name] == [
        "request-log-lost",
        "request-log-written-again",
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["the folder", "the spool", "the socket"])
async def test_files_that_are_removed_are_noticed_and_a_new_process_makes_them(
    log: Log, what: str
) -> None:
    assert log.child is not None
    async with feeding(log) as worker:
        before = worker.miss(1)
        await soon(lambda: before in log.requests())
        await asyncio.sleep(1.1)  # by then it is known to be there
        paths = {"the folder": log.folder, "the spool": log.spools()[0], "the socket": log.socket}
        subprocess.run(["rm", "-rf", paths[what]], check=True, timeout=10)
        during = [worker.hit(1), worker.miss(2)]
        await soon(lambda: log.child.poll() is not None, within_s=3.0)
        assert log.child.returncode == 1
        lost = [] if what == "the socket" else during
        await soon(lambda: "request-log-away" in worker.events)
        assert worker.feed.dropped == len(lost)
        waited = worker.hit(1)
        await asyncio.to_thread(log.start)
        await soon(lambda: "request-log-back" in worker.events)
        after = [worker.miss(3), worker.hit(2)]
        await soon(lambda: {waited, *after} <= log.requests().keys())
    log.stop()
    kept = {before, *during} if what == "the socket" else set()
    assert check(log, worker.told).keys() == {*kept, waited, *after}
    told = [json.loads(line) for line in log.errors.read_text().splitlines()]
    (gone,) = [line for line in told if line["event"] == "request-log-folder-gone"]
    assert gone["rows"] == len(lost)
    assert not {line["event"] for line in told} & {"request-log-not-compacted", "bug"}


@pytest.mark.asyncio
async def test_compaction_outlives_whatever_goes_wrong_in_it(tmp_path: Path) -> None:
    with opened(tmp_path, "--roll-s", "0.5") as log:
        assert log.child is not None
        async with feeding(log) as worker:
            worker.miss(1)
            await soon(log.spools)
            limits = resource.prlimit(log.child.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(log.child.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
            await soon(lambda: "bug" in log.events())  # no folder can be listed
            resource.prlimit(log.child.pid, resource.RLIMIT_NOFILE, limits)
            worker.miss(2)
            await soon(log.parquets)
    assert "request-log-not-compacted" in log.events()


@pytest.mark.asyncio
async def test_no_text_reaches_the_files(log: Log) -> None:
    async with feeding(log) as worker:
        worker.miss(1)
        worker.hit(1, Want(session=MARKER))
        await asyncio.sleep(0.6)
        for path in log.folder.iterdir():
            assert MARKER.encode() not in path.read_bytes()
    log.stop()
    (path,) = log.parquets()
    assert MARKER.encode() not in path.read_bytes()
    assert MARKER not in str(pq.read_table(path).to_pylist())


@pytest.mark.asyncio
async def test_whoever_speaks_otherwise_is_cut_off_and_harms_nobody(log: Log) -> None:
    hello = journal.Hello(99, "zzzz-", 0, "9", "text-512")
    said = journal.frame(journal.HELLO, msgspec.msgpack.encode(hello))
    hits = journal.frame(journal.HITS, b"1234")
    async with feeding(log) as worker:
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", said, hits, journal.FRAME.pack(2**31, b"H")):
            reader, writer = await asyncio.open_unix_connection(str(log.socket))
            writer.write(nonsense)
            assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
            writer.close()
        worker.miss(1)
    log.stop()
    assert check(log, worker.told).keys() == worker.told.keys()


def test_one_folder_has_one_log_process(log: Log, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "preheat.host.logger", "--folder", str(log.folder)),
        *("--socket", str(tmp_path / "other")),
    ]
    second = subprocess.run(command, capture_output=True, timeout=WITHIN_S, check=False)
    assert second.returncode == 1
    told = json.loads(second.stderr)
    assert told["event"] == "request-log-refused"
    assert "another process writes" in told["why"]
    assert "log.path" in told["remedy"]


@pytest.mark.parametrize("place", ["the folder", "the socket"])
def test_a_log_process_that_cannot_begin_says_why_in_a_line(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "log"
    folder, door = (inside, tmp_path / "s") if place == "the folder" else (tmp_path, inside)
    command = [sys.executable, "-m", "preheat.host.logger"]
    done = subprocess.run(
        [*command, "--folder", str(folder), "--socket", str(door)],
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 1
    told = json.loads(done.stderr)
    assert told["event"] == "request-log-refused"
    assert "Not a directory" in told["why"]
    assert "log.path" in told["remedy"]


@pytest.mark.parametrize("read", [own.requests, own.tables])
def test_a_log_that_is_not_there_is_no_empty_one(read: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no request log is here; log\.enabled"):
        read(tmp_path / "nothing")
    assert list(read(tmp_path)) == []


@pytest.mark.parametrize("package", ["numpy", "pyarrow"])
def test_without_the_extra_reading_and_writing_say_how_to_get_it(
    package: str, tmp_path: Path
) -> None:
    hide = f"import sys; sys.modules[{package!r}] = None; "
    done = subprocess.run(
        [sys.executable, "-c", hide + "from preheat.traces import own"],
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert b"ImportError: " in done.stderr
    assert b"pip install 'preheat[log]'" in done.stderr
    done = subprocess.run(
        [sys.executable, "-c", hide + "import preheat.host.logger"],
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 1
    told = json.loads(done.stderr)
    assert (told["event"], told["remedy"]) == ("request-log-refused", "pip install 'preheat[log]'")


def test_nothing_that_answers_requests_imports_pyarrow() -> None:
    code = (
        "import sys, preheat.telemetry.requestlog, preheat.core.blocks, preheat.gateway.assembly\n"
        "print({'pyarrow', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
