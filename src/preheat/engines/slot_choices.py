"""Whether a request is sooner answered by waiting for another, or by a file, than by computing."""

from preheat.core.costs import ServiceModel
from preheat.core.slot_ways import Prospect, quickest
from preheat.engines.slot_leaders import Wanted
from preheat.engines.slot_shelf import Found
from preheat.engines.slot_tier import SlotTier


def waits(wanted: Wanted, there: int, shared: int, leader_s: float, service: ServiceModel) -> bool:
    """Whether it waits for the one that leaves `shared` blocks of its prompt in `leader_s`; an idle slot
    has `there`."""
    had, left = (wanted.tokens * part // len(wanted.blocks) for part in (there, shared))
    prospect = Prospect(
        queue_s=wanted.queue_s,
        recompute_s=service.prefill_s(wanted.tokens - had, had),
        leader_s=leader_s,
        led_rest_s=service.prefill_s(wanted.tokens - left, left),
    )
    return quickest(prospect).way == "wait"


def loads(tier: SlotTier, file: Found, wanted: Wanted, found: int, service: ServiceModel) -> bool:
    """Whether this file is loaded, and not the prompt computed behind the `found` tokens that its slot has."""
    tokens, held = wanted.tokens, min(file.tokens, wanted.tokens - 1)
    prospect = Prospect(
        recompute_s=service.prefill_s(tokens - found, found),
        fetch_s=tier.fetch_s(file.kept),
        load_s=tier.load_s(file.kept),
        restored_rest_s=service.prefill_s(tokens - held, held),
    )
    return quickest(prospect).way == "restore"
