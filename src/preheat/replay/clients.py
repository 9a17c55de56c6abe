"""Who sends a trace's requests: at the trace's times, or each session after its answers."""

from collections.abc import Callable, Sequence
from typing import Literal

from preheat.replay.kernel import Kernel
from preheat.traces.arrival import Arrival

Loop = Literal["open", "closed"]


class Clients:
    """Open: requests come when the trace says, `speed` times as fast. Closed: a session's next one
    comes its thinking time (else the trace's gap) after the answer to the one before; thinking
    isn't made faster. Requests without a session come at their times in both.
    """

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        kernel: Kernel,
        send: Callable[[int], None],
        *,
        loop: Loop = "open",
        speed: float = 1.0,
    ) -> None:
        self._arrivals = arrivals
        self._kernel = kernel
        self._send = send
        self._speed = speed
        self._next = _following(arrivals) if loop == "closed" else {}

    def start(self) -> None:
        """Plan every request that waits for no answer."""
        later = set(self._next.values())
        for number, one in enumerate(self._arrivals):
            if number not in later:
                self._kernel.plan(one.at / self._speed, self._send, number)

    def answered(self, number: int) -> None:
        """The request has its answer, now."""
        following = self._next.get(number)
        if following is None:
            return
        one = self._arrivals[following]
        wait_s = one.think_s
        if wait_s < 0:
            wait_s = (one.at - self._arrivals[number].at) / self._speed
        self._kernel.plan(self._kernel.now + wait_s, self._send, following)


def _following(arrivals: Sequence[Arrival]) -> dict[int, int]:
    """For each arrival of a session the one after it."""
    last: dict[str, int] = {}
    following: dict[int, int] = {}
    for number, one in enumerate(arrivals):
        if one.session:
            if one.session in last:
                following[last[one.session]] = number
            last[one.session] = number
    return following
