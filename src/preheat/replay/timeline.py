"""What workers did when, told from when each request came, had its first token, and its last.

Between any two such moments of a worker it is known whose prompt was waited for and who decoded:
prompts are computed one after the other, in the order of their first tokens, and all who decode
get a token each step. So a request's tokens are spread over its spans of time, by how many steps a
span had at the present prices. When the first token of an answer came that was told in one piece isn't
known: such a request shares its time between prompt and answer as these prices do, and gives no
equation. But it keeps the worker busy: without it others would be told to cost what it does.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Final

import msgspec

from preheat.core.costs import Row, came_whole, cost_s, decode_row, pairs, prefill_row

NOTHING: Final[Row] = (0.0, 0.0, 0.0, 0.0, 0.0)

Equation = tuple[Row, float]
"""What was done in a window of time, and how long that is."""


class Served(msgspec.Struct, frozen=True, gc=False):
    """One request that an engine answered: when it was asked (seconds), what it said. `ttft_s` is
    None where the answer wasn't streamed; `tells_cached`: the engine said what of it was cached."""

    worker: str
    asked_at: float
    ttft_s: float | None
    service_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    tells_cached: bool = True

    @property
    def first_s(self) -> float | None:
        """Until its first token; None where the answer came in one piece, which doesn't tell it."""
        return None if came_whole(self.ttft_s, self.service_s, self.output_tokens) else self.ttft_s

    @property
    def ended_at(self) -> float:
        """When its last one did."""
        return self.asked_at + self.service_s

    @property
    def new_tokens(self) -> int:
        """What was computed of its prompt."""
        return self.input_tokens - self.cached_tokens


class Busy:
    """How many workers worked when."""

    def __init__(self, served: Iterable[Served]) -> None:
        changes: list[tuple[float, int]] = []
        for one in served:
            changes += [(one.asked_at, 1), (one.ended_at, -1)]
        changes.sort()
        self._cuts: list[float] = []
        self._sums = [0.0]  # of busy seconds up to each cut
        self._levels: list[int] = []
        level = 0
        for at, change in changes:
            if self._cuts:
                self._sums.append(self._sums[-1] + (level > 0) * (at - self._cuts[-1]))
            level += change
            self._cuts.append(at)
            self._levels.append(level)

    def share(self, begin: float, end: float) -> float:
        """Of this time."""
        return (self._until(end) - self._until(begin)) / (end - begin) if end > begin else 0.0

    def _until(self, at: float) -> float:
        place = bisect_right(self._cuts, at) - 1
        if place < 0:
            return 0.0
        return self._sums[place] + (self._levels[place] > 0) * (at - self._cuts[place])


class _Span:
    """From one moment to the next: whose prompts are computed, and who decodes."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, end
        self.slower = 1.0  # for what others on its host did
        self.prompts: list[int] = []
        self.decoding: list[int] = []
        self.steps = 0.0  # how many there is time for, at the present prices


class Timeline:
    """What one worker did when. `others` are the workers beside it on its host, which make it
    slower: by `slowdown` for each that works."""

    def __init__(
        self,
        crowd: Sequence[Served],
        prices: Sequence[float],
        batch_tokens: int,
        *,
        others: Sequence[Busy] = (),
        slowdown: float = 0.0,
    ) -> None:
        firsts = sorted(zip(_firsts_at(crowd, prices), crowd, strict=True), key=lambda one: one[0])
        self._crowd = [one for _, one in firsts]
        self._firsts = [at for at, _ in firsts]
        self._batch_tokens = batch_tokens
        self._cuts = sorted(
            {at for first_at, one in firsts for at in (one.asked_at, first_at, one.ended_at)}
        )
        self._spans = [_Span(*both) for both in pairwise(self._cuts)]
        for place, (first_at, one) in enumerate(firsts):
            for span in self._between(one.asked_at, first_at):
                span.prompts.append(place)
            for span in self._between(first_at, one.ended_at):
                span.decoding.append(place)
        for span in self._spans:
            self._keep_leaders(span)
            crowding = sum(other.share(span.begin, span.end) for other in others)
            span.slower = 1.0 + slowdown * crowding
            span.steps = self._steps_in(span, prices)

    def tell(self, firsts: list[Equation], rests: list[Equation], *, since: float = -inf) -> None:
        """An equation for each first token that was seen, and one for each answer after it; of those
        who asked from then on."""
        counts = self._counts()
        done = list(accumulate(counts, _plus, initial=NOTHING))
        for first_at, one in zip(self._firsts, self._crowd, strict=True):
            first_s = one.first_s
            if first_s is None or one.asked_at < since:
                continue
            asked, first, ended = (
                bisect_left(self._cuts, at) for at in (one.asked_at, first_at, one.ended_at)
            )
            firsts.append((_minus(done[first], done[asked]), first_s))
            if one.output_tokens > 1:
                rests.append((_minus(done[ended], done[first]), one.service_s - first_s))

    def _between(self, begin: float, end: float) -> list[_Span]:
        return self._spans[bisect_left(self._cuts, begin) : bisect_left(self._cuts, end)]

    def _keep_leaders(self, span: _Span) -> None:
        """Of the prompts only what is computed now: the next to be ready, several if together."""
        if span.prompts:
            ready_at = self._firsts[span.prompts[0]]
            span.prompts = [place for place in span.prompts if self._firsts[place] == ready_at]

    def _steps_in(self, span: _Span, prices: Sequence[float]) -> float:
        count = len(span.decoding)
        contexts = sum(self._crowd[place].input_tokens for place in span.decoding)
        new = 0
        if span.prompts:
            new = sum(self._crowd[place].new_tokens for place in span.prompts)
            if self._batch_tokens:
                new = min(new, self._batch_tokens)
        step_s = cost_s((1.0, new, 0.0, count, contexts), prices)
        seconds = span.end - span.begin
        return seconds / (step_s * span.slower) if step_s > 0.0 else seconds

    def _counts(self) -> list[Row]:
        """What was done in each span, and as often again as it was slower."""
        prompts, answers = self._parts()
        counts = []
        for number, span in enumerate(self._spans):
            pieces = new = looks = decoded = contexts = most = 0.0
            for place in span.prompts:
                one = self._crowd[place]
                part = prompts[place].get(number, 0.0)
                new += part * one.new_tokens
                looks += part * pairs(one.new_tokens, one.cached_tokens)
                pieces += part * self._pieces(one)
            for place in span.decoding:
                one = self._crowd[place]
                said = answers[place].get(number, 0.0) * (one.output_tokens - 1)
                decoded += said
                contexts += said * (one.input_tokens + 0.5 * one.output_tokens)
                most = max(most, said)
            # A step takes a token of everyone who decodes, and a piece of a prompt besides.
            row = (max(pieces, most), new, looks, decoded, contexts)
            counts.append(_row(count * span.slower for count in row))
        return counts

    def _parts(self) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
        """Of each request's prompt, and of its answer, the part that belongs to each span."""
        prompts: list[dict[int, float]] = [{} for _ in self._crowd]
        answers: list[dict[int, float]] = [{} for _ in self._crowd]
        for number, span in enumerate(self._spans):
            for place in span.prompts:
                prompts[place][number] = span.steps
            for place in span.decoding:
                answers[place][number] = span.steps
        for parts in (*prompts, *answers):
            total = sum(parts.values())
            for number in parts:
                parts[number] /= total
        return prompts, answers

    def _pieces(self, one: Served) -> int:
        return -(-one.new_tokens // self._batch_tokens) if self._batch_tokens else 1


def _firsts_at(crowd: Sequence[Served], prices: Sequence[float]) -> list[float]:
    """When each one's first token came, or may have: where the time of its prompt and that of its
    answer, beside all who are there with it, part."""
    begins, ends = sorted(one.asked_at for one in crowd), sorted(one.ended_at for one in crowd)
    found = []
    for one in crowd:
        first_s = one.first_s
        if first_s is None:
            middle = one.asked_at + 0.5 * one.service_s
            here = max(1, bisect_right(begins, middle) - bisect_right(ends, middle))
            first_s = _prompt_share(one, prices, here) * one.service_s
        found.append(one.asked_at + first_s)
    return found


def _prompt_share(one: Served, prices: Sequence[float], sequences: int) -> float:
    if one.output_tokens <= 1:
        return 1.0
    prompt_s = cost_s(prefill_row(one.new_tokens, one.cached_tokens, 1), prices)
    said = decode_row(one.output_tokens - 1, one.input_tokens + 1, sequences)
    both_s = prompt_s + cost_s(said, prices)
    return prompt_s / both_s if both_s > 0.0 else 0.5


def _plus(one: Row, other: Row) -> Row:
    return _row(a + b for a, b in zip(one, other, strict=True))


def _minus(one: Row, other: Row) -> Row:
    return _row(a - b for a, b in zip(one, other, strict=True))


def _row(counts: Iterable[float]) -> Row:
    steps, new, looks, decoded, contexts = counts
    return steps, new, looks, decoded, contexts
