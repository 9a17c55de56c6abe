"""What an index that hears an engine's events foretells, beside what the engine says afterwards.

Pure: a live run and the play of a recording judge by the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from preheat.core.index import PrefixIndex, Stay
from preheat.core.kv_events import Batch, Cleared, Removed, Step, Stored
from preheat.core.tokens import chain_root, token_blocks
from preheat.core.told import ToldResidency

WORKER = 0
SECRET = b"a benchmark's"

Verdict = Literal["exact", "under_way", "reset", "blind", "mismatch"]
"""**exact**: the engine found cached what was foretold when the request was sent. Where it didn't:

- *under_way*, of requests sent at once: it found what its events told at one moment between the sending
  and the answer's last event, event by event. Others' blocks came and went while this one waited;
- *reset*, of one that was sent alone: the same, and it was told meanwhile that all had been cleared. vLLM
  tells of a reset with its next step;
- *blind*: batches had been withheld from this listener, and nothing had come since to show it;
- *mismatch*: none of these.
"""


class Asked(msgspec.Struct, frozen=True):
    """A request. `alone`: sent when all before it was answered and all events were heard."""

    number: int
    tokens: list[int]
    salt: str = ""
    adapter: str = ""
    alone: bool = True


class Open(msgspec.Struct):
    """One on its way. `seen`: leading blocks that the events told, whenever that changed."""

    asked: Asked
    blocks: Sequence[int]
    limit: int
    stay: Stay
    foretold: int
    seen: set[int]
    was_cleared: bool = False
    found: float | None = None


def root(salt: str, adapter: str) -> int:
    return chain_root(SECRET, "tiny", salt, adapter)


class Account:
    """One listener: the index it keeps, what that foretold, and what came of it.

    A second residency hears the same event by event and is told of no request: it says what the events
    alone amounted to at any moment.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.index = PrefixIndex()
        self.told = self._residency()
        self.witness = self._residency()
        self.index.hears(WORKER, self.told)
        self.verdicts: Counter[Verdict] = Counter()
        self.wrong: list[str] = []
        self.blocks: Counter[str] = Counter()
        self.last_at = 0.0
        self.times: set[float] = set()
        self._open: dict[int, Open] = {}

    def take(self, step: Step, now: float) -> None:
        """What the stream amounts to."""
        self.index.told(WORKER, self.told.take(step, now))
        if not isinstance(step, Batch):
            self._seen(step, now)
            return
        self.last_at = step.at
        self.times.add(step.at)
        for event in step.events:
            if isinstance(event, Stored | Removed):
                self.blocks[type(event).__name__] += len(event.block_hashes)
            for one in self._open.values():
                one.was_cleared |= isinstance(event, Cleared)
            self._seen(Batch(step.at, [event], step.rank), now)

    def sent(self, asked: Asked, now: float) -> int:
        """Returns how many tokens of it are foretold to be cached. The last token is always computed, so
        the engine never finds more than the whole blocks before it."""
        size = self.block_tokens
        blocks = token_blocks(asked.tokens, size, root(asked.salt, asked.adapter))
        limit = (len(asked.tokens) - 1) // size
        foretold = min(self.index.overlaps(blocks).get(WORKER, 0), limit)
        stay = self.index.sent_tokens(WORKER, blocks, now)
        assert stay is not None
        one = Open(asked, blocks, limit, stay, foretold, set())
        self._open[asked.number] = one
        self._look(one)
        return foretold * size

    def answered(self, number: int, cached_tokens: int, now: float) -> None:
        one = self._open[number]
        one.found = cached_tokens / self.block_tokens
        self.index.ended(one.stay, now, one.found)

    def closed(self, number: int, *, is_blind: bool = False) -> Verdict:
        """All that its answer's steps told was heard, too."""
        one = self._open.pop(number)
        verdict = _verdict(one, is_blind=is_blind)
        self.verdicts[verdict] += 1
        if verdict == "mismatch":
            self.wrong.append(
                f"request {number} of {len(one.asked.tokens)} tokens, salt {one.asked.salt!r}, adapter "
                f"{one.asked.adapter!r}, {'alone' if one.asked.alone else 'at once'}: foretold "
                f"{one.foretold} blocks, found {one.found}, told meanwhile {sorted(one.seen)}"
            )
        return verdict

    def _residency(self) -> ToldResidency:
        return ToldResidency(block_tokens=self.block_tokens, root=root)

    def _seen(self, step: Step, now: float) -> None:
        self.witness.take(step, now)
        for one in self._open.values():
            self._look(one)

    def _look(self, one: Open) -> None:
        one.seen.add(min(self.witness.holds(one.blocks), one.limit))


def _verdict(one: Open, *, is_blind: bool) -> Verdict:
    if one.found == one.foretold:
        return "exact"
    if is_blind:
        return "blind"
    if one.found in one.seen and not one.asked.alone:
        return "under_way"
    return "reset" if one.found in one.seen and one.was_cleared else "mismatch"
