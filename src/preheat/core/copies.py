"""Whether another copy of a hot prefix pays for itself on another worker."""

from collections.abc import Sequence
from math import exp, inf
from typing import Final

from preheat.core.placing import Candidate, Placing

_PREFIXES: Final = 16_384
"""Prefixes another copy of which would have saved something lately; of more the oldest go."""


class Copies:
    """What another copy of each prefix would have saved lately, in seconds.

    The copy's own J: it is worth its further uses there, times the seconds of queue that each saves, less
    what it pushes out. Neither is foretold. Each request says how much sooner it could have begun, had
    the least busy worker without its prefix had it: a use of the copy that isn't there, and what it
    would have saved. The sum, forgotten over `memory_s`, is what as much time again is expected to bring.
    A copy is made where that is more than it costs to be computed there, so for want of it nobody waits
    longer, all in all, than about as long as that: the rule of ski rental (Karlin, Manasse, Rudolph and
    Sleator, Algorithmica 1988).

    A prefix is a beginning of a prompt, looked at in lengths of 1, 2, 4, … blocks and as much as the
    fullest worker has of it, so nobody has to know where prompts part. Only what would have saved
    something is remembered, `prefixes` at most.
    """

    def __init__(self, *, memory_s: float = 300.0, prefixes: int = _PREFIXES) -> None:
        self._memory_s = memory_s
        self._most = prefixes
        self._saved: dict[int, tuple[float, float]] = {}
        """Of a prefix, by its last block: seconds saved, and when that was said; the oldest first."""

    def __len__(self) -> int:
        """Prefixes that are remembered."""
        return len(self._saved)

    def worth_s(
        self, placing: Placing, candidates: Sequence[Candidate], now: float
    ) -> list[float] | None:
        """What a copy of this request's prefix, or of a part of it, is worth at each of them, less what
        it pushes out; 0 where there is one. None where it is worth nothing anywhere. The request itself
        counts from the next one on."""
        held = [one.overlap_tokens for one in candidates]
        most, least = max(held), min(held)
        if most == least or not placing.block_tokens:
            return None
        full, queues = candidates[held.index(most)], [one.queue_s for one in candidates]
        nodes = _nodes(placing, least, most)
        known = [self._saved.get(node) for node, _ in nodes]
        first_s = min([one.queue_s + one.load_s + one.miss_s for one in candidates])
        late_s = first_s - min(queues) - full.miss_s
        if late_s <= 0.0 and not any(known):
            return None
        values_s = [
            0.0 if one is None else one[0] * exp((one[1] - now) / self._memory_s) for one in known
        ]
        idlest_s: dict[int, float] = {}  # of those that have so many tokens
        for has, queue_s in zip(held, queues, strict=True):
            if queue_s < idlest_s.get(has, inf):
                idlest_s[has] = queue_s
        if late_s > 0.0:
            thin = candidates[held.index(least)]
            token_s = max(0.0, thin.miss_s - full.miss_s) / (most - least)
            for (node, tokens), value_s in zip(nodes, values_s, strict=True):
                there_s = min([queue_s for has, queue_s in idlest_s.items() if has < tokens])
                there_s += max(0.0, thin.miss_s - token_s * (tokens - least))
                if first_s > there_s:
                    self._put(node, value_s + first_s - there_s, now)
        if not any(values_s):
            return None
        lacking_s = {
            has: max(
                [s for s, (_, at) in zip(values_s, nodes, strict=True) if at > has], default=0.0
            )
            for has in idlest_s
        }
        worth_s = [lacking_s[has] for has in held]
        if not any(one.price for one in candidates):
            return worth_s
        return [
            max(0.0, value_s - _price_s(placing, one))
            for value_s, one in zip(worth_s, candidates, strict=True)
        ]

    def sent(
        self, placing: Placing, candidates: Sequence[Candidate], chosen: Candidate, now: float
    ) -> None:
        """It goes there: what of its prefix that worker lacked will have one more copy, and whether
        another pays is to be found out anew."""
        most = max([one.overlap_tokens for one in candidates])
        for node, _ in _nodes(placing, chosen.overlap_tokens, most):
            if node in self._saved:
                self._put(node, 0.0, now)

    def _put(self, node: int, saved_s: float, now: float) -> None:
        self._saved.pop(node, None)
        self._saved[node] = saved_s, now
        if len(self._saved) > self._most:
            del self._saved[next(iter(self._saved))]


def _price_s(placing: Placing, one: Candidate) -> float:
    """What it pushes out, by what that is worth."""
    return one.price * (placing.input_tokens - one.overlap_tokens) / placing.block_tokens


def _nodes(placing: Placing, above_tokens: int, most_tokens: int) -> list[tuple[int, int]]:
    """Beginnings of a prompt longer than `above_tokens`, as their last block and how many tokens
    they have."""
    blocks, of = placing.blocks, placing.block_tokens
    most = min(most_tokens // of, len(blocks))
    nodes, length = [], 1
    while length < most:
        if length * of > above_tokens:
            nodes.append((blocks[length - 1], length * of))
        length *= 2
    if most * of > above_tokens:
        nodes.append((blocks[most - 1], most * of))
    return nodes
