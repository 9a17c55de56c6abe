"""Requests go to the server whose events say that it holds their prefix, whoever sent it there."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines_faked import Engine, as_events, served
from kv_engine import Publisher, as_maps
from preheat.core.kv_events import Batch, Cleared
from preheat.core.kv_names import KvNames
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.engines.kv_hearing import Hearing, heard_at
from preheat.engines.openai import OpenAi
from preheat.engines.rules import Care
from preheat.engines.worker import WorkerState

pytest.importorskip("zmq", reason="the extra kv isn't installed")
pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

LONG = " ".join(f"rule{one} says that {one * 7} holds." for one in range(300))


class Fleet:
    """Two servers that publish, behind one group of ours."""

    def __init__(self, folder: Path, stack: ExitStack, *, kind: str, replays: bool) -> None:
        self.engines = [Engine(kind=kind), Engine(kind=kind)]
        self.urls = [stack.enter_context(served(engine)) for engine in self.engines]
        self.events: list[tuple[str, dict[str, object]]] = []
        self._folder, self._replays = folder, replays
        self.publishers = [self.publisher(at) for at in range(2)]
        self.ends = [[f"ipc://{folder}/{what}{at}" for at in range(2)] for what in ("kv", "re")]
        hear_at = heard_at(self.urls, self.ends[0], self.ends[1] if replays else [])
        self.group = OpenAi(
            "gpu",
            self.urls,
            routing=POLICIES["preheat"](),
            care=Care("auto", "", 0.05),
            hearing=Hearing(hear_at, KvNames(b"secret"), self.note),
        )

    def note(self, event: str, fields: dict[str, object]) -> None:
        self.events.append((event, fields))

    def publisher(self, at: int) -> Publisher:
        """A process of that server; what the one before it held is gone."""
        replay = f"ipc://{self._folder}/re{at}" if self._replays else ""
        made = Publisher(f"ipc://{self._folder}/kv{at}", replay)
        self.engines[at].blocks.clear()
        is_map = self.engines[at].kind == "vllm"
        self.engines[at].publish = lambda batch: made.publish(as_events(batch, is_map=is_map))
        return made

    async def ask(self, text: str, **fields: Any) -> str:
        """Who answered."""
        messages = [{"role": "system", "content": LONG}, {"role": "user", "content": text}]
        body = msgspec.json.encode({"model": "tiny", "messages": messages, **fields})
        answer = await self.group.send(b"POST", b"/chat/completions", [], body)
        said = json.loads(await answer.read(1_000_000))
        assert answer.status == 200, said
        usage = said["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        answer.placement.ended(Usage(usage["prompt_tokens"], 1, cached, tells_cached=True))
        return answer.worker

    def ask_directly(self, at: int, text: str, **fields: Any) -> None:
        """Somebody else asks that server, past us."""
        messages = [{"role": "system", "content": LONG}, {"role": "user", "content": text}]
        body = {"model": "tiny", "messages": messages, **fields}
        assert self.engines[at].answer("POST", "/v1/chat/completions", body)[0] == 200

    def known(self, at: int) -> WorkerState:
        return self.group.workers()[at]

    def held(self, at: int) -> int:
        known = self.known(at).known
        return 0 if known is None or known.trust == "" else known.held_blocks

    def trust(self, at: int) -> str:
        known = self.known(at).known
        return "" if known is None else known.trust

    def count(self, at: int, what: str) -> int:
        counts = self.known(at).events
        return 0 if counts is None else getattr(counts, what)

    async def all_heard(self) -> None:
        """Both are connected and known."""
        await until(lambda: all(self.known(at).dialect for at in range(2)))
        for at in range(2):
            while not self.count(at, "received"):
                self.publishers[at].publish(as_maps(Batch(1.0, [])))
                await asyncio.sleep(0.05)


@asynccontextmanager
async def fleet(folder: Path, *, kind: str = "vllm", replays: bool = True) -> AsyncIterator[Fleet]:
    with ExitStack() as stack:
        made = Fleet(folder, stack, kind=kind, replays=replays)
        await made.group.start()
        try:
            await made.all_heard()
            yield made
        finally:
            await made.group.aclose()
            for publisher in made.publishers:
                publisher.close()


async def until(condition: Callable[[], object], within_s: float = 15.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("holder", [0, 1])
async def test_who_says_that_it_holds_a_prefix_gets_it(
    tmp_path: Path, kind: str, holder: int
) -> None:
    async with fleet(tmp_path, kind=kind) as servers:
        servers.ask_directly(holder, "hello")
        await until(lambda: servers.held(holder))
        for number in range(4):
            assert await servers.ask(f"question {number}") == f"gpu.{holder}"
        assert servers.engines[1 - holder].computed == 0
        assert servers.engines[holder].cached_tokens > 4 * 1_000
        assert servers.trust(holder) == "told"


async def test_after_a_clear_it_does_not(tmp_path: Path) -> None:
    async with fleet(tmp_path) as servers:
        servers.ask_directly(1, "hello")
        await until(lambda: servers.held(1))
        assert await servers.ask("a") == "gpu.1"
        servers.engines[1].blocks.clear()
        servers.publishers[1].publish(as_maps(Batch(2e9, [Cleared()])))
        await until(lambda: not servers.held(1))
        servers.ask_directly(0, "hello")
        await until(lambda: servers.held(0))
        assert await servers.ask("a") == "gpu.0"


async def test_a_lost_batch_is_asked_for_again(tmp_path: Path) -> None:
    async with fleet(tmp_path) as servers:
        servers.engines[1].publish = lambda batch: servers.publishers[1].publish(
            as_events(batch), is_lost=True
        )
        servers.ask_directly(1, "hello")
        servers.publishers[1].publish(as_maps(Batch(2e9, [])))
        await until(lambda: servers.held(1))
        assert await servers.ask("a") == "gpu.1"
        assert (servers.count(1, "gaps"), servers.count(1, "lost")) == (1, 0)
        assert servers.count(1, "replayed") >= 1
        assert servers.trust(1) == "told"


async def test_without_replays_a_lost_batch_is_told_and_doubted(tmp_path: Path) -> None:
    async with fleet(tmp_path, replays=False) as servers:
        servers.ask_directly(1, "hello")
        await until(lambda: servers.held(1))
        servers.publishers[1].publish(as_maps(Batch(2e9, [])), is_lost=True)
        servers.publishers[1].publish(as_maps(Batch(2e9, [])))
        await until(lambda: servers.trust(1) == "doubted")
        assert servers.count(1, "lost") == 1
        assert ("kv-events-lost", {"worker": "gpu.1", "batches": 1}) in servers.events
        assert await servers.ask("a") == "gpu.1", "doubted for two minutes, not forgotten"


async def test_a_restart_is_noticed_and_a_dead_publisher_harms_nothing(tmp_path: Path) -> None:
    async with fleet(tmp_path) as servers:
        servers.ask_directly(1, "hello")
        await until(lambda: servers.held(1))
        servers.publishers[1].close()
        await until(lambda: servers.trust(1) == "doubted")
        assert [await servers.ask(f"b{one}") for one in range(3)] == ["gpu.1"] * 3
        servers.publishers[1] = servers.publisher(1)
        servers.publishers[1].publish(as_maps(Batch(3e9, [])))
        await until(lambda: servers.count(1, "restarts"))
        await until(lambda: not servers.held(1))
        names = [event for event, _ in servers.events]
        assert "kv-events-broken" in names
        assert "kv-events-restarted" in names
        servers.ask_directly(0, "hello")
        await until(lambda: servers.held(0))
        assert await servers.ask("c") == "gpu.0"


async def test_salts_are_told_apart(tmp_path: Path) -> None:
    async with fleet(tmp_path) as servers:
        servers.ask_directly(0, "hello", cache_salt="tenant-a")
        servers.ask_directly(1, "hello", cache_salt="tenant-b")
        await until(lambda: servers.held(0) and servers.held(1))
        for number in range(3):
            assert await servers.ask(f"x{number}", cache_salt="tenant-b") == "gpu.1"
            assert await servers.ask(f"x{number}", cache_salt="tenant-a") == "gpu.0"
        assert servers.engines[0].cached_tokens > 3 * 1_000


async def test_where_tokens_can_t_be_had_what_was_sent_counts(tmp_path: Path) -> None:
    async with fleet(tmp_path) as servers:
        servers.ask_directly(1, "hello")
        await until(lambda: servers.held(1))
        odd = {"chat_template_kwargs": {"enable_thinking": False}}
        first = await servers.ask("a", **odd)
        assert [await servers.ask(f"b{one}", **odd) for one in range(3)] == [first] * 3
        assert not any("/tokenize" in path for path, _ in _asked(servers.engines))


async def test_a_beginning_that_two_prompts_had_in_common_needs_no_waiting(tmp_path: Path) -> None:
    async with fleet(tmp_path) as servers:
        servers.ask_directly(1, "hello")
        await until(lambda: servers.held(1))
        assert await servers.ask("first") == "gpu.1"
        assert await servers.ask("second") == "gpu.1"
        for engine in servers.engines:
            engine.template = "latest first"  # what it says now is of no use
        assert await servers.ask("third") == "gpu.1"


def _asked(engines: Sequence[Engine]) -> list[tuple[str, dict[str, Any]]]:
    return [one for engine in engines for one in engine.asked]
