"""The whole study of one trace: which of its parts the trace can tell anything about."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from preheat.errors import ConfigError
from preheat.replay.headroom.event_tables import aftermaths
from preheat.replay.headroom.fleets import routing
from preheat.replay.headroom.pause_tables import capacities, granularities, pauses, trunks
from preheat.replay.headroom.residency import residency
from preheat.replay.headroom.wanted import Progress, Wanted
from preheat.replay.report import Table
from preheat.traces.arrival import Trace


def _capacity(trace: Trace, wanted: Wanted, progress: Progress) -> Iterable[Table]:
    return (capacities(trace, wanted, progress),)


def _granularity(trace: Trace, wanted: Wanted, progress: Progress) -> Iterable[Table]:
    return (granularities(trace, wanted, progress),)


def _trunks(trace: Trace, wanted: Wanted, progress: Progress) -> Iterable[Table]:
    return (trunks(trace, wanted, progress),)


def _residency(trace: Trace, wanted: Wanted, progress: Progress) -> Iterable[Table]:
    return residency(trace, wanted.rooms, progress)


PARTS: Final[Mapping[str, Callable[[Trace, Wanted, Progress], Iterable[Table]]]] = {
    "capacity": _capacity,
    "granularity": _granularity,
    "pauses": pauses,
    "trunks": _trunks,
    "events": aftermaths,
    "routing": routing,
    "residency": _residency,
}


def study(
    trace: Trace, wanted: Wanted, progress: Progress, parts: Iterable[str] = ()
) -> Iterator[Table]:
    """The tables of these parts, or of all that the trace can tell: prefixes where it has blocks,
    residency where it has only keys. Raises ConfigError where it has neither."""
    if trace.block_tokens:
        fitting = [name for name in PARTS if name != "residency"]
    elif any(one.key >= 0 for one in trace.arrivals):
        fitting = ["residency"]
    else:
        raise ConfigError(
            f"{trace.name}: it has neither prompts' blocks nor keys, so it can't say what a cache would save"
        )
    if trace.arrivals[-1].at <= trace.arrivals[0].at:
        raise ConfigError(f"{trace.name}: all of it came at one moment: nothing can be said a day")
    if wanted.open_sessions is None and "trunks" in fitting:
        fitting.remove("trunks")
    for name in parts or fitting:
        if name not in PARTS:
            raise ConfigError(f"unknown part {name!r}; known: {', '.join(PARTS)}")
        if name not in fitting:
            raise ConfigError(
                f"{trace.name}: it can't tell anything about {name!r}; it can about: {', '.join(fitting)}"
                " (trunks: with --open-sessions)"
            )
        yield from PARTS[name](trace, wanted, progress)
