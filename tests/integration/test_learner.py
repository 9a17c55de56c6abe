"""One process hears the events for all workers, and tells each what the others have sent."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest

from engines_faked import Engine, as_events, served
from kv_engine import Publisher, as_maps
from preheat.core.kv_events import Batch, Cleared
from preheat.core.kv_names import KvNames
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.engines.kv_hearing import Hearing, heard_at
from preheat.engines.kv_link import LearnerLink
from preheat.engines.openai import OpenAi
from preheat.engines.rules import Care
from preheat.engines.worker import WorkerState
from preheat.wire import kv_link as wire

pytest.importorskip("zmq", reason="the extra kv isn't installed")
pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(90)]

LONG = " ".join(f"rule{one} says that {one * 7} holds." for one in range(300))


@contextmanager
def learner(path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """That process."""
    command = [sys.executable, "-m", "preheat.host.learner", "--lifeline-fd", "0"]
    with subprocess.Popen(
        [*command, "--socket", str(path)], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)


class Workers:
    """Two worker processes' groups, here in one, before two servers that publish."""

    def __init__(self, folder: Path, stack: ExitStack, *, tells: bool) -> None:
        self.folder = folder
        self.socket = folder / "learner.sock"
        self.engines = [Engine(), Engine()]
        self.urls = [stack.enter_context(served(engine)) for engine in self.engines]
        self.ends = [f"ipc://{folder}/kv{at}" for at in range(2)]
        self.replays = [f"ipc://{folder}/re{at}" for at in range(2)]
        self.publishers = [self._publisher(at) for at in range(2)] if tells else []
        self.tells = tells
        self.events: list[str] = []
        self.groups = [self.group() for _ in range(2)]

    def group(self) -> OpenAi:
        names = KvNames(b"")

        def note(event: str, _: dict[str, object]) -> None:
            self.events.append(event)

        link = LearnerLink(str(self.socket), "gpu", names, note)
        hear_at = heard_at(self.urls, self.ends, self.replays, link)
        return OpenAi(
            "gpu",
            self.urls,
            routing=POLICIES["preheat"](),
            care=Care("auto", "", 0.05),
            hearing=Hearing(hear_at, names, note) if self.tells else None,
            link=link,
        )

    def _publisher(self, at: int) -> Publisher:
        made = Publisher(self.ends[at], self.replays[at])
        self.engines[at].publish = lambda batch: made.publish(as_events(batch))
        return made

    async def ask(self, group: OpenAi, text: str) -> str:
        messages = [{"role": "system", "content": LONG}, {"role": "user", "content": text}]
        body = msgspec.json.encode({"model": "tiny", "messages": messages})
        answer = await group.send(b"POST", b"/chat/completions", [], body)
        usage = json.loads(await answer.read(1_000_000))["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        answer.placement.ended(Usage(usage["prompt_tokens"], 1, cached, tells_cached=True))
        return answer.worker

    def fill(self, at: int) -> None:
        messages = [{"role": "system", "content": LONG}, {"role": "user", "content": "hello"}]
        body = {"model": "tiny", "messages": messages}
        assert self.engines[at].answer("POST", "/v1/chat/completions", body)[0] == 200


def state(group: OpenAi, at: int) -> WorkerState:
    return group.workers()[at]


def held(group: OpenAi, at: int) -> int:
    known = state(group, at).known
    return 0 if known is None else known.held_blocks


def trust(group: OpenAi, at: int) -> str:
    known = state(group, at).known
    return "" if known is None else known.trust


@asynccontextmanager
async def workers(folder: Path, *, tells: bool = True) -> AsyncIterator[Workers]:
    with ExitStack() as stack:
        made = Workers(folder, stack, tells=tells)
        for group in made.groups:
            await group.start()
        await until(lambda: all(state(group, 1).dialect for group in made.groups))
        try:
            yield made
        finally:
            for group in made.groups:
                await group.aclose()
            for publisher in made.publishers:
                publisher.close()


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_all_workers_know_what_one_process_hears(tmp_path: Path) -> None:
    with learner(tmp_path / "learner.sock"):
        async with workers(tmp_path) as made:
            one, other = made.groups
            made.fill(1)
            await until(lambda: held(one, 1) and held(other, 1))
            assert trust(one, 1) == trust(other, 1) == "told"
            assert await made.ask(one, "a") == await made.ask(other, "b") == "gpu.1"
            assert made.engines[0].computed == 0
            late = made.group()
            made.groups.append(late)
            await late.start()
            await until(lambda: held(late, 1) >= held(one, 1) > 0)
            assert await made.ask(late, "c") == "gpu.1"
            made.publishers[1].publish(as_maps(Batch(2e9, [Cleared()])))
            await until(lambda: not any(held(group, 1) for group in made.groups))
            counts = [state(group, 1).events for group in made.groups]
            assert counts[0] is not None
            assert counts[0].received > 0
            assert counts == [counts[0]] * 3


async def test_workers_know_what_the_others_sent(tmp_path: Path) -> None:
    with learner(tmp_path / "learner.sock"):
        async with workers(tmp_path, tells=False) as made:
            one, other = made.groups
            where = await made.ask(one, "a")
            at = int(where[-1])
            await until(lambda: held(other, at))
            assert [await made.ask(other, f"b{n}") for n in range(3)] == [where] * 3
            assert made.engines[1 - at].computed == 0
            late = made.group()
            made.groups.append(late)
            await late.start()
            await until(lambda: held(late, at))
            assert await made.ask(late, "c") == where


async def test_without_the_learner_they_go_on_and_with_a_new_one_they_know_again(
    tmp_path: Path,
) -> None:
    async with workers(tmp_path) as made:
        one, _ = made.groups
        assert await made.ask(one, "a") in {"gpu.0", "gpu.1"}
        with learner(tmp_path / "learner.sock") as process:
            made.fill(1)
            await until(lambda: trust(one, 1) == "told")
            process.send_signal(signal.SIGKILL)
            await until(lambda: trust(one, 1) == "doubted")
            assert await made.ask(one, "b") == "gpu.1", "what was told counts for a while"
        await until(lambda: "learner-away" in made.events)
        with learner(tmp_path / "learner.sock"):
            await until(lambda: trust(one, 1) == "told")
            assert await made.ask(one, "c") == "gpu.1"
            assert "learner-back" in made.events


async def test_who_says_nonsense_is_left_and_the_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "learner.sock"
    with learner(path):
        async with workers(tmp_path, tells=False) as made:
            one, other = made.groups
            for said in (b"\xff" * 8, wire.frame(wire.Ignore("x")), b"\x01\x00\x00\x00\xc1"):
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.settimeout(10)
                    while stranger.connect_ex(str(path)):
                        await asyncio.sleep(0.05)
                    stranger.sendall(said)
                    assert await asyncio.to_thread(_is_closed, stranger)
            where = await made.ask(one, "a")
            await until(lambda: held(other, int(where[-1])))


async def test_only_its_owner_may_connect(tmp_path: Path) -> None:
    path = tmp_path / "learner.sock"
    with learner(path):
        await until(path.exists)
        assert path.stat().st_mode & 0o077 == 0


def _is_closed(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionError:
        return True
