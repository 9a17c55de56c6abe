"""Small traces and fleets for tests of the replay."""

from collections.abc import Iterable, Sequence

from preheat.core.costs import ServiceModel
from preheat.replay.fleet import FleetSpec
from preheat.replay.tiers import TierSpec
from preheat.replay.worker import WorkerSpec
from preheat.traces.arrival import Arrival, Trace

TOKEN_S = 0.001
LINEAR = ServiceModel(token_s=TOKEN_S, attention_s=0.0)
BLOCK = 10  # tokens


def arrival(at: float, blocks: Iterable[int], **fields: object) -> Arrival:
    """A prompt of whole blocks and one token more, so that all of them can be reused."""
    path = tuple(blocks)
    told = {"input_tokens": len(path) * BLOCK + 1, "output_tokens": 1} | fields
    return Arrival(at=at, blocks=path, **told)  # type: ignore[arg-type]  # by the tests


def trace(arrivals: Sequence[Arrival]) -> Trace:
    return Trace(name="small", format="test", arrivals=arrivals, block_tokens=BLOCK)


def fleet_spec(
    workers: int = 1,
    capacity_blocks: int = 100,
    *,
    is_shared: bool = False,
    tiers: tuple[TierSpec, ...] = (),
) -> FleetSpec:
    worker = WorkerSpec(capacity_blocks, BLOCK, step_tokens=0, step_prefills=1, tiers=tiers)
    return FleetSpec(worker, LINEAR, workers, is_shared=is_shared)
