"""The compiled path decides what the core decides: every hit, and every victim in its order."""

import random
from pathlib import Path

import numpy as np
import pytest

from preheat.replay import compiled
from preheat.replay.compiled import PrefixStream, Use, key_stream
from preheat.traces.reading import read

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

pytestmark = pytest.mark.skipif(
    not compiled.is_available(), reason="the extra `replay` (numpy, numba) isn't installed"
)


def keys_of(requests: int, distinct: int, seed: int) -> list[int]:
    """Popular keys, scans, and rounds over a working set, with names that aren't dense."""
    chance = random.Random(seed)
    keys: list[int] = []
    while len(keys) < requests:
        start = chance.randrange(distinct)
        match chance.randrange(3):
            case 0:
                keys += [int(chance.paretovariate(0.6)) % distinct for _ in range(200)]
            case 1:
                keys += range(start, start + 80)
            case _:
                keys += list(range(start, start + 40)) * 3
    return [7 * key - 100 for key in keys[:requests]]


@pytest.mark.parametrize("capacity", [0, 1, 10, 100, 500, 10_000])
@pytest.mark.parametrize("order", ["lru", "j"])
def test_streams_of_keys_are_decided_alike(order: compiled.Order, capacity: int) -> None:
    keys = keys_of(6_000, 800, capacity)
    ours = key_stream(order, keys, capacity)
    assert ours == key_stream(order, keys, capacity, compiled=False)
    assert ours == key_stream(order, np.array(keys), capacity)
    assert bool(sum(ours.hits)) == (capacity > 0)


def stream_of(requests: int, seed: int, *, answers: bool, ties: bool) -> PrefixStream:
    """Conversations that go on, branch and end; many at one time if there may be ties."""
    chance = random.Random(seed)
    paths: list[list[int]] = [[]]
    uses: list[Use] = []
    now = 0.0
    blocks = 0
    for _ in range(requests):
        known = chance.choice(paths[-60:])
        new = chance.randrange(6)
        path = [*known[: chance.randint(0, len(known))], *range(blocks, blocks + new)]
        blocks += new
        paths.append(path)
        now += chance.choice([0.0, 0.5, 3.0]) if ties else chance.expovariate(1.0)
        over_at = now + chance.choice([0.0, 0.5, 4.0, 20.0, 90.0, 1e9])
        kind = chance.randrange(3)
        has_end = answers and chance.random() < 0.8
        uses.append(Use(now, kind, over_at, 3 + chance.randrange(4)) if has_end else Use(now, kind))
    return PrefixStream(paths[1:], uses)


@pytest.mark.parametrize("capacity", [0, 1, 10, 60, 400, 100_000])
@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_streams_of_prompts_are_decided_alike(capacity: int, answers: bool, ties: bool) -> None:
    stream = stream_of(1_500, capacity, answers=answers, ties=ties)
    ours = stream.hold(capacity)
    assert ours == stream.hold(capacity, compiled=False)
    assert stream.lru(capacity) == stream.lru(capacity, compiled=False)
    assert bool(ours.victims) == (0 < capacity < 100_000)


def test_what_was_forgotten_is_forgotten_alike() -> None:
    stream = stream_of(3_000, 5, answers=True, ties=False)
    ours = stream.hold(30, remembered=100)
    assert ours == stream.hold(30, remembered=100, compiled=False)
    assert ours != stream.hold(30)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_a_real_trace_is_decided_alike(name: str) -> None:
    path = DATA / "mooncake" / f"{name}.part1.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} isn't beside the project")
    arrivals = read(path).arrivals[:2_000]
    paths = [one.blocks[: one.input_tokens // 512] for one in arrivals]
    stream = PrefixStream(paths, [Use(one.at, one.output_tokens % 3) for one in arrivals])
    assert stream.hold(400) == stream.hold(400, compiled=False)
    assert stream.lru(400) == stream.lru(400, compiled=False)


def test_paths_and_uses_must_belong_together() -> None:
    with pytest.raises(ValueError, match="1 paths but 0 uses"):
        PrefixStream([[1]], [])
