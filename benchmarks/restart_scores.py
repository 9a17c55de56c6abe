"""What `restart_gate` makes of the requests of its arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from preheat.core.spread import spread_of
from preheat.lab.load.exchange import Outcome

MINUTE_S = 60.0
SHARE_S = 10.0
FULL_SHARE = 0.8


class Block(msgspec.Struct):
    """What came of one arm's requests; seconds in the trace at which the restarts really began, and how
    long each took until the server was let back in."""

    outcomes: list[Outcome]
    began_s: list[float]
    took_s: list[float]


def figures(seen: Mapping[str, Sequence[Block]], apart_s: float) -> dict[str, float]:
    """Of each arm, and the ratios of their p95 TTFTs."""
    told: dict[str, float] = {}
    p95: dict[str, float] = {}
    for arm, blocks in seen.items():
        times = ttfts_s(blocks, apart_s)
        p95[arm] = spread_of(times).p95 or 0.0
        told |= {
            f"{arm}_p95_ttft_s": p95[arm],
            f"{arm}_mean_ttft_s": fmean(times),
            f"{arm}_hits": _hits(blocks, apart_s),
            f"{arm}_requests": len(times),
            f"{arm}_errors": sum(bool(one.error) for block in blocks for one in block.outcomes),
        }
        if arm != "undisturbed":
            took_s = [each for block in blocks for each in block.took_s]
            told[f"{arm}_restart_s"] = fmean(took_s)
            full_s = [each for block in blocks for each in _full_s(block)]
            told[f"{arm}_full_traffic_s"] = fmean(full_s)
            told[f"{arm}_full_traffic_most_s"] = max(full_s)
    return told | {
        "gate_p95_ratio": p95["gate"] / p95["nothing"],
        "deploy_p95_ratio_kept": p95["gate"] / p95["undisturbed"],
        "nothing_p95_ratio_undisturbed": p95["nothing"] / p95["undisturbed"],
    }


def _counted(block: Block, apart_s: float) -> list[Outcome]:
    """Within a minute of the beginning of either restart, as planned: in all arms the same."""
    first_s = block.began_s[0]
    return [
        one
        for one in block.outcomes
        if any(0.0 <= one.at_s - first_s - after < MINUTE_S for after in (0.0, apart_s))
    ]


def ttfts_s(blocks: Sequence[Block], apart_s: float) -> list[float]:
    """Of the counted requests that were answered whole."""
    return [
        one.ttft_s for block in blocks for one in _counted(block, apart_s) if one.ttft_s is not None
    ]


def _hits(blocks: Sequence[Block], apart_s: float) -> float:
    counted = [one for block in blocks for one in _counted(block, apart_s) if not one.error]
    asked = sum(one.input_tokens or 0 for one in counted)
    return sum(one.cached_tokens or 0 for one in counted) / asked


def _full_s(block: Block) -> list[float]:
    """Of each restart; until the end of the trace where full traffic never came back."""
    first_s = block.began_s[0]
    before = [one for one in block.outcomes if one.at_s < first_s]
    end_s = max(one.at_s for one in block.outcomes)
    workers = sorted({one.worker for one in block.outcomes if one.worker})
    told = []
    for worker, began_s in zip(workers, block.began_s, strict=True):
        wanted = FULL_SHARE * sum(one.worker == worker for one in before) / len(before)
        at_s = began_s
        while at_s + SHARE_S < end_s and _share(block, worker, at_s) < wanted:
            at_s += 1.0
        told.append(at_s - began_s)
    return told


def _share(block: Block, worker: str, from_s: float) -> float:
    within = [one for one in block.outcomes if from_s <= one.at_s < from_s + SHARE_S]
    return sum(one.worker == worker for one in within) / max(1, len(within))
