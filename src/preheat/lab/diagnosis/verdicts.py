"""What it means how much of a repeated prompt was cached: pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from preheat.engines.dialects.readings import most_cached
from preheat.lab.diagnosis import remedies
from preheat.lab.diagnosis.sights import Balance
from preheat.lab.doctor.finding import Finding, Severity

WARM_SHARE: Final = 0.5
"""From this share on a prompt was cached. What its block and its question take off is less."""
_PART: Final = 0.7
_TAIL_TOKENS: Final = 64
"""The question that isn't shared, and what a template puts around it."""
_FASTER: Final = 2.0
_FASTER_S: Final = 0.05
_WHY: Final = "every turn of a session computes its whole prompt again"


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen. `series`: of each beginning that was new, the cached tokens of the answers in
    turn (None: it didn't tell); `counted`: by how much the engine's own count of them grew; `native`:
    what its own API told of a repeated text; `forced`: of a repeated prompt that asked to be kept;
    `identical`: of one that is the same to its end; `added_tokens`: so many more it says that a prompt has
    than its tokenizer makes of the messages."""

    about: str
    kind: str
    prompt_tokens: int
    series: Sequence[Sequence[int | None]]
    block_tokens: int
    least_tokens: int = 0
    capacity_tokens: int | None = None
    caches: bool | None = None
    balance: Balance = "unknown"
    counted: int | None = None
    native: int | None = None
    forced: int | None = None
    identical: int | None = None
    added_tokens: int | None = None
    cold_s: float = 0.0
    warm_s: float = 0.0

    @property
    def enough(self) -> int:
        """So many tokens are a hit."""
        return max(1, int(WARM_SHARE * self.prompt_tokens))

    def is_hit(self, cached: int | None) -> bool:
        """Whether that many are."""
        return cached is not None and cached >= self.enough


def judge(seen: Reuse) -> Finding:
    """The one finding about it: the most particular cause that explains all answers."""
    first = seen.series[0]
    hits = [seen.is_hit(one) for one in first]
    if hits[0]:
        return _odd(seen)
    if most_cached(seen.prompt_tokens, seen.block_tokens) < seen.enough or (
        seen.prompt_tokens <= seen.least_tokens
    ):
        return _too_short(seen)
    if len(hits) > 1 and all(hits[1:]):
        return _hit(seen)
    if any(hits) or any(seen.is_hit(one) for series in seen.series for one in series[1:]):
        return _mixed(seen)
    if seen.caches is False:
        return _off(seen, "it says so itself")
    if all(one is None for series in seen.series for one in series):
        return _untold(seen)
    return _zero(seen)


def _zero(seen: Reuse) -> Finding:
    """It tells, and it is nothing each time."""
    told = max((one or 0) for series in seen.series for one in series)
    if seen.is_hit(seen.forced):
        return _finding(
            seen,
            "cache-prompt-off",
            "problem",
            f"a repeated prompt has {told} cached tokens, and {seen.forced} when it asks for "
            "cache_prompt: true",
            "start llama.cpp without --no-cache-prompt, or send cache_prompt: true",
        )
    if seen.balance == "several":
        return _several(seen)
    if seen.capacity_tokens is not None and seen.capacity_tokens < seen.prompt_tokens:
        return _finding(
            seen,
            "capacity",
            "problem",
            f"a prompt of {seen.prompt_tokens} tokens is longer than what its KV cache holds "
            f"({seen.capacity_tokens})",
            remedies.CAPACITY.get(seen.kind, "give its KV cache more memory"),
        )
    if seen.is_hit(seen.identical):
        return _lost(seen)
    if told >= seen.block_tokens > 1:
        return _in_part(seen, told)
    if seen.caches:
        return _none(seen)
    return _off(seen, f"cached tokens are {told} in {len(seen.series[0])} answers")


def _untold(seen: Reuse) -> Finding:
    """It never says a number."""
    if seen.balance == "several":
        return _several(seen)
    if seen.is_hit(seen.identical):  # it does tell
        return _lost(seen)
    proof = ""
    if seen.is_hit(seen.native):
        proof = f"its own API tells {seen.native} cached tokens of {seen.prompt_tokens}"
    elif seen.is_hit(seen.counted):
        proof = f"its count of cached tokens grew by {seen.counted}"
    elif seen.counted is None and _was_faster(seen):
        proof = f"a repeated prompt took {seen.warm_s:.2f} s instead of {seen.cold_s:.2f} s"
    if proof:
        return _finding(
            seen,
            "cached-tokens-hidden",
            "note" if seen.kind == "tgi" else "problem",
            f"it caches prefixes ({proof}), but its usage doesn't tell cached_tokens",
            remedies.show(seen.kind),
            why="whoever reads the usage sees zero: Preheat can't see what the engine saves",
        )
    if seen.caches and (seen.counted is not None or seen.native is not None):
        return _none(seen)
    if seen.counted is not None or seen.native is not None:
        return _off(seen, "its own count of cached tokens didn't grow")
    return _finding(
        seen,
        "cached-tokens-unknown",
        "unknown",
        "its usage doesn't tell cached_tokens, nothing else does, and a repeated prompt took "
        f"{seen.warm_s:.2f} s after {seen.cold_s:.2f} s",
        f"{remedies.show(seen.kind)}; then ask the doctor again",
    )


def _mixed(seen: Reuse) -> Finding:
    """Some were hits, others not, though all had the same beginning."""
    if seen.balance == "several":
        return _several(seen)
    clean = [all(seen.is_hit(one) for one in series[1:]) for series in seen.series]
    if seen.balance == "unknown" and not any(clean):
        return _several(seen)
    what = (
        "it has restarted meanwhile"
        if seen.balance == "restarted"
        else f"cached tokens were {_row(seen.series[0])}, from one server"
    )
    return _finding(
        seen,
        "cache-reset",
        "warning" if any(clean) else "problem",
        f"what it had cached was gone a moment later: {what}",
        "see who empties it (/reset_prefix_cache, /flush_cache, /sleep, an erased slot), whether it "
        "restarts, and whether other requests push everything out; then ask again on a quiet engine",
    )


def _several(seen: Reuse) -> Finding:
    by_pages = seen.balance == "several"
    return _finding(
        seen,
        "several-servers",
        "problem",
        "several servers answer at this address, and requests with one beginning meet them in turn: "
        + (
            "its pages are of different processes"
            if by_pages
            else "the same beginning was cached in some answers and not in others, twice over"
        )
        + f"; cached tokens were {_row(seen.series[0])}",
        remedies.ONE_BY_ONE,
    )


def _off(seen: Reuse, how: str) -> Finding:
    return _finding(
        seen,
        "prefix-cache-off",
        "problem",
        f"it computes a repeated prompt of {seen.prompt_tokens} tokens again ({how})",
        remedies.turn_on(seen.kind),
    )


def _none(seen: Reuse) -> Finding:
    """It says that it caches, and yet nothing is found again: each prompt must be another one."""
    if seen.added_tokens:
        return _finding(
            seen,
            "prompt-changed",
            "problem",
            f"a prompt has {seen.added_tokens} tokens more than its messages make, and none is found again: "
            "something on the way adds text that changes",
            "see which proxy, guard or plugin writes into prompts (a date, an id), and have it write at "
            "the end",
        )
    return _finding(
        seen,
        "no-reuse",
        "problem",
        f"its prefix caching is on, and yet nothing of a repeated prompt of {seen.prompt_tokens} tokens is "
        "found again",
        "see whether something on the way gives each request a salt of its own (--events ENDPOINT shows "
        "it) or changes prompts; some models can't cache prefixes",
    )


def _hit(seen: Reuse) -> Finding:
    told = [one or 0 for one in seen.series[0][1:]]
    most = most_cached(max(0, seen.prompt_tokens - _TAIL_TOKENS), seen.block_tokens)
    if min(told) < _PART * most:
        return _in_part(seen, min(told))
    return _finding(
        seen,
        "reuse",
        "ok",
        f"{min(told)} of {seen.prompt_tokens} tokens of a prompt with the same beginning were cached",
    )


def _in_part(seen: Reuse, told: int) -> Finding:
    return _finding(
        seen,
        "reuse-in-part",
        "warning",
        f"only {told} of {seen.prompt_tokens} tokens were cached, and nearly all could be",
        "see whether the template or something on the way puts a changing value behind the beginning, "
        "whether the model has a sliding window, and how much its KV cache holds",
    )


def _lost(seen: Reuse) -> Finding:
    return _finding(
        seen,
        "beginning-lost",
        "problem",
        f"of a prompt that is the same to its end {seen.identical} tokens were cached, of one with the same "
        "system message and another question none: the question, or something that changes with it, "
        "stands first",
        "use another --chat-template, or see what on the way writes into prompts, and have it write at the "
        "end",
    )


def _odd(seen: Reuse) -> Finding:
    return _finding(
        seen,
        "cached-tokens-wrong",
        "warning",
        f"it says {seen.series[0][0]} cached tokens of a prompt that nobody has asked before",
        "don't trust its cached tokens; update it, or see what answers in its place",
        why="hits are counted that aren't any",
    )


def _too_short(seen: Reuse) -> Finding:
    return _finding(
        seen,
        "probe-short",
        "unknown",
        f"its longest prompt lets us ask {seen.prompt_tokens} tokens, which is too few: it keeps "
        f"blocks of {seen.block_tokens}, and nothing up to {seen.least_tokens}",
        "give it a larger context, or smaller blocks",
    )


def _was_faster(seen: Reuse) -> bool:
    return seen.cold_s >= _FASTER * seen.warm_s and seen.cold_s - seen.warm_s >= _FASTER_S


def _row(told: Sequence[int | None]) -> str:
    return ", ".join("not told" if one is None else str(one) for one in told)


def _finding(
    seen: Reuse, check: str, severity: Severity, found: str, do: str = "", *, why: str = _WHY
) -> Finding:
    count = sum(len(series) for series in seen.series)
    asked = f"{count} prompts of {seen.prompt_tokens} tokens, with the same beginning"
    return Finding(check, seen.about, severity, found, "" if severity == "ok" else why, do, asked)
