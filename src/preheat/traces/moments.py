"""Points in time, as logs spell them, in seconds since 1970."""

from datetime import UTC, datetime
from typing import Any, Final

import msgspec

_UNITS: Final = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
"""From this number on, it counts nanoseconds, microseconds or milliseconds since 1970."""

_LATEST: Final = 1.7e19
"""In nanoseconds: the year 2508. Later ones aren't times."""


def seconds_of(moment: datetime) -> float:
    """A time without a zone is taken for UTC."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def seconds_from(value: Any) -> float:
    """From a number in whatever unit, or ISO 8601. Raises ValueError for anything else.

    >>> seconds_from(1_700_000_000_500), seconds_from("2023-11-14T22:13:20.5Z")
    (1700000000.5, 1700000000.5)
    """
    if isinstance(value, str):
        try:
            return seconds_of(msgspec.convert(value, datetime, strict=False))
        except msgspec.ValidationError:
            raise ValueError("a time that is neither ISO 8601 nor a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a time that is neither ISO 8601 nor a number")
    if not 0 <= value < _LATEST:
        raise ValueError("a time that is negative or after the year 2500")
    return next((value / unit for least, unit in _UNITS if value >= least), float(value))
