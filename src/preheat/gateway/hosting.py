"""What one worker knows of the machine's others; the process above it knows how to ask them."""

import secrets
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from preheat.core.stats import Snapshot
from preheat.core.types import Invalidation, Removed
from preheat.engines.child import Address


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process. `generation` counts those that its slot has had; `started_at` is
    wall-clock time; `rss_bytes` is 0 where the system doesn't tell."""

    pid: int
    slot: int
    generation: int
    started_at: float
    uptime_s: float
    state: Literal["starting", "ready", "draining"]
    rss_bytes: int = 0


class Forgotten(msgspec.Struct, frozen=True):
    """What an invalidation found in the L1s of a machine. `workers_unheard` gave no answer in time:
    what they hold isn't in it, and they may still tell it."""

    removed: Removed
    workers_unheard: int = 0


class Host(Protocol):
    """The other workers of this machine, seen from one.

    `name` is random and the same in all of them; `slot` is this one's number. `secret` is that of
    the machine's files; b"" where this process has to find it itself. `learner` is the path of the
    socket of the machine's, if it has one.
    """

    name: str
    slot: int
    secret: bytes
    learner: str

    async def snapshots(self) -> Snapshot:
        """What all workers counted, the dead ones included."""

    async def invalidate(
        self, what: Invalidation, *, number: int | None = None, dry_run: bool
    ) -> Forgotten:
        """Forget it in every L1 of this machine, as the board's `number`; what they held."""

    async def drain(self, upstream: str, *, is_draining: bool) -> bool:
        """Let that server of an engine take nothing more from any worker, or again; those to come
        included. Whether there is one of that name."""

    async def workers(self) -> list[ProcessState]:
        """All worker processes that there are now; none where nothing supervises any."""

    def where(self, engine: str) -> Callable[[], Address | None] | None:
        """Tells where the embedded engine of that name answers now (None: it is starting); None
        where this process has to start it itself."""


class OneProcess(Protocol):
    """What a gateway can tell of itself."""

    def snapshot(self) -> Snapshot:
        """What it counted."""

    async def invalidate(self, what: Invalidation, number: int | None, *, dry_run: bool) -> Removed:
        """Forget it in this process's L1."""

    def drain_upstream(self, name: str, *, is_draining: bool) -> bool:
        """Let that server take nothing more, or again."""


class Alone:
    """The host of a gateway without a supervisor: it is all the workers there are."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(4)
        self.slot = 0
        self.secret = b""
        self.learner = ""
        self.gateway: OneProcess | None = None

    async def snapshots(self) -> Snapshot:
        """What this process counted."""
        assert self.gateway is not None
        return self.gateway.snapshot()

    async def invalidate(
        self, what: Invalidation, *, number: int | None = None, dry_run: bool
    ) -> Forgotten:
        """Forget it here."""
        assert self.gateway is not None
        return Forgotten(await self.gateway.invalidate(what, number, dry_run=dry_run))

    async def drain(self, upstream: str, *, is_draining: bool) -> bool:
        """Let it take nothing more, or again."""
        assert self.gateway is not None
        return self.gateway.drain_upstream(upstream, is_draining=is_draining)

    async def workers(self) -> list[ProcessState]:
        """None."""
        return []

    def where(self, engine: str) -> Callable[[], Address | None] | None:  # noqa: ARG002  all of them
        """Its engines are its own."""
        return None
