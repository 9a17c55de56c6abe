"""The virtual server of `benchmarks signals`: what each signal changes there."""

import pytest

from benchmarks.signal_world import Counted, Prices, Rules, Turn, World
from preheat.core.costs import ServiceModel

PRICES = Prices(
    ServiceModel(token_s=0.001, attention_s=0.0),
    token_bytes=1.0,
    save_byte_s=1e-6,
    load_byte_s=1e-6,
    move_s=0.0,
)


def talk(number: int, *pauses_s: float, tool: bool = False, is_over: bool = False) -> list[Turn]:
    """A session whose prompts grow by a block of 100 tokens with each turn."""
    return [
        Turn(
            pause_s,
            tuple(1_000 * number + block for block in range(turn + 10)),
            100 * (turn + 10),
            10,
            calls_tool=tool,
            says_over=is_over and turn + 1 == len(pauses_s),
        )
        for turn, pause_s in enumerate(pauses_s)
    ]


def played(sessions: list[list[Turn]], rules: Rules, *, slots: int = 2) -> Counted:
    return World(sessions, PRICES, rules, slots=slots, file_tokens=1e6, warm_s=0.0).run()


def test_a_session_alone_computes_what_is_new() -> None:
    counted = played([talk(1, 0.0, 5.0, 5.0)], Rules())
    assert counted.ttfts_s == pytest.approx([1.0, 0.09, 0.09])  # ten tokens of each were said
    assert (counted.saves, counted.loads) == (0, 0)


def test_who_was_pushed_out_is_loaded() -> None:
    counted = played([talk(1, 0.0, 50.0), talk(2, 10.0)], Rules(), slots=1)
    assert (counted.saves, counted.loads) == (3, 1)  # the only slot is saved ahead at each end
    assert counted.written_bytes == 1_010 + 1_010 + 1_110
    assert counted.ttfts_s[-1] == pytest.approx(1_010e-6 + 0.09)


def test_what_is_over_isnt_written() -> None:
    sessions = [talk(n, 10.0 * n, is_over=True) for n in range(6)]
    assert played(sessions, Rules()).saves > 0
    assert played(sessions, Rules(over=True)).saves == 0
    assert played(sessions, Rules(tool=True)).saves > 0


def test_all_that_are_over_must_say_so() -> None:
    sessions = [talk(n, 10.0 * n) for n in range(6)]
    assert played(sessions, Rules(over=True)).saves == played(sessions, Rules()).saves
    assert played(sessions, Rules(sees_all=True)).saves == 0


def test_who_waits_for_a_tool_isnt_pushed_out() -> None:
    """One calls tools every 20 s; others pause for 1,000 s, and one of them is always newer."""
    steady = talk(1, *[20.0] * 200, tool=True)
    others = [talk(n, 7.0 * n, *[1_000.0] * 4) for n in range(2, 9)]
    blind, hearing = (played([steady, *others], Rules(tool=tool)) for tool in (False, True))
    assert hearing.loads < blind.loads
    assert sum(hearing.ttfts_s) < sum(blind.ttfts_s)


def test_no_request_is_lost() -> None:
    sessions = [talk(n, 0.1 * n, 0.0, 3.0, 0.5) for n in range(12)]
    for rules in (Rules(), Rules(over=True, tool=True), Rules(sees_all=True)):
        assert len(played(sessions, rules).ttfts_s) == 48
