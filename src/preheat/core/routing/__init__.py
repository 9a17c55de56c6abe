"""Which worker gets a request. A policy chooses; health, retries and sending are the driver's.

To add one: a new file here and one line in `POLICIES` (docs/adding-a-policy.md).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from preheat.core.placing import Candidate, Placing
from preheat.core.routing.aibrix import Aibrix
from preheat.core.routing.bounded_hash import BoundedHash
from preheat.core.routing.cost import Cost
from preheat.core.routing.dualmap import DualMap
from preheat.core.routing.dynamo import Dynamo
from preheat.core.routing.least_loaded import LeastLoaded
from preheat.core.routing.llm_d import LlmD
from preheat.core.routing.power_of_two import PowerOfTwo
from preheat.core.routing.preheat import Preheat
from preheat.core.routing.production_stack import ProductionStack
from preheat.core.routing.random import Random
from preheat.core.routing.round_robin import RoundRobin
from preheat.core.routing.session import Session
from preheat.core.routing.smg import Smg
from preheat.core.routing.vllm_router import VllmRouter

__all__ = ["POLICIES", "Candidate", "Placing", "RoutingPolicy"]


class RoutingPolicy(Protocol):
    """Which of these workers. Told of every request it placed, when it was finished."""

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        """The place in `candidates` (never empty) of the one that gets it; it counts as sent."""

    def finished(self, placing: Placing, number: int, now: float) -> None:
        """The request that worker `number` got has ended, well or not."""


POLICIES: Final[Mapping[str, Callable[..., RoutingPolicy]]] = {
    "aibrix": Aibrix,
    "bounded_hash": BoundedHash,
    "cost": Cost,
    "dualmap": DualMap,
    "dynamo": Dynamo,
    "least_loaded": LeastLoaded,
    "llm_d": LlmD,
    "power_of_two": PowerOfTwo,
    "preheat": Preheat,
    "production_stack": ProductionStack,
    "random": Random,
    "round_robin": RoundRobin,
    "session": Session,
    "smg": Smg,
    "vllm_router": VllmRouter,
}
