"""The learner: hears the KV events of all servers once for a machine, and tells its workers.

    python -m preheat.host.learner --socket PATH [--lifeline-fd N]

Workers connect and say what they want to hear, so it follows every change of their settings, and a worker
that comes late gets all that is known. What one worker has sent where it passes on to the others. It is told
to end by SIGTERM; with `--lifeline-fd`, also by the end of whoever holds the other end of that pipe.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import msgspec

from preheat.host import signals
from preheat.host.voices import Circle, Voice
from preheat.telemetry.logs import Log
from preheat.wire import kv_link as wire

_TOGETHER_S: Final = 0.02
"""So long changes are collected before they are told."""
_LOOK_S: Final = 1.0
"""So often what changes without a word (counts, trust, who has read all) is looked at."""
_MOST_PROMPTS: Final = 64
_BEHIND_BYTES: Final = 4_194_304
"""Who has so much unread is told nothing more until it has read all; then everything anew."""


class Peer(asyncio.Protocol):
    """One worker's connection, of one of its groups."""

    def __init__(self, learner: "Learner") -> None:
        self.wanted: set[Voice] = set()
        self.is_behind = False
        self._learner = learner
        self._buffer = bytearray()
        self._circle: Circle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._learner.peers.add(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._learner.peers.discard(self)
        for voice in self.wanted:
            voice.listeners.discard(self)
        if self._circle is not None:
            self._circle.peers.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for body in wire.bodies(self._buffer):
                self._take(wire.LEARNER_READS.decode(body))
        except (wire.LinkError, msgspec.MsgspecError):
            self.close()

    def tell(self, messages: Sequence[wire.ToWorker]) -> None:
        """Say it, unless it doesn't read."""
        if self._transport.get_write_buffer_size() > _BEHIND_BYTES:
            self.is_behind = True
        if not self.is_behind:
            self._transport.write(b"".join(map(wire.frame, messages)))

    def catch_up(self) -> None:
        """Where it had fallen behind and has read all: tell it everything anew."""
        if self.is_behind and not self._transport.get_write_buffer_size():
            self.is_behind = False
            for voice in self.wanted:
                self.tell(voice.whole())

    def close(self) -> None:
        """End it."""
        self._transport.abort()

    def _take(self, message: wire.ToLearner) -> None:
        circle = self._circle
        if circle is None:
            if not isinstance(message, wire.Join):
                raise wire.LinkError("its first word isn't which group it is of")
            self._join(message.group)
            return
        match message:
            case wire.Listen():
                voice = circle.listen(self, message)
                if voice is not None:
                    self.wanted.add(voice)
            case wire.Ignore():
                for voice in [one for one in self.wanted if one.url == message.url]:
                    self.wanted.discard(voice)
                    voice.listeners.discard(self)
            case wire.AllSent():
                circle.recent.extend(message.prompts)
                for peer in circle.peers:
                    if peer is not self:
                        peer.tell([message])
            case _:
                raise wire.LinkError("it has said already which group it is of")

    def _join(self, group: str) -> None:
        circle = self._circle = self._learner.circle(group)
        circle.peers.add(self)
        self.tell([wire.Hello(self._learner.secret)])
        recent = list(circle.recent)
        for begin in range(0, len(recent), _MOST_PROMPTS):
            self.tell([wire.AllSent(recent[begin : begin + _MOST_PROMPTS])])


class Learner:
    """What the process has: workers, and the servers they want to hear."""

    def __init__(self, log: Log) -> None:
        self.secret = secrets.token_bytes(16)
        self.peers: set[Peer] = set()
        self._log = log
        self._circles: dict[str, Circle] = {}
        self._woken = asyncio.Event()
        self._has_ended = False

    def circle(self, group: str) -> Circle:
        """That of this name."""
        found = self._circles.get(group)
        if found is None:
            found = self._circles[group] = Circle(group, self.secret, self._log, self._woken)
        return found

    def stop(self) -> None:
        """End soon."""
        self._has_ended = True
        self._woken.set()

    async def run(self, listening: socket.socket) -> None:
        """Until it is told to stop."""
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: Peer(self), sock=listening)
        try:
            while not self._has_ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._woken.wait()
                await asyncio.sleep(_TOGETHER_S)
                self._woken.clear()
                for circle in self._circles.values():
                    circle.tick(time.monotonic())
        finally:
            server.close()
            for peer in tuple(self.peers):
                peer.close()
            for circle in self._circles.values():
                for voice in circle.voices.values():
                    voice.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to end."""
    signals.ignore()
    options = _parser().parse_args(arguments)
    log = Log(sys.stderr.buffer)
    try:
        asyncio.run(_serve(options, log))
    except OSError as error:
        log.event("learner-refused", why=f"{options.socket}: {error.strerror or error}")
        return 1
    finally:
        log.close()
    return 0


async def _serve(options: argparse.Namespace, log: Log) -> None:
    learner = Learner(log)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, learner.stop)
    if options.lifeline_fd is not None:

        def end() -> None:
            loop.remove_reader(options.lifeline_fd)
            learner.stop()

        loop.add_reader(options.lifeline_fd, end)
    await learner.run(_listening(options.socket))


def _listening(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
    finally:
        os.umask(before)
    listening.listen()
    return listening


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m preheat.host.learner", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="listen here")
    parser.add_argument("--lifeline-fd", type=int, help="a pipe whose end is this process's end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
