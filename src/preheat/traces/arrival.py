"""The one record into which every trace is read, and what is known of a trace as a whole."""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

UNKNOWN: Final = -1
"""For lengths that a trace doesn't give."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request of a trace.

    `at` is in seconds from the trace's start. `blocks` are the prompt's blocks, root first; an id
    names its block together with everything before it, so equal ids are the same reusable prefix.
    The full ones are `blocks[: input_tokens // block_tokens]`, with the trace's `block_tokens`; one
    after them is partial, and no engine can reuse it. Ids and keys are whole numbers from 0, below
    2^63. `key` is equal for requests that one stored answer may
    serve, and negative where that isn't known. `size_bytes` is the stored answer's or object's.

    `think_s` is what the session's client waits between an answer and this request, negative where
    that isn't known: a closed loop needs it. `ends_session`: its client knows that no more will come.
    `kind`, `stop` and `agent` are the trace's own words for what a request is, why its answer
    ended, and who asked.
    """

    at: float
    id: str = ""
    session: str = ""
    turn: int = 0
    tenant: str = ""
    model: str = ""
    adapter: str = ""
    key: int = UNKNOWN
    size_bytes: int = 1
    input_tokens: int = UNKNOWN
    output_tokens: int = UNKNOWN
    blocks: tuple[int, ...] = ()
    think_s: float = UNKNOWN
    ttft_s: float = UNKNOWN
    service_s: float = UNKNOWN
    kind: str = ""
    stop: str = ""
    agent: str = ""
    ends_session: bool = False
    sampled: bool = False


class BadLine(msgspec.Struct, frozen=True):
    """A line that couldn't be read: where it stands (from 1) and why."""

    path: str
    line: int
    why: str


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals in order of time, and how they were had.

    `rules` are sentences: how batched times were spread, how sessions got their starts, with which
    seed. `block_tokens` is 0 where no blocks are known. `bad` holds the first lines that were
    skipped, `skipped` their number. `times` says whether `at` was measured, made by a rule, or is
    an order only (one second apart).
    """

    name: str
    format: str
    arrivals: Sequence[Arrival]
    block_tokens: int = 0
    times: Literal["measured", "rule", "order"] = "measured"
    rules: tuple[str, ...] = ()
    bad: tuple[BadLine, ...] = ()
    skipped: int = 0
