"""What `benchmarks closure` replays by: the gateway's own rules, and the code of `preheat replay`."""

import random

import pytest

pytest.importorskip("pyarrow", reason="the request log needs the extra 'log'")

from benchmarks.closure_replay import Asked, Learned, Servers, least_loaded, replayed
from preheat.core.breaker import Breaker
from preheat.core.costs import Errors, ServiceModel
from preheat.engines.group import Group, Rules
from preheat.replay.fitting import Fitted
from preheat.replay.llamacpp import ServerSpec
from preheat.replay.shared_text import TextOverlap
from preheat.traces.arrival import Arrival, Trace


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


SERVICE = ServiceModel(token_s=0.01, attention_s=0.0, step_s=0.0, sequence_s=0.1, context_s=0.0)
KNOWN = Learned(Fitted(SERVICE, Errors.of([0.0]), Errors.of([0.0]), 10), TextOverlap(head_tokens=0))


def asked(at: float, key: int, *, stop: str = "stop", tokens: int = 100) -> Asked:
    arrival = Arrival(
        at=at, id=f"{at}", key=key, input_tokens=tokens, output_tokens=3, stop=stop, model="m"
    )
    return Asked(arrival, (key,), 400, "forward", "", 0)


def test_equal_requests_join_and_hit_and_what_was_cut_off_is_computed_again() -> None:
    rows = [
        *(asked(at, 1) for at in (0.0, 0.5, 9.0)),
        *(asked(at, 2, stop="length") for at in (20.0, 30.0)),
        asked(4_000.0, 1),  # its answer has expired
    ]
    trace = Trace(name="t", format="preheat", arrivals=[one.arrival for one in rows])
    spec = ServerSpec(batch_tokens=1_000, cache_bytes=0)
    servers = Servers(rows, KNOWN, spec, placed=[0, 0, 0, 1, 1, 0])
    found = replayed(trace, servers, 25.0)
    assert sorted(found.prompts) == [0, 3, 4, 5]
    first = found.prompts[0]
    assert (first.worker, first.cached_tokens) == (0, 0)
    assert first.first_at == pytest.approx(1.0)  # 100 tokens
    assert first.ended_at == pytest.approx(1.2)  # and two more of the answer
    assert found.prompts[4].cached_tokens == 99  # in the other one's slot
    assert found.prompts[5].cached_tokens == 99
    assert found.prefill_s == pytest.approx(0.02)


def test_without_being_told_requests_take_turns() -> None:
    rows = [asked(10.0 * number, number) for number in range(4)]
    trace = Trace(name="t", format="preheat", arrivals=[one.arrival for one in rows])
    servers = Servers(rows, KNOWN, ServerSpec(cache_bytes=0))
    found = replayed(trace, servers, 0.0)
    assert [found.prompts[number].worker for number in range(4)] == [0, 1, 0, 1]
