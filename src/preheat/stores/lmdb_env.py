"""Opening LMDB's files: on a local disk, by one process at a time, damaged ones set aside.

Nothing is synced: when a process dies the kernel still has every page, and when the power fails
LMDB's files may be any mixture of old and new pages. So the folder says under which boot of the
machine it was last used, and files of another boot that nobody had closed are set aside.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import lmdb
import msgspec

from preheat.errors import ConfigError, StoreError

OnEvent = Callable[[str, dict[str, object]], None]

_MOST_READERS: Final = 2048
_LOCK_FILE_BYTES: Final = 64 * (_MOST_READERS + 4)
_SPARE_TXNS: Final = 1
_KEPT_ASIDE: Final = 2
_LOCK_WITHIN_S: Final = 5.0
_LOCK_EVERY_S: Final = 0.02
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS: Final = Path("/proc/mounts")
_CLEAN: Final = "clean"
_LAYOUT: Final = b"m:layout"
_REMOTE: Final = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre"),
    *("ncpfs", "nfs", "nfs4", "ocfs2", "smb2", "smb3", "smbfs"),
)

_DAMAGED: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
)
_OF_DISKS: Final = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""LMDB says EIO where the disk took only part of a page."""
_OUTDATED: Final = (
    lmdb.PanicError,
    lmdb.MapResizedError,
    lmdb.BadRslotError,
    lmdb.BadTxnError,
    lmdb.BadDbiError,
)


class Layout(msgspec.Struct, frozen=True):
    """What an environment must have: `first_rows` from when it is made, and `reserve_bytes` of the
    disk, for when that is full. Files of another `version` are set aside like damaged ones.

    The kinds of rows share LMDB's main table and begin with a letter each. A handle of a named
    table could be had in a write transaction only, and a stopped process may hold the lock."""

    name: str
    version: int
    map_bytes: int
    reserve_bytes: int
    first_rows: Callable[[], Mapping[bytes, bytes]]


class Place:
    """One environment as this process has it open."""

    def __init__(self, path: Path, env: lmdb.Environment) -> None:
        self.env = env
        self._path = path
        self._file = str(path / "data.mdb")
        found = os.stat(self._file)  # noqa: PTH116 (asked once a second; a Path costs twice that)
        self._inode = (found.st_dev, found.st_ino)
        self._size_bytes = found.st_size

    def is_current(self) -> bool:
        """Whether the file that is open is still the one at its path, and no shorter than it was:
        reading past a file's end would end the process."""
        try:
            found = os.stat(self._file)  # noqa: PTH116 (as above)
        except OSError:
            return False
        is_whole = found.st_size >= self._size_bytes
        self._size_bytes = max(self._size_bytes, found.st_size)
        return is_whole and (found.st_dev, found.st_ino) == self._inode

    def is_damaged(self) -> bool:
        """Whether a process met damage in it."""
        return (self._path / "damaged").exists()

    def mark_damaged(self) -> None:
        """Tell the keeper to set it aside."""
        if self.is_current():
            with contextlib.suppress(OSError):
                (self._path / "damaged").touch(mode=0o600)

    def fill_up(self) -> None:
        """Make the file as long as LMDB says. Pages at its end that were freed in the transaction
        that had taken them are never written, and would look like a truncated file."""
        if not _CAN_FILL_UP:
            return
        needed_bytes = _needed_bytes(self.env)
        if Path(self._file).stat().st_size < needed_bytes and self.is_current():
            descriptor = os.open(self._file, os.O_RDWR)
            try:  # unlike truncate, this can't shorten a file that grew meanwhile
                with contextlib.suppress(OSError):  # the disk is full
                    os.posix_fallocate(descriptor, needed_bytes - 1, 1)
            finally:
                os.close(descriptor)

    def close_clean(self) -> None:
        """The last process closes it: all of it is on the disk."""
        with contextlib.suppress(lmdb.Error, OSError):
            self.env.sync(True)  # noqa: FBT003 (LMDB's own signature)
            if self.is_current():
                _write_boot(self._path, _CLEAN)
        self.close()

    def close(self) -> None:
        self.env.close()


_CAN_FILL_UP: Final = hasattr(os, "posix_fallocate")


def open_place(folder: Path, layout: Layout, *, may_set_aside: bool, on_event: OnEvent) -> Place:
    """Open the environment, making it where it isn't there. Raises StoreError, ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_local(folder)
        with locked(folder / "open.lock", within_s=_LOCK_WITHIN_S):
            return _open_sound(folder, layout, may_set_aside=may_set_aside, on_event=on_event)
    except OSError as error:
        raise StoreError(why_of(error, folder), kind="files") from error


def why_of(error: Exception, path: Path | None = None) -> str:
    """What went wrong, for people; `path` is named where the error names none."""
    if isinstance(error, lmdb.Error):
        return str(store_error(error))
    if not isinstance(error, OSError):
        return str(error)
    where = error.filename or path
    return f"{where}: {error.strerror}" if where else f"{error.strerror or type(error).__name__}"


def check_local(folder: Path) -> None:
    """Raise ConfigError for a network file system: mapped files and locks don't work there."""
    try:
        mounts = _MOUNTS.read_text()
    except OSError:
        return  # not Linux
    # Unlike Path.resolve, this takes a loop of links too.
    kind = file_system_of(Path(os.path.realpath(folder)), mounts)
    if kind in _REMOTE or kind.startswith("fuse."):
        raise ConfigError(
            f"l2.path: {folder} is on {kind}, and LMDB needs a local disk; name a folder on one, "
            "or share a cache between machines with l2.kind redis"
        )


@contextlib.contextmanager
def locked(path: Path, *, within_s: float) -> Iterator[None]:
    """Hold the file's lock; it is given up when the process dies. Raises StoreError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + within_s
        while not took_lock(descriptor):
            if time.monotonic() >= deadline:
                raise StoreError(f"{path} is held by another process", kind="timeout")
            time.sleep(_LOCK_EVERY_S)
        yield
    finally:
        os.close(descriptor)


def took_lock(descriptor: int) -> bool:
    """Whether the file's lock is ours now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_damage(error: lmdb.Error) -> bool:
    """Whether it says that the file can't be trusted."""
    return isinstance(error, _DAMAGED)


def is_outdated(error: lmdb.Error) -> bool:
    """Whether opening the same file again helps."""
    return isinstance(error, _OUTDATED)


def is_of_disk(error: lmdb.Error) -> bool:
    """Whether the disk is full, or fails."""
    return isinstance(error, lmdb.DiskError) or getattr(error, "code", 0) in _OF_DISKS


def store_error(error: lmdb.Error) -> StoreError:
    """What the rest of the program hears of it."""
    word = type(error).__name__
    if is_damage(error):
        return StoreError(f"damaged files ({word})", kind="damaged")
    if is_of_disk(error):
        return StoreError(f"the disk is full or fails ({word})", kind="disk")
    if isinstance(error, lmdb.MapFullError | lmdb.TxnFullError):
        return StoreError(f"no room ({word})", kind="full")
    code = getattr(error, "code", 0) or 0
    why = os.strerror(code) if code > 0 else word  # LMDB's own are below 0
    return StoreError(f"LMDB failed ({why})", kind="files")


class _UnsoundError(Exception):
    """The files can't be used."""


def _open_sound(folder: Path, layout: Layout, *, may_set_aside: bool, on_event: OnEvent) -> Place:
    path = folder / layout.name
    try:
        return _open(path, layout)
    except _UnsoundError as error:
        why = str(error)
    if not may_set_aside:
        raise StoreError(f"{path}: {why}", kind="damaged")
    kept_as = _set_aside(path)
    on_event("l2-set-aside", {"files": str(path), "why": why, "kept_as": str(kept_as)})
    try:
        return _open(path, layout)
    except _UnsoundError as error:
        raise StoreError(f"{path}: {error}", kind="damaged") from error


def _open(path: Path, layout: Layout) -> Place:
    path.mkdir(mode=0o700, exist_ok=True)
    if (path / "damaged").exists():
        raise _UnsoundError("a process met damage in it")
    is_new = not (path / "data.mdb").exists()
    boot, last_boot = _boot_id(), _last_boot(path)
    _reserve_locks(path / "lock.mdb")
    if not is_new and last_boot not in {boot, _CLEAN}:
        raise _UnsoundError("the machine stopped while it was in use")
    try:
        env = lmdb.open(
            os.fspath(path),
            map_size=layout.map_bytes,
            max_readers=_MOST_READERS,
            max_spare_txns=_SPARE_TXNS,
            mode=0o600,
            sync=False,
            metasync=False,
            readahead=False,
        )
    except lmdb.Error as error:
        if is_damage(error):
            raise _UnsoundError(type(error).__name__) from error
        raise store_error(error) from error
    try:
        _look(env, path, layout, is_new=is_new)
        if is_new or last_boot != boot:
            _write_boot(path, boot)
        return Place(path, env)
    except BaseException:
        env.close()
        raise


def _look(env: lmdb.Environment, path: Path, layout: Layout, *, is_new: bool) -> None:
    """Raise if something is wrong that can be seen quickly; make what must be there."""
    if _CAN_FILL_UP and not is_new:
        found_bytes = (path / "data.mdb").stat().st_size
        if found_bytes < _needed_bytes(env):
            raise _UnsoundError(f"truncated: {found_bytes} of {_needed_bytes(env)} bytes")
    try:
        if env.stat()["entries"] == 0:
            _make_rows(env, layout)
            _reserve(path / "data.mdb", layout.reserve_bytes)
        with env.begin() as txn:
            if txn.get(_LAYOUT) != bytes([layout.version]):
                raise _UnsoundError("of another version")
    except lmdb.Error as error:
        if is_damage(error):
            raise _UnsoundError(type(error).__name__) from error
        raise store_error(error) from error


def _make_rows(env: lmdb.Environment, layout: Layout) -> None:
    rows = {_LAYOUT: bytes([layout.version]), **layout.first_rows()}
    with env.begin(write=True) as txn:
        for key, value in rows.items():
            txn.put(key, value, overwrite=False)


def _reserve_locks(file: Path) -> None:
    """All of the table of readers, which is written to as memory: where the disk has no room for a
    page of it, that would end the process."""
    if not _CAN_FILL_UP:
        return
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size or _LOCK_FILE_BYTES)
    except OSError as error:
        if error.errno not in _OF_DISKS:
            return  # a file system that can't: it is as well as LMDB does it
        raise StoreError(f"{file}: {error.strerror}", kind="disk") from error
    finally:
        os.close(descriptor)


def _reserve(file: Path, size_bytes: int) -> None:
    if not _CAN_FILL_UP or not size_bytes:
        return
    descriptor = os.open(file, os.O_RDWR)
    try:
        with contextlib.suppress(OSError):
            os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)


def _set_aside(path: Path) -> Path:
    """Rename it; whoever has it open keeps what he has. Only the newest few are kept."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    target = path.with_name(f"{path.name}.damaged-{stamp}-{time.monotonic_ns() % 1_000_000:06}")
    path.rename(target)
    kept = sorted(path.parent.glob(f"{path.name}.damaged-*"), key=lambda one: one.stat().st_mtime)
    for one in kept:
        if one != target and one not in kept[-_KEPT_ASIDE:]:
            shutil.rmtree(one, ignore_errors=True)
    return target


def _needed_bytes(env: lmdb.Environment) -> int:
    return (env.info()["last_pgno"] + 1) * env.stat()["psize"]


def _last_boot(path: Path) -> str:
    try:
        return (path / "boot").read_text().strip()
    except OSError:
        return _boot_id()  # killed before it was written, in this boot or with nothing in it yet


def _write_boot(path: Path, boot: str) -> None:
    """On the disk, before anything else is: a stale "clean" would be believed."""
    descriptor = os.open(path / "boot", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, boot.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"  # elsewhere than on Linux a power cut can't be told


def file_system_of(folder: Path, mounts: str) -> str:
    """The word for it in a table of mounts as in /proc/mounts; a later line covers an earlier."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        _, point, fs, *_ = line.split(" ")
        where = Path(point.encode().decode("unicode_escape"))
        if folder.is_relative_to(where) and len(where.parts) >= best:
            best, kind = len(where.parts), fs
    return kind
