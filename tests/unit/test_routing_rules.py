"""What each routing rule promises."""

from collections import Counter
from typing import Any

import pytest

from preheat.core.placing import Candidate, Placing
from preheat.core.routing.aibrix import Aibrix
from preheat.core.routing.bounded_hash import BoundedHash
from preheat.core.routing.cost import Cost
from preheat.core.routing.dualmap import DualMap
from preheat.core.routing.dynamo import Dynamo
from preheat.core.routing.least_loaded import LeastLoaded
from preheat.core.routing.llm_d import LlmD
from preheat.core.routing.power_of_two import PowerOfTwo
from preheat.core.routing.production_stack import ProductionStack
from preheat.core.routing.random import Random
from preheat.core.routing.round_robin import RoundRobin
from preheat.core.routing.session import Session
from preheat.core.routing.smg import Smg
from preheat.core.routing.vllm_router import VllmRouter

BLOCK = 100


def request(*blocks: int, session: str = "", input_tokens: int = 0) -> Placing:
    return Placing(input_tokens or BLOCK * len(blocks) or 1, blocks, BLOCK, session)


def workers(*in_flight: int, **values: list[Any]) -> list[Candidate]:
    made = [Candidate(number, in_flight=count) for number, count in enumerate(in_flight)]
    for name, column in values.items():
        for worker, value in zip(made, column, strict=True):
            setattr(worker, name, value)
    return made


def test_round_robin_goes_round() -> None:
    policy = RoundRobin()
    chosen = [policy.choose(request(), workers(9, 0, 0), 0.0) for _ in range(7)]
    assert chosen == [0, 1, 2, 0, 1, 2, 0]


def test_random_is_even_and_neighbours_are_independent() -> None:
    policy = Random(seed=3)
    chosen = [policy.choose(request(), workers(0, 0, 0, 0), 0.0) for _ in range(8_000)]
    expected = 4_000 / 16
    pairs = Counter(zip(chosen[::2], chosen[1::2], strict=True))
    spread = sum((pairs[a, b] - expected) ** 2 / expected for a in range(4) for b in range(4))
    assert spread < 37.7  # chi-squared with 15 degrees of freedom, p = 0.001


def test_random_with_another_seed_chooses_otherwise() -> None:
    one, other = Random(seed=1), Random(seed=2)
    fleet = workers(0, 0, 0, 0)
    assert [one.choose(request(), fleet, 0.0) for _ in range(50)] != [
        other.choose(request(), fleet, 0.0) for _ in range(50)
    ]


def test_least_loaded_takes_the_first_of_the_least() -> None:
    assert LeastLoaded().choose(request(), workers(3, 1, 1, 2), 0.0) == 1


def test_power_of_two_draws_pairs_evenly_and_takes_the_less_loaded() -> None:
    """Of four workers the k-th least loaded wins the pairs in which nobody is less loaded."""
    policy = PowerOfTwo(seed=5)
    chosen = Counter(policy.choose(request(), workers(3, 2, 1, 0), 0.0) for _ in range(12_000))
    assert chosen[0] == 0
    for place, wins in ((3, 3), (2, 2), (1, 1)):
        assert abs(chosen[place] - 12_000 * wins / 6) < 200


def test_a_session_stays_and_a_new_one_goes_to_the_least_loaded() -> None:
    policy = Session()
    assert policy.choose(request(session="a"), workers(1, 0, 2), 0.0) == 1
    assert policy.choose(request(session="a"), workers(0, 99, 0), 1.0) == 1
    assert policy.choose(request(session="b"), workers(0, 99, 1), 1.0) == 0


def test_a_session_whose_worker_left_begins_anew_elsewhere() -> None:
    policy = Session()
    assert policy.choose(request(session="a"), workers(1, 0), 0.0) == 1
    left = [Candidate(0, in_flight=5), Candidate(2, in_flight=1)]
    assert policy.choose(request(session="a"), left, 1.0) == 1
    assert policy.choose(request(session="a"), workers(0, 0, 9), 2.0) == 2


def test_a_turn_without_a_session_name_follows_what_holds_most_of_its_prompt() -> None:
    held = workers(0, 9, 0, overlap_tokens=[10, 60, 40])
    assert Session().choose(request(input_tokens=100), held, 0.0) == 1
    trunk = workers(3, 9, 0, overlap_tokens=[50, 50, 50])
    assert Session().choose(request(input_tokens=100), trunk, 0.0) == 2


def test_cost_weighs_the_miss_by_its_factor() -> None:
    fleet = workers(0, 0, queue_s=[5.0, 0.0], miss_s=[1.0, 4.0])
    assert Cost().choose(request(), fleet, 0.0) == 1
    assert Cost(factor=2.0).choose(request(), fleet, 0.0) == 0


def test_cost_counts_the_load_from_a_lower_tier() -> None:
    fleet = workers(0, 0, load_s=[3.0, 0.0], miss_s=[0.0, 2.0])
    assert Cost().choose(request(), fleet, 0.0) == 1


# SMG -------------------------------------------------------------------------------------------


def test_smg_follows_the_worker_that_first_got_the_deepest_match() -> None:
    policy = Smg()
    assert policy.choose(request(1, 2, 3), workers(1, 0, 1), 0.0) == 1
    assert policy.choose(request(1, 2, 3, 4), workers(0, 2, 0), 1.0) == 1


def test_smg_sends_a_small_match_to_the_least_loaded() -> None:
    policy = Smg()
    policy.choose(request(1, 2), workers(1, 0, 1), 0.0)
    exactly = request(1, 2, *range(10, 18))
    assert policy.choose(exactly, workers(0, 5, 0), 1.0) == 0
    more = request(1, 2, 20, 21, 22, 23)
    assert policy.choose(more, workers(0, 5, 0), 1.0) == 1


def test_smg_forgets_the_cache_while_the_load_is_uneven() -> None:
    policy = Smg()
    policy.choose(request(1, 2), workers(1, 0, 1), 0.0)
    assert policy.choose(request(1, 2), workers(10, 74, 11), 1.0) == 1  # 64 more is not too many
    assert policy.choose(request(1, 2), workers(10, 75, 11), 1.0) == 0
    assert policy.choose(request(1, 2), workers(130, 195, 131), 1.0) == 1  # exactly 1.5 times


def test_smg_with_an_owner_that_left_takes_the_first() -> None:
    policy = Smg()
    policy.choose(request(1, 2), workers(1, 0), 0.0)
    assert policy.choose(request(1, 2), [Candidate(5, in_flight=3), Candidate(6)], 1.0) == 0


def test_vllm_router_takes_the_least_loaded_of_all_who_got_the_longest_match() -> None:
    policy = VllmRouter(abs_threshold=5)
    assert policy.choose(request(1, 2, 3), workers(1, 0, 1), 0.0) == 1
    assert policy.choose(request(1, 2, 3), workers(1, 9, 2), 1.0) == 0  # uneven: it goes elsewhere
    assert policy.choose(request(1, 2, 3), workers(3, 4, 0), 2.0) == 0
    assert policy.choose(request(1, 2, 3), workers(4, 3, 0), 3.0) == 1
    assert policy.choose(request(1, *range(10, 15)), workers(4, 3, 0), 4.0) == 2


# The others ------------------------------------------------------------------------------------


def test_production_stack_stays_among_those_who_were_sent_the_longest_beginning() -> None:
    policy = ProductionStack()
    first = policy.choose(request(1, 2, 3), workers(0, 0, 0, 0), 0.0)
    fleet = workers(*[99 if place == first else 0 for place in range(4)])
    assert {policy.choose(request(1, 2, 9), fleet, 1.0) for _ in range(20)} == {first}


def test_production_stack_without_a_match_draws_from_all() -> None:
    policy = ProductionStack()
    drawn = {policy.choose(request(number), workers(0, 0, 0), 0.0) for number in range(40)}
    assert drawn == {0, 1, 2}


def test_aibrix_takes_the_longest_match_that_is_not_too_loaded() -> None:
    held = workers(2, 1, 2, overlap_tokens=[90, 50, 0])
    assert Aibrix().choose(request(input_tokens=100), held, 0.0) == 0
    busy = workers(4, 1, 1, overlap_tokens=[90, 50, 0])
    assert Aibrix().choose(request(input_tokens=100), busy, 0.0) == 1


def test_aibrix_breaks_equal_matches_by_load_and_no_match_too() -> None:
    equal = workers(2, 1, 1, overlap_tokens=[90, 90, 0])
    assert Aibrix().choose(request(input_tokens=100), equal, 0.0) == 1
    assert Aibrix().choose(request(input_tokens=100), workers(2, 1, 0), 0.0) == 2


def test_aibrix_gate_lets_only_the_least_loaded_match() -> None:
    held = workers(20, 1, 2, 1, overlap_tokens=[90, 10, 80, 50])
    assert Aibrix(deviations=9).choose(request(input_tokens=100), held, 0.0) == 3
    open_gate = Aibrix(deviations=9, gate_gap=20)
    assert open_gate.choose(request(input_tokens=100), held, 0.0) == 0


def test_llm_d_keeps_to_who_holds_most_unless_it_would_be_too_slow() -> None:
    policy = LlmD(tokens_per_s=1_000.0)
    held = workers(0, 0, overlap_tokens=[80, 0], waiting=[9, 0], prefill_tokens=[18_000, 0])
    assert policy.choose(request(input_tokens=100), held, 0.0) == 0
    held[0].prefill_tokens = 18_001
    held[0].kv_blocks, held[0].kv_capacity_blocks = 90, 100
    assert policy.choose(request(input_tokens=100), held, 0.0) == 1


def test_llm_d_adds_up_prefix_queue_and_memory() -> None:
    """3 · 0.4 for the first; 2 · 1 for the second's shorter queue; with its memory full it loses."""
    held = workers(0, 0, overlap_tokens=[40, 0], waiting=[3, 0], kv_capacity_blocks=[100, 100])
    assert LlmD().choose(request(input_tokens=100), held, 0.0) == 1
    held[1].kv_blocks = 70
    assert LlmD().choose(request(input_tokens=100), held, 0.0) == 0


def test_dynamo_counts_blocks_to_prefill_and_blocks_that_decode() -> None:
    fleet = workers(0, 0, prefill_tokens=[1_000, 0], kv_blocks=[0, 9], overlap_tokens=[100, 0])
    assert Dynamo().choose(request(*range(5)), fleet, 0.0) == 0  # 10 + 5 - 1 = 14; 5 + 9 = 14
    fleet[0].kv_blocks = 1
    assert Dynamo().choose(request(*range(5)), fleet, 0.0) == 1
    fleet[0].loadable_tokens = 200
    assert Dynamo().choose(request(*range(5)), fleet, 0.0) == 0


def hashed(policy: Any, prefixes: int, fleet: list[Candidate]) -> list[int]:
    """Where prompts go that share block 0 and have a block and a tail of their own."""
    return [
        policy.choose(request(0, 10 + number, 10_000 + number), fleet, 0.0)
        for number in range(prefixes)
    ]


@pytest.mark.parametrize("policy", [BoundedHash, DualMap])
def test_a_shared_trunk_is_not_what_is_hashed(policy: Any) -> None:
    made = policy()
    hashed(made, 2_000, workers(*[0] * 8))
    shares = Counter(hashed(made, 2_000, workers(*[0] * 8)))
    assert len(shares) == 8
    assert max(shares.values()) < 400


@pytest.mark.parametrize("policy", [BoundedHash, DualMap])
def test_who_shares_the_block_behind_the_trunk_goes_to_one_worker(policy: Any) -> None:
    made, fleet = policy(), workers(*[0] * 8)
    hashed(made, 2_000, fleet)
    chosen = {made.choose(request(0, 9, 20_000 + number), fleet, 0.0) for number in range(5)}
    assert len(chosen) == 1


def test_bounded_hash_never_goes_over_the_bound() -> None:
    """With 15 in flight and the new one, 1.25 · 16 / 4 = 5 is the most that anyone has."""
    fleet = workers(5, 5, 5, 0)
    assert set(hashed(BoundedHash(), 50, fleet)) == {3}


def test_bounded_hash_keeps_a_prefix_where_it_was_when_others_leave() -> None:
    before = hashed(BoundedHash(), 200, workers(*[0] * 5))
    after = hashed(BoundedHash(), 200, workers(*[0] * 5)[:4])
    stayed = [(was, now) for was, now in zip(before, after, strict=True) if was != 4]
    assert all(was == now for was, now in stayed)


def test_dualmap_prefers_the_holder_until_its_target_is_at_risk() -> None:
    policy, fleet = DualMap(slo_ttft_s=5.0), workers(*[0] * 8)
    first = policy.choose(request(1, 2), fleet, 0.0)
    fleet[first].in_flight = 1
    second = policy.choose(request(1, 2), fleet, 0.0)
    assert first != second
    fleet[first].overlap_tokens = 150
    fleet[first].queue_s = 5.0
    assert policy.choose(request(1, 2), fleet, 0.0) == first
    fleet[first].queue_s = 5.1
    assert policy.choose(request(1, 2), fleet, 0.0) == second
    fleet[second].queue_s = 6.0
    assert policy.choose(request(1, 2), fleet, 0.0) == first
