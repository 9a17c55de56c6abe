"""What proves that something is warm. Nothing is believed because it was asked for.

*Proven* and *refuted* need a witness: the engine's own event, its count of cached tokens, an answer.
Where it has none the verdict is *unknown*, and that is booked too.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from preheat.core.warmup.state import Mark

Verdict = Literal["proven", "refuted", "unknown"]

PROVEN_SHARE: Final = 0.9
"""Of the warmed length. Unrelated prompts share the first 6 to 22 tokens of their template, so that
some cached tokens are no hit (seen with llama.cpp), and the last token or block is always computed."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict and the figures behind it: of `warmed_tokens`, `asked_tokens` were needed and
    `cached_tokens` there. `why` is a short sentence."""

    verdict: Verdict
    why: str
    warmed_tokens: int = 0
    asked_tokens: int = 0
    cached_tokens: int | None = None


def of_prefix(
    warmed_tokens: int,
    *,
    prompt_tokens: int,
    cached_tokens: int | None,
    block_tokens: int = 1,
    least_tokens: int = 0,
    seen_tokens: int | None = None,
) -> Proof:
    """A KV prefix, from a probe of `prompt_tokens` that asked for one token of answer.

    `seen_tokens` of it are held by the engine's own events; None where it sends none. A cache of
    whole blocks has at most floor((n - 1) / block) · block of a prompt of n tokens: more is asked of
    nobody. Prompts below `least_tokens` are never kept, which proves nothing.

    >>> of_prefix(1_000, prompt_tokens=1_000, cached_tokens=999).verdict
    'proven'
    >>> of_prefix(100, prompt_tokens=100, cached_tokens=64, block_tokens=64).verdict
    'proven'
    >>> of_prefix(1_000, prompt_tokens=1_000, cached_tokens=22).verdict
    'refuted'
    """
    wanted = _share_of(warmed_tokens)
    if seen_tokens is not None and seen_tokens >= wanted:
        return Proof(
            verdict="proven",
            why="the engine's events say so",
            warmed_tokens=warmed_tokens,
            asked_tokens=wanted,
            cached_tokens=cached_tokens,
        )
    asked = min(wanted, max(0, (prompt_tokens - 1) // block_tokens * block_tokens))
    verdict, why = _judged(asked, prompt_tokens, cached_tokens, block_tokens, least_tokens)
    return Proof(
        verdict=verdict,
        why=why,
        warmed_tokens=warmed_tokens,
        asked_tokens=asked,
        cached_tokens=cached_tokens,
    )


def _share_of(tokens: int) -> int:
    """Nine tenths, rounded up, without floats."""
    return -(-tokens * round(PROVEN_SHARE * 10) // 10)


def _judged(
    asked: int, prompt_tokens: int, cached: int | None, block_tokens: int, least_tokens: int
) -> tuple[Verdict, str]:
    if cached is None:
        return "unknown", "the engine doesn't tell cached tokens"
    if cached > prompt_tokens:
        return "unknown", f"it tells {cached} cached tokens of a prompt of {prompt_tokens}"
    if asked == 0:
        return "unknown", f"a prompt of {prompt_tokens} tokens fills no block of {block_tokens}"
    if cached >= asked:
        return "proven", f"{cached} tokens were cached"
    if prompt_tokens < least_tokens:
        return "unknown", f"nothing under {least_tokens} tokens is kept there"
    return "refuted", f"{cached} tokens were cached where {asked} were warmed"


def of_adapter(name: str, listed: Sequence[str] | None, *, answers: bool | None) -> Proof:
    """An adapter: loaded, and it answers under its name. None: that couldn't be asked.

    >>> of_adapter("sql", ["sql"], answers=True).verdict, of_adapter("sql", [], answers=None).verdict
    ('proven', 'refuted')
    """
    if answers is False:
        return Proof(verdict="refuted", why=f"nothing answers under the name {name}")
    if listed is not None and name not in listed:
        return Proof(verdict="refuted", why=f"{name} isn't among its adapters")
    if answers is None or listed is None:
        missing = "its adapters" if listed is None else "an answer"
        return Proof(verdict="unknown", why=f"it couldn't be asked for {missing}")
    return Proof(verdict="proven", why="it is loaded and answers")


def of_response(
    stored_form: bytes, canonical_form: bytes, *, stored: bytes, probed: bytes | None
) -> Proof:
    """A stored answer: it lies under the form of the request that it is an answer to, and a greedy
    probe says the same. `probed` is None where none was made.

    >>> of_response(b"q", b"q", stored=b"A", probed=b"A").verdict
    'proven'
    """
    if stored_form != canonical_form:
        return Proof(verdict="refuted", why="it is stored under another request's form")
    if probed is None:
        return Proof(verdict="unknown", why="no greedy probe was made")
    if probed != stored:
        return Proof(verdict="refuted", why="a greedy probe answers otherwise")
    return Proof(verdict="proven", why="form and greedy probe agree")


def probing_order(
    marks: Sequence[Mark | None], slot_tokens: dict[int, int] | None = None
) -> list[int]:
    """The order in which to ask for prefixes, as indices.

    A prefix that isn't there is computed by the very question, and may push out one that is. So those
    come first that probably are there: whole ones whose slot still holds as many tokens, newest
    first. `slot_tokens` is what each of llama.cpp's slots holds now; None elsewhere.
    """

    def doubt(index: int) -> tuple[int, float, int]:
        mark = marks[index]
        if mark is None:
            return 2, 0.0, index
        is_there = mark.is_whole and (
            slot_tokens is None
            or mark.slot is None
            or slot_tokens.get(mark.slot, 0) >= _share_of(mark.tokens)
        )
        return (0 if is_there else 1), -mark.at, index

    return sorted(range(len(marks)), key=doubt)
