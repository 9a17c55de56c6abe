"""Our policies against libCacheSim's, request by request.

libCacheSim is GPL-3.0: a tool of the tests, never imported by the package.
"""

import gzip
import lzma
import random
import struct
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.their_wtinylfu import TheirWTinyLfu
from preheat.core.eviction import POLICIES
from preheat.replay.keys import outcomes

libcachesim = pytest.importorskip(
    "libcachesim", reason="libcachesim, the yardstick of these tests, isn't installed"
)

ALIKE = {
    "lru": libcachesim.LRU,
    "sieve": libcachesim.Sieve,
    "lfu": libcachesim.LFU,
    "s3fifo": libcachesim.S3FIFO,
}
"""They must decide every single request as ours do."""

NEAR = {"gdsf": libcachesim.GDSF}
"""Theirs turns a newcomer away that is worth less than all who are held, which a policy of ours can't."""

OTHERWISE = {
    "wtinylfu": "compared below with their sketch and their ways of counting",
    "lecar": "draws by chance, from another generator",
    "lhd": "draws by chance, from another generator",
    "lfu_da": "theirs (0.3.5) doesn't come back from `get`",
}
"""Theirs that can't be compared as they are."""

THEIRS = ALIKE | NEAR
MOST_REQUESTS = 20_000
"""Of each stream. `python -m benchmarks eviction_oracle` has a million of each."""

SMALL_QUEUE = 20
"""Below this capacity their S3-FIFO has a small queue of one, and so holds nothing at all."""

every_policy = pytest.mark.parametrize("name", ALIKE)


def our_hits(
    name: str, names: Sequence[int], sizes: Sequence[int], capacity_bytes: int
) -> bytearray:
    """What libCacheSim's `get` does, with our policy: look up, and on a miss evict and insert."""
    return outcomes(POLICIES[name](), names, sizes, None, capacity_bytes)


def their_hits(
    make: Callable[..., Any], names: Sequence[int], sizes: Sequence[int], capacity_bytes: int
) -> bytearray:
    cache = make(cache_size=capacity_bytes, hashpower=16)
    request = libcachesim.Request()
    hits = bytearray(len(names))
    for now, (number, size_bytes) in enumerate(zip(names, sizes, strict=True)):
        request.obj_id = number
        request.obj_size = size_bytes
        hits[now] = cache.get(request)
    return hits


def compare(name: str, names: Sequence[int], sizes: Sequence[int], capacity_bytes: int) -> float:
    """Our hit ratio, if every single request was decided alike."""
    ours = our_hits(name, names, sizes, capacity_bytes)
    return demand_alike(ours, their_hits(THEIRS[name], names, sizes, capacity_bytes))


def demand_alike(ours: bytearray, theirs: bytearray) -> float:
    if ours != theirs:
        first = next(
            i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other
        )
        pytest.fail(f"request {first} of {len(ours)}: ours {ours[first]}, theirs {theirs[first]}")
    return sum(ours) / len(ours)


def zipf(seed: int, length: int = 40_000, objects: int = 5_000, skew: float = 0.9) -> list[int]:
    """Object names from 1, the popular ones scattered among them."""
    rng = random.Random(seed)
    names = rng.sample(range(1, 10 * objects), objects)
    weights = list(accumulate(rank**-skew for rank in range(1, objects + 1)))
    return rng.choices(names, cum_weights=weights, k=length)


@every_policy
@pytest.mark.parametrize("capacity", [SMALL_QUEUE, 250, 2_500])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_zipf_requests_of_one_size_are_decided_alike(name: str, seed: int, capacity: int) -> None:
    names = zipf(seed)
    hit_ratio = compare(name, names, [1] * len(names), capacity)
    assert 0.05 < hit_ratio < 0.9


@pytest.mark.parametrize("name", ["lru", "sieve", "lfu"])
@pytest.mark.parametrize("capacity_bytes", [2_000, 50_000])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_zipf_requests_of_many_sizes_are_decided_alike(
    name: str, seed: int, capacity_bytes: int
) -> None:
    names = zipf(seed)
    rng = random.Random(seed)
    size_of = {number: rng.randint(1, 1_000) for number in sorted(set(names))}
    compare(name, names, [size_of[number] for number in names], capacity_bytes)


@pytest.mark.parametrize("name", ["lru", "sieve", "lfu"])
def test_what_is_larger_than_the_cache_is_decided_alike(name: str) -> None:
    names = zipf(7, length=5_000)
    sizes = [200 if number % 17 == 0 else 1 + number % 50 for number in names]
    compare(name, names, sizes, 150)


@pytest.mark.parametrize("capacity_bytes", [2_000, 50_000])
def test_where_sizes_differ_gdsf_hits_as_often(capacity_bytes: int) -> None:
    names = zipf(4)
    rng = random.Random(4)
    size_of = {number: rng.randint(1, 1_000) for number in sorted(set(names))}
    sizes = [size_of[number] for number in names]
    ours = our_hits("gdsf", names, sizes, capacity_bytes)
    theirs = their_hits(libcachesim.GDSF, names, sizes, capacity_bytes)
    assert 100 * sum(ours) / len(names) == pytest.approx(100 * sum(theirs) / len(names), abs=2.0)


def test_the_oracle_knows_every_policy_of_the_table_that_it_has() -> None:
    """A policy that libCacheSim has as well must be compared, or the reason said why not."""
    known = {name.lower() for name in dir(libcachesim)}
    theirs = {name for name in POLICIES if name.replace("_", "") in known}
    assert theirs == set(THEIRS) | set(OTHERWISE)


# The key streams of others, read as the folder's README describes them


def big_endian_integers(path: Path) -> list[int]:
    with lzma.open(path) as file:
        numbers = array("i", file.read(4 * MOST_REQUESTS))
    numbers.byteswap()
    return [number & 0xFFFF_FFFF for number in numbers]


def lines(path: Path) -> list[int]:
    with gzip.open(path, "rt") as file:
        found = (line.strip() for line in file)
        return [int(line) for line in islice(filter(str.isdigit, found), MOST_REQUESTS)]


def oracle_general(path: Path) -> list[int]:
    record = struct.Struct("<IQIq")
    with lzma.open(path) as file:
        data = file.read(record.size * MOST_REQUESTS)
    return [number for _, number, _, _ in record.iter_unpack(data)]


STREAMS = {
    "cache2k__orm-busy.trace.xz": big_endian_integers,
    "cache2k__web12.trace.xz": big_endian_integers,
    "cloud_physics__w106.trace.xz": big_endian_integers,
    "libcachesim__cloudPhysicsIO.oracleGeneral.bin.xz": oracle_general,
    "lirs__loop.trace.gz": lines,
    "lirs__multi1.trace.gz": lines,
    "lirs__multi2.trace.gz": lines,
    "lirs__ps.trace.gz": lines,
    "lirs__sprite.trace.gz": lines,
}


every_stream = pytest.mark.parametrize("stream", STREAMS)
SHARES = (0.01, 0.05, 0.1, 0.25)


def read_stream(shared_data: Path, stream: str) -> tuple[list[int], list[int]]:
    """Its names, and the capacities of which the documents speak."""
    path = shared_data / "cache_traces" / stream
    if not path.is_file():
        pytest.skip(f"this key stream isn't here ({path})")
    numbers = STREAMS[stream](path)
    assert len(numbers) > 10_000
    # Dense names from 1: libCacheSim keeps 0 and very large ids for itself.
    dense: dict[int, int] = {}
    names = [dense.setdefault(number, len(dense) + 1) for number in numbers]
    return names, [max(2, int(share * len(dense))) for share in SHARES]


@every_stream
@every_policy
def test_recorded_key_streams_are_decided_alike(name: str, stream: str, shared_data: Path) -> None:
    names, capacities = read_stream(shared_data, stream)
    for capacity in capacities:
        if name != "s3fifo" or capacity >= SMALL_QUEUE:
            compare(name, names, [1] * len(names), capacity)


@every_stream
@pytest.mark.parametrize("name", NEAR)
def test_on_recorded_key_streams_they_hit_as_often(
    name: str, stream: str, shared_data: Path
) -> None:
    names, capacities = read_stream(shared_data, stream)
    ones = [1] * len(names)
    for capacity in capacities:
        ours = our_hits(name, names, ones, capacity)
        theirs = their_hits(NEAR[name], names, ones, capacity)
        assert abs(sum(ours) - sum(theirs)) <= 0.003 * len(names)


@every_stream
def test_with_their_sketch_and_counting_wtinylfu_decides_alike(
    stream: str, shared_data: Path
) -> None:
    """Where its window holds one object at least, and its segments round evenly."""
    names, capacities = read_stream(shared_data, stream)
    for least in (100, *(capacity for capacity in capacities if capacity > 100)):
        capacity = next(n for n in range(least, least + 6) if (n - int(n * 0.01)) % 5 == 0)
        ours = outcomes(TheirWTinyLfu(capacity), names, None, None, capacity)
        demand_alike(ours, their_hits(libcachesim.WTinyLFU, names, [1] * len(names), capacity))
