"""The rules of warming: when a chunk may begin, how long it is, what proves a prefix."""

import pytest

from preheat.core.warmup import (
    Busy,
    ChunkSize,
    Mark,
    Pace,
    Underway,
    Walk,
    blocked,
    of_adapter,
    of_prefix,
    of_response,
    probing_order,
)

PACE = Pace(slack_s=0.2, most_load=0.5, first_tokens=64, least_tokens=16)


@pytest.mark.parametrize(
    ("busy", "may"),
    [
        (Busy(), True),
        (Busy(running=0, waiting=0), True),
        (Busy(running=1), False),
        (Busy(running=1, waiting=0, load=0.25), True),
        (Busy(running=1, waiting=0, load=0.5), False),
        (Busy(running=0, waiting=1, load=0.0), False),
    ],
)
def test_a_chunk_begins_only_when_nobody_waits_and_load_is_low(busy: Busy, may: bool) -> None:
    assert (blocked(PACE, busy) == "") is may


def test_chunks_settle_below_the_slack_whatever_the_servers_speed() -> None:
    for step_s, token_s in ((0.03, 0.007), (0.002, 8e-5), (0.0, 1e-3)):
        size = ChunkSize(PACE)
        took: list[float] = []
        for _ in range(40):
            took.append(step_s + token_s * size.tokens)
            size.took(size.tokens, took[-1])
        assert max(took[20:]) <= PACE.slack_s
        assert min(took[20:]) >= 0.5 * PACE.slack_s  # and not in crumbs


def test_a_slow_chunk_makes_the_next_one_short_at_once() -> None:
    size = ChunkSize(PACE)
    for _ in range(10):
        size.took(size.tokens, size.tokens * 1e-3)
    before = size.tokens
    size.took(before, before * 4e-3)
    assert size.tokens <= before // 3
    size.took(0, 5.0)  # all of it was cached: that says nothing of speeds
    assert size.tokens <= before // 3


def test_a_chunk_never_grows_by_more_than_twice_nor_below_the_least() -> None:
    size = ChunkSize(PACE)
    size.took(64, 1e-6)
    assert size.tokens == 128
    size.took(128, 100.0)
    assert size.tokens == 16


def test_a_walk_goes_on_where_it_was_stopped_and_counts_what_was_computed() -> None:
    walk = Walk(tokens=1_000, done_tokens=400)
    assert walk.end(300) == 700
    assert walk.did(700, cached_tokens=400) == 300
    assert walk.did(walk.end(500), cached_tokens=None) == 300
    assert (walk.is_over, walk.computed_tokens) == (True, 600)
    whole = Walk(tokens=10, done_tokens=10)
    assert (whole.end(5), whole.did(10, 9)) == (10, 1)


@pytest.mark.parametrize(
    ("prompt_tokens", "cached", "block", "least", "verdict"),
    [
        (1_000, 999, 1, 0, "proven"),
        (1_000, 900, 1, 0, "proven"),
        (1_000, 899, 1, 0, "refuted"),
        (1_000, 0, 1, 0, "refuted"),
        (1_000, 22, 1, 0, "refuted"),  # the template's beginning
        (1_000, None, 1, 0, "unknown"),
        (1_000, 1_001, 1, 0, "unknown"),  # a lie that can't be true
        (129, 128, 128, 0, "proven"),
        (128, 0, 128, 0, "unknown"),  # no whole block beside the last token
        (200, 128, 128, 0, "proven"),  # never more than can be
        (200, 127, 128, 0, "refuted"),
        (1_000, 0, 128, 1_024, "unknown"),
        (1_000, 896, 128, 1_024, "proven"),
    ],
)
def test_a_probe_proves_or_refutes_a_prefix(
    prompt_tokens: int, cached: int | None, block: int, least: int, verdict: str
) -> None:
    proof = of_prefix(
        prompt_tokens,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        block_tokens=block,
        least_tokens=least,
    )
    assert proof.verdict == verdict
    assert proof.why


def test_an_event_proves_what_a_probe_cant() -> None:
    proof = of_prefix(1_000, prompt_tokens=1_000, cached_tokens=None, seen_tokens=960)
    assert proof.verdict == "proven"
    proof = of_prefix(1_000, prompt_tokens=1_000, cached_tokens=None, seen_tokens=500)
    assert proof.verdict == "unknown"


def test_a_probe_of_a_longer_prompt_is_held_against_what_was_warmed() -> None:
    assert of_prefix(800, prompt_tokens=2_000, cached_tokens=801).verdict == "proven"
    assert of_prefix(800, prompt_tokens=2_000, cached_tokens=700).verdict == "refuted"


def test_adapters_are_proven_by_list_and_answer() -> None:
    verdicts = {
        (listed is None or "a" in listed, listed is None, answers): of_adapter(
            "a", listed, answers=answers
        ).verdict
        for listed in (None, [], ["a"])
        for answers in (None, False, True)
    }
    assert verdicts == {
        (True, True, None): "unknown",
        (True, True, False): "refuted",
        (True, True, True): "unknown",
        (False, False, None): "refuted",
        (False, False, False): "refuted",
        (False, False, True): "refuted",
        (True, False, None): "unknown",
        (True, False, False): "refuted",
        (True, False, True): "proven",
    }


@pytest.mark.parametrize(
    ("form", "probed", "verdict"),
    [
        (b"q", b"A", "proven"),
        (b"q", None, "unknown"),
        (b"q", b"B", "refuted"),
        (b"other", b"A", "refuted"),
    ],
)
def test_a_response_is_proven_by_form_and_probe(
    form: bytes, probed: bytes | None, verdict: str
) -> None:
    assert of_response(form, b"q", stored=b"A", probed=probed).verdict == verdict


def test_who_wants_the_same_or_less_joins_and_others_lead() -> None:
    underway = Underway()
    run, leads = underway.begin("a", b"abcd")
    assert leads
    assert underway.begin("a", b"abcd") == (run, False)
    assert underway.begin("a", b"ab") == (run, False)
    assert run.joined == 2
    longer, leads = underway.begin("a", b"abcdef")
    assert leads
    assert underway.begin("b", b"ab")[1]
    underway.end(run)
    underway.end(run)
    assert underway.begin("a", b"ab") == (longer, False)
    assert len(underway) == 2


def mark(slot: int | None, at: float, *, done: int = 100) -> Mark:
    return Mark(worker="w", prefix="p", tokens=100, done_tokens=done, slot=slot, at=at)


def test_what_probably_is_there_is_asked_for_first() -> None:
    marks = [mark(0, 1.0), mark(1, 2.0), None, mark(0, 3.0), mark(2, 4.0, done=50)]
    assert probing_order(marks, {0: 100, 1: 0, 2: 100}) == [3, 0, 4, 1, 2]
    assert probing_order(marks) == [3, 1, 0, 4, 2]
