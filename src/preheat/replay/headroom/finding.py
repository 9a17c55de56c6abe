"""What a part of the study comes to in words, and all of them as one table: the answer in short."""

from collections.abc import Sequence
from typing import Final

import msgspec

from preheat.replay.report import Table
from preheat.replay.verdict import verdict_of

NOTHING_TO_WIN: Final = "nothing to win"
_LEAST_SHARE: Final = 0.0005
"""Below it a share is told as nothing: it would be printed as 0.0 %."""


class Finding(msgspec.Struct, frozen=True):
    """How much a part is worth, and its main numbers. `fits`: there is nothing to win because
    everything fits into memory. `is_felt`: requests wait for it, however small its share is."""

    part: str
    share: float
    numbers: str
    fits: bool = False
    is_felt: bool = False

    @property
    def worth(self) -> str:
        """big, moderate, small, a loss, or nothing to win."""
        if abs(self.share) < _LEAST_SHARE:
            return "small" if self.is_felt else NOTHING_TO_WIN
        return verdict_of(self.share)


def in_short(findings: Sequence[Finding]) -> Table:
    """A line a part; whether there is anything to win at all stands below."""
    worths = {one.worth for one in findings}
    if worths <= {NOTHING_TO_WIN, "a loss"}:
        fits = any(one.fits for one in findings)
        verdict = "Nothing to win: everything fits." if fits else "Nothing to win on this trace."
    elif worths & {"moderate", "big"}:
        verdict = ""
    else:
        verdict = "Little to win on this trace: no part is more than small."
    return Table(
        title="In short",
        note=(
            "How much of the prefill (of the loads of models) each part could save at most, alone: small is"
            " below 5 %, big from a fifth."
        ),
        columns=("part", "at most", "main numbers"),
        rows=tuple((one.part, one.worth, one.numbers) for one in findings),
        verdict=verdict,
    )
