"""One llama.cpp server whose slots are kept in files: opened once it is known, and again after a restart."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from preheat.core.router import Loadable
from preheat.engines.direct import Direct
from preheat.engines.slot_folder import SlotFolder
from preheat.engines.slot_keeper import SlotKeeper
from preheat.engines.slot_shelf import SlotShelf
from preheat.engines.slot_tier import Counts, SlotTier, identity_of, slot_tier
from preheat.errors import ConfigError

_NO_MODEL: Final = "none"
"""All files of a folder are another model's then: they are looked after, and never loaded."""
_GUESSED: Final = 4
"""So many times what its slots hold, until a file has told what a token takes."""


class SlotRules(msgspec.Struct, frozen=True):
    """Where the slots of a group's servers are saved, one folder for all or one each, and for how long.
    With another `secret` nothing of before is found."""

    folders: tuple[str, ...] = ()
    budget_bytes: int = 8 * 2**30
    max_age_s: float = 86_400.0
    secret: bytes = b""


class SlotFolders:
    """A group's folders, each one object however many servers write there."""

    def __init__(self, rules: SlotRules) -> None:
        self._rules = rules
        self._open: dict[Path, SlotFolder] = {}
        self._shelves: dict[Path, SlotShelf] = {}
        self._lock = threading.Lock()

    def at(self, position: int) -> Path | None:
        """The folder of the server at this place; None where there is none."""
        folders = self._rules.folders
        if not folders:
            return None
        return Path(folders[position if len(folders) > 1 else 0]).expanduser()

    def opened(self, path: Path, identity: str) -> SlotFolder:
        """The folder with that model's files. Blocks, and may be asked by several threads. Raises ConfigError."""
        with self._lock:
            return self._opened(path, identity)

    def shelf(self, path: Path) -> SlotShelf:
        """What is known of the files of a folder that is open, by whichever server they were written."""
        return self._shelves[path]

    def erase(self, tenant: str) -> int:
        """Delete a tenant's files in all of them, those of servers that were never reached too; how many
        they were. Blocks. Raises ConfigError, after all the others, where a folder can't be read or a file
        can't be deleted."""
        files, failure = 0, None
        with self._lock:
            for path in {Path(folder).expanduser() for folder in self._rules.folders}:
                try:
                    folder = self._open.get(path) or self._opened(path, _NO_MODEL)
                    files += folder.erase(tenant)
                except ConfigError as error:
                    failure = error
        if failure is not None:
            raise failure
        return files

    def _opened(self, path: Path, identity: str) -> SlotFolder:
        known = self._open.get(path)
        if known is not None and known.identity == identity:
            return known
        rules = self._rules
        made = SlotFolder(
            path,
            identity=identity,
            secret=rules.secret,
            budget_bytes=rules.budget_bytes,
            max_age_s=rules.max_age_s,
        )
        made.open(time.time())
        self._open[path] = made
        self._shelves[path] = SlotShelf(made)
        return made


class SlotSeats:
    """The keeper of one server's slots, from when the server could be asked what it is."""

    def __init__(self, url: str, api_key: str, path: Path, folders: SlotFolders) -> None:
        self.keeper: SlotKeeper | None = None
        self.on_restart: Callable[[], None] = self.restarted
        """Where its slots show that the server is another process; calls `restarted`."""
        self._url = url
        self._api_key = api_key
        self._path = path
        self._folders = folders
        self._direct: Direct | None = None
        self._tier: SlotTier | None = None
        self._is_sure = False
        self._is_open = False
        self._slot_tokens = 0

    async def open(self, slot_tokens: int) -> bool:
        """Make the keeper, which has slots of so many tokens together; a new one where the server has
        another model or number of slots since. Whether anything changed. Several may ask at once: the
        first opens it. Raises ConfigError, EngineError."""
        if self._is_sure:
            return False
        self._is_sure = True  # unless it is started anew meanwhile
        try:
            has_changed = await self._opened(slot_tokens)
        except BaseException:
            self._is_sure = False
            raise
        self._is_open = self._is_sure
        return has_changed

    async def _opened(self, slot_tokens: int) -> bool:
        self._slot_tokens = slot_tokens
        if self._direct is None:
            self._direct = Direct(self._url, api_key=self._api_key, dialect="llamacpp")
        identity = await identity_of(self._direct)
        if self._tier is not None and self._tier.folder.identity == identity:
            slots = await self._direct.slots()
            if slots is not None and len(slots) == self._tier.slots:
                return False
        await self._close()
        folder = await asyncio.to_thread(self._folders.opened, self._path, identity)
        self._tier = tier = await slot_tier(self._direct, folder)
        self.keeper = SlotKeeper(
            tier,
            slots=tier.slots,
            shelf=self._folders.shelf(self._path),
            on_restart=self.on_restart,
        )
        return True

    def restarted(self) -> None:
        """The server is another process: its slots are empty, and it may have another model."""
        self._is_sure = self._is_open = False
        if self.keeper is not None:
            self.keeper.restarted()

    async def look(self) -> bool | None:
        """Ask it what its slots hold, and believe it. Whether it is another process; None where that can't be
        told."""
        return None if self.keeper is None else await self.keeper.look()

    def doubt(self) -> None:
        """It failed, or something came to a slot that wasn't named: it is asked before the next request."""
        if self.keeper is not None:
            self.keeper.doubt()

    def loadable(self, tenant: str, blocks: Sequence[int]) -> Loadable | None:
        """What it could load of a prompt from files; nothing until it is known whose files these must be."""
        if self.keeper is None or not self._is_open:
            return None
        return self.keeper.loadable(tenant, blocks)

    async def refill(self) -> int:
        """Load what was used last into its empty slots, after a restart; how many are filled."""
        return 0 if self.keeper is None else await self.keeper.refill()

    @property
    def held_tokens(self) -> int:
        """What its slots and its files hold, about."""
        if self._tier is None or not self._tier.token_bytes:
            return _GUESSED * self._slot_tokens
        return self._slot_tokens + int(self._tier.folder.budget_bytes / self._tier.token_bytes)

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        return Counts() if self._tier is None else self._tier.counts

    async def aclose(self) -> None:
        """Save nothing more, and let the server be."""
        await self._close()
        if self._direct is not None:
            await self._direct.aclose()

    async def _close(self) -> None:
        keeper, self.keeper = self.keeper, None
        tier, self._tier = self._tier, None
        if keeper is not None:
            await keeper.aclose()
        if tier is not None:
            await tier.aclose()
