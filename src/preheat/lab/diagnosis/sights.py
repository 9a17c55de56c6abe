"""Whether one server answers at an address: what its pages said of who gave them, read in turn."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from preheat.lab.diagnosis.facts import Sight

Balance = Literal["one", "several", "restarted", "unknown"]


def balance_of(before: Sequence[Sight], after: Sequence[Sight]) -> Balance:
    """Who answered, from pages read before and after prompts were computed.

    A process that began at another time is another one. It has restarted where the change came once
    and for good; where it goes back and forth there are several, spread over by something before
    them. So it is with counts of tokens, which only grow: they fall once at a restart, and often
    where there are several; where they stand still though prompts were sent, another server had those.
    """
    sights = [*before, *after]
    starts = [one.started_at for one in sights if one.started_at is not None]
    if len(starts) > 1:
        changes = sum(a != b for a, b in pairwise(starts))
        if changes:
            return "restarted" if changes == 1 else "several"
    totals = [one.prompt_tokens for one in sights if one.prompt_tokens is not None]
    falls = sum(b < a for a, b in pairwise(totals))
    if falls:
        return "restarted" if falls == 1 and not starts else "several"
    first = [one.prompt_tokens for one in before if one.prompt_tokens is not None]
    last = [one.prompt_tokens for one in after if one.prompt_tokens is not None]
    if first and last and last[-1] == first[-1]:
        return "several"
    return "one" if first and last else "unknown"
