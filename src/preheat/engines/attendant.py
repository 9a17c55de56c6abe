"""Looks after one of several equal servers: what it is, what it holds, how busy it is."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

import msgspec

from preheat.core.router import Router
from preheat.engines.beside import tell_bug
from preheat.engines.dialects import DIALECTS, Dialect
from preheat.engines.dialects.calls import Call
from preheat.engines.dialects.detection import PROBES, detect
from preheat.engines.dialects.identity import Served, questions, served
from preheat.engines.dialects.readings import MOST_BYTES, Capacity, Load
from preheat.engines.worker import OnEvent, Worker
from preheat.errors import ConfigError, EngineError

_WITHIN_S: Final = 5.0
_AGAIN_S: Final = 5.0
_LATEST_AGAIN_S: Final = 60.0
"""How long after a failure it is asked again: twice as long each time, up to this."""
_CAPACITY_S: Final = 300.0


class Attended(msgspec.Struct, frozen=True):
    """What is known of a server. Empty and None: not yet, or it doesn't say."""

    dialect: str = ""
    capacity: Capacity | None = None
    load: Load | None = None


class Attendant:
    """Asks a server who it is, until it says; then how large its cache is, and every `poll_s`
    seconds how busy it is. Tells the router. It never asks one that is down or draining.

    A count of prompt tokens that has become smaller means that the server was started again; another model or
    version (`dialects.identity`) that it was switched, whatever it counts. `starts` is how often it became
    another one as far as is known, `readied` the last of these that got what is hot (`engines.gate`).
    """

    def __init__(
        self,
        worker: Worker,
        router: Router,
        dialect: str,
        api_key: str,
        poll_s: float,
        on_event: OnEvent,
        on_start: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.known = Attended()
        self._worker = worker
        self._router = router
        self._api_key = api_key
        self._dialect = None if dialect == "auto" else DIALECTS[dialect]
        self._poll_s = poll_s
        self._on_event = on_event
        self._on_start = on_start
        self.starts = self.readied = 0
        self._served = Served()
        self._turn = asyncio.Lock()  # answers that overtake each other would look like a restart
        self._measured_at = float("-inf")
        self._prompt_tokens = 0
        self._has_files = False
        self._files_at = float("-inf")
        self._do_slots_tell = False
        if worker.seats is not None:
            worker.seats.on_restart = partial(self._began_anew, "restarted", {})
        self._why_no_files: str | None = None

    async def run(self) -> None:
        """Until it is cancelled."""
        wait_s = _AGAIN_S
        while True:
            try:
                if self.is_up:
                    await self._look()
                    wait_s = self._poll_s
            except (EngineError, TimeoutError):  # the requests say that it is down, not we
                wait_s = min(_LATEST_AGAIN_S, 2.0 * wait_s)
            except Exception as bug:  # noqa: BLE001  nobody else would look after it
                wait_s = min(_LATEST_AGAIN_S, 2.0 * wait_s)
                tell_bug(self._on_event, bug, self._worker.name)
            await asyncio.sleep(wait_s)

    async def look(self) -> bool:
        """Look now, drained or not. Whether it has counts, or slots, that would say that it was started again
        (`starts`).
        Raises EngineError and TimeoutError."""
        self._measured_at = float("-inf")
        self.known = msgspec.structs.replace(self.known, load=None)
        await self._look()
        load = self.known.load
        has_counts = load is not None and load.prompt_tokens_total is not None
        return has_counts or self._do_slots_tell

    def presume_started(self) -> None:
        """It isn't the process that it was: what it counts now is no sign of another one."""
        self.starts += 1
        self._prompt_tokens = 0

    @property
    def dialect(self) -> Dialect | None:
        """What it speaks, once that is known."""
        return self._dialect

    async def told(self, call: Call) -> bytes | None:
        """Its answer's body; None where it says no. Raises EngineError or TimeoutError."""
        status, body = await self._ask(call, self._dialect or DIALECTS["openai"])
        return body if status == 200 else None

    @property
    def is_up(self) -> bool:
        """Whether it may be asked."""
        return self._worker.breaker.is_closed and not self._worker.is_draining

    async def _look(self) -> None:
        async with self._turn:
            await self._looked()

    async def _looked(self) -> None:
        dialect = await self._identified()
        await self._is_switched(dialect)
        now = time.monotonic()
        if now - self._measured_at >= _CAPACITY_S:
            await self._measure(dialect)
            self._measured_at = now
        await self._open_files()
        if self._worker.seats is not None:
            self._do_slots_tell = await self._worker.seats.look() is not None
        await self._read_load(dialect)
        await self._read_adapters(dialect)

    async def _identified(self) -> Dialect:
        if self._dialect is None:
            bodies: dict[bytes, bytes] = {}
            for probe in PROBES:
                status, body = await self._ask(probe, DIALECTS["openai"])
                if status == 200:
                    bodies[probe.path] = body
                if detect(bodies) != "openai":
                    break
            self._dialect = DIALECTS[detect(bodies)]
        if not self.known.dialect:
            self.known = Attended(self._dialect.name)
            self._on_event(
                "upstream-known", {"worker": self._worker.name, "dialect": self._dialect.name}
            )
        return self._dialect

    async def _measure(self, dialect: Dialect) -> None:
        call = dialect.capacity()
        if call is None:
            return
        status, body = await self._ask(call, dialect)
        capacity = dialect.read_capacity(body) if status == 200 else None
        if capacity is not None:
            self._tell_capacity(capacity)

    def _tell_capacity(self, capacity: Capacity) -> None:
        self.known = msgspec.structs.replace(self.known, capacity=capacity)
        if capacity.slots is not None and not self._has_files:
            self._router.has_slots(self._worker.number, capacity.slots)
        if capacity.tokens is not None:
            self._router.holds_tokens(self._worker.number, capacity.tokens, time.monotonic())

    async def _open_files(self) -> None:
        """Where its slots are to be kept in files: as soon as it is known, and again after a restart."""
        seats, capacity = self._worker.seats, self.known.capacity
        now = time.monotonic()
        if seats is None or now < self._files_at or capacity is None or capacity.tokens is None:
            return
        why = ""
        try:
            has_changed = await seats.open(capacity.tokens)
        except (ConfigError, EngineError, OSError) as error:
            has_changed, why = True, str(error)
            self._files_at = now + _LATEST_AGAIN_S
        if has_changed and why != self._why_no_files:
            fields: dict[str, object] = {"worker": self._worker.name, "slots": capacity.slots}
            if why:
                fields["why"] = why
            self._on_event("slot-files-off" if why else "slot-files-on", fields)
            self._why_no_files = why
        self._has_files = seats.keeper is not None
        if self._has_files:
            self._router.has_files(self._worker.number, seats.held_tokens, now)

    async def _read_load(self, dialect: Dialect) -> None:
        call = dialect.load()
        if call is None:
            return
        status, body = await self._ask(call, dialect)
        load = dialect.read_load(body) if status == 200 else None
        if load is None:
            return
        self.known = msgspec.structs.replace(self.known, load=load)
        now = time.monotonic()
        if load.prompt_tokens_total is not None:
            is_anew = load.prompt_tokens_total < self._prompt_tokens
            if is_anew and not await self._is_switched(dialect):
                self._began_anew("restarted", {})
            self._prompt_tokens = load.prompt_tokens_total
        self._router.reported(self._worker.number, load.waiting or 0, now)

    async def _is_switched(self, dialect: Dialect) -> bool:
        """Whether another model or version answers than the last time; it is told."""
        bodies: dict[bytes, bytes] = {}
        for call in questions(dialect.name):
            status, body = await self._ask(call, dialect)
            if status == 200:
                bodies[call.path] = body
        before, now = self._served, served(dialect.name, bodies)
        self._served = before.updated(now)
        if not before.differs(now):
            return False
        self._began_anew("switched", {"was": str(before), "now": str(self._served)})
        return True

    def _began_anew(self, how: Literal["restarted", "switched"], fields: dict[str, object]) -> None:
        """What it was thought to hold is gone."""
        worker = self._worker
        self.presume_started()
        self._measured_at = self._files_at = float("-inf")
        self._router.cleared(worker.number)
        if worker.seats is not None:
            worker.seats.restarted()
        worker.starts[how] += 1
        self._on_event(f"upstream-{how}", {"worker": worker.name, **fields})
        self._on_start(how)

    async def _read_adapters(self, dialect: Dialect) -> None:
        """Of those that take an adapter's name for a model's: they are the ones that load some while they run."""
        call, adapters = dialect.adapters(), self._router.adapters
        can_load = dialect.load_adapter("a", "a") is not None
        if call is None or not can_load:
            adapters.lists(self._worker.number, (), time.monotonic(), can_load=False)
            return
        asked_at = time.monotonic()
        status, body = await self._ask(call, dialect)
        found = dialect.read_adapters(body) if status == 200 else None
        if found is not None:
            names = [one.name for one in found]
            adapters.lists(self._worker.number, names, asked_at, can_load=True)

    async def _ask(self, call: Call, dialect: Dialect) -> tuple[int, bytes]:
        headers = dialect.headers(self._api_key)
        if call.body:
            headers = [*headers, (b"content-type", b"application/json")]
        async with asyncio.timeout(_WITHIN_S):
            response = await self._worker.client.request(
                call.method, self._worker.root + call.path, headers, call.body
            )
            try:
                return response.status, await response.read(MOST_BYTES)
            finally:
                response.close()
