"""What a request is, as far as it foretells when its prompt is asked for again: `Traits.kind`.

Each fact becomes a level, 0 where nothing is known, and levels are mixed to one number. The edges
cut the first half of a public trace into parts of about one size: of Mooncake's chats for prompts
and answers, of Weka's coding agents for pauses.
"""

from bisect import bisect_right
from collections.abc import Hashable
from math import exp, log
from typing import Final

from preheat.core.memo import Memo

_KNOWN_SHARES: Final = (0.1, 0.7)
KNOWN_LEVELS: Final = len(_KNOWN_SHARES) + 1

_ANSWER_TOKENS: Final = (60, 300)
ANSWER_LEVELS: Final = len(_ANSWER_TOKENS) + 1

_TOOL_STOPS: Final = frozenset({"tool_use", "tool_calls", "function_call"})
"""Why an answer ended: Anthropic's word, OpenAI's, and OpenAI's old one."""
STOP_LEVELS: Final = 3

_PAUSES_S: Final = (5.0, 8.0, 14.0, 30.0)
PAUSE_LEVELS: Final = len(_PAUSES_S) + 2
_SHORTEST_PAUSE_S: Final = 0.5
_WEIGHT: Final = 0.5
_MOST_SESSIONS: Final = 65_536


def mixed(*facts: tuple[int, int]) -> int:
    """One number of facts, each a level and how many levels there are.

    >>> mixed((1, 3), (2, 6))
    8
    """
    kind = 0
    for level, levels in facts:
        kind = kind * levels + level
    return kind


def known_level(known_share: float) -> int:
    """How much of the prompt was seen before: a new text, a new turn, or a known prompt again."""
    return bisect_right(_KNOWN_SHARES, known_share)


def answer_level(output_tokens: int) -> int:
    """How long the answer was."""
    return bisect_right(_ANSWER_TOKENS, output_tokens)


def stop_level(stop: str) -> int:
    """Whether the answer ended with a tool call (2), with anything else (1), or nobody knows (0): a
    tool comes back in seconds, a person in minutes or never."""
    return 2 if stop in _TOOL_STOPS else int(bool(stop))


class Pauses:
    """How long a session's client waited, between an answer and the next request, so far.

    An exponential mean of the logarithm, which halves with each pause: sessions that read files wait
    for seconds, those that run tests for half a minute.
    """

    def __init__(self) -> None:
        self._means: Memo[Hashable, list[float]] = Memo(_MOST_SESSIONS)

    def learn(self, session: Hashable, pause_s: float) -> None:
        """The session's next request came so long after its last answer."""
        waited = log(max(_SHORTEST_PAUSE_S, pause_s))
        mean = self._means[session]
        if mean is None:
            self._means.put(session, [waited])
        else:
            mean[0] += (waited - mean[0]) * _WEIGHT

    def level(self, session: Hashable) -> int:
        """0 before the first pause, then 1 for the shortest pauses to 5 for the longest."""
        mean = self._means[session]
        return 0 if mean is None else 1 + bisect_right(_PAUSES_S, exp(mean[0]))
