"""The folder that llama.cpp servers save slots to: what is kept, and which files have to go.

The server writes the files itself, with the prompts' tokens in the clear. So the folder is ours alone
(0700, files 0600), and whoever wants them encrypted gives one on an encrypted file system: a copy
encrypted by us would stand beside a plain one at each save and each load.
"""

import os
import re
import secrets
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

from xxhash import xxh3_64

from preheat.core.slot_desk import Holding
from preheat.engines.slot_names import Kept, SlotNames
from preheat.errors import ConfigError

_PART: Final = re.compile(r"part-[0-9a-f]{16}\.kv")
_PIECE_BYTES: Final = 4 * 2**20
_KEEP_FREE_BYTES: Final = 256 * 2**20
"""Of the disk: others write there, too."""

Ended = Literal["full", "elsewhere", "changed"]
"""Why a saved slot isn't kept: no room, the server writes somewhere else, the file isn't as told."""


class SlotFolder:
    """Files of one model, at most `budget_bytes` of them, none older than `max_age_s` since its last
    use. Those of other models are never restored, and the first to go.

    Calls block, and may come from several threads. Times are the wall clock's, as the files' are.
    Not to be shared between processes: each would sweep what the other is writing.
    """

    def __init__(
        self,
        path: Path,
        *,
        identity: str,
        secret: bytes,
        budget_bytes: int,
        max_age_s: float,
        free_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        """`identity` is `model_identity`'s. With another `secret` nothing of before is found."""
        self.path = path
        self.identity = identity
        self._names = SlotNames(identity, secret)
        self.budget_bytes = budget_bytes
        self._max_age_s = max_age_s
        self._free_bytes = free_bytes or _free_bytes
        self._lock = threading.RLock()
        self._kept: dict[bytes, Kept] = {}  # by chain
        self._foreign: dict[str, Kept] = {}  # other models', by name
        self._lengths: tuple[int, ...] = ()  # of the chains that are kept, the longest first
        # Given up unwritten: the server may write them yet.
        self._lost: deque[str] = deque(maxlen=64)

    @property
    def size_bytes(self) -> int:
        """What all slot files take."""
        with self._lock:
            return sum(one.size_bytes for one in (*self._kept.values(), *self._foreign.values()))

    def open(self, now: float) -> None:
        """Read what is there; sweep what was never finished. Raises ConfigError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = self.path.stat()
            if about.st_mode & stat.S_ISVTX:  # as /tmp is
                raise ConfigError(
                    f"{self.path} is everybody's: slot files need a folder of their own"
                )
            if about.st_uid == os.geteuid():
                self.path.chmod(0o700)
            elif stat.S_IMODE(about.st_mode) & 0o077:
                raise ConfigError(
                    f"{self.path} belongs to somebody else, and others may read it: slot files hold "
                    "prompts; give a folder of your own"
                )
            for entry in os.scandir(self.path):
                self._read(entry)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"{self.path} can't hold slot files: {why}") from None
        self._sort()
        self._drop_aged(now)

    def find(self, tenant: str, blocks: Sequence[int]) -> Kept | None:
        """The file with the longest beginning of this prompt. Blocks on nothing."""
        for length in self._lengths:
            if length <= len(blocks):
                kept = self._kept.get(self._names.chain(tenant, blocks[:length]))
                if kept is not None:
                    return kept
        return None

    def named(self, chain: bytes) -> Kept | None:
        """The file with this prefix."""
        return self._kept.get(chain)

    def newest(self) -> list[Kept]:
        """Those whose session isn't over, the one used last first: in this order a new process
        restores them."""
        with self._lock:
            here = [one for one in self._kept.values() if not one.is_over]
        return sorted(here, key=lambda one: -one.used_at)

    # Saving ------------------------------------------------------------------------------------

    def begin(self, expected_bytes: int, now: float) -> str | None:
        """The name for a file that will be about so large, with room made for it; None where there
        can't be any."""
        with self._lock:
            for part in self._lost:
                (self.path / part).unlink(missing_ok=True)
            self._drop_aged(now)
            if not self._make_room(expected_bytes):
                return None
        return f"part-{secrets.token_hex(8)}.kv"

    def finish(self, part: str, holding: Holding, size_bytes: int, now: float) -> Kept | Ended:
        """The server has written it. Kept under its own name, in place of what it continues."""
        path = self.path / part
        try:
            about = path.lstat()
            if about.st_size != size_bytes or not stat.S_ISREG(about.st_mode):
                return "changed"
            path.chmod(0o600)
            kept = self._names.make(holding, _check_of(path), size_bytes, now)
            with self._lock:
                if not self._make_room(size_bytes, written_bytes=size_bytes):
                    return "full"
                path.replace(self.path / kept.name)
                self._add(kept, holding)
        except FileNotFoundError:
            return "elsewhere"
        return kept

    def abandon(self, part: str) -> None:
        """It won't be finished."""
        try:
            (self.path / part).unlink()
        except FileNotFoundError:
            with self._lock:
                self._lost.append(part)

    # Using -------------------------------------------------------------------------------------

    def is_whole(self, kept: Kept) -> bool:
        """Whether the file is what was saved; one that isn't goes. Read once by each process, which
        brings it into memory as well. The server itself would compute on with a changed file, and
        die of one that is cut short."""
        path = self.path / kept.name
        try:
            about = path.lstat()
            is_same = stat.S_ISREG(about.st_mode) and about.st_size == kept.size_bytes
            if is_same and (kept.is_checked or _check_of(path) == kept.check):
                kept.is_checked = True
                return True
        except OSError:
            pass
        self.drop(kept)
        return False

    def used(self, kept: Kept, now: float) -> None:
        """It was restored."""
        with self._lock:
            self._date(kept, now)

    def over(self, tenant: str, session: str) -> int:
        """That session won't come back: its files go first. Bytes of those that wouldn't have; none where it has
        no name, as others have none, too."""
        with self._lock:
            found = [one for one in self._of(tenant, session) if session and not one.is_over]
            for kept in found:
                self._date(kept, 0.0)
        return sum(one.size_bytes for one in found)

    def erase(self, tenant: str, session: str | None = None) -> int:
        """Delete a tenant's files, or those of one session, of whatever model. How many they were. Raises
        ConfigError where one can't be deleted: the others are, and the next call tries it again."""
        failure: OSError | None = None
        with self._lock:
            gone = self._of(tenant, session, (*self._kept.values(), *self._foreign.values()))
            for kept in gone:
                try:
                    (self.path / kept.name).unlink(missing_ok=True)
                    self.drop(kept)
                except OSError as error:
                    failure = error
        if failure is not None:
            why = failure.strerror or failure
            raise ConfigError(f"a slot file in {self.path} can't be deleted: {why}") from None
        return len(gone)

    def drop(self, kept: Kept) -> None:
        """Delete it."""
        with self._lock:
            if self._kept.get(kept.chain) is kept:
                del self._kept[kept.chain]
                self._sort()
            self._foreign.pop(kept.name, None)
            (self.path / kept.name).unlink(missing_ok=True)

    # What is kept, and room for it -----------------------------------------------------------------

    def _read(self, entry: os.DirEntry[str]) -> None:
        if not entry.is_file(follow_symlinks=False):
            return
        if _PART.fullmatch(entry.name):
            Path(entry.path).unlink(missing_ok=True)
            return
        about = entry.stat(follow_symlinks=False)
        kept = self._names.read(entry.name, about.st_size, about.st_mtime)
        if kept is None:
            return
        if self._names.is_ours(kept):
            self._kept[kept.chain] = kept
        else:
            self._foreign[kept.name] = kept

    def _add(self, kept: Kept, holding: Holding) -> None:
        before = self._kept.get(kept.chain)
        if before is not None and before.name != kept.name:
            self.drop(before)
        if holding.session:
            for one in self._of(holding.tenant, holding.session):
                earlier = holding.blocks[: one.blocks]  # an earlier turn is in the file of a later
                is_begun = one.blocks < kept.blocks and one.chain == self._names.chain(
                    holding.tenant, earlier
                )
                if is_begun:
                    self.drop(one)
        self._kept[kept.chain] = kept
        self._sort()

    def _make_room(self, more_bytes: int, *, written_bytes: int = 0) -> bool:
        """Have so many bytes free in the budget and on the disk, where some are written already."""
        if more_bytes > self.budget_bytes:
            return False
        while (
            self.size_bytes + more_bytes > self.budget_bytes
            or self._free_bytes(self.path) + written_bytes - more_bytes < _KEEP_FREE_BYTES
        ):
            # Another model's before one of ours; of ours the one used longest ago.
            least = min((self._foreign or self._kept).values(), key=_used_at, default=None)
            if least is None:
                return False
            self.drop(least)
        return True

    def _drop_aged(self, now: float) -> None:
        for kept in (*self._kept.values(), *self._foreign.values()):
            if kept.used_at < now - self._max_age_s and not kept.is_over:
                self.drop(kept)

    def _of(
        self, tenant: str, session: str | None, among: Iterable[Kept] | None = None
    ) -> list[Kept]:
        whose = self._names.tenant(tenant)
        which = None if session is None else self._names.session(tenant, session)
        return [
            one
            for one in (self._kept.values() if among is None else among)
            if one.tenant == whose and (which is None or one.session == which)
        ]

    def _date(self, kept: Kept, used_at: float) -> None:
        kept.used_at = used_at
        try:
            os.utime(self.path / kept.name, (used_at, used_at))
        except FileNotFoundError:
            self.drop(kept)

    def _sort(self) -> None:
        self._lengths = tuple(sorted({one.blocks for one in self._kept.values()}, reverse=True))


def _used_at(kept: Kept) -> float:
    return kept.used_at


def _check_of(path: Path) -> bytes:
    running = xxh3_64()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            running.update(piece)
    return running.digest()


def _free_bytes(path: Path) -> int:
    told = os.statvfs(path)
    return told.f_bavail * told.f_frsize
