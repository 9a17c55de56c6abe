"""The servers of a group: who comes and who goes, and who is watched for its return."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

from preheat.core.breaker import Breaker
from preheat.core.router import Router
from preheat.engines.beside import tell_bug
from preheat.engines.slot_seats import SlotFolders, SlotRules, SlotSeats
from preheat.engines.worker import Headers, HttpClient, OnEvent, Worker, name_at
from preheat.errors import ConfigError

ENDED: Final = frozenset({"connect", "reset"})
"""Failures of a process that is no more: its successor's cache is empty."""

_LEAVE_S: Final = 600.0
_LOOK_S: Final = 0.1


class Members:
    """Each url's worker, with its connections. One that failed is asked for its health until it is well."""

    def __init__(
        self,
        name: str,
        *,
        connect: Callable[[str], HttpClient],
        breaker: Breaker,
        router: Router | None,
        slots: SlotRules,
        api_key: str,
        probe_headers: Headers,
        on_event: OnEvent,
        on_back: Callable[[Worker], None],
        on_leave: Callable[[Worker], Awaitable[None]],
    ) -> None:
        """`on_back`: one answers again, and is another process as it seems. `on_leave`: nothing more is
        to be asked of it."""
        self.here: list[Worker] = []
        self.leaving: set[Worker] = set()
        self._name = name
        self._connect = connect
        self._breaker = breaker
        self._router = router
        self._folders = SlotFolders(slots)
        self._api_key = api_key
        self._probe_headers = probe_headers
        self._on_event = on_event
        self._on_back = on_back
        self._on_leave = on_leave
        self._health_path = ""
        self._health_s = 1.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    def arranged(self, urls: Sequence[str]) -> list[Worker]:
        """A worker for each url, those there are among them. Changes nothing. Raises ConfigError."""
        if not urls:
            raise ConfigError(f"engines.{self._name}.url: expected an address, got none")
        if len(set(urls)) != len(urls):
            raise ConfigError(f"engines.{self._name}.urls: one of them is named twice")
        known = {one.url: one for one in self.here}
        taken = {one.number for one in (*self.here, *self.leaving)}
        numbers = (number for number in itertools.count() if number not in taken)
        return [
            known.get(url) or self._made(next(numbers), position, url, len(urls))
            for position, url in enumerate(urls)
        ]

    def change(self, arranged: list[Worker]) -> list[Worker]:
        """From now on these are there; who isn't among them ends what is under way, and goes. Those
        that are new."""
        left = [one for one in self.here if one not in arranged]
        new = [one for one in arranged if one not in self.here]
        self.here = arranged
        for position, one in enumerate(arranged):
            one.name = name_at(self._name, position, len(arranged))
        for one in left:
            one.is_draining = True
            self.leaving.add(one)
            if self._router is not None:
                self._router.left(one.number)
            self.own(self.leave(one))
        return new

    def watch_at(self, health_path: str, health_s: float) -> None:
        """Where those that are down are asked whether they are well, and how often. Raises ConfigError."""
        checked_path(self._name, health_path)
        if health_path != self._health_path:
            for one in self.here:
                one.knows_health = True
        self._health_path, self._health_s = health_path, health_s

    async def leave(self, worker: Worker) -> None:
        """Close it once nothing is under way there, within a bounded time."""
        await self._on_leave(worker)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await asyncio.sleep(_LOOK_S)
                while worker.client.in_flight:  # noqa: ASYNC110  an event would cost each request
                    await asyncio.sleep(_LOOK_S)
        await worker.aclose()
        self.leaving.discard(worker)

    def drained(self, worker: Worker) -> None:
        """It takes nothing more: what its slots hold is saved, once nothing is under way there."""
        self.own(self._save(worker))

    def own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it beside the requests, as long as the group is there; a defect in it is told."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def erase(self, tenant: str) -> int:
        """Delete what a tenant has in slot files, and let its slots be written no more; how many files
        they were. Raises ConfigError, after all the others, where that can't be done."""
        try:
            return await asyncio.to_thread(self._folders.erase, tenant)
        finally:
            for one in (*self.here, *self.leaving):
                if one.seats is not None and one.seats.keeper is not None:
                    await one.seats.keeper.erase(tenant)  # and what was being written meanwhile

    async def end_tasks(self) -> None:
        """Whatever goes on beside the requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """Close every connection now."""
        await asyncio.gather(*(one.aclose() for one in (*self.here, *self.leaving)))

    def _made(self, number: int, position: int, url: str, of: int) -> Worker:
        worker = Worker(
            number,
            name_at(self._name, position, of),
            url,
            self._connect(url),
            self._breaker.fresh(),
            self._went_down,
            self._on_event,
            self._came_back,
        )
        folder = self._folders.at(position)
        if folder is not None and self._router is not None:
            worker.seats = SlotSeats(url, self._api_key, folder, self._folders)
            worker.restore = worker.seats.refill
        return worker

    def _came_back(self, worker: Worker) -> None:
        if worker.last_error_kind in ENDED:
            self._on_back(worker)

    def _went_down(self, worker: Worker) -> None:
        """Watch for its return, where there are others to answer meanwhile."""
        if self._router is not None and worker.last_error_kind in ENDED:
            self._router.cleared(worker.number)
            if worker.seats is not None:
                worker.seats.restarted()
        worker.is_probed = len(self.here) > 1 and bool(self._health_path) and worker.knows_health
        if worker.is_probed and self._watcher is None:
            self._watcher = self.own(self._watch())

    async def _watch(self) -> None:
        """Ask those that are down for their health, until none is."""
        try:
            while True:
                await asyncio.sleep(self._health_s)
                down = [one for one in self.here if one.is_probed and not one.breaker.is_closed]
                if not down:
                    return
                target = self._health_path.encode()
                limit_s = min(5.0, max(1.0, self._health_s))
                await asyncio.gather(
                    *(one.probe(target, self._probe_headers, limit_s) for one in down)
                )
        finally:
            self._watcher = None

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        bug = None if task.cancelled() else task.exception()
        if isinstance(bug, Exception):
            tell_bug(self._on_event, bug, None)

    async def _save(self, worker: Worker) -> None:
        keeper = None if worker.seats is None else worker.seats.keeper
        if keeper is None:
            return
        while worker.client.in_flight and worker.is_draining:  # noqa: ASYNC110  as in `leave`
            await asyncio.sleep(_LOOK_S)
        if worker.is_draining:
            saved = await keeper.save_all()
            self._on_event("slots-saved", {"worker": worker.name, "slots": saved})


def checked_path(name: str, path: str) -> None:
    """Raise ConfigError for what can't be the path of a group's health."""
    if path and not (path.startswith("/") and path.isascii() and path.split() == [path]):
        raise ConfigError(
            f"engines.{name}.health_path: expected a path such as /health, got {path!r}"
        )
