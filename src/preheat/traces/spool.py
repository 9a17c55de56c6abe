"""The spool: what the log process has heard, in the order it heard it, as an Arrow IPC stream.

A record is a hit, another request, an ask that they name, a later answer for an ask, or a worker
that asks belong to. A file makes sense by itself, and so does whatever a torn one begins with.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from struct import Struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from preheat.core.blocks import HASH_BYTES
from preheat.wire import journal

HIT_RECORD: Final = 0
ROW_RECORD: Final = 1
ASK_RECORD: Final = 2
"""`ask` is its number in this file, `number` its worker's; `data`: FACTS, ASK_BASE, About, hashes."""
STORED_RECORD: Final = 3
"""Like the ask `number` but for its facts, which are the `data`."""
PROCESS_RECORD: Final = 4
"""A Hello; `number` is the worker's number in this file."""

SCHEMA: Final = pa.schema(
    [
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("at_us", pa.int64(), nullable=False),
        pa.field("number", pa.uint64(), nullable=False),
        pa.field("ask", pa.uint32(), nullable=False),
        pa.field("duration_s", pa.float32(), nullable=False),
        pa.field("data", pa.binary()),
    ],
    metadata={"preheat.log_version": str(journal.VERSION)},
)

ASK_BASE: Final = Struct("<IIH")
"""The ask it begins as, how many blocks they share, the bytes of its About."""

_MOST_KNOWN_HASHES: Final = 250_000
_UNKNOWN: Final = -1
_Columns = tuple[npt.NDArray[Any], ...]
_NO_HITS: Final[_Columns] = tuple(
    np.empty(0, kind) for kind in (np.int64, np.uint64, np.uint32, np.float32)
)


class Spool:
    """One file. Each batch goes to the operating system in one piece, or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self._append(SCHEMA.serialize())
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def write(self, batch: pa.RecordBatch) -> None:
        """Append it. Raises OSError, and the file is as it was."""
        self._append(batch.serialize())

    def is_there(self) -> bool:
        """Whether it can still be found: a removed file takes what is written, for nobody."""
        return is_named(self.path, os.fstat(self._fd))

    def close(self) -> None:
        """It stays as it is from now on."""
        os.close(self._fd)

    def _append(self, message: pa.Buffer) -> None:
        view = memoryview(message)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, self.size_bytes)
            os.lseek(self._fd, self.size_bytes, os.SEEK_SET)
            raise
        self.size_bytes += message.size


def is_named(path: Path, known: os.stat_result) -> bool:
    """Whether this path leads to that very file. Where nobody can see, it still does."""
    try:
        return os.path.samestat(path.stat(), known)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def read(path: Path) -> tuple[list[pa.RecordBatch], bool]:
    """The whole batches of a spool, and whether it ends in the middle of one.

    Raises OSError where it can't be read. Not mapped: its writer may shorten it.
    """
    content = path.read_bytes()
    batches: list[pa.RecordBatch] = []
    try:
        with pa.ipc.open_stream(content) as reader:
            if reader.schema != SCHEMA:
                return [], True
            batches.extend(reader)  # those before the torn one are there when it raises
    except (pa.ArrowException, OSError):
        return batches, True
    return batches, False


class Voice:
    """A worker that is heard: what it has said of asks, and what of that stands in the file."""

    def __init__(self, hello: journal.Hello, said: bytes) -> None:
        self.hello = hello
        self.said = said
        self.process = _UNKNOWN
        self._base = 0
        self.asks: list[tuple[bytes, bytes, bytes]] = []  # facts, About, hashes
        self.written = np.full(1024, _UNKNOWN, np.int64)
        self.origin = np.full(1024, _UNKNOWN, np.int64)

    def add(self, ref: int, ask: tuple[bytes, bytes, bytes]) -> None:
        """The worker describes an ask. Raises FrameError for one out of turn."""
        if not self.asks:
            self._base = ref
        place = len(self.asks)
        if ref != self._base + place:
            raise journal.FrameError
        self.asks.append(ask)
        if place == len(self.written):
            more = np.full(place, _UNKNOWN, np.int64)
            self.written = np.concatenate((self.written, more))
            self.origin = np.concatenate((self.origin, more))

    def renew(self, ref: int, facts: bytes) -> None:
        """Another answer is kept for an ask."""
        place = self.place(ref)
        known, about, hashes = self.asks[place]
        if facts != known:
            self.asks[place] = (facts, about, hashes)
            self.written[place] = _UNKNOWN

    def reset(self) -> None:
        """The worker begins to describe anew."""
        self.asks.clear()
        self.forget()

    def forget(self) -> None:
        """Nothing of it stands in the file."""
        self.process = _UNKNOWN
        self.written[:] = _UNKNOWN
        self.origin[:] = _UNKNOWN

    def place(self, ref: int) -> int:
        """Where an ask is. Raises FrameError for an unknown one."""
        place = ref - self._base
        if not 0 <= place < len(self.asks):
            raise journal.FrameError
        return place

    def places(self, refs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same for many."""
        places = refs - self._base
        if len(places) and not (places.min() >= 0 and places.max() < len(self.asks)):
            raise journal.FrameError
        return places


class Recorder:
    """Turns what workers say into batches of a spool.

    Whoever takes a batch says before anything else is heard whether to `keep` or to `lose` it.
    """

    def __init__(self) -> None:
        self._voices: set[Voice] = set()
        self._asks = self._processes = 0
        self._in_file = (0, 0)
        self._known: dict[bytes, int] = {}
        self._records: list[tuple[int, int, int, int, float, bytes]] = []
        self._hits: list[_Columns] = []
        self._rows: dict[Voice, int] = {}
        self.waiting_rows = 0

    @property
    def has_news(self) -> bool:
        """Whether anything was heard."""
        return bool(self._records or self._hits)

    def join(self, voice: Voice) -> None:
        """From now on it is heard."""
        self._voices.add(voice)

    def leave(self, voice: Voice) -> None:
        """It has ended; what it said stays."""
        self._voices.discard(voice)

    def hear(self, voice: Voice, kind: bytes, payload: bytes) -> None:
        """One frame. Raises FrameError."""
        if kind == journal.HITS:
            self._hear_hits(voice, payload)
        elif kind == journal.ROW:
            size = journal.ROW_HEAD.size
            at_us, number, ref, duration_s = journal.ROW_HEAD.unpack_from(payload)
            ask = self._ask(voice, voice.place(ref))
            self._records.append((ROW_RECORD, at_us, number, ask, duration_s, payload[size:]))
            self._count(voice, 1)
        elif kind == journal.ASK:
            ref, about_bytes = journal.ASK_HEAD.unpack_from(payload)
            facts_end = journal.ASK_HEAD.size + journal.FACTS.size
            about_end = facts_end + about_bytes
            facts = payload[journal.ASK_HEAD.size : facts_end]
            voice.add(ref, (facts, payload[facts_end:about_end], payload[about_end:]))
        elif kind == journal.STORED:
            (ref,) = journal.STORED_HEAD.unpack_from(payload)
            voice.renew(ref, payload[journal.STORED_HEAD.size :])
        elif kind == journal.RESET:
            voice.reset()
        else:
            raise journal.FrameError

    def take(self) -> tuple[pa.RecordBatch, dict[Voice, int]]:
        """All that was heard since, and how many requests of each worker are among it."""
        told: list[Any] = list(zip(*self._records, strict=True)) or [()] * len(SCHEMA)
        hits = [np.concatenate(column) for column in zip(_NO_HITS, *self._hits, strict=True)]
        kinds = np.full(len(hits[0]), HIT_RECORD, np.uint8)
        numbers = [
            pa.array(np.concatenate((np.array(column, more.dtype), more)))
            for column, more in zip(told[:-1], (kinds, *hits), strict=True)
        ]
        data = pa.concat_arrays(
            [pa.array(told[-1], pa.binary()), pa.nulls(len(kinds), pa.binary())]
        )
        batch = pa.record_batch([*numbers, data], schema=SCHEMA)
        rows = self._rows
        self._records, self._hits, self._rows, self.waiting_rows = [], [], {}, 0
        return batch, rows

    def keep(self) -> None:
        """What was taken is in the file."""
        self._in_file = (self._asks, self._processes)

    def lose(self) -> None:
        """What was taken isn't in the file, and never will be."""
        self._asks, self._processes = self._in_file
        self._forget()

    def begin(self) -> None:
        """A new file begins."""
        self._asks = self._processes = 0
        self._in_file = (0, 0)
        self._forget()

    def _forget(self) -> None:
        self._known.clear()
        for voice in self._voices:
            voice.forget()

    def _hear_hits(self, voice: Voice, payload: bytes) -> None:
        if (len(payload) - journal.HITS_HEAD.size) % journal.HIT_BYTES:
            raise journal.FrameError
        (to_wall_s,) = journal.HITS_HEAD.unpack_from(payload)
        told = np.frombuffer(payload, "<f8", offset=journal.HITS_HEAD.size).reshape(-1, 4)
        places = voice.places(told[:, 2].astype(np.int64))
        asks = voice.written[places]
        if len(asks) and asks.min() < 0:
            for place in np.unique(places[asks < 0]).tolist():
                self._ask(voice, place)
            asks = voice.written[places]
        at_us = ((told[:, 0] + to_wall_s) * 1e6).astype(np.int64)
        number, duration_s = told[:, 1].astype(np.uint64), told[:, 3].astype(np.float32)
        self._hits.append((at_us, number, asks.astype(np.uint32), duration_s))
        self._count(voice, len(told))

    def _count(self, voice: Voice, rows: int) -> None:
        self._rows[voice] = self._rows.get(voice, 0) + rows
        self.waiting_rows += rows

    def _ask(self, voice: Voice, place: int) -> int:
        """The ask's number in this file, where it is put if it wasn't there."""
        written, origin = voice.written, voice.origin
        if written[place] >= 0:
            return int(written[place])
        if voice.process < 0:
            voice.process = self._processes
            self._processes += 1
            self._records.append((PROCESS_RECORD, 0, voice.process, 0, 0.0, voice.said))
        ask = self._asks
        self._asks += 1
        facts, about, hashes = voice.asks[place]
        if origin[place] >= 0:
            self._records.append((STORED_RECORD, 0, int(origin[place]), ask, 0.0, facts))
        else:
            base, shared = self._like(hashes, ask)
            head = ASK_BASE.pack(base, shared, len(about))
            data = facts + head + about + hashes[shared * HASH_BYTES :]
            self._records.append((ASK_RECORD, 0, voice.process, ask, 0.0, data))
            origin[place] = ask
        written[place] = ask
        return ask

    def _like(self, hashes: bytes, ask: int) -> tuple[int, int]:
        """An ask of this file that begins as this one does, and how many blocks they share.

        Hashes are chained, so whoever has one has all before it: it is found by bisection.
        """
        known = self._known
        shared, most = 0, len(hashes) // HASH_BYTES
        while shared < most:
            middle = (shared + most + 1) // 2
            if hashes[(middle - 1) * HASH_BYTES : middle * HASH_BYTES] in known:
                shared = middle
            else:
                most = middle - 1
        end = shared * HASH_BYTES
        base = known[hashes[end - HASH_BYTES : end]] if shared else 0
        if len(known) > _MOST_KNOWN_HASHES:
            known.clear()
        known.update(_each(hashes[end:], ask))
        return base, shared


def _each(hashes: bytes, ask: int) -> Iterable[tuple[bytes, int]]:
    for start in range(0, len(hashes), HASH_BYTES):
        yield hashes[start : start + HASH_BYTES], ask
