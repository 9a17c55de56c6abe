"""Blocks of prompts and of events get the same names; beginnings of prompts are remembered."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kv_engine import BLOCK, KvEngine, root
from preheat.core.kv_events import Batch, Joined, Moved, Restarted, Stored, in_pieces
from preheat.core.kv_names import KvNames
from preheat.core.token_memo import TokenMemo
from preheat.core.tokens import token_blocks
from preheat.core.told import ToldResidency


def residency() -> ToldResidency:
    return ToldResidency(block_tokens=BLOCK, root=root)


def test_a_prompt_of_an_adapter_is_called_as_its_events_are() -> None:
    names = KvNames(b"secret")
    assert names.asked_root("m", "") == names.asked_root("sql", "") == names.root("", "")
    assert names.root("", "sql") == names.asked_root("sql", "") != names.asked_root("m", "")
    assert len({names.root("a", ""), names.root("", "a"), names.root("", "")}) == 3
    assert KvNames(b"other").root("", "") != names.root("", "")


def test_the_first_word_on_the_size_of_blocks_counts_and_pages_of_one_token_are_too_small() -> None:
    names = KvNames(b"secret")
    names.learn_size(1)
    names.learn_size(64)
    assert names.block_tokens == 16
    large = KvNames(b"secret")
    large.learn_size(128)
    assert large.block_tokens == 128


def test_adapters_and_roots_are_bounded() -> None:
    names = KvNames(b"secret")
    for one in range(10_000):
        names.root("", f"adapter-{one}")
    assert names.asked_root("adapter-9999", "") == names.root("", "")
    assert names.asked_root("adapter-0", "") != names.root("", "")


def test_what_two_prompts_have_in_common_is_their_beginning() -> None:
    memo = TokenMemo()
    memo.learn([1, 2], [10, 11, 12, 13])
    assert memo.find([1, 3]) == ((), 0), "where it ends nobody knows yet"
    assert memo.find([1, 2]) == memo.find([1, 2, 4]) == ([10, 11, 12, 13], 2)
    memo.learn([1, 2, 4], [10, 11, 12, 13, 14])
    assert memo.find([1, 5]) == ((), 0), "the same conversation tells nothing of others"
    memo.learn([1, 3], [10, 11, 99])
    assert memo.find([1, 5]) == ([10, 11], 1)
    memo.learn([1], [10])
    assert memo.find([1, 5]) == ([10], 1)


def test_the_memo_is_bounded_and_what_is_used_stays() -> None:
    memo = TokenMemo(most_blocks=100)
    memo.learn([0], list(range(10)))
    for one in range(1, 50):
        memo.learn([one], list(range(10)))
        assert memo.find([0]).messages == 1
    assert sum(len(memo.find([one]).blocks) for one in range(50)) <= 100
    memo.learn([77], list(range(101)))
    assert memo.find([77]) == ((), 0)


@given(st.integers(0, 10_000), st.integers(1, 7))
def test_events_in_pieces_say_the_same(seed: int, most: int) -> None:
    engine = KvEngine(Random(seed))
    whole, pieces = residency(), residency()
    for told in (whole, pieces):
        told.take(Joined(whole=True), 0.0)
    for at in range(30):
        engine.act()
        batch = engine.step(float(at))
        whole.take(batch, float(at))
        for piece in in_pieces(batch, most):
            pieces.take(piece, float(at))
    assert set(whole) == set(pieces) == engine.holds()


def test_pieces_of_a_prompt_that_has_images_keep_what_belongs_to_them() -> None:
    extras = [("salt",), (), ("image",), ()]
    event = Stored(range(4), None, list(range(4 * BLOCK)), BLOCK, extra_keys=extras)
    whole, pieces = residency(), residency()
    whole.take(Batch(0.0, [event]), 0.0)
    for piece in in_pieces(Batch(0.0, [event]), 3):
        pieces.take(piece, 0.0)
    assert set(whole) == set(pieces)
    assert set(token_blocks(list(range(2 * BLOCK)), BLOCK, root("salt", ""))) < set(whole)
    assert list(in_pieces(Restarted(), 3)) == [Restarted()]


def test_what_another_process_has_heard_is_known_as_if_we_had() -> None:
    told = residency()
    assert told.take(Moved([1, 2, 3], [], "told"), 0.0) == ([1, 2, 3], [])
    assert told.trust == "told"
    assert told.take(Moved([2, 4], [1], "estimated"), 0.0) == ([4], [1])
    assert (set(told), told.trust, told.holds([2, 3, 9])) == ({2, 3, 4}, "estimated", 2)
    came, gone = told.take(Moved([4, 5], [], "told", anew=True), 0.0)
    assert (came, sorted(gone), set(told)) == ([5], [2, 3], {4, 5})
    told.sent([4, 9], 1.0)
    assert sorted(told.cleared()) == [5]
    assert set(told) == {4, 9}, "what runs brings it"
    assert told.is_empty
