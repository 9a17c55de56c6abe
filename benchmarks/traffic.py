"""Many kinds of clients at once: good ones, whose answers are checked, and those who misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from benchmarks import bad_input, chat
from benchmarks.bad_input import BadInput
from benchmarks.rawhttp import Connection, Reply, post
from benchmarks.servers import ECHO
from benchmarks.workload import Zipf

MODEL = "m1"
LEAVING_MODEL = "m2"  # of clients who leave: whether they are charged depends on when they left
POOL = 2_000  # prompts that are asked again and again
STREAM_POOL = 500
PROMPT_BYTES = (1_000, 6_000)  # L1 runs out of bytes before it runs out of entries
STREAM_PROMPT_BYTES = (100, 400)
LEAVING_PROMPT_BYTES = (400, 4_000)
# What those who leave are answered with: late, then piece by piece, so that they leave before it
# or in the midst of it and not behind it.
SLOW_REPLY: dict[str, object] = {
    "content": "word " * 400,
    "pieces": 50,
    "delay_s": 0.005,
    "chunk_delay_s": 0.005,
}
# Text that is spelled differently in JSON: each answer shows whether it came through unchanged.
ODD = 'é "quoted" \\ 中文 \n\t 🚀 </script> \u2028 '
WITHIN_S = 30.0
BAD_WITHIN_S = 10.0
PICODOLLARS_INPUT, PICODOLLARS_CACHED, PICODOLLARS_OUTPUT = 1_000_000, 500_000, 2_000_000
SHARES = {"repeat": 0.60, "new": 0.20, "stream": 0.10, "leave": 0.05, "bad": 0.05}


class Tally:
    """What the clients saw."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()  # of good requests, by what was wrong
        self.bad: Counter[str] = Counter()  # `kind.outcome`
        self.bad_unexpected = 0
        self.smuggled = 0
        self.answered = 0  # good requests with a complete answer
        self.hits = 0
        self.list_price = 0  # picodollars, of all complete answers
        self.paid_price = 0  # picodollars, of those which the gateway says it forwarded

    def book(self, answer: chat.Answer, usage: chat.Usage) -> None:
        fresh, cached = usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens
        output = usage.completion_tokens * PICODOLLARS_OUTPUT
        self.answered += 1
        self.list_price += usage.prompt_tokens * PICODOLLARS_INPUT + output
        if answer.is_hit:
            self.hits += 1
        elif not answer.is_join:
            self.paid_price += fresh * PICODOLLARS_INPUT + cached * PICODOLLARS_CACHED + output


class Prompts:
    """Texts that never repeat unless they should."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._text = chat.words(rng, 100_000)
        self._made = 0
        self._pool = [self.new(PROMPT_BYTES) for _ in range(POOL)]
        self._stream_pool = [self.new(STREAM_PROMPT_BYTES) for _ in range(STREAM_POOL)]
        self._ranks = Zipf(POOL).draws(rng)
        self._stream_ranks = Zipf(STREAM_POOL).draws(rng)

    def new(self, size_bytes: tuple[int, int]) -> str:
        self._made += 1
        size = self._rng.randint(*size_bytes)
        start = self._rng.randrange(len(self._text) - size)
        return f"{self._made} {ODD}{self._text[start : start + size]}"

    def repeat(self) -> tuple[int, str]:
        rank = next(self._ranks)
        return rank, self._pool[rank]

    def stream_repeat(self) -> tuple[int, str]:
        rank = next(self._stream_ranks)
        return rank, self._stream_pool[rank]


class Client:
    """One of many: does one thing after the other, on a connection it keeps where it can."""

    def __init__(
        self, port: int, keys: list[str], prompts: Prompts, rng: random.Random, tally: Tally
    ) -> None:
        self._port = port
        self._keys = keys
        self._prompts = prompts
        self._rng = rng
        self._tally = tally
        self._connection: Connection | None = None
        self._bad = self._bad_in_turn()

    async def act(self, kind: str) -> None:
        """One request of this kind."""
        self._tally.sent[kind] += 1
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            "repeat": self._repeat,
            "new": self._new,
            "stream": self._stream,
            "leave": self._leave,
            "bad": self._send_bad,
        }
        await actions[kind]()

    async def _repeat(self) -> None:
        rank, prompt = self._prompts.repeat()
        await self._ask(prompt, self._keys[rank % len(self._keys)], stream=False)

    async def _new(self) -> None:
        await self._ask(self._prompts.new(PROMPT_BYTES), self._any_key(), stream=False)

    async def _stream(self) -> None:
        if self._rng.random() < 0.5:
            rank, prompt = self._prompts.stream_repeat()
            await self._ask(prompt, self._keys[rank % len(self._keys)], stream=True)
        else:
            await self._ask(self._prompts.new(STREAM_PROMPT_BYTES), self._any_key(), stream=True)

    def _any_key(self) -> str:
        return self._rng.choice(self._keys)

    async def _ask(self, prompt: str, key: str, *, stream: bool) -> None:
        """A good request; the engine echoes, so the right answer is known."""
        request = post(chat.PATH, chat.ask(prompt, model=MODEL, stream=stream), key=key)
        try:
            if self._connection is None or self._connection.closed:
                self._connection = await Connection.open(self._port)
            reply = await self._connection.exchange(request, within_s=WITHIN_S)
            wrong = self._check(reply, prompt)
        except (OSError, TimeoutError) as error:
            wrong = type(error).__name__
            self.leave()
        except msgspec.DecodeError:
            wrong = "not an answer"
        if wrong:
            self._tally.failures[wrong] += 1

    def _check(self, reply: Reply, prompt: str) -> str:
        """What is wrong with an answer; nothing, as a rule."""
        if reply.status != 200:
            return f"status {reply.status}"
        answer = chat.read(reply)
        if not answer.is_complete or answer.finish_reason != "stop":
            return "incomplete"
        if answer.usage is None:
            return "no usage"
        self._tally.book(answer, answer.usage)
        return "" if answer.content == ECHO + prompt else "another answer"

    async def _leave(self) -> None:
        """A client that goes away in one of three moments, politely or not."""
        when = self._rng.choice(("in the request", "before the answer", "in the answer"))
        prompt = self._prompts.new(LEAVING_PROMPT_BYTES)
        body = chat.ask(prompt, model=LEAVING_MODEL, stream=when == "in the answer")
        request = post(chat.PATH, body, key=self._any_key())
        connection = await Connection.open(self._port)
        if when == "in the request":
            connection.send(request[: self._rng.randrange(1, len(request))])
            await asyncio.sleep(0.001)
        else:
            connection.send(request)
        if when == "before the answer":
            await asyncio.sleep(self._rng.choice((0, 0.001, 0.002, 0.004)))
        if when == "in the answer":
            with contextlib.suppress(OSError, TimeoutError):
                await connection.first_bytes(within_s=WITHIN_S)
        connection.reset() if self._rng.random() < 0.5 else connection.close()

    def _bad_in_turn(self) -> Iterator[BadInput]:
        while True:
            yield from self._rng.sample(bad_input.KINDS, len(bad_input.KINDS))

    async def _send_bad(self) -> None:
        kind = next(self._bad)
        connection = await Connection.open(self._port)
        connection.send(kind.data(self._any_key()))
        outcome, replies = await _outcome(connection)
        connection.close()
        self._tally.bad[f"{kind.name}.{outcome}"] += 1
        if kind.name.startswith("smuggle") and replies > 1:
            self._tally.smuggled += 1
        # 501 is what RFC 9112 (6.1) asks for where a transfer coding isn't known.
        refused = outcome.startswith("4") or outcome in ("501", "closed")
        passed = kind.may_pass and outcome.startswith("2")
        self._tally.bad_unexpected += not (refused or passed)

    def leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


async def _outcome(connection: Connection) -> tuple[str, int]:
    """The status of the first reply, `closed` or `silence`, and how many replies came."""
    with contextlib.suppress(OSError, TimeoutError):
        await connection.first_bytes(within_s=BAD_WITHIN_S)
    # A second reply to a smuggled request would follow at once.
    await connection.end(within_s=0.02)
    data = connection.raw
    if data.startswith(b"HTTP/1.1 "):
        return data[9:12].decode("latin-1"), data.count(b"HTTP/1.1 ")
    return ("closed" if connection.closed else "silence"), 0
