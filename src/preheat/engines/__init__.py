"""The kinds of software that serve models, one dialect a file.

To add one: a new file here and one line in `ENGINES` (docs/adding-a-policy.md). Values are
"module:class", imported when chosen, so that a missing optional package matters only then.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from preheat.core.slot_desk import Freed
from preheat.core.types import SessionState
from preheat.engines.warmth import Hot, Proven, Warmed
from preheat.engines.worker import WorkerState
from preheat.transport.client import Response


class Engine(Protocol):
    """One upstream behind an address."""

    name: str
    inject_usage: bool

    async def start(self) -> None:
        """Make it ready. Raises EngineError where it can't be."""

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
        """Ask; `path` is what comes after `/v1`, with its query. Where it isn't `is_repeatable`,
        nobody else is asked what one may have done. `tenant` and `session`, where they are known,
        help to choose a server, and what the client says of its session's `state` whose slot goes.
        Raises EngineError."""

    async def erase(self, tenant: str) -> int:
        """Delete what is kept of a tenant's prompts in files; how many they were. Raises ConfigError
        where a folder can't be read."""

    async def over(self, tenant: str, session: str) -> Freed:
        """That session won't come back: what is kept for it goes first."""

    async def warm(self, hot: Hot, workers: Sequence[str], within_s: float) -> list[Warmed]:
        """Have a prefix warm at these servers of it (none: at all that are well), in idle moments. Raises
        EngineError where there is none."""

    async def prove(self, hot: Hot, workers: Sequence[str], within_s: float) -> list[Proven]:
        """Whether it is, likewise."""

    @property
    def is_ready(self) -> bool:
        """Whether requests have a chance."""

    def workers(self) -> list[WorkerState]:
        """How each of the servers behind it is; none where there is but one, and it is ours."""

    def set_draining(self, worker: str, *, is_draining: bool) -> bool:
        """Let that server take nothing more, or again. Whether there is one of that name."""

    async def retire(self) -> None:
        """End what is under way, within a bounded time, then close: another has taken over."""

    async def aclose(self) -> None:
        """End connections and processes."""


ENGINES: Final[Mapping[str, str]] = {
    "embedded": "preheat.engines.embedded:Embedded",
    "fake": "preheat.engines.fake:Fake",
    "openai": "preheat.engines.openai:OpenAi",
}
