"""Several servers behind one rule that looks at prefixes and queues, at fault in every way: each fault
has a stated end, and leaves nothing counted as under way. (The table: docs/errors.md. What a refusal
costs: test_upstream_faults.py.)"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import Fake, Gateway, chat, running
from peer import Peer
from preheat.core.breaker import Breaker
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.engines.openai import OpenAi
from preheat.engines.rules import Rules
from preheat.errors import EngineError
from preheat.transport.client import Timeouts
from rawclient import Answer, Raw, post
from upstream import End, Step, Upstream, answer, chunk, stream_head

pytestmark = pytest.mark.timeout(60)

_LONG = "the same rules for all. " * 200


def event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    fields = {"id": "e", "object": "chat.completion.chunk", "created": 1, "model": "m1"}
    return chunk(b"data: %b\n\n" % json.dumps({**fields, "choices": [choice]}).encode())


def whole(prompt_tokens: int = 1_000, cached_tokens: int = 0) -> bytes:
    message = {"role": "assistant", "content": "fine"}
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 1,
        "total_tokens": prompt_tokens + 1,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    said = {"id": "c", "object": "chat.completion", "created": 1, "model": "m1", "usage": usage}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return answer(json.dumps({**said, "choices": choices}).encode())


def settings(*urls: str) -> str:
    return (
        f"[engines.pair]\nurls = {json.dumps(urls)}\npoll_s = 0\nconnect_s = 1.0\n"
        "first_byte_s = 0.5\nidle_s = 0.5\nhealth_s = 0.1\n"
    )


def ask(gateway: Gateway, text: str, *, stream: bool = False) -> Answer:
    with Raw(gateway.port) as client:
        client.send(post(chat(_LONG + text, stream=stream)))
        return client.answer()


def upstreams(gateway: Gateway) -> list[dict[str, Any]]:
    found = gateway.get("/preheat/v1/workers").json["upstreams"]
    assert [one["name"] for one in found] == ["pair.0", "pair.1"]
    return list(found)


def at_rest(gateway: Gateway) -> bool:
    """Nobody is thought to have anything to do."""
    return all((one["in_flight"], one["queue_s"]) == (0, 0.0) for one in upstreams(gateway))


def wait_for(condition: Any, within_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "it doesn't come true"
        time.sleep(0.02)


# Hanging ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Upstream]]:
    with Upstream() as one, Upstream() as two:
        yield [one, two]


@pytest.fixture(scope="module")
def served(pair: list[Upstream], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    toml = settings(*(one.url for one in pair)) + "breaker_failures = 100\n"
    with Gateway.started(toml, tmp_path_factory.mktemp("group")) as gateway:
        yield gateway
        assert '"event":"bug"' not in gateway.stderr, gateway.stderr


HANGING: dict[str, tuple[list[Step], bool, str]] = {
    "before-the-first-byte": ([End.HANG], False, "engine-timeout-first-byte"),
    "before-a-streams-first-byte": ([End.HANG], True, "engine-timeout-first-byte"),
    "in-mid-answer": ([whole()[:-20], End.HANG], False, "engine-timeout-idle"),
    "behind-a-streams-head": ([stream_head(), End.HANG], True, "engine-timeout-idle"),
    "in-mid-stream": ([stream_head(), event("fi"), End.HANG], True, "engine-timeout-idle"),
}


@pytest.mark.parametrize(("act", "stream", "code"), HANGING.values(), ids=HANGING)
def test_who_hangs_is_given_up_in_time_and_nothing_stays_under_way(
    served: Gateway, pair: list[Upstream], act: list[Step], stream: bool, code: str
) -> None:
    for one in pair:
        one.play(act)
    began_at = time.monotonic()
    answered = ask(served, f"hang {act} {stream}", stream=stream)
    took_s = time.monotonic() - began_at
    assert 0.4 < took_s < 2.0
    if event("fi") in act:
        assert answered.status == 200
        assert not answered.is_complete
        assert answered.events[0]["choices"][0]["delta"]["content"] == "fi"
        assert answered.events[-1]["error"]["code"] == code
    elif answered.status == 200:  # its head had been passed on
        assert not answered.is_complete
        assert [one["error"]["code"] for one in answered.events] == [code]
    else:
        assert (answered.status, answered.code) == (504, code)
    assert sum(one.calls for one in pair) == 1, "it may be worked on: not asked twice"
    wait_for(lambda: sum(one.left for one in pair) == 1)
    wait_for(lambda: at_rest(served))


# Killed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_begun", [False, True], ids=["before-the-first-byte", "in-mid-stream"])
def test_one_that_is_killed_under_a_stream_costs_that_stream_at_most(
    has_begun: bool, tmp_path: Path
) -> None:
    fakes = [Fake(), Fake()]
    slow = {"content": "a b c d e f", "pieces": 6}
    slow |= {"chunk_delay_s": 0.2} if has_begun else {"delay_s": 0.4}
    with running(*fakes), Gateway.started(settings(*(one.url for one in fakes)), tmp_path) as one:
        for fake in fakes:
            fake.script(slow, default={"content": "fine"})
        with Raw(one.port) as client:
            client.send(post(chat(_LONG + "killed", stream=True)))
            wait_for(lambda: sum(fake.calls for fake in fakes) == 1)
            if has_begun:
                time.sleep(0.3)
            killed = next(at for at, fake in enumerate(fakes) if fake.calls)
            fakes[killed].process.kill()
            answered = client.answer()
        if has_begun:
            assert (answered.status, answered.is_complete) == (200, False)
            assert answered.events[0]["choices"][0]["delta"]
            assert answered.events[-1]["error"]["code"] == "engine-reset"
        else:
            assert (answered.status, answered.is_complete) == (200, True)
            assert answered.headers["x-preheat-worker"] == f"pair.{1 - killed}"
        asked_again = fakes[1 - killed].calls
        assert asked_again == (0 if has_begun else 1), "what a client has seen isn't begun again"
        wait_for(lambda: at_rest(one))
        fakes[1 - killed].script(default={"content": "fine"})
        after = [ask(one, f"after {number}") for number in range(8)]
        assert {reply.status for reply in after} == {200}
        assert {reply.headers["x-preheat-worker"] for reply in after} == {f"pair.{1 - killed}"}
        assert at_rest(one)


# Lying --------------------------------------------------------------------------------------


def test_one_that_lies_about_what_it_had_cached_is_doubted_and_harms_no_answer(
    pair: list[Upstream], tmp_path: Path
) -> None:
    liar, honest = pair
    liar.play([whole(cached_tokens=5_000)])  # of prompts that nobody has sent before
    honest.play([whole()])
    with Gateway.started(settings(liar.url, honest.url), tmp_path) as gateway:
        answers: list[Answer] = []

        def run(client: int) -> None:
            for number in range(30):
                with Raw(gateway.port) as raw:
                    raw.send(post(chat(f"client {client:03} {number:03} " * 270)))
                    answers.append(raw.answer())

        clients = [threading.Thread(target=run, args=(client,)) for client in range(4)]
        for one in clients:
            one.start()
        for one in clients:
            one.join(30)
        assert [one.status for one in answers] == [200] * 120
        trusts = [one["trust"] for one in upstreams(gateway)]
        assert trusts[0] == "doubted"
        assert trusts[1] != "doubted"
        assert at_rest(gateway)


# Flapping -----------------------------------------------------------------------------------


@asynccontextmanager
async def group_of(*peers: Peer) -> AsyncIterator[OpenAi]:
    engine = OpenAi(
        "many",
        [one.url for one in peers],
        routing=POLICIES["preheat"](),
        timeouts=Timeouts(connect_s=1.0, first_byte_s=1.0, idle_s=1.0, queue_s=1.0),
        breaker=Breaker(3, 60.0),
        rules=Rules(health_s=0.05, retry_ratio=1.0),
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


class Clients:
    """Eight that ask something new again and again, until they are told to stop."""

    def __init__(self, engine: OpenAi) -> None:
        self.workers: list[str] = []
        self.failed: list[str] = []
        self._engine = engine
        self._is_over = False
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(8)]

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _run(self, number: int) -> None:
        turn = 0
        while not self._is_over:
            turn += 1
            body = {"model": "m", "prompt": f"client {number} turn {turn} " * 200}
            try:
                await self._ask(msgspec.json.encode(body))
            except EngineError as error:
                self.failed.append(error.kind)
            await asyncio.sleep(0.004)

    async def _ask(self, body: bytes) -> None:
        response = await self._engine.send(b"POST", b"/completions", [], body)
        assert response.placement is not None
        try:
            await response.read(65_536)
            if response.status == 200:
                self.workers.append(response.worker)
                response.placement.ended(Usage(1_000, 1))
            else:
                self.failed.append(str(response.status))
        finally:
            response.placement.gone()
            response.close()


async def until(condition: Any, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0)


def in_flight(engine: OpenAi) -> int:
    return engine.workers()[0].in_flight


def queues_s(engine: OpenAi) -> list[float]:
    return [-1.0 if one.known is None else one.known.queue_s for one in engine.workers()]


async def flap(peer: Peer, engine: OpenAi, how: str) -> int:
    """Down and up for 100 ms each, for 3 s; how many requests it took along."""
    taken = 0
    for _ in range(15):
        if how == "refuses":
            peer.mode, peer.health = "503 Busy", 503
        else:
            if how == "is gone":
                await until(lambda: not in_flight(engine))
            taken += in_flight(engine)
            await peer.die()
        await asyncio.sleep(0.1)
        if how == "refuses":
            peer.mode, peer.health = "fine", 200
        else:
            await peer.start()
        await asyncio.sleep(0.1)
    return taken


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["refuses", "is gone", "is killed"])
async def test_one_that_flaps_fails_no_request_but_those_it_takes_along(how: str) -> None:
    async with Peer() as flapping, Peer() as well, group_of(flapping, well) as engine:
        clients = Clients(engine)
        taken = await flap(flapping, engine, how)
        asked = len(clients.workers)
        await until(lambda: all(one.state == "well" for one in engine.workers()))
        await clients.stop()
        assert asked > 500
        assert {"many.0", "many.1"} == set(clients.workers)
        assert len(clients.failed) <= taken
        assert set(clients.failed) <= {"reset"}
        if how != "is killed":
            assert clients.failed == []
        assert [one.in_flight for one in engine.workers()] == [0, 0]
        assert queues_s(engine) == [0.0, 0.0]
