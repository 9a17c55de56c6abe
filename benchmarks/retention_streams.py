"""What `retention` measures on: four traces as paths of full blocks, and what may be known of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec

from benchmarks.traces import DATA, _there
from preheat.core import kinds
from preheat.replay.compiled import Use
from preheat.traces.arrival import Arrival
from preheat.traces.reading import read
from preheat.traces.rules import Rules

DAY_S = 86_400.0

CHATS = (0.01, 0.02, 0.03, 0.05, 0.10, 0.25)
AGENTS = (0.001, 0.0025, 0.005, 0.01)


class Source(NamedTuple):
    """A trace: its file, capacities as shares of its distinct blocks, where its first half ends (None:
    at half of its span), and which sets of facts J may choose from."""

    file: str
    shares: tuple[float, ...]
    half_s: float | None
    facts: tuple[str, ...]


SOURCES = {
    "conversation": Source(
        "mooncake/conversation.part1.jsonl.gz", CHATS, None, ("", "known", "answer", "known+answer")
    ),
    "synthetic": Source(
        "mooncake/synthetic.part1.jsonl.gz", CHATS, None, ("", "known", "answer", "known+answer")
    ),
    "v6": Source(
        "weka_agentic/v6_global.jsonl.gz",
        AGENTS,
        DAY_S / 2,
        ("", "pauses", "end", "end+stop", "end+pauses", "end+stop+pauses"),
    ),
    "v8": Source(
        "weka_agentic/v8_local.jsonl.gz",
        AGENTS,
        DAY_S / 2,
        ("", "pauses", "end", "end+stop", "end+pauses", "end+stop+pauses"),
    ),
}
"""Weka's calendar has 24 hours, in which sessions begin; some go on for days after that."""


class Stream(msgspec.Struct):
    """A trace ready to be run. `paths` are full blocks only: an engine can't reuse a partial one."""

    name: str
    arrivals: Sequence[Arrival]
    paths: list[tuple[int, ...]]
    distinct: int
    block_tokens: int
    half_at: float
    source: Source
    rules: tuple[str, ...]

    @property
    def capacities(self) -> list[int]:
        """In blocks."""
        return [max(1, int(share * self.distinct)) for share in self.source.shares]

    def first_half(self) -> Stream:
        """What was known when the second half began. Capacities stay: they are the pool's."""
        count = sum(one.at < self.half_at for one in self.arrivals)
        return msgspec.structs.replace(
            self,
            arrivals=self.arrivals[:count],
            paths=self.paths[:count],
            half_at=self.half_at / 2,
        )


def load(name: str, seed: int = 0) -> Stream:
    """One of `SOURCES`."""
    source = SOURCES[name]
    trace = read(_there(DATA / source.file), rules=Rules(seed=seed))
    paths = [one.blocks[: max(0, one.input_tokens) // trace.block_tokens] for one in trace.arrivals]
    return Stream(
        name,
        trace.arrivals,
        paths,
        len({block for path in paths for block in path}),
        trace.block_tokens,
        source.half_s or trace.arrivals[-1].at / 2,
        source,
        trace.rules,
    )


def uses(stream: Stream, facts: str) -> list[Use]:
    """What J is told of each request, if it knows these facts. None of them lies in the future: the
    stop reason and the answer's length are told when the answer is over. Mooncake doesn't say when
    that is; there it is taken to be over at once."""
    known = set(facts.split("+"))
    if stream.source.shares == CHATS:
        return _chats(stream, known)
    return _agents(stream, known)


def _chats(stream: Stream, known: set[str]) -> list[Use]:
    seen: set[int] = set()
    told = []
    for one, path in zip(stream.arrivals, stream.paths, strict=True):
        old = 0
        while old < len(path) and path[old] in seen:
            old += 1
        seen.update(path[old:])
        facts = []
        if "known" in known:
            facts.append((kinds.known_level(old / max(1, len(path))), kinds.KNOWN_LEVELS))
        if "answer" in known:
            facts.append((kinds.answer_level(one.output_tokens), kinds.ANSWER_LEVELS))
        told.append(Use(one.at, kinds.mixed(*facts)))
    return told


def _agents(stream: Stream, known: set[str]) -> list[Use]:
    """Kinds known at the beginning come first, those known at the end after them."""
    pauses = kinds.Pauses()
    over_at: dict[Hashable, float] = {}
    told = []
    for one in stream.arrivals:
        who = (one.session, one.agent, one.model)
        if who in over_at:
            pauses.learn(who, one.at - over_at[who])
        over_at[who] = one.at + max(0.0, one.service_s)
        level = (pauses.level(who), kinds.PAUSE_LEVELS) if "pauses" in known else (0, 1)
        stop = (kinds.stop_level(one.stop), kinds.STOP_LEVELS) if "stop" in known else (0, 1)
        ends = over_at[who] if "end" in known and one.service_s > 0.0 else None
        at_end = level[1] + kinds.mixed(level, stop)
        began = kinds.mixed(level) if ends is not None else at_end
        told.append(Use(one.at, began, ends, at_end))
    return told
