"""LMDB under real faults, by real processes."""

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from preheat.core.types import Epoch, Invalidation, Key
from preheat.errors import StoreError
from preheat.stores import lmdb_values
from preheat.stores.keeper import Keeper
from preheat.stores.lmdb import Lmdb
from preheat.stores.lmdb_env import Layout, Place, open_place
from preheat.stores.lmdb_values import Values
from preheat.stores.lmdb_writer import Writer

MIB = 1024 * 1024
BUDGET = 64 * MIB
KEYS = 40
ENDS_WITHIN_S = 10.0

pytestmark = pytest.mark.asyncio

# One process whose only business is to be hit. `hold` keeps both locks, `read` a snapshot.
CHILD = """
import asyncio, hashlib, random, sys, time
from pathlib import Path
import lmdb
from preheat.stores.lmdb import Lmdb

def say(word):
    print(word, flush=True)

async def write(folder, seed):
    rng = random.Random(seed)
    store = Lmdb(Path(folder), budget_bytes=64 << 20, queue_bytes=16 << 20)
    await store.start()
    say("writing")
    async def put():
        key = rng.randrange(40).to_bytes(16, "big")
        body = rng.randbytes(int(500 * 400 ** rng.random()))
        value = hashlib.blake2b(body, key=key, digest_size=16).digest() + body
        await store.put(key, value, time.time() + 600)
    while True:
        await asyncio.gather(*(put() for _ in range(8)))

def env_at(folder, name):
    return lmdb.open(f"{folder}/{name}", map_size=2**40, create=False, sync=False)

what, folder, *rest = sys.argv[1:]
if what == "write":
    asyncio.run(write(folder, int(rest[0])))
elif what == "hold":
    held = [env_at(folder, name).begin(write=True) for name in ("values", "board")]
    say("held")
elif what == "read":
    env = env_at(folder, "values")
    reader = env.begin()
    say("reading")
sys.stdin.read()
"""


@contextlib.contextmanager
def child(what: str, folder: Path, *rest: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has said that it is at it."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, what, str(folder), *map(str, rest)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait(ENDS_WITHIN_S)
        process.stdin.close()
        process.stdout.close()


class Events:
    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, object]]] = []

    def __call__(self, name: str, fields: dict[str, object]) -> None:
        self.told.append((name, fields))

    def names(self) -> list[str]:
        return [name for name, _ in self.told]


@asynccontextmanager
async def store_in(folder: Path, events: Events | None = None) -> AsyncIterator[Lmdb]:
    store = Lmdb(folder, budget_bytes=BUDGET, queue_bytes=16 * MIB, on_event=events or Events())
    await store.start()
    try:
        yield store
    finally:
        await store.aclose()


def key_of(number: int) -> Key:
    return Key(number.to_bytes(16, "big"))


def later() -> float:
    return time.time() + 600


def is_whole(key: bytes, value: bytes) -> bool:
    return hashlib.blake2b(value[16:], key=key, digest_size=16).digest() == value[:16]


async def until(holds: Callable[[], Any], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not await holds():
            await asyncio.sleep(0.05)


def works(store: Lmdb) -> Callable[[], Any]:
    """Whether a value can be put, read and told of; news is what notices replaced files."""

    async def holds() -> bool:
        try:
            await store.news(Epoch())
            await store.put(key_of(999), b"again", later())
            await store.publish(Invalidation(model="m"))
        except StoreError:
            return False
        return store.get_now([key_of(999)]) == [b"again"]

    return holds


async def test_writers_that_are_killed_leave_no_torn_value_and_right_sums(tmp_path: Path) -> None:
    rng = random.Random(5)
    keys = [key_of(number) for number in range(KEYS)]
    async with store_in(tmp_path) as store:
        for seed in range(12):
            with child("write", tmp_path, seed) as writer:
                kill_at = time.monotonic() + rng.random() * 0.15
                while time.monotonic() < kill_at:
                    for key, value in zip(keys, store.get_now(keys), strict=True):
                        assert value is None or is_whole(key, value)
                writer.kill()
                writer.wait(ENDS_WITHIN_S)
            await store.put(key_of(100 + seed), b"still going", later())
        found = store.get_now(keys)
        assert sum(value is not None for value in found) > KEYS // 2
        assert all(is_whole(k, v) for k, v in zip(keys, found, strict=True) if v is not None)
        assert store.torn == 0
        size = await store.size()
    with closing(opened(tmp_path)) as place, place.env.begin() as txn:
        rows = [(key[:1], len(key), len(value)) for key, value in txn.cursor()]
    values = [lmdb_values.cost_bytes(k - 1, v - 24) for kind, k, v in rows if kind == b"v"]
    assert (size.size_bytes, size.entries) == (sum(values), len(values))
    assert sum(kind == b"e" for kind, _, _ in rows) == len(values)
    assert sum(kind == b"a" for kind, _, _ in rows) == len(values)


def opened(folder: Path) -> Place:
    return open_place(folder, lmdb_values.layout(BUDGET), may_set_aside=True, on_event=Events())


async def test_a_stopped_process_with_the_lock_stops_nobody_who_reads(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:
        await store.put(key_of(1), b"one", later())
        with child("hold", tmp_path) as holder:
            holder.send_signal(signal.SIGSTOP)
            slowest_s = await _slowest_turn_while(_try_everything(store))
            assert slowest_s < 0.5  # the loop went on all the time
            assert store.get_now([key_of(1)]) == [b"one"]
            began_at = time.monotonic()
            with pytest.raises(StoreError) as caught:  # at once: the thread is stuck already
                await store.take(key_of(2), 5.0)
            assert caught.value.kind == "timeout"
            assert time.monotonic() - began_at < 0.05
        await until(works(store))
        # What nobody waited for any more was not done, or undone.
        with child("write", tmp_path, 1):
            assert await store.take(key_of(2), 5.0)


async def _try_everything(store: Lmdb) -> None:
    calls = [
        store.put(key_of(2), b"two", later()),
        store.delete([key_of(1)]),
        store.take(key_of(2), 5.0),
        store.release([key_of(2)]),
        store.publish(Invalidation()),
    ]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, StoreError) and one.kind == "timeout" for one in found), found


async def _slowest_turn_while(call: Any) -> float:
    task = asyncio.ensure_future(call)
    slowest_s = 0.0
    while not task.done():
        began_at = time.monotonic()
        await asyncio.sleep(0.005)
        slowest_s = max(slowest_s, time.monotonic() - began_at)
    await task
    return slowest_s


async def test_a_store_can_be_opened_while_a_stopped_process_has_the_locks(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:
        await store.put(key_of(1), b"one", later())
    with child("hold", tmp_path) as holder:
        holder.send_signal(signal.SIGSTOP)
        async with store_in(tmp_path) as store:
            assert store.get_now([key_of(1)]) == [b"one"]


async def test_a_lock_whose_holder_was_killed_is_free(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:
        with child("hold", tmp_path) as holder:
            holder.kill()
            holder.wait(ENDS_WITHIN_S)
            await store.put(key_of(1), b"one", later())
            assert await store.take(key_of(1), 5.0)


async def test_files_that_are_removed_under_a_running_store_are_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "l2"
    async with store_in(folder) as store:
        first = await store.publish(Invalidation())
        subprocess.run(["rm", "-rf", str(folder)], check=True, timeout=10)
        await until(works(store))
        news = await store.news(first)
        assert news.is_all
        assert news.epoch.generation != first.generation
    async with store_in(folder) as store:
        assert store.get_now([key_of(999)]) == [b"again"]


@pytest.mark.parametrize("name", ["values", "board"])
@pytest.mark.parametrize("what", ["garbage", "zeros", "truncated", "no-root"])
async def test_a_damaged_file_is_set_aside_at_the_start_and_said(
    tmp_path: Path, name: str, what: str
) -> None:
    async with store_in(tmp_path) as store:
        for number in range(40):
            await store.put(key_of(number), os.urandom(20_000), later())
            await store.publish(Invalidation(tags=frozenset(["t" * 400])))
    _damage(tmp_path / name / "data.mdb", what)
    events = Events()
    async with store_in(tmp_path, events) as store:
        assert events.names() == ["l2-set-aside"]
        await until(works(store))
    assert len(list(tmp_path.glob(f"{name}.damaged-*"))) == 1


def _damage(path: Path, what: str) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        match what:
            case "garbage":
                file.write(random.Random(1).randbytes(size))
            case "zeros":
                file.write(bytes(size))
            case "truncated":
                file.truncate(3 * 4096)
            case "no-root":  # only the two pages that LMDB reads when it opens are right
                file.seek(2 * 4096)
                file.write(bytes(size - 2 * 4096))


async def test_workers_that_start_at_once_set_a_damaged_file_aside_once(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:
        await store.put(key_of(1), b"one", later())
    _damage(tmp_path / "values" / "data.mdb", "garbage")
    with contextlib.ExitStack() as stack:
        starting = [
            asyncio.to_thread(stack.enter_context, child("write", tmp_path, seed))
            for seed in range(4)
        ]
        await asyncio.gather(*starting)
        assert len(list(tmp_path.glob("values.damaged-*"))) == 1


async def test_damage_met_while_running_is_an_error_until_the_keeper_has_acted(
    tmp_path: Path,
) -> None:
    # The keeper is another process, since LMDB's files are opened once in each.
    with child("write", tmp_path, 1), keeper_process(tmp_path):
        async with store_in(tmp_path) as store:
            store._values.condemn()
            with pytest.raises(StoreError) as caught:
                store.get_now([key_of(1)])
            assert caught.value.kind == "damaged"
            with pytest.raises(StoreError):
                await store.put(key_of(1), b"one", later())
            await until(works(store))
    assert len(list(tmp_path.glob("values.damaged-*"))) == 1


KEEPER = """
import sys, time
from pathlib import Path
from preheat.stores.keeper import Keeper
keeper = Keeper(Path(sys.argv[1]), 64 << 20, lambda *event: None)
keeper.start()
print("keeping", flush=True)
while True:
    keeper.tick()
    time.sleep(0.1)
"""


@contextlib.contextmanager
def keeper_process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", KEEPER, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait(ENDS_WITHIN_S)
        process.stdout.close()


async def test_a_file_that_gets_shorter_while_it_is_used_is_replaced(tmp_path: Path) -> None:
    with keeper_process(tmp_path):
        async with store_in(tmp_path) as store:
            for number in range(20):
                await store.put(key_of(number), os.urandom(20_000), later())
            store._checked_at = 0.0
            await store.news(Epoch())
            os.truncate(tmp_path / "values" / "data.mdb", 8_192)
            store._checked_at = 0.0  # the next look is now, not within a second
            await store.news(Epoch())
            await until(works(store))


async def test_repeated_crashes_by_bad_pages_set_the_values_aside(tmp_path: Path) -> None:
    events = Events()
    keeper = Keeper(tmp_path, BUDGET, events)
    keeper.start()
    for by_signal in (signal.SIGKILL, signal.SIGKILL, signal.SIGBUS):
        keeper.after_death(by_signal)
        keeper.tick()
    assert "l2-set-aside" not in events.names()
    keeper.after_death(signal.SIGSEGV)
    keeper.tick()
    assert events.names().count("l2-set-aside") == 1
    assert keeper.size().entries == 0
    keeper.close()


async def test_places_of_dead_readers_are_freed_and_their_pages_used_again(tmp_path: Path) -> None:
    events = Events()
    keeper = Keeper(tmp_path, BUDGET, events)
    keeper.start()
    with child("read", tmp_path) as reader:
        keeper.tick()
        assert keeper.reader_check() == 0
        reader.kill()
        reader.wait(ENDS_WITHIN_S)
        keeper.after_death(signal.SIGKILL)
    assert events.told == [("l2-readers-freed", {"count": 1})]
    keeper.close()


async def test_a_full_map_is_counted_room_is_made_and_the_value_kept(tmp_path: Path) -> None:
    budget = 8 * MIB  # more than the map holds, which the store's own layout never allows
    layout = Layout("values", 1, 4 * MIB, 0, lmdb_values.layout(budget).first_rows)
    writer: Writer[Values] = Writer(
        "l2-values",
        open=lambda: open_place(tmp_path, layout, may_set_aside=True, on_event=Events()),
        view=lambda txn: Values(txn, budget_bytes=budget, now=time.time()),
        relieve=lambda values: values.make_room(values.size_bytes * 3 // 4),
        queue_bytes=budget,
        limit_s=5.0,
    )
    await writer.start()
    for number in range(100):
        value = number.to_bytes(2, "big") * 50_000
        await writer.call(lambda values, n=number, v=value: values.put(key_of(n), v, later()))
        assert writer.place is not None
        assert lmdb_values.read(writer.place, [key_of(number)]) == ([value], 0)
    assert writer.map_full > 0
    with pytest.raises(StoreError) as caught:
        await writer.call(lambda values: values.put(key_of(0), bytes(5 * MIB), later()))
    assert caught.value.kind == "full"
    await writer.call(lambda values: values.put(key_of(0), b"small", later()))
    await writer.aclose(1.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    point = tmp_path / "disk"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "preheat-test", str(point)]
    done = subprocess.run(mount, capture_output=True, check=False, timeout=10)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True, timeout=10)


async def test_a_full_disk_costs_new_values_only_and_the_board_goes_on(
    small_disk: Path,
) -> None:
    events = Events()
    async with store_in(small_disk / "l2", events) as store:
        await until(works(store))
        (small_disk / "filler").write_bytes(bytes(8 * MIB))  # what others keep there
        kinds: set[str] = set()
        kept: list[int] = []
        for number in range(40):
            try:
                await store.put(key_of(number), number.to_bytes(1, "big") * 1_000_000, later())
                kept.append(number)
            except StoreError as error:
                kinds.add(error.kind)
        assert kinds == {"disk"}
        ((name, fields),) = events.told  # once, however many fail
        assert name == "l2-disk-full"
        assert fields["files"] == "l2-values"
        assert "the disk is full" in str(fields["why"])
        assert len(kept) >= 10
        found = store.get_now([key_of(number) for number in kept])
        values = [number.to_bytes(1, "big") * 1_000_000 for number in kept]
        assert all(one in {None, value} for one, value in zip(found, values, strict=True))
        assert sum(one is not None for one in found) >= 5
        assert await store.take(key_of(1), 5.0)
        await store.publish(Invalidation())
        (small_disk / "filler").unlink()
        await until(works(store))


async def test_the_loop_is_never_held_up_by_the_writer(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:

        async def fill() -> None:
            for turn in range(20):
                calls = (
                    store.put(key_of(turn * 20 + n), os.urandom(200_000), later())
                    for n in range(20)
                )
                await asyncio.gather(*calls)

        assert await _slowest_turn_while(fill()) < 0.25
