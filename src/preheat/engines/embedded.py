"""A real model beside the gateway: llama.cpp in a child process of ours, for a first start."""

from collections.abc import Callable, Sequence

from preheat.core.slot_desk import Freed
from preheat.core.types import SessionState
from preheat.engines.child import Address, ChildSettings, EngineChild
from preheat.engines.openai import OpenAi
from preheat.engines.warmth import Hot, Proven, Warmed
from preheat.engines.worker import WorkerState
from preheat.errors import EngineError
from preheat.transport.client import Response, Timeouts


class Embedded:
    """Asks the child over HTTP like any other engine, and follows it when it restarts.

    `where` tells where it answers now, or None while it is down; without it the child is this
    process's own, started and ended here.
    """

    def __init__(
        self,
        name: str,
        settings: ChildSettings,
        *,
        timeouts: Timeouts | None = None,
        on_event: Callable[[str, dict[str, object]], None],
        where: Callable[[], Address | None] | None = None,
    ) -> None:
        self.name = name
        self.inject_usage = True
        self._timeouts = timeouts
        self._child = None if where is not None else EngineChild(settings, on_event=on_event)
        self._where = where
        self._on_event = on_event
        self._is_draining = False
        self._engine: OpenAi | None = None
        self._at: Address | None = None

    async def start(self) -> None:
        """Load the model, if the child is ours. Raises EngineError with the reason where that
        fails."""
        if self._child is not None:
            await self._child.start()

    async def send(
        self,
        method: bytes,
        path: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        *,
        is_repeatable: bool = True,
        tenant: str = "",
        session: str = "",
        state: SessionState = "",
    ) -> Response:
        """Ask the child that is running now."""
        engine = await self._current()
        return await engine.send(
            method,
            path,
            headers,
            body,
            is_repeatable=is_repeatable,
            tenant=tenant,
            session=session,
            state=state,
        )

    async def erase(self, tenant: str) -> int:  # noqa: ARG002  all alike
        """It has no files."""
        return 0

    async def over(self, tenant: str, session: str) -> Freed:  # noqa: ARG002  all alike
        """It keeps nothing for anybody."""
        return Freed()

    async def warm(self, hot: Hot, workers: Sequence[str], within_s: float) -> list[Warmed]:
        """Have it warm there, in idle moments."""
        return await (await self._current()).warm(hot, workers, within_s)

    async def prove(self, hot: Hot, workers: Sequence[str], within_s: float) -> list[Proven]:
        """Whether it is."""
        return await (await self._current()).prove(hot, workers, within_s)

    @property
    def is_ready(self) -> bool:
        """Whether the child is up."""
        return self._address() is not None

    def workers(self) -> list[WorkerState]:
        """The child, as it is asked."""
        return [] if self._engine is None else self._engine.workers()

    def set_draining(self, worker: str, *, is_draining: bool) -> bool:
        """Let the child take nothing more, or again; its successors too."""
        if worker != self.name:
            return False
        self._is_draining = is_draining
        if self._engine is not None:
            self._engine.set_draining(worker, is_draining=is_draining)
        return True

    async def retire(self) -> None:
        """Nobody takes over from it while it runs."""
        await self.aclose()

    async def aclose(self) -> None:
        """End the connections, and the child if it is ours."""
        if self._engine is not None:
            await self._engine.aclose()
        if self._child is not None:
            await self._child.aclose()

    def _address(self) -> Address | None:
        if self._where is not None:
            return self._where()
        assert self._child is not None
        return self._child.address

    async def _current(self) -> OpenAi:
        address = self._address()
        if address is None:
            raise EngineError(
                f"the embedded engine {self.name} is starting again; try in a few seconds",
                kind="start",
            )
        if self._engine is None or address != self._at:
            old, self._at = self._engine, address
            self._engine = OpenAi(
                self.name,
                address.url,
                api_key=address.api_key,
                timeouts=self._timeouts,
                on_event=self._on_event,
            )
            self._engine.set_draining(self.name, is_draining=self._is_draining)
            if old is not None:
                await old.aclose()
        return self._engine
