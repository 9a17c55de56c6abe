"""Numbers on a command line: what they may be, and what is said where they aren't."""

import argparse
from math import isfinite
from typing import Final

_MOST_FEW: Final = 10_000


def count(text: str) -> int:
    """A whole number from 1; 1e6 is one."""
    return _whole(text, 1)


def few(text: str) -> int:
    """Of things that are each looked at with every request: a whole number from 1 to 10,000."""
    number = _whole(text, 1)
    if number > _MOST_FEW:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {_MOST_FEW}")
    return number


def count_or_none(text: str) -> int:
    """A whole number from 0."""
    return _whole(text, 0)


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers from 1, with commas between them."""
    return tuple(count(part) for part in text.split(","))


def positive(text: str) -> float:
    """A number above 0."""
    number = seconds(text)
    if not number:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def seconds(text: str) -> float:
    """A number from 0."""
    number = float(text)
    if not isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError("must be a number that isn't below 0")
    return number


def speed(text: str) -> float:
    """How many times as fast time runs: from a millionth to a million."""
    number = positive(text)
    if not 1e-6 <= number <= 1e6:
        raise argparse.ArgumentTypeError("must be from 1e-6 to 1e6")
    return number


def _whole(text: str, least: int) -> int:
    number = float(text)
    if not isfinite(number) or number < least or number != int(number):
        raise argparse.ArgumentTypeError(f"must be a whole number from {least}")
    return int(number)
