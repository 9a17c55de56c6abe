"""The LMDB store by itself: budget, order of eviction, indexes, bounds, the keeper's work."""

import asyncio
import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.core.types import Epoch, Invalidation, Key
from preheat.errors import ConfigError, StoreError
from preheat.stores import lmdb_board, lmdb_values
from preheat.stores.keeper import Keeper
from preheat.stores.lmdb import Lmdb
from preheat.stores.lmdb_board import Board
from preheat.stores.lmdb_env import Layout, Place, file_system_of, open_place
from preheat.stores.lmdb_holder import Holder, myself
from preheat.stores.lmdb_values import Values, cost_bytes
from preheat.stores.secret import secret_at

MIB = 1024 * 1024
BUDGET = 4 * MIB
NOW = 1_000_000.0
LONG = NOW + 3600


def ignore(_name: str, _fields: dict[str, object]) -> None: ...


def key_of(number: int) -> Key:
    return Key(number.to_bytes(16, "big"))


@asynccontextmanager
async def store_in(folder: Path) -> AsyncIterator[Lmdb]:
    store = Lmdb(folder, budget_bytes=64 * MIB, queue_bytes=16 * MIB)
    await store.start()
    try:
        yield store
    finally:
        await store.aclose()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    opened = open_place(tmp_path, lmdb_values.layout(BUDGET), may_set_aside=True, on_event=ignore)
    with closing(opened):
        yield opened


@contextmanager
def values_at(place: Place, now: float = NOW, budget: int = BUDGET) -> Iterator[Values]:
    with place.env.begin(write=True) as txn:
        values = Values(txn, budget_bytes=budget, now=now)
        yield values
        values.close()


def keys_in(place: Place, kind: bytes) -> list[bytes]:
    with place.env.begin() as txn:
        rows = [key for key, _ in txn.cursor() if key[:1] == kind]
    return [key[-16:] for key in rows]


def used_bytes(place: Place) -> int:
    """What is really taken of the file: pages up to the last one, without the free ones."""
    with place.env.begin() as txn:
        stat_ = txn.stat()
    return stat_["psize"] * sum(
        stat_[name] for name in ("branch_pages", "leaf_pages", "overflow_pages")
    )


def check_books(place: Place) -> None:
    """The sums and both indexes say what is there."""
    with place.env.begin() as txn:
        rows = [(key[1:], value) for key, value in txn.cursor() if key[:1] == b"v"]
        size_bytes, entries = lmdb_values.sums(txn)
    assert entries == len(rows)
    assert size_bytes == sum(cost_bytes(len(key), len(value) - 24) for key, value in rows)
    for kind in (b"e", b"a"):
        assert sorted(keys_in(place, kind)) == sorted(key for key, _ in rows)


moves = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.one_of(st.none(), st.integers(0, 5_000), st.integers(50_000, 900_000)),
        st.integers(-5, 50),
    ),
    max_size=40,
)


@given(moves)
@settings(max_examples=60, deadline=None)
def test_the_books_balance_and_stay_within_the_budget_whatever_is_done(
    moves: list[tuple[int, int | None, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        layout = lmdb_values.layout(BUDGET)
        with closing(
            open_place(Path(folder), layout, may_set_aside=True, on_event=ignore)
        ) as place:
            for turn, (number, size, life) in enumerate(moves):
                with values_at(place, NOW + turn) as values:
                    if size is None:
                        values.delete(key_of(number))
                    else:
                        values.put(key_of(number), b"v" * size, NOW + turn + life)
                    assert values.size_bytes <= BUDGET
            check_books(place)


@pytest.mark.parametrize("size", [100, 700, 1_300, 1_990, 2_020, 5_000, 60_000])
def test_what_is_booked_covers_what_the_file_really_needs(place: Place, size: int) -> None:
    rng = random.Random(size)
    for turn in range(600):
        with values_at(place, NOW + turn) as values:
            for _ in range(20):
                values.put(Key(rng.randbytes(16)), b"v" * size, LONG + turn)
    with place.env.begin() as txn:
        booked, _ = lmdb_values.sums(txn)
    assert used_bytes(place) <= BUDGET * 1.02
    assert booked <= BUDGET
    assert used_bytes(place) > BUDGET // 3  # and not so much that the budget is wasted


def test_the_expired_go_first_and_then_the_oldest(place: Place) -> None:
    for number, life in enumerate([3600, 10, 3600, 3600]):
        with values_at(place, NOW + number) as values:
            values.put(key_of(number), b"v" * (MIB - 8_192), NOW + life)
    with values_at(place, NOW + 60) as values:
        values.put(key_of(9), b"v" * (MIB // 2), LONG)
    assert set(keys_in(place, b"v")) == {key_of(n) for n in (2, 3, 9)} | {key_of(0)}
    with values_at(place, NOW + 61) as values:
        values.put(key_of(10), b"v" * (MIB - 8_192), LONG)
    assert set(keys_in(place, b"v")) == {key_of(n) for n in (2, 3, 9, 10)}


def test_a_value_larger_than_the_budget_is_refused_and_harms_no_other(place: Place) -> None:
    with values_at(place) as values:
        values.put(key_of(1), b"v", LONG)
        with pytest.raises(StoreError) as caught:
            values.put(key_of(2), b"v" * (BUDGET + 1), LONG)
        assert caught.value.kind == "too-large"
    assert keys_in(place, b"v") == [key_of(1)]


def test_an_eviction_ends_when_its_time_is_over(place: Place) -> None:
    with values_at(place) as values:
        for number in range(1_000):
            values.put(key_of(number), b"v" * 100, NOW - 1)
    with values_at(place) as values:
        assert not values.evict(0, until=time.monotonic() - 1)
        assert 0 < values.entries < 1_000
        assert values.evict(0, until=time.monotonic() + 60)
        assert values.entries == 0
    check_books(place)


@pytest.mark.parametrize("expires_at", [float("inf"), -5.0, 1e300])
def test_any_expiry_can_be_kept(place: Place, expires_at: float) -> None:
    with values_at(place) as values:
        values.put(key_of(1), b"v", expires_at)
    check_books(place)


# The store ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_only_the_owner_can_read_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "l2"
    async with store_in(folder):
        for path in [folder, *folder.rglob("*")]:
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.asyncio
async def test_a_full_queue_refuses_at_once_and_not_for_ever(tmp_path: Path) -> None:
    store = Lmdb(tmp_path, budget_bytes=64 * MIB, queue_bytes=3 * MIB)
    await store.start()
    calls = [store.put(key_of(n), b"v" * MIB, time.time() + 60) for n in range(10)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    refused = [one for one in found if one is not None]
    assert 0 < len(refused) < 10
    assert all(isinstance(one, StoreError) and one.kind == "queue" for one in refused)
    await store.put(key_of(11), b"v" * MIB, time.time() + 60)
    await store.aclose()


@pytest.mark.asyncio
async def test_a_key_that_can_not_be_stored_is_a_store_error(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:
        for key in (Key(b""), Key(b"k" * 600)):
            with pytest.raises(StoreError):
                await store.put(key, b"v", time.time() + 60)
        assert store.get_now([Key(b"k" * 600)]) == [None]
        await store.put(key_of(1), b"v", time.time() + 60)
        assert store.get_now([key_of(1)]) == [b"v"]


@pytest.mark.asyncio
async def test_no_thread_and_no_open_file_is_left_after_closing(tmp_path: Path) -> None:
    async def use() -> None:
        async with store_in(tmp_path) as store:
            await store.put(key_of(1), b"v", time.time() + 60)
            await store.take(key_of(1), 10.0)

    await use()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        await use()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    async with asyncio.timeout(5):
        while any(thread.name.startswith("l2-") for thread in threading.enumerate()):
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_a_value_that_is_not_what_was_put_is_a_miss_and_has_the_files_set_aside(
    tmp_path: Path,
) -> None:
    with closing(
        open_place(tmp_path, lmdb_values.layout(64 * MIB), may_set_aside=True, on_event=ignore)
    ) as place:
        with values_at(place, time.time(), 64 * MIB) as values:
            values.put(key_of(1), b"right", time.time() + 60)
        with place.env.begin(write=True) as txn:
            row = txn.get(b"v" + key_of(1))
            assert row is not None
            txn.put(b"v" + key_of(1), row.replace(b"right", b"wrong"))
    async with store_in(tmp_path) as store:
        assert store.get_now([key_of(1)]) == [None]
        assert store.torn == 1
        with pytest.raises(StoreError) as caught:
            store.get_now([key_of(1)])
        assert caught.value.kind == "damaged"
    async with store_in(tmp_path) as store:
        assert store.get_now([key_of(1)]) == [None]
    assert len(list(tmp_path.glob("values.damaged-*"))) == 1


@pytest.mark.asyncio
async def test_a_timed_out_lease_is_given_back(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:
        writer = store._board
        freed = asyncio.Event()
        taking = asyncio.create_task(
            writer.call(lambda board: bool(time.sleep(0.3)) or True, undo=lambda _: freed.set())
        )
        with pytest.raises(StoreError):
            await taking
        # The thread sets the event; it is looked at here only.
        async with asyncio.timeout(5):
            while not freed.is_set():
                await asyncio.sleep(0.01)


# The keeper -----------------------------------------------------------------------------------


@contextmanager
def keeper_of(folder: Path, budget: int = BUDGET, keep_s: float = 1e9) -> Iterator[Keeper]:
    events: list[str] = []
    keeper = Keeper(folder, budget, lambda name, _: events.append(name), keep_s=keep_s)
    keeper.start()
    yield keeper
    keeper.close()
    assert not events


def fill(folder: Path, count: int, size: int, expires_at: float) -> None:
    layout = lmdb_values.layout(BUDGET)
    with (
        closing(open_place(folder, layout, may_set_aside=True, on_event=ignore)) as place,
        values_at(place, time.time()) as values,
    ):
        for number in range(count):
            values.put(key_of(number), b"v" * size, expires_at)


def test_the_keeper_leaves_room_for_the_writers(tmp_path: Path) -> None:
    fill(tmp_path, 2_000, 4_000, time.time() + 3600)
    with keeper_of(tmp_path) as keeper:
        assert keeper.size().size_bytes > BUDGET * 0.99
        keeper.tick()
        assert BUDGET * 0.96 < keeper.size().size_bytes <= BUDGET * 0.97


def test_the_keeper_removes_what_is_expired(tmp_path: Path) -> None:
    fill(tmp_path, 300, 100, time.time() - 1)
    with keeper_of(tmp_path) as keeper:
        keeper.tick()
        assert keeper.size().entries == 0


def test_a_smaller_budget_is_reached_tick_by_tick(tmp_path: Path) -> None:
    fill(tmp_path, 4_000, 100, time.time() + 3600)
    with keeper_of(tmp_path, budget=MIB) as keeper:
        for _ in range(100):
            keeper.tick()
        assert keeper.size().size_bytes <= MIB


def test_there_is_one_keeper_at_a_time(tmp_path: Path) -> None:
    with keeper_of(tmp_path) as keeper:
        assert keeper.is_keeper
        second = Keeper(tmp_path, BUDGET, ignore)
        second._try_lock()  # the files can be opened once in a process only
        assert not second.is_keeper
    second._try_lock()
    assert second.is_keeper
    second.close()


def board_in(folder: Path) -> Place:
    return open_place(folder, lmdb_board.layout(), may_set_aside=True, on_event=ignore)


def test_the_keeper_forgets_old_invalidations_and_leases_of_the_dead(tmp_path: Path) -> None:
    me = myself()
    dead = Holder(b"dead", 2**22 + 1, 5, me.world)
    alive = Holder(b"alive", os.getpid(), me.started, me.world)
    now = time.time()
    with closing(board_in(tmp_path)) as place, place.env.begin(write=True) as txn:
        board = Board(txn)
        for number in range(450):
            board.take(key_of(number), dead, lease_s=60, now=now)
        board.take(key_of(1_000), alive, lease_s=60, now=now)
        board.take(key_of(1_001), alive, lease_s=60, now=now - 100)
        board.publish(Invalidation(model="old"), now - 1_000)
        board.publish(Invalidation(model="new"), now)
    with keeper_of(tmp_path, keep_s=500) as keeper:
        for _ in range(4):
            keeper.tick()
    with closing(board_in(tmp_path)) as place:
        assert keys_in(place, b"l") == [key_of(1_000)]
        news = lmdb_board.news(place, Epoch())
        assert [(number, what.model) for number, what in news.invalidations] == [(2, "new")]
        assert news.floor == 1
        for number, is_all in ((0, True), (1, False), (2, False), (3, True)):
            found = lmdb_board.news(place, Epoch(news.epoch.generation, number))
            assert found.is_all == is_all


def test_a_lease_of_another_container_is_judged_by_its_end_only(tmp_path: Path) -> None:
    me = myself()
    elsewhere = Holder(b"other", 2**22 + 1, 5, "another boot or namespace")
    with closing(board_in(tmp_path)) as place:
        with place.env.begin(write=True) as txn:
            Board(txn).take(key_of(1), elsewhere, lease_s=60, now=NOW)
        assert lmdb_board.is_held(place, key_of(1), me, NOW + 59)
        assert not lmdb_board.is_held(place, key_of(1), me, NOW + 61)


def test_a_number_that_another_process_has_now_is_not_the_holder() -> None:
    me = myself()
    assert not me.is_gone(me.world)
    assert Holder(b"", me.pid, me.started - 1, me.world).is_gone(me.world)


# Opening --------------------------------------------------------------------------------------


def test_files_of_another_version_are_set_aside(tmp_path: Path) -> None:
    events: list[dict[str, object]] = []
    for version in (1, 2):
        layout = Layout("values", version, MIB, 0, lambda: {b"m:x": b"y"})
        open_place(
            tmp_path, layout, may_set_aside=True, on_event=lambda _, fields: events.append(fields)
        ).close()
    assert [event["why"] for event in events] == ["of another version"]


def test_files_of_another_boot_are_used_if_they_were_closed_and_else_set_aside(
    tmp_path: Path,
) -> None:
    events: list[object] = []
    layout = lmdb_values.layout(BUDGET)

    def opened() -> Place:
        return open_place(
            tmp_path, layout, may_set_aside=True, on_event=lambda *event: events.append(event)
        )

    opened().close_clean()
    assert (tmp_path / "values" / "boot").read_text() == "clean"
    opened().close()
    opened().close()
    assert not events
    (tmp_path / "values" / "boot").write_text("another boot")
    opened().close()
    assert len(events) == 1


def test_at_most_two_damaged_copies_are_kept(tmp_path: Path) -> None:
    layout = lmdb_values.layout(BUDGET)
    for _ in range(4):
        open_place(tmp_path, layout, may_set_aside=True, on_event=ignore).close()
        (tmp_path / "values" / "damaged").touch()
    open_place(tmp_path, layout, may_set_aside=True, on_event=ignore).close()
    assert len(list(tmp_path.glob("values.damaged-*"))) == 2


def test_who_may_not_set_aside_gets_a_store_error(tmp_path: Path) -> None:
    layout = lmdb_values.layout(BUDGET)
    open_place(tmp_path, layout, may_set_aside=True, on_event=ignore).close()
    (tmp_path / "values" / "damaged").touch()
    with pytest.raises(StoreError) as caught:
        open_place(tmp_path, layout, may_set_aside=False, on_event=ignore)
    assert caught.value.kind == "damaged"


MOUNTS = """\
/dev/vda / ext4 rw 0 0
proc /proc proc rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/local\\040disk xfs rw 0 0
me@host:/ /mnt/ssh fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/var/cache/preheat", "ext4"),
        ("/home/me/.cache", "nfs4"),
        ("/homeless", "ext4"),
        ("/home/local disk/x", "xfs"),
        ("/mnt/ssh/x", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_folder_is_that_of_its_nearest_mount(folder: str, kind: str) -> None:
    assert file_system_of(Path(folder), MOUNTS) == kind


def test_opening_the_same_files_twice_in_a_process_is_a_store_error(
    place: Place, tmp_path: Path
) -> None:
    with pytest.raises(StoreError):
        open_place(tmp_path, lmdb_values.layout(BUDGET), may_set_aside=True, on_event=ignore)


def test_a_folder_that_can_not_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        open_place(
            tmp_path / "file", lmdb_values.layout(BUDGET), may_set_aside=True, on_event=ignore
        )


# The secret -----------------------------------------------------------------------------------


def test_the_secret_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    secret = secret_at(folder)
    assert len(secret) == 32
    assert secret_at(folder) == secret
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["secret"]


def test_processes_that_make_the_secret_at_once_have_the_same(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(secret_at(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_secret_in_a_folder_that_cannot_be_is_refused_with_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "l2", Path("/proc/preheat")):
        with pytest.raises(ConfigError, match=r"set l2\.path .* or exact\.secret_env"):
            secret_at(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_secret_is_said_to_be_his_and_nobody_is_told_to_remove_it(
    tmp_path: Path,
) -> None:
    secret_at(tmp_path)
    os.chown(tmp_path / "secret", 65_534, 65_534)
    with pytest.raises(ConfigError, match=r"it is another user's .*secret belongs to") as caught:
        secret_at(tmp_path)
    assert "remove" not in str(caught.value)


def test_a_keeper_without_a_folder_says_so_once_and_goes_on_when_there_is_one(
    tmp_path: Path,
) -> None:
    told: list[tuple[str, dict[str, object]]] = []
    (tmp_path / "in-the-way").touch()
    folder = tmp_path / "in-the-way" / "l2"
    keeper = Keeper(folder, BUDGET, lambda name, fields: told.append((name, fields)))
    with pytest.raises(StoreError, match=f"^{folder}: Not a directory$"):
        keeper.start()
    keeper.tick()
    keeper.tick()
    assert told == []  # whoever started it has told it
    (tmp_path / "in-the-way").unlink()
    keeper.tick()
    assert keeper.is_keeper
    keeper.close()


def test_why_files_cannot_be_opened_is_in_words(tmp_path: Path) -> None:
    (tmp_path / "values" / "data.mdb").mkdir(parents=True)
    with pytest.raises(StoreError) as caught:
        open_place(tmp_path, lmdb_values.layout(BUDGET), may_set_aside=True, on_event=ignore)
    assert str(caught.value) == "LMDB failed (Is a directory)"


def test_a_secret_that_others_can_read_or_that_is_cut_is_refused(tmp_path: Path) -> None:
    secret_at(tmp_path)
    (tmp_path / "secret").chmod(0o640)
    with pytest.raises(ConfigError, match="others than its owner"):
        secret_at(tmp_path)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ConfigError, match="32 bytes"):
        secret_at(tmp_path)
