"""The disk tier of slot files on a real llama.cpp server, and what goes wrong there."""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytest.importorskip("gguf", reason="the tiny model is written with gguf")

from preheat.core.costs import ServiceModel
from preheat.core.slot_desk import Holding
from preheat.engines.child import ChildSettings, EngineChild
from preheat.engines.dialects.calls import Call, Prompt
from preheat.engines.dialects.llamacpp import LlamaCpp
from preheat.engines.direct import Direct
from preheat.engines.slot_folder import SlotFolder
from preheat.engines.slot_jobs import Move, SlotJobs
from preheat.engines.slot_keeper import SlotKeeper
from preheat.engines.slot_leaders import Wanted
from preheat.engines.slot_names import Kept
from preheat.engines.slot_tier import SlotTier, identity_of, slot_tier
from preheat.errors import ConfigError, EngineError
from tiny_model import KV_BYTES_A_TOKEN, write_tiny_gguf

pytestmark = pytest.mark.timeout(120)
SLOTS = 3
DIALECT = LlamaCpp()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


class Rig:
    """A server, a folder, and the tier between them."""

    def __init__(self, engine: EngineChild, direct: Direct, tier: SlotTier) -> None:
        self.engine = engine
        self.direct = direct
        self.tier = tier
        self.path = tier.folder.path

    async def computed(self, slot: int, ids: list[int]) -> int:
        """How much of it the slot had."""
        call = DIALECT.warm(Prompt(ids=ids, slot=slot))
        assert call is not None
        cached = DIALECT.read_cached((await self.direct.ask(call))[1])
        assert cached is not None
        assert cached.cached_tokens is not None
        return cached.cached_tokens

    async def kept(self, slot: int, name: int, tokens: int = 400) -> tuple[Kept, list[int]]:
        """A prompt computed in that slot, and its file."""
        ids = words(name, tokens)
        await self.computed(slot, ids)
        holding = Holding("t", f"s{name}", [name], tokens)
        assert (await self.tier.save(slot, holding)).ok
        kept = self.tier.find("t", [name, 99])
        assert kept is not None
        return kept, ids


@asynccontextmanager
async def rig(
    weights: str,
    path: Path,
    *,
    saves: bool = True,
    serves: Path | None = None,
    budget: int = 2**30,
    folder: type[SlotFolder] = SlotFolder,
    limit_s: float = 10.0,
    port: int = 0,
) -> AsyncIterator[Rig]:
    settings = ChildSettings(
        model=weights,
        port=port,
        slots=SLOTS,
        ctx_tokens=SLOTS * 4_096,
        cache_ram_mib=0,
        slot_save_dir=str(serves or path) if saves else "",
    )
    engine = EngineChild(settings, on_event=lambda _name, _fields: None)
    await engine.start()
    assert engine.url is not None
    direct = Direct(engine.url, api_key=engine.api_key, dialect="llamacpp")
    tier = None
    try:
        files = folder(
            path,
            identity=await identity_of(direct),
            secret=b"k",
            budget_bytes=budget,
            max_age_s=3_600.0,
        )
        files.open(0.0)
        tier = await slot_tier(direct, files, limit_s=limit_s)
        yield Rig(engine, direct, tier)
    finally:
        if tier is not None:
            await tier.aclose()
        await direct.aclose()
        await engine.aclose()


def words(first: int, length: int) -> list[int]:
    return [30 + (11 * first + 7 * i) % 200 for i in range(length)]


@pytest.mark.asyncio
async def test_a_session_comes_back_after_others_took_its_slot(
    weights: str, tmp_path: Path
) -> None:
    async with rig(weights, tmp_path) as one:
        kept, ids = await one.kept(0, 1)
        assert kept.size_bytes >= 400 * KV_BYTES_A_TOKEN
        assert await one.computed(0, words(2, 400)) == 0
        moved = await one.tier.restore(0, kept)
        assert (moved.ok, moved.tokens, moved.size_bytes) == (True, 400, kept.size_bytes)
        assert await one.computed(0, [*ids, 77]) == 400
        assert one.tier.counts.written_bytes == one.tier.counts.read_bytes == kept.size_bytes
        assert one.tier.counts.failed == {}
        assert 0 < one.tier.load_s(kept) < 1.0
        assert one.tier.fetch_s(kept) == 0.0
        assert one.tier.tier().load_s(kept.size_bytes) > 0.0


@pytest.mark.asyncio
async def test_a_restart_begins_with_the_newest_files(weights: str, tmp_path: Path) -> None:
    async with rig(weights, tmp_path) as one:
        for slot in range(SLOTS):
            await one.kept(slot, slot)
        await one.tier.restore(2, (await one.kept(2, 0))[0])
        await one.tier.over("t", "s1")
    async with rig(weights, tmp_path) as one:
        newest = one.tier.folder.newest()
        assert [one.tier.find("t", [name]) for name in (0, 2)] == newest
        for slot, kept in enumerate(newest):
            assert (await one.tier.restore(slot, kept)).ok
        assert await one.computed(0, [*words(0, 400), 5]) == 400
        assert await one.computed(1, [*words(2, 400), 5]) == 400


@pytest.mark.asyncio
async def test_a_file_of_another_model_is_never_loaded(weights: str, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(Path(weights).read_bytes()[:-4_096] + bytes(4_096))
    folder = tmp_path / "slots"
    async with rig(weights, folder) as one:
        await one.kept(0, 1)
    async with rig(str(other), folder) as one:
        assert one.tier.find("t", [1, 99]) is None
        assert one.tier.folder.newest() == []
        assert len(list(folder.iterdir())) == 1
        with pytest.raises(ConfigError, match="another model"):
            await slot_tier(
                one.direct,
                SlotFolder(folder, identity="0" * 32, secret=b"k", budget_bytes=1, max_age_s=1.0),
            )


@pytest.mark.asyncio
async def test_a_server_that_comes_back_with_another_model_gets_no_file(
    weights: str, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(Path(weights).read_bytes()[:-4_096] + bytes(4_096))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with rig(weights, tmp_path / "slots", port=port) as before:
        kept, ids = await before.kept(0, 1)
        await before.engine.aclose()
        assert not (await before.tier.restore(0, kept)).ok  # so it isn't sure any more
        async with rig(str(other), tmp_path / "slots", port=port) as after:
            key = after.engine.api_key
            before.direct = Direct(f"http://127.0.0.1:{port}", api_key=key, dialect="llamacpp")
            tier = SlotTier(
                before.tier.folder,
                before.direct.ask,
                slots=SLOTS,
                identify=lambda: identity_of(before.direct),
            )
            await tier.start()
            tier.restarted()
            moved = await tier.restore(0, kept)
            assert (moved.ok, moved.why) == (False, "model")
            assert await after.computed(0, [*ids, 7]) == 0
            assert (await tier.save(0, Holding("t", "s", [5], 401))).why == "model"
            await tier.aclose()
            await before.direct.aclose()


@pytest.mark.parametrize("harm", ["cut", "flip"])
@pytest.mark.asyncio
async def test_a_damaged_file_never_reaches_the_server(
    weights: str, tmp_path: Path, harm: str
) -> None:
    """The server dies of a file cut short, and computes on with a changed one."""
    async with rig(weights, tmp_path) as one:
        kept, _ = await one.kept(0, 1)
        content = bytearray((tmp_path / kept.name).read_bytes())
    content = content[:-100] if harm == "cut" else content
    content[len(content) // 2] ^= 1
    (tmp_path / kept.name).write_bytes(content)
    async with rig(weights, tmp_path) as one:
        kept = one.tier.folder.newest()[0]
        moved = await one.tier.restore(0, kept)
        assert (moved.ok, moved.why) == (False, "damaged")
        assert one.tier.find("t", [1]) is None
        assert await one.computed(0, words(1, 400)) == 0  # it lives, and has nothing
        assert one.tier.counts.failed == {"damaged": 1}


class OnAFullDisk(SlotFolder):
    """Every write of a new file fails with ENOSPC."""

    def begin(self, expected_bytes: int, now: float) -> str | None:
        part = super().begin(expected_bytes, now)
        assert part is not None
        (self.path / part).symlink_to("/dev/full")
        return part


@pytest.mark.asyncio
async def test_a_disk_that_is_full_is_a_miss(weights: str, tmp_path: Path) -> None:
    async with rig(weights, tmp_path, folder=OnAFullDisk) as one:
        await one.computed(0, words(1, 400))
        moved = await one.tier.save(0, Holding("t", "s", [1], 400))
        assert not moved.ok
        assert "Unable to save slot" in moved.why
        assert one.tier.counts.failed == {"refused": 1}
        assert list(tmp_path.iterdir()) == []
        assert await one.computed(0, [*words(1, 400), 9]) == 400


@pytest.mark.asyncio
async def test_a_budget_that_is_too_small_is_a_miss(weights: str, tmp_path: Path) -> None:
    async with rig(weights, tmp_path, budget=1_000) as one:
        await one.computed(0, words(1, 400))
        moved = await one.tier.save(0, Holding("t", "s", [1], 400))
        assert (moved.ok, moved.why) == (False, "full")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio
async def test_what_the_server_refuses_is_told_in_its_words(weights: str, tmp_path: Path) -> None:
    async with rig(weights, tmp_path, saves=False) as one:
        await one.computed(0, words(1, 400))
        moved = await one.tier.save(0, Holding("t", "s", [1], 400))
        assert not moved.ok
        assert "slot-save-path" in moved.why
        assert (await one.tier.save(SLOTS, Holding("t", "s", [1], 1))).why == "slot"


@pytest.mark.asyncio
async def test_a_slot_that_holds_something_else_isnt_kept(weights: str, tmp_path: Path) -> None:
    async with rig(weights, tmp_path) as one:
        await one.computed(0, words(1, 400))
        moved = await one.tier.save(0, Holding("t", "s", [1], 401))
        assert (moved.ok, moved.why, moved.tokens) == (False, "changed", 400)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio
async def test_a_server_that_writes_elsewhere_is_noticed(weights: str, tmp_path: Path) -> None:
    async with rig(weights, tmp_path / "ours", serves=tmp_path / "theirs") as one:
        await one.computed(0, words(1, 400))
        moved = await one.tier.save(0, Holding("t", "s", [1], 400))
        assert (moved.ok, moved.why) == (False, "elsewhere")


@pytest.mark.asyncio
async def test_a_busy_slot_is_waited_for_no_longer_than_allowed(
    weights: str, tmp_path: Path
) -> None:
    async with rig(weights, tmp_path, limit_s=0.3) as one:
        kept, _ = await one.kept(0, 1)
        said = Call(
            b"POST",
            b"/completion",
            b'{"prompt": "x", "n_predict": 3000, "ignore_eos": true, "id_slot": 1}',
        )
        under_way = asyncio.create_task(one.direct.ask(said))
        await asyncio.sleep(0.2)
        moved = await one.tier.restore(1, kept)
        assert (moved.ok, moved.why) == (False, "late")
        assert not under_way.done()
        assert (await one.tier.restore(2, kept)).ok  # the others go on
        assert one.tier.counts.failed == {"late": 1}
        under_way.cancel()


@pytest.mark.asyncio
async def test_a_server_that_died_is_a_miss(weights: str, tmp_path: Path) -> None:
    async with rig(weights, tmp_path) as one:
        kept, _ = await one.kept(0, 1)
        await one.engine.aclose()
        moved = await one.tier.restore(0, kept)
        assert not moved.ok
        assert one.tier.find("t", [1]) is kept  # the file is as good as before


@pytest.mark.asyncio
async def test_what_a_request_waits_for_comes_before_what_is_for_later(tmp_path: Path) -> None:
    done: list[bytes] = []

    async def ask(call: Call) -> tuple[int, bytes]:
        done.append(call.path)
        await asyncio.sleep(0.01)
        raise EngineError("down", kind="connect")

    folder = SlotFolder(tmp_path, identity="1" * 32, secret=b"k", budget_bytes=10**6, max_age_s=9.0)
    folder.open(0.0)
    holding = Holding("t", "s", [1], 1)
    part = folder.begin(4, 1.0)
    assert part is not None
    (tmp_path / part).write_bytes(os.urandom(4))
    kept = folder.finish(part, holding, 4, 1.0)
    assert isinstance(kept, Kept)
    tier = SlotTier(folder, ask, slots=4, clock=lambda: 1.0)
    await tier.start()
    saves = [asyncio.create_task(tier.save(slot, holding)) for slot in (0, 1)]
    await asyncio.sleep(0)
    moved = await tier.restore(3, kept)
    assert (moved.ok, moved.why) == (False, "connect")
    assert {(await one).why for one in saves} == {"connect"}
    assert [path[7:8] for path in done] == [b"3", b"0", b"1"]
    await tier.aclose()
    assert (await tier.restore(3, kept)).why == "closed"


@pytest.mark.asyncio
async def test_a_folder_that_fails_is_a_miss_and_the_next_call_goes_on(
    weights: str, tmp_path: Path
) -> None:
    async with rig(weights, tmp_path) as one:
        kept, _ = await one.kept(0, 1)
        (tmp_path / kept.name).unlink()
        (tmp_path / kept.name).mkdir()  # in the file's place: it can't be unlinked
        moved = await one.tier.restore(0, kept)
        assert not moved.ok
        assert "irectory" in moved.why
        again, _ = await one.kept(1, 2)
        assert (await one.tier.restore(0, again)).ok


@pytest.mark.asyncio
async def test_counts_and_times_that_cant_be_harm_nothing(tmp_path: Path) -> None:
    tokens = 2**40
    size = 1_000_000

    async def ask(call: Call) -> tuple[int, bytes]:
        name = json.loads(call.body)["filename"]
        if b"save" in call.path:
            (tmp_path / name).write_bytes(bytes(size))
        moved = {"n_saved": tokens, "n_written": size, "timings": {"restore_ms": 1e300}}
        return 200, json.dumps(moved).encode()

    folder = SlotFolder(tmp_path, identity="1" * 32, secret=b"k", budget_bytes=10**8, max_age_s=9.0)
    folder.open(0.0)
    tier = SlotTier(folder, ask, slots=4, clock=lambda: 1.0)
    await tier.start()
    try:
        assert (await tier.save(0, Holding("t", "s", [1], tokens))).why == "changed"
        tokens = 400
        assert (await tier.save(0, Holding("t", "s", [1], tokens))).ok
        kept = tier.find("t", [1])
        assert kept is not None
        assert (await tier.restore(1, kept)).ok
        assert tier.load_s(kept) < 1.0
    finally:
        await tier.aclose()
    assert not list(tmp_path.glob("part-*"))


@pytest.mark.asyncio
async def test_a_defect_costs_one_move_and_is_told() -> None:
    loop = asyncio.get_running_loop()
    told: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: told.append(context))
    jobs = SlotJobs(limit_s=1.0)
    jobs.start()

    async def defect() -> Move:
        raise ZeroDivisionError

    async def fine() -> Move:
        return Move(ok=True)

    assert (await jobs.soon(defect)).why == "defect"

    async def refused() -> Move:
        return Move(ok=False, why="nope")

    assert (await jobs.soon(fine)).ok
    assert (await jobs.soon(refused)).why == "nope"
    assert jobs.failed == {"defect": 1, "refused": 1}
    assert [type(one["exception"]) for one in told] == [ZeroDivisionError]
    await jobs.aclose()


# Slots with their files --------------------------------------------------------------------------


class Sessions:
    """Conversations on one server, each request in the slot that the keeper names."""

    def __init__(self, one: Rig, keeper: SlotKeeper) -> None:
        self._one = one
        self._keeper = keeper

    async def turn(self, name: int, tokens: int) -> tuple[str, int]:
        """How its prefix came there, and how much of it the server found."""
        ids = words(name, tokens)
        blocks = [1_000 * name + place for place in range(tokens // 100)]
        wanted = Wanted("t", f"s{name}", blocks, tokens)
        seated = await self._keeper.seat(wanted, ServiceModel(token_s=0.001, attention_s=0.0))
        cached = await self._one.computed(seated.slot, ids)
        self._keeper.ended(seated, tokens)
        return seated.way, cached


@asynccontextmanager
async def sessions(one: Rig) -> AsyncIterator[tuple[Sessions, SlotKeeper]]:
    keeper = SlotKeeper(one.tier, slots=SLOTS)
    try:
        yield Sessions(one, keeper), keeper
    finally:
        await keeper.aclose()


@pytest.mark.asyncio
async def test_three_times_as_many_sessions_as_slots_lose_nothing(
    weights: str, tmp_path: Path
) -> None:
    async with rig(weights, tmp_path) as one, sessions(one) as (talk, _):
        names = range(3 * SLOTS)
        assert [await talk.turn(name, 400) for name in names] == [("recompute", 0)] * len(names)
        for name in names:
            assert await talk.turn(name, 600) == ("restore", 400)
        last = names[-1]
        assert await talk.turn(last, 700) == ("hot", 600)
        assert one.tier.counts.failed == {}


@pytest.mark.asyncio
async def test_who_comes_back_while_its_slot_is_saved_waits_for_that(
    weights: str, tmp_path: Path
) -> None:
    """Else the file would hold what the new request makes of the slot, under the old one's name."""
    async with rig(weights, tmp_path) as one:
        gate, begun = asyncio.Event(), asyncio.Event()

        async def slow(call: Call) -> tuple[int, bytes]:
            if b"action=save" in call.path:
                begun.set()
                await gate.wait()
            return await one.direct.ask(call)

        tier = SlotTier(one.tier.folder, slow, slots=SLOTS, clock=time.time)
        await tier.start()
        keeper = SlotKeeper(tier, slots=SLOTS)
        talk = Sessions(one, keeper)
        try:
            for name in range(SLOTS):
                await talk.turn(name, 400)
            await asyncio.wait_for(begun.wait(), 5.0)
            back = asyncio.create_task(talk.turn(0, 600))
            await asyncio.sleep(0.3)
            assert not back.done()
            gate.set()
            assert await back == ("hot", 400)
            assert tier.counts.failed == {}
            assert tier.counts.saved >= 1
        finally:
            await keeper.aclose()
            await tier.aclose()


@pytest.mark.asyncio
async def test_what_is_shorter_than_a_block_isnt_kept(weights: str, tmp_path: Path) -> None:
    async with rig(weights, tmp_path) as one, sessions(one) as (talk, _):
        for name in range(2 * SLOTS):
            assert await talk.turn(name, 90) == ("recompute", 0)
        assert one.tier.counts.saved == 0


@pytest.mark.asyncio
async def test_a_burst_of_sessions_is_seated_in_turn(weights: str, tmp_path: Path) -> None:
    async with rig(weights, tmp_path) as one, sessions(one) as (talk, _):
        names = range(4 * SLOTS)
        await asyncio.gather(*(talk.turn(name, 300) for name in names))
        found = await asyncio.gather(*(talk.turn(name, 500) for name in names))
        assert {cached for _, cached in found} == {300}


@pytest.mark.asyncio
async def test_where_nothing_can_be_saved_it_is_computed_again(
    weights: str, tmp_path: Path
) -> None:
    async with rig(weights, tmp_path, saves=False) as one, sessions(one) as (talk, _):
        for _ in range(2):
            for name in range(2 * SLOTS):
                assert await talk.turn(name, 300) == ("recompute", 0)
        assert one.tier.counts.failed["refused"] > 0


@pytest.mark.asyncio
async def test_a_session_that_is_over_isnt_saved(weights: str, tmp_path: Path) -> None:
    async with rig(weights, tmp_path) as one, sessions(one) as (talk, keeper):
        for name in range(SLOTS):
            await talk.turn(name, 300)
            await keeper.over("t", f"s{name}")
        before = one.tier.counts.saved
        for name in range(SLOTS, 2 * SLOTS):
            await talk.turn(name, 300)
            await keeper.over("t", f"s{name}")
        assert one.tier.counts.saved - before <= SLOTS
        assert all(kept.is_over for kept in [one.tier.find("t", [0, 1, 2])] if kept)


@pytest.mark.asyncio
async def test_after_a_restart_of_the_server_files_are_loaded_again(
    weights: str, tmp_path: Path
) -> None:
    async with rig(weights, tmp_path) as one, sessions(one) as (talk, keeper):
        for name in range(2 * SLOTS):
            await talk.turn(name, 300)
        for slot in range(SLOTS):
            await one.direct.ask(DIALECT.erase(slot))
        keeper.restarted()
        assert await talk.turn(0, 400) == ("restore", 300)


@pytest.mark.asyncio
async def test_who_leaves_the_queue_gives_its_turn_to_the_next(
    weights: str, tmp_path: Path
) -> None:
    async with rig(weights, tmp_path) as one, sessions(one) as (_, keeper):
        service = ServiceModel()
        seats = [await keeper.seat(Wanted("t", f"s{n}", [n], 10), service) for n in range(SLOTS)]
        gone, stays = (
            asyncio.create_task(keeper.seat(Wanted("t", name, [9], 10), service))
            for name in ("gone", "stays")
        )
        await asyncio.sleep(0.05)
        gone.cancel()
        keeper.ended(seats[1], None)
        async with asyncio.timeout(5.0):
            assert (await stays).slot == seats[1].slot
        assert gone.cancelled()


@pytest.mark.parametrize(("expected_s", "computed"), [(0.5, 1), (60.0, SLOTS)])
@pytest.mark.asyncio
async def test_followers_of_a_new_prefix_wait_where_that_is_quicker(
    weights: str, tmp_path: Path, expected_s: float, computed: int
) -> None:
    """A prompt takes 1 s to compute, by what was learned; its leader half of that, or a minute."""
    service = ServiceModel(token_s=0.001, attention_s=0.0)

    async with rig(weights, tmp_path) as one, sessions(one) as (_, keeper):

        async def asked(name: int) -> int:
            ids = [*words(5, 1_000), *words(50 + name, 30)]
            blocks = [*range(10), 100 + name]
            wanted = Wanted("t", f"s{name}", blocks, len(ids), expected_s)
            seated = await keeper.seat(wanted, service)
            cached = await one.computed(seated.slot, ids)
            keeper.ended(seated, len(ids))
            return cached

        found = await asyncio.gather(*(asked(name) for name in range(SLOTS)))
        assert sum(cached < 1_000 for cached in found) == computed
        assert one.tier.counts.failed == {}


@pytest.mark.asyncio
async def test_a_follower_goes_on_when_its_leader_fails_or_the_server_is_restarted(
    weights: str, tmp_path: Path
) -> None:
    service = ServiceModel(token_s=1.0, attention_s=0.0)
    async with rig(weights, tmp_path) as one, sessions(one) as (_, keeper):
        for ends in (lambda seat: keeper.ended(seat, None), lambda _: keeper.restarted()):
            leader = await keeper.seat(Wanted("t", "a", [1, 2], 200, 30.0), service)
            follower = asyncio.create_task(keeper.seat(Wanted("t", "b", [1, 2, 3], 300), service))
            await asyncio.sleep(0.05)
            assert not follower.done()
            ends(leader)
            async with asyncio.timeout(5.0):
                seated = await follower
            assert seated.way == "recompute"
            keeper.ended(seated, None)
