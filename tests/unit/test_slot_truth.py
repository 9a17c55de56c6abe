"""What a server says of its slots corrects what is believed of them."""

import asyncio

import pytest

from preheat.engines.dialects.readings import Slot
from preheat.engines.slot_truth import Said, SlotTruth
from preheat.errors import EngineError

pytestmark = pytest.mark.asyncio


class Server:
    """Says so many tokens of each slot."""

    def __init__(self, *tokens: int | None) -> None:
        self.tokens = list(tokens)
        self.busy: set[int] = set()
        self.asked = 0
        self.fails = False

    async def told(self) -> list[Slot] | None:
        self.asked += 1
        await asyncio.sleep(0)
        if self.fails:
            raise EngineError("down", kind="connect")
        return [
            Slot(number, 4_096, tokens, number in self.busy)
            for number, tokens in enumerate(self.tokens)
        ]


async def test_a_slot_that_was_used_and_says_nothing_is_another_process() -> None:
    server = Server(900, None)
    truth = SlotTruth(server.told)
    assert await truth.compared() is None  # nothing was answered yet: nothing to ask
    truth.left(0, 900)
    assert await truth.compared() == Said(is_another=False)
    server.tokens = [None, None]
    assert await truth.compared() == Said(is_another=True)
    truth.clear()
    assert await truth.compared() is None
    assert server.asked == 2


async def test_a_slot_that_holds_something_else_is_named() -> None:
    server = Server(900, 700, 500)
    truth = SlotTruth(server.told)
    for slot, tokens in enumerate([905, 100, 100]):
        truth.left(slot, tokens)
    server.busy = {2}
    assert await truth.compared() == Said(is_another=False, changed=(1,))


async def test_what_changes_while_it_is_asked_says_nothing() -> None:
    server = Server(None, 700)
    truth = SlotTruth(server.told)
    truth.left(0, 900)
    asking = asyncio.create_task(truth.compared())
    await asyncio.sleep(0)
    truth.taken(0)
    assert await asking is None


async def test_each_doubt_is_asked_about_once_and_all_wait_for_the_answer() -> None:
    server = Server(None)
    truth = SlotTruth(server.told)
    truth.left(0, 900)
    assert await truth.resolved() is None
    truth.doubt()
    found = await asyncio.gather(truth.resolved(), truth.resolved())
    assert (found, server.asked) == ([Said(is_another=True), None], 1)
    truth.doubt()
    server.fails = True
    assert await truth.resolved() is None
    assert await truth.resolved() is None
    assert server.asked == 2
