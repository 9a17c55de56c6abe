"""Has the same beginning computed several times, and reads who says what of it."""

import asyncio
from math import ceil
from typing import Final

import msgspec

from preheat.engines.dialects.calls import Prompt, get
from preheat.engines.dialects.readings import Load
from preheat.lab.diagnosis.facts import Facts, Sight, sights_now
from preheat.lab.diagnosis.server import TRUNK_TOKENS, Answer, Server, chat
from preheat.lab.diagnosis.sights import balance_of
from preheat.lab.diagnosis.verdicts import Reuse, judge
from preheat.lab.doctor.finding import Finding
from preheat.lab.doctor.probes import text_of

_AT_FIRST: Final = 3
_AT_MOST: Final = 5
_COUNTED_WITHIN_S: Final = 1.0
_SIZED: Final = 64
"""Words whose tokens are counted, to know how many words a prompt has."""
_HALVINGS: Final = 2
_OWN: Final = 5
"""Words of the question behind the beginning."""


async def words_for(server: Server, facts: Facts) -> int:
    """How long the beginning is, in words: as many tokens as any engine needs to keep it, but not more
    than half of what this one takes. Raises EngineError."""
    tokens = TRUNK_TOKENS
    if facts.limit_tokens:
        tokens = min(tokens, facts.limit_tokens // 2)
    body = await server.told(
        server.dialect.tokenise(Prompt(model=server.model, text=text_of(_SIZED)))
    )
    counted = server.dialect.read_tokens(body) if body is not None else None
    return ceil(tokens * _SIZED / counted.count) if counted and counted.count else tokens


async def examine_reuse(server: Server, facts: Facts, words: int) -> Finding:
    """Whether a beginning is cached, and if not, why. Raises EngineError."""
    cold, trunk = await _first(server, words)
    if cold.status != 200:
        return _refused(server, cold)
    counted = await _count(server)
    answers = [cold, *await _again(server, trunk, _AT_FIRST - 1)]
    prompt_tokens = _prompt_tokens(answers)
    if not prompt_tokens:
        return _untold(server)
    seen = Reuse(
        about=server.about,
        kind=server.dialect.name,
        prompt_tokens=prompt_tokens,
        series=[_told(answers)],
        block_tokens=facts.block_tokens or server.dialect.block_tokens,
        least_tokens=server.dialect.least_tokens,
        capacity_tokens=facts.capacity.tokens,
        caches=facts.caches,
    )
    if not all(seen.is_hit(one) for one in seen.series[0][1:]):
        answers += await _again(server, trunk, _AT_MOST - _AT_FIRST)
        seen = await _searched(server, facts, seen, answers, trunk, counted)
    return judge(seen)


async def _searched(
    server: Server,
    facts: Facts,
    seen: Reuse,
    answers: list[Answer],
    trunk: str,
    counted: int | None,
) -> Reuse:
    """What tells one cause from another, where not all was as it should be."""
    series, more = [_told(answers)], {}
    if any(seen.is_hit(one) for one in series[0][1:]):
        again = await _again(server, text_of(len(trunk.split()) - 1), _AT_MOST)
        series.append(_told(again))
    else:
        more["identical"] = await _identical(server, trunk)
        more["added_tokens"] = await _added(server, trunk)
        more["forced"] = await _forced(server, trunk)
    if all(one is None for one in series[0]):
        more["counted"] = await _grown(server, counted)
        more["native"] = await _native(server, trunk)
    return msgspec.structs.replace(
        seen,
        series=series,
        balance=balance_of(facts.sights, await _after(server, facts.sights)),
        cold_s=answers[0].took_s,
        warm_s=min(one.took_s for one in answers[1:]),
        **more,
    )


async def _first(server: Server, words: int) -> tuple[Answer, str]:
    """The first answer to a new beginning; a shorter one where it is too long."""
    for halved in range(_HALVINGS + 1):
        trunk = text_of(max(_OWN, words >> halved))
        answer = await _ask(server, trunk)
        if answer.status not in {400, 413, 422}:
            break
    return answer, trunk


async def _again(server: Server, trunk: str, times: int) -> list[Answer]:
    return [await _ask(server, trunk) for _ in range(times)]


async def _ask(server: Server, trunk: str) -> Answer:
    return await server.compute(chat(server, trunk, text_of(_OWN)))


async def _count(server: Server) -> int | None:
    """The engine's own count of cached tokens."""
    page = await server.told(get("/metrics"))
    load = server.dialect.read_load(page) if page is not None else None
    return load.cached_tokens_total if isinstance(load, Load) else None


async def _grown(server: Server, before: int | None) -> int | None:
    """By how much; some count a moment later."""
    if before is None:
        return None
    now = await _count(server)
    if now == before:
        await asyncio.sleep(_COUNTED_WITHIN_S)
        now = await _count(server)
    return None if now is None else max(0, now - before)


async def _after(server: Server, before: tuple[Sight, ...]) -> tuple[Sight, ...]:
    if not before:
        return ()
    after = await sights_now(server)
    if after and after[-1].prompt_tokens == before[-1].prompt_tokens:
        await asyncio.sleep(_COUNTED_WITHIN_S)
        after = await sights_now(server)
    return after


async def _native(server: Server, trunk: str) -> int | None:
    """What SGLang's own API tells without a flag."""
    call = server.dialect.warm(Prompt(model=server.model, text=trunk))
    if server.dialect.name != "sglang" or call is None:
        return None
    await server.computing(call)
    answer = await server.computing(call)
    return None if answer.cached is None else answer.cached.cached_tokens


async def _identical(server: Server, trunk: str) -> int | None:
    """How much of a prompt is cached that was asked before, to its last letter."""
    prompt = chat(server, trunk, text_of(_OWN))
    await server.compute(prompt)
    answer = await server.compute(prompt)
    return None if answer.cached is None else answer.cached.cached_tokens


async def _added(server: Server, trunk: str) -> int | None:
    """So many tokens more a prompt is said to have than its own tokenizer makes of the messages."""
    prompt = chat(server, trunk, text_of(_OWN))
    body = await server.told(server.dialect.tokenise(prompt))
    tokens = server.dialect.read_tokens(body) if body is not None else None
    answer = await server.compute(prompt)
    if tokens is None or answer.cached is None:
        return None
    return max(0, answer.cached.prompt_tokens - tokens.count)


async def _forced(server: Server, trunk: str) -> int | None:
    """llama.cpp can be asked to keep a prompt where it keeps none by itself."""
    if server.dialect.name != "llamacpp":
        return None
    for _ in range(2):
        answer = await server.compute(chat(server, trunk, text_of(_OWN)), cache_prompt=True)
    return None if answer.cached is None else answer.cached.cached_tokens


def _told(answers: list[Answer]) -> list[int | None]:
    return [None if one.cached is None else one.cached.cached_tokens for one in answers]


def _prompt_tokens(answers: list[Answer]) -> int:
    return max((one.cached.prompt_tokens for one in answers if one.cached is not None), default=0)


def _refused(server: Server, answer: Answer) -> Finding:
    said = f": {answer.said}" if answer.said and answer.status not in {401, 403} else ""
    return server.finding(
        "asked",
        "problem",
        f"status {answer.status} for a plain chat{said}",
        asked="one chat of a system message and a question, with one token of answer",
        why="nothing can be said about its prefix cache, and clients may get the same",
        do="see its log; give --api-key-env where it wants a key, --model for another model",
    )


def _untold(server: Server) -> Finding:
    return server.finding(
        "usage-missing",
        "unknown",
        "answers have no usage, so nobody can see what was cached",
        asked=f"{_AT_FIRST} chats with the same beginning",
        do="update the server, or see what stands before it and takes the usage out",
    )
