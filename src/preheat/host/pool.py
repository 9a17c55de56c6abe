"""The workers: as many as there are slots, each started again when it dies, asked all together."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final

from preheat.config import Settings
from preheat.core.ledger import Account
from preheat.core.stats import Snapshot
from preheat.core.types import Removed
from preheat.errors import ConfigError
from preheat.host import messages
from preheat.host.channel import ChannelError
from preheat.host.messages import Message
from preheat.host.restarts import Restarts
from preheat.host.rounds import Rounds
from preheat.host.sockets import Set
from preheat.host.worker_process import START_S, Common, WorkerProcess
from preheat.telemetry.logs import Log

TICK_S: Final = 1.0
SILENT_TICKS: Final = 30
"""A worker that says nothing for so long is stuck."""
SUCCESSOR_S: Final = 30.0
"""A worker that starts after others has this long, or thrice what they took: meanwhile its slot
changes for nothing else."""
COLLECT_S: Final = 1.0
PREPARE_S: Final = 10.0
LINGER_S: Final = 1.0
"""How long a worker that is replaced leaves idle connections open for a request under way."""
_END_S: Final = 5.0
_RETIRED_ACCOUNTS: Final = 4_096
_RETIRED_UPSTREAMS: Final = 1_024


class _Slot:
    """The place of one worker. `lock` is held while a process for it starts."""

    def __init__(self, number: int, listen: Set, admin: Set) -> None:
        self.number = number
        self.listen = listen
        self.admin = admin
        self.generation = 0
        self.restarts = Restarts()
        self.lock = asyncio.Lock()
        self.current: WorkerProcess | None = None


class Pool:
    """Owns the worker processes."""

    def __init__(
        self,
        settings: Settings,
        listen: list[Set],
        admin: list[Set],
        log: Log,
        common: Common,
        *,
        on_death: Callable[[int], None],
    ) -> None:
        self.settings = settings
        self._log = log
        self._common = common
        self._on_death = on_death
        self._slots = [
            _Slot(number, sockets, admin[number] if admin else ())
            for number, sockets in enumerate(listen)
        ]
        self._processes: set[WorkerProcess] = set()
        self._retired = Snapshot()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = False
        self._successor_s = SUCCESSOR_S
        self._collection = Rounds(self._collected)

    # Life ------------------------------------------------------------------------------------

    async def spawn(self) -> None:
        """Make the first processes: they load their modules while the engines start."""
        for slot in self._slots:
            slot.current = await self._spawn(slot)

    async def start(self) -> None:
        """Return when all of them accept requests. Raises ConfigError."""
        first = [slot.current for slot in self._slots if slot.current is not None]
        began_at = asyncio.get_running_loop().time()
        await asyncio.gather(
            *(process.start(self.settings, self._common, START_S) for process in first)
        )
        took_s = asyncio.get_running_loop().time() - began_at
        self._successor_s = max(SUCCESSOR_S, 3 * took_s)
        for process in first:
            self._log.event("worker-ready", pid=process.pid, slot=process.slot)
            self._own(self._watch(process))
        self._own(self._tick())

    async def drain(self, within_s: float) -> None:
        """End all workers, and let what is under way end."""
        self._is_ending = True
        for process in self._processes:
            process.drain(within_s)
        # Not one by one: each may take all of the time.
        await asyncio.gather(
            *(process.ends_within(within_s + _END_S) for process in tuple(self._processes))
        )

    async def aclose(self) -> None:
        """End what is left, at once."""
        self._is_ending = True
        for task in self._tasks:
            task.cancel()
        left = [process for process in self._processes if not process.has_ended]
        for process in left:
            process.drain(0.0)
        await asyncio.gather(*(process.ends_within(1.0) for process in left))

    async def roll(self, settings: Settings) -> None:
        """Replace one worker after the other: its successor answers before it ends. Raises
        ConfigError where one can't start, and goes no further."""
        for slot in self._slots:
            async with slot.lock:
                successor = await self._launch(slot, settings)
                self.settings = settings
                predecessor, slot.current = slot.current, successor
            if predecessor is not None and not predecessor.has_ended:
                drain_s = settings.listen.drain_s
                predecessor.drain(drain_s, LINGER_S)
                await predecessor.ends_within(drain_s + _END_S)
        self._common.draining.keep(settings)

    # Questions to all ------------------------------------------------------------------------

    async def snapshots(self) -> Snapshot:
        """What all of them counted, those that are gone included."""
        return await self._collection.result()

    async def _collected(self) -> Snapshot:
        await asyncio.gather(*(self._collect(process) for process in self._answering()))
        total = Snapshot()
        total.add(self._retired)
        for process in self._processes:
            total.add(process.snapshot)
        return total

    async def invalidate(self, message: messages.Invalidate) -> messages.Forgotten:
        """Forget it in every L1. A stuck worker gets the message when it goes on."""
        processes = self._answering()
        answers = await asyncio.gather(
            *(process.channel.call(message, COLLECT_S) for process in processes),
            return_exceptions=True,
        )
        found = [one.removed for one in answers if isinstance(one, messages.Forgotten)]
        keys = dict.fromkeys(key for one in found for key in one.keys)
        unheard = sum(
            not isinstance(answer, messages.Forgotten) and not process.has_ended
            for process, answer in zip(processes, answers, strict=True)
        )
        return messages.Forgotten(
            Removed(tuple(keys), sum(one.size_bytes for one in found)), unheard
        )

    async def drain_upstream(self, message: messages.DrainUpstream) -> bool:
        """Let that server take nothing more from any worker, or again, those to come included.
        Whether there is one of that name."""
        draining = self._common.draining
        if not draining.note(self.settings, message.name, is_draining=message.is_draining):
            return False
        answering = self._answering()
        for process in self._processes.difference(answering):
            process.channel.tell(message)
        await asyncio.gather(
            *(process.channel.call(message, COLLECT_S) for process in answering),
            return_exceptions=True,
        )
        return True

    async def reload(self, settings: Settings) -> None:
        """Let all workers go on with these settings, or none. Raises ConfigError."""
        async with contextlib.AsyncExitStack() as stack:
            for slot in self._slots:  # none starts meanwhile with the old ones
                await stack.enter_async_context(slot.lock)
            processes = self._answering()
            answers = await asyncio.gather(
                *(one.channel.call(messages.Prepare(settings), PREPARE_S) for one in processes),
                return_exceptions=True,
            )
            for process, answer in zip(processes, answers, strict=True):
                if isinstance(answer, BaseException) and not process.has_ended:
                    for one in processes:
                        one.channel.tell(messages.Abort())
                    raise ConfigError(str(answer))
            self.settings = settings
            await asyncio.gather(*(self._commit(process) for process in processes))
            self._common.draining.keep(settings)
            for name in self._common.draining.names(settings):  # some engines may be new objects
                self.tell(messages.DrainUpstream(name, is_draining=True))

    def tell(self, message: Message) -> None:
        """Tell all of them."""
        for process in self._processes:
            process.channel.tell(message)

    def _answering(self) -> list[WorkerProcess]:
        return [process for process in self._processes if process.state != "starting"]

    async def _collect(self, process: WorkerProcess) -> None:
        with contextlib.suppress(ChannelError):
            counted = await process.channel.call(messages.Collect(), COLLECT_S)
            process.snapshot = counted.snapshot

    async def _commit(self, process: WorkerProcess) -> None:
        try:
            await process.channel.call(messages.Commit(), PREPARE_S)
        except ChannelError as error:
            if not process.has_ended:  # its successor has them
                self._log.event("worker-killed", pid=process.pid, why=f"reload: {error}")
                process.kill()

    async def _on_call(self, message: Any) -> Message | None:
        match message:
            case messages.AskSnapshots():
                return messages.Counted.of(await self.snapshots())
            case messages.AskWorkers():
                return messages.Workers(
                    sorted(
                        (process.describe() for process in self._processes),
                        key=lambda one: (one.slot, one.generation),
                    )
                )
            case messages.Invalidate():
                return await self.invalidate(message)
            case messages.DrainUpstream():
                return messages.Known(await self.drain_upstream(message))
        return None

    # One worker ------------------------------------------------------------------------------

    async def _spawn(self, slot: _Slot) -> WorkerProcess:
        slot.generation += 1
        process = WorkerProcess(
            slot.number, slot.generation, slot.listen, slot.admin, self._on_call
        )
        await process.spawn()
        self._processes.add(process)
        return process

    async def _launch(self, slot: _Slot, settings: Settings) -> WorkerProcess:
        process = await self._spawn(slot)
        try:
            await process.start(settings, self._common, self._successor_s)
        except BaseException:
            self._processes.discard(process)
            process.kill()
            raise
        self._log.event(
            "worker-ready", pid=process.pid, slot=slot.number, took_s=round(process.alive_s, 3)
        )
        self._own(self._watch(process))
        return process

    async def _watch(self, process: WorkerProcess) -> None:
        await process.wait()
        self._processes.discard(process)
        self._retire(process.snapshot)
        self._on_death(process.by_signal)
        slot = self._slots[process.slot]
        was_wanted = slot.current is process and not self._is_ending
        self._log.event(
            "worker-died" if was_wanted else "worker-ended",
            pid=process.pid,
            slot=process.slot,
            how=process.how,
            alive_s=round(process.alive_s, 3),
        )
        if was_wanted:
            await self._replace(slot, slot.restarts.pause_s(process.alive_s, worked=True))

    async def _replace(self, slot: _Slot, pause_s: float) -> None:
        while not self._is_ending:
            await asyncio.sleep(pause_s)
            async with slot.lock:
                if slot.current is not None and not slot.current.has_ended:
                    return  # a rolling restart was faster
                began_at = asyncio.get_running_loop().time()
                try:
                    slot.current = await self._launch(slot, self.settings)
                except ConfigError as error:
                    lived_s = asyncio.get_running_loop().time() - began_at
                    pause_s = slot.restarts.pause_s(lived_s, worked=False)
                    self._log.event(
                        "worker-start-failed", slot=slot.number, why=str(error), retry_in_s=pause_s
                    )
                else:
                    return

    def _retire(self, snapshot: Snapshot) -> None:
        """Keep what it counted. Clients name models, so names that are new are at some time too
        many: those become `(other)`, as in a worker's own ledger. Upstreams that are new then are
        forgotten."""
        snapshot.retire()
        known = self._retired.accounts
        if len(known) + len(snapshot.accounts) > _RETIRED_ACCOUNTS:
            few: dict[tuple[str, str, str, str], Account] = {}
            for name, account in snapshot.accounts.items():
                tenant, _, layer, reason = name
                kept = name if name in known else (tenant, "(other)", layer, reason)
                few.setdefault(kept, Account()).add(account)
            snapshot.accounts = few
        upstreams = self._retired.upstreams
        if len(upstreams) + len(snapshot.upstreams) > _RETIRED_UPSTREAMS:
            snapshot.upstreams = {
                name: one for name, one in snapshot.upstreams.items() if name in upstreams
            }
        self._retired.add(snapshot)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for process in self._answering():
                process.silent += 1
                if process.silent > SILENT_TICKS:
                    self._log.event("worker-killed", pid=process.pid, why="it is stuck")
                    process.silent = 0
                    process.kill()

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
