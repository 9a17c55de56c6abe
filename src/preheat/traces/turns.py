"""Which turn of its session a request is, and how long its client had waited."""

from typing import Final

from preheat.traces.arrival import UNKNOWN

_NEW: Final = (0, float("inf"))


class Turns:
    """Told of requests in order of time."""

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[int, float]] = {}

    def next(self, session: str, at: float, duration_s: float) -> tuple[int, float]:
        """The request's turn, and the seconds since the session's last answer.

        They are unknown for its first request, for one that came before that answer was there, and
        where nobody says how long it took.
        """
        if not session:
            return 0, UNKNOWN
        turn, free_at = self._sessions.get(session, _NEW)
        end = at + duration_s if duration_s >= 0 else float("inf")
        self._sessions[session] = (turn + 1, end)
        return turn, at - free_at if at >= free_at else UNKNOWN
