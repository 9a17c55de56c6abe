"""Which slot a request is named, and the way its prefix comes there."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core.slot_desk import Holding, Seat, SlotDesk
from preheat.core.slot_ways import Prospect, Speed, quickest


def talk(session: str, *blocks: int, tenant: str = "t") -> Holding:
    return Holding(tenant, session, blocks, 10 * len(blocks))


def seated(desk: SlotDesk, holding: Holding, now: float) -> Seat:
    """Asked and answered."""
    seat = desk.take(holding.tenant, holding.blocks)
    assert seat is not None
    desk.ended(seat.slot, holding, now)
    return seat


def test_a_session_gets_its_slot_again() -> None:
    desk = SlotDesk(3)
    first = seated(desk, talk("a", 1, 2), 1.0)
    seated(desk, talk("b", 7, 8), 2.0)
    again = desk.take("t", (1, 2, 3))
    assert again == Seat(first.slot, 20, None)


def test_what_a_slot_loses_and_no_file_has_is_named() -> None:
    desk = SlotDesk(1)
    held = talk("a", 1, 2)
    seated(desk, held, 1.0)
    assert desk.unsaved() == [(0, held)]
    assert desk.take("t", (7, 8)) == Seat(0, 0, held)
    assert desk.unsaved() == []
    desk.ended(0, talk("b", 7, 8), 2.0)
    desk.saved(0, held)  # too late: it holds another by now
    assert desk.take("t", (1,)) == Seat(0, 0, talk("b", 7, 8))


def test_what_a_file_has_is_lost_without_regret() -> None:
    desk = SlotDesk(1)
    held = talk("a", 1, 2)
    seated(desk, held, 1.0)
    desk.saved(0, held)
    assert desk.take("t", (7, 8)) == Seat(0, 0, None)
    desk.restored(0, talk("c", 7))
    desk.ended(0, None, 2.0)
    assert desk.take("t", (7,)) == Seat(0, 0, None)  # how it ended wasn't known


def test_empty_slots_go_first_then_sessions_that_are_over_then_the_oldest() -> None:
    desk = SlotDesk(4)
    slots = [seated(desk, talk(name, place), float(place)).slot for place, name in enumerate("abc")]
    desk.over("t", "b")
    assert {one.slot for one in (desk.take("t", (90,)),) if one} == {3}
    taken = [desk.take("t", (91 + n,)) for n in range(3)]
    assert [one.slot for one in taken if one] == [slots[1], slots[0], slots[2]]
    assert taken[0] is not None
    assert taken[0].losing is None  # nobody will ask for it
    assert desk.idle == 0
    assert desk.take("t", (1,)) is None


def test_who_is_judged_to_be_over_goes_behind_who_said_it_and_is_lost_without_regret() -> None:
    desk = SlotDesk(3)
    slots = [seated(desk, talk(name, place), float(place)).slot for place, name in enumerate("abc")]
    desk.over("t", "c")
    desk.judge(lambda holding, _, paused_s: holding.session == "b" and paused_s == 9.0, 10.0)
    assert [desk.is_judged(slot) for slot in slots] == [False, True, False]
    assert [slot for slot, _ in desk.unsaved()] == [
        slots[1],
        slots[0],
    ]  # before the server is stopped
    taken = [desk.take("t", (90 + n,)) for n in range(3)]
    assert taken == [
        Seat(slots[2], 0, None),
        Seat(slots[1], 0, None),
        Seat(slots[0], 0, talk("a", 0)),
    ]


def test_who_comes_back_all_the_same_is_judged_anew() -> None:
    desk = SlotDesk(1)
    held = talk("a", 1, 2)
    seated(desk, held, 1.0)
    desk.judge(lambda *_: True, 2.0)
    assert desk.take("t", (1, 2)) == Seat(0, 20, None)
    desk.judge(lambda *_: True, 2.0)  # not while it is there
    desk.ended(0, held, 3.0)
    assert desk.take("t", (7,)) == Seat(0, 0, held)


def test_what_no_request_asks_for_yet_gets_no_slot_that_is_missed_soon() -> None:
    desk = SlotDesk(2)
    first, second = seated(desk, talk("a", 1, 2), 100.0), seated(desk, talk("b", 7, 8), 900.0)
    assert desk.spare("t", (90,), 930.0, 850.0) is None
    assert desk.spare("t", (1,), 930.0, 850.0) == Seat(first.slot, 10, talk("a", 1, 2))  # there
    assert desk.spare("t", (90,), 930.0, 0.0) is None  # within the last minute
    desk.over("t", "b")
    assert desk.spare("t", (90,), 930.0, 850.0) == Seat(second.slot, 0, None)
    assert desk.spare("t", (90,), 930.0, 0.0) is None  # all are busy
    desk.ended(first.slot, talk("a", 1, 2), 100.0)
    assert desk.spare("t", (90,), 930.0, 829.0) == Seat(first.slot, 0, talk("a", 1, 2))


def test_who_usually_pauses_long_goes_before_who_was_used_longer_ago() -> None:
    desk = SlotDesk(3)
    slots = []
    for name, (now, longer_s) in enumerate([(100.0, -2.0), (150.0, 150.0), (180.0, -2.0)]):
        seat = desk.take("t", (name,))
        assert seat is not None
        desk.ended(seat.slot, talk(str(name), name), now, longer_s)
        slots.append(seat.slot)
    assert desk.next_slot == slots[1]
    assert [slot for slot, _ in desk.unsaved()] == [slots[1], slots[0], slots[2]]
    taken = [desk.take("t", (90 + n,)) for n in range(3)]
    assert [one.slot for one in taken if one] == [slots[1], slots[0], slots[2]]


def test_a_long_sequence_isnt_cut_down_for_a_common_beginning() -> None:
    desk = SlotDesk(2)
    long = seated(desk, talk("a", 1, 2, 3, 4, 5, 6), 5.0)
    seated(desk, talk("b", 9), 1.0)
    seat = desk.take("t", (1, 2, 70))
    assert seat is not None
    assert (seat.slot, seat.found_tokens) == (1 - long.slot, 0)


def test_tenants_find_nothing_of_each_other() -> None:
    desk = SlotDesk(2)
    seated(desk, talk("a", 1, 2), 1.0)
    other = desk.take("u", (1, 2))
    assert other is not None
    assert other.found_tokens == 0


def test_a_beginning_in_common_is_a_share_of_what_the_slot_has() -> None:
    desk = SlotDesk(1)
    held = talk("a", 1, 2, 3, 4)
    seated(desk, held, 1.0)
    assert desk.take("t", (1, 2, 3, 9)) == Seat(0, 30, held)


def test_after_a_restart_all_are_empty() -> None:
    desk = SlotDesk(2)
    desk.take("t", (1,))
    desk.cleared()
    assert desk.idle == 2
    assert desk.unsaved() == []


# The way ----------------------------------------------------------------------------------------

seconds = st.floats(0.0, 100.0)


@given(seconds, seconds, seconds, seconds | st.just(inf), seconds, seconds | st.just(inf), seconds)
def test_the_way_is_the_best_of_all_by_brute_force(
    queue: float, compute: float, fetch: float, load: float, rest: float, leader: float, led: float
) -> None:
    """Every order in which a clock could go through them."""
    choice = quickest(
        Prospect(
            queue_s=queue,
            recompute_s=compute,
            fetch_s=fetch,
            load_s=load,
            restored_rest_s=rest,
            leader_s=leader,
            led_rest_s=led,
        )
    )
    ways = {"recompute": queue + compute}
    if load + rest < compute:
        ways["restore"] = max(queue, fetch) + load + rest
    if led < compute:
        ways["wait"] = max(queue, leader) + led
    assert choice.ttft_s == min(ways.values())
    assert ways[choice.way] == choice.ttft_s


def test_a_fetch_hides_behind_the_queue_and_a_load_doesnt() -> None:
    alone = quickest(Prospect(recompute_s=2.0, fetch_s=1.5, load_s=0.3, restored_rest_s=0.1))
    queued = quickest(
        Prospect(queue_s=1.5, recompute_s=2.0, fetch_s=1.5, load_s=0.3, restored_rest_s=0.1)
    )
    assert (alone.way, queued.way) == ("restore", "restore")
    assert queued.ttft_s == pytest.approx(alone.ttft_s)


def test_nothing_is_loaded_that_costs_the_engine_more_than_computing() -> None:
    assert quickest(Prospect(queue_s=50.0, recompute_s=1.0, load_s=1.1)).way == "recompute"


def test_a_speed_is_learned_and_newer_ones_count_more() -> None:
    speed = Speed(bytes_per_s=1e9, latency_s=0.01)
    assert speed.expected_s(1e9) == pytest.approx(1.01)
    for size in (10**7, 10**8, 10**9):
        speed.learn(size, 0.05 + size / 5e8)
    assert speed.latency_s == pytest.approx(0.05)
    assert 1.0 / speed.byte_s == pytest.approx(5e8)
    for _ in range(60):
        for size in (10**7, 10**9):
            speed.learn(size, 0.05 + size / 1e8)
    assert 1.0 / speed.byte_s == pytest.approx(1e8, rel=0.01)
