"""When the next piece of a warm-up may begin, and how long a piece is.

A prefill can't be called back: a server notices late that nobody waits for it any more (llama.cpp
while another slot produces: when the prefill is over). So a warm-up goes in chunks, each shorter than
what a live request may be held up, and yields between two of them.
"""

from typing import Final

import msgspec

_AIM: Final = 0.8
"""Of the slack. What is longer than expected is then mostly still within it."""
_GROWTH: Final = 2
_WEIGHT: Final = 0.3


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How a warm-up keeps out of the way.

    `slack_s` is how long a chunk may hold up a live request: what its SLO leaves beyond what it
    takes anyway. `most_load` is the share of a server in use from which no chunk begins. The first
    chunk has `first_tokens`, because nobody knows yet how fast the server is; none has fewer than
    `least_tokens`, since each costs a step whatever its size. At most `share` of the time is the
    warm-up's: a request that comes while it rests is held up by nothing.
    """

    slack_s: float = 0.25
    most_load: float = 0.5
    share: float = 1.0
    first_tokens: int = 64
    least_tokens: int = 16


class Busy(msgspec.Struct, frozen=True, kw_only=True):
    """A server's live requests at this moment, the warm-up's own left out. None: it doesn't say.

    `load` is the share of it in use, from 0 to 1: of its slots, its KV cache or its time.
    """

    running: int | None = None
    waiting: int | None = None
    load: float | None = None


def blocked(pace: Pace, busy: Busy) -> str:
    """Why no chunk may begin now; empty where one may.

    Who says nothing of its load can't be spared: there a hosted API stands, or somebody who chose so.

    >>> blocked(Pace(), Busy(running=0, waiting=0, load=0.0))
    ''
    >>> blocked(Pace(), Busy(waiting=2)), blocked(Pace(), Busy(running=1, waiting=0))
    ('2 requests wait', '1 request runs')
    """
    if busy.waiting:
        return _count(busy.waiting, "waits", "wait")
    if busy.load is not None:
        return f"{busy.load:.0%} in use" if busy.load >= pace.most_load else ""
    return _count(busy.running, "runs", "run") if busy.running else ""


def rest_s(pace: Pace, took_s: float) -> float:
    """How long to rest after a chunk that took so long.

    >>> rest_s(Pace(share=0.25), 2.0)
    6.0
    """
    return took_s * (1.0 / pace.share - 1.0)


def _count(requests: int, one: str, many: str) -> str:
    return f"1 request {one}" if requests == 1 else f"{requests} requests {many}"


class ChunkSize:
    """How many tokens to compute in the next chunk, from what the last ones took.

    Attention makes a token dearer the more stand before it, and neighbours make it dearer for a
    while; so the last chunk counts at once where it was slow, and by and by where it was fast.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._token_s = 0.0
        self._tokens = pace.first_tokens

    @property
    def tokens(self) -> int:
        """Of the next chunk."""
        return self._tokens

    def took(self, tokens: int, took_s: float) -> None:
        """A chunk of so many tokens that were really computed took so long."""
        if tokens < 1:
            return
        token_s = took_s / tokens
        mixed_s = self._token_s + _WEIGHT * (token_s - self._token_s)
        self._token_s = max(token_s, mixed_s)
        wanted = int(_AIM * self._pace.slack_s / max(self._token_s, 1e-9))
        self._tokens = max(self._pace.least_tokens, min(wanted, _GROWTH * self._tokens))
