"""What a headroom study is made of: settings, and how it tells how far it is."""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from preheat.core.costs import ServiceModel
from preheat.replay.side_by_side import each

Progress = Callable[[str], None]
"""Called after every simulation, with what it was."""

T = TypeVar("T")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are tokens of KV. `worker_tokens` of each of `workers`, `alone_tokens` of a single one;
    `session_tokens` for each open session, where the trace's calendar draws sessions
    (`open_sessions` of them); then the first `uncounted_s` only fill the memory.

    `rooms`: for how many models there is room at once. `capacity_shares`, `granularity_shares`:
    memories, by what is distinct in the trace.

    `loads`: the shares of time that the undisturbed fleet spends on prefill. Events are tried at
    `switches` moments; each simulation begins `warm_s` before its moment. `budget_s` are the
    GPU-seconds a worker may compute beforehand; off-peak each of them costs `off_peak_price` of one later.
    `only_events`: the names of those that are tried,
    or all; `events_alone`: on a single worker too.

    Prompts are computed whole, one after the other, nothing is decoded, and arrivals don't wait
    for answers: as in the study whose tables these are. `decodes` makes it a continuous batch instead.
    """

    workers: int = 8
    worker_tokens: tuple[int, ...] = (1_000_000, 3_000_000)
    alone_tokens: tuple[int, ...] = (1_000_000, 3_000_000, 10_000_000)
    session_tokens: tuple[int, ...] = (16_000, 32_000, 64_000, 96_000, 128_000, 256_000)
    rooms: tuple[int, ...] = (3, 5)
    capacity_shares: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.25)
    granularity_shares: tuple[float, ...] = (0.01, 0.05, 0.25)
    open_sessions: float | None = None
    uncounted_s: float = 21_600.0
    loads: tuple[float, ...] = (0.7, 0.9)
    switches: int = 6
    warm_s: float = 7_200.0
    budget_s: float = 60.0
    off_peak_price: float = 0.3
    only_events: tuple[str, ...] = ()
    events_alone: bool = True
    service: ServiceModel = ServiceModel()
    decodes: bool = False

    @property
    def warm_up_s(self) -> float:
        """What isn't counted at the beginning of a trace: a drawn calendar begins with nobody there."""
        return self.uncounted_s if self.open_sessions else 0.0


QUICK: Final = Wanted(
    worker_tokens=(3_000_000,),
    alone_tokens=(3_000_000,),
    session_tokens=(64_000,),
    rooms=(3,),
    capacity_shares=(0.05,),
    granularity_shares=(0.05,),
    loads=(0.7,),
    switches=2,
    only_events=("one restarts", "rolling deploy"),
    events_alone=False,
)
"""A first answer: one size, one load, two moments and the two commonest events."""


class Steps:
    """Tells how many of all simulations are over. It is a `Progress`."""

    def __init__(self, total: int, tell: Progress) -> None:
        self._total = total
        self._tell = tell
        self._over = 0

    def __call__(self, text: str) -> None:
        self._over += 1
        self._tell(f"{self._over} of {self._total} simulations: {text}")


def simulated(
    tasks: Mapping[str, Callable[[], T]], progress: Progress, what: str, runs: int = 1
) -> dict[str, T]:
    """Every task's result, side by side; each is `runs` simulations of `what`."""

    def tell(_: str) -> None:
        for _run in range(runs):
            progress(what)

    return each(tasks, tell)
