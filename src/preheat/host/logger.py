"""The log process: hears the workers of one machine, and writes the request log.

    python -m preheat.host.logger --folder DIR (--socket PATH | --listen-fd N)

Twice a second or more often what it heard goes to the spool, so that whoever is killed takes at
most a second along. It is told to end by SIGTERM; with `--lifeline-fd`, also by the end of whoever
holds the other end of that pipe.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import msgspec

from preheat.host import signals
from preheat.telemetry.logs import Log
from preheat.wire import journal

try:
    import pyarrow as pa

    from preheat.host.archive import Archive, Event, FolderInUseError
    from preheat.traces.spool import Recorder, Spool, Voice, is_named
except ImportError as error:
    log = Log(sys.stderr.buffer)
    why, remedy = f"{error.name} can't be imported", "pip install 'preheat[log]'"
    log.event("request-log-refused", why=why, remedy=remedy)
    log.close()
    sys.exit(1)

_TICK_S: Final = 0.25
_SPOOL_BYTES: Final = 33_554_432
_MOST_WAITING_ROWS: Final = 65_536
_LAST_WORDS_S: Final = 10.0
"""When its owner is gone, workers may still be answering their last requests."""

_LAST_READ_S: Final = 2.0
_LAST_ACCEPT_S: Final = 0.05
"""A worker that had just connected when the end was told is heard, too."""

_LAST_WORK_S: Final = 5.0
_RETAIN_ROOM_S: Final = 5.0
_LOOK_S: Final = 1.0
_WRITABLE: Final = "set log.path to a folder that this user may write to"
_HELLO: Final = msgspec.msgpack.Decoder(journal.Hello)


class LogProcess:
    """What the process has: the workers it hears, a recorder, the open spool, the archive."""

    def __init__(self, archive: Archive, roll_s: float, on_event: Event, spool_bytes: int) -> None:
        self.recorder = Recorder()
        self.listeners: dict[Voice, Listener] = {}
        self.connections: set[Listener] = set()
        self._archive = archive
        self._roll_s = roll_s
        self._on_event = on_event
        self._spool_bytes = spool_bytes
        self._spool: Spool | None = None
        self._opened_at = 0.0
        self._has_room = True
        self._looked_at = 0.0
        self._is_losing = False
        self._lost_rows = 0
        self.is_gone = False
        self._door: tuple[Path, os.stat_result] | None = None
        self._unseen: dict[Voice, int] = {}
        self._seen_at = 0.0
        self._last_at = self._told_at = float("inf")
        self._tick_s = _TICK_S
        self._woken = asyncio.Event()

    async def run(self, listening: socket.socket, door: Path | None = None) -> None:
        """Until it is told to stop, or somebody removes its folder or `door`, the socket's path:
        `is_gone` then, and only a new process finds its way."""
        loop = asyncio.get_running_loop()
        self._door = _seen(door) if door is not None else None
        server = await loop.create_unix_server(lambda: Listener(self), sock=listening)
        try:
            while not self._is_done():
                self.write()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), self._tick_s)
                self._woken.clear()
        finally:
            server.close()
            self.write()
            self._roll()
            for connection in tuple(self.connections):
                connection.close()

    def stop(self, within_s: float) -> None:
        """End when all that workers have sent was read, which is when they are gone."""
        now, self._tick_s = time.monotonic(), _LAST_ACCEPT_S
        self._last_at, self._told_at = min(self._last_at, now + within_s), min(self._told_at, now)
        self._woken.set()

    def refuse(self) -> None:
        """A connection that doesn't speak as workers do was closed."""
        self._on_event("request-log-protocol")

    def write(self) -> None:
        """Put what was heard into the spool; begin a new one where it is time."""
        now = time.monotonic()
        if self.recorder.has_news:
            self._write(now)
        if now - self._seen_at >= _LOOK_S:
            self._look(now)
        spool = self._spool
        if spool is not None and (
            spool.size_bytes > self._spool_bytes or now - self._opened_at > self._roll_s
        ):
            self._roll()

    def _look(self, now: float) -> None:
        """See whether what was written since the last look can be found."""
        self._seen_at = now
        spool, rows = self._spool, 0
        has_spool = spool is None or spool.is_there()
        if spool is not None and not has_spool:
            spool.close()
            self._spool = None
            self.recorder.begin()
            self._tell_lost(self._unseen)
            rows = sum(self._unseen.values())
        self._unseen.clear()
        has_door = self._door is None or is_named(*self._door)
        if self.is_gone or (has_spool and has_door and self._archive.is_there()):
            return
        self.is_gone = True
        self._woken.set()
        self._on_event("request-log-folder-gone", rows=rows)

    def _is_done(self) -> bool:
        if self.is_gone:
            return True
        now = time.monotonic()
        is_alone = not self.connections and now >= self._told_at + _LAST_ACCEPT_S
        return is_alone or now >= self._last_at

    def _write(self, now: float) -> None:
        batch, rows = self.recorder.take()
        try:
            if self._spool is None:
                self._spool = self._archive.new_spool()
                self._opened_at = now
            if now - self._looked_at > _RETAIN_ROOM_S:
                self._looked_at, self._has_room = now, self._archive.has_room()
            if not self._has_room:
                self._lose(rows, "spools have used up the budget")
                return
            self._spool.write(batch)
        except OSError as error:
            self._lose(rows, os.strerror(error.errno or 0))
            return
        self.recorder.keep()
        for voice, count in rows.items():
            self._unseen[voice] = self._unseen.get(voice, 0) + count
        if self._is_losing:
            self._is_losing = False
            self._on_event("request-log-written-again", lost_rows=self._lost_rows)

    def _lose(self, rows: dict[Voice, int], reason: str) -> None:
        """The disk is full or worse: these rows are gone, the next may not be."""
        self.recorder.lose()
        self._tell_lost(rows)
        if not self._is_losing:
            self._is_losing = True
            self._on_event("request-log-lost", rows=sum(rows.values()), reason=reason)

    def _tell_lost(self, rows: dict[Voice, int]) -> None:
        for voice, count in rows.items():
            self._lost_rows += count
            if voice in self.listeners:
                self.listeners[voice].tell_lost(count)

    def _roll(self) -> None:
        self._look(time.monotonic())
        if self._spool is not None:
            self._spool.close()
            self._archive.compact(self._spool.path)
            self._spool = None
            self.recorder.begin()


def _seen(path: Path) -> tuple[Path, os.stat_result]:
    return path, path.stat()


class Listener(asyncio.Protocol):
    """One worker's connection."""

    def __init__(self, process: LogProcess) -> None:
        self._process = process
        self._buffer = bytearray()
        self._voice: Voice | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._process.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for kind, payload in journal.frames(self._buffer):
                self._hear(kind, payload)
        except (journal.FrameError, struct.error, msgspec.MsgspecError):
            self._process.refuse()
            self._transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._process.connections.discard(self)
        if self._voice is not None:
            self._process.recorder.leave(self._voice)
            self._process.listeners.pop(self._voice, None)

    def tell_lost(self, rows: int) -> None:
        """Rows of this worker's couldn't be written."""
        self._transport.write(journal.LOST.pack(rows))

    def close(self) -> None:
        """End it."""
        self._transport.close()

    def _hear(self, kind: bytes, payload: bytes) -> None:
        recorder = self._process.recorder
        if self._voice is not None:
            recorder.hear(self._voice, kind, payload)
            if recorder.waiting_rows > _MOST_WAITING_ROWS:
                self._process.write()
            return
        hello = _HELLO.decode(payload)
        if kind != journal.HELLO or hello.version != journal.VERSION:
            raise journal.FrameError
        self._voice = Voice(hello, payload)
        recorder.join(self._voice)
        self._process.listeners[self._voice] = self


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to end."""
    signals.ignore()
    options = _parser().parse_args(arguments)
    pa.set_cpu_count(1)  # the cores belong to those who answer
    log = Log(sys.stderr.buffer)
    try:
        archive = Archive(options.folder, options.bytes, options.days, log.event)
    except FolderInUseError:
        why = f"another process writes the request log in {options.folder}"
        return _refused(log, why, "set log.path to another folder, or end that process")
    except OSError as error:
        return _refused(log, _why(error, options.folder), _WRITABLE)
    is_gone = asyncio.run(_serve(options, archive, log))
    if is_gone is None:
        return 1
    archive.close(_LAST_WORK_S)
    log.close()
    return 1 if is_gone else 0


def _refused(log: Log, why: str, remedy: str) -> int:
    log.event("request-log-refused", why=why, remedy=remedy)
    log.close()
    return 1


def _why(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: {error.strerror or error}"


async def _serve(options: argparse.Namespace, archive: Archive, log: Log) -> bool | None:
    """Whether its folder was removed; None where it could not begin."""
    process = LogProcess(archive, options.roll_s, log.event, options.spool_bytes)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, process.stop, _LAST_READ_S)
    if options.lifeline_fd is not None:

        def end() -> None:
            loop.remove_reader(options.lifeline_fd)
            process.stop(_LAST_WORDS_S)

        loop.add_reader(options.lifeline_fd, end)
    try:  # whoever finds the socket may send a signal
        listening = _listening(options)
    except OSError as error:
        _refused(log, _why(error, options.socket), _WRITABLE)
        return None
    log.event("request-log-started", spools_left=archive.start())
    await process.run(listening, options.socket)
    return process.is_gone


def _listening(options: argparse.Namespace) -> socket.socket:
    if options.listen_fd is not None:
        return socket.socket(fileno=options.listen_fd)
    with contextlib.suppress(FileNotFoundError):
        options.socket.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(str(options.socket))
    finally:
        os.umask(before)
    listening.listen()
    return listening


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m preheat.host.logger", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the log is")
    door = parser.add_mutually_exclusive_group(required=True)
    door.add_argument("--socket", type=Path, help="listen here")
    door.add_argument("--listen-fd", type=int, help="a listening Unix socket, inherited")
    parser.add_argument("--lifeline-fd", type=int, help="a pipe whose end is this process's end")
    parser.add_argument("--bytes", type=int, default=10_737_418_240, help="budget of the folder")
    parser.add_argument("--days", type=float, default=30.0, help="files older than this go")
    parser.add_argument("--roll-s", type=float, default=3600.0, help="a Parquet file so often")
    parser.add_argument(
        "--spool-bytes", type=int, default=_SPOOL_BYTES, help="or whenever a spool is so large"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
