"""A folder that Preheat writes to: is it writable, private, on a disk with room?"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from preheat.lab.doctor.finding import Finding

_OTHERS: Final = 0o077
_MIB: Final = 1_048_576


def examine_folder(about: str, folder: Path, budget_bytes: int) -> Iterator[Finding]:
    """All findings about it; it is not made where it isn't there yet."""
    there = next((one for one in (folder, *folder.parents) if _is_there(one)), folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield Finding(
            "not-writable",
            about,
            "problem",
            f"can't write to {there}: {error.strerror or error}",
            "nothing can be kept there",
            "give another folder, or make this one writable for the user who runs Preheat",
        )
        return
    if there == folder:
        if folder.stat().st_mode & _OTHERS:
            yield Finding(
                "readable-by-others",
                about,
                "warning",
                f"{folder} has mode {folder.stat().st_mode & 0o777:o}",
                "other users of this machine can read what is in it",
                f"chmod 700 {folder}",
            )
    else:
        yield Finding("absent", about, "ok", f"{folder} will be made at the first start")
    yield from _room(about, there, folder, budget_bytes)


def _room(about: str, there: Path, folder: Path, budget_bytes: int) -> Iterator[Finding]:
    used_bytes = _used_bytes(folder)
    free_bytes = shutil.disk_usage(there).free
    if free_bytes + used_bytes < budget_bytes:
        yield Finding(
            "disk-space",
            about,
            "warning",
            f"{free_bytes // _MIB} MiB are free on the disk of {there}, and the budget is "
            f"{budget_bytes // _MIB} MiB",
            "once the disk is full nothing more is kept, here or by anybody else on it",
            "lower the budget, or choose another disk",
        )


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # somebody else's: it can't be seen
        return False


def _used_bytes(folder: Path) -> int:
    used_bytes = 0
    with contextlib.suppress(OSError):  # what can't be seen isn't counted
        for one in folder.rglob("*"):
            with contextlib.suppress(OSError):  # a running gateway may just have removed it
                used_bytes += one.stat().st_size
    return used_bytes
