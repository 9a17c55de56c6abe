"""When the keeper of a server's slots is made: against a server that only says what it is."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from preheat.engines.slot_seats import SlotFolders, SlotRules, SlotSeats
from preheat.errors import EngineError

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]

SAID = {
    "/v1/models": {"data": [{"id": "m", "meta": {"n_params": 1}}]},
    "/props": {"model_path": "/m.gguf"},
    "/slots": [{"id": 0, "n_ctx": 64, "is_processing": False}],
    "/lora-adapters": [],
}


class Server:
    """Says all of `SAID`, once it `may_answer`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode():
            path = head.split()[1].partition("?")[0]
            self.asked.append(path)
            await self.may_answer.wait()
            body = json.dumps(SAID[path]).encode()
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)


@asynccontextmanager
async def seats_of(server: Server, folder: Path) -> AsyncIterator[SlotSeats]:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await server.talk(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    seats = SlotSeats(f"http://127.0.0.1:{port}", "", folder, SlotFolders(SlotRules()))
    try:
        yield seats
    finally:
        await seats.aclose()
        listening.close()


async def test_two_who_look_at_once_make_one_keeper(tmp_path: Path) -> None:
    server = Server()
    async with seats_of(server, tmp_path) as seats:
        found = await asyncio.gather(seats.open(64), seats.open(64))
        assert sorted(found) == [False, True]
        assert seats.keeper is not None
        assert [one.get_name() for one in asyncio.all_tasks()].count("slot-jobs") == 1


async def test_a_server_that_is_started_anew_while_it_is_asked_is_asked_again(
    tmp_path: Path,
) -> None:
    server = Server()
    async with seats_of(server, tmp_path) as seats:
        server.may_answer.clear()
        opening = asyncio.create_task(seats.open(64))
        while not server.asked:
            await asyncio.sleep(0.01)
        seats.restarted()
        server.may_answer.set()
        assert await opening
        server.asked.clear()
        await seats.open(64)
        assert server.asked
        server.asked.clear()
        await seats.open(64)
        assert not server.asked


async def test_what_could_not_be_opened_is_tried_again(tmp_path: Path) -> None:
    server = Server()
    server.may_answer.clear()
    async with seats_of(server, tmp_path) as seats:
        opening = asyncio.create_task(seats.open(64))
        await asyncio.sleep(0.05)
        opening.cancel()
        with pytest.raises((asyncio.CancelledError, EngineError)):
            await opening
        server.may_answer.set()
        assert await seats.open(64)
