"""The embedded engines' processes: the supervisor's, so that all workers share them."""

import asyncio
from collections.abc import Callable
from typing import Final

from preheat.config import EngineSettings, Settings
from preheat.engines.child import Address, EngineChild, settings_of
from preheat.telemetry.logs import Log

DEFAULT: Final = "embedded"
"""The engine of settings that name none."""


class EmbeddedEngines:
    """`on_change` is told of every new address, and of every one that is no more."""

    def __init__(self, settings: Settings, log: Log, on_change: Callable[[], None]) -> None:
        self._log = log
        self._on_change = on_change
        self._children: dict[str, EngineChild] = {}
        engines = settings.engines or {DEFAULT: EngineSettings(kind="embedded")}
        for name, engine in engines.items():
            if engine.kind == "embedded":
                self._children[name] = EngineChild(
                    settings_of(name, engine), on_event=self._teller(name)
                )

    async def start(self) -> None:
        """Load their models. Raises EngineError."""
        await asyncio.gather(*(child.start() for child in self._children.values()))

    async def aclose(self) -> None:
        """End them."""
        await asyncio.gather(*(child.aclose() for child in self._children.values()))

    def addresses(self) -> dict[str, Address | None]:
        """Where each of them answers now; None while it starts."""
        return {name: child.address for name, child in self._children.items()}

    def _teller(self, name: str) -> Callable[[str, dict[str, object]], None]:
        def tell(event: str, fields: dict[str, object]) -> None:
            self._log.event(event, engine=name, **fields)
            self._on_change()

        return tell
