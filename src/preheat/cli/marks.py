"""What `preheat warm` remembers between two runs: how far each prefix came on each server. No text."""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from preheat.core.warmup import Mark
from preheat.errors import ConfigError

_MOST: Final = 10_000
_VERSION: Final = 1


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    marks: list[Mark]


def usual_place(environment: Mapping[str, str]) -> Path:
    """Beside the request log."""
    home = environment.get("XDG_STATE_HOME", "")
    return (Path(home) if home else Path.home() / ".local" / "state") / "preheat" / "warm.json"


class Marks:
    """The newest 10,000. A file that can't be read is set aside, and begun anew."""

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self._path = path
        self._marks: dict[tuple[str, str], Mark] = {}
        self._read()

    def of(self, worker: str, prefix: str) -> Mark | None:
        """How far it came there."""
        return self._marks.get((worker, prefix))

    def put(self, mark: Mark) -> None:
        """It has come so far."""
        self._marks.pop((mark.worker, mark.prefix), None)
        self._marks[mark.worker, mark.prefix] = mark

    def save(self) -> None:
        """Whole or not at all, with what another run has written meanwhile. Raises ConfigError."""
        mine = self._marks
        self._marks = {}
        self._read()
        theirs = self._marks
        newest = sorted((theirs | mine).values(), key=lambda mark: mark.at)[-_MOST:]
        self._marks = {(mark.worker, mark.prefix): mark for mark in newest}
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(_File(_VERSION, newest)))
            draft.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise ConfigError(
                f"{self._path}: {error.strerror}; name a place for it with --state"
            ) from None

    def _read(self) -> None:
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(
                f"{self._path}: {error.strerror}; name another with --state"
            ) from None
        except (ValueError, RecursionError):
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_name(f"{self._path.name}.damaged"))
            return
        if file.version == _VERSION:
            self._marks = {(mark.worker, mark.prefix): mark for mark in file.marks}


def wall_clock() -> float:
    """Of a mark's `at`."""
    return time.time()
