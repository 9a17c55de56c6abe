"""Signals that a terminal or a service manager may send to all processes of ours: what these mean is
the supervisor's affair."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Final

_OTHERS_AFFAIR: Final = frozenset({signal.SIGINT, signal.SIGHUP, signal.SIGUSR2})


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A process that is made meanwhile gets none of them until it can say that it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OTHERS_AFFAIR)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """They mean nothing to this process, those included that were held."""
    for name in _OTHERS_AFFAIR:
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OTHERS_AFFAIR)
