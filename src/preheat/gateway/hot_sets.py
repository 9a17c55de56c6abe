"""What is hot of each engine's models, in the form in which its servers are asked for it."""

from collections.abc import Sequence
from typing import Final

from preheat.core.ledger import Ledger
from preheat.core.warmup import Outcome
from preheat.engines.dialects.calls import Prompt
from preheat.engines.warmth import Hot, Warmth
from preheat.gateway.sightings import Sightings
from preheat.gateway.upstreams import Upstreams
from preheat.stores.trunks import Trunk

_MOST: Final = 256


class HotSets:
    """Made before there are engines, to be told of them and of the sightings. Warm-ups are booked here."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._sightings: Sightings | None = None
        self._upstreams: Upstreams | None = None

    def begin(self, sightings: Sightings, upstreams: Upstreams) -> None:
        """From now on something may be hot."""
        self._sightings, self._upstreams = sightings, upstreams

    def of(self, engine: str) -> Warmth:
        """That engine's."""

        async def hot() -> Sequence[Hot]:
            if self._sightings is None or self._upstreams is None:
                return ()
            upstreams = self._upstreams
            trunks = await self._sightings.hot(_MOST)
            return [
                _hot(trunk, upstreams.alias_of(trunk.model))
                for trunk in trunks
                if upstreams.engine_for(trunk.model).name == engine
            ]

        return Warmth(hot, self._book)

    def _book(self, hot: Hot, why: str, outcome: Outcome) -> None:
        computed, took_s = outcome.computed_tokens, outcome.took_s
        self._ledger.book_warm(hot.tenant, hot.model, why, computed, took_s)


def _hot(trunk: Trunk, alias: str) -> Hot:
    return Hot(
        prompt=Prompt(model=alias, messages=trunk.messages, tools=trunk.tools),
        tenant=trunk.tenant,
        model=trunk.model,
        text_bytes=trunk.text_bytes,
        blocks=trunk.blocks,
    )
