"""A request's place at one of several equal servers, and what is told of it to the router."""

import time

from preheat.core.router import Route, Router
from preheat.core.types import Usage


class Placement:
    """From the router's choice to the request's end; whoever reads the answer reports.

    Exactly one end counts: what comes after it is passed over.
    """

    def __init__(self, router: Router, route: Route) -> None:
        self.route = route
        self.reason = b"overlap=%d, best=%d, input=%d, queue=%.3f, least=%.3f" % (
            route.overlap_tokens,
            route.best_overlap_tokens,
            route.input_tokens,
            route.queue_s,
            route.least_queue_s,
        )
        self._router = router
        self._is_over = False

    def began(self) -> None:
        """The first byte of an answer has come."""
        if not self._is_over:
            self._router.began(self.route.ticket, time.monotonic())

    def ended(self, usage: Usage | None) -> None:
        """It was answered whole."""
        if not self._is_over:
            self._is_over = True
            self._router.ended(self.route.ticket, usage, time.monotonic())

    def gone(self) -> None:
        """It was given up, refused, or failed."""
        if not self._is_over:
            self._is_over = True
            self._router.failed(self.route.ticket, time.monotonic())
