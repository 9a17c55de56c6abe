"""What the sums of a report say in words: is it much, is it little, is it a loss."""

from collections.abc import Sequence
from typing import Final

from preheat.replay.report import Lever, Rate, Saved, Summary

# How docs' headroom study speaks of a lever's share of all prefill: trunks (0.7 %) and holding
# values (2 to 5 %) are "small", routing of chats (19 to 34 %) and tiers (45 %) are "big".
SMALL_SHARE: Final = 0.05
BIG_SHARE: Final = 0.20


def summary_of(saved: Saved, rate: Rate | None = None, notes: Sequence[str] = ()) -> Summary:
    """What the sums say in words: of the run with all levers, or else of the best single one."""
    best = max(saved.levers, key=lambda lever: lever.saved_gpu_s, default=None)
    whole = saved.together or best
    if whole is None:
        return Summary(
            sentence="No lever was tried.", baseline=saved.baseline, saved_gpu_s=0, saved_share=0
        )
    money = rate.money(whole.saved_gpu_s) if rate else None
    return Summary(
        sentence=_sentence(whole.saved_share, best if best is not whole else None),
        notes=tuple(notes),
        is_small=abs(whole.saved_share) < SMALL_SHARE,
        baseline=saved.baseline,
        saved_gpu_s=whole.saved_gpu_s,
        saved_share=whole.saved_share,
        saved_money=whole.saved_money if whole.saved_money is not None else money,
        best_lever=best.name if best and best.saved_gpu_s > 0 else "",
    )


def verdict_of(share: float) -> str:
    """How a share of the prefill is spoken of.

    >>> [verdict_of(share) for share in (-0.03, 0.01, 0.12, 0.45)]
    ['a loss', 'small', 'moderate', 'big']
    """
    if share < 0:
        return "a loss"
    if share < SMALL_SHARE:
        return "small"
    return "moderate" if share < BIG_SHARE else "big"


def gap_closed(
    hits: Sequence[float], lru: Sequence[float], belady: Sequence[float], room: float = 0.02
) -> float | None:
    """Hits beyond LRU's ÷ Belady's beyond LRU's, both summed over the capacities where Belady has at
    least `room` more than LRU; None where there is none.

    >>> gap_closed([0.375, 0.55], lru=[0.25, 0.55], belady=[0.5, 0.56])
    0.5
    """
    cells = [cell for cell in zip(hits, lru, belady, strict=True) if cell[2] - cell[1] >= room]
    if not cells:
        return None
    return sum(hit - low for hit, low, _ in cells) / sum(high - low for _, low, high in cells)


def _sentence(share: float, best: Lever | None) -> str:
    percent = f"{abs(share):.1%}" if abs(share) < 0.1 else f"{abs(share):.0%}"
    verdict = verdict_of(share)
    if verdict == "a loss":
        return f"Nothing to save here: what was tried costs {percent} more."
    most = (
        f", most of it by one lever: {best.name}" if best and best.saved_share > share / 2 else ""
    )
    small = "Small here: " if verdict == "small" else ""
    return f"{small}{percent} of the GPU time for reading prompts would have been saved{most}."
