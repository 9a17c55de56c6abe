"""The whole study of one trace: which of its parts the trace can tell anything about."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from preheat.core.eviction import POLICIES as ORDERS
from preheat.core.routing import POLICIES as RULES
from preheat.errors import ConfigError
from preheat.replay.granularity import cuts
from preheat.replay.headroom.event_tables import event_part
from preheat.replay.headroom.finding import Finding, in_short
from preheat.replay.headroom.fleets import routing
from preheat.replay.headroom.outcomes import event_runs
from preheat.replay.headroom.pause_tables import pause_arms, pause_sizes, pauses, trunks
from preheat.replay.headroom.residency import MODELS, residency
from preheat.replay.headroom.room_tables import capacities, capacity_runs, granularities
from preheat.replay.headroom.wanted import Progress, Steps, Wanted
from preheat.replay.report import Event, Table
from preheat.traces.arrival import Trace


class Part(msgspec.Struct, frozen=True):
    """Makes tables (and of events curves), one after the other, and says at the end what they come
    to. `runs`: how many simulations that takes."""

    make: Callable[[Trace, Wanted, Progress], Generator[Table | Event, None, tuple[Finding, ...]]]
    runs: Callable[[Trace, Wanted], int]


PARTS: Final[Mapping[str, Part]] = {
    "capacity": Part(capacities, capacity_runs),
    "granularity": Part(
        granularities, lambda trace, wanted: len(cuts(trace)) * len(wanted.granularity_shares)
    ),
    "pauses": Part(
        pauses, lambda trace, wanted: len(pause_sizes(wanted)) * len(pause_arms(trace, wanted))
    ),
    "trunks": Part(trunks, lambda _, wanted: len(wanted.session_tokens)),
    "events": Part(event_part, event_runs),
    "routing": Part(routing, lambda _, wanted: len(wanted.worker_tokens) * (len(RULES) + 2)),
    "residency": Part(residency, lambda _, wanted: len(wanted.rooms) * (len(ORDERS) + 1)),
}


def check_parts(parts: Iterable[str]) -> None:
    """Raises ConfigError for a part that there isn't."""
    for name in parts:
        if name not in PARTS:
            raise ConfigError(f"unknown part {name!r}; known: {', '.join(PARTS)}")


def study(
    trace: Trace, wanted: Wanted, progress: Progress, parts: Iterable[str] = ()
) -> Iterator[Table | Event]:
    """The tables of these parts, or of all that the trace can tell: prefixes where it has blocks,
    residency where it has only keys; the last one says in short what they come to. Raises ConfigError
    where it has neither, or more keys than there are models: at once, before the first simulation."""
    chosen = list(parts)
    check_parts(chosen)
    fitting = _fitting(trace, wanted)
    chosen = chosen or fitting
    for name in chosen:
        if name not in fitting:
            raise ConfigError(
                f"{trace.name}: it can't tell anything about {name!r}; it can about: {', '.join(fitting)}"
                " (trunks: with --open-sessions)"
            )
    if "residency" in chosen:
        _check_models(trace)
    return _tables(trace, wanted, progress, chosen)


def _tables(
    trace: Trace, wanted: Wanted, progress: Progress, chosen: Iterable[str]
) -> Iterator[Table | Event]:
    steps = Steps(sum(PARTS[name].runs(trace, wanted) for name in chosen), progress)
    findings: list[Finding] = []
    for name in chosen:
        findings += yield from PARTS[name].make(trace, wanted, steps)
    yield in_short(findings)


def _fitting(trace: Trace, wanted: Wanted) -> list[str]:
    """The parts that the trace can tell anything about."""
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
    return fitting


def _check_models(trace: Trace) -> None:
    keys = len({one.key for one in trace.arrivals if one.key >= 0})
    if keys > MODELS:
        raise ConfigError(
            f"{trace.name}: it has {keys:,} different keys: a stream of keys, and not one of models that"
            f" are loaded (at most {MODELS:,}); `preheat replay` has its hit curves"
        )
