"""What a headroom study is made of: settings, and how it tells how far it is."""

from collections.abc import Callable

import msgspec

from preheat.core.costs import ServiceModel

Progress = Callable[[str], None]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are tokens of KV. `worker_tokens` of each of `workers`, `alone_tokens` of a single one;
    `session_tokens` for each open session, where the trace's calendar draws sessions
    (`open_sessions` of them); then the first `uncounted_s` only fill the memory.

    `rooms`: for how many models there is room at once. `granularity_shares`: memories, by what is
    distinct in the trace.

    `loads`: the shares of time that the undisturbed fleet spends on prefill. Events are tried at
    `switches` moments; each simulation begins `warm_s` before its moment. `budget_s` are the
    GPU-seconds a worker may compute beforehand.

    Prompts are computed whole, one after the other, nothing is decoded, and arrivals don't wait
    for answers: as in the study whose tables these are. `decodes` makes it a continuous batch instead.
    """

    workers: int = 8
    worker_tokens: tuple[int, ...] = (1_000_000, 3_000_000)
    alone_tokens: tuple[int, ...] = (1_000_000, 3_000_000, 10_000_000)
    session_tokens: tuple[int, ...] = (16_000, 32_000, 64_000, 96_000, 128_000, 256_000)
    rooms: tuple[int, ...] = (3, 5)
    granularity_shares: tuple[float, ...] = (0.01, 0.05, 0.25)
    open_sessions: float | None = None
    uncounted_s: float = 21_600.0
    loads: tuple[float, ...] = (0.7, 0.9)
    switches: int = 6
    warm_s: float = 7_200.0
    budget_s: float = 60.0
    service: ServiceModel = ServiceModel()
    decodes: bool = False

    @property
    def warm_up_s(self) -> float:
        """What isn't counted at the beginning of a trace: a drawn calendar begins with nobody there."""
        return self.uncounted_s if self.open_sessions else 0.0
