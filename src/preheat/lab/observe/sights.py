"""Puts what an observer knows into the document that it tells."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from preheat.core.router import Known
from preheat.lab.observe.plan import Found, Missing
from preheat.lab.observe.servers import Server
from preheat.lab.observe.sight import (
    MissingSight,
    PrefixSight,
    RoutingSight,
    ServerSight,
    Sight,
    WarmSight,
)

if TYPE_CHECKING:
    from preheat.lab.observe.observer import Observer

_LATE_SHARE: Final = 0.01
_BOOKED: Final = 32


def sight_of(observer: "Observer", found: list[Found]) -> Sight:
    """All that it sees now."""
    fleet, counts, order = observer.fleet, observer.counts, observer.order
    now = observer.settling.now
    known = [fleet.known(one.number, now) for one in observer.servers]
    servers = [_server(observer, one, known[one.number]) for one in observer.servers]
    names = [one.name for one in servers]
    return Sight(
        log=order.log,
        at=None if counts.first_at is None else now,
        first_at=counts.first_at,
        is_over=observer.is_over,
        lines=counts.lines,
        bad=counts.bad,
        bad_lines=list(observer.bad),
        unplaced=fleet.unplaced,
        late=observer.settling.late,
        undated=counts.undated,
        without_prompt=counts.without_prompt,
        without_usage=counts.without_usage,
        without_duration=counts.without_duration,
        speeds=sorted({one.prefix.model for one in found if fleet.learned(one.prefix.model)}),
        idle_price=order.idle_price,
        repeats=fleet.repeats,
        servers=servers,
        routing=_routing(known) if len(servers) > 1 else None,
        prefixes=[_prefix(one, names, now) for one in found],
        warming=_warming(observer),
        cautions=list(_cautions(observer, found)),
    )


def _server(observer: "Observer", one: Server, known: Known) -> ServerSight:
    fleet, account = observer.fleet, observer.fleet.accounts[one.number]
    ear = None if observer.heard is None else observer.heard.ears[one.number]
    load, capacity = one.load, one.capacity
    return ServerSight(
        name=one.name,
        url=one.direct.url,
        down_why=one.down_why,
        dialect=one.dialect,
        restarts=one.restarts,
        running=None if load is None else load.running,
        waiting=None if load is None else load.waiting,
        capacity_tokens=None if capacity is None else capacity.tokens,
        held_tokens=fleet.held_tokens(one.number, known),
        trust=known.trust,
        requests=account.requests,
        failed=account.failed,
        told=account.told,
        agreed=account.agreed,
        input_tokens=account.input_tokens,
        thought_tokens=account.thought_tokens,
        cached_tokens=account.cached_tokens,
        ghost_tokens=known.ghost_tokens,
        engine_input_tokens=one.totals.input_tokens,
        engine_cached_tokens=one.totals.cached_tokens,
        events=None if ear is None else ear.feed.counts,
        events_refused="" if ear is None else ear.refused,
    )


def _routing(known: list[Known]) -> RoutingSight:
    return RoutingSight(
        agreed=sum(one.shadow_agreed for one in known),
        differed=sum(one.shadow_differed for one in known),
        sooner_s=-sum(one.shadow_sooner_s for one in known),  # the shadow is ours here
    )


def _prefix(one: Found, names: list[str], now: float) -> PrefixSight:
    prefix = one.prefix
    return PrefixSight(
        name=prefix.name,
        model=prefix.model,
        tokens=one.tokens,
        sessions=prefix.sessions,
        uses_per_h=3_600.0 * prefix.uses_per_s(now),
        held=dict(zip(names, one.held, strict=True)),
        missing=[_missing(each, names) for each in one.missing],
    )


def _missing(one: Missing, names: list[str]) -> MissingSight:
    offer = one.offer
    return MissingSight(
        server=names[one.worker],
        missing_tokens=one.missing_tokens,
        hold_s=one.hold_s,
        chance=offer.chance,
        costs_s=offer.costs_s,
        room_s=offer.room_s,
        gains_s=offer.gains_s,
        spends_s=offer.spends_s,
        pays=offer.pays,
    )


def _warming(observer: "Observer") -> WarmSight | None:
    warming = observer.warming
    if warming is None:
        return None
    return WarmSight(
        budget_factor=warming.budget.factor,
        left_tokens=warming.budget.left(warming.clock()),
        totals=warming.totals,
        booked=list(warming.booked)[-_BOOKED:],
    )


def _cautions(observer: "Observer", found: list[Found]) -> Iterator[str]:
    """What mustn't be concluded, and what to do about it."""
    fleet, counts = observer.fleet, observer.counts
    requests = fleet.repeats.requests
    if not requests:
        yield "No request was read yet."
        return
    if fleet.unplaced and len(observer.servers) > 1:
        yield (
            f"{fleet.unplaced} of {requests} requests aren't given to one of these servers by the log: "
            "they count as repeats only. --worker-field names the field that says who answered; "
            "NAME=URL gives a server the log's name for it."
        )
    if counts.without_prompt:
        yield f"{counts.without_prompt} of {requests} requests have no prompt in the log: they share nothing."
    if counts.without_duration:
        yield (
            f"{counts.without_duration} of {requests} requests have no duration: loads and speeds are "
            "known from the others only."
        )
    if counts.undated:
        yield f"{counts.undated} lines have no time: they count from when they were read."
    if not fleet.repeats.told_input_tokens:
        yield (
            "No answer tells its cached tokens, so what was found can't be compared with what was "
            "thought to be there (`preheat doctor URL` says why)."
        )
    if observer.settling.late > _LATE_SHARE * requests:
        yield (
            f"{observer.settling.late} requests were told of too late to stand in order: a longer "
            "--settle waits for those that take long."
        )
    if any(fleet.learned(one.prefix.model) is None for one in found):
        yield (
            "The speed of a model isn't learned yet (ten answers with tokens and durations, of different "
            "lengths): its seconds are an 8B model's on a big GPU."
        )
    yield (
        "What is hot is what was seen: nothing is forecast yet. The routing compares one request at a "
        "time, from where the stack's own choices had led."
    )
