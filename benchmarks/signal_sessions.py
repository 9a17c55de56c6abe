"""The sessions of `signals`: coding agents (Weka), and chats (Mooncake's conversations)."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

from benchmarks.signal_world import OUTPUT_TOKEN_S, Turn
from benchmarks.traces import agents, chats
from preheat.traces.arrival import Arrival

T = TypeVar("T")
Half = Literal["first", "second"]

BEGUN_BY_S = 2_400.0
"""Of an hour that was recorded: of chats that began by then the ends can be seen."""
OWN_BLOCKS = 1 << 40
"""Ids of one draw's blocks, apart from those of all others."""


def agent_sessions(
    name: str, seed: int, open_sessions: float, *, hours: float, lengths: float, half: Half
) -> list[list[Turn]]:
    """Those of one half of the trace's, twice as many drawn as are wanted; sub-agents' requests aren't
    their session's own. Prompts are scaled by `lengths`."""
    trace = agents(2.0 * open_sessions, seed, hours=hours, name=name)
    sessions: dict[str, list[Arrival]] = {}
    for one in trace.arrivals:
        if not one.agent:
            sessions.setdefault(one.session, []).append(one)
    names = _half(sorted({_drawn_from(session) for session in sessions}), half)
    return [
        list(_agent_turns(turns, trace.block_tokens, lengths))
        for session, turns in sessions.items()
        if _drawn_from(session) in names
    ]


def chat_sessions(seed: int, open_sessions: float, *, hours: float, half: Half) -> list[list[Turn]]:
    """Conversations of one half of Mooncake's hour, drawn again and again as a Poisson process, each
    draw with blocks of its own. A request goes on with the one whose whole blocks it begins
    with; who asks once is no session. None calls a tool, as far as the trace says."""
    trace = chats()
    sessions: list[list[Arrival]] = []
    latest: dict[int, list[Arrival]] = {}
    for one in trace.arrivals:
        blocks = _whole(one, trace.block_tokens)
        before = next((block for block in reversed(blocks) if block in latest), None)
        session = [] if before is None else latest.pop(before)
        if not session:
            sessions.append(session)
        session.append(one)
        if blocks:
            latest[blocks[-1]] = session
    known = [one for one in sessions if one[0].at < BEGUN_BY_S and len(one) > 1]
    drawn_from = _half(known, half)
    mean_s = statistics.fmean(one[-1].at - one[0].at + _said_s(one[-1]) for one in drawn_from)
    chance = random.Random(f"{seed} chats")
    drawn: list[list[Turn]] = []
    at = 0.0
    while (at := at + chance.expovariate(open_sessions / mean_s)) < hours * 3_600.0:
        own = OWN_BLOCKS * (1 + len(drawn))
        drawn.append(list(_chat_turns(chance.choice(drawn_from), trace.block_tokens, at, own)))
    return drawn


def quiet(sessions: Sequence[Sequence[Turn]], said: float, seed: int) -> list[list[Turn]]:
    """The same, where only a share of the sessions says its end."""
    chance = random.Random(f"{seed} said")
    return [
        [*turns[:-1], _saying(turns[-1], says_over=chance.random() < said)] for turns in sessions
    ]


def _saying(turn: Turn, *, says_over: bool) -> Turn:
    return Turn(
        turn.pause_s, turn.blocks, turn.tokens, turn.output_tokens, turn.calls_tool, says_over
    )


def _agent_turns(arrivals: Sequence[Arrival], block_tokens: int, lengths: float) -> Iterator[Turn]:
    before = None
    for one in arrivals:
        pause_s = one.at if before is None else one.at - before.at - max(0.0, before.service_s)
        yield Turn(
            max(0.0, pause_s),
            _whole(one, block_tokens),
            max(1, round(one.input_tokens * lengths)),
            max(1, one.output_tokens),
            calls_tool=one.stop == "tool_use",
        )
        before = one


def _chat_turns(
    arrivals: Sequence[Arrival], block_tokens: int, at: float, own: int
) -> Iterator[Turn]:
    pauses_s = (
        max(0.0, one.at - before.at - _said_s(before))
        for before, one in itertools.pairwise(arrivals)
    )
    for one, pause_s in zip(arrivals, itertools.chain([at], pauses_s), strict=True):
        blocks = [own + block for block in _whole(one, block_tokens)]
        yield Turn(pause_s, blocks, one.input_tokens, max(1, one.output_tokens))


def _said_s(arrival: Arrival) -> float:
    return arrival.output_tokens * OUTPUT_TOKEN_S


def _whole(arrival: Arrival, block_tokens: int) -> tuple[int, ...]:
    return arrival.blocks[: arrival.input_tokens // block_tokens]


def _drawn_from(session: str) -> str:
    return session.partition("#")[0]


def _half(all_of_them: Sequence[T], half: Half) -> Sequence[T]:
    middle = len(all_of_them) // 2
    return all_of_them[:middle] if half == "first" else all_of_them[middle:]
