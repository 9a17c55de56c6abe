"""Warming beforehand what requests will want: when it may be done, how far it is, what proves it.

Rules and values only. `engines.warmer` carries them out on a real server, `benchmarks.warm_foreground`
in virtual time.
"""

from preheat.core.warmup.outcome import Outcome, digest_of
from preheat.core.warmup.pacing import Busy, ChunkSize, Pace, blocked, rest_s
from preheat.core.warmup.proof import (
    Proof,
    Verdict,
    of_adapter,
    of_prefix,
    of_response,
    probing_order,
)
from preheat.core.warmup.state import Mark, Walk
from preheat.core.warmup.underway import Run, Underway

__all__ = [
    "Busy",
    "ChunkSize",
    "Mark",
    "Outcome",
    "Pace",
    "Proof",
    "Run",
    "Underway",
    "Verdict",
    "Walk",
    "blocked",
    "digest_of",
    "of_adapter",
    "of_prefix",
    "of_response",
    "probing_order",
    "rest_s",
]
