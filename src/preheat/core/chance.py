"""Numbers that look drawn, from a seed: the same in every run and on every machine."""

from typing import Final

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15


def mix(number: int) -> int:
    """64 bits of which each depends on every bit of the number: the finisher of SplitMix64 (Steele, Lea
    and Flood, OOPSLA 2014)."""
    number &= _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31


class Chance:
    """SplitMix64, one draw at a time.

    >>> dice = Chance(seed=1)
    >>> [1 + dice.below(6) for _ in range(8)]
    [1, 4, 2, 1, 6, 1, 1, 1]
    """

    def __init__(self, seed: int = 0) -> None:
        self._state = mix(seed)

    def below(self, limit: int) -> int:
        """An integer from 0 to `limit` - 1; even but for 2^-64 of `limit`."""
        self._state = (self._state + _STEP) & _MASK
        return mix(self._state) % limit
