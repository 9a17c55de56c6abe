"""How far a warm-up is, so that it can go on where it was stopped."""

import msgspec


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one prefix at one server between two runs. No text: `prefix` is its digest.

    `slot` is llama.cpp's, None elsewhere. `at` is wall-clock seconds.
    """

    worker: str
    prefix: str
    tokens: int
    done_tokens: int
    slot: int | None = None
    at: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether it was warmed to its end."""
        return self.done_tokens >= self.tokens


class Walk(msgspec.Struct, kw_only=True):
    """One prefix on its way into a cache: `done_tokens` of `tokens` are there, of which
    `computed_tokens` had to be computed.

    >>> walk = Walk(tokens=250)
    >>> walk.end(100), walk.did(100, cached_tokens=0), walk.end(200)
    (100, 100, 250)
    """

    tokens: int
    done_tokens: int = 0
    computed_tokens: int = 0

    @property
    def is_over(self) -> bool:
        return self.done_tokens >= self.tokens

    def end(self, chunk_tokens: int) -> int:
        """Where the next chunk ends. A whole prefix is asked for once more, to see that it is there."""
        return min(self.tokens, self.done_tokens + max(1, chunk_tokens))

    def did(self, end: int, cached_tokens: int | None) -> int:
        """The prefix up to `end` was asked for; how many tokens of it were computed.

        Where the server doesn't tell, it is what wasn't done before.
        """
        had = self.done_tokens if cached_tokens is None else cached_tokens
        computed = max(0, end - had)
        self.computed_tokens += computed
        self.done_tokens = end
        return computed
