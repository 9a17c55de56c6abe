"""How often the engine is called when many equal requests come at once.

Three bursts of equal greedy requests (all streaming, none streaming, mixed) must cost one engine
call each; a burst of equal sampled requests must cost one call a request, since each client is
owed a draw of its own. Every socket is connected before the burst, and the engine answers after a
delay that is longer than the burst, so that no request comes late enough to be a plain hit. With
several workers (`--workers`) the kernel spreads the clients over them, and one call is still all
that may be made.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from benchmarks import chat, servers
from benchmarks.process import on_core, two_cores
from benchmarks.rawhttp import Connection, Reply, post
from benchmarks.report import Progress, Result
from benchmarks.servers import Engine, Gateway, Layout

CONTENT = "One answer for all who asked at once."
WITHIN_S = 15.0


class Burst(msgspec.Struct, frozen=True):
    """One burst, and what came of it."""

    calls: int
    failed: int
    joined: int
    seconds: float


# Whether request i streams.
FORMS: dict[str, Callable[[int], bool]] = {
    "streams": lambda i: True,
    "plain": lambda i: False,
    "mixed": lambda i: i % 2 == 0,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=100, help="equal requests at once (100)")
    parser.add_argument("--rounds", type=int, default=3, help="bursts of each form (3)")
    parser.add_argument("--delay-s", type=float, default=0.5, help="before the answer (0.5)")
    Layout.add_options(parser, log=False)


def tools() -> dict[str, list[str]]:
    """What else must be installed: nothing."""
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    cores = two_cores()
    greedy: list[Burst] = []
    sampled: list[Burst] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        with (
            servers.fake_engine(folder, core=cores.client) as engine,
            servers.gateway(
                folder, {"m1": engine}, core=cores.server, layout=Layout.of(options)
            ) as gateway,
            on_core(cores.client),
        ):
            engine.answer_with({"content": CONTENT, "delay_s": options.delay_s})
            for _ in range(options.rounds):
                for form in FORMS:
                    greedy.append(_burst(engine, gateway, form, 0, options.clients))
                    progress.say(f"{form}: {greedy[-1].calls} calls, {greedy[-1].failed} failed")
                sampled.append(_burst(engine, gateway, "mixed", 1, options.clients))
                progress.say(f"sampled: {sampled[-1].calls} calls, {sampled[-1].failed} failed")
            settings: dict[str, object] = {"preheat": gateway.settings}
    return Result(
        {
            "upstream_calls": max(burst.calls for burst in greedy),
            "upstream_calls_sampled": min(burst.calls for burst in sampled),
            "upstream_calls_sampled_max": max(burst.calls for burst in sampled),
            "failed": sum(burst.failed for burst in greedy + sampled),
            "joined_min": min(burst.joined for burst in greedy),
            "burst_s_max": max(burst.seconds for burst in greedy),
        },
        settings,
    )


def _burst(engine: Engine, gateway: Gateway, form: str, temperature: float, clients: int) -> Burst:
    """A fresh prompt from all clients at once; the engine's own count is what counts."""
    prompt = f"Stampede {secrets.token_hex(8)}"
    bodies = [
        chat.ask(prompt, model="m1", temperature=temperature, stream=FORMS[form](i))
        for i in range(clients)
    ]
    requests = [post(chat.PATH, body, key=gateway.keys[0]) for body in bodies]
    calls = engine.calls()
    started_at = time.monotonic()
    replies = uvloop.run(_send_at_once(gateway.port, requests))
    seconds = time.monotonic() - started_at
    answers = [_answer(reply) for reply in replies]
    return Burst(
        calls=engine.calls() - calls,
        failed=sum(answer is None for answer in answers),
        joined=sum(answer is not None and answer.is_join for answer in answers),
        seconds=seconds,
    )


async def _send_at_once(port: int, requests: list[bytes]) -> list[Reply | None]:
    """All replies; None for a request that got none."""
    connections = [await Connection.open(port) for _ in requests]
    replies = [c.begin(r) for c, r in zip(connections, requests, strict=True)]
    await asyncio.wait(replies, timeout=WITHIN_S)
    for connection, reply in zip(connections, replies, strict=True):
        reply.cancel()  # one that hasn't come by now
        connection.close()
    return [None if r.cancelled() or r.exception() else r.result() for r in replies]


def _answer(reply: Reply | None) -> chat.Answer | None:
    """The answer, if it is all that was to come."""
    if reply is None or reply.status != 200:
        return None
    try:
        answer = chat.read(reply)
    except msgspec.DecodeError:
        return None
    return answer if answer.is_complete and answer.content == CONTENT else None
