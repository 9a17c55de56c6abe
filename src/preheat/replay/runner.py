"""A gateway in simulated time: the controller that serves, driven by a heap of events.

It does what `gateway.proxy` and `gateway.flights` do, without sockets and tasks, and decides as
little. Which answers are kept, joined, evicted and expired is said by the same `Controller`, by the
same verbs; a test holds the two drivers against each other, decision by decision.
"""

from collections.abc import Callable
from math import ceil
from typing import Any, Final, Protocol

import msgspec

from preheat.core.types import (
    Decision,
    Effects,
    Epoch,
    Forward,
    Hit,
    Join,
    Outcome,
    Refresh,
    Request,
    RequestId,
    Usage,
)
from preheat.replay.kernel import Kernel

TICK_S: Final = 1.0
"""As often as `gateway.assembly` ticks."""


class Verbs(Protocol):
    """What of a `Controller` a driver without L2 needs."""

    @property
    def epoch(self) -> Epoch: ...
    def on_request(self, request: Request, now: float) -> Decision: ...
    def on_outcome(self, outcome: Outcome, reason: str, now: float) -> Effects: ...
    def on_failure(self, request: Request, reason: str, service_s: float) -> None: ...
    def on_tick(self, now: float) -> bool: ...


class Flight:
    """An engine call, and who waits for it."""

    def __init__(self, request: Request, reason: str, now: float) -> None:
        self.request = request
        self.reason = reason
        self.asked_at = now
        self.waiting = [request]


class Said(msgspec.Struct, frozen=True):
    """What an engine answered; the answer itself is the driver's."""

    answer: Any = None
    size_bytes: int = 0
    usage: Usage | None = None
    unstorable: str = ""


class Runner:
    """One gateway process. `call` asks the engine for a flight, and in the end tells `ended`."""

    def __init__(self, controller: Verbs, kernel: Kernel, call: Callable[[Flight], None]) -> None:
        self._controller = controller
        self._kernel = kernel
        self._call = call
        self._flights: dict[RequestId, Flight] = {}  # by leader
        self._flight_of: dict[RequestId, Flight] = {}  # by whoever waits
        self._tick_at = TICK_S

    def arrive(self, request: Request) -> Decision:
        """A request comes, now."""
        self._catch_up()
        now = self._kernel.now
        decision = self._controller.on_request(request, now)
        if isinstance(decision, Join):
            flight = self._flights[decision.leader]
            flight.waiting.append(request)
            self._flight_of[request.id] = flight
        elif isinstance(decision, Forward):
            flight = Flight(request, decision.reason, now)
            self._flights[request.id] = flight
            self._flight_of[request.id] = flight
            self._call(flight)
        return decision

    def leave(self, name: RequestId) -> None:
        """A client gives up; with the last of them goes the flight."""
        self._catch_up()
        flight = self._flight_of.pop(name, None)
        if flight is None:
            return  # it has its answer
        flight.waiting = [one for one in flight.waiting if one.id != name]
        if not flight.waiting:
            del self._flights[flight.request.id]
            spent_s = self._kernel.now - flight.asked_at
            self._controller.on_failure(flight.request, "cancelled", spent_s)

    def ended(self, flight: Flight, said: Said) -> Effects | None:
        """The engine has answered whole. None where nobody waited any more."""
        self._catch_up()
        if self._flights.pop(flight.request.id, None) is None:
            return None
        now = self._kernel.now
        outcome = Outcome(
            request=flight.request,
            asked_at=flight.asked_at,
            service_s=now - flight.asked_at,
            answer=said.answer,
            size_bytes=said.size_bytes,
            usage=said.usage,
            unstorable=said.unstorable,
            joined=tuple(one for one in flight.waiting if one is not flight.request),
            epoch=self._controller.epoch,
        )
        effects = self._controller.on_outcome(outcome, flight.reason, now)
        for one in flight.waiting:
            del self._flight_of[one.id]
        return effects

    def _catch_up(self) -> None:
        """Ticks that were due before now. Since nothing happened meanwhile, the first of them books
        all uses, and the last removes what those between would have: in a pause of years, too."""
        now = self._kernel.now
        if self._tick_at >= now:
            return
        last_at = max(self._tick_at, (ceil(now / TICK_S) - 1) * TICK_S)
        for at in sorted({self._tick_at, last_at}):
            while self._controller.on_tick(at):
                pass
        self._tick_at = last_at + TICK_S


def layer_of(decision: Decision) -> str:
    """What answers, in the request log's words."""
    match decision:
        case Hit() | Refresh():
            return "exact"
        case Join():
            return "join"
        case Forward():
            return "forward"
    raise AssertionError(f"without L2 nothing says {decision}")
