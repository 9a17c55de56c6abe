"""Simulated llama.cpp slots: who gets which, what the prompt cache gives back, when steps end."""

import pytest

from preheat.core.costs import ServiceModel
from preheat.replay.kernel import Kernel
from preheat.replay.llamacpp import Host, Prompt, Server, ServerSpec
from preheat.replay.shared_text import TextOverlap, seams_of

SERVICE = ServiceModel(token_s=0.01, attention_s=0.0, step_s=0.1, sequence_s=0.02, context_s=1e-5)


class Rig:
    """A server whose prompts are texts; what they share is what the texts do."""

    def __init__(self, **spec: int) -> None:
        self.kernel = Kernel()
        self.texts: dict[int, str] = {}
        self.ended: list[int] = []
        self.server = Server(
            ServerSpec(**{"batch_tokens": 8, "token_bytes": 1, "cache_bytes": 0, **spec}),
            SERVICE,
            self.kernel,
            self.overlap,
            lambda one: self.ended.append(one.number),
        )

    def overlap(self, held: Prompt, prompt: Prompt) -> int:
        one, other = self.texts[held.number], self.texts[prompt.number]
        return next(
            (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
            min(len(one), len(other)),
        )

    def ask(self, text: str, answer: str = "!", at: float = 0.0) -> Prompt:
        """A token a letter."""
        number = len(self.texts)
        self.texts[number] = text + answer
        prompt = Prompt(number, at, len(text), len(answer))
        self.kernel.plan(at, self.server.submit, prompt)
        return prompt

    def cached(self, *texts: str) -> list[int]:
        """What was there of each, asked one after the other."""
        found = []
        for text in texts:
            prompt = self.ask(text, at=self.kernel.now)
            self.kernel.run()
            found.append(prompt.cached_tokens)
        return found


def test_a_prompt_is_computed_in_pieces_and_then_each_step_says_a_token() -> None:
    rig = Rig()
    one = rig.ask("x" * 20, "abc")
    rig.kernel.run()
    # Pieces of 8, 8 and 4; then two steps behind 21 and 22 tokens.
    assert one.first_at == pytest.approx(3 * 0.1 + 20 * 0.01)
    assert one.ended_at - one.first_at == pytest.approx(2 * 0.12 + (21 + 22) * 1e-5)
    assert rig.server.prefill_s == pytest.approx(0.5)
    assert rig.server.in_flight == 0


def test_who_comes_during_a_step_waits_for_its_end_and_shares_the_next() -> None:
    rig = Rig()
    long, short = rig.ask("x" * 24), rig.ask("yy", at=0.05)
    rig.kernel.run()
    # The first came to the last slot; the first slot's prompt comes first in a batch.
    assert short.started_at == pytest.approx(0.18)
    assert short.first_at == pytest.approx(0.36)
    assert long.first_at == pytest.approx(0.54 + 0.12)  # 8, 6, 8 and 2


def test_decoding_goes_on_beside_a_prompt() -> None:
    rig = Rig()
    talks = rig.ask("x" * 8, "a" * 4)
    rig.ask("y" * 7, at=0.1)
    rig.kernel.run()
    beside_s = 0.1 + 0.02 + 9e-5 + 0.07  # one token said, seven computed
    assert talks.ended_at == pytest.approx(0.18 + beside_s + 2 * 0.12 + (10 + 11) * 1e-5)


def test_with_no_slot_idle_it_waits_in_order() -> None:
    rig = Rig(slots=1)
    first, second, third = (rig.ask(text) for text in ("aaa", "bbb", "ccc"))
    rig.kernel.run()
    assert rig.ended == [0, 1, 2]
    assert second.started_at == first.ended_at
    assert third.started_at == second.ended_at


def test_the_slot_that_shares_most_is_taken_else_the_oldest() -> None:
    assert Rig().cached("aaaabbbb", "ccccdddd", "aaaaeeee", "ccccffff") == [0, 0, 4, 4]
    # The third shares less than a tenth with any: it takes the slot of the first.
    assert Rig().cached("aaaabbbb", "ccccdddd", "q" * 20, "ccccdddd", "aaaabbbb") == [0, 0, 0, 7, 0]


def test_one_token_at_least_is_computed_and_the_last_one_said_is_not_held() -> None:
    rig = Rig()
    assert rig.cached("aaaabbbb", "aaaabbbb") == [0, 7]
    said = rig.ask("cccc", "dd", at=rig.kernel.now)
    rig.kernel.run()
    assert said.held_tokens == said.done_tokens == 5
    assert rig.cached("ccccddddd") == [5]


def test_the_prompt_cache_gives_back_what_a_slot_lost() -> None:
    texts = ("aaaabbbb", "ccccdddd", "eeeeffff", "aaaabbbbgg")
    assert Rig(slots=1).cached(*texts)[-1] == 0
    assert Rig(slots=1, cache_bytes=1000).cached(*texts)[-1] == 8
    # With room for two sequences of eight the first is gone.
    assert Rig(slots=1, cache_bytes=17).cached(*texts)[-1] == 0


def test_what_would_keep_less_than_a_quarter_is_not_given_back() -> None:
    long = "a" * 4 + "b" * 20
    assert Rig(slots=1, cache_bytes=1000).cached(long, "ccccdddd", "aaaaeeee") == [0, 0, 0]
    assert Rig(slots=1, cache_bytes=1000).cached(long[:16], "ccccdddd", "aaaaeeee") == [0, 0, 4]


def test_a_slot_that_keeps_half_is_not_saved() -> None:
    rig = Rig(slots=1, cache_bytes=1000)
    # "aaaab…" keeps half of the first, which is lost; the third finds only what both share.
    assert rig.cached("aaaabbbb", "aaaacccc", "aaaabbbb") == [0, 4, 4]


def test_an_idle_slot_is_copied_when_another_begins() -> None:
    rig = Rig(slots=2, cache_bytes=1000)
    assert rig.cached("aaaabbbb", "ccccdddd", "aaaaeeee", "aaaabbbb") == [0, 0, 4, 4]


def test_a_sequence_larger_than_the_cache_is_not_kept_and_pushes_nobody_out() -> None:
    texts = ("aaaabbbb", "c" * 30, "dd", "aaaabbbb")
    assert Rig(slots=1, cache_bytes=20).cached(*texts)[-1] == 7


def test_servers_of_one_host_slow_each_other_while_both_work() -> None:
    kernel, host, ended = Kernel(), Host(slowdown=0.5), list[Prompt]()
    spec = ServerSpec(batch_tokens=8, cache_bytes=0)
    one, other = (
        Server(spec, SERVICE, kernel, lambda _held, _prompt: 0, ended.append, host=host)
        for _ in range(2)
    )
    kernel.plan(0.0, one.submit, Prompt(1, 0.0, 8, 1))
    kernel.plan(10.0, one.submit, Prompt(2, 10.0, 16, 1))
    kernel.plan(10.0, other.submit, Prompt(3, 10.0, 8, 1))
    kernel.run()
    alone_s = 0.18
    assert [one.ended_at - one.arrived_at for one in ended] == [
        pytest.approx(alone_s),
        pytest.approx(1.5 * alone_s),  # the third; the second began its first step alone
        pytest.approx(alone_s + 1.5 * alone_s),
    ]
    assert host.working == 0


# What a log tells of shared tokens ---------------------------------------------------------------


def prompt(number: int, blocks: tuple[int, ...], **fields: object) -> Prompt:
    about = {"input_tokens": 400, "output_tokens": 10, "bytes": 2000, **fields}
    return Prompt(number=number, arrived_at=float(number), blocks=blocks, **about)


def test_a_later_turn_has_all_of_the_earlier_and_its_answer() -> None:
    overlap = TextOverlap()
    one = prompt(1, (1, 2, 3), session="s")
    later = prompt(2, (1, 2, 3, 4), session="s", bytes=2600, input_tokens=520)
    assert overlap(one, later) == 409
    assert overlap(later, one) < 409  # the other way about it isn't
    assert overlap(one, prompt(3, (1, 2, 9), session="s", bytes=2600)) < 409
    assert overlap(one, prompt(4, (1, 2, 3, 4), session="t", bytes=2600)) < 409


def test_equal_keys_are_equal_prompts() -> None:
    overlap = TextOverlap()
    assert overlap(prompt(1, (1,), key="k"), prompt(2, (1,), key="k")) == 400
    assert overlap(prompt(1, (), key="k"), prompt(2, (), key="m")) == 3


def test_where_texts_part_is_taken_for_the_middle_of_a_block() -> None:
    one, other = prompt(1, (1, 2, 3)), prompt(2, (1, 2, 4))
    assert TextOverlap()(one, other) == 2.5 * 512 * 400 // 2000
    short = prompt(3, (1, 2), bytes=1100)
    assert TextOverlap()(short, other) == 1100 * 400 // 2000  # it ends before that


def test_a_seam_is_learned_from_first_turns() -> None:
    # 0.2 tokens a byte: a block is 102 tokens, so two blocks end at 205.
    rows = [
        prompt(0, (1, 2, 10)),
        prompt(1, (1, 2, 11), session="s"),
        prompt(2, (1, 2, 11, 12), session="s"),
        prompt(3, (1, 2, 13)),
        prompt(4, (1, 2, 14)),
        prompt(5, (7, 8)),
    ]
    cached = [0, 230, 409, 230, 3, 0]  # the last but one was a miss
    for row, tokens in zip(rows, cached, strict=True):
        row.cached_tokens = tokens
    seams = seams_of(rows)
    assert seams == {2: 230}
    assert TextOverlap(seams=seams)(rows[0], prompt(9, (1, 2, 15))) == 230
