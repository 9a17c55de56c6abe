"""One file of a trace: opened whatever it is compressed with, and what it looks like inside."""

import bz2
import gzip
import io
import lzma
import zlib
from functools import cached_property
from pathlib import Path
from typing import Final, cast

import msgspec

from preheat.errors import TraceError
from preheat.traces import REMEDY

LINE_BYTES: Final = 64 * 1024 * 1024
"""A longer line isn't one."""

DAMAGE: Final = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, OSError)
"""What reading a compressed file that is cut off or damaged raises."""

_HEAD_BYTES: Final = 65_536
_HEAD_LINES: Final = 4
_ZSTD_BYTES: Final = 8_192
_BOM: Final = b"\xef\xbb\xbf"
_MAGICS: Final = {
    ".gz": b"\x1f\x8b",
    ".xz": b"\xfd7zXZ\0",
    ".bz2": b"BZh",
    ".zst": b"\x28\xb5\x2f\xfd",
}
"""How files of these names begin."""

_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Head(msgspec.Struct, frozen=True):
    """How a file begins: enough to tell its format.

    `data` are its first bytes, `lines` the first that aren't blank, `names` the fields of the
    first of them that is a JSON object, or the columns of a table (commas or tabs). `is_broken`: its
    name says that it is compressed, or it begins as if it were, but nothing comes out of it.
    """

    name: str
    data: bytes
    lines: tuple[bytes, ...]
    names: frozenset[str]
    is_text: bool
    is_broken: bool = False

    def has(self, *names: str) -> bool:
        """Whether all of these are among its fields or columns."""
        return self.names.issuperset(names)


class Source:
    """A file. `folder` is the one in which it was found, if that was given instead of it.
    `prefix` keeps names of several files' requests and sessions apart; of one file it is empty."""

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        self.folder = folder
        self.name = str(path)
        self.prefix = ""

    def open(self) -> io.BufferedIOBase:
        """Its decompressed bytes. Raises TraceError, also for a compression nobody here knows."""
        try:
            return _opened(self.path, self._magic())
        except OSError as error:
            raise TraceError(f"can't read {self.path}: {error.strerror}") from None

    def _magic(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(6)

    @cached_property
    def head(self) -> Head:
        """How it begins. What is damaged is left out: whoever reads it will say so."""
        data, is_damaged = _begin(self)
        is_text = b"\0" not in data and _is_utf8(data)
        lines = _first_lines(self) if is_text else ()
        is_broken = is_damaged or (
            self.path.suffix in _MAGICS and not self._magic().startswith(tuple(_MAGICS.values()))
        )
        return Head(self.path.name, data, lines, _names(lines), is_text, is_broken)


def _opened(path: Path, magic: bytes) -> io.BufferedIOBase:
    if magic.startswith(_MAGICS[".gz"]):
        return gzip.open(path, "rb")
    if magic.startswith(_MAGICS[".xz"]):
        return lzma.open(path, "rb")
    if magic.startswith(_MAGICS[".bz2"]):
        return bz2.open(path, "rb")
    if magic.startswith(_MAGICS[".zst"]):
        return _opened_zstd(path)
    return path.open("rb")


def _opened_zstd(path: Path) -> io.BufferedIOBase:
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional, and for few files
    except ImportError:
        raise TraceError(
            f"{path} is compressed with zstd, which can't be read without pyarrow: {REMEDY}"
        ) from None
    stream = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
    # A read that meets the damage gives nothing, so reads are small.
    return cast("io.BufferedIOBase", io.BufferedReader(stream, _ZSTD_BYTES))


def _begin(source: Source) -> tuple[bytes, bool]:
    """Its first bytes, and whether there are none for damage."""
    with source.open() as file:
        data = b""
        try:
            while len(data) < _HEAD_BYTES and (more := file.read1(_HEAD_BYTES - len(data))):
                data += more
        except DAMAGE:
            return data, not data
        return data, False


def _is_utf8(data: bytes) -> bool:
    """Whether it is text; the last character may be cut."""
    try:
        data[: max(0, len(data) - 3)].decode()
    except UnicodeDecodeError as error:
        # One bad character somewhere is a bad line; a binary file is full of them.
        return error.start > 1_024
    return True


def _first_lines(source: Source) -> tuple[bytes, ...]:
    lines: list[bytes] = []
    with source.open() as file:
        try:
            while len(lines) < _HEAD_LINES and (line := file.readline(LINE_BYTES)):
                if line.strip():
                    lines.append(line.strip().removeprefix(_BOM))
        except DAMAGE:
            pass
    return tuple(lines)


def _names(lines: tuple[bytes, ...]) -> frozenset[str]:
    for line in lines:
        try:
            return frozenset(_OBJECT.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    if not lines or lines[0].startswith(b"{"):
        return frozenset()
    first = lines[0].decode(errors="replace")
    return frozenset(first.split("\t" if "\t" in first else ","))
