"""What a simulated worker was sent and hasn't done yet: what a router may know of its load."""

from collections.abc import Sequence

from preheat.core.costs import ServiceModel
from preheat.replay.job import Job


class Backlog:
    """Sums over the requests of one worker: prefill still to come, memory, and blocks on their way."""

    def __init__(self, service: ServiceModel) -> None:
        self.prefill_s = 0.0
        self.prefill_tokens = 0
        """Prompt tokens still to be computed, as far as is known."""
        self.kv_blocks = 0
        """What the requests hold, or will: shared blocks count for each."""
        self._service = service
        self._coming: dict[int, int] = {}

    def expect(self, job: Job, tokens: int, context: int) -> None:
        """So much of a job is still to be computed, behind so much context."""
        took_s = self._service.prefill_s(tokens, context)
        self.prefill_s += took_s - job.expected_s
        self.prefill_tokens += tokens - job.expected_tokens
        if not self.prefill_tokens:
            # and not the dust of many additions: routers compare it with others
            self.prefill_s = 0.0
        job.expected_s, job.expected_tokens = took_s, tokens

    def count_blocks(self, job: Job, blocks: int) -> None:
        """The job holds so many, or will."""
        self.kv_blocks += blocks - job.kv_blocks
        job.kv_blocks = blocks

    def coming_after(self, blocks: Sequence[int], here: int) -> int:
        """How many leading blocks are here, or will be by what was sent, of which `here` are."""
        coming = self._coming
        while here < len(blocks) and blocks[here] in coming:
            here += 1
        return here

    def will_come(self, blocks: Sequence[int]) -> None:
        """A request that waits will compute these."""
        coming = self._coming
        for block in blocks:
            coming[block] = coming.get(block, 0) + 1

    def came(self, blocks: Sequence[int]) -> None:
        """It waits no more."""
        coming = self._coming
        for block in blocks:
            left = coming[block] - 1
            if left:
                coming[block] = left
            else:
                del coming[block]
