"""What the sums of a report say in words: is it much, is it little, is it a loss, is it noise."""

from collections.abc import Sequence
from math import floor, log10
from typing import Final

import msgspec

from preheat.replay.report import Latency, Lever, Rate, Saved, Summary

# How docs' headroom study speaks of a lever's share of all prefill: trunks (0.7 %) and holding
# values (2 to 5 %) are "small", routing of chats (19 to 34 %) and tiers (45 %) are "big".
SMALL_SHARE: Final = 0.05
BIG_SHARE: Final = 0.20
SMALL_FLEET_SHARE: Final = 0.01
"""Of the time of all GPUs: who saves less buys no GPU less."""
SCHEDULE_SHARE: Final = 0.002
"""Of the baseline's prefill: by so much another schedule of the same requests changes what it finds in memory."""
LATER_SHARE: Final = 0.05
"""First tokens that come so much later are told with the saving."""
_NOISE: Final = 1e-6  # sums of the same seconds in another order differ by less
_UNFELT_S: Final = 0.001
_CLEARLY: Final = 1.25  # the best lever by the second best
_WORDS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


class Fleet(msgspec.Struct, frozen=True):
    """So many GPUs for so many seconds."""

    workers: int
    span_s: float


def net(base_s: float, other_s: float) -> float:
    """What the other saves, in seconds; what is rounding is nothing.

    >>> net(3.0, 2.0), net(3.0, 3.0 + 1e-12), net(0.0, 1e-12)
    (1.0, 0.0, 0.0)
    """
    saved_s = base_s - other_s
    return saved_s if base_s > 0 and abs(saved_s) >= _NOISE * base_s else 0.0


def summary_of(
    saved: Saved,
    rate: Rate | None = None,
    notes: Sequence[str] = (),
    *,
    fleet: Fleet | None = None,
    latency: Latency | None = None,
) -> Summary:
    """What the sums say in words: of the run with all levers, or else of the best single one.

    Beside the share of prefill stands that of the fleet's whole time, where it is known, and what
    happened to waits, where they got worse.
    """
    levers = sorted(saved.levers, key=lambda lever: -lever.saved_gpu_s)
    whole = saved.together or next(iter(levers), None)
    if whole is None:
        return Summary(
            sentence="No lever was tried.", baseline=saved.baseline, saved_gpu_s=0, saved_share=0
        )
    money = rate.money(whole.saved_gpu_s) if rate else None
    gpu_s = fleet.workers * fleet.span_s if fleet else 0.0
    fleet_share = whole.saved_gpu_s / gpu_s if gpu_s > 0 else None
    is_idle = fleet_share is not None and abs(fleet_share) < SMALL_FLEET_SHARE
    told = _sentence(whole, fleet if is_idle else None)
    most = _most(whole, levers) if whole is saved.together and whole.saved_gpu_s > 0 else ""
    return Summary(
        sentence=f"{told}{most}{_later(latency)}.",
        notes=tuple(notes),
        is_small=abs(whole.saved_share) < SMALL_SHARE or is_idle,
        baseline=saved.baseline,
        saved_gpu_s=whole.saved_gpu_s,
        saved_share=whole.saved_share,
        saved_money=whole.saved_money if whole.saved_money is not None else money,
        fleet_share=fleet_share,
        best_lever=levers[0].name if levers and levers[0].saved_gpu_s > 0 else "",
    )


def without_prompts(latency: Latency | None, baseline: str) -> Summary:
    """What is said of a trace that shows no repeats, because it has neither blocks nor keys."""
    sentence = "This trace can't say what a cache would save: it has no prompts"
    before, after = _ends(latency)
    if latency is None:
        sentence = f"{sentence}, and its times are only an order."
    else:
        sentence = f"{sentence}. Only waits can be compared."
        if before is not None and after is not None:
            sentence += _effect(before, after)
    return Summary(sentence=sentence, baseline=baseline)


def nothing_served(requests: int, worker_tokens: int, baseline: str) -> Summary:
    """What is said where every request was refused: nothing was saved, and nothing could be."""
    sentence = (
        f"Nothing could be served: each of the {requests:,} requests is longer, prompt and answer, than "
        f"the {worker_tokens:,} tokens that a worker's memory holds. Give workers more."
    )
    return Summary(sentence=sentence, baseline=baseline)


def verdict_of(share: float) -> str:
    """How a share of the prefill is spoken of.

    >>> [verdict_of(share) for share in (-0.03, 0.0, 0.01, 0.12, 0.45)]
    ['a loss', 'nothing', 'small', 'moderate', 'big']
    """
    if -SCHEDULE_SHARE < share <= 0:
        return "nothing"
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


def figure(value: float) -> str:
    """A sum as it is read: whole from 10 on, two significant digits below.

    >>> figure(41_846.2), figure(1.23), figure(0.00234), figure(-0.0)
    ('41,846', '1.2', '0.0023', '0')
    """
    if value == 0 or abs(value) >= 9.95:
        return f"{value or 0:,.0f}"
    return f"{value:.{1 - floor(log10(abs(value)))}f}"


def percent(share: float) -> str:
    """A share as it is read; a loss so small that only the schedule differs is none.

    >>> percent(0.46), percent(0.031), percent(0.0001), percent(-0.0012), percent(-0.03)
    ('46%', '3.1%', '0.01%', '≈ 0', '-3.0%')
    """
    if -SCHEDULE_SHARE < share < 0:
        return "≈ 0"
    if 0 < share < 0.001:
        return f"{figure(100 * share).rstrip('0')}%"
    return f"{share:.1%}" if share and abs(share) < 0.0995 else f"{share or 0:.0%}"


def rough_tokens(count: float) -> str:
    """A number of tokens as it is read.

    >>> [rough_tokens(count) for count in (155, 6_300, 999_960, 1_200_000, 40_000_000)]
    ['155', '6.3k', '1M', '1.2M', '40M']
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def span(seconds: float) -> str:
    """How long something took, in words.

    >>> span(1_640), span(90), span(7_200), span(1)
    ('27 minutes', '90 seconds', '2 hours', '1 second')
    """
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{_short(seconds / size)} {unit}"
    return "1 second" if seconds == 1 else f"{_short(seconds)} seconds"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"


def _sentence(whole: Lever, fleet: Fleet | None) -> str:
    """Without its full stop. `fleet` is given where its time makes the saving little."""
    verdict = verdict_of(whole.saved_share)
    if verdict == "nothing":
        by = f"by less than {percent(SCHEDULE_SHARE)} of it" if whole.saved_gpu_s else "by nothing"
        return f"Nothing to save here: what was tried changes prefill {by}"
    if verdict == "a loss":
        return f"Nothing to save here: what was tried costs {percent(-whole.saved_share)} more"
    if fleet is None:
        small = "Small here: " if verdict == "small" else ""
        share = percent(whole.saved_share)
        return f"{small}{share} of the GPU time for reading prompts would have been saved"
    share = percent(whole.saved_gpu_s / (fleet.workers * fleet.span_s))
    number = _WORDS[fleet.workers] if fleet.workers < len(_WORDS) else f"{fleet.workers:,}"
    whose = f"{number} GPU's" if fleet.workers == 1 else f"{number} GPUs'"
    return (
        f"Small here: {figure(whole.saved_gpu_s)} GPU-seconds in {span(fleet.span_s)}, {share} of "
        f"{whose} time; "
        f"of the prefill that the engines' own caches leave, {percent(whole.saved_share)}"
    )


def _most(whole: Lever, levers: Sequence[Lever]) -> str:
    """Which lever does it, if one alone does, or which two."""
    paying = [lever for lever in levers if lever.saved_share > SCHEDULE_SHARE]
    if len(levers) < 2 or not paying:
        return ""
    best, *others = paying
    second = others[0].saved_gpu_s if others else 0.0
    if best.saved_gpu_s > whole.saved_gpu_s / 2 and best.saved_gpu_s > _CLEARLY * second:
        return f", most of it by one lever: {best.name}"
    named = " and ".join(f"{one.name} {percent(one.saved_share)}" for one in paying[:2])
    return f" ({named}, {'each ' if others else ''}alone)"


def _later(latency: Latency | None) -> str:
    """Waits that got worse by the same levers: p95, or else p99."""
    if latency is None:
        return ""
    for place in ("p95_s", "p99_s"):
        before, after = _ends(latency, place)
        if before is None or after is None:
            continue
        if after > (1 + LATER_SHARE) * before and after - before > _UNFELT_S:
            waits = f"{_seconds(before)} → {_seconds(after)} s"
            return f", but first tokens came later: {place[:3]} {waits}"
    return ""


def _effect(before: float, after: float) -> str:
    """A sentence on what routing does to p99 of waits."""
    if abs(after - before) <= max(_UNFELT_S, LATER_SHARE * before):
        return f" Routing hardly changes p99 of the first token: {_seconds(after)} s."
    return (
        f" By routing, p99 of the first token goes from {_seconds(before)} to {_seconds(after)} s."
    )


def _ends(latency: Latency | None, place: str = "p99_s") -> tuple[float | None, float | None]:
    """The baseline's wait and that with all levers."""
    arms = latency.arms if latency else ()
    waits = {arm.role: arm.ttft for arm in arms if arm.ttft is not None}
    before, after = (getattr(waits.get(role), place, None) for role in ("baseline", "ours"))
    return before, after


def _seconds(wait: float) -> str:
    """To hundredths, short ones to two digits, long ones to seconds.

    >>> _seconds(0.54), _seconds(0.0042), _seconds(1_234.5)
    ('0.54', '0.0042', '1,234')
    """
    if 0 < wait < 0.1:
        return figure(wait)
    return f"{wait:,.0f}" if wait >= 99.5 else f"{wait:.2f}"
