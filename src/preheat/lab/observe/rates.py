"""How often something happens now, from how often it did."""

from math import exp
from typing import Final

MEMORY_S: Final = 3_600.0
"""What was an hour ago counts a third: the load of a day comes and goes in hours."""
_LEAST_S: Final = 60.0
"""Nothing is said of a shorter time than this."""


class Rate:
    """Happenings a second, forgotten over `MEMORY_S`; counted since `since`, or since the first.

    >>> rate = Rate()
    >>> for second in range(600):
    ...     rate.add(1.0, float(second))
    >>> round(rate.per_s(600.0), 2), round(rate.per_s(600.0 + MEMORY_S), 2)
    (1.0, 0.08)
    """

    def __init__(self, since: float | None = None, count: float = 0.0) -> None:
        self._since = self._at = since
        self._count = count

    def add(self, count: float, now: float) -> None:
        """So many more."""
        self._forget(now)
        self._count += count

    def per_s(self, now: float) -> float:
        """The rate."""
        self._forget(now)
        watched_s = max(_LEAST_S, now - (now if self._since is None else self._since))
        return self._count / (MEMORY_S * (1.0 - exp(-watched_s / MEMORY_S)))

    def _forget(self, now: float) -> None:
        if self._at is None:
            self._since = self._at = now
        elif now > self._at:
            self._count *= exp((self._at - now) / MEMORY_S)
            self._at = now
