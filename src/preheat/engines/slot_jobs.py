"""One thing at a time for a server's slots, what a request waits for first, each within a time."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec

Work = Callable[[], Awaitable["Move"]]

_OURS: Final = frozenset(
    (
        "late",
        "full",
        "elsewhere",
        "changed",
        "damaged",
        "undeleted",
        "slot",
        "model",
        "defect",
        "closed",
    )
) | {
    "adapter",
    "breaker-open",
    "connect",
    "protocol",
    "queue",
    "reset",
    "start",
    "tls",
    "too-large",
}
"""Why a move fails in our own words, and the kinds of errors: a server's words may be any."""


class Move(msgspec.Struct, frozen=True):
    """A slot saved, or a file loaded or checked. `why` not:

    `late` it took longer than it may · `full` no room in the budget or on the disk · `elsewhere` the
    server writes to another folder · `changed` the slot held something else · `damaged` the file
    isn't what was saved; it is deleted · `undeleted` a file that should be can't be · `slot` there is no such slot · `model` the server has
    another one by now · `defect` one of ours, which is logged · `closed` · else the server's words, or the error's.
    """

    ok: bool
    why: str = ""
    tokens: int = 0
    size_bytes: int = 0
    took_s: float = 0.0


class _Job(NamedTuple):
    work: Work
    done: asyncio.Future[Move]


class SlotJobs:
    """The one task that does it. Two moves at once would only hold up the server's loop, and race for
    room in the folder.

    Who asks gets an answer within `limit_s`; work that was begun by then ends within as much again.
    What fails is counted in `failed`, by `why`; all of the server's own words are `refused`.
    """

    def __init__(self, limit_s: float) -> None:
        self.failed: dict[str, int] = {}
        self._limit_s = limit_s
        self._urgent: deque[_Job] = deque()
        self._later: deque[_Job] = deque()
        self._has_work = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on."""
        self._owner = asyncio.create_task(self._run(), name="slot-jobs")

    async def aclose(self) -> None:
        """Stop; what wasn't ended is `closed`."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.cancel()
            await asyncio.wait([owner])
        for job in (*self._urgent, *self._later):
            if not job.done.done():
                job.done.set_result(Move(ok=False, why="closed"))
        self._urgent.clear()
        self._later.clear()

    async def soon(self, work: Work) -> Move:
        """A request waits for it."""
        return await self._do(self._urgent, work)

    async def later(self, work: Work) -> Move:
        """When nothing is urgent."""
        return await self._do(self._later, work)

    async def _do(self, queue: deque[_Job], work: Work) -> Move:
        if self._owner is None:
            return Move(ok=False, why="closed")
        job = _Job(work, asyncio.get_running_loop().create_future())
        queue.append(job)
        self._has_work.set()
        try:
            async with asyncio.timeout(self._limit_s):
                return self._noted(await job.done)
        except TimeoutError:
            return self._noted(Move(ok=False, why="late"))

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            queue = self._urgent or self._later
            if not queue:
                self._has_work.clear()
                continue
            job = queue.popleft()
            if job.done.done():  # whoever asked has gone
                continue
            move = Move(ok=False, why="closed")
            try:
                move = await self._timed(job.work)
            finally:
                if not job.done.done():
                    job.done.set_result(move)

    async def _timed(self, work: Work) -> Move:
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(self._limit_s):
                move = await work()
        except TimeoutError:
            move = Move(ok=False, why="late")
        except OSError as error:  # of the folder
            move = Move(ok=False, why=error.strerror or "unreadable")
        except Exception as bug:  # noqa: BLE001  the next one mustn't wait for a task that is no more
            move = Move(ok=False, why="defect")
            told = {"message": "a slot's file was given up", "exception": bug}
            asyncio.get_running_loop().call_exception_handler(told)
        return msgspec.structs.replace(move, took_s=time.monotonic() - began_at)

    def _noted(self, move: Move) -> Move:
        if not move.ok:
            is_ours = move.why in _OURS or move.why.startswith("timeout-")
            why = move.why if is_ours else "refused"
            self.failed[why] = self.failed.get(why, 0) + 1
        return move
