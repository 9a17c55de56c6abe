"""DRAM and a folder's disk: bandwidth and latency, as one thread that copies KV would see them."""

import contextlib
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from preheat.errors import ConfigError

_RUNS: Final = 5
_PIECE_BYTES: Final = 4 * 2**20
_PAGE_BYTES: Final = 4_096
_LOOKS: Final = 32
_SEED: Final = 20


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """One tier: bytes a second in and out, and seconds before the first byte. None: not measured,
    and `note` says why."""

    name: str
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    latency_s: float | None = None
    write_latency_s: float | None = None
    note: str = ""


def memory(size_bytes: int) -> Speed:
    """Copying a buffer that is larger than the processor's caches, and one page of it."""
    source, target = mmap.mmap(-1, size_bytes), mmap.mmap(-1, size_bytes)
    try:
        source[:] = random.Random(_SEED).randbytes(_PIECE_BYTES) * (size_bytes // _PIECE_BYTES)
        target[:] = source[:]  # the first touch of each page costs more

        def copy() -> None:
            with memoryview(source) as view:
                target[:] = view

        def page(place: int) -> None:
            target[:_PAGE_BYTES] = source[place : place + _PAGE_BYTES]

        copy_s = _median_s(copy)
        page_s = _median_at(size_bytes, page)
    finally:
        source.close()
        target.close()
    per_s = size_bytes / copy_s
    return Speed(name="memory", read_bytes_per_s=per_s, write_bytes_per_s=per_s, latency_s=page_s)


def disk(folder: Path, size_bytes: int) -> list[Speed]:
    """A file written and synced; read where it isn't in memory any more, and where it is. Raises
    ConfigError where nothing can be written."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _of_file(file.fileno(), size_bytes)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}; give another --folder") from None


def _of_file(file: int, size_bytes: int) -> list[Speed]:
    pieces = size_bytes // _PIECE_BYTES
    piece = random.Random(_SEED).randbytes(_PIECE_BYTES)

    def write() -> None:
        os.lseek(file, 0, os.SEEK_SET)
        for _ in range(pieces):
            os.write(file, piece)
        os.fsync(file)

    def sync_page() -> None:
        os.pwrite(file, piece[:_PAGE_BYTES], 0)
        os.fsync(file)

    target = bytearray(pieces * _PIECE_BYTES)  # all of it: a small buffer would stay in a cache

    def read() -> None:
        with memoryview(target) as view:
            for start in range(0, len(target), _PIECE_BYTES):
                os.preadv(file, [view[start : start + _PIECE_BYTES]], start)

    write_s, sync_s = _median_s(write, 3), _median_s(sync_page)
    read()
    warm_s = _median_s(read)
    warm_page_s = _median_at(size_bytes, lambda place: os.pread(file, _PAGE_BYTES, place))
    why = _forget(file)
    total = pieces * _PIECE_BYTES
    cold = Speed(name="disk, cold", note=why)
    if not why:
        cold_s = _median_s(read, 3, before=lambda: _forget(file))
        _forget(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        page_s = _median_at(size_bytes, lambda place: os.pread(file, _PAGE_BYTES, place))
        cold = Speed(name="disk, cold", read_bytes_per_s=total / cold_s, latency_s=page_s)
    warm = Speed(name="disk, warm", read_bytes_per_s=total / warm_s, latency_s=warm_page_s)
    written = {"write_bytes_per_s": total / write_s, "write_latency_s": sync_s}
    return [msgspec.structs.replace(cold, **written), warm]


def _forget(file: int) -> str:
    """Have the system drop the file's pages from memory; why it can't be known to have done so, or
    an empty string."""
    if not hasattr(os, "posix_fadvise"):
        return "this system can't be asked to forget a file"
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    middle = os.fstat(file).st_size // 2  # a journal may hold on to the page that was synced last
    try:
        os.preadv(file, [bytearray(_PAGE_BYTES)], middle, os.RWF_NOWAIT)
    except BlockingIOError:
        return ""
    except OSError:
        return "this file system doesn't tell what is in memory"
    return "this file system keeps its files in memory"


def _median_s(
    work: Callable[[], None], runs: int = _RUNS, before: Callable[[], object] = lambda: None
) -> float:
    took = []
    for _ in range(runs):
        before()
        began_at = time.perf_counter()
        work()
        took.append(time.perf_counter() - began_at)
    return statistics.median(took)


def _median_at(size_bytes: int, look: Callable[[int], object]) -> float:
    """One page at a time, at places all over."""
    chance = random.Random(_SEED)
    took = []
    for _ in range(_LOOKS):
        place = chance.randrange(size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        with contextlib.suppress(OSError):
            began_at = time.perf_counter()
            look(place)
            took.append(time.perf_counter() - began_at)
    return statistics.median(took)
