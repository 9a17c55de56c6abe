"""What the learner knows of each server, and who wants to hear it."""

import time
from asyncio import Event, get_running_loop
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import msgspec

from preheat.core.kv_names import KvNames
from preheat.core.told import Change, ToldResidency
from preheat.core.witness import Trust
from preheat.engines.kv_ear import KvEar
from preheat.engines.kv_feed import KvFeed, OnStep
from preheat.engines.kv_hearing import feed_at
from preheat.errors import ConfigError
from preheat.telemetry.logs import Log
from preheat.wire import kv_link as wire
from preheat.wire.kv_places import KvPlace

_MOST_BLOCKS: Final = 2_048
"""In one message: a worker takes it in a few milliseconds."""
_RECENT: Final = 1_024
"""Prompts that a worker is told of that comes late, of each group."""
_ANEW_S: Final = 600.0
"""So often everything is told anew: whatever went wrong doesn't stay."""
_ALONE_S: Final = 60.0
"""A server that nobody wants to hear any more is heard for so long: workers are replaced."""


class Listener(Protocol):
    """A worker's connection."""

    def tell(self, messages: Sequence[wire.ToWorker]) -> None:
        """Say it, unless it doesn't read."""

    def catch_up(self) -> None:
        """Where it had fallen behind and has read all: tell it everything anew."""


class Voice:
    """One server's events, for all who listen: an index of nothing but what changes."""

    def __init__(self, group: "Circle", listen: wire.Listen) -> None:
        self.url = listen.url
        self.listeners: set[Listener] = set()
        self.left_at = 0.0
        self._group = group
        self._known: ToldResidency | None = None
        self._moved: dict[int, bool] = {}  # block → it came
        self._is_empty = False
        self._said: tuple[object, ...] = ()
        self._adapters = 0
        place = listen.place

        def hear(on_step: OnStep) -> KvFeed:
            return feed_at(place, on_step)

        self._ear = KvEar(0, listen.name, self, group.names, hear, group.note)
        self._task = get_running_loop().create_task(self._ear.run(), name="kv-events")

    def hears(self, _worker: int, told: ToldResidency) -> None:
        """Its first words have told how large blocks are."""
        self._known = told

    def told(self, _worker: int, change: Change) -> None:
        """So much has changed."""
        self._moved.update(dict.fromkeys(change.gone, False))
        self._moved.update(dict.fromkeys(change.came, True))
        if self._moved:
            self._group.woken.set()

    def cleared(self, _worker: int) -> None:
        """It says that it holds nothing any more."""
        self._is_empty = True
        self._group.woken.set()

    def news(self) -> list[wire.Heard]:
        """What is to be said since this was asked last."""
        status = (self._trust, self._group.names.block_tokens, self._ear.counts)
        new_adapters = self._group.names.adapters[self._adapters :]
        if not (self._moved or self._is_empty or new_adapters) and status == self._said:
            return []
        moved, self._moved = self._moved, {}
        is_empty, self._is_empty = self._is_empty, False
        self._said = status
        self._adapters += len(new_adapters)
        came = [block for block, is_there in moved.items() if is_there]
        gone = [block for block, is_there in moved.items() if not is_there]
        messages = list(self._messages(came, gone))
        messages[0] = msgspec.structs.replace(messages[0], is_empty=is_empty, adapters=new_adapters)
        return messages

    def whole(self) -> list[wire.Heard]:
        """All that is known, once `news` is said."""
        messages = list(self._messages(list(self._known or ()), []))
        messages[0] = msgspec.structs.replace(
            messages[0], anew=True, adapters=self._group.names.adapters
        )
        return messages

    def close(self) -> None:
        """Hear it no more."""
        self._task.cancel()

    def _messages(self, came: Sequence[int], gone: Sequence[int]) -> Iterator[wire.Heard]:
        counts = msgspec.structs.asdict(self._ear.counts)
        for begin in range(0, max(1, len(came), len(gone)), _MOST_BLOCKS):
            yield wire.Heard(
                self.url,
                wire.packed(came[begin : begin + _MOST_BLOCKS]),
                wire.packed(gone[begin : begin + _MOST_BLOCKS]),
                self._trust,
                self._group.names.block_tokens if self._known is not None else 0,
                counts=counts,
            )

    @property
    def _trust(self) -> Trust:
        return "estimated" if self._known is None else self._known.trust


class Circle:
    """The workers' groups of one name. `woken`: there is something to be told."""

    def __init__(self, name: str, secret: bytes, log: Log, woken: Event) -> None:
        self.names = KvNames(secret)
        self.voices: dict[tuple[str, KvPlace], Voice] = {}
        self.peers: set[Listener] = set()
        self.woken = woken
        self.recent: deque[wire.Sent] = deque(maxlen=_RECENT)
        self._name = name
        self._log = log
        self._anew_at = time.monotonic()

    def note(self, event: str, fields: dict[str, object]) -> None:
        """For the log."""
        self._log.event(event, engine=self._name, **fields)

    def listen(self, peer: Listener, listen: wire.Listen) -> Voice | None:
        """It wants to hear that server. All that is known of it is told first. None: nobody can."""
        key = (listen.url, listen.place)
        voice = self.voices.get(key)
        if voice is None:
            try:
                voice = self.voices[key] = Voice(self, listen)
            except ConfigError as error:
                self.note("kv-events-refused", {"worker": listen.name, "why": str(error)})
                return None
        voice.listeners.add(peer)
        peer.tell(voice.whole())
        return voice

    def tick(self, now: float) -> None:
        """Tell what is new; let go what nobody wants."""
        is_anew = now - self._anew_at > _ANEW_S
        if is_anew:
            self._anew_at = now
        for key, voice in list(self.voices.items()):
            news = voice.news()
            for peer in voice.listeners:
                if news:
                    peer.tell(news)
                if is_anew:
                    peer.tell(voice.whole())
            if voice.listeners:
                voice.left_at = now
            elif now - voice.left_at > _ALONE_S:
                voice.close()
                del self.voices[key]
        for peer in self.peers:
            peer.catch_up()
