"""Has servers load LoRA adapters: each once, whoever waits for it, and within a time."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

import msgspec

from preheat.core.adapters import REFUSED_S, Adapters
from preheat.engines.beside import guarded
from preheat.engines.direct import Direct
from preheat.engines.worker import AdapterCounts, OnEvent, Worker
from preheat.errors import EngineError

_WITHIN_S: Final = 60.0
"""A load; what takes longer is taken for refused."""


class AdapterLoads:
    """Of one group of servers. A load goes on when those who wanted it have left: the next one wants it too."""

    def __init__(
        self, adapters: Adapters, direct_of: Callable[[Worker], Direct], on_event: OnEvent
    ) -> None:
        self._adapters = adapters
        self._direct_of = direct_of
        self._on_event = on_event
        self._counts: dict[Worker, AdapterCounts] = {}
        self._under_way: dict[tuple[Worker, str], asyncio.Task[str | None]] = {}

    async def ready(self, worker: Worker, name: str) -> None:
        """Return once that server has it. Raises EngineError where it won't."""
        why = await asyncio.shield(self._load(worker, name))
        if why != "":
            raise EngineError(
                f"{worker.name} doesn't load the adapter {name}: {why or 'a defect of ours'}",
                kind="adapter",
                retry_after_s=REFUSED_S,
                worker=worker.name,
            )

    async def fill(self, worker: Worker) -> int:
        """Load what is wanted there, one after the other; how many it has then that it hadn't."""
        found = 0
        for name in self._adapters.wanted(worker.number, monotonic()):
            with contextlib.suppress(EngineError):
                await self.ready(worker, name)
                found += 1
        return found

    async def is_lost(self, worker: Worker, name: str) -> bool:
        """Whether it says that it hasn't it any more; noted."""
        asked_at = monotonic()
        try:
            listed = await self._listed(self._direct_of(worker))
        except EngineError:
            return False
        if listed is None or name in listed:
            return False
        self._adapters.lists(worker.number, listed, asked_at, can_load=True)
        return True

    def counts(self, worker: Worker) -> AdapterCounts:
        """What became of its loads, and what it has."""
        counts = self._counts.get(worker, AdapterCounts())
        return msgspec.structs.replace(counts, names=self._adapters.held(worker.number))

    async def forget(self, worker: Worker) -> None:
        """That server is no more."""
        self._counts.pop(worker, None)
        await self._end([task for key, task in self._under_way.items() if key[0] is worker])

    async def aclose(self) -> None:
        """End all."""
        await self._end(tuple(self._under_way.values()))

    async def _end(self, tasks: Iterable[asyncio.Task[str | None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _load(self, worker: Worker, name: str) -> asyncio.Task[str | None]:
        """Why it can't be had; "": it is there."""
        key = worker, name
        task = self._under_way.get(key)
        if task is None:
            self._adapters.began(worker.number, name, monotonic())
            work = guarded(self._loaded(worker, name), self._on_event, worker.name)
            task = self._under_way[key] = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(lambda _: self._ended(worker, name))
        return task

    def _ended(self, worker: Worker, name: str) -> None:
        self._under_way.pop((worker, name), None)
        self._adapters.stopped(worker.number, name)

    async def _loaded(self, worker: Worker, name: str) -> str:
        began_at = monotonic()
        counts = self._counts.setdefault(worker, AdapterCounts())
        try:
            async with asyncio.timeout(_WITHIN_S):
                is_new, why = await self._ask(self._direct_of(worker), name)
        except EngineError as error:
            is_new, why = False, str(error)
        except TimeoutError:
            is_new, why = False, f"it wasn't done within {_WITHIN_S:g} s"
        took_s = monotonic() - began_at
        fields: dict[str, object] = {"worker": worker.name, "adapter": name}
        if why:
            counts.refused += 1
            self._adapters.refused(worker.number, name, monotonic())
            self._on_event("adapter-refused", {**fields, "why": why, "again_in_s": REFUSED_S})
            return why
        self._adapters.loaded(worker.number, name, took_s if is_new else 0.0, monotonic())
        if is_new:
            counts.loads += 1
            counts.load_s += took_s
            self._on_event("adapter-loaded", {**fields, "took_s": round(took_s, 3)})
        return ""

    async def _ask(self, direct: Direct, name: str) -> tuple[bool, str]:
        """Whether it was loaded now, or why it can't be had. Raises EngineError."""
        if name in (await self._listed(direct) or ()):
            return False, ""
        dialect = await direct.known()
        path = self._adapters.sources.get(name, "")
        if not path:
            return False, "the settings don't say where it lies"
        call = dialect.load_adapter(name, path)
        if call is None:
            return False, f"{dialect.name} loads adapters at its start only"
        done = dialect.read_done(*await direct.ask(call))
        if done.ok is not False:
            return True, ""
        if name in (await self._listed(direct) or ()):  # another process of ours was quicker
            return False, ""
        return False, done.why

    async def _listed(self, direct: Direct) -> list[str] | None:
        dialect = await direct.known()
        body = await direct.told(dialect.adapters())
        found = None if body is None else dialect.read_adapters(body)
        return None if found is None else [one.name for one in found]
