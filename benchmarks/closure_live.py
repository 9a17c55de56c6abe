"""The live side of `closure`: two llama.cpp servers of one group behind the gateway, and clients.

Clients hold conversations of several turns under system prompts that many share, and now and then
one asks a short question that was asked before. All is greedy and streamed. The pace is an open
loop of conversations; within one, a client reads the answer and thinks before it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks import chat
from benchmarks.closure_replay import RULE
from benchmarks.process import Server, on_core, running
from benchmarks.rawhttp import HOST, Connection, post
from benchmarks.report import BenchmarkError
from preheat.engines.child import ChildSettings

MODEL = "smol"
GROUP = "pair"
READY_WITHIN_S = 60.0
ANSWER_WITHIN_S = 120.0

TRUNKS = 12
TRUNK_BYTES = (400, 2_000)
QUESTION_BYTES = (80, 480)
ANSWER_TOKENS = (10, 24)
MEAN_TURNS = 3.5
MOST_TURNS = 7
THINK_S = (1.0, 12.0)
SHORT_TRUNK = "Answer in one word, without any explanation."
SHORT_TOKENS = 48
COUNTRIES = (
    "France Spain Italy Germany Japan China India Egypt Kenya Peru Chile Cuba Greece Norway Sweden "
    "Finland Poland Austria Hungary Ireland Portugal Turkey Iran Iraq Canada Mexico Brazil Russia"
)


class Pace(msgspec.Struct, frozen=True):
    """Conversations and short questions that begin in a second, for so many seconds."""

    seconds: float
    conversations_per_s: float
    shorts_per_s: float
    seed: int


class Engine:
    """One llama.cpp server in a process of its own."""

    def __init__(self, server: Server, url: str, api_key: str) -> None:
        self.server = server
        self.url = url
        self._api_key = api_key

    def prompt_s(self) -> float:
        """Seconds of the batches so far that held a piece of a prompt."""
        headers = {"Authorization": f"Bearer {self._api_key}"}
        asked = urllib.request.Request(f"{self.url}/metrics", headers=headers)
        with urllib.request.urlopen(asked, timeout=10) as response:
            for line in response.read().decode().splitlines():
                name, _, value = line.partition(" ")
                if name == "llamacpp:prompt_seconds_total":
                    return float(value)
        raise BenchmarkError("llama.cpp doesn't tell prompt_seconds_total")


@contextlib.contextmanager
def engine(
    name: str, settings: ChildSettings, api_key: str, *, folder: Path, core: int | None
) -> Iterator[Engine]:
    """It is loaded when this begins, and gone when it ends."""
    errors = folder / f"{name}.err"
    command = [sys.executable, "-P", "-m", "preheat.engines.llamacpp_child"]
    with errors.open("wb") as err, on_core(core):
        popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            env=_environment(),
            process_group=0,
        )
    server = Server(name, popen, errors, errors)
    try:
        assert popen.stdin is not None
        assert popen.stdout is not None
        order = {**msgspec.to_builtins(settings), "api_key": api_key}
        popen.stdin.write(msgspec.json.encode(order) + b"\n")
        popen.stdin.flush()
        report = msgspec.json.decode(popen.stdout.readline() or b"{}", type=dict[str, str])
        if not report.get("url"):
            raise BenchmarkError(f"{name} didn't start: {report.get('why', 'it ended')}")
        yield Engine(server, report["url"], api_key)
    finally:
        if popen.stdin is not None:
            popen.stdin.close()  # it ends when nobody can tell it anything any more
        server.stop()
        if popen.stdout is not None:
            popen.stdout.close()


def _environment() -> dict[str, str]:
    """`scripts/openmp.py` puts OpenMP's library into the virtual environment where it is absent."""
    folder = Path(sys.prefix) / "lib"
    if not (folder / "libgomp.so.1").exists():
        return dict(os.environ)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@contextlib.contextmanager
def gateway(
    folder: Path, engines: Sequence[Engine], api_key: str
) -> Iterator[tuple[Server, int, str]]:
    """The gateway before both, with its request log; its port and its one client's key."""
    key = f"bench-{secrets.token_hex(12)}"
    urls = ", ".join(f'"{one.url}"' for one in engines)
    file = folder / "preheat.toml"
    file.write_text(
        f'[listen]\naddress = "{HOST}:0"\n'
        f'[engines.{GROUP}]\nkind = "openai"\nurls = [{urls}]\napi_key_env = "BENCH_ENGINE"\n'
        f'routing = {{ name = "{RULE}" }}\n'
        f'[models.{MODEL}]\nengine = "{GROUP}"\n'
        '[tenants.t]\napi_key_env = "BENCH_KEY"\n[l2]\nkind = "off"\n'
        f'[log]\nenabled = true\npath = "{folder / "log"}"\n'
    )
    env = {"BENCH_ENGINE": api_key, "BENCH_KEY": key, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "preheat", "serve", "--config", str(file)]
    with running("gateway", command, folder=folder, core=None, env=env) as server:
        yield server, server.wait_for_port(), key


class Clients:
    """Everybody who asks. What fails stops the run: its log would not be what it seems."""

    def __init__(self, port: int, key: str, pace: Pace) -> None:
        self.asked = 0
        self._port = port
        self._key = key
        self._pace = pace
        chance = random.Random(pace.seed)
        self._trunks = [chat.words(chance, chance.randint(*TRUNK_BYTES)) for _ in range(TRUNKS)]
        self._chance = chance

    async def run(self) -> None:
        """Returns when the last answer is there."""
        pace, chance = self._pace, self._chance
        async with asyncio.TaskGroup() as group:
            for at_s, is_short in _starts(pace, chance):
                if is_short:
                    group.create_task(self._short(at_s, random.Random(chance.random())))
                else:
                    group.create_task(self._converse(at_s, random.Random(chance.random())))

    async def _short(self, at_s: float, chance: random.Random) -> None:
        await asyncio.sleep(at_s)
        countries = COUNTRIES.split()
        country = countries[min(int(chance.paretovariate(0.7)), len(countries)) - 1]
        asked = f"What is the capital of {country}?"
        await self._ask(_messages(SHORT_TRUNK, asked), SHORT_TOKENS, "")

    async def _converse(self, at_s: float, chance: random.Random) -> None:
        await asyncio.sleep(at_s)
        session = secrets.token_hex(8)
        asked = chat.words(chance, chance.randint(*QUESTION_BYTES))
        messages = _messages(chance.choice(self._trunks), asked)
        turns = min(MOST_TURNS, 1 + int(chance.expovariate(1 / (MEAN_TURNS - 0.5))))
        for turn in range(turns):
            answer = await self._ask(messages, chance.randint(*ANSWER_TOKENS), session)
            if turn + 1 == turns:
                return
            await asyncio.sleep(chance.uniform(*THINK_S))
            asked = chat.words(chance, chance.randint(*QUESTION_BYTES))
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": asked},
            ]

    async def _ask(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int, session: str
    ) -> str:
        self.asked += 1
        body = chat.body(messages, model=MODEL, stream=True, max_tokens=max_tokens)
        headers = f"X-Preheat-Session: {session}\r\n" if session else ""
        connection = await Connection.open(self._port)
        try:
            request = post(chat.PATH, body, key=self._key, headers=headers)
            reply = await connection.exchange(request, within_s=ANSWER_WITHIN_S)
        finally:
            connection.close()
        if reply.status != 200:
            raise BenchmarkError(f"status {reply.status}: {reply.body[:200]!r}")
        return chat.read(reply).content


def _starts(pace: Pace, chance: random.Random) -> list[tuple[float, bool]]:
    starts: list[tuple[float, bool]] = []
    for rate, is_short in ((pace.conversations_per_s, False), (pace.shorts_per_s, True)):
        at_s = chance.expovariate(rate)
        while at_s < pace.seconds:
            starts.append((at_s, is_short))
            at_s += chance.expovariate(rate)
    return sorted(starts)


def _messages(system: str, asked: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": asked}]
