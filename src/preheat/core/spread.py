"""What is told about many numbers: one definition for every report."""

from collections.abc import Sequence
from math import ceil, fsum

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """Where the numbers lie. Without any, all of it is None."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    most: float | None = None


def spread_of(numbers: Sequence[float]) -> Spread:
    """The spread of these numbers, in any order."""
    if not numbers:
        return Spread(0)
    ordered = sorted(numbers)
    return Spread(
        len(ordered),
        fsum(ordered) / len(ordered),
        percentile(ordered, 50),
        percentile(ordered, 90),
        percentile(ordered, 95),
        percentile(ordered, 99),
        ordered[-1],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of sorted numbers: the least one that at least `percent` of them
    don't exceed. It is always a number that was seen; nothing is interpolated.

    >>> percentile([15, 20, 35, 40, 50], 30), percentile([15, 20, 35, 40, 50], 100)
    (20, 50)
    >>> percentile([1.0], 99)
    1.0
    """
    if not ordered or not 0 <= percent <= 100:
        raise ValueError("a percentile needs numbers, and a percent from 0 to 100")
    # Multiplied before it is divided: 0.99 * 100 would be a little more than 99.
    return ordered[max(0, ceil(percent * len(ordered) / 100) - 1)]
