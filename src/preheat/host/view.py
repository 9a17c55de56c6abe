"""The machine as a worker sees it: what it wants to know of the others, it asks the supervisor."""

from collections.abc import Callable
from typing import Final, TypeVar

from preheat.core.stats import Snapshot
from preheat.core.types import Invalidation
from preheat.engines.child import Address
from preheat.errors import UpstreamError
from preheat.gateway.hosting import Forgotten, ProcessState
from preheat.host import messages
from preheat.host.channel import Channel, ChannelError
from preheat.host.messages import Message
from preheat.host.rounds import Rounds

T = TypeVar("T")

_ANSWER_S: Final = 3.0
"""More than the supervisor waits for any worker."""


class HostView:
    """Asks over the channel. What it asks raises UpstreamError where no answer comes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.name = ""
        self.slot = 0
        self.secret = b""
        self.learner = ""
        self.engines: dict[str, Address | None] = {}
        self._collection = Rounds(self._collected)

    def begin(self, start: messages.Start) -> None:
        """Take over what the supervisor tells at the start."""
        self.name, self.slot, self.engines = start.name, start.slot, start.engines
        self.secret, self.learner = start.secret, start.learner

    async def snapshots(self) -> Snapshot:
        """What all workers counted, the dead ones included."""
        return await self._collection.result()

    async def _collected(self) -> Snapshot:
        return (await self._ask(messages.AskSnapshots(), messages.Counted)).snapshot

    async def invalidate(
        self, what: Invalidation, *, number: int | None = None, dry_run: bool
    ) -> Forgotten:
        """Forget it in every L1 of this machine."""
        message = messages.Invalidate(what, number, dry_run)
        answer = await self._ask(message, messages.Forgotten)
        return Forgotten(answer.removed, answer.workers_unheard)

    async def drain(self, upstream: str, *, is_draining: bool) -> bool:
        """Let that server take nothing more from any worker, or again."""
        answer = await self._ask(messages.DrainUpstream(upstream, is_draining), messages.Known)
        return answer.is_known

    async def workers(self) -> list[ProcessState]:
        """All workers that there are now."""
        return (await self._ask(messages.AskWorkers(), messages.Workers)).workers

    def where(self, engine: str) -> Callable[[], Address | None] | None:
        """Tells where that engine answers: the supervisor has started it."""
        return lambda: self.engines.get(engine)

    async def _ask(self, message: Message, expected: type[T]) -> T:
        try:
            answer = await self._channel.call(message, _ANSWER_S)
        except ChannelError as error:
            raise UpstreamError(f"the supervisor: {error}") from None
        if not isinstance(answer, expected):
            raise UpstreamError("the supervisor gave another answer")
        return answer
