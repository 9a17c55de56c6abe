"""Our policies against libCacheSim's, request by request.

libCacheSim is GPL-3.0: a tool of the tests, never imported by the package.
"""

import gzip
import lzma
import random
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path

import pytest

from preheat.core.eviction import POLICIES
from preheat.core.types import Key

libcachesim = pytest.importorskip(
    "libcachesim", reason="libcachesim, the yardstick of these tests, isn't installed"
)

THEIRS = {"lru": libcachesim.LRU, "sieve": libcachesim.Sieve}
MOST_REQUESTS = 100_000

every_policy = pytest.mark.parametrize("name", THEIRS)


def our_hits(
    name: str, names: Sequence[int], sizes: Sequence[int], capacity_bytes: int
) -> Iterator[bool]:
    """What libCacheSim's `get` does, with our policy: look up, and on a miss evict and insert."""
    policy = POLICIES[name]()
    held: dict[Key, int] = {}
    used_bytes = 0
    for now, (number, size_bytes) in enumerate(zip(names, sizes, strict=True)):
        key = Key(number.to_bytes(16, "big"))
        if key in held:
            policy.touch(key, now)
            yield True
            continue
        if size_bytes <= capacity_bytes:
            while used_bytes + size_bytes > capacity_bytes:
                victim = policy.victim(now)
                policy.remove(victim)
                used_bytes -= held.pop(victim)
            policy.insert(key, size_bytes, now)
            held[key] = size_bytes
            used_bytes += size_bytes
        yield False


def their_hits(
    name: str, names: Sequence[int], sizes: Sequence[int], capacity_bytes: int
) -> Iterator[bool]:
    cache = THEIRS[name](cache_size=capacity_bytes)
    request = libcachesim.Request()
    for number, size_bytes in zip(names, sizes, strict=True):
        request.obj_id = number
        request.obj_size = size_bytes
        yield cache.get(request)


def compare(name: str, names: Sequence[int], sizes: Sequence[int], capacity_bytes: int) -> float:
    """Our hit ratio, if every single request was decided alike."""
    ours = bytearray(our_hits(name, names, sizes, capacity_bytes))
    theirs = bytearray(their_hits(name, names, sizes, capacity_bytes))
    if ours != theirs:
        first = next(
            i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other
        )
        pytest.fail(f"request {first} of {len(names)}: ours {ours[first]}, theirs {theirs[first]}")
    return sum(ours) / len(ours)


def zipf(seed: int, length: int = 40_000, objects: int = 5_000, skew: float = 0.9) -> list[int]:
    """Object names from 1, the popular ones scattered among them."""
    rng = random.Random(seed)
    names = rng.sample(range(1, 10 * objects), objects)
    weights = list(accumulate(rank**-skew for rank in range(1, objects + 1)))
    return rng.choices(names, cum_weights=weights, k=length)


@every_policy
@pytest.mark.parametrize("capacity", [10, 250, 2_500])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_zipf_requests_of_one_size_are_decided_alike(name: str, seed: int, capacity: int) -> None:
    names = zipf(seed)
    hit_ratio = compare(name, names, [1] * len(names), capacity)
    assert 0.05 < hit_ratio < 0.9


@every_policy
@pytest.mark.parametrize("capacity_bytes", [2_000, 50_000])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_zipf_requests_of_many_sizes_are_decided_alike(
    name: str, seed: int, capacity_bytes: int
) -> None:
    names = zipf(seed)
    rng = random.Random(seed)
    size_of = {number: rng.randint(1, 1_000) for number in sorted(set(names))}
    compare(name, names, [size_of[number] for number in names], capacity_bytes)


@every_policy
def test_what_is_larger_than_the_cache_is_decided_alike(name: str) -> None:
    names = zipf(7, length=5_000)
    sizes = [200 if number % 17 == 0 else 1 + number % 50 for number in names]
    compare(name, names, sizes, 150)


def test_the_oracle_knows_every_policy_of_the_table_that_it_has() -> None:
    """A policy that libCacheSim has as well belongs into `THEIRS`."""
    known = {name.lower() for name in dir(libcachesim)}
    assert {name for name in POLICIES if name.replace("_", "") in known} <= set(THEIRS)


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


@pytest.mark.parametrize("stream", STREAMS)
@every_policy
def test_recorded_key_streams_are_decided_alike(name: str, stream: str, shared_data: Path) -> None:
    path = shared_data / "cache_traces" / stream
    if not path.is_file():
        pytest.skip(f"this key stream isn't here ({path})")
    numbers = STREAMS[stream](path)
    assert len(numbers) > 10_000
    # Dense names from 1: libCacheSim keeps 0 and very large ids for itself.
    dense: dict[int, int] = {}
    names = [dense.setdefault(number, len(dense) + 1) for number in numbers]
    for share in (100, 10):
        compare(name, names, [1] * len(names), max(2, len(dense) // share))
