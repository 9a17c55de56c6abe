"""The admin routes that warm and verify, the gate in a whole gateway, and what is booked of both."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gated_engine import Server
from harness import Gateway, Reply

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(90)]

KEYS = {"ONE": "tenant-key-51c2", "TWO": "tenant-key-9d40"}
SYSTEM = {"role": "system", "content": " ".join(f"rule{one}" for one in range(300))}
TOML = """
[models.m]
input = 2
cached_input = 0.5
output = 4
[engines.gpu]
urls = ["{}", "{}"]
poll_s = 0.1
health_s = 0.1
breaker_failures = 1
"""


class Served:
    """A gateway, its servers, and blocking calls made from this loop."""

    def __init__(self, gateway: Gateway, servers: list[Server]) -> None:
        self.gateway = gateway
        self.servers = servers

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        return await asyncio.to_thread(self.gateway.post, path, body, headers)

    async def get(self, path: str) -> Any:
        return (await asyncio.to_thread(self.gateway.get, path)).json

    async def ask(self, session: str, key: str = "") -> Reply:
        messages = [SYSTEM, {"role": "user", "content": f"q of {session}"}]
        headers = {"X-Preheat-Session": session}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        reply = await self.post(
            "/v1/chat/completions", {"model": "m", "messages": messages}, **headers
        )
        assert reply.status == 200, reply.body
        return reply

    async def warm(self, **fields: Any) -> Any:
        reply = await self.post("/preheat/v1/warm", {"model": "m", "messages": [SYSTEM], **fields})
        assert reply.status == 200, reply.body
        return reply.json

    async def upstream(self, name: str) -> Any:
        upstreams = (await self.get("/preheat/v1/workers"))["upstreams"]
        return next(one for one in upstreams if one["name"] == name)


@asynccontextmanager
async def served(folder: Path, more: str = "") -> AsyncIterator[Served]:
    servers = [Server(), Server()]
    for one in servers:
        await one.start()
    toml = TOML.format(*(one.url for one in servers)) + more
    gateway = await asyncio.to_thread(Gateway, toml, folder=folder, environment=KEYS)
    made = Served(gateway, servers)
    try:
        async with asyncio.timeout(10.0):
            while not (await made.upstream("gpu.1"))["dialect"]:
                await asyncio.sleep(0.05)
        yield made
    finally:
        await asyncio.to_thread(gateway.stop)
        for one in servers:
            await one.stop()
    assert '"event":"bug"' not in gateway.stderr, gateway.stderr


async def test_a_prefix_is_warmed_where_it_is_wanted_verified_found_and_booked(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as made:
        first, second = made.servers
        told = await made.warm(workers=["gpu.1"])
        (outcome,) = told["outcomes"]
        assert (told["done"], told["of"]) == (1, 1)
        assert (outcome["worker"], outcome["state"], outcome["chunks"] > 1) == (
            "gpu.1",
            "done",
            True,
        )
        assert 300 <= outcome["computed_tokens"] == outcome["tokens"]
        assert (len(first.log), len(second.log)) == (0, outcome["chunks"])
        verified = (
            await made.post("/preheat/v1/verify", {"model": "m", "messages": [SYSTEM]})
        ).json
        verdicts = {one["worker"]: one["proof"]["verdict"] for one in verified["proofs"]}
        assert verdicts == {"gpu.0": "refuted", "gpu.1": "proven"}
        reply = await made.ask("s1")
        assert reply.headers["x-preheat-worker"] == "gpu.1"  # the router knows
        await made.ask("s2")
        rows = (await made.get("/preheat/v1/ledger"))["rows"]
        warm = next(one for one in rows if one["layer"] == "warm")
        forward = next(one for one in rows if one["layer"] == "forward")
        assert (warm["reason"], warm["tenant"], warm["requests"]) == ("admin", "local", 1)
        assert warm["input_tokens"] == outcome["computed_tokens"]
        assert warm["paid"] == warm["spent_by_us"] == 2_000_000 * outcome["computed_tokens"]
        assert 280 < forward["warmed_tokens"] <= outcome["computed_tokens"]  # once
        assert forward["saved_by_us"] == 1_500_000 * forward["warmed_tokens"]
        ledger = await made.get("/preheat/v1/ledger")
        assert ledger["residual"] == 0
        stats = await made.get("/preheat/v1/stats")
        told = stats["warm_ups"]
        assert (told["made"], told["computed_tokens"]) == (1, outcome["computed_tokens"])
        assert told["found_tokens"] == forward["warmed_tokens"]
        assert told["payback"] == pytest.approx(told["found_tokens"] / told["computed_tokens"])
        assert stats["hit_ratio"]["exact"]["by_requests"] == 0
    assert '"event":"warm"' in made.gateway.stderr


async def test_who_hangs_up_calls_it_off_and_time_and_number_are_bounded(tmp_path: Path) -> None:
    async with served(tmp_path) as made:
        for one in made.servers:
            one.warms_in_s = None
        told = await made.warm(workers=["gpu.0"], within_s=0.3)
        assert [one["state"] for one in told["outcomes"]] == ["busy"]
        body = json.dumps({"model": "m", "messages": [SYSTEM]}).encode()
        head = b"POST /preheat/v1/warm HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        clients = []
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", made.gateway.port)
            writer.write(head + body)
            clients.append(writer)
        async with asyncio.timeout(10.0):
            while (reply := await made.post("/preheat/v1/warm", {"text": "x"})).status != 429:
                await asyncio.sleep(0.05)
            assert reply.headers["retry-after"]
            for writer in clients:
                writer.transport.abort()
            for one in made.servers:
                one.warms_in_s = 0.0
            while (await made.post("/preheat/v1/warm", {"text": "x", "model": "m"})).status == 429:
                await asyncio.sleep(0.05)
        assert (await made.warm())["done"] == 2


async def test_what_isnt_a_prefix_or_a_server_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as made:
        for body, status in (
            ({"model": "m"}, 400),
            ({"text": "x", "ids": [1]}, 400),
            ({"text": ""}, 400),
            ({"messages": "x"}, 400),
            ({"messages": []}, 400),
            ({"messages": [{}] * 65_537}, 400),
            ({"ids": [1] * 1_048_577}, 400),
            ({"text": "x" * 2**23}, 413),
            ({"messages": [SYSTEM], "within_s": 1e9}, 400),
            ({"messages": [SYSTEM], "other": 1}, 400),
            ({"messages": [SYSTEM], "workers": ["gpu.7"]}, 404),
        ):
            for path in ("/preheat/v1/warm", "/preheat/v1/verify"):
                assert (await made.post(path, body)).status == status, body


async def test_what_is_warmed_for_a_tenant_that_isnt_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, '[tenants.one]\napi_key_env = "ONE"\n') as made:
        for tenant, status in (("tow", 404), (None, 400), ("one", 200)):
            body = {"model": "m", "messages": [SYSTEM], "tenant": tenant}
            for path in ("/preheat/v1/warm", "/preheat/v1/verify"):
                assert (await made.post(path, body)).status == status, tenant


async def test_a_gateway_readies_a_server_with_what_its_sessions_share(tmp_path: Path) -> None:
    tenants = '[tenants.one]\napi_key_env = "ONE"\n[tenants.two]\napi_key_env = "TWO"\n'
    async with served(tmp_path, tenants) as made:
        assert (await made.post("/preheat/v1/warm", {"text": "x"})).status == 400  # whose?
        for session in range(6):
            await made.ask(f"s{session}", KEYS["ONE"])
        await made.ask("s9", KEYS["TWO"])
        salts = {salt for one in made.servers for salt in one.salts}
        assert len(salts) == 2
        assert None not in salts
        async with asyncio.timeout(10.0):
            while (
                "preheat_trunks_messages 1.0"
                not in (await asyncio.to_thread(made.gateway.get, "/metrics")).body.decode()
            ):
                await asyncio.sleep(0.05)
        at = max(range(2), key=lambda one: made.servers[one].asked)
        server, name = made.servers[at], f"gpu.{at}"
        server.salts.clear()
        server.warms_in_s = 0.2
        server.forget()
        async with asyncio.timeout(20.0):
            while not (await made.upstream(name))["warming"]:
                await asyncio.sleep(0.02)
            while not (readied := (await made.upstream(name))["readied"])["gates"]:
                await made.ask(f"t{asyncio.get_running_loop().time()}", KEYS["ONE"])
        assert (readied["warmed"], readied["late"]) == (1, 0)
        assert (await made.upstream(name))["ramping"]
        warmed = [
            salt
            for (kind, _, _), salt in zip(server.log, server.salts, strict=True)
            if kind == "warm"
        ]
        assert len(set(warmed)) == 1
        assert set(warmed) < salts
        kinds = [kind for kind, _, _ in server.log]
        assert set(kinds[: kinds.count("warm")]) == {"warm"}
        rows = (await made.get("/preheat/v1/ledger"))["rows"]
        (warm,) = [one for one in rows if one["layer"] == "warm"]
        assert (warm["tenant"], warm["model"], warm["reason"]) == ("one", "m", "gate")
        assert warm["input_tokens"] == readied["tokens"]
        errors = (await made.get("/preheat/v1/stats"))["engine_errors"]
        assert errors == {}
