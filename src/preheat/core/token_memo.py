"""The token blocks of prompts whose beginning was tokenised before."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

MOST_BLOCKS: Final = 1_048_576
"""Over all that is remembered: 40 MB where nothing is shared; prompts of one conversation share nothing
here."""
_WHOLE: Final = 0


class Beginning(NamedTuple):
    """What is known of a prompt: the blocks of its first messages, and how many messages that is."""

    blocks: Sequence[int]
    messages: int


class _Known(NamedTuple):
    """`following` is the message after it in the prompt these blocks are of: they may end in it. `_WHOLE`
    where they don't: nothing came after it, or two prompts that go on differently agree so far."""

    blocks: Sequence[int]
    following: int


class TokenMemo:
    """By chained digests of messages: the last one names all before it.

    A template turns messages into text, and a tokenizer text into ids; neither can be cut between two
    messages from outside. So a prompt's blocks are learned whole, and what a beginning contributes is what
    two prompts have in common that go on differently after it. Blocks are chained, so that is found in few
    steps. Too much by a few tokens that happened to be alike does no harm: nobody holds what isn't asked.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._blocks = 0

    def find(self, digests: Sequence[int]) -> Beginning:
        """The longest beginning that is known."""
        for count in range(len(digests), 0, -1):
            known = self._known.get(digests[count - 1])
            if known is not None and known.following == _WHOLE:
                self._known.move_to_end(digests[count - 1])
                return Beginning(known.blocks, count)
        return Beginning((), 0)

    def learn(self, digests: Sequence[int], blocks: Sequence[int]) -> None:
        """A whole prompt was tokenised."""
        for digest, following in zip(digests, (*digests[1:], _WHOLE), strict=True):
            known = self._known.get(digest)
            if known is None or following == _WHOLE:
                self._put(digest, _Known(blocks, following))
            elif known.following not in {following, _WHOLE}:
                both = blocks[: _common(known.blocks, blocks)]
                self._put(digest, _Known(both, _WHOLE))

    def _put(self, digest: int, known: _Known) -> None:
        before = self._known.pop(digest, None)
        if before is not None:
            self._blocks -= len(before.blocks)
        self._known[digest] = known
        self._blocks += len(known.blocks)
        while self._blocks > self._most_blocks:
            self._blocks -= len(self._known.popitem(last=False)[1].blocks)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading blocks are alike: ids name all before them, so halving finds it.

    >>> _common([5, 6, 7, 8], [5, 6, 9]), _common([1], [2]), _common([], [3])
    (2, 0, 0)
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
