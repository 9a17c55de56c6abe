"""Whether another copy of a hot prefix pays for itself on another worker."""

from collections.abc import Sequence
from math import exp, inf
from typing import Final, NamedTuple

from preheat.core.placing import Candidate, Placing

_PREFIXES: Final = 16_384
"""Prefixes another copy of which would have saved something lately; of more the oldest go."""


class _Saved(NamedTuple):
    """What another copy of a prefix would have saved, and when that was said; `since` then somebody
    waits for it, or it has its newest copy."""

    saved_s: float
    at: float
    since: float


class Copies:
    """What another copy of each prefix would have saved lately, in seconds.

    The copy's own J: it is worth its further uses there, times the seconds of queue that each saves, less
    what it pushes out. Neither is foretold. Each request says how much sooner it could have begun, had
    the least busy worker without its prefix had it: a use of the copy that isn't there, and what it
    would have saved. It could have been there only if it had been begun when the first one waited: so a
    burst of a new prefix, which waits for its first computing, wants no second one. The sum, forgotten
    over `memory_s`, is what as much time again is expected to bring. A copy is made where that is more
    than it costs to be computed there, so for want of it all together wait about as long as that, and
    no longer: the rule of ski rental (Karlin, Manasse, Rudolph and Sleator, Algorithmica 1988).

    A prefix is a beginning of a prompt, looked at in lengths of 1, 2, 4, … blocks and as much as the
    fullest worker has of it, so nobody has to know where prompts part. Only what would have saved
    something is remembered, `prefixes` at most.
    """

    def __init__(self, *, memory_s: float = 300.0, prefixes: int = _PREFIXES) -> None:
        self._memory_s = memory_s
        self._most = prefixes
        self._saved: dict[int, _Saved] = {}  # by a prefix's last block; the oldest first

    def __len__(self) -> int:
        """Prefixes that are remembered."""
        return len(self._saved)

    def worth_s(
        self, placing: Placing, candidates: Sequence[Candidate], now: float
    ) -> list[float] | None:
        """What a copy of this request's prefix, or of a part of it, is worth at each of them, less what
        it pushes out; 0 where there is one. None where it is worth nothing anywhere. The request itself
        counts from the next one on."""
        queues = [one.queue_s for one in candidates]
        if max(queues) <= 0.0:
            return None  # nobody waits
        held = [one.overlap_tokens for one in candidates]
        most, least = max(held), min(held)
        if most == least or not placing.block_tokens:
            return None
        full = candidates[held.index(most)]
        nodes = _nodes(placing, least, most)
        known = [self._saved.get(node) for node, _ in nodes]
        first_s = min([one.queue_s + one.load_s + one.miss_s for one in candidates])
        late_s = first_s - min(queues) - full.miss_s
        if late_s <= 0.0 and not any(known):
            return None
        values_s = [
            0.0 if one is None else one.saved_s * exp((one.at - now) / self._memory_s)
            for one in known
        ]
        idlest_s: dict[int, float] = {}  # of those that have so many tokens
        for has, queue_s in zip(held, queues, strict=True):
            if queue_s < idlest_s.get(has, inf):
                idlest_s[has] = queue_s
        if late_s > 0.0:
            thin = candidates[held.index(least)]
            token_s = max(0.0, thin.miss_s - full.miss_s) / (most - least)
            for (node, tokens), value_s, one in zip(nodes, values_s, known, strict=True):
                took_s = token_s * (tokens - least)
                since = now if one is None else one.since
                there_s = min([queue_s for has, queue_s in idlest_s.items() if has < tokens])
                there_s = max(there_s, since + took_s - now) + max(0.0, thin.miss_s - took_s)
                if first_s > there_s or one is None:
                    self._put(node, value_s + max(0.0, first_s - there_s), now, since)
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
                self._put(node, 0.0, now, now)

    def _put(self, node: int, saved_s: float, now: float, since: float) -> None:
        self._saved.pop(node, None)
        self._saved[node] = _Saved(saved_s, now, since)
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
