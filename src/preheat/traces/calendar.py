"""When sessions begin whose trace doesn't say it: each once, or drawn again and again.

The drawn calendar is that of this project's study of headroom: a Poisson process of sessions,
drawn evenly with replacement, whose private blocks are new in each draw. So a session that is
drawn twice shares with itself only what sessions share anyway.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from statistics import fmean
from typing import Final

import msgspec

from preheat.errors import TraceError
from preheat.traces.arrival import Arrival
from preheat.traces.reader import Reading
from preheat.traces.rules import Rules

_HOUR_S: Final = 3_600.0
_AT: Final = attrgetter("at")


class Session(msgspec.Struct, frozen=True):
    """One session's arrivals, `at` counted from its start."""

    name: str
    arrivals: Sequence[Arrival]


def placed(sessions: Sequence[Session], reading: Reading) -> list[Arrival]:
    """All arrivals of the sessions, begun by the rule that `Rules.sessions` names, in order."""
    reading.has_sessions = True
    if not sessions:
        return []
    arrivals = (
        _once(sessions, reading) if reading.rules.sessions == "once" else _drawn(sessions, reading)
    )
    return sorted(arrivals, key=_AT)


def _once(sessions: Sequence[Session], reading: Reading) -> list[Arrival]:
    rules = reading.rules
    chance = random.Random(f"{rules.seed} starts")
    reading.tell(
        f"Each of {len(sessions)} sessions begins once, at a time drawn evenly from "
        f"{rules.span_s:g} s (seed {rules.seed})."
    )
    arrivals = []
    for session in sessions:
        start = chance.random() * rules.span_s
        arrivals += [msgspec.structs.replace(one, at=start + one.at) for one in session.arrivals]
    return arrivals


def _drawn(sessions: Sequence[Session], reading: Reading) -> list[Arrival]:
    rules = reading.rules
    cut = [_cut(session, rules.longest_pause_s) for session in sessions]
    mean_s = fmean(session.arrivals[-1].at for session in cut)
    if not mean_s:
        raise TraceError("these sessions have no length, so none can be drawn: use sessions='once'")
    rate = rules.open_sessions / mean_s
    end_s = rules.hours * _HOUR_S
    expected = rate * end_s * fmean(len(session.arrivals) for session in cut)
    if expected > rules.most_requests:
        raise TraceError(
            f"this calendar has some {round(expected):,} requests, above most_requests "
            f"({rules.most_requests:,}): take fewer hours or open_sessions"
        )
    trunks = _trunks(cut, rules)
    templates = [_Template(session, trunks) for session in cut]
    numbers = _Counter(len(trunks))
    chance = random.Random(f"{rules.seed} calendar")
    arrivals: list[Arrival] = []
    draws = 0
    at = chance.expovariate(rate)
    while at < end_s:
        drawn = chance.choice(templates).draw(at, end_s, draws, numbers)
        arrivals += drawn
        draws += 1
        reading.drawn(len(drawn))
        at += chance.expovariate(rate)
    reading.tell(
        f"{draws} sessions are drawn from {len(sessions)}, evenly and with replacement, beginning as "
        f"a Poisson process over {rules.hours:g} h with {rules.open_sessions:g} open in the mean (of "
        f"{mean_s / _HOUR_S:.2f} h; cut at the first pause over {rules.longest_pause_s / _HOUR_S:g} h; "
        f"seed {rules.seed}). Each draw's blocks are its own, but for {len(trunks)} that at least "
        f"{rules.trunk_sessions} sessions share."
    )
    return arrivals


def _cut(session: Session, longest_pause_s: float) -> Session:
    """Up to its first pause that is too long."""
    arrivals = session.arrivals
    for place in range(1, len(arrivals)):
        if arrivals[place].at - arrivals[place - 1].at > longest_pause_s:
            return Session(session.name, arrivals[:place])
    return session


def _trunks(sessions: Iterable[Session], rules: Rules) -> dict[int, int]:
    """Blocks that many sessions have, with their new numbers."""
    counts: Counter[int] = Counter()
    for session in sessions:
        counts.update({block for one in session.arrivals for block in one.blocks})
    shared = (block for block, count in counts.items() if count >= rules.trunk_sessions)
    return {block: number for number, block in enumerate(shared)}


class _Counter:
    """Hands out numbers nobody has."""

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self, count: int) -> range:
        """So many of them."""
        self._next += count
        return range(self._next - count, self._next)


class _Template:
    """A session, ready to be drawn: its blocks are places in a list of names, of which the
    private ones are new in each draw. A draw's arrivals share that list's integers."""

    def __init__(self, session: Session, trunks: dict[int, int]) -> None:
        place_of: dict[int, int] = {}
        for one in session.arrivals:
            for block in one.blocks:
                place_of.setdefault(block, len(place_of))
        self._session = session
        self._blocks = [tuple(map(place_of.__getitem__, one.blocks)) for one in session.arrivals]
        self._names = [trunks.get(block, -1) for block in place_of]
        self._private = [place for place, name in enumerate(self._names) if name < 0]

    def draw(self, start: float, end_s: float, number: int, numbers: _Counter) -> list[Arrival]:
        """Its arrivals before the end, if it begins at `start`."""
        names = self._names.copy()
        for place, name in zip(self._private, numbers.take(len(self._private)), strict=True):
            names[place] = name
        name_of: Callable[[int], int] = names.__getitem__
        session = f"{self._session.name}#{number}"
        return [
            msgspec.structs.replace(
                one,
                at=start + one.at,
                id=f"{one.id}#{number}",
                session=session,
                blocks=tuple(map(name_of, blocks)),
                key=_key(one.key, number),
            )
            for one, blocks in zip(self._session.arrivals, self._blocks, strict=True)
            if start + one.at < end_s
        ]


def _key(key: int, draw: int) -> int:
    """A draw's own: its prompt isn't that of another draw. Below 2^63."""
    return key if key < 0 else (draw << 32) + key
