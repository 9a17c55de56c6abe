"""Sessions that pause, as Weka's coding agents did, scaled to a small model and a short run."""

from __future__ import annotations

import functools
import gzip
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.report import BenchmarkError
from benchmarks.traces import DATA

MIN_TURNS = 12
LONGEST = 6.0  # times the usual pause


class Turn(msgspec.Struct, frozen=True):
    """What a session says, in tokens, after it has paused behind the last answer for so long."""

    pause_s: float
    tokens: int


class _Request(msgspec.Struct):
    t: float
    input_tokens: int = msgspec.field(name="in")
    agent: str | None = None
    api: float | None = None


class _Session(msgspec.Struct):
    requests: list[_Request]


class Drawn(msgspec.Struct, frozen=True):
    """All sessions of a block as they were, unscaled: of each its turns."""

    sessions: list[list[Turn]]

    def scaled(
        self, *, first_tokens: int, most_tokens: int, mean_pause_s: float
    ) -> list[list[Turn]]:
        """With one factor for lengths, so that first prompts are of `first_tokens` in the mean, and one
        for pauses, so that they are of `mean_pause_s`; those longer than six usual ones are cut first,
        or the run would never end. No prompt grows beyond `most_tokens`; a turn says at least 8."""
        firsts = [turns[0].tokens for turns in self.sessions]
        pauses = [turn.pause_s for turns in self.sessions for turn in turns[1:]]
        most_s = LONGEST * statistics.median(pauses)
        by_length = first_tokens * len(firsts) / sum(firsts)
        by_time = mean_pause_s / statistics.fmean(min(most_s, one) for one in pauses)
        fit = functools.partial(_fitted, by_length, by_time, most_s, most_tokens)
        return [list(fit(turns)) for turns in self.sessions]


def drawn(sessions: int, returns: int, seed: int, *, path: Path | None = None) -> Drawn:
    """So many sessions, each with a run of consecutive turns from a random place; sub-agents' requests
    aren't their session's own. The start of each is within a pause of its own."""
    chance = random.Random(seed)
    known = list(_read(path or DATA / "weka_agentic" / "v6_global.jsonl.gz"))
    if len(known) < sessions:
        raise BenchmarkError(f"only {len(known)} sessions are long enough")
    return Drawn([_run(one, returns, chance) for one in chance.sample(known, sessions)])


def _run(requests: Sequence[_Request], returns: int, chance: random.Random) -> list[Turn]:
    start = chance.randrange(1, len(requests) - returns)
    turns = []
    for place in range(start, start + returns + 1):
        before, one = requests[place - 1], requests[place]
        pause_s = max(0.0, one.t - before.t - (before.api or 0.0))
        is_first = place == start
        grown = one.input_tokens if is_first else one.input_tokens - before.input_tokens
        turns.append(Turn(pause_s * chance.random() if is_first else pause_s, max(0, grown)))
    return turns


def _fitted(
    by_length: float, by_time: float, most_s: float, most_tokens: int, turns: Sequence[Turn]
) -> Iterator[Turn]:
    left = most_tokens
    for turn in turns:
        tokens = max(8, min(left, round(turn.tokens * by_length)))
        left = max(8, left - tokens)
        yield Turn(min(most_s, turn.pause_s) * by_time, tokens)


def _read(path: Path) -> Iterator[list[_Request]]:
    if not path.exists():
        raise BenchmarkError(f"{path} isn't there: the evaluation traces stand beside the project")
    decoder = msgspec.json.Decoder(_Session)
    with gzip.open(path) as lines:
        for line in lines:
            own = [one for one in decoder.decode(line).requests if one.agent is None]
            if len(own) >= MIN_TURNS:
                yield own
