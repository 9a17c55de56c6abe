"""A worker process: a gateway that is told what to do over an inherited socket.

    python -m preheat.host.worker DESCRIPTOR

Started by the supervisor, and of no use without: when the socket ends, so does the worker.
"""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from typing import Any, Final

from preheat.config import Settings
from preheat.errors import PreheatError
from preheat.gateway.app import Gateway
from preheat.gateway.assembly import accept, assemble
from preheat.host import messages, signals
from preheat.host.channel import Channel, ChannelError
from preheat.host.messages import Message
from preheat.host.stderr import log_to_stderr
from preheat.host.view import HostView
from preheat.telemetry.logs import Log

HEARTBEAT_S: Final = 1.0
_FLUSH_S: Final = 1.0
_GC_THRESHOLD: Final = (20_000, 20, 20)
"""A request makes no cycles, so young objects needn't be looked at every 700 of them."""


class Worker:
    """Hears the supervisor and moves the gateway."""

    def __init__(self) -> None:
        self._channel = Channel(messages.WORKER_READS, self._hear)
        self._view = HostView(self._channel)
        self._log = log_to_stderr()
        self._started: asyncio.Future[messages.Start] = asyncio.get_running_loop().create_future()
        self._draining = asyncio.Event()
        self._drain = messages.Drain(0.0)
        self._gateway: Gateway | None = None
        self._prepared: Any = None
        self._drained: set[str] = set()  # upstreams, told before there is a gateway

    async def run(self, end: socket.socket) -> int:
        """Live; the exit code."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_sigterm)
        await self._channel.open(end)
        reading = asyncio.create_task(self._read())
        beating: asyncio.Task[None] | None = None
        try:
            if not await self._is_started():
                return 0
            start = self._started.result()
            self._drain = messages.Drain(start.settings.listen.drain_s)
            gateway = await self._start(start)
            if gateway is None:
                return 1
            beating = asyncio.create_task(self._beat(gateway))
            await self._serve(gateway)
            self._channel.tell(messages.Drained(messages.Counted.of(gateway.snapshot())))
            await self._channel.flush(_FLUSH_S)
            return 0
        finally:
            if beating is not None:
                beating.cancel()
            self._channel.close()
            await asyncio.wait({reading})
            self._log.close()

    async def _is_started(self) -> bool:
        """Whether it was told to start, before it was told to end."""
        ended = asyncio.create_task(self._draining.wait())
        await asyncio.wait((self._started, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        return self._started.done()

    async def _start(self, start: messages.Start) -> Gateway | None:
        gateway: Gateway | None = None
        try:
            raise_file_limit(start.settings, self._log)
            gateway = assemble(start.settings, self._log, host=self._view)
            await gateway.start_engines()
            for upstream in self._drained:
                gateway.drain_upstream(upstream, is_draining=True)
            self._gateway = gateway
            await accept(gateway, start.settings, _sockets(start.listen), _sockets(start.admin))
        except PreheatError as error:
            self._gateway = None
            self._channel.tell(messages.Failed(str(error)))
            await self._channel.flush(_FLUSH_S)
            if gateway is not None:
                await gateway.aclose()
            return None
        # What is there now lives as long as the process: no full collection need look at it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLD)
        self._channel.tell(messages.Ready(os.getpid()))
        return gateway

    async def _serve(self, gateway: Gateway) -> None:
        """Until it has drained."""
        await self._draining.wait()
        try:
            while True:
                self._draining.clear()
                told = self._drain
                draining = asyncio.create_task(gateway.drain(told.within_s, told.linger_s))
                again = asyncio.create_task(self._draining.wait())
                await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
                for task in (draining, again):
                    task.cancel()
                if draining.done():
                    draining.result()
                    return
        finally:
            await gateway.aclose()

    async def _read(self) -> None:
        await self._channel.run()
        self._draining.set()  # the supervisor is gone

    def _on_sigterm(self) -> None:
        self._draining.set()

    async def _beat(self, gateway: Gateway) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                self._channel.tell(messages.Counted.of(gateway.snapshot()))
            except Exception as bug:  # noqa: BLE001  no reason to be taken for stuck
                self._log.event("bug", type=type(bug).__name__, where="heartbeat")

    async def _hear(self, message: Any) -> Message | None:
        match message:
            case messages.Start():
                self._view.begin(message)
                self._drained = set(message.draining)
                self._started.set_result(message)
            case messages.Engines():
                self._view.engines = message.addresses
            case messages.Drain():
                self._drain = message
                self._draining.set()
            case messages.DrainUpstream() if self._gateway is None:
                noted = self._drained
                (noted.add if message.is_draining else noted.discard)(message.name)
            case _ if self._gateway is None:
                raise ChannelError("it is starting")
            case _:
                return await self._obey(self._gateway, message)
        return None

    async def _obey(self, gateway: Gateway, message: Any) -> Message | None:
        match message:
            case messages.Collect():
                return messages.Counted.of(gateway.snapshot())
            case messages.Invalidate():
                return messages.Forgotten(
                    await gateway.invalidate(message.what, message.number, dry_run=message.dry_run)
                )
            case messages.DrainUpstream():
                gateway.drain_upstream(message.name, is_draining=message.is_draining)
                return messages.Done()
            case messages.Prepare():
                self._prepared = gateway.prepare(message.settings)
                return messages.Done()
            case messages.Commit():
                prepared, self._prepared = self._prepared, None
                gateway.commit(prepared)
                return messages.Done()
            case messages.Abort():
                self._prepared = None
        return None


def raise_file_limit(settings: Settings, log: Log) -> None:
    """Room for every connection that the settings allow, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    engines = settings.engines.values()
    wanted = settings.listen.connections + sum(one.max_connections for one in engines) + 64
    if soft < wanted:
        log.event("few-files", limit=soft, wanted=wanted)


def _sockets(descriptors: tuple[int, ...]) -> list[socket.socket]:
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


async def _live(end: socket.socket) -> int:
    return await Worker().run(end)


def main() -> int:
    """Live until told to end."""
    signals.ignore()
    end = socket.socket(fileno=int(sys.argv[1]))
    try:
        import uvloop  # noqa: PLC0415  not on every platform
    except ImportError:  # a third more CPU, the same behaviour
        return asyncio.run(_live(end))
    return uvloop.run(_live(end))


if __name__ == "__main__":
    sys.exit(main())
