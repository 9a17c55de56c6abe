"""What `benchmarks closure` replays by: the gateway's own rules, and the code of `preheat replay`."""

import msgspec
import pytest

pytest.importorskip("pyarrow", reason="the request log needs the extra 'log'")

from benchmarks.closure_replay import Asked, Learned, Servers, replayed
from preheat.core.costs import Errors, ServiceModel
from preheat.replay.fitting import Fitted
from preheat.replay.llamacpp import ServerSpec
from preheat.replay.shared_text import TextOverlap
from preheat.traces.arrival import Arrival, Trace

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


def test_without_being_told_requests_go_where_the_router_sends_them() -> None:
    """Alone, new prompts take turns; what one server holds goes there again, out of turn."""
    rows = [asked(10.0 * number, number) for number in range(4)]
    rows.append(msgspec.structs.replace(asked(40.0, 9), blocks=(3, 9)))
    trace = Trace(name="t", format="preheat", arrivals=[one.arrival for one in rows])
    servers = Servers(rows, KNOWN, ServerSpec(cache_bytes=0), ctx_tokens=8_192)
    found = replayed(trace, servers, 0.0)
    assert [found.prompts[number].worker for number in range(5)] == [0, 1, 0, 1, 1]
