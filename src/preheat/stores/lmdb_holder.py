"""Who holds a lease, and whether that process still lives."""

import os
import secrets
from pathlib import Path
from typing import Final

import msgspec

_STATE_FIELD: Final = 0
_START_FIELD: Final = 19
"""Places in /proc/PID/stat after the program's name: proc(5) counts them as 3 and 22."""
_DEAD: Final = frozenset({b"Z", b"X", b"x"})


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A process, told from a later one with the same number by when it started. Numbers mean
    something only within one boot and one namespace of processes: `world` names both."""

    owner: bytes
    pid: int
    started: int
    world: str

    def is_gone(self, world: str) -> bool:
        """Whether it is known to have ended, seen from that world."""
        if self.world != world:
            return False
        if not world:
            return not _exists(self.pid)
        return _started(self.pid) != self.started


def myself() -> Holder:
    """The process that asks, under a name that no other has."""
    return Holder(secrets.token_bytes(16), os.getpid(), _started(os.getpid()), _world())


def _started(pid: int) -> int:
    """In clock ticks since the boot; -1 if there is no such process, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 (a Path costs twice that)
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[_STATE_FIELD] in _DEAD else int(fields[_START_FIELD])


def _world() -> str:
    """Empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
