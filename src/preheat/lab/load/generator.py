"""Sends a trace's requests at their times, whatever the server does (an open loop).

A closed loop waits for answers and so slows down with the server, which hides how bad a slow
moment is. Here nothing waits but for the clock: a request that finds too many others open is
counted as `unsent`, and by how much the generator itself was late is measured.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Final
from urllib.parse import urlsplit

import msgspec

from preheat.lab.load.exchange import Outcome, exchange
from preheat.lab.load.summary import Command, Tally
from preheat.lab.load.trace import Request, Trace
from preheat.transport.client import Client, Timeouts

# A generator that is behind still lets answers be read after so many requests.
_SENT_AT_ONCE: Final = 16
_CONNECT_S: Final = 10.0
# How long a command that was still running at the end of the load may go on.
_COMMAND_S: Final = 10.0
# Where commands write: standard output is the report's.
_STDERR: Final = 2

OnOutcome = Callable[[Outcome], None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace is sent. `commands` are (seconds, command), in the trace's time."""

    url: str
    speed: float = 1.0
    limit: int | None = None
    duration_s: float | None = None
    model: str = ""
    most_open: int = 1_024
    timeout_s: float = 300.0
    api_key: str = ""
    slo_ttft_s: float | None = None
    slo_e2e_s: float | None = None
    commands: tuple[tuple[float, str], ...] = ()


class Generator:
    """One run of a plan over a trace."""

    def __init__(self, plan: Plan, trace: Trace, tally: Tally, on_outcome: OnOutcome) -> None:
        self._plan = plan
        self._trace = trace
        self._tally = tally
        self._on_outcome = on_outcome
        parts = urlsplit(plan.url)
        self._base = parts.path.rstrip("/").removesuffix("/v1")  # the trace's paths have it
        origin = f"{parts.scheme}://{parts.netloc}"
        # The exchange has the time limit for the whole; the client's own only lie beyond it.
        beyond_s = 2 * plan.timeout_s
        timeouts = Timeouts(
            connect_s=min(_CONNECT_S, plan.timeout_s),
            first_byte_s=beyond_s,
            idle_s=beyond_s,
            queue_s=beyond_s,
        )
        # As many connections as requests may be open: none ever waits for one.
        self._client = Client(origin, timeouts=timeouts, max_connections=plan.most_open)
        self._headers = _headers(plan.api_key)
        self._open: set[asyncio.Task[None]] = set()
        self._commands_begun: set[asyncio.Task[None] | None] = set()
        self._bug: BaseException | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        """Send all of it and wait for the answers, or until `stopping` is set."""
        tally = self._tally
        loop = asyncio.get_running_loop()
        began_at = monotonic()
        sending = loop.create_task(self._send_all(began_at), name="load-sender")
        stop = loop.create_task(stopping.wait(), name="load-stop")
        commands = [
            loop.create_task(self._command(began_at, at_s, text), name="load-command")
            for at_s, text in self._plan.commands
        ]
        try:
            await asyncio.wait({sending, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.is_set():
                sending.result()
                await self._wait_for_answers(stop)
            tally.is_interrupted = stopping.is_set()
        finally:
            tally.duration_s = monotonic() - began_at
            tally.cut = len(self._open)
            try:
                await _end([sending, stop, *self._open])
                await self._end_commands(commands)
            finally:
                await self._client.aclose()
        if self._bug is not None:
            raise self._bug

    @property
    def open(self) -> int:
        """How many requests are under way."""
        return len(self._open)

    async def _send_all(self, began_at: float) -> None:
        plan, loop = self._plan, asyncio.get_running_loop()
        for number, request in enumerate(self._trace.read(plan.model)):
            due_s = request.at_s / plan.speed
            if number == plan.limit or (plan.duration_s is not None and due_s > plan.duration_s):
                return
            wait_s = began_at + due_s - monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif number % _SENT_AT_ONCE == 0:
                await asyncio.sleep(0)
            late_s = max(0.0, monotonic() - began_at - due_s)
            if len(self._open) >= plan.most_open:
                unsent = Outcome(
                    id=request.id, at_s=due_s, number=number, late_s=late_s, error="unsent"
                )
                self._finish(unsent)
                continue
            self._tally.sent += 1
            task = loop.create_task(self._send(request, number, due_s, late_s))
            self._open.add(task)
            task.add_done_callback(self._on_done)

    async def _send(self, request: Request, number: int, due_s: float, late_s: float) -> None:
        outcome = Outcome(id=request.id, at_s=due_s, number=number, late_s=late_s)
        await exchange(
            self._client,
            (self._base + request.path).encode(),
            _merged(self._headers, request.headers),
            request.body,
            outcome,
            timeout_s=self._plan.timeout_s,
        )
        outcome.is_good = _meets(outcome, request, self._plan)
        self._finish(outcome)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._open.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()  # an exchange raises nothing of its server's making

    def _finish(self, outcome: Outcome) -> None:
        self._tally.add(outcome)
        self._on_outcome(outcome)

    async def _wait_for_answers(self, stop: "asyncio.Task[bool]") -> None:
        # Each has its own time limit, so this ends.
        while self._open and not stop.done():
            await asyncio.wait({stop, *self._open}, return_when=asyncio.FIRST_COMPLETED)

    async def _command(self, began_at: float, at_s: float, text: str) -> None:
        """Run a command of the user's at its moment, e.g. one that restarts an engine."""
        due_s = at_s / self._plan.speed
        await asyncio.sleep(max(0.0, began_at + due_s - monotonic()))
        command = Command(at_s=due_s, command=text)
        self._tally.commands.append(command)
        self._commands_begun.add(asyncio.current_task())
        try:
            command.exit_code = await run_shell(text)
        finally:
            command.took_s = monotonic() - began_at - due_s

    async def _end_commands(self, tasks: "Sequence[asyncio.Task[None]]") -> None:
        """Those not begun won't be; those that run get a little time."""
        begun = [task for task in tasks if task in self._commands_begun]
        if begun and not self._tally.is_interrupted:
            await asyncio.wait(begun, timeout=_COMMAND_S)
        self._tally.commands_unrun = len(tasks) - len(begun)
        await _end(tasks)


async def run_shell(text: str) -> int:
    """Run a command of the user's; its exit code. Cancelled, it is told to end."""
    process = await asyncio.create_subprocess_shell(
        text, stdin=asyncio.subprocess.DEVNULL, stdout=_STDERR
    )
    try:
        return await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        raise


async def _end(tasks: "Sequence[asyncio.Task[None] | asyncio.Task[bool]]") -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def _headers(api_key: str) -> dict[bytes, bytes]:
    headers = {
        b"content-type": b"application/json",
        b"accept-encoding": b"identity",
        b"user-agent": b"preheat-load",
    }
    if api_key:
        headers[b"authorization"] = b"Bearer " + api_key.encode()
    return headers


def _merged(
    ours: Mapping[bytes, bytes], given: Sequence[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    """The trace's headers stand instead of ours of the same name."""
    names = {name.lower() for name, _ in given}
    return [*((name, value) for name, value in ours.items() if name not in names), *given]


def _meets(outcome: Outcome, request: Request, plan: Plan) -> bool:
    """Whether it is a complete answer within its targets; the trace's own go before the plan's."""
    ttft_s = request.slo_ttft_s or plan.slo_ttft_s
    e2e_s = request.slo_e2e_s or plan.slo_e2e_s
    if outcome.error or outcome.ttft_s is None or outcome.e2e_s is None:
        return False
    return (ttft_s is None or outcome.ttft_s <= ttft_s) and (
        e2e_s is None or outcome.e2e_s <= e2e_s
    )
