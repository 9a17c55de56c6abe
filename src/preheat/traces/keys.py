"""Key streams: which object is wanted next, and nothing else of a request.

There may be millions, so they are held in columns; an `Arrival` is made when one is looked at.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Final, overload

from preheat.traces.arrival import Arrival
from preheat.traces.reader import UNSORTED_RULE, Reading

ORDER_RULE: Final = "No times: requests are a second apart."


class Keys(Sequence[Arrival]):
    """Arrivals of a key stream. `keys` has their keys from 0, in order of first appearance;
    `sizes_bytes` and `ats` are None where all sizes are 1 and where times are places."""

    def __init__(
        self,
        keys: "array[int]",
        sizes_bytes: "array[int] | None" = None,
        ats: "array[float] | None" = None,
    ) -> None:
        self.keys = keys
        self.sizes_bytes = sizes_bytes
        self.ats = ats

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, place: int) -> Arrival: ...

    @overload
    def __getitem__(self, place: slice) -> "Keys": ...

    def __getitem__(self, place: int | slice) -> "Arrival | Keys":
        if isinstance(place, slice):
            ats = self.ats if self.ats is not None else array("d", range(len(self)))
            sizes = self.sizes_bytes
            return Keys(self.keys[place], None if sizes is None else sizes[place], ats[place])
        return self._arrival(range(len(self))[place])

    def __iter__(self) -> Iterator[Arrival]:
        return map(self._arrival, range(len(self)))

    def _arrival(self, place: int) -> Arrival:
        return Arrival(
            at=float(place) if self.ats is None else self.ats[place],
            id=str(place),
            key=self.keys[place],
            size_bytes=1 if self.sizes_bytes is None else self.sizes_bytes[place],
        )


def timed(rows: list[tuple[int, int, int]], reading: Reading) -> Keys:
    """A stream of times, keys and sizes, put in order of time; equal times keep theirs."""
    if any(after[0] < before[0] for before, after in pairwise(rows)):
        rows = sorted(rows, key=itemgetter(0))
        reading.tell(UNSORTED_RULE)
    return Keys(
        array("q", (key for _, key, _ in rows)),
        array("q", (size_bytes for _, _, size_bytes in rows)),
        array("d", (at for at, _, _ in rows)),
    )
