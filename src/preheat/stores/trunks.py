"""The text that warming needs: beginnings of conversations that many share. No other place keeps any.

Text is kept only of what at least three sessions began with; of the rest there are hashes in memory.
A trunk is a chain of whole messages, so each node holds one message and names the one before it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import exp
from typing import Any, Final

import msgspec

from preheat.core.memo import Memo
from preheat.core.types import Epoch, Invalidation, Key
from preheat.stores import News
from preheat.stores.sighting import Sighting, pieces, session_of
from preheat.stores.trunk_file import Kept, Row, TrunkFile

LEAST_SESSIONS: Final = 3
_CANDIDATES: Final = 65_536
_MOST_TAGS: Final = 16
_NODE_BYTES: Final = 512
"""What a node costs beside its text, about."""
_COOLS_S: Final = 300.0
"""In so long a session's share of the heat falls to 1/e: by it the first minute after a cold start finds 26 %
in the cache, by the plain count 18 % (algorithms.md, finding 3)."""
_NO_KEY: Final = Key(b"")
_DECODE: Final = msgspec.json.Decoder().decode


class Trunk(msgspec.Struct, frozen=True, kw_only=True):
    """A beginning that `sessions` had, about; `seen_at` is wall-clock seconds. `blocks` is how the router knows
    it, where one that ended there was seen since this process began."""

    tenant: str
    namespace: str
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    sessions: int
    seen_at: float
    blocks: Sequence[int] = ()
    text_bytes: int = 0


class Trunks:
    """Bounded by bytes and age. The least recently seen leaves first, of the tenant that has most.

    `file` keeps them over a restart; without it they live in memory only. Of several processes with the same
    one each reads it at its start, and one of them writes. Not for many threads.
    """

    def __init__(
        self,
        *,
        most_bytes: int = 16 * 2**20,
        most_age_s: float = 7 * 86_400.0,
        file: TrunkFile | None = None,
    ) -> None:
        """Read what the file has. Raises ConfigError where it can't be read for want of its key."""
        self.size_bytes = 0
        self._most_bytes = most_bytes
        self._most_age_s = most_age_s
        self._file = file
        # Of each tenant the least recently seen first. A touch goes from the end of a conversation to
        # its root, so that the first is always one on which no other stands.
        self._tenants: dict[str, OrderedDict[bytes, Row]] = {}
        self._sizes: dict[str, int] = {}
        self._candidates: Memo[bytes, tuple[int, ...]] = Memo(_CANDIDATES)
        self._blocks: dict[bytes, array[int]] = {}  # ids of 64 bits
        self._is_dirty = False
        self._epoch = Epoch()
        if file is not None:
            file.take()
            self._read(file)

    def __len__(self) -> int:
        """How many messages are kept."""
        return sum(map(len, self._tenants.values()))

    def saw(self, one: Sighting, now: float) -> None:
        """A request came. 20 µs and more by its length: off the event loop, for what is long."""
        session = session_of(one)
        path: list[bytes] = []
        for depth, (id_, text) in enumerate(pieces(one)):
            rows = self._tenants.get(one.tenant)
            row = rows.get(id_) if rows else None
            if row is not None:
                _touch(row, session, one.tags, now)
            elif self._is_shared(id_, session) and len(path) == depth:
                self._add(_row(one, id_, path[-1] if path else b"", text, session, now))
            else:
                continue  # what is behind is counted too, but stands on nothing yet
            path.append(id_)
        if path and len(path) <= len(one.block_ends):
            blocks = array("Q", one.blocks[: one.block_ends[len(path) - 1]])
            self._forget_blocks(one.tenant, path[-1])
            self._count(one.tenant, blocks.itemsize * len(blocks))
            self._blocks[path[-1]] = blocks
        for id_ in reversed(path):
            self._tenants[one.tenant].move_to_end(id_)
        self._is_dirty |= bool(path)
        self._make_room()

    def hot(self, now: float, *, tenant: str | None = None, most: int = 100) -> list[Trunk]:
        """The hottest first: those that most sessions had of late, the longest of equals only; none that is too
        old."""
        self.expire(now)
        rows = [row for row in self._rows() if tenant is None or row.tenant == tenant]
        deepest: dict[bytes, int] = {}
        for row in rows:
            deepest[row.parent] = max(deepest.get(row.parent, 0), row.sessions)
        ends = [row for row in rows if deepest.get(row.id, 0) < row.sessions]
        ends.sort(key=lambda row: (-_heat(row, now), -row.sessions, -row.seen_at))
        return [self._whole(row) for row in ends[:most]]

    def expire(self, now: float) -> None:
        """Forget what nobody began with for so long."""
        for tenant, rows in list(self._tenants.items()):
            while rows and next(iter(rows.values())).seen_at < now - self._most_age_s:
                self._pop(tenant)

    def invalidate(self, what: Invalidation) -> int:
        """Erase what it covers, in memory and on disk; how many messages that were. Entries' keys
        name no trunk. Counts begin anew for all, and a file that was set aside is removed: nobody
        knows whose text is in it. Raises StoreError where the disk fails, after removing the file."""
        gone = 0
        is_ours = self._has_file()
        for tenant, rows in list(self._tenants.items()):
            covered: set[bytes] = set()
            for row in reversed(rows.values()):  # roots before what stands on them
                if row.parent in covered or what.covers(
                    _NO_KEY,
                    model=row.model,
                    namespace=row.namespace,
                    tenant=row.tenant,
                    tags=tuple(row.tags),
                ):
                    covered.add(row.id)
            for id_ in covered:
                self._drop(tenant, id_)
            gone += len(covered)
        self._candidates.clear()
        if self._file is not None and is_ours:
            self._file.remove_damaged()
            self._is_dirty |= bool(gone)
            self.save(erasing=True)
        return gone

    def catch_up(self, news: News) -> int:
        """Erase what was invalidated elsewhere since this was learned, also while nobody ran here; how many
        messages. Where that can't be known any more, all. Raises StoreError as `invalidate` does."""
        known, void = self._epoch, [what for _, what in news.invalidations]
        if known.generation:
            void = [what for number, what in news.invalidations if number > known.number]
            if known.generation != news.epoch.generation or known.number < news.floor:
                void = [Invalidation()]
        elif news.is_all:
            void = []  # from before anything was learned
        self._epoch = news.epoch
        self._is_dirty |= bool(len(self))
        return sum(self.invalidate(what) for what in void)

    def save(self, *, erasing: bool = False) -> None:
        """Write what has changed. Raises StoreError; what is being erased is then not in the file
        either."""
        if self._is_dirty and self._has_file() and self._file is not None:
            epoch = self._epoch
            kept = Kept(list(self._rows()), epoch.generation, epoch.number)
            self._file.write(kept, erasing=erasing)
            self._is_dirty = False

    def close(self) -> None:
        """Write what has changed, and let another process write from now on. Raises StoreError."""
        try:
            self.save()
        finally:
            if self._file is not None:
                self._file.release()

    # Books.

    def _has_file(self) -> bool:
        """Whether this process writes it. The first time, what the one before knew isn't lost."""
        file = self._file
        if file is None or file.is_ours:
            return file is not None
        if not file.take():
            return False
        self._read(file)
        return True

    def _read(self, file: TrunkFile) -> None:
        kept = file.read()
        if not self._epoch.generation:
            self._epoch = Epoch(kept.generation, kept.number)
        for row in kept.rows:
            rows = self._tenants.get(row.tenant, ())
            if row.id not in rows and (not row.parent or row.parent in rows):
                self._add(row)
        self._make_room()

    def _rows(self) -> Iterator[Row]:
        """Parents before what stands on them."""
        for rows in self._tenants.values():
            yield from reversed(rows.values())

    def _is_shared(self, id_: bytes, session: int) -> bool:
        """Whether this session is the one that makes it a trunk."""
        known = self._candidates[id_] or ()
        if session not in known:
            known = (*known, session)
            self._candidates.put(id_, known)
        return len(known) >= LEAST_SESSIONS

    def _add(self, row: Row) -> None:
        rows = self._tenants.setdefault(row.tenant, OrderedDict())
        rows[row.id] = row
        rows.move_to_end(row.id, last=False)  # behind its parent; a touch follows
        self._count(row.tenant, len(row.text) + _NODE_BYTES)

    def _count(self, tenant: str, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size_bytes

    def _forget_blocks(self, tenant: str, id_: bytes) -> None:
        blocks = self._blocks.pop(id_, array("Q"))
        self._count(tenant, -blocks.itemsize * len(blocks))

    def _make_room(self) -> None:
        while self.size_bytes > self._most_bytes:
            self._pop(max(self._sizes, key=self._sizes.__getitem__))

    def _pop(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._tenants[tenant])))

    def _drop(self, tenant: str, id_: bytes) -> None:
        row = self._tenants[tenant].pop(id_)
        self._count(tenant, -len(row.text) - _NODE_BYTES)
        self._forget_blocks(tenant, id_)
        self._is_dirty = True
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._sizes[tenant]

    def _whole(self, end: Row) -> Trunk:
        texts: list[bytes] = []
        row: Row | None = end
        while row is not None:
            texts.append(row.text)
            row = self._tenants[end.tenant].get(row.parent)
        tools, first = _DECODE(texts[-1])
        return Trunk(
            tenant=end.tenant,
            namespace=end.namespace,
            model=end.model,
            messages=[first, *map(_DECODE, reversed(texts[:-1]))],
            tools=tools,
            sessions=end.sessions,
            seen_at=end.seen_at,
            blocks=tuple(self._blocks.get(end.id, ())),
            text_bytes=sum(map(len, texts)),
        )


def _row(one: Sighting, id_: bytes, parent: bytes, text: bytes, session: int, now: float) -> Row:
    return Row(
        tenant=one.tenant,
        namespace=one.namespace,
        model=one.model,
        id=id_,
        parent=parent,
        text=text,
        sessions=LEAST_SESSIONS,
        session=session,
        seen_at=now,
        tags=_merged([], one.tags),
        heat=float(LEAST_SESSIONS),
    )


def _touch(row: Row, session: int, tags: Sequence[str], now: float) -> None:
    heat = _heat(row, now)
    if row.session != session:
        row.sessions += 1
        row.session = session
        heat += 1.0
    row.heat, row.seen_at = heat, now
    row.tags = _merged(row.tags, tags)


def _heat(row: Row, now: float) -> float:
    return row.heat * exp(min(0.0, row.seen_at - now) / _COOLS_S)


def _merged(tags: list[str], more: Sequence[str]) -> list[str]:
    """Newest last; an invalidation by tag reaches what was ever seen with one of the last 16."""
    new = [tag for tag in more if tag not in tags]
    return [*tags, *new][-_MOST_TAGS:] if new else tags
