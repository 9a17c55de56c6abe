"""Processes under test: started on one core, read through /proc, ended by their process id."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.report import BenchmarkError

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
STOP_WITHIN_S = 10.0
SHOWN_LINES = 20


class Cores(msgspec.Struct, frozen=True):
    """Where each side runs, so that neither takes the other's time."""

    server: int
    client: int


class Memory(msgspec.Struct, frozen=True):
    """Resident memory; `anonymous` leaves out mapped files, which the kernel can take back."""

    resident_bytes: int
    anonymous_bytes: int


class Server:
    """A running process, with whatever it starts itself."""

    def __init__(
        self, name: str, popen: subprocess.Popen[bytes], output: Path, errors: Path
    ) -> None:
        self.name = name
        self.pid = popen.pid
        self.output = output
        self.errors = errors
        self._popen = popen

    def pids(self) -> list[int]:
        """The process and all that descend from it."""
        found = [self.pid]
        for pid in found:
            found.extend(_children(pid))
        return found

    def cpu_s(self) -> float:
        """User and system time so far, of the process, what it runs, and what it ran."""
        return sum(_cpu_s(pid) for pid in self.pids())

    def memory(self) -> Memory:
        pages = [_statm(pid) for pid in self.pids()]
        resident, mapped = sum(p[0] for p in pages), sum(p[1] for p in pages)
        return Memory(resident * PAGE_BYTES, (resident - mapped) * PAGE_BYTES)

    def open_fds(self) -> int:
        return sum(_open_fds(pid) for pid in self.pids())

    def is_running(self) -> bool:
        return self._popen.poll() is None

    def wait_for_port(self, *, within_s: float = 30.0) -> int:
        """The port the process says it listens on."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if found := LISTENING.search(self.output.read_text(errors="replace")):
                return int(found[1])
            self._must_run()
            time.sleep(0.02)
        raise BenchmarkError(f"{self.name} didn't say within {within_s:g} s where it listens")

    def wait_for_connect(self, port: int, *, within_s: float = 30.0) -> None:
        """Returns when the port takes connections."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            self._must_run()
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            time.sleep(0.05)
        raise BenchmarkError(f"{self.name} didn't listen on port {port} within {within_s:g} s")

    def wait_until_idle(self, *, within_s: float = 20.0) -> None:
        """Returns when what a burst leaves to do is done (writes, counting), or time is up."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            before_s = self.cpu_s()
            time.sleep(0.5)
            if self.cpu_s() - before_s <= 0.02:
                return

    def show_errors(self) -> None:
        """The end of what it said on stderr; it says more than that the benchmark failed."""
        for line in self.errors.read_text(errors="replace").splitlines()[-SHOWN_LINES:]:
            print(f"{self.name}: {line}", file=sys.stderr)

    def _must_run(self) -> None:
        if not self.is_running():
            raise BenchmarkError(f"{self.name} ended with {self._popen.returncode}")

    def kill(self) -> None:
        """SIGKILL for the process itself, as the kernel's out-of-memory killer does it."""
        self._popen.kill()
        self._popen.wait()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for it and for what it left behind; only ids of its own."""
        pids = self.pids()
        started = start_times(pids)
        if self.is_running():
            self._popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(STOP_WITHIN_S)
        for pid in still_running(started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._popen.wait()


class Others:
    """What everybody else on the machine uses, from now on."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._since = time.monotonic()
        self._machine_s, self._own_s = _machine_cpu_s(), self._own()

    def share(self) -> float:
        """Of one core: all that was used since, less what these servers and we ourselves used."""
        others_s = _machine_cpu_s() - self._machine_s - (self._own() - self._own_s)
        return max(0.0, others_s / (time.monotonic() - self._since))

    def _own(self) -> float:
        return time.process_time() + sum(server.cpu_s() for server in self._servers)


@contextlib.contextmanager
def running(
    name: str,
    command: Sequence[str],
    *,
    folder: Path,
    core: int | None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A process on one core, with its output in files of the folder; ended on every way out."""
    output, errors = folder / f"{name}.out", folder / f"{name}.err"
    with output.open("wb") as out, errors.open("wb") as err, on_core(core):
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            process_group=0,  # Ctrl-C reaches us alone; we end the others in order
        )
    server = Server(name, popen, output, errors)
    try:
        yield server
    except BenchmarkError:
        server.show_errors()
        raise
    finally:
        server.stop()


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """This process, and what it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def two_cores() -> Cores:
    """The first two cores this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise BenchmarkError("two cores are needed: one for the server, one for the load")
    return Cores(usable[0], usable[1])


def free_port() -> int:
    """A port for servers that can't pick one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def still_running(started: Mapping[int, str | None]) -> list[int]:
    """Which of these processes, noted by `start_times`, there still are."""
    return [pid for pid, at in started.items() if at is not None and _started_at(pid) == at]


def start_times(pids: Sequence[int]) -> dict[int, str | None]:
    """Tells a process from a stranger who got its number later."""
    return {pid: _started_at(pid) for pid in pids}


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children.extend(int(child) for child in (task / "children").read_text().split())
    return children


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before them may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return sum(int(ticks) for ticks in fields[11:15]) / TICKS_PER_S  # utime stime cutime cstime


def _machine_cpu_s() -> float:
    """Busy time of all cores, time stolen by the host included."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields)
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def _started_at(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else None


def _statm(pid: int) -> tuple[int, int]:
    """Resident and file-backed pages."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0, 0
    return int(fields[1]), int(fields[2])


def _open_fds(pid: int) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0
