"""What a llama.cpp server has, now and later: against its rules written down a second time, plainly."""

import random
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.core.index import PrefixIndex
from preheat.core.slots import SlotResidency, Usable


def path(*names: int) -> list[int]:
    """Chained ids: each names all before it."""
    blocks, parent = [], 0
    for name in names:
        parent = hash((parent, name)) & (2**64 - 1)
        blocks.append(parent)
    return blocks


def alike(one: list[int], other: list[int]) -> int:
    same = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(same) if a != b), min(len(one), len(other)))


class Plain:
    """Slots as dicts, sequences as lists, nothing remembered that could be looked up."""

    def __init__(self, slots: int, room: int) -> None:
        self.slots = [{"holds": [], "busy": None, "at": -1.0} for _ in range(slots)]
        self.room = room
        self.cache: list[list[int]] = []
        self.queue: list[tuple[int, list[int]]] = []
        self.found: dict[int, int] = {}

    def send(self, number: int, blocks: list[int]) -> None:
        self.queue.append((number, blocks))
        self.begin()

    def end(self, number: int, at: float, keep: int | None) -> None:
        self.queue = [one for one in self.queue if one[0] != number]
        for slot in self.slots:
            if slot["busy"] == number:
                slot.update(busy=None, at=at)
                if keep is not None:
                    slot["holds"] = slot["holds"][:keep]
        self.begin()

    def begin(self) -> None:
        while self.queue and any(slot["busy"] is None for slot in self.slots):
            number, blocks = self.queue.pop(0)
            idle = [slot for slot in self.slots if slot["busy"] is None]
            best = max(idle, key=lambda slot: alike(slot["holds"], blocks))  # the first of equals
            here = alike(best["holds"], blocks)
            if here > 0.1 * len(blocks):
                is_exchanged = here < 0.5 * len(best["holds"])
            else:
                oldest = min(slot["at"] for slot in idle)
                best = [slot for slot in idle if slot["at"] == oldest][-1]
                is_exchanged = True
            if is_exchanged:
                self.save(best["holds"])
                self.exchange(best, blocks)
            self.found[number] = alike(best["holds"], blocks)
            best.update(holds=blocks, busy=number)
            for slot in self.slots:
                if slot["busy"] is None:
                    self.save(slot["holds"])

    def exchange(self, slot: dict, blocks: list[int]) -> None:
        shared = alike(slot["holds"], blocks)
        kept = shared / len(slot["holds"]) if slot["holds"] else -1.0
        better = None
        for one in self.cache:
            here = alike(one, blocks)
            if here > shared and here / len(one) > kept and here / len(one) >= 0.25:
                better, shared, kept = one, here, here / len(one)
        if better is not None:
            slot["holds"] = better
            self.cache.remove(better)

    def save(self, held: list[int]) -> None:
        if not held or len(held) > self.room or any(one[: len(held)] == held for one in self.cache):
            return
        self.cache = [one for one in self.cache if held[: len(one)] != one]
        while sum(map(len, self.cache)) + len(held) > self.room:
            self.cache.pop(0)
        self.cache.append(held)

    def finds(self, blocks: list[int]) -> int:
        """What it would find now: it is tried, in a copy."""
        trial = deepcopy(self)
        if any(slot["busy"] is None for slot in trial.slots):
            trial.send(-1, blocks)
            return trial.found[-1]
        nowhere = {"holds": []}
        trial.exchange(nowhere, blocks)
        return alike(nowhere["holds"], blocks)

    def leaves(self, blocks: list[int]) -> int:
        """The most of it that those under way or waiting will leave."""
        busy = [slot["holds"] for slot in self.slots if slot["busy"] is not None]
        return max((alike(one, blocks) for one in busy + [b for _, b in self.queue]), default=0)

    def has(self) -> set[int]:
        here = [slot["holds"] for slot in self.slots] + self.cache
        return {block for one in [*here, *(b for _, b in self.queue)] for block in one}


prompts = st.lists(st.integers(0, 2), max_size=12).map(lambda names: path(*names))
steps = st.lists(st.tuples(prompts, st.sampled_from(["end", "fail", "go on"])), max_size=40)


@given(steps, prompts, st.integers(1, 3), st.sampled_from([0, 5, 12, 25, 100]))
@settings(max_examples=150, deadline=None)
def test_what_a_request_finds_is_what_the_rules_say(
    sent: list[tuple[list[int], str]], asked: list[int], slots: int, room: int
) -> None:
    index, plain = PrefixIndex(), Plain(slots, room)
    index.has_slots(0, slots, room)
    residency = index.residency(0)
    under_way = []
    for now, (blocks, after) in enumerate(sent):
        stay = index.sent(0, list(blocks), float(now))
        is_idle = any(slot["busy"] is None for slot in plain.slots)
        plain.send(now, list(blocks))
        if is_idle:
            assert stay.hoped == plain.found[now]
        under_way.append((now, stay))
        if after != "go on":
            number, stay = under_way.pop(random.Random(now).randrange(len(under_way)))
            at = now + 0.5
            if after == "end":
                plain.end(number, at, None)
                index.ended(stay, at, None)
            else:
                plain.end(number, at, stay.hoped)
                index.failed(stay, at)
        assert set(residency) == plain.has()
        check_looks(residency, plain, asked)
        check_looks(residency, plain, list(blocks))
    index.resized(0, 8, 99.0)  # what went is told at the next occasion
    assert len(index) == len(plain.has())
    assert index.overlaps(asked).get(0, 0) == next(
        (n for n, block in enumerate(asked) if block not in plain.has()), len(asked)
    )


def check_looks(residency: SlotResidency, plain: Plain, asked: list[int]) -> None:
    most = next((n for n, one in enumerate(asked) if one not in plain.has()), len(asked))
    now, later = plain.finds(asked), plain.leaves(asked)
    usable = residency.usable(asked)
    assert usable[:2] == (now, max(now, later))
    assert residency.usable(asked, most) == usable
    assert (usable.running is not None) == (later > now)
    if usable.running is not None:
        assert alike(list(usable.running), asked) == later
    if most and residency.has_now(asked, most):
        assert now == most


def test_a_busy_slots_prefix_is_there_later_and_not_now() -> None:
    residency = SlotResidency(2, 0)
    leader = path(1, 2, 3)
    residency.sent(leader, 0.0)
    asked = path(1, 2, 9, 9)
    assert residency.usable(asked) == Usable(0, 2, leader)
    assert residency.usable(asked).running is leader
    residency.ended(leader, 1.0)
    assert residency.usable(asked) == Usable(2, 2, None)


def test_of_two_that_compute_the_same_the_first_is_waited_for() -> None:
    residency = SlotResidency(2, 0)
    first, second = path(1, 2, 3), path(1, 2, 3)
    residency.sent(first, 0.0)
    residency.sent(second, 1.0)
    assert residency.usable(path(1, 2, 3, 4)).running is first
    residency.ended(first, 2.0)
    assert residency.usable(path(1, 2, 3, 4)) == Usable(3, 3, None)
    assert residency.usable(path(1, 2, 3)).running is None


def test_one_that_waits_for_a_slot_will_leave_its_prefix_too() -> None:
    residency = SlotResidency(1, 0)
    residency.sent(path(7), 0.0)
    queued = path(1, 2, 3)
    residency.sent(queued, 1.0)
    assert residency.usable(path(1, 2, 3, 4)) == Usable(0, 3, queued)


@pytest.mark.parametrize(("room", "found"), [(9, [3, 3, 3]), (6, [0, 3, 3]), (0, [0, 0, 3])])
def test_what_others_pushed_out_of_a_slot_is_found_in_the_prompt_cache(
    room: int, found: list[int]
) -> None:
    residency = SlotResidency(1, room)
    for now, first in enumerate((1, 2, 3)):
        blocks = path(first, first, first)
        residency.sent(blocks, float(now))
        residency.ended(blocks, now + 0.5)
    # The last one's sequence is saved before the cache is looked into, and may push one out.
    assert [residency.holds(path(first, first, first)) for first in (1, 2, 3)] == found


def keeps(residency: SlotResidency, length: int, now: float) -> bool:
    """Whether a prompt of so many blocks is kept beside another one, of one, that has taken its slot."""
    long, other = ([round(1_000 * now) + at for at in range(size)] for size in (length, 1))
    other = [-one for one in other]
    for blocks in (long, other):
        residency.sent(blocks, now)
        residency.ended(blocks, now + 0.1)
    return residency.holds(long) == length


def test_its_prompt_cache_is_learned_from_answers() -> None:
    residency = SlotResidency(1)
    blocks = path(*range(40))
    residency.sent(blocks, 0.0)
    residency.ended(blocks, 1.0)
    residency.sent(path(99), 2.0)
    residency.ended(path(99), 3.0)
    residency.found(40, 20.0, 40, 4.0)
    assert residency.holds(blocks) == 0
    assert keeps(residency, 37, 5.0)
    assert not keeps(residency, 38, 6.0)
    residency.found(0, 20.0, 40, 7.0)
    assert keeps(residency, 38, 8.0)
    assert not keeps(residency, 39, 9.0)
    assert residency.trust == "confirmed"


def pushed_out(index: PrefixIndex, blocks: list[int], now: float) -> None:
    """It is no longer in the only slot."""
    index.ended(index.sent(0, blocks, now), now + 0.1, None)
    other = path(round(now), 1, 1)
    index.ended(index.sent(0, other, now + 0.2), now + 0.3, 0.0)


def test_a_prompt_cache_in_which_the_first_hoped_for_isn_t_is_none() -> None:
    index = PrefixIndex()
    index.has_slots(0, 1)
    one, two = path(10, 11, 12, 13, 14), path(20, 21, 22, 23, 24)
    pushed_out(index, two, 1.0)
    pushed_out(index, one, 2.0)
    assert index.residency(0).holds(one) == index.residency(0).holds(two) == 5
    index.ended(index.sent(0, one, 3.0), 4.0, 0.0)
    assert index.overlaps(two) == {}
    assert index.overlaps(one) == {0: 5}  # it was computed, and is in the slot
    assert index.residency(0).life == 0
    # What the slots hold is believed as before.
    index.ended(index.sent(0, one, 5.0), 6.0, 5.0)
    pushed_out(index, one, 7.0)
    assert index.overlaps(one) == {}
    # One that has more than it can have without one has one after all.
    index.ended(index.sent(0, two, 8.0), 9.0, 4.0)
    pushed_out(index, two, 10.0)
    assert index.residency(0).holds(two) == 5


def test_a_prompt_cache_that_was_seen_once_isn_t_none_for_one_miss() -> None:
    index = PrefixIndex()
    index.has_slots(0, 1)
    one, two = path(10, 11, 12, 13, 14), path(20, 21, 22, 23, 24)
    pushed_out(index, one, 1.0)
    index.ended(index.sent(0, one, 2.0), 3.0, 5.0)
    pushed_out(index, two, 4.0)
    pushed_out(index, one, 5.0)
    index.ended(index.sent(0, one, 6.0), 7.0, 0.0)
    assert index.residency(0).holds(path(5, 1, 1)) == 3  # it is smaller, and that isn't too old


def test_a_server_that_finds_nothing_twice_was_restarted() -> None:
    index = PrefixIndex()
    index.has_slots(3, 2)
    one = path(1, 2, 3, 4, 5)
    stay = index.sent(3, one, 0.0)
    index.ended(stay, 1.0, 0.0)
    for now in (2.0, 4.0):
        index.ended(index.sent(3, one, now), now + 1.0, 0.0)
    assert index.overlaps(one) == {}
    assert index.residency(3).life == 1


@pytest.mark.parametrize("counts", [(-1.0,), (99.0,), (8.0,) * 16])
def test_a_server_that_lies_is_doubted_and_let_be(counts: tuple[float, ...]) -> None:
    residency = SlotResidency(2, 0)
    for found in counts:
        residency.found(0, found, 8, 0.0)
    assert residency.trust == "doubted"
    held = path(1, 2, 3, 4)
    residency.sent(held, 1.0)
    residency.ended(held, 2.0)
    for _ in range(3):
        residency.found(4, 0.0, 4, 3.0)
    assert residency.holds(held) == 4


def test_a_restored_slot_holds_its_file_and_no_more() -> None:
    residency = SlotResidency(2, 0)
    old = path(1, 2)
    residency.sent(old, 0.0)
    assert residency.restored(1, path(5, 6)) == ([], [])  # that slot is busy
    residency.ended(old, 1.0)
    came, gone = residency.restored(1, path(5, 6))
    assert (came, gone) == (path(5, 6), old)
    assert residency.holds(path(5, 6, 7)) == 2


def test_a_worker_is_told_once_that_it_has_slots() -> None:
    index = PrefixIndex()
    index.ended(index.sent(0, path(1, 2), 0.0), 1.0, None)
    index.has_slots(0, 2)
    assert index.overlaps(path(1)) == {}  # of slots nothing was known
    index.ended(index.sent(0, path(1, 2), 2.0), 3.0, None)
    index.has_slots(0, 2)
    index.resized(0, 8, 4.0)
    assert index.overlaps(path(1, 2)) == {0: 2}
    index.has_slots(0, 3)
    assert index.overlaps(path(1, 2)) == {}
