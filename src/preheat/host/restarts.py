"""How long to wait before a process that died is started again."""

from typing import Final

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0
LONGEST_PAUSE_OF_WORKING_S: Final = 1.0
STEADY_S: Final = 10.0
"""A process that lived this long is started again at once."""


class Restarts:
    """Counts those that came too soon: one is an accident, more of them are a reason to wait.

    A process that worked until it died is worth less of a wait than one that never did.
    """

    def __init__(self, longest_pause_s: float = LONGEST_PAUSE_S) -> None:
        self._longest_pause_s = longest_pause_s
        self._early = 0
        self._failed = 0

    def pause_s(self, alive_s: float, *, worked: bool) -> float:
        """It died, this long after its start."""
        if alive_s >= STEADY_S:
            self._early = self._failed = 0
            return 0.0
        if not worked:
            self._failed += 1
            return _doubled(self._failed - 1, self._longest_pause_s)
        self._failed = 0
        self._early += 1
        return _doubled(self._early - 2, LONGEST_PAUSE_OF_WORKING_S) if self._early > 1 else 0.0


def _doubled(times: int, longest_s: float) -> float:
    return float(min(FIRST_PAUSE_S * 2 ** min(times, 16), longest_s))
