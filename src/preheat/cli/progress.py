"""How far a long command is, on standard error."""

import sys
from time import monotonic
from typing import Final

_LIVE_S: Final = 0.2
_LINE_S: Final = 10.0


class Line:
    """In place on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._started_at = self._shown_at = monotonic()
        self._is_open = False

    def tell(self, text: str) -> None:
        """What is being done; not every call is shown."""
        now = monotonic()
        if now - self._shown_at < (_LIVE_S if self._is_live else _LINE_S):
            return
        self._shown_at = now
        start, end = ("\r\x1b[K", "") if self._is_live else ("", "\n")
        print(
            f"{start}{now - self._started_at:6.0f} s  {text}", end=end, file=sys.stderr, flush=True
        )
        self._is_open = self._is_live

    def end(self) -> None:
        """Clear the line, so that results begin on one of their own."""
        if self._is_open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_open = False
