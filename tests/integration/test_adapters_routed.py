"""LoRA adapters on two servers: who has one is asked, a load happens once, and what can't be loaded ends."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import Fake, Gateway, chat, running
from preheat.core.breaker import Breaker
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.engines import adapter_loads
from preheat.engines.dialects.calls import Prompt
from preheat.engines.fake import FakeEngine, Script
from preheat.engines.fake_flaws import Flaws
from preheat.engines.openai import OpenAi
from preheat.engines.rules import Care, Rules
from preheat.engines.warmth import Hot, Warmed, Warmth
from preheat.errors import EngineError
from preheat.transport.client import Client
from preheat.transport.server import HttpServer, Limits, Refusal

pytestmark = pytest.mark.timeout(60)

SOURCES = {"sql": "/adapters/sql", "law": "/adapters/law"}
LONG = "words " * 400


def _refuse(refusal: Refusal) -> tuple[bytes, bytes]:
    return b"HTTP/1.1 %d X\r\n" % refusal.status, refusal.message.encode()


class Server:
    """The fake engine in the test's own loop, which can be started again at its address."""

    def __init__(self, **flaws: Any) -> None:
        told: dict[str, Any] = {"owned_by": "vllm", "metrics": True, "loads_adapters": True}
        self.flaws = Flaws(**{**told, "models": ("m",), **flaws})
        self.port = 0

    async def start(self) -> None:
        engine = FakeEngine(script=Script(flaws=self.flaws))
        self._server = HttpServer(engine.handle, _refuse, Limits())
        self.port = await self._server.listen("127.0.0.1", self.port)
        self.client = Client(f"http://127.0.0.1:{self.port}")

    async def stop(self) -> None:
        await self.client.aclose()
        await self._server.aclose()

    async def post(self, path: str, **fields: Any) -> int:
        body = json.dumps(fields).encode()
        answer = await self.client.request(b"POST", path.encode(), [], body)
        await answer.read(1_000_000)
        return answer.status

    async def load(self, name: str) -> None:
        assert await self.post("/v1/load_lora_adapter", lora_name=name, lora_path="/x") == 200

    async def log(self) -> Any:
        answer = await self.client.request(b"GET", b"/fake/log", [], b"")
        return json.loads(await answer.read(10_000_000))

    async def paths(self) -> list[str]:
        return [one["path"] for one in (await self.log())["requests"]]


class Fleet:
    """Two of them behind one group of ours, and what it tells."""

    def __init__(self, servers: list[Server], routing: str, poll_s: float, **care: Any) -> None:
        self.servers = servers
        self.events: list[tuple[str, dict[str, object]]] = []
        self.group = OpenAi(
            "gpu",
            [f"http://127.0.0.1:{one.port}" for one in servers],
            routing=POLICIES[routing](),
            breaker=Breaker(1, 0.05),
            rules=Rules(retries=0, health_s=0.05),
            care=Care("auto", "", poll_s, **{"gate_s": 20.0, "adapters": SOURCES, **care}),
            on_event=lambda event, fields: self.events.append((event, fields)),
        )

    async def ask(self, model: str = "sql", text: str = "q") -> tuple[str, str, int]:
        """Who answered, why, and how many of the prompt's tokens were cached."""
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        answer = await self.group.send(b"POST", b"/chat/completions", [], json.dumps(body).encode())
        said = json.loads(await answer.read(1_000_000))
        assert answer.status == 200, said
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        reason = ""
        if answer.placement is not None:
            reason = answer.placement.reason.decode()
            usage = Usage(said["usage"]["prompt_tokens"], 1, cached, tells_cached=True)
            answer.placement.ended(usage)
        return answer.worker, reason.rpartition("adapter=")[2], cached

    async def loads(self) -> list[int]:
        return [(await one.log())["adapter_loads"] for one in self.servers]

    def has(self, at: int) -> list[str]:
        counts = self.group.workers()[at].adapters
        return [] if counts is None else counts.names

    def told(self, event: str, **fields: object) -> dict[str, object] | None:
        found = (
            said for name, said in self.events if name == event and fields.items() <= said.items()
        )
        return next(found, None)


@asynccontextmanager
async def fleet(
    *servers: Server, routing: str = "preheat", poll_s: float = 0.05, **care: Any
) -> AsyncIterator[Fleet]:
    made = list(servers) or [Server(), Server()]
    for one in made:
        if not one.port:
            await one.start()
    served = Fleet(made, routing, poll_s, **care)
    await served.group.start()
    try:
        await until(lambda: len(served.events) == len(made))  # each has said what it is
        await asyncio.sleep(0.1)  # and what it has
        yield served
    finally:
        await served.group.aclose()
        for one in made:
            await one.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
@pytest.mark.parametrize("routing", ["preheat", "round_robin", "least_loaded"])
async def test_requests_go_to_the_one_that_has_it(routing: str) -> None:
    servers = Server(), Server()
    for one in servers:
        await one.start()
    await servers[1].load("sql")
    async with fleet(*servers, routing=routing, adapters={}) as served:
        assert (served.has(0), served.has(1)) == ([], ["sql"])
        asked = await asyncio.gather(*(served.ask(text=f"q{one}") for one in range(8)))
        assert {(worker, why) for worker, why, _ in asked} == {("gpu.1", "held")}
        assert "gpu.0" in {(await served.ask("m", f"q{one}"))[0] for one in range(8)}


@pytest.mark.asyncio
async def test_a_burst_has_it_loaded_once() -> None:
    async with fleet(Server(adapter_load_s=0.3), Server(adapter_load_s=0.3)) as served:
        asked = await asyncio.gather(*(served.ask(text=f"q{one}") for one in range(12)))
        assert len({worker for worker, _, _ in asked}) == 1
        assert {why for _, why, _ in asked} == {"load"}
        assert sorted(await served.loads()) == [0, 1]
        worker = asked[0][0]
        loaded = served.told("adapter-loaded", worker=worker, adapter="sql")
        assert loaded is not None
        assert 0.3 <= float(str(loaded["took_s"])) < 2.0
        assert (await served.ask())[:2] == (worker, "held")


@pytest.mark.asyncio
async def test_an_adapters_prefixes_are_its_own() -> None:
    async with fleet() as served:
        await served.ask("m", LONG)
        worker, _, cached = await served.ask("sql", LONG)
        assert cached == 0
        again = await served.ask("sql", LONG)
        assert (again[0], again[1]) == (worker, "held")
        assert again[2] > 2_000


@pytest.mark.asyncio
async def test_a_refusal_falls_elsewhere_and_that_one_is_left_alone() -> None:
    servers = Server(most_adapters=1), Server()
    for one in servers:
        await one.start()
    await servers[0].load("other")
    async with fleet(*servers, routing="round_robin") as served:
        for model in ("sql", "law", "sql", "law", "sql"):
            assert (await served.ask(model))[0] == "gpu.1"
        refused = served.told("adapter-refused", worker="gpu.0")
        assert refused is not None
        assert "No room" in str(refused["why"])
        tries = (await served.loads())[0]
        assert tries <= 3, "its own, and one for each adapter"
        counts = served.group.workers()[0]
        assert counts.adapters is not None
        assert (counts.adapters.refused, counts.adapters.loads) == (tries - 1, 0)
        assert counts.failures == 0


@pytest.mark.asyncio
async def test_where_nobody_loads_it_the_client_is_told_so_and_when() -> None:
    full = Server(most_adapters=1), Server(most_adapters=1)
    for one in full:
        await one.start()
        await one.load("other")
    async with fleet(*full) as served:
        for _ in range(3):
            with pytest.raises(EngineError) as caught:
                await served.ask()
            assert (caught.value.kind, caught.value.status) == ("adapter", 503)
            assert 50.0 < caught.value.retry_after_s <= 60.0
        assert await served.loads() == [2, 2], "asked once each, not for each request"
        assert (await served.ask("other"))[1] == "held"


@pytest.mark.asyncio
async def test_who_was_started_again_loads_what_was_asked_there_before_it_serves() -> None:
    async with fleet(Server(adapter_load_s=0.2), Server(adapter_load_s=0.2)) as served:
        worker = (await served.ask())[0]
        at = int(worker[-1])
        served.events.clear()
        first = served.servers[at]
        await first.stop()
        with pytest.raises(EngineError):  # retries are 0 here
            await served.ask()
        assert served.has(at) == []
        await first.start()
        await until(lambda: served.told("upstream-gated", worker=worker, why="back"))
        while served.told("upstream-ready", worker=worker) is None:
            assert (await served.ask())[0] != worker
            await asyncio.sleep(0.01)
        ready = served.told("upstream-ready", worker=worker, adapters=1, in_time=True)
        assert ready is not None
        assert (await first.log())["adapters"] == ["sql"]
        assert "/v1/chat/completions" not in await first.paths()
        assert served.has(at) == ["sql"]


@pytest.mark.asyncio
async def test_prefixes_of_an_adapter_are_warmed_after_it_was_loaded() -> None:
    booked: list[Warmed] = []
    system = {"role": "system", "content": LONG}

    async def hots() -> list[Hot]:
        return [Hot(prompt=Prompt(model="sql", messages=[system]), text_bytes=2_400)]

    warmth = Warmth(hots, lambda _, __, outcome: booked.append(outcome))
    async with fleet(warmth=warmth) as served:
        worker = (await served.ask())[0]
        first = served.servers[int(worker[-1])]
        await first.stop()
        with pytest.raises(EngineError):
            await served.ask()
        await first.start()
        await until(lambda: served.told("upstream-ready", worker=worker))
        assert served.told("upstream-ready", worker=worker, adapters=1, warmed=1) is not None
        assert [one.state for one in booked] == ["done"]
        assert (await first.paths())[0] == "/v1/load_lora_adapter"


@pytest.mark.asyncio
async def test_the_gate_opens_in_time_where_a_load_doesnt_end() -> None:
    async with fleet(Server(), Server(), gate_s=0.5) as served:
        worker = (await served.ask())[0]
        first = served.servers[int(worker[-1])]
        await first.stop()
        with pytest.raises(EngineError):
            await served.ask()
        first.flaws = Flaws(
            owned_by="vllm", metrics=True, loads_adapters=True, models=("m",), adapter_load_s=30.0
        )
        await first.start()
        await until(lambda: served.told("upstream-ready", worker=worker, in_time=False))
        for one in range(4):
            assert (await served.ask(text=f"q{one}"))[0] != worker, "that load is still under way"


@pytest.mark.asyncio
async def test_one_that_was_given_up_unseen_is_loaded_again_for_the_request_that_finds_out() -> (
    None
):
    async with fleet(poll_s=30.0) as served:
        worker = (await served.ask())[0]
        at = int(worker[-1])
        server = served.servers[at]
        assert await server.post("/v1/unload_lora_adapter", lora_name="sql") == 200
        assert served.has(at) == ["sql"]
        assert (await served.ask())[:2] == (worker, "held")
        assert (await served.loads())[at] == 2


@pytest.mark.asyncio
async def test_another_404_is_the_clients() -> None:
    async with fleet() as served:
        await served.ask()
        body = b'{"model": "sql", "input": "x"}'
        answer = await served.group.send(b"POST", b"/nowhere", [], body)
        assert answer.status == 404
        answer.close()
        assert sum(await served.loads()) == 1


@pytest.mark.asyncio
async def test_a_load_without_end_is_given_up_and_done_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_loads, "_WITHIN_S", 0.3)
    async with fleet(Server(adapter_load_s=60.0), Server(), routing="round_robin") as served:
        for model in ("sql", "law"):
            began_at = time.monotonic()
            assert (await served.ask(model))[0] == "gpu.1"
            assert time.monotonic() - began_at < 3.0
        refused = served.told("adapter-refused", worker="gpu.0")
        assert refused is not None
        assert "0.3 s" in str(refused["why"])


@pytest.mark.asyncio
async def test_a_server_that_dies_while_it_loads_is_not_waited_for() -> None:
    async with fleet(Server(adapter_load_s=30.0), Server(), routing="round_robin") as served:
        asked = [asyncio.ensure_future(served.ask(model)) for model in ("sql", "law")]
        await asyncio.sleep(0.2)
        assert sum(not one.done() for one in asked) == 1, "each rule's turn: one of them is there"
        await served.servers[0].stop()
        async with asyncio.timeout(5.0):
            assert {worker for worker, _, _ in await asyncio.gather(*asked)} == {"gpu.1"}
        await served.servers[0].start()


@pytest.mark.asyncio
async def test_a_load_goes_on_when_all_have_left_who_wanted_it() -> None:
    async with fleet(Server(adapter_load_s=0.3), Server(adapter_load_s=0.3)) as served:
        asked = [asyncio.ensure_future(served.ask()) for _ in range(3)]
        await asyncio.sleep(0.1)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: served.told("adapter-loaded"))
        assert (await served.ask())[1] == "held"
        assert sum(await served.loads()) == 1


@pytest.mark.asyncio
async def test_one_server_alone_loads_what_it_is_asked_for() -> None:
    async with fleet(Server()) as served:
        assert (await served.ask())[:2] == ("gpu", "load")
        assert (await served.ask())[:2] == ("gpu", "held")
        assert await served.loads() == [1]


def test_behind_a_gateway_it_is_seen_in_headers_metrics_and_on_the_admin_route(
    tmp_path: Path,
) -> None:
    flaws = '{"owned_by": "vllm", "metrics": true, "loads_adapters": true, "models": ["m1"]}'
    fakes = Fake("--flaws", flaws), Fake("--flaws", flaws)
    toml = f"""
[telemetry]
open_metrics = true
[engines.gpu]
urls = ["{fakes[0].url}", "{fakes[1].url}"]
poll_s = 0.1
[engines.gpu.adapters]
sql = "/adapters/sql"
"""
    with running(*fakes), Gateway.started(toml, tmp_path) as gateway:
        replies = [
            gateway.post("/v1/chat/completions", chat(f"q{one}", model="sql")) for one in range(3)
        ]
        assert [one.status for one in replies] == [200] * 3, replies[0].body
        routes = [one.headers["x-preheat-route"].rpartition(", ")[2] for one in replies]
        assert routes == ["adapter=load", "adapter=held", "adapter=held"]
        worker = replies[0].headers["x-preheat-worker"]
        assert {one.headers["x-preheat-worker"] for one in replies} == {worker}
        upstreams = gateway.get("/preheat/v1/workers").json["upstreams"]
        upstream = next(one for one in upstreams if one["name"] == worker)
        assert upstream["adapters"] == ["sql"]
        assert upstream["adapter_loads"]["loads"] == 1
        metrics = gateway.get("/metrics").body.decode()
        of_it = f'preheat_upstream_adapter_loads_total{{of="loaded",upstream="{worker}"}} 1.0'
        assert of_it in metrics
        assert f'preheat_upstream_adapters{{upstream="{worker}"}} 1.0' in metrics
        assert sum(one.log["adapter_loads"] for one in fakes) == 1
    assert '"event":"adapter-loaded"' in gateway.stderr.replace(" ", "")
