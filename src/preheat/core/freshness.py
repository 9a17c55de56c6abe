"""How long answers live, and what may be done with those whose life is over or nearly so."""

from math import log
from typing import Final

import msgspec

from preheat.core.types import FOREVER, Hit, Want

NEGATIVE: Final = frozenset({400, 404, 422})
"""An engine's refusals that a second asking meets again; they may be kept for a while."""

_EARLIEST: Final = 12.0  # -ln u is larger once in 160,000 draws: before that nobody need draw


class Freshness(msgspec.Struct, frozen=True):
    """How long answers live, and whether sampled ones may be reused, in one namespace.

    `stale_s` is for requests that accept stale answers, `revalidate_s` and `on_error_s` are
    RFC 5861's windows, `early` is XFetch's beta (Vattani et al., 2015), `negative_ttl_s` the life
    of an engine's refusal. `variants`: 0, sampled requests bypass the cache; 1, one answer is
    reused; k, k different answers are kept and one is drawn.
    """

    ttl_s: float = 3600.0
    max_ttl_s: float = 86_400.0
    variants: int = 0
    stale_s: float = 0.0
    revalidate_s: float = 0.0
    on_error_s: float = 0.0
    early: float = 0.0
    negative_ttl_s: float = 0.0

    @property
    def kept_s(self) -> float:
        """How long an expired answer may still be of use."""
        return max(self.stale_s, self.revalidate_s, self.on_error_s)

    def ttl_of(self, want: Want, status: int) -> float:
        """The life of an answer with this status to a request that wants this."""
        ttl_s = self.ttl_s if want.ttl_s is None else min(want.ttl_s, self.max_ttl_s)
        return ttl_s if status == 200 else min(ttl_s, self.negative_ttl_s)

    def plain_s(self, ttl_s: float, service_s: float) -> float:
        """Until this age an answer that took `service_s` is never refreshed early."""
        return ttl_s - min(ttl_s, service_s * self.early * _EARLIEST)

    def is_early(self, left_s: float, service_s: float, draw: float) -> bool:
        """XFetch's draw: whether to ask anew though the answer has `left_s` to live."""
        return -log(1.0 - draw) * service_s * self.early >= left_s

    def serves(self, hit: Hit, want: Want, now: float) -> bool:
        """RFC 9111 sections 4.2 and 5.2.1: is it fresh enough for what was asked?"""
        age_s = now - hit.stored_at
        if want.no_cache or age_s > want.max_age_s:
            return False
        left_s = hit.ttl_s - age_s
        if left_s > 0:
            return left_s >= want.min_fresh_s
        allowed_s = max(self.accepted_s(want), self.revalidate_s)
        return _may_be_stale(hit, want) and -left_s < allowed_s

    def accepted_s(self, want: Want) -> float:
        """How stale an answer this request accepts without more ado."""
        return min(want.max_stale_s, self.stale_s)

    def stands_in(self, hit: Hit, want: Want, now: float) -> bool:
        """RFC 5861's stale-if-error: may it be told where the engine gives no answer?"""
        age_s = now - hit.stored_at
        if want.no_cache or age_s > want.max_age_s or not _may_be_stale(hit, want):
            return False
        return age_s - hit.ttl_s < self.on_error_s


def _may_be_stale(hit: Hit, want: Want) -> bool:
    """RFC 9111 section 5.2.1.1: who names an age takes nothing stale, but for `max-stale`. And a
    refusal is told for the time the operator gave it, no longer."""
    is_strict = want.max_age_s < FOREVER and not want.max_stale_s
    return hit.status == 200 and not want.min_fresh_s and not is_strict
