"""Who comes cold is given what is hot before it gets requests, within its time, and nobody is refused meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gated_engine import Server, ids_of
from preheat.core.blocks import block_ends, prefix_of
from preheat.core.breaker import Breaker
from preheat.core.kv_names import KvNames
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.engines.dialects.calls import Prompt
from preheat.engines.dialects.readings import Capacity
from preheat.engines.gate import fitting
from preheat.engines.kv_link import LearnerLink
from preheat.engines.openai import OpenAi
from preheat.engines.rules import Care, Rules
from preheat.engines.salts import Salts
from preheat.engines.warmth import Hot, Warmed, Warmth
from preheat.errors import EngineError
from preheat.wire.kv_link import unpacked

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

SYSTEM = [
    {"role": "system", "content": " ".join(f"rule{one}" for one in range(200))},
    {"role": "system", "content": " ".join(f"other{one}" for one in range(200))},
]


def hot(system: dict[str, str]) -> Hot:
    return Hot(prompt=Prompt(model="m", messages=[system]), text_bytes=1_500)


class Fleet:
    """Servers behind one group of ours, and what it tells."""

    def __init__(
        self,
        servers: list[Server],
        *,
        routing: str = "round_robin",
        hots: list[Hot] | None = None,
        link: LearnerLink | None = None,
        **care: Any,
    ) -> None:
        self.servers = servers
        self.events: list[tuple[str, dict[str, object]]] = []
        self.booked: list[tuple[str, Warmed]] = []

        async def source() -> list[Hot]:
            return hots or [hot(one) for one in SYSTEM]

        warmth = Warmth(source, lambda _, why, outcome: self.booked.append((why, outcome)))

        self.group = OpenAi(
            "gpu",
            [one.url for one in servers],
            routing=POLICIES[routing](),
            breaker=Breaker(1, 0.05),
            rules=Rules(health_s=0.05),
            link=link,
            care=Care("auto", "", 0.05, **{"gate_s": 20.0, "warmth": warmth, **care}),
            on_event=lambda event, fields: self.events.append((event, fields)),
        )

    async def ask(self, text: str = "q") -> str:
        """Who answered."""
        messages = [SYSTEM[0], {"role": "user", "content": text}]
        body = msgspec.json.encode({"model": "m", "messages": messages})
        answer = await self.group.send(b"POST", b"/chat/completions", [], body)
        said = json.loads(await answer.read(1_000_000))
        assert answer.status == 200, said
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        usage = Usage(said["usage"]["prompt_tokens"], 1, cached, tells_cached=True)
        if answer.placement is not None:
            answer.placement.ended(usage)
        return answer.worker

    async def cached_for(self, tenant: str) -> int:
        """A tenant's request; how many of its tokens were cached."""
        body = msgspec.json.encode({"model": "m", "messages": [SYSTEM[0]]})
        answer = await self.group.send(b"POST", b"/chat/completions", [], body, tenant=tenant)
        said = json.loads(await answer.read(1_000_000))
        cached = int(said["usage"]["prompt_tokens_details"]["cached_tokens"])
        if answer.placement is not None:
            answer.placement.ended(None)
        return cached

    async def asked(self, number: int) -> dict[str, int]:
        """How many of so many each answered."""
        answered = [await self.ask(f"q{one}") for one in range(number)]
        return {name: answered.count(name) for name in set(answered)}

    def told(self, event: str, **fields: object) -> dict[str, object] | None:
        found = (
            said for name, said in self.events if name == event and fields.items() <= said.items()
        )
        return next(found, None)

    def state(self, at: int) -> str:
        return self.group.workers()[at].state


@asynccontextmanager
async def fleet(servers: int = 2, **care: Any) -> AsyncIterator[Fleet]:
    made = [Server() for _ in range(servers)]
    for one in made:
        await one.start()
    served = Fleet(made, **care)
    await served.group.start()
    try:
        if servers > 1:
            await until(lambda: len(served.events) == servers)  # each has said what it is
        await served.asked(4 * servers)
        await asyncio.sleep(0.15)  # and was asked for its counts since
        yield served
    finally:
        await served.group.aclose()
        for one in made:
            await one.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.01)


async def test_who_was_started_again_gets_no_request_before_what_is_hot() -> None:
    async with fleet() as served:
        first = served.servers[0]
        first.warms_in_s = 0.1
        first.forget()
        await until(lambda: served.told("upstream-gated", worker="gpu.0", why="restarted"))
        assert served.state(0) == "warming"
        while served.told("upstream-ready") is None:
            assert await served.asked(1) == {"gpu.1": 1}
            await asyncio.sleep(0.01)
        assert {kind for kind, _, _ in first.log} == {"warm"}
        ready = served.told("upstream-ready", worker="gpu.0", warmed=2, restored=0, in_time=True)
        assert ready is not None
        assert served.state(0) == "well"
        readied = served.group.workers()[0].readied
        assert (readied.gates, readied.late, readied.warmed) == (1, 0, 2)
        assert readied.tokens == ready["tokens"] > 400
        assert [(why, one.state) for why, one in served.booked] == 2 * [("gate", "done")]
        assert sum(one.computed_tokens for _, one in served.booked) == readied.tokens
        while not first.asked:
            await served.ask()
        assert next(cached for kind, _, cached in first.log if kind == "ask") > 150
        assert len([one for one in served.events if one[0] == "upstream-gated"]) == 1


async def test_its_time_is_bounded() -> None:
    async with fleet(gate_s=0.5) as served:
        first = served.servers[0]
        first.warms_in_s = None
        first.forget()
        await until(lambda: served.state(0) == "warming")
        await until(lambda: served.state(0) == "well")
        ready = served.told("upstream-ready", worker="gpu.0", in_time=False, warmed=0)
        assert ready is not None
        assert 0.4 < float(str(ready["took_s"])) < 2.0
        async with asyncio.timeout(10.0):
            while not first.asked:
                await served.ask()
        assert served.group.workers()[0].readied.late == 1


async def test_where_all_are_cold_all_serve() -> None:
    async with fleet() as served:
        for one in served.servers:
            one.warms_in_s = None
            one.forget()
        await until(lambda: served.state(0) == served.state(1) == "warming")
        assert await served.asked(4) == {"gpu.0": 2, "gpu.1": 2}


async def test_one_whose_drain_ends_is_readied_only_if_it_was_started_again() -> None:
    async with fleet() as served:
        first = served.servers[0]
        for is_restarted in (False, True):
            served.group.set_draining("gpu.0", is_draining=True)
            assert await served.asked(2) == {"gpu.1": 2}
            if is_restarted:
                await first.stop()
                first.log.clear()
                await first.start()
            served.group.set_draining("gpu.0", is_draining=False)
            assert served.state(0) == "warming"
            await until(lambda: served.state(0) == "well")
            assert (served.told("upstream-ready") is not None) == is_restarted
        assert [kind for kind, _, _ in first.log][-1] == "warm"
        assert first.asked == 0


async def test_one_whose_restart_another_look_saw_first_is_readied_when_its_drain_ends() -> None:
    async with fleet() as served:
        first = served.servers[0]
        served.group.set_draining("gpu.0", is_draining=True)
        await first.stop()
        first.log.clear()
        await first.start()
        first.health_in_s = 0.3  # meanwhile its counts are read beside the gate
        served.group.set_draining("gpu.0", is_draining=False)
        await until(lambda: served.told("upstream-restarted", worker="gpu.0"))
        await until(lambda: served.state(0) == "well")
        assert served.told("upstream-ready", worker="gpu.0", warmed=2)
        assert served.told("upstream-gated", worker="gpu.0", why="drained")
        assert first.asked == 0


async def test_a_drain_lets_go_who_is_held_and_holds_it_anew_when_it_ends() -> None:
    async with fleet() as served:
        first = served.servers[0]
        first.warms_in_s = None
        first.forget()
        await until(lambda: served.state(0) == "warming")
        served.group.set_draining("gpu.0", is_draining=True)
        worker = served.group._group._workers[0]
        assert not worker.is_gated
        await until(lambda: not worker.client.in_flight)
        for why in ("restarted", "back", "new"):  # whoever sees something now
            served.group._group._hold(worker, why)
        await asyncio.sleep(0.2)
        assert not worker.is_gated
        assert served.state(0) == "draining"
        assert served.told("upstream-ready") is None
        assert await served.asked(2) == {"gpu.1": 2}
        first.warms_in_s = 0.0
        served.group.set_draining("gpu.0", is_draining=False)  # what was begun isn't done
        assert served.state(0) == "warming"
        await until(lambda: served.told("upstream-ready", worker="gpu.0", warmed=2))
        assert served.group.workers()[0].readied.gates == 1


async def test_a_drain_that_ends_at_once_holds_it_once() -> None:
    async with fleet() as served:
        served.servers[0].warms_in_s = 0.1
        served.servers[0].forget()
        await until(lambda: served.state(0) == "warming")
        for is_draining in 3 * (True, False):
            served.group.set_draining("gpu.0", is_draining=is_draining)
        assert served.state(0) == "warming"
        await until(lambda: served.told("upstream-ready", worker="gpu.0", warmed=2))
        await until(lambda: served.state(0) == "well")
        assert len([one for one in served.events if one[0] == "upstream-ready"]) == 1


async def test_one_that_starts_again_while_it_is_readied_is_readied_again() -> None:
    async with fleet() as served:
        first = served.servers[0]
        first.warms_in_s = 0.3
        first.forget()
        await until(lambda: len(first.log) == 1)
        await asyncio.sleep(0.15)  # it was asked for its counts since
        first.forget()
        await until(lambda: served.told("upstream-ready", worker="gpu.0", in_time=True))
        assert first.asked == 0
        assert {str(ids) for _, ids, _ in first.log} >= {str(ids_of([one])) for one in SYSTEM}
        assert len([one for one in served.events if one[0] == "upstream-ready"]) == 1
        async with asyncio.timeout(10.0):
            while not first.asked:
                await served.ask()
        assert next(cached for kind, _, cached in first.log if kind == "ask") > 150


async def test_one_that_tells_no_counts_is_thought_cold_when_its_drain_ends() -> None:
    async with fleet() as served:
        served.servers[0].has_counts = False
        served.group.set_draining("gpu.0", is_draining=True)
        served.group.set_draining("gpu.0", is_draining=False)
        await until(lambda: served.told("upstream-ready", worker="gpu.0", warmed=2))


async def test_one_that_went_down_and_loads_again_comes_back_warm() -> None:
    async with fleet() as served:
        first = served.servers[0]
        await first.stop()
        assert (await served.asked(4)) == {"gpu.1": 4}
        assert served.state(0) == "down"
        first.log.clear()
        first.loads_for_s, first.warms_in_s = 0.3, 0.05
        await first.start()
        while served.told("upstream-ready") is None:
            assert await served.asked(1) == {"gpu.1": 1}
            await asyncio.sleep(0.01)
        assert served.told("upstream-gated", worker="gpu.0", why="back")
        assert {kind for kind, _, _ in first.log} == {"warm"}
        await asyncio.sleep(0.2)  # and its counts, which began anew, say nothing new
        assert len([one for one in served.events if one[0] == "upstream-gated"]) == 1


async def test_a_new_one_is_readied_and_one_that_leaves_meanwhile_is_let_go() -> None:
    async with fleet() as served:
        third = Server()
        third.warms_in_s = 0.1
        await third.start()
        urls = [one.url for one in served.servers]
        served.group.reconfigure([*urls, third.url], Rules())
        await until(lambda: served.told("upstream-gated", worker="gpu.2", why="new"))
        assert "gpu.2" not in await served.asked(6)
        await until(lambda: served.told("upstream-ready", worker="gpu.2", warmed=2))
        assert third.asked == 0
        fourth = Server()
        fourth.warms_in_s = None
        await fourth.start()
        served.group.reconfigure([*urls, fourth.url], Rules())
        await until(lambda: served.told("upstream-gated", worker="gpu.2", why="new"))
        served.group.reconfigure(urls, Rules())
        await asyncio.sleep(0.1)
        assert await served.asked(4) == {"gpu.0": 2, "gpu.1": 2}
        for one in (third, fourth):
            await one.stop()


async def test_what_is_in_files_comes_first() -> None:
    async with fleet() as served:
        first, order = served.servers[0], []

        async def restore() -> int:
            order.append(len(first.log))
            return 3

        worker = served.group._group._workers[0]
        worker.restore = restore
        first.forget()
        await until(lambda: served.told("upstream-ready", worker="gpu.0", restored=3, warmed=2))
        assert order == [0]


async def test_a_defect_while_it_is_readied_is_told_and_it_takes_requests() -> None:
    async with fleet() as served:

        async def restore() -> int:
            raise KeyError("x")

        served.group._group._workers[0].restore = restore
        served.servers[0].forget()
        await until(lambda: served.told("upstream-ready", worker="gpu.0", in_time=False))
        assert served.told("bug", worker="gpu.0", type="KeyError")
        assert served.state(0) == "well"


async def test_without_a_gate_it_gets_requests_at_once() -> None:
    async with fleet(gate_s=0.0) as served:
        served.servers[0].forget()
        await until(lambda: served.told("upstream-restarted"))
        assert served.state(0) == "well"
        assert served.told("upstream-gated") is None


async def test_rolling_restarts_under_load_fail_nobody() -> None:
    async with fleet() as served:
        for one in served.servers:
            one.warms_in_s = 0.02

        async def load() -> int:
            answered = 0
            while len([one for one in served.events if one[0] == "upstream-ready"]) < 2:
                answered += len(await asyncio.gather(*(served.ask(f"q{one}") for one in range(4))))
                await asyncio.sleep(0.005)
            return answered

        loading = asyncio.ensure_future(load())
        for at, server in enumerate(served.servers):
            served.group.set_draining(f"gpu.{at}", is_draining=True)
            await until(lambda at=at: not served.group.workers()[at].in_flight)
            await server.stop()
            server.log.clear()
            await server.start()
            served.group.set_draining(f"gpu.{at}", is_draining=False)
            await until(lambda at=at: served.told("upstream-ready", worker=f"gpu.{at}"))
            kinds = [kind for kind, _, _ in server.log]
            assert set(kinds[: kinds.count("warm")]) == {"warm"}
        assert await loading > 20
        assert sum(one.failures for one in served.group.workers()) == 0


async def test_what_fits_is_taken_from_the_hottest_on() -> None:
    sizes = [4_000, 400_000, 8_000, 2_000]
    hots = [msgspec.structs.replace(hot(SYSTEM[0]), text_bytes=size) for size in sizes]

    def taken(**capacity: int) -> list[int]:
        return [one.text_bytes for one in fitting(hots, Capacity(**capacity))]

    assert [one.text_bytes for one in fitting(hots, None)] == sizes
    assert taken(tokens=4_000, block_tokens=16) == [4_000, 2_000]
    assert taken(tokens=8_000, slots=2, slot_tokens=4_000) == [4_000, 8_000]
    assert len(fitting(hots * 40, None)) == 64


# Another one at the same address -----------------------------------------------------------------


@pytest.mark.parametrize("to", [{"root": "weights-2"}, {"root": "weights-1", "version": "0.33.0"}])
async def test_another_model_or_version_is_readied_though_nobody_saw_it_away(
    to: dict[str, str],
) -> None:
    async with fleet(routing="preheat") as served:
        at = next(at for at, one in enumerate(served.servers) if one.asked)
        server, name = served.servers[at], f"gpu.{at}"
        router = served.group._group._router
        assert router is not None
        assert router.known(at, 0.0).held_blocks > 0
        server.warms_in_s = 0.1
        server.switch(**to)  # its counts go on
        await until(lambda: served.told("upstream-gated", worker=name, why="switched"))
        assert router.known(at, 0.0).held_blocks == 0
        assert served.state(at) == "warming"
        while served.told("upstream-ready") is None:
            assert name not in await served.asked(1)
            await asyncio.sleep(0.01)
        assert served.told("upstream-ready", worker=name, warmed=2, in_time=True)
        assert {kind for kind, _, _ in server.log} == {"warm"}
        assert router.known(at, 0.0).is_back  # its share grows
        said = served.told("upstream-switched", worker=name)
        assert said is not None
        assert said["was"] == "m=weights-1 0.32.0"
        assert said["now"] == f"m={to['root']} {to.get('version', '0.32.0')}"
        assert served.group.workers()[at].starts == {"restarted": 0, "switched": 1}
        await asyncio.sleep(0.2)
        assert len([one for one in served.events if one[0] == "upstream-gated"]) == 1


async def test_one_that_was_started_again_with_another_model_is_switched_and_not_both() -> None:
    async with fleet() as served:
        first = served.servers[0]
        first.switch()
        first.forget()
        await until(lambda: served.told("upstream-ready", worker="gpu.0", warmed=2))
        await asyncio.sleep(0.2)
        assert served.told("upstream-restarted") is None
        assert served.group.workers()[0].starts == {"restarted": 0, "switched": 1}


async def test_a_restart_alone_is_no_switch() -> None:
    async with fleet() as served:
        served.servers[0].forget()
        await until(lambda: served.told("upstream-ready", worker="gpu.0"))
        await asyncio.sleep(0.2)
        assert served.told("upstream-switched") is None
        assert served.group.workers()[0].starts == {"restarted": 1, "switched": 0}


async def test_one_that_was_switched_while_it_was_drained_is_readied_when_that_ends() -> None:
    async with fleet() as served:
        served.group.set_draining("gpu.0", is_draining=True)
        served.servers[0].switch()
        await asyncio.sleep(0.2)
        assert served.told("upstream-switched") is None  # it isn't asked
        served.group.set_draining("gpu.0", is_draining=False)
        await until(lambda: served.told("upstream-ready", worker="gpu.0", warmed=2))
        assert served.told("upstream-switched", worker="gpu.0")
        assert served.servers[0].asked == 0


async def test_what_it_leaves_unsaid_is_no_switch() -> None:
    async with fleet() as served:
        first = served.servers[0]
        first.switch(root="", version="")
        await asyncio.sleep(0.2)
        first.switch(root="weights-1")
        await asyncio.sleep(0.2)
        assert served.told("upstream-switched") is None
        assert served.state(0) == "well"


# Tenants apart ---------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2])
async def test_each_tenants_requests_bear_its_salt_where_the_server_takes_one(servers: int) -> None:
    salts = Salts(b"secret")
    async with fleet(servers, salts=salts, routing="preheat") as served:
        cached = [await served.cached_for(tenant) for tenant in ("a", "a", "b", "b")]
        assert [one > 0 for one in cached] == [False, True, False, True]
        sent = {salt for one in served.servers for salt in one.salts}
        assert sent == {None, salts.of("a"), salts.of("b")}  # without a tenant none


async def test_a_server_that_takes_none_gets_none() -> None:
    server = Server()
    server.owner = "somebody"
    await server.start()
    served = Fleet([server], salts=Salts(b"secret"))
    await served.cached_for("a")
    assert server.salts == [None]
    await served.group.aclose()
    await server.stop()


async def test_nothing_goes_unsalted_to_one_that_cant_say_yet_what_it_is() -> None:
    server = Server()
    server.loads_for_s = 60.0
    await server.start()
    served = Fleet([server], salts=Salts(b"secret"))
    with pytest.raises(EngineError, match="nothing yet"):
        await served.cached_for("a")
    server.loads_for_s = 0.0
    await served.cached_for("a")
    assert server.salts == [Salts(b"secret").of("a")]
    await served.group.aclose()
    await server.stop()


async def test_warm_ups_bear_their_tenants_salt() -> None:
    salts = Salts(b"secret")
    hots = [msgspec.structs.replace(hot(SYSTEM[0]), tenant="a")]
    async with fleet(hots=hots, salts=salts) as served:
        first = served.servers[0]
        first.salts.clear()
        first.forget()
        await until(lambda: served.told("upstream-ready", worker="gpu.0", warmed=1))
        assert set(first.salts) == {salts.of("a")}
        served.group.set_draining("gpu.1", is_draining=True)
        assert await served.cached_for("b") == 0
        assert await served.cached_for("a") > 150


async def test_what_was_warmed_is_known_to_the_router_and_found_once() -> None:
    messages = [SYSTEM[0], {"role": "user", "content": "q"}]
    body = msgspec.json.encode({"model": "m", "messages": messages})
    ends = block_ends(body, 1)
    known = msgspec.structs.replace(hot(SYSTEM[0]), blocks=prefix_of(body, b"").blocks[: ends[0]])
    async with fleet(hots=[known], routing="preheat") as served:
        next(one for one in served.servers if one.asked).forget()
        await until(lambda: served.told("upstream-ready"))
        found = []
        for _ in range(3):
            answer = await served.group.send(b"POST", b"/chat/completions", [], body)
            said = json.loads(await answer.read(1_000_000))["usage"]
            cached = said["prompt_tokens_details"]["cached_tokens"]
            placement = answer.placement
            assert placement is not None
            assert int(placement.reason.partition(b"overlap=")[2].partition(b",")[0]) > 100
            placement.ended(Usage(said["prompt_tokens"], 1, cached, tells_cached=True))
            found.append((placement.warmed.tokens, cached))
        assert found[0][0] == min(found[0][1], served.booked[0][1].computed_tokens) > 150
        assert [tokens for tokens, _ in found[1:]] == [0, 0]


async def test_one_that_hangs_keeps_nobody_from_knowing_what_they_are() -> None:
    async with fleet() as served:
        served.servers[0].hangs = True
        started = Fleet(served.servers, salts=Salts(b"secret"))
        served.group.set_draining("gpu.0", is_draining=True)
        async with asyncio.timeout(3.0):
            kind = await started.group._group._warmers.known(started.group._group._workers)
        assert kind.salt_field == "cache_salt"
        await started.group.aclose()


async def test_servers_that_a_reload_brings_are_asked_whether_they_take_a_salt() -> None:
    plain, other = Server(), Server()
    plain.owner = "somebody"
    for one in (plain, other):
        await one.start()
    served = Fleet([plain], salts=Salts(b"secret"))
    await served.cached_for("a")
    served.group.reconfigure([other.url], Rules())
    await served.cached_for("a")
    assert plain.salts == [None]
    assert other.salts == [Salts(b"secret").of("a")]
    await served.group.aclose()
    for one in (plain, other):
        await one.stop()


async def test_what_two_want_warmed_at_once_is_booked_once() -> None:
    async with fleet() as served:
        served.servers[0].warms_in_s = 0.1
        wanted = [served.group.warm(hot(SYSTEM[1]), ["gpu.0"], 10.0) for _ in range(2)]
        outcomes = [one for found in await asyncio.gather(*wanted) for one in found]
        assert [one.state for one in outcomes] == ["done", "done"]
        assert [why for why, _ in served.booked] == ["admin"]


async def test_what_was_warmed_is_told_to_the_other_processes() -> None:
    link = LearnerLink("/nowhere/learner.sock", "gpu", KvNames(b""), lambda *_: None)
    async with fleet(link=link) as served:
        link._waiting.clear()
        known = msgspec.structs.replace(hot(SYSTEM[1]), blocks=[1, 2, 3])
        await served.group.warm(known, ["gpu.1"], 10.0)
        assert [(one.url, unpacked(one.blocks)) for one in link._waiting] == [
            (served.servers[1].url, [1, 2, 3])
        ]
