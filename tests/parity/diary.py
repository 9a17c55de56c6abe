"""What a controller was asked and what it said, as values that two drivers' can be compared by."""

from typing import Any

from preheat.core.controller import Controller
from preheat.core.types import Decision, Effects, Forward, Hit, Join, Keep, Outcome, Request


class Diary:
    """A controller that writes down its decisions; in all else it is the one it was given."""

    def __init__(self, controller: Controller) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self._controller = controller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    def on_request(self, request: Request, now: float) -> Decision:
        decision = self._controller.on_request(request, now)
        self.lines.append(("request", now, number_of(request), *_said(decision)))
        return decision

    def on_outcome(self, outcome: Outcome, reason: str, now: float) -> Effects:
        effects = self._controller.on_outcome(outcome, reason, now)
        joined = tuple(number_of(follower) for follower in outcome.joined)
        told = (outcome.asked_at, outcome.service_s, outcome.size_bytes, outcome.usage, joined)
        self.lines.append(
            ("outcome", now, number_of(outcome.request), reason, *told, *_done(effects))
        )
        return effects

    def on_failure(
        self, request: Request, reason: str, service_s: float, *, is_refresh: bool = False
    ) -> None:
        self._controller.on_failure(request, reason, service_s, is_refresh=is_refresh)
        self.lines.append(("failure", number_of(request), reason, service_s))

    def on_miss(self, request: Request, now: float) -> Decision:
        decision = self._controller.on_miss(request, now)
        self.lines.append(("miss", now, number_of(request), *_said(decision)))
        return decision


def number_of(request: Request) -> int:
    """Which request of the run it is; its name ends in that, whoever gave it."""
    return int(request.id.rpartition(b"-")[2], 16)


def _said(decision: Decision) -> tuple[Any, ...]:
    match decision:
        case Hit():
            return ("hit", decision.label, decision.stored_at, decision.ttl_s)
        case Join(leader):
            return ("join", int(leader.rpartition(b"-")[2], 16))
        case Forward(fwd, reason, joinable):
            return ("forward", fwd, reason, joinable)
    raise AssertionError(f"no such decision belongs here: {decision}")


def _done(effects: Effects) -> tuple[Any, ...]:
    if isinstance(effects, Keep):
        return ("keep", effects.entry.key, effects.evicted, effects.refused)
    return ("drop", effects.reason)
