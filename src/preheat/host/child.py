"""Another process of ours beside the workers, started again when it dies."""

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from typing import Final

from preheat.errors import ConfigError
from preheat.host import signals
from preheat.host.restarts import Restarts
from preheat.telemetry.logs import Log

_TERM_S: Final = 2.0
LONGEST_PAUSE_S: Final = 30.0
"""Before one more try with a child that never came up: it has said why, and the reason may last."""


class Child:
    """`order` is what it reads from its standard input when it starts; the input's end tells it to
    end. It ends thereby with the supervisor, however that one ends."""

    def __init__(
        self, name: str, command: Sequence[str], log: Log, *, order: bytes = b"", end_s: float = 5.0
    ) -> None:
        self._name = name
        self._command = tuple(command)
        self._log = log
        self._order = order
        self._end_s = end_s
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None while it is down."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def is_started(self) -> bool:
        """Whether it is seen to."""
        return self._keeping is not None

    async def start(self) -> None:
        """Start it, and see to it from now on. Raises ConfigError."""
        try:
            self._process = await self._spawn()
        except OSError as error:
            raise ConfigError(f"no process could be made for the {self._name}: {error}") from None
        self._keeping = asyncio.create_task(self._keep(self._process), name=self._name)

    async def aclose(self) -> None:
        """End it within `end_s`, or by force."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        if await _ends_within(process, self._end_s):
            return
        for number, limit_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _TERM_S)):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            if await _ends_within(process, limit_s):
                return

    async def _spawn(self) -> asyncio.subprocess.Process:
        with signals.held():
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=2
            )
        assert process.stdin is not None
        process.stdin.write(self._order)
        return process

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        restarts = Restarts(LONGEST_PAUSE_S)
        while True:
            began_at = loop.time()
            code = await process.wait()
            alive_s = loop.time() - began_at
            pause_s = restarts.pause_s(alive_s, worked=False)
            self._log.event(
                f"{self._name}-died",
                pid=process.pid,
                code=code,
                alive_s=round(alive_s, 3),
                retry_in_s=pause_s,
            )
            while True:
                await asyncio.sleep(pause_s)
                try:
                    process = self._process = await self._spawn()
                except OSError:
                    pause_s = restarts.pause_s(0.0, worked=False)
                else:
                    break


async def _ends_within(process: asyncio.subprocess.Process, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        return False
    return True
