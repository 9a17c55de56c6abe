"""What servers tell by KV events, taken in the log's order of time."""

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from preheat.core.kv_events import Batch, Cleared, Restarted, Step, Stored
from preheat.core.kv_names import KvNames
from preheat.core.router import Router
from preheat.core.told import ToldResidency
from preheat.engines.dialects.calls import Prompt
from preheat.engines.kv_hearing import feed_at
from preheat.engines.kv_tokens import Answer, PromptTokens
from preheat.errors import ConfigError
from preheat.lab.observe.servers import Server
from preheat.lab.observe.settling import Act
from preheat.wire.kv_places import KvPlace

_MOST_EARLY: Final = 64
_WITHIN_S: Final = 2.0
"""For a prompt's tokens: nobody waits for them but the report."""
_SALTLESS: Final = "sglang"
"""Its events don't name salts."""

Tell = Callable[[Act, int], None]
"""Has it done in its turn; how much of it there is, in blocks."""


class Ear:
    """One server's events. An access log tells of a request after its events have come, so each step
    waits until the log is past it: else every prompt would seem to have been there before itself.

    Otherwise as `engines.kv_ear` does it: nothing is known by tokens before a block has told its size.
    """

    def __init__(self, server: Server, place: KvPlace, names: KvNames, router: Router, tell: Tell):
        self.refused = ""
        self._server = server
        self._names = names
        self._router = router
        self._tell = tell
        self._told: ToldResidency | None = None
        self._early: deque[Step] = deque(maxlen=_MOST_EARLY)
        self.feed = feed_at(place, self._note)

    async def run(self) -> None:
        """Until it is cancelled, or the address can't be used."""
        try:
            await self.feed.run()
        except ConfigError as error:
            self.refused = str(error)

    def age(self, now: float) -> None:
        """Time passes."""
        if self._told is not None:
            self._router.told(self._server.number, self._told.aged(now))

    def _note(self, step: Step) -> None:
        stored = _stored(step)
        for one in stored:
            self._names.learn_size(one.block_tokens)
        self._tell(
            lambda now: self._take(step, now), 1 + sum(len(one.block_hashes) for one in stored)
        )

    def _take(self, step: Step, now: float) -> None:
        if isinstance(step, Restarted):
            self._early.clear()
        self._early.append(step)
        if self._told is None:
            if not self._names.block_tokens:
                return
            names = self._names
            self._told = ToldResidency(block_tokens=names.block_tokens, root=names.root)
            self._router.hears(self._server.number, self._told)
        while self._early:
            self._apply(self._told, self._early.popleft(), now)

    def _apply(self, told: ToldResidency, step: Step, now: float) -> None:
        self._router.told(self._server.number, told.take(step, now))
        if told.is_empty and _may_empty(step):
            self._router.cleared(self._server.number)


class Heard:
    """All servers' events, and the tokens of prompts, which they are looked up by."""

    def __init__(
        self,
        servers: Sequence[Server],
        places: Mapping[str, KvPlace],
        router: Router,
        tell: Tell,
        model: str,
    ) -> None:
        """`places` by url. Raises ConfigError where what is needed isn't installed."""
        self.names = KvNames(secrets.token_bytes(16))
        self.ears = [Ear(one, places[one.direct.url], self.names, router, tell) for one in servers]
        self._servers = servers
        self._model = model
        self._turn = 0
        self._tokens = PromptTokens(self.names, self._tokenise, lambda *_: _WITHIN_S)

    async def blocks_of(self, body: bytes) -> Sequence[int]:
        """A prompt's, where they are known in time."""
        return await self._tokens.blocks_of(body) if body else ()

    async def aclose(self) -> None:
        """Ask no more."""
        await self._tokens.aclose()

    async def _tokenise(self, prompt: Prompt) -> Answer | None:
        """Asked of those that are up in turn."""
        able = [one for one in self._servers if not one.down_why]
        if not able:
            return None
        self._turn = (self._turn + 1) % len(able)
        direct = able[self._turn].direct
        dialect = await direct.known()
        if prompt.salt and dialect.name == _SALTLESS:
            return None
        if self._model:
            prompt = msgspec.structs.replace(prompt, model=self._model)
        body = await direct.told(dialect.tokenise(prompt))
        return None if body is None else (dialect, body)


def _stored(step: Step) -> list[Stored]:
    events = step.events if isinstance(step, Batch) else ()
    return [one for one in events if isinstance(one, Stored)]


def _may_empty(step: Step) -> bool:
    """Whether it may say that all is gone, so that what was sent there is gone, too."""
    if isinstance(step, Batch):
        return any(isinstance(event, Cleared) for event in step.events)
    return isinstance(step, Restarted)
