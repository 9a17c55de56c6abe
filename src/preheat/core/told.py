"""What one worker holds, by its own word."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from preheat.core.hopes import Hopes
from preheat.core.kv_events import (
    Batch,
    Cleared,
    Joined,
    Lost,
    Moved,
    Restarted,
    Step,
    Sure,
    Unsure,
)
from preheat.core.kv_map import KvMap
from preheat.core.witness import Trust

_MOST_BLOCKS: Final = 131_072
"""The engine's; 60 MB of ours. What it holds beyond them is unknown."""
_DECAY_S: Final = 120.0
"""How long what may have been removed unheard still counts, unless it is told again. Dynamo's routers
hold without any events for as long."""
_SOON_S: Final = 1.0
"""A doubt so soon after another shares its end."""
_AGREED: Final = 0.9
"""A share of the hope that counts as fulfilled: templates and the last token take some."""
_PROOFS: Final = 32
"""So many answers in a row that found what was told make up for a beginning that nobody heard."""
_WRONG: Final = 8
"""So many in a row that didn't, and something is amiss."""


class Change(NamedTuple):
    """Our blocks that are here now and weren't, and the other way round."""

    came: list[int]
    gone: list[int]


class ToldResidency:
    """One worker's KV cache as its events tell it. Has what `Residency` has, so the index takes either.

    What was sent counts at once (`Hopes`), and shortly after its end until the events speak; longer
    while they can't be relied upon.

    `trust`: **told** where everything was heard, from the beginning or a reset on. **estimated**
    where what was stored before is invisible; it becomes **confirmed** when answers find what was
    told. **doubted** while blocks count that may have been removed unheard: a batch was lost, the
    connection is broken, or answers find less.

    One of these per stream. A data-parallel rank with a stream of its own is a worker of its own.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        root: Callable[[str, str], int],
        most_blocks: int = _MOST_BLOCKS,
    ) -> None:
        self.capacity_blocks = most_blocks
        self.life = 0  # what a restart takes, its events take: nobody's hold is void before
        self._map = KvMap(block_tokens=block_tokens, root=root, most_blocks=most_blocks)
        self._hopes = Hopes(most_blocks)
        self._dashed: set[int] = set()  # hopes that ended, until that is reported
        self._is_whole = False
        self._said: Trust | None = None  # by who hears the events for us
        self._doubts: list[
            tuple[int, float]
        ] = []  # what was told up to this epoch counts until then
        self._is_lost = False
        self._right = self._wrong = 0

    @property
    def trust(self) -> Trust:
        """How far it can be relied upon."""
        if self._doubts:
            return "doubted"
        if self._said is not None:
            return self._said
        if self._is_whole:
            return "told"
        return "confirmed" if self._right >= _PROOFS else "estimated"

    @property
    def is_empty(self) -> bool:
        """Whether it has told of nothing that is still there."""
        return next(iter(self._map), None) is None

    @property
    def over(self) -> int:
        """Blocks that it told of and that weren't noted."""
        return self._map.over

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[int]:
        """All it holds, or is thought to in a moment."""
        return iter([*self._map, *(block for block in self._hopes if block not in self._map)])

    def holds(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are there."""
        for count, block in enumerate(blocks):
            if not self._is_here(block):
                return count
        return len(blocks)

    def sent(self, blocks: Sequence[int], now: float) -> tuple[Sequence[int], list[int]]:
        """A request goes there. Returns the blocks behind those it holds, which count from now on, and
        those that don't any more. Of more than can be noted none comes in."""
        known = self.holds(blocks)
        is_in = self._hopes.sent(blocks, known)
        return (blocks[known:] if is_in else ()), self.aged(now).gone

    def ended(self, blocks: Sequence[int], now: float) -> None:
        """The request that had been let in with these has ended: its events are on their way."""
        self._hopes.ended(blocks, now, is_told=self.trust in {"told", "confirmed"})

    def failed(self, blocks: Sequence[int], known: int, now: float) -> list[int]:
        """It ended before its prompt was computed. Returns what isn't there after all."""
        return [block for block in self._hopes.failed(blocks) if block not in self._map]

    def found(
        self, hoped_blocks: int, found_blocks: float, prompt_blocks: int, now: float
    ) -> list[int]:
        """What an answer said was cached, in blocks, where `hoped_blocks` were thought to be there.
        One answer proves little: blocks come and go while a request is under way."""
        is_less = found_blocks < _AGREED * hoped_blocks - 1.0
        is_more = found_blocks > hoped_blocks + 1.0
        if not (is_less or is_more):
            self._right, self._wrong = self._right + bool(hoped_blocks), 0
            return []
        self._right, self._wrong = 0, self._wrong + 1
        if self._wrong >= _WRONG:
            self._wrong = 0
            self._is_whole = False
            if is_less:
                self._doubt(now, is_lost=True)
        return []

    def cleared(self) -> list[int]:
        """It was restarted or reset, as somebody else tells. Returns what is gone: all but what
        runs."""
        self._forget()
        return self._change().gone

    def resized(self, capacity_blocks: int, now: float) -> list[int]:
        """It says how much it holds; what it does hold is told."""
        self.capacity_blocks = capacity_blocks
        return []

    def take(self, step: Step, now: float) -> Change:
        """The next step of its event stream."""
        match step:
            case Batch():
                for event in step.events:
                    if isinstance(event, Cleared) and self._map.clears_all(step.rank):
                        self._forget()
                        self._is_whole = True
                    else:
                        self._map.apply(step.rank, event)
            case Moved():
                self._map.move(step.came, [*self._map] if step.anew else step.gone)
                self._said = step.trust
            case Joined():
                self._is_whole = step.whole
            case Restarted():
                self._forget()
            case Lost():
                self._is_whole = False
                self._doubt(now, is_lost=True)
            case Unsure():
                self._doubt(now, is_lost=False)
            case Sure():
                if not self._is_lost:
                    self._doubts.clear()
        return self.aged(now)

    def aged(self, now: float) -> Change:
        """Time passes: hopes end, and so does what is doubted."""
        self._dashed.update(self._hopes.over(now))
        while self._doubts and now >= self._doubts[0][1]:
            self._map.outdated(self._doubts.pop(0)[0])
        self._is_lost = self._is_lost and bool(self._doubts)
        return self._change()

    def _change(self) -> Change:
        change = Change([], [])
        dashed, self._dashed = self._dashed, set()
        for block, was_held in self._map.touched().items():
            was_here = was_held or block in dashed or block in self._hopes
            dashed.discard(block)
            self._hopes.told(block)
            if self._is_here(block) != was_here:
                (change.gone if was_here else change.came).append(block)
        change.gone.extend(block for block in dashed if not self._is_here(block))
        return change

    def _is_here(self, block: int) -> bool:
        return block in self._map or block in self._hopes

    def _doubt(self, now: float, *, is_lost: bool) -> None:
        self._is_lost = self._is_lost or is_lost
        self._right = 0
        self._map.forget_aside()
        ends_at = now + _DECAY_S
        if self._doubts and ends_at - self._doubts[-1][1] < _SOON_S:
            ends_at = self._doubts.pop()[1]
        self._doubts.append((self._map.epoch, ends_at))
        self._map.epoch += 1

    def _forget(self) -> None:
        self._map.forget()
        self._dashed.update(self._hopes.cleared())
        self._is_whole = self._is_lost = False
        self._doubts.clear()
        self._right = self._wrong = 0
