"""One worker process, seen from the supervisor: started, told things, heard, ended."""

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Literal

from preheat.config import Settings
from preheat.core.stats import Snapshot
from preheat.engines.child import Address, how_ended
from preheat.errors import ConfigError
from preheat.gateway.hosting import ProcessState
from preheat.host import messages, signals
from preheat.host.channel import Channel
from preheat.host.draining import Draining
from preheat.host.messages import Message
from preheat.host.secret import Secret
from preheat.host.sockets import Set

START_S: Final = 300.0
"""The first workers': weights may have to be read for their digest."""
PROGRAM: tuple[str, ...] = ("-m", "preheat.host.worker")
"""What Python is told to run; tests put something else here."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

OnCall = Callable[[Any], Awaitable[Message | None]]


class Common:
    """What all workers of a host have in common. `engines` are the embedded ones' addresses, `learner` is
    the path of its socket, if there is one."""

    def __init__(self, secret: Secret, learner: str = "") -> None:
        self.learner = learner
        self.name = secrets.token_hex(4)
        self.secret = secret
        self.engines: dict[str, Address | None] = {}
        self.draining = Draining()


class WorkerProcess:
    """`snapshot` is the last that was heard; `silent` counts the supervisor's ticks since then."""

    def __init__(
        self, slot: int, generation: int, listen: Set, admin: Set, on_call: OnCall
    ) -> None:
        self.slot = slot
        self.generation = generation
        self.state: Literal["starting", "ready", "draining"] = "starting"
        self.snapshot = Snapshot()
        self.silent = 0
        self.channel = Channel(messages.SUPERVISOR_READS, self._hear)
        self._listen = tuple(one.fileno() for one in listen)
        self._admin = tuple(one.fileno() for one in admin)
        self._on_call = on_call
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        # What it said of its start: None when it is ready, else why not ("": it said nothing).
        self._report: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._began_at = time.monotonic()
        self._started_at = time.time()

    async def spawn(self) -> None:
        """Make the process. It loads its modules and waits for `start`."""
        ours, theirs = socket.socketpair()
        try:
            with signals.held():
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *_path_flags(),
                    *PROGRAM,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=(theirs.fileno(), *self._listen, *self._admin),
                )
        except OSError as error:
            ours.close()
            raise ConfigError(f"no process could be made for a worker: {error.strerror}") from None
        finally:
            theirs.close()
        await self.channel.open(ours)
        self._reading = asyncio.create_task(self._read(), name="worker-channel")

    async def start(self, settings: Settings, common: Common, within_s: float) -> None:
        """Return when it accepts requests. Raises ConfigError, with the process ended."""
        secret = await asyncio.to_thread(common.secret.told, settings)
        self.channel.tell(
            messages.Start(
                settings,
                self.slot,
                self.generation,
                self._listen,
                self._admin,
                common.engines,
                common.name,
                secret,
                common.draining.names(settings),
                common.learner,
            )
        )
        try:
            async with asyncio.timeout(within_s):
                failure = await asyncio.shield(self._report)
        except TimeoutError:
            failure = f"a worker wasn't ready within {within_s:g} s"
        if failure is not None:
            await self.ends_within(1.0)
            raise ConfigError(failure or f"a worker ended before it was ready ({self.how})")

    def drain(self, within_s: float, linger_s: float = 0.0) -> None:
        """Tell it to end."""
        self.state = "draining"
        self.channel.tell(messages.Drain(within_s, linger_s))

    def kill(self) -> None:
        """End it now."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def wait(self) -> None:
        """Return after its end, when all is heard that it said."""
        assert self._process is not None
        await self._process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading})

    async def ends_within(self, limit_s: float) -> bool:
        """Whether it ended by itself; it has ended in any case, afterwards."""
        try:
            async with asyncio.timeout(limit_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
            return False
        return True

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    @property
    def alive_s(self) -> float:
        return time.monotonic() - self._began_at

    @property
    def by_signal(self) -> int:
        """The number of the signal that ended it; 0 where none did."""
        code = self._process.returncode if self._process is not None else None
        return max(0, -(code or 0))

    @property
    def how(self) -> str:
        """How it ended."""
        return how_ended(self._process.returncode if self._process is not None else None)

    def describe(self) -> ProcessState:
        """What an operator sees of it."""
        return ProcessState(
            pid=self.pid,
            slot=self.slot,
            generation=self.generation,
            started_at=round(self._started_at, 3),
            uptime_s=round(self.alive_s, 3),
            state=self.state,
            rss_bytes=_rss_bytes(self.pid),
        )

    async def _read(self) -> None:
        await self.channel.run()
        self._tell_start("")

    def _tell_start(self, failure: str | None) -> None:
        if not self._report.done():
            self._report.set_result(failure)

    async def _hear(self, message: Any) -> Message | None:
        match message:
            case messages.Ready():
                self.state = "ready"
                self._tell_start(None)
            case messages.Failed():
                self._tell_start(message.message)
            case messages.Counted():
                self.silent = 0
                self.snapshot = message.snapshot
            case messages.Drained():
                self.snapshot = message.counted.snapshot
            case _:
                return await self._on_call(message)
        return None


def _path_flags() -> tuple[str, ...]:
    """No file of the working directory may pose as a module, unless the operator has it so."""
    return () if sys.path[0] in {"", str(Path.cwd())} else ("-P",)


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0
