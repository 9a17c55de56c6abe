"""The sequences that a simulated worker decodes together."""

from preheat.core.costs import ServiceModel
from preheat.replay.job import Job


class Decoding:
    """Jobs that have their first token and aren't finished, in the order in which they came."""

    def __init__(self, service: ServiceModel) -> None:
        self.jobs: list[Job] = []
        self._service = service
        self._contexts = 0  # tokens of all

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, job: Job) -> None:
        """It has its first token."""
        self.jobs.append(job)
        self._contexts += job.input_tokens + job.decoded

    def youngest(self) -> Job:
        """Takes the one out that came last."""
        job = self.jobs.pop()
        self._contexts -= job.input_tokens + job.decoded
        return job

    def steps_s(self, steps: int) -> float:
        """Seconds that so many steps take; none without a sequence."""
        count = len(self.jobs)
        if not count:
            return 0.0
        service = self._service
        contexts = steps * self._contexts + count * steps * (steps - 1) // 2
        return steps * (service.step_s + service.sequence_s * count) + service.context_s * contexts

    def steps_within(self, spent_s: float, most: int) -> int:
        """How many of `most` steps have begun after so many seconds, at least one."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.steps_s(middle) < spent_s:
                low = middle + 1
            else:
                high = middle
        return low

    def steps_left(self) -> int:
        """Until the first of them is finished."""
        return min(job.output_tokens - job.decoded for job in self.jobs)

    def needs(self, steps: int, block_tokens: int) -> list[int]:
        """How many more blocks each has to have for so many steps."""
        needs = []
        for job in self.jobs:
            total = -(-(job.input_tokens + job.decoded + steps) // block_tokens)
            needs.append(max(0, total - len(job.blocks) - job.private))
        return needs

    def advance(self, steps: int) -> list[Job]:
        """So many tokens more for each; who is finished by that, and out."""
        self._contexts += steps * len(self.jobs)
        done = []
        for job in self.jobs:
            job.decoded += steps
            if job.decoded >= job.output_tokens:
                done.append(job)
        if done:
            self.jobs = [job for job in self.jobs if job.decoded < job.output_tokens]
            self._contexts -= sum(job.input_tokens + job.decoded for job in done)
        return done
