"""An address that new settings bring gets what is hot before it gets requests, whether its group stays or is made anew."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gated_engine import Server
from harness import Gateway, chat

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

SYSTEM = " ".join(f"rule{one}" for one in range(300))


def settings(servers: list[Server], more: str = "") -> str:
    urls = json.dumps([one.url for one in servers])
    polled = "poll_s = 0.1\nhealth_s = 0.1"
    return f"[models.m]\n[engines.gpu]\nurls = {urls}\n{polled}\n{more}\n"


class Served:
    """A gateway before these servers, asked from this loop."""

    def __init__(self, gateway: Gateway, path: Path) -> None:
        self.gateway = gateway
        self._path = path
        self._sessions = 0

    async def ask(self) -> str:
        """A first request of a session of its own; who answered."""
        self._sessions += 1
        body = chat("", model="m")
        body["messages"] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"q{self._sessions}"},
        ]
        headers = {"X-Preheat-Session": f"s{self._sessions}"}
        reply = await asyncio.to_thread(self.gateway.post, "/v1/chat/completions", body, headers)
        assert reply.status == 200, reply.body
        return str(reply.headers["x-preheat-worker"])

    async def reload(self, text: str) -> None:
        self._path.write_text(text)
        self.gateway.process.send_signal(signal.SIGHUP)
        await until(lambda: said(self.gateway, "reloaded"))

    async def upstream(self, name: str) -> Any:
        told = (await asyncio.to_thread(self.gateway.get, "/preheat/v1/workers")).json
        return next((one for one in told["upstreams"] if one["name"] == name), None)


def said(gateway: Gateway, event: str) -> list[dict[str, Any]]:
    lines = [one for one in gateway.stderr.splitlines() if f'"event":"{event}"' in one]
    return [json.loads(one) for one in lines]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.02)


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(10.0):
        while not await condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def served(servers: list[Server], folder: Path) -> AsyncIterator[Served]:
    """With something hot."""
    gateway = await asyncio.to_thread(Gateway, settings(servers), folder=folder)
    made = Served(gateway, folder / "preheat.toml")

    async def is_hot() -> bool:
        page = (await asyncio.to_thread(gateway.get, "/metrics")).body.decode()
        return "preheat_trunks_messages 1.0" in page

    try:
        for _ in range(6):
            await made.ask()
        await eventually(is_hot)
        yield made
    finally:
        await asyncio.to_thread(gateway.stop)
    assert '"event":"bug"' not in gateway.stderr, gateway.stderr


@pytest.mark.parametrize("more", ["", "idle_s = 77"], ids=["the group stays", "a new group"])
async def test_an_address_that_a_reload_adds_is_warm_before_its_first_request(
    tmp_path: Path, more: str
) -> None:
    servers = [Server(), Server(), Server()]
    for one in servers:
        one.warms_in_s = 0.1
        await one.start()
    try:
        async with served(servers[:2], tmp_path) as made:
            before = [one.asked for one in servers]
            await made.reload(settings(servers, more))
            await until(lambda: said(made.gateway, "upstream-gated"))
            while not (ready := said(made.gateway, "upstream-ready")):
                await made.ask()
            assert [one["worker"] for one in ready] == ["gpu.2"]
            assert (ready[0]["warmed"], ready[0]["in_time"]) == (1, True)
            assert [one["why"] for one in said(made.gateway, "upstream-gated")] == ["new"]
            kinds = [kind for kind, _, _ in servers[2].log]
            assert set(kinds[: kinds.count("warm")]) == {"warm"}
            assert (await made.upstream("gpu.2"))["ramping"]
            assert sum(one.asked for one in servers) > sum(before)
    finally:
        for one in servers:
            await one.stop()


async def test_servers_that_are_all_new_serve_while_they_are_readied(tmp_path: Path) -> None:
    servers = [Server() for _ in range(4)]
    for one in servers:
        await one.start()
    for one in servers[2:]:
        one.warms_in_s = None
    try:
        async with served(servers[:2], tmp_path) as made:
            await made.reload(settings(servers[2:], "gate_s = 2.0"))
            await until(lambda: len(said(made.gateway, "upstream-gated")) == 2)
            assert {await made.ask() for _ in range(3)} <= {"gpu.0", "gpu.1"}
            assert sum(one.asked for one in servers[2:]) == 3
            await until(lambda: len(said(made.gateway, "upstream-ready")) == 2)
            assert not any(one["in_time"] for one in said(made.gateway, "upstream-ready"))
    finally:
        for one in servers:
            await one.stop()
