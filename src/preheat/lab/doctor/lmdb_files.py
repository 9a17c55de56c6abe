"""Looks at L2's LMDB files without changing them, in a process of its own.

    python -m preheat.lab.doctor.lmdb_files FOLDER BUDGET_BYTES

Reading a damaged file may end the process that does it. One JSON list of findings goes to standard
output.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import lmdb
import msgspec

from preheat.lab.doctor.finding import Finding
from preheat.stores import lmdb_board, lmdb_values
from preheat.stores.lmdb_env import Layout, is_damage

ABOUT: Final = "l2.path"
SET_ASIDE: Final = "the next start of a gateway sets the file aside and begins with an empty one"
_MOST_READERS: Final = 2048  # as the gateway has it: the first who opens decides
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_CLEAN: Final = "clean"


def main() -> None:
    """Look at both environments."""
    folder, budget_bytes = Path(sys.argv[1]), int(sys.argv[2])
    findings: list[Finding] = []
    for layout in (lmdb_values.layout(budget_bytes), lmdb_board.layout()):
        path = folder / layout.name
        if (path / "data.mdb").exists():
            findings += _files(path, layout, budget_bytes)
    sys.stdout.buffer.write(msgspec.json.encode(findings))


def _files(path: Path, layout: Layout, budget_bytes: int) -> Iterator[Finding]:
    """One environment: sound, how full, by whom it is read."""
    if (path / "damaged").exists():
        yield damaged(path, "a process met damage in it")
        return
    if _was_cut_off(path):
        yield Finding(
            "cut-off",
            ABOUT,
            "note",
            f"{path}: the machine stopped while it was in use",
            SET_ASIDE,
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
        yield _unusable(path, error)
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
        yield damaged(path, f"it has {found_bytes} bytes and should have {needed_bytes}")
        return
    try:
        with env.begin() as txn:
            txn.cursor().first()
            if layout.name == "values":
                yield _fullness(txn, budget_bytes)
        stale = env.reader_check()
    except lmdb.Error as error:
        yield _unusable(path, error)
        return
    if stale:
        yield Finding(
            "stale-readers",
            ABOUT,
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
            ABOUT,
            "warning",
            found,
            "the budget was lowered, or no gateway has run since to make room",
            "start the gateway: it evicts the oldest",
        )
    return Finding("l2", ABOUT, "ok", found)


def _unusable(path: Path, error: lmdb.Error) -> Finding:
    if is_damage(error):
        return damaged(path, type(error).__name__)
    return unreadable(path, str(error))


def unreadable(path: Path, why: str) -> Finding:
    """They may be well, but can't be opened."""
    return Finding(
        "not-readable",
        ABOUT,
        "problem",
        f"can't read {path}: {why}",
        "a gateway can't either, and goes on without L2",
        "see whom the files belong to, and that nothing else lies in the folder",
    )


def damaged(path: Path, why: str) -> Finding:
    """They can't be trusted."""
    return Finding(
        "damaged",
        ABOUT,
        "problem",
        f"{path} is damaged: {why}",
        SET_ASIDE,
        "restart the gateway; look for a failing disk or a program that changes the folder",
    )


def _was_cut_off(path: Path) -> bool:
    try:
        last = (path / "boot").read_text().strip()
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return False
    return last not in {boot, _CLEAN}


if __name__ == "__main__":
    main()
