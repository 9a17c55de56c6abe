"""Between a publisher of KV events and a listener: passes messages on, and now and then doesn't."""

from __future__ import annotations

import random
from collections.abc import Callable

import zmq
import zmq.asyncio

from preheat.wire.kv_events import read_batch, read_live


class Relay:
    """`messages` came from the engine, the newest of `last_at`. Those `withheld` are named by their
    times; while `is_withholding` the listener can't know what there was."""

    def __init__(self, source: str, target: str, on_frames: Callable[[list[bytes]], None]) -> None:
        self.messages = 0
        self.last_at = 0.0
        self.withheld: set[float] = set()
        self.is_withholding = False
        self._source, self._target = source, target
        self._on_frames = on_frames
        self._left = 0
        self._chance = random.Random(5)

    def lose(self, least: int, most: int) -> None:
        """So many of those that come next."""
        self._left = self._chance.randint(least, most)

    def restarted(self) -> None:
        """The engine was. Its connection breaks; the listener's doesn't, so it knows by the next message."""
        self.is_withholding = True

    async def run(self) -> None:
        """Until cancelled."""
        context = zmq.asyncio.Context()
        try:
            publisher = context.socket(zmq.PUB)
            publisher.bind(self._target)
            subscriber = context.socket(zmq.SUB)
            subscriber.reconnect_ivl = 50  # milliseconds
            subscriber.subscribe(b"")
            subscriber.connect(self._source)
            while True:
                frames = await subscriber.recv_multipart()
                self.messages += 1
                self.last_at = read_batch(read_live(frames)[1]).at
                self._on_frames(frames)
                self.is_withholding = self._left > 0
                if self.is_withholding:
                    self._left -= 1
                    self.withheld.add(self.last_at)
                else:
                    await publisher.send_multipart(frames)
        finally:
            context.destroy(linger=0)
