"""A request's place at one of several equal servers, and what is told of it to the router."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from preheat.core.router import Route, Router
from preheat.core.types import SessionState, Usage
from preheat.core.warmup.found import NOTHING_FOUND
from preheat.engines.followers import Followers
from preheat.engines.slot_keeper import OVER, SlotKeeper
from preheat.engines.slot_leaders import Seated, Wanted
from preheat.errors import EngineError
from preheat.wire.splice import insert_field

_SEATED: Final = frozenset({b"/chat/completions", b"/completions"})
"""What llama.cpp takes a slot's number with."""


class _Body(msgspec.Struct):
    """Of a body: whether the client has named a slot itself, or wants what needs several, or others'
    weights."""

    id_slot: msgspec.Raw = msgspec.Raw()
    lora: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()


_BODY: Final = msgspec.json.Decoder(_Body)


class Whose(msgspec.Struct, frozen=True):
    """Whose request it is, and what the client says of its session: `tool`, that a tool runs next,
    `over`, that it was the last."""

    tenant: str = ""
    session: str = ""
    state: SessionState = ""

    @property
    def is_over(self) -> bool:
        """Whether its session won't come back."""
        return self.state == OVER


OnOver = Callable[[Whose], None]
"""Told whose session has had its last answer."""


class Placement:
    """From the router's choice to the request's end; whoever reads the answer reports.

    Exactly one end counts: what comes after it is passed over.
    """

    def __init__(
        self,
        router: Router,
        route: Route,
        followers: Followers,
        whose: Whose,
        on_over: OnOver,
    ) -> None:
        self.route = route
        self.reason = reason_of(route)
        self._router = router
        self._followers = followers
        self._whose = whose
        self._on_over = on_over
        self._keeper: SlotKeeper | None = None
        self._seated: Seated | None = None
        self._is_over = False
        self.warmed = NOTHING_FOUND
        self.adapter = ""  # that it needs there
        self.loads_adapter = False  # before it is sent

    def needs(self, adapter: str, *, is_held: bool) -> None:
        """It is for that one, which the server has, or has to load first."""
        self.adapter, self.loads_adapter = adapter, not is_held
        self.reason += b", adapter=held" if is_held else b", adapter=load"

    async def loaded(self, load: Callable[[], Awaitable[None]]) -> None:
        """Once its adapter is there. Raises EngineError."""
        began_at = time.monotonic()
        await load()
        self._router.waited(self.route.ticket, time.monotonic() - began_at)

    async def ready(
        self, keeper: SlotKeeper | None, path: bytes, body: bytes, limit_s: float
    ) -> bytes:
        """The body to send, as soon as it should be sent: behind one that computes the same prefix,
        and, where a keeper names the slots, once it has one. Raises EngineError where none comes
        free in time."""
        if keeper is None or path not in _SEATED or not _may_be_seated(body):
            self._keeper = keeper  # it takes a slot of the server's choice
            await self._followers.hold(self.route)
            return body
        ask = self.route.ticket.ask
        wanted = Wanted(
            self._whose.tenant,
            self._whose.session,
            ask.blocks,
            self.route.input_tokens,
            self._router.expected_s(self.route.ticket),
            self.route.queue_s,
        )
        try:
            async with asyncio.timeout(limit_s):
                seated = await keeper.seat(wanted, self._router.service(ask.model))
        except TimeoutError:
            raise EngineError(
                f"all slots were busy for {limit_s:g} s", kind="queue", before_first_byte=True
            ) from None
        self._keeper, self._seated = keeper, seated
        self.reason += b", slot=%d, way=%b" % (seated.slot, seated.way.encode())
        return insert_field(body, "id_slot", b"%d" % seated.slot)

    def began(self) -> None:
        """The first byte of an answer has come."""
        if not self._is_over:
            self._router.began(self.route.ticket, time.monotonic())

    def ended(self, usage: Usage | None, *, calls_tool: bool = False) -> None:
        """It was answered whole. An answer that `calls_tool` tells more of its session's pause than
        the client could before."""
        if not self._is_over:
            ticket = self.route.ticket
            usage = None if usage is None else self._router.counted(ticket.worker, usage)
            if usage is not None and usage.tells_cached:
                self.warmed = self._router.warmed.used(
                    ticket.worker, ticket.ask.blocks, usage.cached_tokens
                )
            self._router.ended(ticket, usage, time.monotonic())
            # The last token that was said isn't computed on.
            has_told = usage is not None and usage.input_tokens > 0
            tokens = usage.input_tokens + usage.output_tokens - 1 if usage and has_told else None
            cached = usage.cached_tokens if usage is not None and usage.tells_cached else None
            self._end(tokens, cached, calls_tool=calls_tool)
            if self._whose.is_over:  # not where it is asked elsewhere next
                self._on_over(self._whose)

    def gone(self) -> None:
        """It was given up, refused, or failed."""
        if not self._is_over:
            self._router.failed(self.route.ticket, time.monotonic())
            self._end(None)

    def _end(
        self, tokens: int | None, cached_tokens: int | None = None, *, calls_tool: bool = False
    ) -> None:
        self._is_over = True
        whose = self._whose
        if self._keeper is not None and self._seated is not None:
            pause = "tool-call" if calls_tool and not whose.is_over else whose.state
            self._keeper.ended(self._seated, tokens, pause, cached_tokens=cached_tokens)
        elif self._keeper is not None:
            self._keeper.doubt()
        self._followers.ended(self.route.ticket.number)


def reason_of(route: Route) -> bytes:
    """Why that server, as a header's value."""
    reason = b"overlap=%d, best=%d, input=%d, queue=%.3f, least=%.3f" % (
        route.overlap_tokens,
        route.best_overlap_tokens,
        route.input_tokens,
        route.queue_s,
        route.least_queue_s,
    )
    return reason + b", loadable=%d" % route.loadable_tokens if route.loadable_tokens else reason


def _may_be_seated(body: bytes) -> bool:
    try:
        told = _BODY.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False
    return not told.id_slot and not told.lora and bytes(told.n) in {b"", b"1", b"null"}
