"""L2 in LMDB: looked at without changing anything, while a gateway may be using it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from preheat.errors import ConfigError
from preheat.lab.doctor import lmdb_files
from preheat.lab.doctor.finding import Finding
from preheat.lab.doctor.folder import examine_folder
from preheat.lab.doctor.lmdb_files import ABOUT
from preheat.stores.lmdb_env import check_local
from preheat.stores.secret import secret_at

_LOOK_S: Final = 30.0


def examine_lmdb(folder: Path, budget_bytes: int, *, has_secret: bool) -> Iterator[Finding]:
    """All findings about the folder; `has_secret`: exact.secret_env names one."""
    try:
        check_local(folder)
    except ConfigError as error:
        found = str(error).removeprefix(f"{ABOUT}: ")
        yield Finding("not-local", ABOUT, "problem", found, "files would be damaged there")
        return
    of_folder = tuple(examine_folder(ABOUT, folder, budget_bytes))
    yield from of_folder
    if not has_secret:
        is_writable = all(finding.check != "not-writable" for finding in of_folder)
        yield from _secret(folder, is_writable=is_writable)
    if any(folder.glob("*/data.mdb")):
        yield from _files(folder, budget_bytes)
    kept = sorted(folder.glob("*.damaged-*"))
    if kept:
        yield Finding(
            "set-aside",
            ABOUT,
            "note",
            f"{len(kept)} damaged files were set aside, the last one as {kept[-1].name}",
            "what was stored in them is lost; the answers are asked for again",
            "look for power cuts, a failing disk or a program that changes the folder; then remove "
            "them",
        )


def _secret(folder: Path, *, is_writable: bool) -> Iterator[Finding]:
    try:
        if not is_writable or (folder / "secret").exists():  # else it will be made
            secret_at(folder)
    except (ConfigError, OSError) as error:
        yield Finding("secret", ABOUT, "problem", str(error), "serve doesn't start with it")


def _files(folder: Path, budget_bytes: int) -> Iterator[Finding]:
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-P", "-m", lmdb_files.__name__, str(folder), str(budget_bytes)],
            capture_output=True,
            timeout=_LOOK_S,
            check=False,
        )
        yield from msgspec.json.decode(done.stdout, type=list[Finding])
    except subprocess.TimeoutExpired:
        yield lmdb_files.unreadable(folder, f"it took more than {_LOOK_S:g} s")
    except msgspec.MsgspecError:  # it didn't get as far
        yield lmdb_files.damaged(folder, "reading it ended the process that did")
