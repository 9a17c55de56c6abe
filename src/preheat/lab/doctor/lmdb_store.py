"""L2 in LMDB: looked at without changing anything, while a gateway may be using it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import lmdb

from preheat.errors import ConfigError
from preheat.lab.doctor.finding import Finding
from preheat.lab.doctor.folder import examine_folder
from preheat.stores import lmdb_board, lmdb_values
from preheat.stores.lmdb_env import Layout, check_local
from preheat.stores.secret import secret_at

_MOST_READERS: Final = 2048  # as the gateway has it: the first who opens decides
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_CLEAN: Final = "clean"
_ABOUT: Final = "l2.path"
_SET_ASIDE: Final = "the next start of a gateway sets the file aside and begins with an empty one"


def examine_lmdb(folder: Path, budget_bytes: int, *, has_secret: bool) -> Iterator[Finding]:
    """All findings about the folder; `has_secret`: exact.secret_env names one."""
    try:
        check_local(folder)
    except ConfigError as error:
        yield Finding("not-local", _ABOUT, "problem", str(error), "files would be damaged there")
        return
    yield from examine_folder(_ABOUT, folder, budget_bytes)
    if not has_secret and (folder / "secret").exists():
        yield from _secret(folder)
    for layout in (lmdb_values.layout(budget_bytes), lmdb_board.layout()):
        path = folder / layout.name
        if (path / "data.mdb").exists():
            yield from _files(path, layout, budget_bytes)
    kept = sorted(folder.glob("*.damaged-*"))
    if kept:
        yield Finding(
            "set-aside",
            _ABOUT,
            "note",
            f"{len(kept)} damaged files were set aside, the last one as {kept[-1].name}",
            "what was stored in them is lost; the answers are asked for again",
            "look for power cuts, a failing disk or a program that changes the folder; then remove "
            "them",
        )


def _secret(folder: Path) -> Iterator[Finding]:
    try:
        secret_at(folder)
    except ConfigError as error:
        yield Finding("secret", _ABOUT, "problem", str(error), "serve doesn't start with it")


def _files(path: Path, layout: Layout, budget_bytes: int) -> Iterator[Finding]:
    """One environment: sound, how full, by whom it is read."""
    if (path / "damaged").exists():
        yield _damaged(path, "a process met damage in it")
        return
    if _was_cut_off(path):
        yield Finding(
            "cut-off",
            _ABOUT,
            "note",
            f"{path}: the machine stopped while it was in use",
            _SET_ASIDE,
            "nothing; end gateways before the machine, if this is frequent",
        )
        return
    try:
        env = lmdb.open(
            str(path),
            readonly=True,
            create=False,
            max_readers=_MOST_READERS,
            readahead=False,
        )
    except lmdb.Error as error:
        yield _damaged(path, type(error).__name__)
        return
    try:
        yield from _look(path, env, layout, budget_bytes)
    finally:
        env.close()


def _look(
    path: Path, env: lmdb.Environment, layout: Layout, budget_bytes: int
) -> Iterator[Finding]:
    # First of all: reading past the end of a file that is too short would end this process.
    needed_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    found_bytes = (path / "data.mdb").stat().st_size
    if found_bytes < needed_bytes:
        yield _damaged(path, f"it has {found_bytes} bytes and should have {needed_bytes}")
        return
    try:
        with env.begin() as txn:
            txn.cursor().first()
            if layout.name == "values":
                yield _fullness(txn, budget_bytes)
        stale = env.reader_check()
    except lmdb.Error as error:
        yield _damaged(path, type(error).__name__)
        return
    if stale:
        yield Finding(
            "stale-readers",
            _ABOUT,
            "note",
            f"{path}: {stale} readers were of dead processes, and are freed now",
            "until then no page that they could see was used again, so that the file grew",
            "nothing: a running gateway frees them each minute",
        )


def _fullness(txn: "lmdb.Transaction[bytes]", budget_bytes: int) -> Finding:
    size_bytes, entries = lmdb_values.sums(txn)
    found = f"{entries} answers, {size_bytes:,} of {budget_bytes:,} bytes"
    if size_bytes > budget_bytes:
        return Finding(
            "over-budget",
            _ABOUT,
            "warning",
            found,
            "the budget was lowered, or no gateway has run since to make room",
            "start the gateway: it evicts the oldest",
        )
    return Finding("l2", _ABOUT, "ok", found)


def _damaged(path: Path, why: str) -> Finding:
    return Finding(
        "damaged",
        _ABOUT,
        "problem",
        f"{path} is damaged: {why}",
        _SET_ASIDE,
        "restart the gateway; look for a failing disk or a program that changes the folder",
    )


def _was_cut_off(path: Path) -> bool:
    try:
        last = (path / "boot").read_text().strip()
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return False
    return last not in {boot, _CLEAN}
