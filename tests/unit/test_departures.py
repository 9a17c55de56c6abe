"""Tasks that see one venture through after the other."""

import asyncio
from typing import Any

import pytest

from core_parts import request_for
from preheat.core.types import Request
from preheat.gateway.departures import Departures
from preheat.gateway.listeners import Listener


class Errand:
    """A venture that does what the test wants."""

    def __init__(self, departures: Departures, how: str = "") -> None:
        self.request: Request = request_for("x")
        self.task: asyncio.Task[None] | None = None
        self.how = how
        self.is_done = False
        self._departures = departures

    def add(self, listener: Listener) -> None:
        raise AssertionError("nobody listens")

    async def run(self) -> None:
        if self.how == "wait":
            await asyncio.sleep(60)
        elif self.how == "cancels-itself":
            assert self.task is not None
            self.task.cancel()  # and returns without another await
        elif self.how == "raises":
            raise ZeroDivisionError
        self.is_done = True


def launched(departures: Departures, how: str = "") -> Errand:
    errand = Errand(departures, how)
    departures.launch(errand)
    return errand


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def ended(departures: Departures) -> None:
    await departures.aclose()
    await settled()
    assert len(departures) == 0
    assert departures._idle == []
    assert departures._by_leader == {}


@pytest.mark.asyncio
async def test_one_task_sees_many_ventures_through() -> None:
    departures = Departures()
    tasks = set()
    for _ in range(20):
        errand = launched(departures)
        assert departures.find(errand.request.id) is errand
        assert len(departures) == 1
        tasks.add(errand.task)
        await settled()
        assert errand.is_done
        assert errand.task is None
        assert departures.find(errand.request.id) is None
        assert len(departures) == 0
    assert len(tasks) == 1
    await ended(departures)


@pytest.mark.asyncio
async def test_a_cancelled_venture_is_over_and_the_next_is_not_touched() -> None:
    departures = Departures()
    waiting = launched(departures, "wait")
    await settled()
    assert waiting.task is not None
    waiting.task.cancel()
    await settled()
    assert not waiting.is_done
    again = launched(departures)
    await settled()
    assert again.is_done
    await ended(departures)


@pytest.mark.asyncio
@pytest.mark.parametrize("is_fresh", [True, False])
async def test_a_venture_cancelled_before_it_began_leaves_nothing(is_fresh: bool) -> None:
    departures = Departures()
    if not is_fresh:
        launched(departures)
        await settled()
    for _ in range(100):
        errand = launched(departures)
        assert errand.task is not None
        errand.task.cancel()
        await settled()
        assert not errand.is_done
        assert departures.find(errand.request.id) is None
        assert len(departures) == 0
    await ended(departures)


@pytest.mark.asyncio
async def test_a_venture_that_cancels_itself_and_returns_costs_nobody_else_anything() -> None:
    departures = Departures()
    for _ in range(3):
        launched(departures, "cancels-itself")
        await settled()
    assert len(departures._idle) == len(set(departures._idle))
    errands = [launched(departures) for _ in range(10)]
    await settled()
    assert all(errand.is_done for errand in errands)
    await ended(departures)


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_venture_that_raises_takes_no_more_than_its_task_along() -> None:
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    departures = Departures()
    launched(departures, "raises")
    await settled()
    assert len(departures) == 0
    errand = launched(departures)
    await settled()
    assert errand.is_done
    await ended(departures)
