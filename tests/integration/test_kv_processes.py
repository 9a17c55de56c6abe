"""The whole gateway with KV events: one process, and two with their learner."""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from engines_faked import Engine, as_events, served
from harness import Gateway, running
from kv_engine import Publisher, as_maps
from preheat.core.kv_events import Batch, Cleared

pytest.importorskip("zmq", reason="the extra kv isn't installed")
pytestmark = pytest.mark.timeout(120)

LONG = " ".join(f"rule{one} says that {one * 7} holds." for one in range(300))


class Slow(Engine):
    """Computing takes time, or there were nothing to be gained by routing."""

    def _compute(self, tokens: list[int], salt: str) -> int:
        cached = super()._compute(tokens, salt)
        time.sleep(1e-4 * (len(tokens) - cached))
        return cached


class Rig:
    """A gateway before two servers that publish; before the first alone, until it has them `by_reload`."""

    def __init__(
        self, folder: Path, stack: ExitStack, workers: int, *, by_reload: bool = False
    ) -> None:
        self.engines = [Slow(), Slow()]
        urls = [stack.enter_context(served(engine)) for engine in self.engines]
        self.publishers = []
        for at, engine in enumerate(self.engines):
            publisher = Publisher(f"ipc://{folder}/kv{at}", f"ipc://{folder}/re{at}")
            stack.callback(publisher.close)
            self.publishers.append(publisher)
            engine.publish = _publish(publisher)
        toml = (
            f"[listen]\nworkers = {workers}\n[engines.gpu]\nurls = {json.dumps(urls)}\npoll_s = 0.1\n"
            f'kv_events = ["ipc://{folder}/kv0", "ipc://{folder}/kv1"]\n'
            f'kv_replay = ["ipc://{folder}/re0", "ipc://{folder}/re1"]\n'
        )
        alone = f"[listen]\nworkers = {workers}\n[engines.gpu]\nurl = {json.dumps(urls[0])}\n"
        self.gateway = Gateway(alone if by_reload else toml, folder=folder)
        stack.enter_context(running(self.gateway))
        if by_reload:
            (folder / "preheat.toml").write_text(toml)
            self.gateway.process.send_signal(signal.SIGHUP)
            until(lambda: self.logged("reloaded") or self.logged("reload-refused"))
            assert self.logged("reloaded"), self.gateway.stderr
        until(lambda: self.gateway.stderr.count("upstream-known") == 2 * workers)

    def fill(self, at: int) -> None:
        """Somebody else asks that server, past us."""
        assert self.engines[at].answer("POST", "/v1/chat/completions", body("hello"))[0] == 200

    def clear(self, at: int) -> None:
        """Its cache is reset, and it says so."""
        before = self.count("received", at)
        self.engines[at].blocks.clear()
        self.publishers[at].publish(as_maps(Batch(2e9, [Cleared()])))
        until(lambda: self.count("received", at) > before)
        time.sleep(0.3)  # what one process has heard is told to the others

    def ask(self, text: str, system: str = LONG) -> str:
        reply = self.gateway.post("/v1/chat/completions", body(text, system))
        assert reply.status == 200
        return reply.headers["x-preheat-worker"]

    def count(self, of: str, at: int) -> int:
        name = f'preheat_upstream_kv_events_total{{of="{of}",upstream="gpu.{at}"}}'
        for line in self.gateway.get("/metrics").body.decode().splitlines():
            if line.startswith(name):
                return int(float(line.rpartition(" ")[2]))
        return 0

    def trust(self, at: int) -> str:
        upstreams = self.gateway.get("/preheat/v1/workers").json["upstreams"]
        return next(one["trust"] for one in upstreams if one["name"] == f"gpu.{at}")

    def logged(self, event: str) -> bool:
        return f'"{event}"' in self.gateway.stderr


def _publish(publisher: Publisher) -> Callable[..., None]:
    return lambda batch: publisher.publish(as_events(batch))


def body(text: str, system: str = LONG) -> dict[str, object]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "temperature": 1.0}


@contextmanager
def rig(folder: Path, workers: int) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(folder, stack, workers)


def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    ends_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_process_sends_a_prompt_where_it_is_held(tmp_path: Path, workers: int) -> None:
    with rig(tmp_path, workers) as made:
        made.fill(1)
        until(lambda: made.trust(1) == "told")
        until(lambda: made.count("received", 1))
        for number in range(16):  # each on a connection of its own: both processes get some
            made.ask(f"first {number}")
            made.ask("new", f"{number} {LONG}")  # so that it is known what a miss costs
        made.clear(0)  # on a slow machine the first ones didn't wait for their tokens
        computed = made.engines[0].computed
        for number in range(12):
            assert made.ask(f"question {number}") == "gpu.1"
        assert made.engines[0].computed == computed
        assert made.logged("kv-events-heard")
        assert not made.logged("learner-died")


def test_a_learner_that_dies_is_started_again_and_knows_again(tmp_path: Path) -> None:
    with rig(tmp_path, 2) as made:
        made.fill(1)
        until(lambda: made.trust(1) == "told")
        os.kill(_learner_of(made.gateway.process.pid), 9)
        until(lambda: made.logged("learner-died"))
        assert made.ask("meanwhile") in {"gpu.0", "gpu.1"}
        until(lambda: "kv-events-heard" in made.gateway.stderr.partition("learner-died")[2])
        until(lambda: made.trust(1) == "told")
        assert made.ask("again") in {"gpu.0", "gpu.1"}


def test_a_reload_that_turns_events_on_starts_the_learner(tmp_path: Path) -> None:
    with ExitStack() as stack:
        made = Rig(tmp_path, stack, 2, by_reload=True)
        learner = _learner_of(made.gateway.process.pid)
        numbers = itertools.count()

        def is_heard() -> bool:  # what was published before we listened is lost
            made.engines[1].answer(
                "POST", "/v1/chat/completions", body("", f"{next(numbers)} {LONG}")
            )
            return made.count("received", 1) > 0

        until(is_heard)
        until(lambda: made.trust(1) == "told")
        assert made.gateway.stderr.count("kv-events-heard") == 1, "by one process for all"
        made.gateway.process.send_signal(signal.SIGHUP)
        until(lambda: made.gateway.stderr.count('"reloaded"') == 2)
        assert _learner_of(made.gateway.process.pid) == learner
        made.gateway.stop()
        until(lambda: not Path(f"/proc/{learner}").exists())
        assert '"event":"bug"' not in made.gateway.stderr


def _learner_of(supervisor: int) -> int:
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == supervisor and b"preheat.host.learner" in command:
            return int(folder.name)
    raise AssertionError("there is no learner")
