"""An engine's event batches in their right order, and what can't be known of them."""

from typing import Final

from preheat.core.kv_events import Batch, Joined, Lost, Restarted, Step, Sure, Unsure

_MOST_EARLY: Final = 1_024
"""Batches that wait for a replay; with more of them it is given up."""
_RECENT: Final = 4_096
"""Batches whose times are remembered, to tell a repeat from a restart."""
_LATE_RUN: Final = 3
"""So many old numbers, each after the other, are no stragglers but a restart with its clock put back."""

_MOST_LOST: Final = 1_000_000
"""That many and more count as so many: a number may be any, and sums of them must stay numbers."""


class KvStream:
    """One publisher's batches. They are numbered from 0, and each has its time.

    A gap is filled by a replay where there is one, else it is `Lost`. A replay asks for the last
    batch that is known, too: the same number with another time is another process, which is
    `Restarted`; so is a number that was passed and now comes with a new time. A stream whose
    beginning nobody heard is `Joined` as not whole: what was stored before is invisible.

    The driver asks for a replay while `wanted` is a number, and tells what came of it.
    """

    def __init__(self, *, can_replay: bool) -> None:
        self.can_replay = can_replay
        self.wanted: int | None = None
        """From where on a replay is wanted now."""
        self.gaps = 0
        self.repeats = 0
        self.late = 0
        self._next: int | None = None
        self._early: dict[int, Batch | None] = {}
        self._recent: dict[int, float | None] = {}
        self._last_at = float("-inf")
        self._late_run = (-1, 0)
        self._is_unsure = False
        self._is_proved = False  # the replay under way showed the batch before `_next`
        self._has_replies = False
        self._again = False  # the replay under way is of no use any more: another one

    def live(self, number: int, batch: Batch | None) -> list[Step]:
        """A batch was published; None where it can't be read."""
        if self._next is not None and number < self._next:
            return self._passed(number, batch)
        if self.wanted is not None:
            return self._held_back(number, batch)
        if self._next is None:
            return self._first(number, batch)
        self.gaps += number > self._next
        if (number > self._next or self._is_unsure) and self.can_replay:
            self._early = {number: batch}
            self._want(self._next - 1)
            return []
        steps: list[Step] = []
        if number > self._next or self._is_unsure:
            steps.append(_gap(number - self._next))
            self._is_unsure = False
        return steps + self._take(number, batch)

    def replayed(self, number: int, batch: Batch | None) -> list[Step]:
        """A reply to what was `wanted`; they come in order."""
        if self.wanted is None or self._again:
            return []
        if self._next is None:
            self._is_proved = self._has_replies = True
            return [Joined(whole=number == 0), *self._take(number, batch)]
        if number < self._next:
            if number == self._next - 1:
                if self._recent.get(number) != _time(batch):
                    return self._other()
                self._is_proved = self._has_replies = True
            return []
        if number > self._next and self._has_replies:
            self._again = True  # a queue on the way was full
            return []
        steps: list[Step] = [] if self._is_proved else [_gap(number - self._next)]
        self._is_proved = self._has_replies = True
        self._is_unsure = self._is_unsure and not steps
        return steps + self._take(number, batch)

    def replay_ended(self, *, complete: bool) -> list[Step]:
        """The replay that was `wanted` has come to its end, or won't come."""
        if self.wanted is None:
            return []
        self.wanted = None
        if self._again and complete:
            self._want(0 if self._next is None else self._next - 1)
            return []
        self._again = False
        if self._next is None:
            if not self._early:
                return []
            self._next = min(self._early)
            return [Joined(whole=self._next == 0), *self._drain()]
        if complete and not self._has_replies and not self._early:
            return self._other()  # its newest batch is older than ours
        steps: list[Step] = []
        if not self._is_proved:
            ahead = min((one for one in self._early if one >= self._next), default=self._next)
            steps.append(_gap(ahead - self._next))
            self._next = ahead
        elif self._is_unsure:
            steps.append(Sure())
        self._is_unsure = False
        return steps + self._drain()

    def broken(self) -> list[Step]:
        """The connection is no more: who speaks next may be another, so what waits is let go."""
        self._early.clear()
        self._again = self.wanted is not None
        if self._next is None or self._is_unsure:
            return []
        self._is_unsure = True
        return [Unsure()]

    def mended(self) -> None:
        """There is a connection: the first one, or again."""
        if self.can_replay and self.wanted is None and (self._next is None or self._is_unsure):
            self._want(0 if self._next is None else self._next - 1)

    def _first(self, number: int, batch: Batch | None) -> list[Step]:
        if number and self.can_replay:
            self._early = {number: batch}
            self._want(0)
            return []
        return [Joined(whole=number == 0), *self._take(number, batch)]

    def _take(self, number: int, batch: Batch | None) -> list[Step]:
        self._next = number + 1
        self._recent[number] = _time(batch)
        if len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]
        if batch is None:
            return [Lost(1)]
        self._last_at = batch.at
        return [batch]

    def _passed(self, number: int, batch: Batch | None) -> list[Step]:
        if number in self._recent:
            if self._recent[number] == _time(batch):
                self.repeats += 1
                return []
        elif number and (batch is None or batch.at <= self._last_at):
            before, run = self._late_run
            self._late_run = (number, run + 1 if number == before + 1 else 1)
            if self._late_run[1] < _LATE_RUN:
                self.late += 1
                return []
        steps = self._other()
        if self.wanted is None:
            return steps + self._first(number, batch)
        self._early = {number: batch}
        return steps

    def _held_back(self, number: int, batch: Batch | None) -> list[Step]:
        self._early[number] = batch
        return self.replay_ended(complete=False) if len(self._early) > _MOST_EARLY else []

    def _other(self) -> list[Step]:
        """It isn't the process it was: as if nothing had been heard yet."""
        was_asked = self.wanted is not None
        self._next, self._is_unsure = None, False
        self._early.clear()
        self._recent.clear()
        self._last_at, self._late_run = float("-inf"), (-1, 0)
        if self.can_replay and not was_asked:
            self._want(0)
        self._again = was_asked
        return [Restarted()]

    def _want(self, number: int) -> None:
        self.wanted = number
        self._is_proved = self._has_replies = self._again = False

    def _drain(self) -> list[Step]:
        early, self._early = self._early, {}
        steps: list[Step] = []
        for number in sorted(early):
            if self._next is not None and number > self._next:
                steps.append(_gap(number - self._next))
            if self._next is None or number >= self._next:
                steps += self._take(number, early[number])
        return steps


def _gap(batches: int) -> Lost:
    return Lost(min(batches, _MOST_LOST))


def _time(batch: Batch | None) -> float | None:
    return None if batch is None else batch.at
