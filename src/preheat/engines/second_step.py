"""What is told of a request that one server answers and another has computed: why there, and where its prefix is."""

import time

from preheat.core.router import Router
from preheat.core.types import Usage
from preheat.core.warmup.found import NOTHING_FOUND
from preheat.engines.kv_link import LearnerLink
from preheat.engines.placement import OnOver, Whose, reason_of
from preheat.engines.roles import Handover


class SecondStep:
    """From the first step's end to the request's.

    The first step was counted where it was placed. The second computes next to nothing, and what was fetched for
    it nobody's routing has saved: of it the router learns only that the prefix is there too.
    """

    def __init__(
        self,
        router: Router,
        handed: Handover,
        link: LearnerLink | None,
        whose: Whose,
        on_over: OnOver,
    ) -> None:
        assert handed.route is not None, "without a router there is nothing to tell"
        ticket = handed.route.ticket
        self.reason = reason_of(handed.route) + b", prefill=%b" % handed.prefiller.name.encode()
        self.warmed = NOTHING_FOUND
        self._router = router
        self._handed = handed
        self._ask = ticket.ask
        self._link = link
        self._whose = whose
        self._on_over = on_over
        self._found: int | None = None
        if handed.usage is not None:
            usage = router.counted(ticket.worker, handed.usage)
            if usage.tells_cached:
                self._found = usage.cached_tokens
                self.reason += b", found=%d" % usage.cached_tokens

    def began(self) -> None:
        """What that took says nothing about prompts."""

    def ended(self, usage: Usage | None, *, calls_tool: bool = False) -> None:  # noqa: ARG002  as above
        """The prefix lies at the second server, too."""
        decoder, ask = self._handed.decoder, self._ask
        if self._found is not None:
            prefiller = self._handed.prefiller.number
            self.warmed = self._router.warmed.used(prefiller, ask.blocks, self._found)
        self._router.learned(decoder.number, ask.blocks, ask.token_blocks, time.monotonic())
        if self._link is not None:
            self._link.sent(decoder.url, ask.blocks, ask.token_blocks)
        if self._whose.is_over:
            self._on_over(self._whose)

    def gone(self) -> None:
        """Nothing is known of the second server."""
