"""A request on its way through a simulated worker."""

from collections.abc import Sequence


class Job:
    """A request at a worker. Times are None until they have come."""

    __slots__ = (
        "arrived_at",
        "blocks",
        "cached_blocks",
        "cached_tokens",
        "computed_s",
        "decoded",
        "done_tokens",
        "ended_at",
        "expected_s",
        "expected_tokens",
        "first_at",
        "input_tokens",
        "kind",
        "kv_blocks",
        "load_s",
        "loaded_blocks",
        "number",
        "output_tokens",
        "preempted",
        "private",
        "refused",
        "started_at",
        "worker",
    )

    def __init__(
        self,
        number: int,
        arrived_at: float,
        blocks: Sequence[int],
        input_tokens: int,
        output_tokens: int,
        kind: int = 0,
    ) -> None:
        self.number = number
        self.arrived_at = arrived_at
        self.blocks = blocks  # the full ones
        self.input_tokens = input_tokens
        self.output_tokens = max(1, output_tokens)
        self.kind = kind
        self.worker = -1
        self.started_at: float | None = None
        self.first_at: float | None = None
        self.ended_at: float | None = None
        self.cached_blocks = 0  # in memory when it began
        self.loaded_blocks = 0
        self.cached_tokens = 0  # both, in tokens
        self.load_s = 0.0
        self.computed_s = 0.0  # seconds of prefill alone, every time it was computed
        self.expected_s = 0.0  # of it what is still to come, as far as was known
        self.expected_tokens = 0
        self.kv_blocks = 0
        self.done_tokens = 0
        self.decoded = 0
        self.private = 0
        self.preempted = 0
        self.refused = False
