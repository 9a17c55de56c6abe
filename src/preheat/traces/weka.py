"""Weka's sessions of coding agents: a session a line, its prompts as runs of ids of 64 tokens.

The runs are regrouped to longer blocks, since a replay needs no 64-token steps in prompts of
100,000. A group's id stands for all ids up to its end: where two prompts differ before, so do their
groups. Ids of a `local` session mean nothing to others; a sub-agent's requests are its session's.
"""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from preheat.traces.arrival import UNKNOWN, Arrival
from preheat.traces.calendar import Session, placed
from preheat.traces.numbering import Numbering
from preheat.traces.reader import MOST, Count, Draft, Format, Reading
from preheat.traces.source import Head, Source

_ID_TOKENS: Final = 64

Seconds = Annotated[float, Meta(ge=0, le=MOST)]
Runs = list[tuple[int, int]]
"""First id and how many."""


class _Request(msgspec.Struct, gc=False):
    t: Seconds
    input_tokens: Count = msgspec.field(name="in")
    output_tokens: Count = msgspec.field(name="out")
    runs: list[tuple[Count, Annotated[int, Meta(ge=1)]]]
    model: str
    agent: str | None = None
    it: list[str] | None = None
    stop: str | None = None
    api: Seconds | None = None
    think: Seconds | None = None
    ttft: Seconds | None = None


class _Session(msgspec.Struct):
    id: str
    scope: Literal["global", "local"]
    block_size: Literal[64]
    requests: Annotated[list[_Request], Meta(min_length=1)]


def _recognises(head: Head) -> bool:
    return head.has("scope", "block_size", "requests")


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    block_tokens = reading.rules.block_tokens
    groups = _Groups(block_tokens // _ID_TOKENS)
    keys = Numbering()
    sessions: list[Session] = []
    decoder = msgspec.json.Decoder(_Session)
    for source in sources:
        for number, line in reading.records(source, decoder):
            why = _why_not(line)
            if why:
                reading.refuse(source, number, why)
                continue
            sessions.append(_session(line, source.prefix + line.id, groups, keys))
    if block_tokens != _ID_TOKENS:
        reading.tell(f"Blocks of 64 tokens are read in groups of {block_tokens} tokens.")
    return Draft(
        arrivals=placed(sessions, reading), block_tokens=block_tokens, times="rule", is_ordered=True
    )


def _why_not(line: _Session) -> str:
    """What no single field can know, or an empty string."""
    before = 0.0
    for request in line.requests:
        if request.t < before:
            return "its requests aren't in order of time"
        before = request.t
        if sum(count for _, count in request.runs) != request.input_tokens // _ID_TOKENS:
            return "a prompt whose runs don't cover its full blocks"
    return ""


def _session(line: _Session, name: str, groups: "_Groups", keys: Numbering) -> Session:
    space = name if line.scope == "local" else ""
    groups.begin(space)
    arrivals = []
    for turn, request in enumerate(line.requests):
        blocks = groups.blocks(request.runs, request.input_tokens)
        exact = (blocks, request.input_tokens, request.output_tokens, request.model)
        arrivals.append(
            Arrival(
                at=request.t,
                id=f"{name}/{turn}",
                session=name,
                turn=turn,
                model=request.model,
                key=keys.of(exact),
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                blocks=blocks,
                think_s=_known(request.think),
                ttft_s=_known(request.ttft),
                service_s=_known(request.api),
                kind="+".join(request.it or ()),
                stop=request.stop or "",
                agent=request.agent or "",
            )
        )
    return Session(name, arrivals)


def _known(value: float | None) -> float:
    return UNKNOWN if value is None else value


class _Groups:
    """Numbers chained groups of ids.

    A prompt mostly goes on where an earlier one of its session ended, so the groups of the runs
    they begin with alike are taken over.
    """

    def __init__(self, ids: int) -> None:
        self._ids = ids
        self._numbers = Numbering()
        self._space = ""
        self._last: list[tuple[Runs, tuple[int, ...]]] = []

    def begin(self, space: str) -> None:
        """A new session; equal ids of different spaces are different blocks."""
        self._space = space
        self._last = []

    def blocks(self, runs: Runs, input_tokens: int) -> tuple[int, ...]:
        """The prompt's groups; the last may be partial."""
        runs = _joined(runs)
        alike, known = self._best(runs)
        whole = input_tokens // (self._ids * _ID_TOKENS)
        numbers = list(known[: min(alike // self._ids, whole)])
        for place in range(len(numbers), whole):
            start = place * self._ids
            self._add(numbers, _part(runs, start, start + self._ids))
        full = tuple(numbers)
        if input_tokens % (self._ids * _ID_TOKENS):
            rest = _part(runs, whole * self._ids, input_tokens // _ID_TOKENS)
            self._add(numbers, (*rest, -1 - input_tokens % _ID_TOKENS))
        self._last = [(runs, full), *self._last[:3]]
        return tuple(numbers)

    def _add(self, numbers: list[int], part: tuple[int, ...]) -> None:
        before = numbers[-1] if numbers else self._space
        numbers.append(self._numbers.of((before, part)))

    def _best(self, runs: Runs) -> tuple[int, tuple[int, ...]]:
        """How many ids it shares with which of the session's last prompts, and their groups."""
        best = 0
        groups: tuple[int, ...] = ()
        for other, known in self._last:
            alike = _alike(runs, other)
            if alike > best:
                best, groups = alike, known
        return best, groups


def _joined(runs: Runs) -> Runs:
    """With runs that go on where the one before ends made one, so that equal ids are equal runs.

    >>> _joined([(1, 2), (3, 4), (9, 1)])
    [(1, 6), (9, 1)]
    """
    joined: Runs = []
    for first, count in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return joined


def _alike(runs: Runs, other: Runs) -> int:
    """How many ids both begin with."""
    alike = 0
    for (first, count), (its_first, its_count) in zip(runs, other, strict=False):
        if first != its_first:
            return alike
        alike += min(count, its_count)
        if count != its_count:
            return alike
    return alike


def _part(runs: Runs, start: int, end: int) -> tuple[int, ...]:
    """The runs between two places, first id and count in turn, flat."""
    part: list[int] = []
    place = 0
    for first, count in runs:
        low, high = max(start, place), min(end, place + count)
        if low < high:
            part += (first + low - place, high - low)
        place += count
        if place >= end:
            break
    return tuple(part)


FORMAT: Final = Format(_recognises, _read)
