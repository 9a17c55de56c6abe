"""The text that warming needs: beginnings of conversations that many share. No other place keeps any.

Text is kept only of what at least three sessions began with; of the rest there are hashes in memory.
A trunk is a chain of whole messages, so each node holds one message and names the one before it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from preheat.core.memo import Memo
from preheat.core.types import Invalidation, Key
from preheat.stores.trunk_file import Row, TrunkFile

LEAST_SESSIONS: Final = 3
_CANDIDATES: Final = 65_536
_MOST_MESSAGES: Final = 16
"""Of one conversation. Trunks are system prompts, tools and examples; what is behind is its own."""
_MOST_MESSAGE_BYTES: Final = 1 << 20
_MOST_TAGS: Final = 16
_NODE_BYTES: Final = 512
"""What a node costs beside its text, about."""
_NO_KEY: Final = Key(b"")
_ENCODE: Final = msgspec.json.Encoder(order="deterministic").encode
_DECODE: Final = msgspec.json.Decoder().decode


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as far as its beginning matters. Without a `session` all with the same messages up
    to the first of a user are taken for one."""

    tenant: str
    namespace: str = ""
    model: str = ""
    session: str = ""
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    tags: tuple[str, ...] = ()


class Trunk(msgspec.Struct, frozen=True, kw_only=True):
    """A beginning that `sessions` had, about; `seen_at` is wall-clock seconds."""

    tenant: str
    namespace: str
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    sessions: int
    seen_at: float


class Trunks:
    """Bounded by bytes and age. The least recently seen leaves first, of the tenant that has most.

    `file` keeps them over a restart; without it they live in memory only. Not for many threads.
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
        self._is_dirty = False
        for row in file.read() if file is not None else ():
            if not row.parent or row.parent in self._tenants.get(row.tenant, ()):
                self._add(row)
        self._make_room()

    def __len__(self) -> int:
        """How many messages are kept."""
        return sum(map(len, self._tenants.values()))

    def saw(self, one: Sighting, now: float) -> None:
        """A request came. 20 µs and more by its length: off the event loop, for what is long."""
        session = _session_of(one)
        path: list[bytes] = []
        for depth, (id_, text) in enumerate(_pieces(one)):
            rows = self._tenants.get(one.tenant)
            row = rows.get(id_) if rows else None
            if row is not None:
                _touch(row, session, one.tags, now)
            elif self._is_shared(id_, session) and len(path) == depth:
                self._add(_row(one, id_, path[-1] if path else b"", text, session, now))
            else:
                continue  # what is behind is counted too, but stands on nothing yet
            path.append(id_)
        for id_ in reversed(path):
            self._tenants[one.tenant].move_to_end(id_)
        self._is_dirty |= bool(path)
        self._make_room()

    def hot(self, now: float, *, tenant: str | None = None, most: int = 100) -> list[Trunk]:
        """Those that most sessions had, the longest of equals only; none that is too old."""
        self.expire(now)
        rows = [row for row in self._rows() if tenant is None or row.tenant == tenant]
        deepest: dict[bytes, int] = {}
        for row in rows:
            deepest[row.parent] = max(deepest.get(row.parent, 0), row.sessions)
        ends = [row for row in rows if deepest.get(row.id, 0) < row.sessions]
        ends.sort(key=lambda row: (-row.sessions, -row.seen_at))
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
        if self._file is not None:
            self._file.remove_damaged()
            self._is_dirty |= bool(gone)
            self.save(erasing=True)
        return gone

    def save(self, *, erasing: bool = False) -> None:
        """Write what has changed. Raises StoreError; what is being erased is then not in the file
        either."""
        if self._file is not None and self._is_dirty:
            self._file.write(list(self._rows()), erasing=erasing)
            self._is_dirty = False

    # Books.

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
        self._count(row, 1)

    def _count(self, row: Row, sign: int) -> None:
        size_bytes = sign * (len(row.text) + _NODE_BYTES)
        self.size_bytes += size_bytes
        self._sizes[row.tenant] = self._sizes.get(row.tenant, 0) + size_bytes

    def _make_room(self) -> None:
        while self.size_bytes > self._most_bytes:
            self._pop(max(self._sizes, key=self._sizes.__getitem__))

    def _pop(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._tenants[tenant])))

    def _drop(self, tenant: str, id_: bytes) -> None:
        self._count(self._tenants[tenant].pop(id_), -1)
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
        )


def _pieces(one: Sighting) -> Iterator[tuple[bytes, bytes]]:
    """Each message's id, which names all before it too, and its text; the first with the tools."""
    parent = _digest(_ENCODE([one.tenant, one.namespace, one.model]), b"")
    for number, message in enumerate(one.messages[:_MOST_MESSAGES]):
        text = _ENCODE(message if number else [one.tools, message])
        if len(text) > _MOST_MESSAGE_BYTES:
            return
        parent = _digest(text, parent)
        yield parent, text


def _digest(text: bytes, parent: bytes) -> bytes:
    return blake2b(text, digest_size=16, key=parent).digest()


def _session_of(one: Sighting) -> int:
    """64 bits. Of a named session, or of a conversation by how it begins."""
    opening: list[Any] = [one.session]
    if not one.session:
        for message in one.messages[:_MOST_MESSAGES]:
            opening.append(message)
            if message.get("role") == "user":
                break
    return int.from_bytes(_digest(_ENCODE([one.tenant, opening]), b"")[:8], "big")


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
    )


def _touch(row: Row, session: int, tags: Sequence[str], now: float) -> None:
    if row.session != session:
        row.sessions += 1
        row.session = session
    row.seen_at = now
    row.tags = _merged(row.tags, tags)


def _merged(tags: list[str], more: Sequence[str]) -> list[str]:
    """Newest last; an invalidation by tag reaches what was ever seen with one of the last 16."""
    new = [tag for tag in more if tag not in tags]
    return [*tags, *new][-_MOST_TAGS:] if new else tags
