"""Housekeeping that may block, in a thread of its own: the store's keeper."""

import threading
from collections import deque
from typing import Final, Protocol

from preheat.errors import StoreError
from preheat.telemetry.logs import Log

TICK_S: Final = 1.0
_MOST_DEATHS: Final = 256


class Keeper(Protocol):
    """Looks after what the workers share. Its methods may block; one thread at a time calls them."""

    def start(self) -> None:
        """Once, before any worker starts. Raises ConfigError or StoreError."""

    def tick(self) -> None:
        """Once a second."""

    def after_death(self, by_signal: int = 0) -> None:
        """A worker has ended, perhaps in the middle of something."""

    def close(self) -> None:
        """After the last worker."""


class Keeping:
    """Calls the keeper until it is told to stop; never waits long for it."""

    def __init__(self, keeper: Keeper, log: Log, tick_s: float = TICK_S) -> None:
        self._keeper = keeper
        self._log = log
        self._tick_s = tick_s
        self._wake = threading.Event()
        self._deaths: deque[int] = deque(maxlen=_MOST_DEATHS)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="preheat-keeper", daemon=True)

    def start(self) -> None:
        """Begin, in a thread that may wait. Raises ConfigError; a store that fails is no reason not
        to serve."""
        try:
            self._keeper.start()
        except StoreError as error:
            self._log.event("l2-keeper-failed", why=str(error))
        self._thread.start()

    def after_death(self, by_signal: int) -> None:
        """A worker has ended; the keeper is told soon."""
        self._deaths.append(by_signal)
        self._wake.set()

    def close(self, within_s: float = 2.0) -> None:
        """The last call; what the keeper is doing may take this long."""
        self._is_closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(self._tick_s)
            self._wake.clear()
            self._turn()
        self._keeper.close()

    def _turn(self) -> None:
        try:
            while self._deaths:
                self._keeper.after_death(self._deaths.popleft())
            if not self._is_closing:
                self._keeper.tick()
        except Exception as bug:  # noqa: BLE001  a turn that fails mustn't be the last one
            self._log.event("bug", type=type(bug).__name__, where="keeper")
