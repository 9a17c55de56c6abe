"""The readiness gate: who comes cold gets what is hot before it gets requests."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

import msgspec

from preheat.core.router import Router
from preheat.engines.adapter_loads import AdapterLoads
from preheat.engines.attendant import Attendant
from preheat.engines.beside import guarded, tell_bug
from preheat.engines.dialects.calls import get
from preheat.engines.dialects.readings import Capacity
from preheat.engines.warmers import Warmers
from preheat.engines.warmth import Hot, Warmth
from preheat.engines.worker import OnEvent, Worker
from preheat.errors import EngineError

_HEALTH: Final = get("/health")
"""Whoever has no such path answers all the same, and llama.cpp says 503 while it loads."""
_WITHIN_S: Final = 5.0
_LOOK_S: Final = 0.25
_MOST: Final = 64
_SHARE: Final = 0.5
"""Of a cache, what is warmed: the rest is for what comes, and estimates of tokens may be off."""
_TOKEN_BYTES: Final = 4.0
"""Of English."""
_PRESUMED: Final = frozenset({"back", "new"})
"""Held for what nobody's counts have told: another process is presumed."""


class Gate:
    """Holds the servers of a group back, each for `gate_s` at most, while it readies them.

    `Worker.restore` comes first, where there is one: what can be read from files. Then the adapters that are asked
    for, and what is hot and fits, as far as the time reaches. Afterwards the router lets it have a growing share (`core.ramp`).
    """

    def __init__(
        self,
        gate_s: float,
        warmth: Warmth | None,
        warmers: Warmers,
        router: Router,
        attendant_of: Callable[[Worker], Attendant | None],
        on_event: OnEvent,
        loads: AdapterLoads | None = None,
    ) -> None:
        self._gate_s = gate_s
        self._warmth = warmth
        self._warmers = warmers
        self._router = router
        self._attendant_of = attendant_of
        self._on_event = on_event
        self._loads = loads
        self._held: dict[Worker, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # those that are being ended, too

    def hold(self, worker: Worker, why: str) -> None:
        """It is cold, as it seems; "drained": where its process is another one since. Who is draining isn't held:
        its attendant notes that it is another one, and it is held when the drain ends."""
        attendant = self._attendant_of(worker)
        if attendant is not None and why in _PRESUMED:
            attendant.presume_started()
        if worker in self._held or worker.is_draining or not self._gate_s:
            return
        if attendant is None:
            self._router.returned(worker.number, monotonic())
            return
        worker.is_gated = True
        task = asyncio.get_running_loop().create_task(self._held_back(worker, attendant, why))
        self._held[worker] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def release(self, worker: Worker) -> None:
        """It is to be left alone, from this moment on: what it didn't get yet it gets another time."""
        task = self._held.pop(worker, None)
        if task is not None:
            worker.is_gated = False
            task.cancel()

    async def left(self, worker: Worker) -> None:
        """It is no more."""
        task = self._held.get(worker)
        self.release(worker)
        if task is not None:
            await asyncio.wait([task])

    async def aclose(self) -> None:
        """Release all."""
        for worker in tuple(self._held):
            self.release(worker)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _held_back(self, worker: Worker, attendant: Attendant, why: str) -> None:
        await guarded(self._ready(worker, attendant, why), self._on_event, worker.name)

    async def _ready(self, worker: Worker, attendant: Attendant, why: str) -> None:
        began_at = monotonic()
        counts = worker.readied
        before = msgspec.structs.replace(counts)
        is_late = is_cold = False
        try:
            async with asyncio.timeout(self._gate_s):
                is_cold = await self._is_cold(worker, attendant, why)
                if is_cold:
                    self._on_event("upstream-gated", {"worker": worker.name, "why": why})
                    await self._fill_all(worker, attendant)
        except asyncio.CancelledError:
            raise  # whoever did that has released it, and may hold it again
        except TimeoutError:
            is_late = True
        except Exception as bug:  # noqa: BLE001  it takes requests all the same
            is_late = True
            tell_bug(self._on_event, bug, worker.name)
        worker.is_gated = False
        del self._held[worker]  # at once, that none who says it is cold again goes unheard
        attendant.readied = attendant.starts
        if not is_cold and not is_late:
            return
        self._router.returned(worker.number, monotonic())
        took_s = monotonic() - began_at
        counts.gates += 1
        counts.late += is_late
        counts.held_s += took_s
        fields = {
            "worker": worker.name,
            "restored": counts.restored - before.restored,
            "adapters": counts.adapters - before.adapters,
            "warmed": counts.warmed - before.warmed,
            "tokens": counts.tokens - before.tokens,
            "took_s": round(took_s, 3),
            "in_time": not is_late,
        }
        self._on_event("upstream-ready", fields)

    async def _is_cold(self, worker: Worker, attendant: Attendant, why: str) -> bool:
        """Once it answers: whether its cache is thought empty. Who was drained may be the same process, if that
        can be told; it doesn't matter which look has seen that it isn't."""
        direct = self._warmers.direct(worker)
        while True:
            with contextlib.suppress(EngineError, TimeoutError):
                status, _ = await direct.ask(_HEALTH, within_s=_WITHIN_S)
                if status < 500:
                    would_say = await attendant.look()
                    is_anew = attendant.starts != attendant.readied
                    if not (is_anew or would_say) and worker.seats is not None:
                        worker.seats.restarted()  # nobody knows: what its slots had is loaded again
                    return is_anew or not would_say or why != "drained"
            await asyncio.sleep(_LOOK_S)

    async def _fill_all(self, worker: Worker, attendant: Attendant) -> None:
        """Give it what is hot, and again where it has become another one meanwhile."""
        while True:
            start = attendant.starts
            await self._fill(worker, attendant)
            if attendant.starts == start:
                return
            await self._is_cold(worker, attendant, "again")

    async def _fill(self, worker: Worker, attendant: Attendant) -> None:
        if worker.restore is not None:
            worker.readied.restored += await worker.restore()
        if self._loads is not None:  # before the prefixes, some of which are theirs
            worker.readied.adapters += await self._loads.fill(worker)
        if self._warmth is None:
            return
        for hot in fitting(await self._warmth.hot(), attendant.known.capacity):
            outcome = await self._warmers.warm(worker, hot, "gate")
            if outcome.state == "done" and outcome.chunks:  # else it was there already
                worker.readied.warmed += 1
                worker.readied.tokens += outcome.tokens


def fitting(hots: Sequence[Hot], capacity: Capacity | None) -> list[Hot]:
    """Of these, the first that fit together: into half of a cache of blocks, or into slots one each."""
    tokens = most = slot_tokens = None
    if capacity is not None:
        most, slot_tokens = capacity.slots, capacity.slot_tokens
        if capacity.tokens is not None and most is None:
            tokens = capacity.tokens * _SHARE
    found: list[Hot] = []
    for hot in hots:
        needed = hot.text_bytes / _TOKEN_BYTES
        if len(found) == min(_MOST, most or _MOST):
            break
        if (tokens is not None and needed > tokens) or (slot_tokens and needed > slot_tokens):
            continue
        if tokens is not None:
            tokens -= needed
        found.append(hot)
    return found
