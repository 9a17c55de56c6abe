"""What a load was answered with, added up. About 40 bytes a request, whatever their number."""

from array import array
from collections import Counter
from typing import Final

import msgspec

from preheat.core.spread import Spread, spread_of
from preheat.lab.load.exchange import Outcome

# A generator later than this at its 99th percentile has sent another load than the trace's.
LATE_S: Final = 0.010
# A server can make up words for these; past so many the rest is counted together.
_MOST_WORDS: Final = 200


class Command(msgspec.Struct):
    """A command that was run on the way; without an exit code it was ended at the load's end."""

    at_s: float
    command: str
    exit_code: int | None = None
    took_s: float = 0.0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The report, as `--json` prints it. Times in seconds."""

    requests: int
    """Those that were due: sent and unsent."""
    sent: int
    answered: int
    unsent: int
    cut: int
    """Those still open when the load was interrupted; they are neither answered nor errors."""
    errors: dict[str, int]
    statuses: dict[str, int]
    duration_s: float
    answers_per_s: float
    output_tokens_per_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    without_usage: int
    ttft_s: Spread
    e2e_s: Spread
    tpot_s: Spread
    late_s: Spread
    late_p99_s: float
    good: int
    goodput_share: float
    goodput_per_s: float
    layers: dict[str, int]
    details: dict[str, int]
    commands: list[Command]
    is_interrupted: bool
    warnings: list[str]


def _count(words: Counter[str], word: str) -> None:
    words[word if word in words or len(words) < _MOST_WORDS else "others"] += 1


class Tally:
    """Adds up outcomes as they come."""

    def __init__(self) -> None:
        self.sent = 0
        self.cut = 0
        self.duration_s = 0.0
        self.is_interrupted = False
        self.commands: list[Command] = []
        self.commands_unrun = 0
        self.answered = 0
        self.errors: Counter[str] = Counter()
        self._good = 0
        self._statuses: Counter[str] = Counter()
        self._layers: Counter[str] = Counter()
        self._details: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._without_usage = 0
        self._late_s, self._ttft_s = array("d"), array("d")
        self._e2e_s, self._tpot_s = array("d"), array("d")

    def add(self, outcome: Outcome) -> None:
        """One more; latencies and tokens are those of complete answers only."""
        self._late_s.append(outcome.late_s)
        if outcome.status:
            self._statuses[str(outcome.status)] += 1
        if outcome.error:
            self.errors[outcome.error] += 1
            return
        self.answered += 1
        self._good += outcome.is_good
        _count(self._layers, outcome.layer or "unknown")
        if outcome.detail:
            _count(self._details, outcome.detail)
        for numbers, value in (
            (self._ttft_s, outcome.ttft_s),
            (self._e2e_s, outcome.e2e_s),
            (self._tpot_s, outcome.tpot_s),
        ):
            if value is not None:
                numbers.append(value)
        self._without_usage += outcome.output_tokens is None and outcome.input_tokens is None
        for name in ("input_tokens", "cached_tokens", "output_tokens"):
            self._tokens[name] += getattr(outcome, name) or 0

    def summary(self) -> Summary:
        """The report as of now."""
        unsent = self.errors["unsent"]
        due = self.sent + unsent
        late = spread_of(self._late_s)
        return Summary(
            requests=due,
            sent=self.sent,
            answered=self.answered,
            unsent=unsent,
            cut=self.cut,
            errors={k: n for k, n in self.errors.most_common() if n and k != "unsent"},
            statuses=dict(self._statuses.most_common()),
            duration_s=self.duration_s,
            answers_per_s=self._per_s(self.answered),
            output_tokens_per_s=self._per_s(self._tokens["output_tokens"]),
            input_tokens=self._tokens["input_tokens"],
            cached_tokens=self._tokens["cached_tokens"],
            output_tokens=self._tokens["output_tokens"],
            without_usage=self._without_usage,
            ttft_s=spread_of(self._ttft_s),
            e2e_s=spread_of(self._e2e_s),
            tpot_s=spread_of(self._tpot_s),
            late_s=late,
            late_p99_s=late.p99 or 0.0,
            good=self._good,
            goodput_share=self._good / due if due else 0.0,
            goodput_per_s=self._per_s(self._good),
            layers=dict(self._layers.most_common()),
            details=dict(self._details.most_common()),
            commands=self.commands,
            is_interrupted=self.is_interrupted,
            warnings=self._warnings(late, unsent),
        )

    def _per_s(self, count: int) -> float:
        return count / self.duration_s if self.duration_s else 0.0

    def _warnings(self, late: Spread, unsent: int) -> list[str]:
        found = []
        if late.p99 is not None and late.p99 > LATE_S:
            found.append(
                f"the generator was late: p99 {late.p99 * 1_000:.0f} ms behind the trace, so the "
                "load was not the trace's; use a quieter machine, a lower --speed or several loads"
            )
        if unsent:
            found.append(
                f"{unsent} requests found too many others open and weren't sent: the server is "
                "behind; raise --concurrency-limit if it should have had them"
            )
        if self._without_usage and self.answered:
            found.append(
                f"{self._without_usage} answers told no usage, so their tokens aren't in the sums; "
                'streams need "stream_options": {"include_usage": true}'
            )
        if self.commands_unrun:
            found.append(f"{self.commands_unrun} of the commands lay after the end and weren't run")
        return found
