"""Two servers of vLLM's kind with LMCache behind them: requests that wait go where they are loaded."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from engines_faked import Engine, served
from lmcache_faked import Lmcache
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.engines import lmcache, lmcache_tier
from preheat.engines.dialects import DIALECTS
from preheat.engines.lmcache_fleet import LmcacheRules
from preheat.engines.lmcache_tier import LmcacheCounts, LmcacheTier
from preheat.engines.openai import OpenAi
from preheat.engines.rules import Care, Rules
from preheat.gateway.table import Table
from preheat.gateway.upstreams import Upstreams
from preheat.transport.client import Response

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


def text(name: str, rules: int = 400) -> str:
    return " ".join(f"{name}{one} says that {one * 7} holds." for one in range(rules))


class Fleet:
    """Two servers, one group, one LMCache that knows an instance behind each."""

    def __init__(self, stack: ExitStack, cache: Lmcache, instances: tuple[str, ...]) -> None:
        self.engines = [Engine(kind="vllm"), Engine(kind="vllm")]
        self.urls = [stack.enter_context(served(engine)) for engine in self.engines]
        self.cache = cache
        url = stack.enter_context(served(cache))  # type: ignore[arg-type]  # answers as an Engine does
        port = int(url.rsplit(":", 1)[1])
        self.cache.instances = {"n0": ("127.0.0.1", port), "n1": ("127.0.0.1", port)}
        self.events: list[tuple[str, dict[str, object]]] = []
        rules = LmcacheRules(url, instances)
        self.tier = LmcacheTier(rules, lambda *one: self.events.append(one))
        self.group = OpenAi(
            "gpu",
            self.urls,
            routing=POLICIES["cost"](),
            care=Care("vllm", "", 0.05),
            lmcache=self.tier,
        )

    @property
    def counts(self) -> LmcacheCounts:
        return self.tier.counts

    async def send(self, prompt: str, **more: Any) -> Response:
        body = msgspec.json.encode({"model": "tiny", "messages": messages(prompt)})
        answer = await self.group.send(b"POST", b"/chat/completions", [], body, **more)
        assert answer.status == 200
        await answer.read(1_000_000)
        return answer

    async def ask(self, prompt: str, **more: Any) -> str:
        """Who answered; its end is told."""
        answer = await self.send(prompt, **more)
        answer.placement.ended(Usage(1_000, 1, 0, tells_cached=True))
        return answer.worker

    async def make_wait(self) -> None:
        """Both have much to do: prompts that have been sent there, and none of whose answers has begun."""
        for one in range(12):
            await self.send(text(f"busy{one}-"))

    def ids(self, prompt: str) -> list[int]:
        status, answer = self.engines[0].answer("POST", "/tokenize", {"messages": messages(prompt)})
        assert status == 200
        return list(answer["tokens"])


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


@asynccontextmanager
async def fleet(
    cache: Lmcache | None = None, *, instances: tuple[str, ...] = ("n0", "n1"), opens: bool = True
) -> AsyncIterator[Fleet]:
    with ExitStack() as stack:
        made = Fleet(stack, cache or Lmcache(), instances)
        made.cache.store(list(range(300)), "n0")  # what tells how keys are made
        await made.group.start()
        try:
            if opens:
                await until(lambda: [one[0] for one in made.events] == ["lmcache-on"])
            yield made
        finally:
            await made.group.aclose()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("is_old", "at", "fault"),
    [(False, 0, ""), (False, 1, ""), (False, 1, "odd"), (True, 0, ""), (True, 1, "odd")],
)
async def test_a_prompt_goes_to_the_instance_that_can_load_it(
    is_old: bool, at: int, fault: str
) -> None:
    async with fleet(Lmcache(is_old=is_old, fault=fault)) as made:
        prompt = text("paused")
        made.cache.store(made.ids(prompt), f"n{at}", size_bytes=1_000_000)
        await made.make_wait()
        answer = await made.send(prompt)
        assert answer.worker == f"gpu.{at}"
        assert b"loadable=" in answer.placement.reason
        assert made.counts.in_time >= 1
        assert made.counts.failed == 0
        counts = msgspec.structs.asdict(made.counts)
        assert made.group.lmcache_counts() == counts
        told = Upstreams(
            Table({"gpu": made.group, "none": OpenAi("none", "http://x:1")}, {}, {}, {}), b""
        )
        assert told.lmcache_counts() == {"gpu": counts}


async def test_a_long_prompt_is_read_and_written_in_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that is done with as many ids as a prompt has, while requests go on in the event loop."""
    loop, threads = threading.get_ident(), dict[str, set[bool]]()

    def noted(where: Any, name: str) -> None:
        sound = getattr(where, name)

        def note(*given: Any, **named: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident() == loop)
            return sound(*given, **named)

        monkeypatch.setattr(where, name, note)

    async with fleet() as made:
        prompt = text("paused", 600)
        made.cache.store(made.ids(prompt), "n1", "l2", size_bytes=10_000)
        await made.make_wait()
        noted(lmcache_tier, "prompt_of")
        for name in ("lookup", "read_lookup", "prefetch"):
            noted(lmcache, name)
        for name in ("tokenise", "read_tokens"):
            noted(type(DIALECTS["vllm"]), name)
        assert (await made.send(prompt)).worker == "gpu.1"
        await until(lambda: made.counts.prefetched == 1)
    names = {"prompt_of", "tokenise", "read_tokens", "lookup", "read_lookup", "prefetch"}
    assert threads == {name: {False} for name in names}


async def test_who_does_not_wait_is_not_looked_up() -> None:
    async with fleet() as made:
        asked = len(made.cache.asked)
        for one in range(5):
            await made.ask(text(f"quick{one}"))
        assert len(made.cache.asked) == asked


async def test_what_lies_lower_comes_to_memory_while_its_request_waits() -> None:
    async with fleet() as made:
        prompt = text("paused", 600)
        ids = made.ids(prompt)
        made.cache.store(ids, "n1", "l2", size_bytes=10_000)
        await made.make_wait()
        assert (await made.send(prompt)).worker == "gpu.1"
        await until(lambda: made.counts.prefetched == 1)
        assert made.cache.holds(ids, "n1") == len(ids) // 256
        assert made.cache.jobs == {}, "each is asked for until it is done"
        asked = [
            body for question, body in made.cache.asked if question == "POST /cache/prefetches"
        ]
        assert [body["instance_id"] for body in asked] == ["n1"]


async def test_what_would_come_later_than_its_request_begins_is_not_asked_for() -> None:
    async with fleet() as made:
        prompt = text("paused")
        made.cache.store(made.ids(prompt), "n1", "l2", size_bytes=10**12)
        await made.make_wait()
        await made.send(prompt)
        await until(lambda: made.tier._flights == 0)
        await asyncio.sleep(0.1)
        assert not [one for one in made.cache.asked if one[0] == "POST /cache/prefetches"]


async def test_of_a_session_that_is_over_what_only_it_has_had_leaves_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lmcache_tier, "_SETTLED_S", 0.05)
    async with fleet() as made:
        trunk = text("trunk", 200)
        over, other = trunk + text("over"), trunk + text("other")
        for prompt in (over, other):
            made.cache.store(made.ids(prompt), "n0")
            made.cache.store(made.ids(prompt), "n0", "l2")
        await made.ask(other, tenant="b", session="other")
        await made.ask(over, tenant="a", session="over")
        assert made.counts.deleted_keys == 0
        await made.ask(over, tenant="a", session="over", state="over")
        await until(lambda: made.counts.deleted_keys > 0)
        ids, of_trunk = made.ids(over), len(made.ids(trunk)) // 256
        left = made.cache.holds(ids, "n0")
        assert of_trunk <= left < len(ids) // 256
        assert made.counts.deleted_keys == len(ids) // 256 - left
        assert made.cache.holds(made.ids(other), "n0") == len(made.ids(other)) // 256
        assert made.cache.holds(ids, "n0", "l2") == len(ids) // 256, "it may come back after all"


@pytest.mark.parametrize("fault", ["late", "500", "text", "list"])
async def test_whatever_it_does_requests_are_answered(fault: str) -> None:
    async with fleet() as made:
        prompt = text("paused")
        made.cache.store(made.ids(prompt), "n1")
        await made.make_wait()
        made.cache.fault = fault
        began_at = asyncio.get_running_loop().time()
        answer = await made.send(prompt)
        assert asyncio.get_running_loop().time() - began_at < 1.0
        assert b"loadable=" not in answer.placement.reason


async def test_one_that_fails_again_and_again_is_left_alone() -> None:
    async with fleet() as made:
        await made.make_wait()
        made.cache.fault = "500"
        asked = len(made.cache.asked)
        for one in range(20):
            await made.send(text(f"p{one}"))
        assert made.counts.failed == 8
        assert len(made.cache.asked) - asked == 8


@pytest.mark.parametrize(
    ("instances", "why"),
    [
        (("n0", "n7"), "LMCache has no instance n7; it has n0, n1"),
        ((), "no instance of LMCache is told from the others by a server's address"),
    ],
)
async def test_instances_that_do_not_match_are_told(instances: tuple[str, ...], why: str) -> None:
    async with fleet(instances=instances, opens=False) as made:
        await until(lambda: bool(made.events))
        assert made.events[0][0] == "lmcache-off"
        assert why in str(made.events[0][1]["why"])
        await made.make_wait()
        assert (await made.send(text("any"))).status == 200
        assert made.counts.lookups == 0


async def test_one_instance_behind_all_is_found_by_its_address_or_its_name() -> None:
    async with fleet(instances=("n0",)) as made:
        assert made.events == [("lmcache-on", {"workers": 2})]


async def test_servers_that_join_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_tier, "_AGAIN_S", 600.0)
    async with fleet(instances=("n0",)) as made:
        made.group.reconfigure([*made.urls[:1], made.urls[1] + "/v1"], Rules())
        await until(lambda: len(made.tier._behind) == 2)
        prompt = text("paused")
        made.cache.store(made.ids(prompt), "n0")
        await made.make_wait()
        assert b"loadable=" in (await made.send(prompt)).placement.reason
