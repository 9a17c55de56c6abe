"""CPU of one routing decision: hashing a prompt, what each worker holds of it, and the choice.

A fleet of 8 and of 64 workers, whose index is full of what 50 families of prompts with 48 common and 16 own
blocks left there. `decision` is hashing (64 blocks of 64 bytes, 16 token ids of 32 bits each), the walk
along the index and the rule's choice; `body` the same for 32 KB of chat JSON as it comes from a
client. `told` is that body again where all workers tell by events what they hold: its messages are
hashed, its tokens' blocks (512 of 16) found by them, and those looked up beside its text's. `booking` comes beside it, when the request is on its way: what was sent is entered, and later
what became of it. `slots_…` are the same on a fleet of llama.cpp servers of 4 slots each, half of them busy,
where all prompts of all families share their first 8 blocks: so every worker has something of each prompt,
and the asked one's family (16 of them in turn) is held by some, in an idle slot, a busy one or
the prompt cache. The best of all rounds counts for each, as noise only adds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from itertools import cycle

from benchmarks.report import Progress, Result
from preheat.core.blocks import BLOCK_BYTES, prefix_of
from preheat.core.kv_events import Moved
from preheat.core.kv_names import KvNames
from preheat.core.router import Ask, Router, Ticket
from preheat.core.routing import POLICIES
from preheat.core.token_memo import TokenMemo
from preheat.core.tokens import token_blocks
from preheat.core.told import ToldResidency
from preheat.core.types import Usage
from preheat.engines.kv_tokens import read

FLEETS = (8, 64)
FAMILIES, COMMON_BLOCKS, OWN_BLOCKS = 50, 48, 16
BLOCK_TOKENS = 16
BODY_BYTES = 32_768
TOKEN_S = 2e-4
SLOTS, SHARED_BLOCKS, ASKED_FAMILIES = 4, 8, 16


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=1_000, help="in a round")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    figures: dict[str, float] = {}
    chance = random.Random(1)
    for workers in FLEETS:
        router, now = filled(workers, chance)
        allowed = range(workers)
        tokens = [chance.randrange(100_000) for _ in range(1_024)]
        body = chat(chance)

        def decide(
            router: Router = router,
            allowed: range = allowed,
            tokens: list[int] = tokens,
            now: float = now,
        ) -> None:
            blocks = token_blocks(tokens, BLOCK_TOKENS, 1)
            router.choose(Ask("m", blocks, 64, 4_096), allowed, now)

        def decide_body(
            router: Router = router, allowed: range = allowed, body: bytes = body, now: float = now
        ) -> None:
            prefix = prefix_of(body, b"tenant")
            ask = Ask(prefix.model, prefix.blocks, BLOCK_BYTES, prefix.prompt_bytes)
            router.choose(ask, allowed, now)

        def book(router: Router = router, allowed: range = allowed, now: float = now) -> None:
            blocks = [chance.getrandbits(64) for _ in range(OWN_BLOCKS)]
            ticket = router.place(Ask("m", blocks, 64, 4_096), allowed, now).ticket
            router.ended(ticket, Usage(256, 8, 0, tells_cached=True), now + 1.0)

        decide_told = told_decision(workers, chance)
        decide_slots, book_slots = slots_decision(workers, chance)
        for name, call in (
            ("decision", decide),
            ("body", decide_body),
            ("place_and_end", book),
            ("told", decide_told),
            ("slots_decision", decide_slots),
            ("slots_place_and_end", book_slots),
        ):
            progress.say(f"{workers} workers: {name}")
            figures[f"{name}_{workers}_us"] = best_us(call, options.rounds, options.calls)
    text = chat(chance)
    figures["hash_32_kb_us"] = best_us(
        lambda: prefix_of(text, b"tenant"), options.rounds, options.calls
    )
    return Result(figures=figures, settings={"families": FAMILIES, "body_bytes": BODY_BYTES})


def filled(workers: int, chance: random.Random) -> tuple[Router, float]:
    """A router whose workers have served for a while, and the time then."""
    router = Router(POLICIES["preheat"]())
    families = [[chance.getrandbits(64) for _ in range(COMMON_BLOCKS)] for _ in range(FAMILIES)]
    now = 0.0
    for _ in range(20 * workers + 200):
        now += 0.1
        blocks = [*chance.choice(families), *(chance.getrandbits(64) for _ in range(OWN_BLOCKS))]
        ticket = router.place(Ask("m", blocks, 512, 32_768), range(workers), now).ticket
        if chance.random() < 0.8:
            router.ended(ticket, Usage(8_192, 100, ticket.overlap_tokens, tells_cached=True), now)
    return router, now


def told_decision(workers: int, chance: random.Random) -> Callable[[], None]:
    """One whose prompt is held by half of the workers, by their own word, and known by its messages."""
    router, names, memo = Router(POLICIES["preheat"]()), KvNames(b"secret"), TokenMemo()
    names.learn_size(BLOCK_TOKENS)
    body = chat(chance)
    reading = read(body, names)
    assert reading is not None
    blocks = [chance.getrandbits(64) for _ in range(BODY_BYTES // 4 // BLOCK_TOKENS)]
    memo.learn(reading.digests, blocks)
    for worker in range(workers):
        told = ToldResidency(block_tokens=BLOCK_TOKENS, root=names.root)
        router.index.hears(worker, told)
        own = [chance.getrandbits(64) for _ in range(OWN_BLOCKS)]
        held = blocks[: chance.randrange(len(blocks))] if worker % 2 else own
        router.index.told(worker, told.take(Moved(held, [], "told"), 0.0))

    def decide() -> None:
        prefix, asked = prefix_of(body, b"tenant"), read(body, names)
        assert asked is not None
        known = memo.find(asked.digests).blocks
        ask = Ask(
            prefix.model,
            prefix.blocks,
            BLOCK_BYTES,
            prefix.prompt_bytes,
            token_blocks=known,
            block_tokens=BLOCK_TOKENS,
        )
        router.choose(ask, range(workers), 0.0)

    return decide


def slots_decision(
    workers: int, chance: random.Random
) -> tuple[Callable[[], None], Callable[[], None]]:
    """One on llama.cpp servers, hashing included; and a request of a known family, sent and answered."""
    router, now = Router(POLICIES["preheat"]()), 0.0
    for worker in range(workers):
        router.has_slots(worker, SLOTS)
    shared = [chance.randrange(100_000) for _ in range(SHARED_BLOCKS * BLOCK_TOKENS)]
    families = [shared + new_tokens(chance, COMMON_BLOCKS - SHARED_BLOCKS) for _ in range(FAMILIES)]
    under_way: list[Ticket] = []

    def place(blocks: list[int]) -> None:
        ticket = router.place(Ask("m", blocks, 64, 4_096), range(workers), now).ticket
        under_way.append(ticket)
        router.began(ticket, now + TOKEN_S * (1_024 - ticket.overlap_tokens))
        if len(under_way) > SLOTS * workers // 2:
            ended = under_way.pop(chance.randrange(len(under_way)))
            router.ended(ended, Usage(1_024, 100, ended.overlap_tokens, tells_cached=True), now)

    def prompt() -> list[int]:
        return chance.choice(families) + new_tokens(chance, OWN_BLOCKS)

    for _ in range(20 * workers + 200):
        now += 0.1
        place(token_blocks(prompt(), BLOCK_TOKENS, 1))
    asked = cycle([one + new_tokens(chance, OWN_BLOCKS) for one in families[:ASKED_FAMILIES]])
    booked = cycle([token_blocks(prompt(), BLOCK_TOKENS, 1) for _ in range(4_096)])

    def decide() -> None:
        blocks = token_blocks(next(asked), BLOCK_TOKENS, 1)
        router.choose(Ask("m", blocks, 64, 4_096), range(workers), now)

    return decide, lambda: place(next(booked))


def new_tokens(chance: random.Random, blocks: int) -> list[int]:
    """What no other prompt has."""
    return [chance.randrange(100_000) for _ in range(blocks * BLOCK_TOKENS)]


def chat(chance: random.Random) -> bytes:
    """A body of a chat: a long system prompt and a few turns."""
    words = " ".join(str(chance.randrange(10_000)) for _ in range(BODY_BYTES // 5))
    turns = [{"role": "system", "content": words[: BODY_BYTES - 2_000]}]
    turns += [{"role": "user", "content": words[at : at + 400]} for at in range(0, 2_000, 500)]
    return json.dumps({"model": "m", "messages": turns, "stream": True}).encode()


def best_us(call: Callable[[], object], rounds: int, calls: int) -> float:
    """Microseconds of CPU time a call, in the best round."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(calls):
            call()
        best = min(best, time.process_time() - began)
    return 1e6 * best / calls
