"""The rules that `benchmarks closure` replays by are the gateway's own."""

import random

import pytest

pytest.importorskip("pyarrow", reason="the request log needs the extra 'log'")

from benchmarks.closure_replay import least_loaded
from preheat.core.breaker import Breaker
from preheat.engines.group import Group, Rules


class Upstream:
    """As many requests in flight as we say."""

    def __init__(self, url: str) -> None:
        self.host, self.port = url, 1
        self.in_flight = 0
        self.has_room = True


@pytest.mark.parametrize("count", [2, 3])
def test_the_same_upstream_is_chosen_whatever_their_loads(count: int) -> None:
    made: list[Upstream] = []

    def connect(url: str) -> Upstream:
        made.append(Upstream(url))
        return made[-1]

    urls = [f"http://up-{number}" for number in range(count)]
    group = Group("up", urls, connect=connect, breaker=Breaker(), rules=Rules())
    chance, turn, chosen = random.Random(1), 0, set()
    for _ in range(1000):
        for upstream in made:
            upstream.in_flight = chance.randrange(3)
        place = least_loaded([upstream.in_flight for upstream in made], turn)
        turn = place + 1
        worker = group._choose((), only_well=False)
        assert worker is not None
        assert worker.client is made[place]
        chosen.add(place)
    assert chosen == set(range(count))
