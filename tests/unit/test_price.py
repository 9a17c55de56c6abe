"""μ over a trace: nothing where everything fits, something where it doesn't, more where less fits."""

import random

from preheat.replay.price import price_curve
from replay_parts import LINEAR, arrival, trace


def test_room_is_worth_more_where_there_is_less_of_it() -> None:
    chance = random.Random(1)
    prompts = [min(int(chance.paretovariate(0.7)), 60) for _ in range(1_500)]
    asked = [
        arrival(float(at), [prompt * 1_000 + place for place in range(6)])
        for at, prompt in enumerate(prompts)
    ]
    last = [
        price_curve(trace(asked), LINEAR, blocks, 1).price_gpu_s_per_gib_h[-1]
        for blocks in (12, 48, 192, 1_000)
    ]
    assert last == sorted(last, reverse=True)
    assert last[2] > last[3] == 0.0


def test_points_are_in_order_of_time_and_few() -> None:
    asked = [arrival(float(i), [i]) for i in range(5_000)]
    curve = price_curve(trace(asked), LINEAR, 50, 8)
    assert list(curve.at_s) == sorted(curve.at_s)
    assert 190 <= len(curve.at_s) <= 210
