"""Which slot a request gets while its server is started again, and what is written when it is taken."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from preheat.core.costs import ServiceModel
from preheat.engines.dialects.calls import Call
from preheat.engines.slot_folder import SlotFolder
from preheat.engines.slot_keeper import SlotKeeper
from preheat.engines.slot_leaders import Wanted
from preheat.engines.slot_tier import SlotTier

pytestmark = pytest.mark.asyncio


class Server:
    """Refuses to write; meanwhile it may be started again."""

    def __init__(self) -> None:
        self.keeper: SlotKeeper | None = None
        self.restarts = self.saves = 0
        self.now = 0.0

    async def ask(self, call: Call) -> tuple[int, bytes]:
        self.saves += b"save" in call.path
        await asyncio.sleep(0)
        if self.restarts and self.keeper is not None:
            self.restarts -= 1
            self.keeper.restarted()
        return 501, b"{}"


@asynccontextmanager
async def kept(folder: Path) -> AsyncIterator[tuple[SlotKeeper, Server]]:
    opened = SlotFolder(
        folder, identity="0" * 32, secret=b"s", budget_bytes=1 << 30, max_age_s=60.0
    )
    opened.open(0.0)
    server = Server()
    tier = SlotTier(opened, server.ask, slots=2)
    await tier.start()
    keeper = server.keeper = SlotKeeper(tier, slots=2, clock=lambda: server.now)
    try:
        yield keeper, server
    finally:
        await keeper.aclose()
        await tier.aclose()


def wanted(*blocks: int) -> Wanted:
    return Wanted("t", "s", blocks, 100 * len(blocks))


async def test_who_is_being_seated_meanwhile_gets_an_empty_slot_of_the_new_process(
    tmp_path: Path,
) -> None:
    async with kept(tmp_path) as (keeper, server):
        for blocks in ((1, 2), (5, 6)):
            keeper.ended(await keeper.seat(wanted(*blocks), None), 200)
        server.restarts = 1
        seated = await keeper.seat(wanted(1, 9, 9, 9), None)  # what follows is lost: it is saved
        assert server.restarts == 0
        assert (seated.way, seated.found_tokens) == ("recompute", 0)
        other = await keeper.seat(wanted(5, 6), None)
        assert other.slot != seated.slot
        assert other.way == "recompute"
        keeper.ended(other, 200)
        keeper.ended(seated, 400)
        assert (await keeper.seat(wanted(1, 9, 9, 9), None)).way == "hot"


async def test_what_an_old_process_had_answered_is_nothing_of_the_new_ones(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, _):
        seated = await keeper.seat(wanted(1, 2), None)
        keeper.restarted()
        keeper.ended(seated, 200)
        assert (await keeper.seat(wanted(1, 2), None)).way == "recompute"


async def test_nothing_is_written_of_sessions_that_hardly_ever_come_back(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, server):
        service = ServiceModel()

        async def answered(number: int) -> None:
            asked = Wanted("t", f"s{number}", (number,), 2_000)
            keeper.ended(await keeper.seat(asked, service), 2_000)
            server.now += 200.0
            await asyncio.sleep(0.01)

        for number in range(3):
            await answered(number)
        assert server.saves > 0  # they may come back, as far as is known
        for number in range(3, 200):
            await answered(number)
        saves = server.saves
        for number in range(200, 210):
            await answered(number)
        assert server.saves == saves
        assert keeper.unsaved == 2  # before the server is stopped it costs nobody anything


async def test_a_session_without_a_name_ends_no_other(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, _):
        for number, pause in ((1, ""), (2, "over")):
            asked = Wanted("t", "", (number,), 100)
            keeper.ended(await keeper.seat(asked, None), 100, pause)
        await keeper.over("t", "")
        assert (await keeper.seat(Wanted("t", "", (3,), 100), None)).found_tokens == 0
        assert (await keeper.seat(Wanted("t", "", (1,), 100), None)).way == "hot"
