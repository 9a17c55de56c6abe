"""The one thread of a process that writes to an environment.

LMDB has one writer at a time, and the one may be a stopped process: no write may run on the event
loop. What waits goes into one transaction, so that a commit costs many writers nothing much.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import lmdb

from preheat.errors import PreheatError, StoreError
from preheat.stores.lmdb_env import (
    OnEvent,
    Place,
    is_damage,
    is_of_disk,
    is_outdated,
    store_error,
)

_BATCH_BYTES: Final = 4 * 1024 * 1024
_BATCH_JOBS: Final = 1_000
_MOST_JOBS: Final = 10_000
_OPEN_WITHIN_S: Final = 10.0
_RELIEFS: Final = 2
"""Pages that one transaction frees are used again by the one after the next."""
_RELIEF_EVERY_S: Final = 5.0
_TELL_EVERY_S: Final = 60.0


class _View(Protocol):
    def close(self) -> None: ...


View = TypeVar("View", bound=_View)
T = TypeVar("T")


class _Job:
    __slots__ = ("answer", "future", "run", "undo", "weight")

    def __init__(
        self,
        run: Callable[[Any], object],
        weight: int,
        future: asyncio.Future[Any],
        undo: Callable[[Any], object] | None = None,
    ) -> None:
        self.run = run
        self.weight = weight
        self.future = future
        self.undo = undo
        self.answer: object = None


class _Order:
    """Something else to do than jobs."""


_REOPEN: Final = _Order()
_STOP: Final = _Order()


class Writer(Generic[View]):
    """Runs jobs on a view of the environment inside a write transaction.

    A call ends within `limit_s`; when the thread itself has been at one transaction for that long,
    further calls fail at once. At most `queue_bytes` wait. `place` is for reading, on the loop's
    thread; it is None while there is nothing that could be read. `on_event` hears of a disk that
    takes no more, at most once a minute and from the writing thread.
    """

    def __init__(
        self,
        name: str,
        *,
        open: Callable[[], Place],
        view: Callable[["lmdb.Transaction[bytes]"], View],
        relieve: Callable[[View], None] | None = None,
        queue_bytes: int,
        limit_s: float,
        on_event: OnEvent = lambda _name, _fields: None,
    ) -> None:
        self.place: Place | None = None
        self.map_full = 0
        self.is_outdated = False
        self._name = name
        self._open = open
        self._view = view
        self._has_relief = relieve is not None
        self._relieve = relieve or (lambda _: None)
        self._relief_at = 0.0
        self._on_event = on_event
        self._tell_at = 0.0
        self._queue_bytes = queue_bytes
        self._limit_s = limit_s
        self._jobs: queue.SimpleQueue[_Job | _Order] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._waiting_jobs = 0
        self._busy_since = 0.0  # 0: it isn't
        self._is_closing = False
        self._opened: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Open the environment. Raises StoreError, ConfigError."""
        self._loop = asyncio.get_running_loop()
        self._opened = self._loop.create_future()
        self._ended = self._loop.create_future()
        threading.Thread(target=self._work, name=self._name, daemon=True).start()
        try:
            async with asyncio.timeout(_OPEN_WITHIN_S):
                await self._opened
        except BaseException as error:
            self._is_closing = True
            self._jobs.put(_STOP)
            if isinstance(error, TimeoutError):
                raise StoreError("opening took too long", kind="timeout") from error
            raise

    def reading(self) -> Place:
        """Where to read, on the loop's thread. Raises StoreError while there is nothing to read."""
        if self.place is None:
            if self._is_closing or self._opened is None:
                raise StoreError("the store isn't open", kind="closed")
            raise StoreError("the files are being replaced", kind="damaged")
        return self.place

    def condemn(self) -> None:
        """Damage was read: the keeper shall set the files aside, and nothing is read till then."""
        if self.place is not None:
            self.place.mark_damaged()
            self.place = None

    def check(self) -> None:
        """Have the environment opened again if it isn't the one at its path any more."""
        if self._is_closing or self._opened is None or not self._opened.done():
            return
        if self.place is None or self.is_outdated or not self.place.is_current():
            self.place, self.is_outdated = None, False
            self._opened = self._loop.create_future()
            self._opened.add_done_callback(_look_at)
            self._jobs.put(_REOPEN)

    async def call(
        self,
        run: Callable[[View], T],
        weight: int = 0,
        *,
        within_s: float = 0.0,
        undo: Callable[[View], object] | None = None,
    ) -> T:
        """What the job returns, after the commit. Raises StoreError. A True for which nobody waits
        any more by then is undone. `within_s` is another limit for this one call."""
        limit_s = within_s or self._limit_s
        self._admit(weight, limit_s)
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting_bytes += weight
        self._waiting_jobs += 1
        self._jobs.put(_Job(run, weight, future, undo))
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError as error:
            raise StoreError("a write took too long", kind="timeout") from error

    async def aclose(self, limit_s: float) -> None:
        """Write what waits, for at most so long, and close the environment."""
        if self._is_closing or self._ended is None:
            return
        self._is_closing, self.place = True, None
        self._jobs.put(_STOP)
        await asyncio.wait([self._ended], timeout=limit_s)

    def _admit(self, weight: int, limit_s: float) -> None:
        self.reading()
        since = self._busy_since
        if since and time.monotonic() - since > limit_s:
            raise StoreError("another process holds the lock", kind="timeout")
        if self._waiting_bytes + weight > self._queue_bytes or self._waiting_jobs >= _MOST_JOBS:
            raise StoreError("too much waits to be written", kind="queue")

    # On the loop's thread, at the other's bidding.

    def _deliver(self, jobs: Sequence[_Job], failure: StoreError | None) -> None:
        for job in jobs:
            self._waiting_bytes -= job.weight
            self._waiting_jobs -= 1
            if job.future.done():  # whoever waited has gone
                if job.undo is not None and failure is None and job.answer is True:
                    self._waiting_jobs += 1
                    self._jobs.put(_Job(job.undo, 0, self._loop.create_future()))
                continue
            if failure is not None:
                # One exception in several tasks would mix up their tracebacks.
                job.future.set_exception(StoreError(str(failure), kind=failure.kind))
            elif isinstance(job.answer, StoreError):
                job.future.set_exception(job.answer)
            else:
                job.future.set_result(job.answer)

    def _on_opened(self, place: Place | None, failure: PreheatError | None) -> None:
        assert self._opened is not None
        self.place = None if self._is_closing else place
        if self._opened.done():
            return
        if failure is None:
            self._opened.set_result(None)
        else:
            self._opened.set_exception(failure)

    def _on_ended(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    # On the writing thread.

    def _work(self) -> None:
        place = self._try_open()
        while True:
            order = self._jobs.get()
            if order is _STOP:
                break
            if order is _REOPEN:
                if place is not None:
                    place.close()
                place = self._try_open()
            elif isinstance(order, _Job):
                self._run_batch(place, order)
        if place is not None:
            place.close()
        self._tell(self._on_ended)

    def _try_open(self) -> Place | None:
        try:
            place = self._open()
        except PreheatError as error:
            self._tell(self._on_opened, None, error)
            return None
        except Exception as error:  # noqa: BLE001 (the thread must outlive it, and start() hear of it)
            why = StoreError(f"opening failed ({type(error).__name__})", kind="files")
            self._tell(self._on_opened, None, why)
            return None
        self._tell(self._on_opened, place, None)
        return place

    def _run_batch(self, place: Place | None, first: _Job) -> None:
        jobs = [first]
        failure: StoreError | None = None
        self._busy_since = time.monotonic()
        try:
            if place is None:
                failure = StoreError("the files are damaged", kind="damaged")
            else:
                self._commit(place, jobs)
        except lmdb.Error as error:
            failure = store_error(error)
            self._note(place, error)
        except Exception as error:  # noqa: BLE001 (the thread must outlive whatever a job does)
            failure = StoreError(f"a write failed ({type(error).__name__})", kind="files")
        finally:
            self._busy_since = 0.0
        self._tell(self._deliver, jobs, failure)

    def _commit(self, place: Place, jobs: list[_Job]) -> None:
        try:
            self._transact(place, jobs)
        except lmdb.Error as error:
            if is_of_disk(error):
                self._tell_of_disk(error)
            if not self._may_relieve(error):
                raise
            self._busy_since = time.monotonic()
            for _ in range(_RELIEFS):
                with place.env.begin(write=True) as txn:
                    view = self._view(txn)
                    self._relieve(view)
                    view.close()
            self._transact(place, jobs)
        place.fill_up()

    def _may_relieve(self, error: lmdb.Error) -> bool:
        """Whether giving up values may help: in a full map, or for a while on a full disk, where it
        helps within the file only. A disk that fails shall not cost all of them."""
        if isinstance(error, lmdb.MapFullError):
            self.map_full += 1
            return self._has_relief
        now = time.monotonic()
        if not self._has_relief or not is_of_disk(error) or now < self._relief_at:
            return False
        self._relief_at = now + _RELIEF_EVERY_S
        return True

    def _tell_of_disk(self, error: lmdb.Error) -> None:
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_at = now + _TELL_EVERY_S
            self._on_event("l2-disk-full", {"files": self._name, "why": str(store_error(error))})

    def _transact(self, place: Place, jobs: list[_Job]) -> None:
        with place.env.begin(write=True) as txn:
            self._add_waiting(jobs)
            view = self._view(txn)
            for job in jobs:
                if job.future.cancelled():  # too late: nobody would know of it
                    continue
                try:
                    job.answer = job.run(view)
                except StoreError as error:
                    job.answer = error
            view.close()

    def _add_waiting(self, jobs: list[_Job]) -> None:
        """What came while the lock was waited for goes along, up to the next order."""
        batch_bytes = sum(job.weight for job in jobs)
        while batch_bytes < _BATCH_BYTES and len(jobs) < _BATCH_JOBS:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if not isinstance(job, _Job):
                self._jobs.put(job)  # nothing but what will fail comes after one of these
                return
            jobs.append(job)
            batch_bytes += job.weight

    def _note(self, place: Place | None, error: lmdb.Error) -> None:
        if place is not None and is_damage(error):
            place.mark_damaged()
        if is_damage(error) or is_outdated(error):
            self.is_outdated = True

    def _tell(self, call: Callable[..., None], *what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call, *what)


def _look_at(future: asyncio.Future[None]) -> None:
    """That opening failed is seen at the next check, which tries again."""
    if not future.cancelled():
        future.exception()
