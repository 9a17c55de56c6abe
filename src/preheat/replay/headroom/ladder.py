"""The warm-up ladder: its arms from nothing to the clairvoyant, and which engines have the lever
that each of them needs (docs/levers.md).
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from preheat.replay.headroom import warmth
from preheat.replay.headroom.events import Event
from preheat.replay.headroom.warmth import Arm
from preheat.replay.report import Table

DRAM_TOKEN_S: Final = 6.6e-6
"""128 KiB a token at 20 GB/s (research: headroom, cost model)."""
SSD_TOKEN_S: Final = 44e-6
"""At 3 GB/s."""
NOTHING: Final = "nothing"
"""The ladder's lowest rung: memory fills by itself."""
RAMPED: Final = "nothing, ramped"
ON_DEMAND: Final = "drained to DRAM, read on demand"
OURS: Final = "ours: drained, read on demand, ramped"
"""Not refilled in the background: what requests ask for would wait behind it, on the same channel."""
OURS_SSD: Final = "ours: on SSD, read on demand"
REFILLED: Final = "drained, on demand and in the background"


class Lever(msgspec.Struct, frozen=True):
    """The engines that offer what an arm needs, and what that is."""

    engines: str
    by: str


CONNECTED: Final = "vLLM (LMCache, Mooncake), SGLang (HiCache)"
_SENT: Final = Lever("vLLM, SGLang, TGI, llama.cpp, hosted", "send prompts of a list again")
LEVERS: Final[Mapping[str, Lever]] = {
    NOTHING: Lever("any", "none"),
    RAMPED: Lever("any", "our router: a growing share of requests"),
    "snapshot from SSD": Lever("llama.cpp", "restore slot files of a disk"),
    "snapshot from DRAM": Lever("llama.cpp", "restore slot files in memory"),
    "old list, computed": _SENT,
    "frequency, computed": _SENT,
    "decayed frequency, computed": _SENT,
    "clairvoyant, computed": Lever("none: a bound", "the same, of what nobody can know"),
    REFILLED: Lever("none", "both a connector and slot files"),
    ON_DEMAND: Lever(CONNECTED, "a connector's tier that outlives the engine"),
    OURS: Lever(CONNECTED, "the same, and our router"),
    OURS_SSD: Lever(CONNECTED, "a connector's tier on a disk"),
}


def ladder(block_tokens: int, event: Event, budget_s: float = 60.0) -> dict[str, Arm]:
    """From nothing to the clairvoyant, as far as there are copies. `budget_s` are each worker's
    seconds of computing."""
    dram_s, ssd_s = DRAM_TOKEN_S * block_tokens, SSD_TOKEN_S * block_tokens
    arms: dict[str, Arm] = {NOTHING: warmth.nothing}
    if event.can_ramp:
        arms[RAMPED] = warmth.ramped(warmth.nothing)
    if event.copies != "none":
        arms["snapshot from SSD"] = warmth.restored(ssd_s)
    if event.copies == "any":
        arms["snapshot from DRAM"] = warmth.restored(dram_s)
    arms |= {
        "old list, computed": warmth.computed(warmth.by_old_frequency, budget_s),
        "frequency, computed": warmth.computed(warmth.by_frequency, budget_s),
        "decayed frequency, computed": warmth.computed(warmth.by_decayed_frequency, budget_s),
        "clairvoyant, computed": warmth.computed(warmth.by_next_use, budget_s),
    }
    if event.copies == "any":
        arms[REFILLED] = warmth.on_demand("drained", dram_s, refills=True)
        on_demand = warmth.on_demand("drained", dram_s)
        if event.can_ramp:
            arms[ON_DEMAND] = on_demand
        arms[OURS] = warmth.ramped(on_demand)  # alone a worker is given everything all the same
    elif event.copies == "disk":
        arms[OURS_SSD] = warmth.on_demand("disk", ssd_s)
    return arms


def legend(title: str, levers: Mapping[str, Lever]) -> Table:
    """Who can: hardly an arm is possible everywhere."""
    return Table(
        title=f"{title}: which engines have the lever that an arm needs",
        note="From docs/levers.md. Where an engine isn't named, the arm can't be had there.",
        columns=("arm", "engines", "lever"),
        rows=tuple((arm, one.engines, one.by) for arm, one in levers.items()),
    )
