"""Which of some sequences of blocks begin like a prompt."""

from collections.abc import Iterator, Sequence
from typing import Final

ALL: Final = -1
"""Every sequence's bit."""


class Starts:
    """The blocks of a few sequences, each of which is a bit.

    An id names its block with all before it. So one flat map, block → bits of the sequences that have
    it, is the tree of them all, and the bits along a prompt only ever become fewer: who has most
    of it is searched by halves.
    """

    def __init__(self) -> None:
        self.bits: dict[int, int] = {}
        """Of each block those that have it."""
        self._used = 0

    def __len__(self) -> int:
        """Blocks that any of them has."""
        return len(self.bits)

    def __iter__(self) -> Iterator[int]:
        return iter(self.bits)

    def __contains__(self, block: int) -> bool:
        return block in self.bits

    def add(self, blocks: Sequence[int]) -> int:
        """One more sequence; returns its bit."""
        bit = ~self._used & (self._used + 1)
        self._used |= bit
        bits = self.bits
        for block in blocks:
            bits[block] = bits.get(block, 0) | bit
        return bit

    def drop(self, blocks: Sequence[int], bit: int) -> list[int]:
        """A sequence that was added is no more. Returns its blocks that no other has."""
        self._used &= ~bit
        bits, gone = self.bits, []
        for block in blocks:
            left = bits[block] & ~bit
            if left:
                bits[block] = left
            else:
                del bits[block]
                gone.append(block)
        return gone

    def clear(self) -> None:
        """There are none."""
        self.bits.clear()
        self._used = 0

    def deepest(self, blocks: Sequence[int], among: int, most: int) -> int:
        """How many leading blocks, of the first `most`, the one of these bits has that has most.

        >>> starts = Starts()
        >>> one, other = starts.add((7, 8, 9)), starts.add((7, 8, 5, 6))
        >>> starts.deepest((7, 8, 9, 4), ALL, 4), starts.deepest((7, 8, 9, 4), other, 3)
        (3, 2)
        """
        get = self.bits.get
        if not most or get(blocks[most - 1], 0) & among:
            return most
        low, high = 0, most - 1
        while low < high:
            middle = (low + high + 1) // 2
            if get(blocks[middle - 1], 0) & among:
                low = middle
            else:
                high = middle - 1
        return low

    def depths(self, blocks: Sequence[int], among: int, most: int) -> dict[int, int]:
        """How many leading blocks each of these bits has, of the first `most`; those without any
        aren't named."""
        found = {}
        depth = most
        while among and (depth := self.deepest(blocks, among, depth)):
            here = self.bits[blocks[depth - 1]] & among
            among ^= here
            while here:
                bit = here & -here
                found[bit] = depth
                here ^= bit
        return found
