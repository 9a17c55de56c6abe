"""Whether an engine caches prefixes, and whether it tells so. The two look alike from outside.

After the same long prompt was sent twice there are four witnesses: `cached_tokens` in the usage,
llama.cpp's `timings`, the counters at `/metrics`, and the time both took.
"""

import contextlib
import re
from math import isfinite
from typing import Any, Final

import msgspec

from preheat.lab.doctor.finding import Finding

QUERIED: Final = ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries")
HIT: Final = (
    "vllm:prefix_cache_hits",
    "vllm:gpu_prefix_cache_hits",
    "sglang:cached_tokens",
    "llamacpp:prompt_tokens_cached",
)
_SAMPLE: Final = re.compile(rb"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{[^\n]*\})? ([0-9.eE+-]+)(?: |$)")
# A warm prompt's last block and its last token are computed all the same.
_MOST_TOKENS: Final = 2**53
_WARM_SHARE: Final = 0.5
_FASTER: Final = 2.0
_FASTER_S: Final = 0.05

SHOW: Final = {
    "vllm": "start vLLM with --enable-prompt-tokens-details",
    "sglang": "start SGLang with --enable-cache-report",
    "llamacpp": "update llama.cpp: newer ones tell it in the usage",
    "tgi": "nothing: TGI has no way to tell it",
}
TURN_ON: Final = {
    "vllm": "start vLLM without --no-enable-prefix-caching; some models can't cache prefixes",
    "sglang": "start SGLang without --disable-radix-cache",
    "llamacpp": "start llama.cpp without --no-cache-prompt, and with enough slots or --cache-ram",
    "tgi": "start TGI without PREFIX_CACHING=0",
}
SHOW_ANY: Final = (
    "vLLM tells it with --enable-prompt-tokens-details, SGLang with --enable-cache-report, "
    "llama.cpp by itself; TGI can't"
)
TURN_ON_ANY: Final = (
    "turn the server's prefix caching on; where several servers stand behind this address, the "
    "second request may have met another one: give them as urls"
)
_HIDDEN_WHY: Final = (
    "Preheat can't see what the engine saves, so cached input is priced as fresh, and "
    "X-Preheat-Cached-Tokens is missing"
)
_OFF_WHY: Final = "every turn of a session computes its whole prompt again"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the witnesses say of the second request; None where one says nothing."""

    kind: str
    input_tokens: int
    told: int | None
    timings: int | None
    queried: float | None
    hit: float | None
    cold_s: float
    warm_s: float


def told_by(body: dict[str, Any]) -> int | None:
    """`cached_tokens` of an answer's usage."""
    usage = body.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def timings_of(body: dict[str, Any]) -> int | None:
    """llama.cpp's own count of tokens it had."""
    timings = body.get("timings")
    return _count(timings.get("cache_n")) if isinstance(timings, dict) else None


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return value if is_count and 0 <= value <= _MOST_TOKENS else None


def counters_in(page: bytes) -> dict[str, float]:
    """The counters of interest on a metrics page, over all labels, without `_total`."""
    found: dict[str, float] = {}
    for line in page.split(b"\n"):
        sample = _SAMPLE.match(line.rstrip())
        if sample is None:
            continue
        name = sample[1].decode().removesuffix("_total")
        if name in QUERIED or name in HIT:
            with contextlib.suppress(ValueError):
                value = float(sample[2])
                if isfinite(value):
                    found[name] = found.get(name, 0.0) + value
    return found


def grown(
    names: tuple[str, ...], before: dict[str, float], after: dict[str, float]
) -> float | None:
    """By how much the first of these counters that is there has grown; None where none is."""
    name = next((name for name in names if name in after), None)
    return after[name] - before.get(name, 0.0) if name is not None else None


def judge(about: str, seen: Seen) -> Finding:
    """What the witnesses say together."""
    enough = max(1.0, _WARM_SHARE * seen.input_tokens)
    if seen.told is not None and seen.told >= enough:
        return Finding(
            "cached-tokens",
            about,
            "ok",
            f"it tells its prefix cache: {seen.told} of {seen.input_tokens} tokens of a repeated "
            "prompt",
        )
    proof = _proof_of_cache(seen, enough)
    if proof:
        return Finding(
            "cached-tokens-hidden",
            about,
            "note" if seen.kind == "tgi" else "warning",
            f"it caches prefixes ({proof}), but its usage doesn't tell cached_tokens",
            _HIDDEN_WHY,
            SHOW.get(seen.kind, SHOW_ANY),
        )
    disproof = _proof_of_none(seen)
    if disproof:
        return Finding(
            "prefix-cache-off",
            about,
            "warning",
            f"it computed a repeated prompt of {seen.input_tokens} tokens again ({disproof})",
            _OFF_WHY,
            TURN_ON.get(seen.kind, TURN_ON_ANY),
        )
    return Finding(
        "cached-tokens-unknown",
        about,
        "warning",
        f"its usage doesn't tell cached_tokens, and a repeated prompt took {seen.warm_s:.3f} s "
        f"after {seen.cold_s:.3f} s: it may cache prefixes or not",
        _HIDDEN_WHY,
        f"{SHOW.get(seen.kind, SHOW_ANY)}; then ask the doctor again",
    )


def _proof_of_cache(seen: Seen, enough: float) -> str:
    if seen.told is not None:
        return ""  # it tells, and it is little
    if seen.timings is not None:
        return f"timings.cache_n is {seen.timings}" if seen.timings >= enough else ""
    if seen.hit is not None and seen.hit >= enough:
        return f"its counter of hits grew by {seen.hit:.0f}"
    if seen.hit is None and _was_faster(seen):
        return f"a repeated prompt took {seen.warm_s:.2f} s instead of {seen.cold_s:.2f} s"
    return ""


def _proof_of_none(seen: Seen) -> str:
    if seen.told is not None:
        return f"cached_tokens is {seen.told}"
    if seen.timings is not None:
        return f"timings.cache_n is {seen.timings}"
    if seen.queried is not None and seen.hit is not None:
        return "its counters show no hit"
    return ""


def _was_faster(seen: Seen) -> bool:
    return seen.cold_s >= _FASTER * seen.warm_s and seen.cold_s - seen.warm_s >= _FASTER_S
