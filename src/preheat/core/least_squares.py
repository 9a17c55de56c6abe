"""Least squares with coefficients that are never negative, from running sums that may forget."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import sqrt
from typing import Final

_SINGULAR: Final = 1e-9
"""Of a pivot, after scaling to a diagonal of ones: columns that alike can't be told apart."""


class NonNegative:
    """Seconds are sums of counts times prices, and no price is negative.

    What is kept are the sums of the normal equations, `width` squared numbers however many rows
    there were; `keep` below 1 is what a row's weight shrinks by with each later one (recursive
    least squares with exponential forgetting: Haykin, Adaptive Filter Theory, chapter 9, by sums
    instead of a recursion, so that nothing drifts). The optimum under x ≥ 0 is the plain one over
    its own non-zero columns (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23);
    with a handful of columns every choice of them is tried, and the best without a negative wins.

    >>> fit = NonNegative(2)
    >>> for new, seconds in ((100, 1.2), (200, 2.2), (400, 4.2)):
    ...     fit.add((1.0, new), seconds)
    >>> [round(one, 6) for one in fit.solution()]
    [0.2, 0.01]
    """

    def __init__(self, width: int, *, keep: float = 1.0) -> None:
        self.rows = 0
        self._width = width
        self._keep = keep
        self._square = [[0.0] * width for _ in range(width)]  # Σ x xᵀ
        self._target = [0.0] * width  # Σ x y
        self._solution: tuple[float, ...] | None = (0.0,) * width

    def add(self, row: Sequence[float], value: float, weight: float = 1.0) -> None:
        """One more equation, row · coefficients = value."""
        keep, target = self._keep, self._target
        for i, x in enumerate(row):
            sums, weighted = self._square[i], weight * x
            for j, other in enumerate(row):
                sums[j] = keep * sums[j] + weighted * other
            target[i] = keep * target[i] + weighted * value
        self.rows += 1
        self._solution = None

    def solution(self) -> tuple[float, ...]:
        """The coefficients; zero for a column that was always zero, or adds nothing."""
        if self._solution is None:
            self._solution = self._solved()
        return self._solution

    def _solved(self) -> tuple[float, ...]:
        scale = [1.0 / sqrt(self._square[i][i] or 1.0) for i in range(self._width)]
        best = [0.0] * self._width
        most = 0.0
        for chosen in _choices(self._width):
            found = self._solve(chosen, scale)
            if found is None or min(found) < 0.0:
                continue
            # What the squared error falls by: xᵀ b, in scaled terms.
            gain = sum(x * self._target[i] * scale[i] for i, x in zip(chosen, found, strict=True))
            if gain > most:
                most = gain
                best = [0.0] * self._width
                for i, x in zip(chosen, found, strict=True):
                    best[i] = x * scale[i]
        return tuple(best)

    def _solve(self, chosen: Sequence[int], scale: Sequence[float]) -> list[float] | None:
        """The plain solution over these columns; None where they can't be told apart."""
        rows = [
            [
                *(self._square[i][j] * scale[i] * scale[j] for j in chosen),
                self._target[i] * scale[i],
            ]
            for i in chosen
        ]
        size = len(rows)
        for i in range(size):  # symmetric and positive: no pivoting
            pivot = rows[i][i]
            if pivot < _SINGULAR:
                return None
            for below in rows[i + 1 :]:
                factor = below[i] / pivot
                for j in range(i, size + 1):
                    below[j] -= factor * rows[i][j]
        found = [0.0] * size
        for i in reversed(range(size)):
            rest = rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))
            found[i] = rest / rows[i][i]
        return found


def _choices(width: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, width + 1):
        yield from combinations(range(width), count)
