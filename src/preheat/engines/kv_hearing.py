"""A group of servers that tell what they hold: their events heard, prompts looked up by the same names."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from preheat.core.kv_names import KvNames
from preheat.core.router import Ask, Router
from preheat.engines.attendant import Attendant
from preheat.engines.dialects.calls import Prompt
from preheat.engines.kv_ear import KvEar, Source
from preheat.engines.kv_feed import FeedCounts, KvFeed, OnStep, load_zmq
from preheat.engines.kv_link import LearnerLink
from preheat.engines.kv_tokens import WITHIN_S, Answer, PromptTokens
from preheat.engines.worker import OnEvent, Worker
from preheat.wire.kv_places import KvPlace, places_of

HearAt = Callable[[str, str, OnStep], Source]
"""Whoever hears the events of the server at that url, which has that name in the log."""
_HALF: Final = 0.5
_LEAST_S, _MOST_S = 0.02, 0.5
_TOKEN_BYTES: Final = 4.0
"""Of English."""
_SALTLESS: Final = "sglang"
"""Its events don't name salts."""


class Hearing:
    """One ear a server, and the tokens of prompts."""

    def __init__(self, hear_at: HearAt, names: KvNames, on_event: OnEvent) -> None:
        self._hear_at = hear_at
        self._names = names
        self._on_event = on_event
        self._tokens = PromptTokens(names, self._tokenise, self._patience_s)
        self._attendants: Mapping[Worker, Attendant] = {}
        self._ears: dict[Worker, tuple[KvEar, asyncio.Task[None]]] = {}
        self._turn = 0
        self._router: Router | None = None

    def follow(self, chosen: Mapping[Worker, Attendant], router: Router) -> None:
        """Listen to these from now on, and to no others."""
        self._attendants, self._router = chosen, router
        for worker in [one for one in self._ears if one not in chosen]:
            self._ears.pop(worker)[1].cancel()
        for worker in chosen:
            if worker not in self._ears:
                self._ears[worker] = self._begun(worker, router)

    def counts(self, worker: Worker) -> FeedCounts | None:
        """What was heard of it."""
        heard = self._ears.get(worker)
        return None if heard is None else heard[0].counts

    async def with_tokens(self, ask: Ask, body: bytes) -> Ask:
        """The same with the prompt's tokens, where they are known in time."""
        blocks = await self._tokens.blocks_of(body)
        if not blocks:
            return ask
        size = self._names.block_tokens
        return msgspec.structs.replace(ask, token_blocks=blocks, block_tokens=size)

    async def aclose(self) -> None:
        """Listen no more."""
        tasks = [task for _, task in self._ears.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self._tokens.aclose(), return_exceptions=True)

    def _begun(self, worker: Worker, router: Router) -> tuple[KvEar, asyncio.Task[None]]:
        def hear(on_step: OnStep) -> Source:
            return self._hear_at(worker.url, worker.name, on_step)

        ear = KvEar(worker.number, worker.name, router, self._names, hear, self._on_event)
        return ear, asyncio.get_running_loop().create_task(ear.run(), name="kv-events")

    def _patience_s(self, model: str, size_bytes: int) -> float:
        """Half of what computing it is expected to take: where that is short, it matters little where."""
        service = None if self._router is None else self._router.service(model)
        if service is None:
            return WITHIN_S
        half_s = _HALF * service.prefill_s(int(size_bytes / _TOKEN_BYTES))
        return min(max(half_s, _LEAST_S), _MOST_S)

    async def _tokenise(self, prompt: Prompt) -> Answer | None:
        """Asked of those that are up in turn."""
        able = [one for one in self._attendants.values() if one.is_up and one.dialect is not None]
        if not able:
            return None
        self._turn = (self._turn + 1) % len(able)
        attendant = able[self._turn]
        dialect = attendant.dialect
        assert dialect is not None
        if prompt.salt and dialect.name == _SALTLESS:
            return None
        call = dialect.tokenise(prompt)
        body = None if call is None else await attendant.told(call)
        return None if body is None else (dialect, body)


def heard_at(
    urls: Sequence[str],
    events: Sequence[str],
    replays: Sequence[str],
    link: LearnerLink | None = None,
) -> HearAt:
    """By feeds of our own, or by the learner where there is one. Urls that come later have one pattern for
    all. Raises ConfigError where that needs what isn't installed."""
    load_zmq()
    places = places_of(urls, events, replays)

    def hear_at(url: str, name: str, on_step: OnStep) -> Source:
        place = places.get(url) or places_of([url], events, replays)[url]
        return feed_at(place, on_step) if link is None else link.hear_at(place, url, name, on_step)

    return hear_at


def feed_at(place: KvPlace, on_step: OnStep) -> KvFeed:
    """A feed of our own."""
    return KvFeed(
        endpoint=place.endpoint,
        replay_endpoint=place.replay_endpoint,
        host=place.host,
        on_step=on_step,
    )
