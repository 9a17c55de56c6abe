"""Prefill and decode servers: both asked as vLLM's protocol has it, and what happens where one can't."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from kv_transfer_faked import Fabric, KvServer
from preheat import config
from preheat.core.breaker import Breaker
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.engines.openai import OpenAi
from preheat.engines.roles import Role, prefill_body
from preheat.engines.rules import Rules
from preheat.errors import ConfigError, EngineError
from preheat.transport.client import Timeouts
from preheat.wiring import rules

pytestmark = pytest.mark.timeout(30)

PROMPT = "all work and no play makes jack a dull boy " * 40
SHORT = Timeouts(connect_s=1.0, first_byte_s=1.0, idle_s=1.0, queue_s=0.3)


class World:
    """A group of fake servers, by their names."""

    def __init__(self, engine: OpenAi, servers: dict[str, KvServer], events: list[Any]) -> None:
        self.engine = engine
        self.servers = servers
        self.events = events

    def __getitem__(self, name: str) -> KvServer:
        return self.servers[name]

    async def ask(self, path: bytes = b"/completions", **fields: Any) -> dict[str, Any]:
        body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 9} | fields).encode()
        response = await self.engine.send(b"POST", path, [], body)
        try:
            answer = json.loads(await response.read(65_536))
        finally:
            response.close()
        return {"status": response.status, "worker": response.worker} | answer

    def counts(self) -> dict[str, int]:
        return {name: len(one.asked) for name, one in self.servers.items()}


@contextlib.asynccontextmanager
async def world(
    *named: tuple[str, Role], routed: bool = True, modes: Sequence[str] = ()
) -> AsyncIterator[World]:
    fabric, events = Fabric(), []
    async with contextlib.AsyncExitStack() as stack:
        servers = {}
        for position, (name, _) in enumerate(named):
            mode = modes[position] if modes else "fine"
            servers[name] = await stack.enter_async_context(KvServer(name, fabric, mode))
        engine = OpenAi(
            "pd",
            [one.url for one in servers.values()],
            timeouts=SHORT,
            breaker=Breaker(2, 60.0),
            rules=Rules(health_path="", roles=tuple(role for _, role in named)),
            routing=POLICIES["preheat"]() if routed else None,
            on_event=lambda event, fields: events.append((event, fields)),
        )
        try:
            yield World(engine, servers, events)
        finally:
            await engine.aclose()


PAIR: tuple[tuple[str, Role], ...] = (("p", "prefill"), ("d", "decode"))


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.asyncio
async def test_a_prompt_is_computed_at_one_and_answered_at_the_other(routed: bool) -> None:
    async with world(*PAIR, routed=routed) as pair:
        said = await pair.ask(stream=True, stream_options={"include_usage": True}, min_tokens=4)
        assert (said["status"], said["by"], said["worker"]) == (200, "d", "pd.1")
        assert (pair["p"].computed, pair["d"].computed, pair["d"].fetched) == (1, 0, 1)
        first, second = pair["p"].asked[0], pair["d"].asked[0]
        assert (first["max_tokens"], first["stream"]) == (1, False)
        assert not {"stream_options", "min_tokens"} & set(first)
        handed = second.pop("kv_transfer_params")
        assert (handed["remote_engine_id"], handed["remote_port"]) == ("p", 5600)
        assert second == {
            "model": "m",
            "prompt": PROMPT,
            "max_tokens": 9,
            "stream": True,
            "stream_options": {"include_usage": True},
            "min_tokens": 4,
        }
        assert pair["p"].ids == pair["d"].ids != [""]
        assert pair.events == []


@pytest.mark.asyncio
async def test_why_a_prefill_server_computed_it_is_told_and_where_its_prefix_is_then() -> None:
    async with world(("p", "prefill"), ("q", "prefill"), ("d", "decode")) as three:
        body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 9}).encode()
        for is_again in (False, True):
            response = await three.engine.send(b"POST", b"/completions", [], body)
            await response.read(65_536)
            placed = response.placement
            assert placed is not None
            told = dict(part.split(b"=") for part in placed.reason.split(b", "))
            assert told[b"prefill"] == (b"pd.0" if three["p"].asked else b"pd.1")
            assert int(told[b"input"]) > 300
            assert (int(told[b"overlap"]) > 300) == is_again
            held = {one.name: one.known for one in three.engine.workers()}
            assert held["pd.2"] is not None
            assert (held["pd.2"].held_blocks > 0) == is_again, "known at the answer's end"
            assert held["pd.2"].input_tokens == 0, "what was fetched counts for nobody"
            placed.began()
            placed.ended(Usage(400, 9, 400, tells_cached=True))
            response.close()
        assert all(one.in_flight == 0 for one in three.engine.workers())


@pytest.mark.asyncio
async def test_a_client_s_own_request_id_is_kept() -> None:
    async with world(*PAIR) as pair:
        body = json.dumps({"prompt": PROMPT}).encode()
        response = await pair.engine.send(
            b"POST", b"/completions", [(b"X-Request-Id", b"me")], body
        )
        await response.read(65_536)
        response.close()
        assert (pair["p"].ids, pair["d"].ids) == (["me"], ["me"])


@pytest.mark.asyncio
async def test_of_prefill_servers_the_one_that_holds_the_prefix_is_asked() -> None:
    async with world(("p", "prefill"), ("q", "prefill"), ("d", "decode")) as three:
        await three.ask()
        first = "p" if three["p"].asked else "q"
        for _ in range(4):
            await three.ask()
        assert len(three[first].asked) == 5
        assert len(three["d"].asked) == 5


@pytest.mark.parametrize("mode", ["die", "cut", "503", "500", "no-connector"])
@pytest.mark.asyncio
async def test_where_the_first_step_fails_the_request_is_one_like_any_other(mode: str) -> None:
    async with world(*PAIR, ("a", "any"), modes=(mode, "fine", "fine")) as three:
        said = await three.ask()
        if mode in {"500", "no-connector"}:  # all are well: the router's choice is open
            assert said["status"] in {200, 500}
        else:
            assert said["by"] in {"d", "a"}
        assert all("kv_transfer_params" not in one for one in three["d"].asked + three["a"].asked)
        [(_, fields)] = [one for one in three.events if one[0] == "handover-failed"]
        assert fields["worker"] == "pd.0"
        kinds = {"die": "reset", "cut": "reset", "no-connector": "no-kv-transfer"}
        assert fields["kind"] == kinds.get(mode, f"status-{mode}")


@pytest.mark.asyncio
async def test_an_answer_of_one_token_has_nothing_to_hand_over_and_is_no_failure() -> None:
    async with world(*PAIR, modes=("at-end", "fine")) as pair:
        for _ in range(4):
            assert (await pair.ask())["status"] == 200
        assert pair.events == []
        assert len([one for one in pair["p"].asked if "kv_transfer_params" in one]) == 4


@pytest.mark.asyncio
async def test_servers_without_a_connector_are_asked_for_two_steps_no_more() -> None:
    async with world(*PAIR, modes=("no-connector", "no-connector")) as pair:
        for _ in range(8):
            assert (await pair.ask())["status"] == 200
        assert len([one for one in pair["p"].asked if "kv_transfer_params" in one]) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["429", "400"])
async def test_who_is_busy_or_is_asked_nonsense_is_fit_all_the_same(mode: str) -> None:
    async with world(*PAIR, modes=(mode, "fine")) as pair:
        for _ in range(5):
            assert (await pair.ask())["status"] in {200, int(mode)}
            pair.engine._group._workers[0].avoided_until = 0.0
        assert {fields["kind"] for _, fields in pair.events} <= {"status-429"}
        pair["p"].mode = "fine"
        await pair.ask()
        assert pair["d"].fetched == 1


@pytest.mark.asyncio
async def test_who_cannot_fetch_is_asked_for_the_whole() -> None:
    async with world(*PAIR, modes=("fine", "loses")) as pair:
        said = await pair.ask()
        assert (said["status"], said["by"]) == (200, "d")
        assert [("kv_transfer_params" in one) for one in pair["d"].asked] == [True, False]
        assert pair.events == [("handover-failed", {"worker": "pd.1", "kind": "status-500"})]


@pytest.mark.asyncio
async def test_a_decode_server_that_refuses_leaves_the_kv_to_the_next() -> None:
    async with world(("p", "prefill"), ("d", "decode"), ("e", "decode")) as three:
        three["d"].mode = "429"
        said = await three.ask()
        assert said["status"] == 200
        if said["by"] == "e":  # the router may have named the prefill server: it has the prompt
            assert (three["e"].fetched, three["e"].computed) == (1, 0)
        assert len(three["p"].asked) == (1 if said["by"] == "e" else 2)


@pytest.mark.asyncio
async def test_where_one_died_with_the_request_another_is_asked_for_the_whole() -> None:
    async with world(*PAIR, modes=("fine", "die")) as pair:
        assert (await pair.ask())["by"] == "p"
        assert pair.counts() == {"p": 2, "d": 1}
        assert "kv_transfer_params" not in pair["p"].asked[1]
    async with world(*PAIR, modes=("die", "die")) as pair:
        with pytest.raises(EngineError) as caught:
            await pair.ask()
        assert caught.value.kind == "reset"


@pytest.mark.asyncio
async def test_without_both_roles_among_the_well_it_is_plain() -> None:
    async with world(*PAIR, ("a", "any")) as three:
        assert three.engine.set_draining("pd.1", is_draining=True)
        for _ in range(4):
            said = await three.ask()
            assert said["by"] in {"p", "a"}
        assert all("kv_transfer_params" not in one for one in three["p"].asked + three["a"].asked)
        three.engine.set_draining("pd.1", is_draining=False)
        assert (await three.ask())["by"] == "d"
        three.engine._group._workers[0].is_gated = True  # new, and not warm yet
        asked = len(three["p"].asked)
        await three.ask()
        assert len(three["p"].asked) == asked


@pytest.mark.asyncio
async def test_a_prefill_server_that_is_down_is_found_out_again() -> None:
    async with world(*PAIR) as pair:
        pair["p"].mode = "die"
        for _ in range(2):
            assert (await pair.ask())["by"] == "d"
        assert pair.engine.workers()[0].state == "down"
        asked = len(pair["p"].asked)
        assert (await pair.ask())["by"] == "d"
        assert len(pair["p"].asked) == asked


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (b"/embeddings", {}),
        (b"/completions", {"n": 2}),
        (b"/completions", {"kv_transfer_params": {"do_remote_decode": False}}),
    ],
)
@pytest.mark.asyncio
async def test_what_cannot_be_handed_over_is_asked_in_one_step(
    path: bytes, fields: dict[str, Any]
) -> None:
    async with world(*PAIR) as pair:
        assert (await pair.ask(path, **fields))["status"] == 200
        assert sum(pair.counts().values()) == 1


@pytest.mark.asyncio
async def test_many_at_once_are_each_handed_their_own() -> None:
    async with world(("p", "prefill"), ("q", "prefill"), ("d", "decode"), ("e", "decode")) as four:
        asked = (four.ask(prompt=f"{number} {PROMPT}") for number in range(24))
        said = await asyncio.gather(*asked)
        assert {one["by"] for one in said} == {"d", "e"}
        assert four["d"].fetched + four["e"].fetched == 24
        assert four["d"].computed + four["e"].computed == 0


@pytest.mark.asyncio
async def test_roles_and_addresses_change_together() -> None:
    async with world(*PAIR) as pair:
        urls = [one.url for one in pair.servers.values()]
        with pytest.raises(ConfigError, match="one for each of urls"):
            pair.engine.reconfigure(urls, Rules(health_path="", roles=("prefill",)))
        assert (await pair.ask())["by"] == "d"
        pair.engine.reconfigure(urls[::-1], Rules(health_path="", roles=("prefill", "decode")))
        assert (await pair.ask())["by"] == "p"
        pair.engine.reconfigure(urls, Rules(health_path=""))
        await pair.ask()
        assert sum(pair.counts().values()) == 5


def test_a_body_that_is_no_object_has_one_step() -> None:
    assert prefill_body(b"[1]") is None
    assert prefill_body(b"\xff") is None
    told = json.loads(prefill_body(b'{"prompt":"a","max_completion_tokens":7}') or b"")
    assert (told["max_tokens"], told["max_completion_tokens"]) == (1, 1)


# settings


@pytest.mark.parametrize(
    ("roles", "more", "part"),
    [
        (["prefill"], {}, "one for each of urls"),
        (["prefill", "decode", "any"], {}, "one for each of urls"),
        (["prefill", "any"], {}, "a prompt needs a prefill and a decode server"),
        (["prefill", "decode"], {"dialect": "sglang"}, "sglang has no such protocol"),
        (["prefil", "decode"], {}, "engines.pd.roles"),
    ],
)
def test_roles_that_mean_nothing_are_refused(
    roles: list[str], more: dict[str, Any], part: str
) -> None:
    engine = {"urls": ["http://a:1", "http://b:1"], "roles": roles} | more
    with pytest.raises(ConfigError) as caught:
        config.check({"engines": {"pd": engine}})
    assert part in str(caught.value)


def test_roles_reach_the_group_s_rules() -> None:
    engine = {"urls": ["http://a:1", "http://b:1"], "roles": ["prefill", "decode"]}
    settings = config.check({"engines": {"pd": engine}})
    assert rules(settings.engines["pd"]).roles == ("prefill", "decode")
