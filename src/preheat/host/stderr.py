"""Standard error, which all processes of a host write their log lines to."""

import io

from preheat.telemetry.logs import Log

_STDERR = 2


def log_to_stderr() -> Log:
    """A log whose lines are one write each, so that those of other processes don't cut them."""
    return Log(io.FileIO(_STDERR, "wb", closefd=False))
