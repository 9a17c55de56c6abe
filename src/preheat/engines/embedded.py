"""A real model beside the gateway: llama.cpp in a child process of ours, for a first start."""

from collections.abc import Callable, Sequence

from preheat.engines.child import ChildSettings, EngineChild
from preheat.engines.openai import OpenAi
from preheat.errors import EngineError
from preheat.transport.client import Response, Timeouts


class Embedded:
    """Starts the child, asks it over HTTP like any other engine, and follows it when it restarts."""

    def __init__(
        self,
        name: str,
        settings: ChildSettings,
        *,
        timeouts: Timeouts | None = None,
        on_event: Callable[[str, dict[str, object]], None],
    ) -> None:
        self.name = name
        self.inject_usage = True
        self._timeouts = timeouts
        self._child = EngineChild(settings, on_event=on_event)
        self._engine: OpenAi | None = None
        self._url = ""

    async def start(self) -> None:
        """Load the model. Raises EngineError with the reason where that fails."""
        await self._child.start()

    async def send(
        self,
        method: bytes,
        path: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
    ) -> Response:
        """Ask the child that is running now."""
        engine = await self._current()
        return await engine.send(method, path, headers, body)

    @property
    def is_ready(self) -> bool:
        """Whether the child is up."""
        return self._child.url is not None

    async def aclose(self) -> None:
        """End the child."""
        if self._engine is not None:
            await self._engine.aclose()
        await self._child.aclose()

    async def _current(self) -> OpenAi:
        url = self._child.url
        if url is None:
            raise EngineError(
                f"the embedded engine {self.name} is starting again; try in a few seconds",
                kind="start",
            )
        if self._engine is None or url != self._url:
            old, self._url = self._engine, url
            self._engine = OpenAi(
                self.name, url, api_key=self._child.api_key, timeouts=self._timeouts
            )
            if old is not None:
                await old.aclose()
        return self._engine
