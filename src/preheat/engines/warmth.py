"""What servers are warmed with, and who books it: told from above."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from preheat.core.warmup import Outcome, Proof
from preheat.engines.dialects.calls import Prompt

Warmed = Outcome
"""What a warm-up came to, beside other outcomes."""


class Proven(msgspec.Struct, frozen=True):
    """What a look at one server came to."""

    worker: str
    proof: Proof


class Hot(msgspec.Struct, frozen=True, kw_only=True):
    """A beginning that many share: as a server is asked for it, how long its text is, by which ids the
    router knows it, and whose it is. `model` is the clients' word for it."""

    prompt: Prompt
    tenant: str = ""
    model: str = ""
    text_bytes: int = 0
    blocks: Sequence[int] = ()


class Warmth(msgspec.Struct, frozen=True):
    """`hot` tells what is hot now, the most valuable first. `book` hears what each warm-up came to, and why
    it was made."""

    hot: Callable[[], Awaitable[Sequence[Hot]]]
    book: Callable[[Hot, str, Outcome], None]
