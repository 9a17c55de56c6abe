"""A session stays where it began."""

from collections.abc import Sequence

from preheat.core.memo import Memo
from preheat.core.placing import Candidate, Placing

_MOST_SESSIONS = 100_000
_SAME_SESSION = 0.5  # of the prompt; more than any system prompt's share of a second turn


class Session:
    """Sticky sessions, as every load balancer has them (SGLang's `manual` by `min_load`): a new one
    goes to the worker with the fewest requests in flight, then stays however long its queue is.

    A request without a session's name is taken for a further turn where one worker holds more
    than half of its prompt.
    """

    def __init__(self) -> None:
        self._numbers: Memo[str, int] = Memo(_MOST_SESSIONS)

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        place = self._known(placing, candidates)
        if place is None:
            place = min(range(len(candidates)), key=lambda at: candidates[at].in_flight)
        if placing.session:
            self._numbers.put(placing.session, candidates[place].number)
        return place

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass

    def _known(self, placing: Placing, candidates: Sequence[Candidate]) -> int | None:
        places = range(len(candidates))
        if placing.session:
            number = self._numbers[placing.session]
            return next((at for at in places if candidates[at].number == number), None)
        best = max(places, key=lambda at: candidates[at].overlap_tokens)
        holds = candidates[best].overlap_tokens
        return best if holds > _SAME_SESSION * placing.input_tokens else None
