"""Life tables: when what is idle is used again, by bins of age, and what that is worth.

Plain arithmetic over indexable rows of floats, and nothing else: `replay.compiled` compiles these
very functions, so that both paths compute the same numbers, bit by bit. `core.value` says what for.
"""

from collections.abc import MutableSequence, Sequence
from math import frexp
from typing import Final

_STEPS: Final = 4  # bins an octave: a step of 19 % in the mean
_FIRST_EXPONENT: Final = -3  # ages under 1/8 s are one bin
_OCTAVES: Final = 24  # up to 2^21 s, 24 days
_FADE_PARTS: Final = 1 << 20
_MOST_FADES: Final = 4_096  # a memory of 0.999 is 0.017 then
BINS: Final = 1 + _STEPS * _OCTAVES
EDGES: Final[tuple[float, ...]] = (
    0.0,
    *(
        2.0 ** (_FIRST_EXPONENT + place // _STEPS) * (1 + place % _STEPS / _STEPS)
        for place in range(BINS - 1)
    ),
)
"""Where bins begin, in seconds (or whatever `now` counts)."""

Row = MutableSequence[float]


def age_bin(age_s: float) -> int:
    """The bin of an age.

    >>> [age_bin(age_s) for age_s in (0.0, 0.124, 0.125, 1.0, 1.3, 2.0, 1e9)]
    [0, 0, 1, 13, 14, 17, 96]
    """
    if age_s < 0.125:
        return 0
    fraction, exponent = frexp(age_s)
    place = 1 + _STEPS * (exponent - 1 - _FIRST_EXPONENT) + int((fraction - 0.5) * 2 * _STEPS)
    return place if place < BINS else BINS - 1


def fades(memory: float) -> tuple[float, ...]:
    """What a life still counts, by how many refreshes ago it began; from the last of these on alike.

    Whole multiples of 2^-20, so that sums of them are exact, in whatever order they are made.

    >>> fades(1.0), fades(0.5)[:3], fades(0.5)[-1], len(fades(0.5))
    ((1.0,), (1.0, 0.5, 0.25), 0.0, 22)
    """
    made, left = [1.0], memory
    while memory < 1.0 and made[-1] > 0.0 and len(made) < _MOST_FADES:
        made.append(round(left * _FADE_PARTS) / _FADE_PARTS)
        left *= memory
    return tuple(made)


def fade(faded: Sequence[float], refreshes: int) -> float:
    """What a life counts that began so many refreshes ago."""
    last = len(faded) - 1
    return faded[min(refreshes, last)]


def use_level(uses: int, levels: int) -> int:
    """Frequency classes: used once, 2 or 3 times, 4 to 7, and so on; the last one is open."""
    level = 0
    while uses > 1 and level < levels - 1:
        uses >>= 1
        level += 1
    return level


def hazards(uses: Row, ends: Row, prior: Row, back_off: float, out: Row) -> None:
    """For each bin the chance that a life which reached it ends there by a use.

    Gamma-Poisson back-off: the prior hazard counts like `back_off` lives at risk. `ends` counts all
    lives by the bin they ended in, `uses` those of them that a use ended. A life that was lost
    sight of was at risk for half its last bin (the actuarial estimate).
    """
    reached = 0.0
    for place in range(len(uses) - 1, -1, -1):
        reached += ends[place]
        at_risk = reached - 0.5 * (ends[place] - uses[place])
        out[place] = (uses[place] + back_off * prior[place]) / (at_risk + back_off)


def curve(hazard: Row, edges: Sequence[float], gained: Row, held: Row) -> None:
    """Expected uses and expected time held, in seconds, up to each edge, of what is new."""
    alive = 1.0
    gained[0] = 0.0
    held[0] = 0.0
    last = len(hazard) - 1
    for place in range(last + 1):
        width = edges[place + 1] - edges[place] if place < last else edges[place]
        gained[place + 1] = gained[place] + alive * hazard[place]
        held[place + 1] = held[place] + alive * width * (1.0 - 0.5 * hazard[place])
        alive *= 1.0 - hazard[place]


def steepest(
    gained: Row, held: Row, value: Row, until: MutableSequence[int], stack: MutableSequence[int]
) -> None:
    """For each edge the steepest way to a later one: J there, and which edge it is.

    Survival cancels out, so J at an edge is the greatest slope from its point of the curve to a
    later point: one pass from the right over the upper convex hull, O(bins).
    """
    top = 0
    last = len(value)
    stack[0] = last
    for place in range(last - 1, -1, -1):
        while top > 0:
            near, far = stack[top], stack[top - 1]
            if (gained[far] - gained[place]) * (held[near] - held[place]) < (
                gained[near] - gained[place]
            ) * (held[far] - held[place]):
                break
            top -= 1
        best = stack[top]
        seconds = held[best] - held[place]
        value[place] = (gained[best] - gained[place]) / seconds if seconds > 0.0 else 0.0
        until[place] = best
        top += 1
        stack[top] = place


def between(value: Row, edges: Sequence[float], place: int, age_s: float) -> float:
    """J at an age in that bin, between the values at the bin's ends."""
    low = value[place]
    if place + 1 >= len(value):
        return low
    return low + (value[place + 1] - low) * (age_s - edges[place]) / (
        edges[place + 1] - edges[place]
    )


def delayed(gained: Row, held: Row, delay_s: float) -> float:
    """J of what nobody can ask for in the next `delay_s`, which it is held for all the same."""
    best = 0.0
    for place in range(1, len(gained)):
        seconds = delay_s + held[place]
        if gained[place] > best * seconds:
            best = gained[place] / seconds
    return best


def rests(ends: Row, edges: Sequence[float], out: Row) -> None:
    """How long, in the mean, what has lasted to each edge still lasts, by the bins things ended in."""
    total_s = 0.0
    ended = 0.0
    last = len(ends) - 1
    for place in range(last, -1, -1):
        width = edges[place + 1] - edges[place] if place < last else edges[place]
        total_s += (ended + 0.5 * ends[place]) * width
        ended += ends[place]
        if ended > 0.0:
            out[place] = total_s / ended
        else:
            out[place] = out[place + 1] if place < last else 0.0
