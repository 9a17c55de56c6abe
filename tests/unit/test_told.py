"""What is known of a worker by its events: against the engine's real cache, whatever gets lost."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_engine import BLOCK, KvEngine, root
from preheat.core.index import PrefixIndex
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
    Sure,
    Unsure,
)
from preheat.core.kv_stream import KvStream
from preheat.core.tokens import chain_root, token_blocks
from preheat.core.told import ToldResidency

LONG_S = 1_000.0


def residency(*, whole: bool = True, block_tokens: int = BLOCK, most: int = 1_000) -> ToldResidency:
    made = ToldResidency(block_tokens=block_tokens, root=root, most_blocks=most)
    made.take(Joined(whole), 0.0)
    return made


def tell(told: ToldResidency, *events: Event, now: float = 0.0, rank: int = 0) -> None:
    told.take(Batch(now, events, rank), now)


def ids(tokens: list[int], salt: str = "", lora_name: str = "", size: int = BLOCK) -> list[int]:
    return token_blocks(tokens, size, root(salt, lora_name))


def stored(*names: int, parent: int | None = None, first: int = 0, **more: object) -> Stored:
    """Blocks whose tokens count up from `first`."""
    count = len(names) * BLOCK
    fields = {"token_ids": list(range(first, first + count)), "block_tokens": BLOCK} | more
    return Stored(names, parent, **fields)


class Link:
    """An engine, its publisher and what is between it and us; `told` is what we make of it."""

    def __init__(self, seed: int, *, can_replay: bool, buffer_steps: int) -> None:
        self.random = Random(seed)
        self.engine = KvEngine(self.random)
        self.stream = KvStream(can_replay=can_replay)
        self.told = ToldResidency(block_tokens=BLOCK, root=root)
        self.mirror: set[int] = set()
        self.at = 0.0
        self.number = 0
        self.buffer: list[tuple[int, Batch]] = []
        self.buffer_steps = buffer_steps
        self.sets: dict[tuple[int, float], set[int]] = {}

    def publish(self) -> tuple[int, Batch]:
        for _ in range(self.random.randrange(4)):
            self.engine.act()
        self.at += self.random.random()
        made = (self.number, self.engine.step(self.at))
        self.sets[self.number, self.at] = self.engine.holds()
        self.number += 1
        self.buffer = [*self.buffer, made][-self.buffer_steps :]
        return made

    def restart(self) -> None:
        self.take(self.stream.broken())
        self.engine = KvEngine(self.random)
        self.number, self.buffer = 0, []
        self.stream.mended()

    def hear(self, made: tuple[int, Batch]) -> None:
        self.take(self.stream.live(*made))

    def replay(self, *, complete: bool = True) -> None:
        while (first := self.stream.wanted) is not None:
            for number, batch in self.buffer:
                if number >= first:
                    self.take(self.stream.replayed(number, batch))
                    if not complete:
                        break
            self.take(self.stream.replay_ended(complete=complete))

    def take(self, steps: list[Step]) -> None:
        for step in steps:
            came, gone = self.told.take(step, self.at)
            assert not self.mirror.intersection(came)
            assert self.mirror.issuperset(gone)
            self.mirror.difference_update(gone)
            self.mirror.update(came)
            assert self.mirror == set(self.told), step
            if self.told.trust == "told" and isinstance(step, Batch):
                known = next(held for (_, at), held in self.sets.items() if at == step.at)
                assert self.mirror == known


@given(st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_after_a_replay_it_is_what_the_engine_holds(seed: int) -> None:
    """Batches lost, doubled and swapped, connections broken, the engine restarted."""
    link = Link(seed, can_replay=True, buffer_steps=10**6)
    random = link.random
    link.stream.mended()
    link.replay()
    waiting: list[tuple[int, Batch]] = []
    for _ in range(60):
        waiting.append(link.publish())
        match random.randrange(12):
            case 0:
                waiting.pop()
            case 1:
                waiting.append(waiting[-1])
            case 2:
                waiting.insert(0, waiting.pop())
            case 3:
                link.take(link.stream.broken())
                waiting.clear()
                link.stream.mended()
            case 4 if random.random() < 0.3:
                link.restart()
                waiting.clear()
            case 5 | 6:
                continue  # they come together, the next time
        for made in waiting:
            link.hear(made)
        waiting.clear()
        if random.random() < 0.7:
            link.replay()
    link.hear(link.publish())
    link.replay()
    assert set(link.told) == link.engine.holds()
    assert link.told.trust == "told"


@given(st.integers(0, 10**9), st.booleans())
@settings(max_examples=150, deadline=None)
def test_what_it_is_sure_of_is_true_where_losses_stay(seed: int, can_replay: bool) -> None:
    """No replay, or one that reaches back three batches only, or breaks off. `Link.take` compares."""
    link = Link(seed, can_replay=can_replay, buffer_steps=3)
    random = link.random
    for _ in range(random.randrange(4)):
        link.publish()
    link.stream.mended()
    link.replay()
    trusts = set()
    for _ in range(60):
        made = link.publish()
        match random.randrange(12):
            case 0:
                for _ in range(random.randrange(5)):
                    made = link.publish()
            case 1:
                link.hear(made)
            case 2:
                link.restart()
                made = link.publish()
            case 3:
                link.take(link.stream.broken())
                link.stream.mended()
            case 4:
                link.at += 200.0
        link.hear(made)
        link.replay(complete=random.random() < 0.8)
        trusts.add(link.told.trust)
    # All that was told before the last loss is gone when it can't be relied upon any more.
    link.take([Lost(1)])
    link.at += LONG_S
    made = link.publish()
    link.hear(made)
    link.replay()
    assert link.told.trust in {"told", "estimated"}
    if link.told.trust == "estimated":
        assert set(link.told) <= link.engine.holds()


@pytest.mark.parametrize("engine_tokens", [1, 2, 4, 8, 16, 3])
def test_blocks_of_any_size_on_the_engines_side(engine_tokens: int) -> None:
    engine = KvEngine(Random(engine_tokens), engine_tokens)
    told = residency()
    prompt = [engine.random.randrange(50_000) for _ in range(50)]
    for length in (7, 20, 50):
        engine.store(prompt[:length])
    told.take(engine.step(0.0), 0.0)
    whole = 50 // engine_tokens * engine_tokens
    assert told.holds(ids(prompt)) == whole // BLOCK
    while engine.blocks:
        engine.evict("GPU")
        told.take(engine.step(0.0), 0.0)
        left = len(engine.blocks) * engine_tokens
        assert told.holds(ids(prompt)) == len(told) == left // BLOCK


def test_salt_adapter_and_images_part_what_has_equal_tokens() -> None:
    told = residency()
    tokens = list(range(2 * BLOCK))
    salted = (("mint",), ())
    tuned = {"lora_name": "tuned", "extra_keys": (("tuned",), ("tuned",))}
    image = ((), (b"image",))
    cases = [
        (stored(1, 2, extra_keys=salted), ids(tokens, "mint")),
        (stored(3, 4, **tuned), ids(tokens, "", "tuned")),
        (stored(5, 6, lora_name="tuned", extra_keys=(("tuned", "mint"),)), ids(tokens, "mint", "tuned")),
        (stored(7, 8), ids(tokens)),
        (stored(9, 10, lora_name="tuned", extra_keys=(("tuned", "tuned"), ("tuned",))), ids(tokens, "tuned", "tuned")),
    ]  # fmt: skip
    for event, expected in cases:
        assert told.holds(expected) == 0
        tell(told, event)
        assert told.holds(expected) == 2
    tell(told, Cleared(), stored(9, 10, extra_keys=image))
    assert told.holds(ids(tokens)) == 1
    assert len(told) == 2
    tell(told, Cleared(), stored(11, extra_keys=((b"image", "mint"),)))
    assert len(told) == 1
    assert not any(told.holds(ids(tokens, salt)) for salt in ("", "mint"))


def test_a_block_is_here_while_any_medium_has_it() -> None:
    told = residency()
    prompt = ids(list(range(2 * BLOCK)))
    tell(told, stored(1, 2), Stored([1], None, [], BLOCK, "CPU"), Removed([1, 2]))
    assert told.holds(prompt) == 1
    tell(told, Removed([1], "CPU"))
    assert len(told) == 0
    tell(told, Stored([1, 2], None, [], BLOCK, "CPU"), Removed([5]), Removed([1], "DISK"))
    assert len(told) == 0  # which tokens those are, nobody knows any more


def test_an_engine_that_keeps_copies_holds_a_block_while_it_has_one() -> None:
    """vLLM computes the last block of a prompt of whole blocks again each time it is asked for."""
    prompt = ids(list(range(2 * BLOCK)))
    again, gone = stored(2, parent=1, first=BLOCK, group=0), Removed([2], group=0)
    told = residency()
    tell(told, stored(1, 2, group=0), again, again, gone, gone)
    assert told.holds(prompt) == 2
    tell(told, gone)
    assert told.holds(prompt) == 1
    tell(told, again, gone, gone)
    assert told.holds(prompt) == 1

    same = residency()  # SGLang names no groups, and keeps no copies
    tell(same, stored(1, 2), stored(2, parent=1, first=BLOCK), Removed([2]))
    assert same.holds(prompt) == 1


def test_copies_are_forgotten_with_all_else_and_by_doubt() -> None:
    prompt = ids(list(range(BLOCK)))
    one, gone = stored(1, group=0), Removed([1], group=0)
    for between in (Cleared(), Lost(1), Restarted()):
        told = residency()
        tell(told, one, one)
        if isinstance(between, Cleared):
            tell(told, between)
        else:
            told.take(between, 0.0)
        tell(told, one)
        assert told.holds(prompt) == 1
        tell(told, gone)
        assert told.holds(prompt) == 0
    told = residency()
    tell(told, one, one, rank=0)
    tell(told, one, rank=1)
    tell(told, Cleared(), rank=0)
    assert told.holds(prompt) == 1
    tell(told, gone, rank=1)
    assert told.holds(prompt) == 0


def test_a_cleared_rank_leaves_the_others_blocks() -> None:
    told = residency(whole=False)
    tell(told, stored(1), rank=0)
    tell(told, stored(1), stored(2, first=90), rank=1)
    tell(told, Cleared(), rank=1)
    assert (list(told), told.trust) == (ids(list(range(BLOCK))), "estimated")
    tell(told, Cleared(), rank=0)
    assert len(told) == 0


def test_groups_of_layers_that_keep_a_window_do_not_count() -> None:
    told = residency()
    window = {"group": 1, "kind": "sliding_window"}
    tell(told, stored(1, 2, **window))
    assert len(told) == 0
    tell(told, stored(1, 2, group=0, kind="full_attention"), Removed([1, 2], group=1))
    assert len(told) == 2
    tell(told, Removed([2], group=0))
    assert len(told) == 1


def test_orphans_wait_for_their_parent_with_all_that_is_said_of_them() -> None:
    told = residency(whole=False)
    prompt = ids(list(range(5 * BLOCK)))
    tell(told, stored(3, 4, parent=2, first=2 * BLOCK), Stored([4], 3, [], BLOCK, "CPU"))
    tell(told, stored(5, parent=4, first=4 * BLOCK), Removed([5]), Removed([4]))
    assert len(told) == 0
    tell(told, stored(1, 2))
    assert told.holds(prompt) == 4
    tell(told, Removed([4], "CPU"))
    assert told.holds(prompt) == 3


def test_orphans_are_bounded() -> None:
    told = residency()
    for name in range(30_000):
        tell(told, stored(10**6 + name, parent=name))
    assert (len(told), told.over) == (0, 30_000 - 8_192)
    tell(told, *(Removed([10**6 + 29_999]) for _ in range(20_000)))
    assert told.over > 30_000 - 8_192
    tell(told, *(stored(name, first=name) for name in range(40_000)))
    assert (len(told), told.over > 30_000) == (1_000, True)


def test_a_long_chain_of_orphans_is_linked_at_once() -> None:
    told = residency(most=10_000)
    tokens = list(range(5_000 * BLOCK))
    for name in range(4_999, 0, -1):
        tell(told, stored(name, parent=name - 1, first=name * BLOCK))
    tell(told, stored(0))
    assert told.holds(ids(tokens)) == 5_000


def test_a_name_that_is_given_to_another_block_is_that_block() -> None:
    told = residency()
    tell(told, stored(1), stored(1, first=7))
    assert list(told) == ids(list(range(7, 7 + BLOCK)))


def test_what_is_sent_counts_at_once_and_until_the_events_are_there() -> None:
    told = residency()
    prompt = ids(list(range(3 * BLOCK)))
    came, gone = told.sent(prompt, 0.0)
    assert (list(came), gone, told.holds(prompt)) == (prompt, [], 3)
    told.ended(prompt, 1.0)
    tell(told, stored(1, 2), now=2.0)
    assert told.holds(prompt) == 3
    assert told.aged(3.0).gone == prompt[2:]
    assert told.holds(prompt) == 2


def test_hopes_last_where_events_cannot_be_relied_upon() -> None:
    told = residency(whole=False)
    prompt = ids(list(range(3 * BLOCK)))
    told.sent(prompt, 0.0)
    told.ended(prompt, 1.0)
    assert told.aged(120.0).gone == []
    assert sorted(told.aged(121.0).gone) == sorted(prompt)


def test_an_event_ends_a_hope() -> None:
    told = residency(whole=False)
    prompt = ids(list(range(BLOCK)))
    told.sent(prompt, 0.0)
    told.ended(prompt, 0.0)
    assert told.take(Batch(1.0, [stored(1), Removed([1])]), 1.0).gone == prompt


def test_a_request_that_failed_leaves_what_was_told() -> None:
    told = residency()
    prompt = ids(list(range(3 * BLOCK)))
    tell(told, stored(1))
    told.sent(prompt, 0.0)
    told.sent(prompt[:2], 0.0)
    assert told.failed(prompt, 1, 1.0) == prompt[2:]
    assert told.failed(prompt[:2], 1, 1.0) == prompt[1:2]
    assert list(told) == prompt[:1]


def test_more_than_can_be_noted_does_not_come_in() -> None:
    told = residency(most=4)
    prompt = list(range(5))
    assert told.sent(prompt, 0.0) == ((), [])
    assert list(told.sent(prompt[:4], 0.0)[0]) == prompt[:4]
    assert told.sent([7], 0.0) == ((), [])
    told.ended(prompt[:4], 0.0)
    assert list(told.sent([7], 0.5)[0]) == [7]


def test_what_is_doubted_goes_unless_it_is_told_again() -> None:
    told = residency()
    tell(told, stored(1, 2))
    told.take(Lost(1), 10.0)
    assert told.trust == "doubted"
    tell(told, stored(1), now=20.0)
    told.take(Lost(1), 60.0)
    assert told.aged(129.0).gone == []
    assert told.aged(130.0).gone == ids(list(range(2 * BLOCK)))[1:]
    assert (told.trust, told.aged(180.0).gone) == ("doubted", ids(list(range(BLOCK))))
    assert told.trust == "estimated"


def test_a_doubt_is_lifted_where_nothing_was_lost() -> None:
    told = residency()
    tell(told, stored(1))
    told.take(Unsure(), 1.0)
    assert told.trust == "doubted"
    told.take(Sure(), 2.0)
    assert (told.trust, told.aged(LONG_S)) == ("told", ([], []))
    told.take(Lost(1), LONG_S)
    told.take(Unsure(), LONG_S)
    told.take(Sure(), LONG_S)
    assert told.trust == "doubted"


def test_answers_prove_and_refute() -> None:
    told = residency(whole=False)
    for _ in range(32):
        assert told.trust == "estimated"
        assert told.found(10, 10.4, 12, 0.0) == []
    assert told.trust == "confirmed"
    told.found(0, 8.0, 12, 0.0)
    assert told.trust == "estimated"
    sure = residency()
    for _ in range(7):
        sure.found(10, 0.0, 12, 0.0)
    sure.found(10, 10.0, 12, 0.0)
    assert sure.trust == "told"
    for _ in range(8):
        sure.found(10, 0.0, 12, 0.0)
    assert sure.trust == "doubted"
    more = residency()
    for _ in range(8):
        more.found(2, 10.0, 12, 0.0)
    assert more.trust == "estimated"


def test_the_index_takes_it() -> None:
    index = PrefixIndex()
    told = residency()
    prompt = ids(list(range(3 * BLOCK)))
    tell(told, stored(1))
    assert index.sent_tokens(3, prompt, 0.0) is None
    index.sent(3, [77], 0.0)
    index.hears(3, told)
    assert (index.overlaps(prompt), index.overlaps([77])) == ({3: 1}, {3: 1})
    stay = index.sent_tokens(3, prompt, 0.0)
    assert stay is not None
    assert (stay.is_in, index.overlaps(prompt)) == (True, {3: 3})
    index.ended(stay, 1.0, 1.0)
    index.told(3, told.take(Batch(1.5, [stored(2, parent=1, first=BLOCK)]), 1.5))
    index.told(3, told.aged(4.0))
    assert index.overlaps(prompt) == {3: 2}
    other = index.sent_tokens(3, prompt, 9.0)
    assert other is not None
    index.failed(other, 9.0)
    assert index.overlaps(prompt) == {3: 2}
    index.told(3, told.take(Batch(10.0, [Removed([2])]), 10.0))
    assert index.overlaps(prompt) == {3: 1}
    index.cleared(3)
    assert (index.overlaps(prompt), index.overlaps([77])) == ({3: 1}, {}), "it would say so"
    tell_of_doubt = told.take(Lost(1), 11.0)
    index.told(3, tell_of_doubt)
    index.cleared(3)
    assert (index.overlaps(prompt), len(index)) == ({}, 0)
    index.left(3)


def batches(*numbers: int) -> Iterator[tuple[int, Batch]]:
    for number in numbers:
        yield number, Batch(float(number), [])


def run(stream: KvStream, *numbers: int) -> list[Step]:
    return [step for one in batches(*numbers) for step in stream.live(*one)]


def brief(steps: list[Step]) -> list[object]:
    return [int(step.at) if isinstance(step, Batch) else step for step in steps]


def test_a_gap_is_replayed_with_the_batch_before_it_as_the_proof() -> None:
    stream = KvStream(can_replay=True)
    assert brief(run(stream, 0, 1, 4)) == [Joined(whole=True), 0, 1]
    assert stream.wanted == 1
    replies = [step for one in batches(1, 2, 3, 4) for step in stream.replayed(*one)]
    assert brief(replies + stream.replay_ended(complete=True)) == [2, 3, 4]
    assert (stream.wanted, brief(run(stream, 5)), stream.gaps) == (None, [5], 1)


def test_a_replay_with_another_batch_in_that_place_is_a_restart() -> None:
    stream = KvStream(can_replay=True)
    run(stream, 0, 1)
    stream.broken()
    stream.mended()
    assert stream.replayed(1, Batch(77.0, [])) == [Restarted()]
    assert stream.replayed(2, Batch(78.0, [])) == []
    assert (stream.replay_ended(complete=True), stream.wanted) == ([], 0)
    assert brief(stream.replayed(0, Batch(70.0, []))) == [Joined(whole=True), 70]


def test_a_publisher_that_is_behind_what_we_know_is_another_one() -> None:
    stream = KvStream(can_replay=True)
    run(stream, 0, 1, 2, 3)
    stream.broken()
    stream.mended()
    assert stream.replay_ended(complete=True) == [Restarted()]
    assert (stream.wanted, stream.replay_ended(complete=True), stream.wanted) == (0, [], None)
    assert brief(stream.live(0, Batch(90.0, []))) == [Joined(whole=True), 90]


def test_a_replay_that_does_not_reach_back_or_does_not_come() -> None:
    stream = KvStream(can_replay=True)
    run(stream, 0, 1, 6)
    replies = [step for one in batches(4, 5, 6) for step in stream.replayed(*one)]
    assert brief(replies + stream.replay_ended(complete=True)) == [Lost(2), 4, 5, 6]
    run(stream, 9)
    assert brief(stream.replay_ended(complete=False)) == [Lost(2), 9]


def test_what_waits_when_the_connection_breaks_may_be_another_process() -> None:
    stream = KvStream(can_replay=True)
    run(stream, 1, 2)
    stream.broken()
    stream.mended()
    assert (stream.replay_ended(complete=True), stream.wanted) == ([], 0)
    assert brief(stream.replayed(0, Batch(70.0, []))) == [Joined(whole=True), 70]
    assert stream.replay_ended(complete=True) == []


def test_what_a_full_queue_took_from_a_replay_is_asked_for_again() -> None:
    stream = KvStream(can_replay=True)
    run(stream, 0, 1, 6)
    replies = [step for one in batches(1, 2, 5, 6) for step in stream.replayed(*one)]
    assert (brief(replies), stream.replay_ended(complete=True), stream.wanted) == ([2], [], 2)
    replies = [step for one in batches(2, 3, 4, 5, 6) for step in stream.replayed(*one)]
    assert brief(replies + stream.replay_ended(complete=True)) == [3, 4, 5, 6]


def test_without_replay_a_gap_is_a_loss_and_so_may_be_a_broken_connection() -> None:
    stream = KvStream(can_replay=False)
    assert brief(run(stream, 3, 4, 7)) == [Joined(whole=False), 3, 4, Lost(2), 7]
    assert stream.broken() == [Unsure()]
    stream.mended()
    assert brief(run(stream, 8, 9)) == [Lost(0), 8, 9]


def test_repeats_and_stragglers_are_dropped() -> None:
    stream = KvStream(can_replay=False)
    assert brief(run(stream, 0, 1, 1, 0, 4, 2, 5)) == [Joined(whole=True), 0, 1, Lost(2), 4, 5]
    assert (stream.repeats, stream.late) == (2, 1)


@pytest.mark.parametrize("at", [100.0, -100.0])
def test_a_number_that_was_passed_with_another_time_is_a_restart(at: float) -> None:
    stream = KvStream(can_replay=False)
    run(stream, 0, 1, 2)
    assert brief(stream.live(1, Batch(at, []))) == [Restarted(), Joined(whole=False), int(at)]
    assert brief(stream.live(0, Batch(at, [])))[:2] == [Restarted(), Joined(whole=True)]


def test_old_numbers_one_after_the_other_are_a_restart_whose_clock_was_put_back() -> None:
    stream = KvStream(can_replay=False)
    run(stream, 500, 501)
    assert brief(run(stream, 5, 6)) == []
    assert brief(run(stream, 7)) == [Restarted(), Joined(whole=False), 7]


def test_a_batch_that_cannot_be_read_is_lost() -> None:
    stream = KvStream(can_replay=True)
    run(stream, 0)
    assert stream.live(1, None) == [Lost(1)]
    assert brief(run(stream, 2)) == [2]


def test_more_than_can_wait_for_a_replay_ends_it() -> None:
    stream = KvStream(can_replay=True)
    run(stream, 0)
    steps = run(stream, *range(2, 1_100))
    assert (stream.wanted, brief(steps)[:2], brief(steps)[-1]) == (None, [Lost(1), 2], 1_099)


def test_a_root_parts_models_salts_adapters_and_secrets() -> None:
    roots = {
        chain_root(b"s", "m"),
        chain_root(b"t", "m"),
        chain_root(b"s", "n"),
        chain_root(b"s", "m", "x"),
        chain_root(b"s", "m", "", "x"),
    }
    assert len(roots) == 5
    assert all(0 <= one < 2**64 for one in roots)


def test_numbers_that_leap_again_and_again_add_up_to_a_number() -> None:
    stream = KvStream(can_replay=False)
    lost = 0
    for start in range(8):
        for number in (0, 2**63 - 1):
            batch = Batch(1.0 + 2 * start + (number > 0), [])
            steps = stream.live(number, batch)
            assert steps[-1] is batch
            lost += sum(step.batches for step in steps if isinstance(step, Lost))
    assert 0 < lost < 2**53
