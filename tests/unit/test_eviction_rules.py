"""What sets each eviction policy apart, where no plain model of it says so."""

from collections.abc import Iterable

import pytest

from preheat.core.eviction import POLICIES, EvictionPolicy
from preheat.core.eviction.lecar import LeCar
from preheat.core.eviction.lfu import Lfu
from preheat.core.eviction.lhd import Lhd
from preheat.core.eviction.lru import Lru
from preheat.core.eviction.s3fifo import S3Fifo
from preheat.core.eviction.t_lru import TLru
from preheat.core.eviction.wtinylfu import WTinyLfu
from preheat.core.types import Traits
from preheat.replay.keys import hits


def drain(name: str, entries: Iterable[tuple[str, int, Traits]]) -> list[str]:
    """Who leaves in which order, if each came a second after the other and nobody was used."""
    policy = POLICIES[name]()
    for now, (key, size_bytes, traits) in enumerate(entries):
        policy.insert(key, size_bytes, now, traits)
    return leave(policy, len(policy))


def leave(policy: EvictionPolicy[str], count: int) -> list[str]:
    gone: list[str] = []
    for _ in range(count):
        gone.append(policy.victim(100.0))
        policy.remove(gone[-1])
    return gone


SLOW_AND_QUICK = [("slow", 1, Traits(cost_s=2.0)), ("quick", 1, Traits(cost_s=0.02))]
LARGE_AND_SMALL = [("large", 100, Traits()), ("small", 1, Traits())]


@pytest.mark.parametrize("name", ["gdsf", "lfu_plus", "semantic_lru", "lhd"])
def test_what_is_slow_to_compute_or_small_stays_longer(name: str) -> None:
    for pair, stays in ((SLOW_AND_QUICK, "slow"), (LARGE_AND_SMALL, "small")):
        assert drain(name, pair)[-1] == stays
        assert drain(name, pair[::-1])[-1] == stays


def test_the_seeds_lfu_plus_lets_the_costliest_go_first() -> None:
    assert drain("lfu_plus_as_written", SLOW_AND_QUICK)[0] == "slow"
    assert drain("lfu_plus_as_written", SLOW_AND_QUICK[::-1])[0] == "slow"


@pytest.mark.parametrize(
    ("name", "later_s", "stays"),
    [
        ("semantic_lru_as_written", 3_600.0, "old favourite"),
        ("semantic_lru_as_written", 72 * 3_600.0, "new"),
        ("semantic_lru", 3_600.0, "new"),
        ("semantic_lru", 60.0, "old favourite"),
        ("lfu_plus", 3_600.0, "new"),
        ("lfu_plus", 60.0, "old favourite"),
    ],
)
def test_how_long_a_favourite_lives_on_its_past(name: str, later_s: float, stays: str) -> None:
    policy = POLICIES[name]()
    policy.insert("old favourite", 1, 0.0)
    for now in range(1, 6):
        policy.touch("old favourite", now)
    policy.insert("new", 1, later_s)
    assert policy.victim(later_s) != stays


def test_a_use_keeps_the_seeds_semantic_lru_no_fresher() -> None:
    """Freshness is counted from the writing: ten days later, a use changes nothing of it."""
    policy = POLICIES["semantic_lru_as_written"]()
    policy.insert("used", 1, 0.0)
    policy.insert("new", 1, 864_000.0)
    policy.touch("used", 864_001.0)
    assert policy.victim(864_002.0) == "used"


# T-LRU ----------------------------------------------------------------------------------------


def tell(policy: TLru[str], session: str, blocks: int, now: float, *, known: int = 0) -> None:
    """A path of blocks of 100 tokens, the deepest first; the first `known` of them are held."""
    for block in range(blocks, 0, -1):
        key, traits = f"{session}{block}", Traits(tokens=100 * block)
        if block <= known:
            policy.touch(key, now, traits)
        else:
            policy.insert(key, 1, now, traits)


def test_what_a_conversation_can_lose_leaves_before_what_it_needs() -> None:
    """1,000 tokens may be computed and 200 are new: 800 of a history may be lost."""
    policy: TLru[str] = TLru(target_tokens=1_000, next_tokens=200, block_tokens=100)
    tell(policy, "long", 20, 0.0)
    tell(policy, "short", 5, 1.0)
    gone = leave(policy, 25)
    assert gone[:13] == [
        *(f"long{block}" for block in range(20, 12, -1)),
        *(f"short{block}" for block in range(5, 0, -1)),
    ]
    assert gone[13:] == [f"long{block}" for block in range(12, 0, -1)]


def test_a_history_that_grows_needs_more() -> None:
    policy: TLru[str] = TLru(target_tokens=1_000, next_tokens=200, block_tokens=100)
    tell(policy, "a", 8, 0.0)
    assert policy.victim(0.0) == "a8"
    tell(policy, "a", 18, 1.0, known=8)
    tell(policy, "b", 3, 2.0)
    free = [*(f"a{block}" for block in range(18, 10, -1)), "b3", "b2", "b1"]
    assert leave(policy, 11) == free
    assert policy.victim(3.0) == "a10"


# Those that learn or draw ------------------------------------------------------------------------


def lcg(seed: int) -> Iterable[int]:
    while True:
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        yield seed >> 33


def scans_and_favourites(length: int) -> list[int]:
    """Half of the requests for 40 favourites, half for what is never asked for again."""
    draws = iter(lcg(5))
    return [next(draws) % 40 if next(draws) % 2 else 1_000 + now for now in range(length)]


def moving_window(length: int) -> list[int]:
    """Few at a time, and other ones all the time; many of old are never asked for again."""
    draws = iter(lcg(6))
    return [now // 20 + next(draws) % 30 for now in range(length)]


def test_lecar_follows_the_expert_that_is_right() -> None:
    for keys, better, worse in (
        (scans_and_favourites(20_000), Lfu, Lru),
        (moving_window(20_000), Lru, Lfu),
    ):
        best = hits(better(), keys, None, None, 45).hits
        worst = hits(worse(), keys, None, None, 45).hits
        mixed = hits(LeCar(), keys, None, None, 45).hits
        assert worst < mixed
        assert mixed > worst + 0.6 * (best - worst)


@pytest.mark.parametrize("make", [Lhd, S3Fifo, WTinyLfu])
def test_scans_dont_wash_the_favourites_out(make: type) -> None:
    keys = scans_and_favourites(20_000)
    assert hits(make(), keys, None, None, 45).hits > 1.15 * hits(Lru(), keys, None, None, 45).hits


@pytest.mark.parametrize("make", [Lhd, LeCar])
def test_the_seed_decides_the_draws(make: type) -> None:
    keys = [next(draw) % 300 for draw in [iter(lcg(7))] for _ in range(4_000)]
    found = [hits(make(seed=seed), keys, None, None, 50).hits for seed in (1, 1, 2, 3)]
    assert found[0] == found[1]
    assert len(set(found)) > 1


def test_lhd_spares_few_explorers_only() -> None:
    policy: Lhd[int] = Lhd()
    for now in range(20_000):
        if len(policy) == 500:
            policy.remove(policy.victim(now))
        policy.insert(now, 1, now)
        assert sum(policy._is_explorer) == policy._explorers <= 1 + 5
