"""Values, leases and invalidations in a Redis or Valkey server that several gateways may share.

Every key begins with `{preheat}:`, so that a cluster keeps them on one node and scripts work there.
The board is one stream: each record has its number in its id and the generation beside it, so it is
lost or kept as a whole.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from preheat.core.types import FOREVER, Epoch, Invalidation, Key
from preheat.errors import ConfigError, StoreError
from preheat.stores import News, Size

if TYPE_CHECKING:
    from preheat.transport.redis_lane import Lane

_VALUE: Final = b"{preheat}:v:"
_LEASE: Final = b"{preheat}:l:"
_BOARD: Final = b"{preheat}:board"

_SLOW_S: Final = 1.0
_CLOSE_S: Final = 0.8
_KEPT: Final = 10_000
_PAGE: Final = 64
_MOST_PAGES: Final = 1024
_SAY_AGAIN_S: Final = 600.0
_OLDEST_VERSION: Final = (6, 2)

_RENEW: Final = """
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[1] then redis.call('PEXPIRE', key, ARGV[2]) end
end
"""

_RELEASE: Final = """
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[1] then redis.call('DEL', key) end
end
"""

# The board's newest generation and number, after a record (if one is given) was added. It begins
# anew where there is none, or where a reader has seen more of it than there is: a server that
# forgot invalidations may have kept what they were about.
_PUBLISH: Final = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local generation, number = ARGV[1], 0
if last then
  number = tonumber(string.match(last[1], '^%d+'))
  if last[2][2] == ARGV[4] and number < tonumber(ARGV[5]) then
    redis.call('DEL', KEYS[1])
    last, number = nil, 0
  else
    generation = last[2][2]
  end
end
if not last then redis.call('XADD', KEYS[1], '0-1', 'g', generation) end
if ARGV[2] ~= '' then
  number = number + 1
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], string.format('%.0f-1', number),
    'g', generation, 'i', ARGV[2])
end
return {generation, number}
"""

_NEEDED: Final = (
    "~{preheat}:* +ping +select +info +dbsize +mget +get +set +del +unlink +pexpire "
    "+eval +evalsha +xadd +xrange +xrevrange"
)

_REMEDIES: Final = {
    "OOM": "raise maxmemory, and choose the policy volatile-ttl or volatile-lru",
    "READONLY": "l2.url names a replica: give the primary's address",
    "NOAUTH": "set l2.password_env",
    "WRONGPASS": "check l2.password_env and the user's name in l2.url",
    "NOPERM": f"the user needs: {_NEEDED}",
    "WRONGTYPE": "another program uses keys that begin with {preheat}: choose another database",
    "LOADING": "none: it reads its files and will be ready",
    "MISCONF": "it can't write its files: see its own log",
    "ERR": "check the database's number in l2.url, and that the server is 6.2 or newer",
}

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Invalidation).decode

_Record = tuple[str, int, Invalidation | None]
"""Generation, number, what is void; None where a generation begins."""


class Redis:
    """A store in a Redis. `on_event` must neither raise nor wait. It is told of

    - `redis-connected`, `redis-down` (why),
    - `redis-refused` (found, remedy): what the server answers instead of doing it,
    - `redis-policy`, `redis-version` (found, remedy): what is wrong with how it is set up;

    of the same finding every ten minutes at most.
    """

    is_immediate = False
    is_shared = True
    torn = 0  # it keeps no check sums: the codec's digest tells

    def __init__(
        self,
        url: str,
        *,
        password: str,
        timeout_s: float,
        on_event: Callable[[str, dict[str, object]], None],
    ) -> None:
        try:
            from preheat.transport.redis_lane import Lane, Script  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise ConfigError(
                "l2.kind = \"redis\" needs an extra: pip install 'preheat[redis]'"
            ) from error
        self._on_event = on_event
        self._owner = secrets.token_bytes(16)
        self._told_at: dict[tuple[str, str], float] = {}
        self._is_down = False
        self._checking: asyncio.Task[None] | None = None
        self._renew, self._release, self._publish = map(Script, (_RENEW, _RELEASE, _PUBLISH))
        # Two connections: what a request waits for never queues behind a large value going out.
        self._quick = Lane(
            url,
            password=password,
            limit_s=timeout_s,
            on_open=self._opened,
            on_fault=self._tell_fault,
        )
        self._slow = Lane(
            url,
            password=password,
            limit_s=max(_SLOW_S, timeout_s),
            on_open=self._opened,
            on_fault=self._tell_fault,
        )

    async def start(self) -> None:
        """Connect, or try for a moment and go on in the background."""
        await asyncio.gather(self._quick.start(), self._slow.start())

    def get_now(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Nothing: it always has to be asked."""
        return [None] * len(keys)

    async def get(self, keys: Sequence[Key]) -> list[bytes | None]:
        """The values there are. A key that holds something else than a value has none."""
        if not keys:
            return []
        values: list[bytes | None] = await self._quick.call("MGET", *_named(_VALUE, keys))
        return values

    async def put(self, key: Key, value: bytes, expires_at: float) -> None:
        """Keep it until then. Servers' clocks may differ, so it is told how long, not until when."""
        left_ms = int(min(expires_at - time.time(), FOREVER) * 1000)
        if left_ms <= 0:
            await self.delete([key])
            return
        await self._slow.call("SET", _VALUE + key, value, "PX", left_ms, size_bytes=len(value))

    async def put_many(self, items: Sequence[tuple[Key, bytes, float]]) -> list[str]:
        puts = (self._kind_of(self.put(*item)) for item in items)
        return list(await asyncio.gather(*puts))

    @staticmethod
    async def _kind_of(put: Coroutine[Any, Any, None]) -> str:
        try:
            await put
        except StoreError as error:
            return error.kind
        return ""

    async def delete(self, keys: Sequence[Key]) -> None:
        """Forget them."""
        if keys:
            await self._slow.call("UNLINK", *_named(_VALUE, keys))

    async def size(self) -> Size:
        """The whole database's size, whoever else uses it."""
        info, entries = await asyncio.gather(
            self._slow.call("INFO", "memory"), self._slow.call("DBSIZE")
        )
        memory = _fields(info)
        return Size(
            size_bytes=int(memory.get("used_memory", 0)),
            entries=entries,
            budget_bytes=int(memory.get("maxmemory", 0)),
        )

    # The board.

    async def take(self, key: Key, lease_s: float) -> bool:
        """Whether it is ours now. One that was given to nobody, too late, is given back."""

        def give_back(reply: object) -> None:
            if reply == b"OK":
                self._quick.post("EVAL", _RELEASE, 1, _LEASE + key, self._owner)

        reply = await self._quick.call(
            "SET", _LEASE + key, self._owner, "NX", "PX", _ms(lease_s), if_late=give_back
        )
        return bool(reply == b"OK")

    async def renew(self, keys: Sequence[Key], lease_s: float) -> None:
        """Ours last so long from now on."""
        if keys:
            await self._slow.run(
                self._renew, *_named(_LEASE, keys), self._owner, _ms(lease_s), keys=len(keys)
            )

    async def release(self, keys: Sequence[Key]) -> None:
        """Give back those that are ours."""
        if keys:
            await self._quick.run(self._release, *_named(_LEASE, keys), self._owner, keys=len(keys))

    async def publish(self, what: Invalidation) -> Epoch:
        """Put it on the board."""
        return await self._write(_encode(what), Epoch())

    async def news(self, since: Epoch) -> News:
        """What the board has since then; one short reply where that is nothing."""
        records = await self._page(self._quick, f"{since.number}-1")
        is_all = not records or not _follows(records[0], since)
        if is_all:
            if not records:
                await self._write(b"", since)
            records = await self._page(self._slow, "-")
        page = records
        for _ in range(_MOST_PAGES):
            if len(page) < _PAGE:
                break
            page = await self._page(self._slow, f"({records[-1][1]}-1")
            records += page
        if not records or any(record[0] != records[0][0] for record in records):
            raise StoreError("the board began anew meanwhile", kind="refused")
        return News(
            epoch=Epoch(*records[-1][:2]),
            invalidations=tuple(
                (number, what)
                for _, number, what in records
                if what is not None and (is_all or number > since.number)
            ),
            is_all=is_all,
            floor=max(0, records[0][1] - 1) if is_all else 0,
        )

    async def aclose(self) -> None:
        """Let what was put reach the server, then close."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        await asyncio.gather(self._quick.aclose(_CLOSE_S), self._slow.aclose(_CLOSE_S))

    async def _write(self, record: bytes, seen: Epoch) -> Epoch:
        generation, number = await self._slow.run(
            self._publish,
            _BOARD,
            secrets.token_hex(8),
            record,
            _KEPT,
            seen.generation,
            seen.number,
        )
        return Epoch(generation.decode(), number)

    async def _page(self, lane: "Lane", first: str) -> list[_Record]:
        reply = await lane.call("XRANGE", _BOARD, first, "+", "COUNT", _PAGE)
        return [_record(name, fields) for name, fields in reply]

    # What the operator should know.

    def _opened(self) -> None:
        if self._quick.is_open and self._slow.is_open:
            self._is_down = False
            self._on_event("redis-connected", {})
            if self._checking is None or self._checking.done():
                self._checking = asyncio.create_task(self._check(), name="redis-check")

    def _tell_fault(self, fault: StoreError, code: str) -> None:
        if code:
            self._tell("redis-refused", code, _REMEDIES.get(code, "see the server's own log"))
        elif not self._is_down:
            self._is_down = True
            self._on_event("redis-down", {"why": str(fault)})

    def _tell(self, event: str, found: str, remedy: str) -> None:
        now = time.monotonic()
        if now - self._told_at.get((event, found), -math.inf) > _SAY_AGAIN_S:
            self._told_at[event, found] = now
            self._on_event(event, {"found": found, "remedy": remedy})

    async def _check(self) -> None:
        """Whether the server is set up for this. INFO has it all, and hosted ones allow it where
        they forbid CONFIG."""
        try:
            info = _fields(await self._slow.call("INFO"))
        except StoreError as error:
            if error.kind in {"auth", "refused"}:
                self._tell(
                    "redis-policy", "unknown", "allow INFO to the user, so it can be checked"
                )
            return
        for event, found, remedy in _findings(info):
            self._tell(event, found, remedy)


def _named(prefix: bytes, keys: Sequence[Key]) -> list[bytes]:
    return [prefix + key for key in keys]


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _record(name: bytes, fields: list[bytes]) -> _Record:
    number = int(name.partition(b"-")[0])
    generation = fields[1].decode()
    if len(fields) < 4:
        return generation, number, None
    try:
        return generation, number, _decode(fields[3])
    except msgspec.MsgspecError:
        return generation, number, Invalidation()  # unreadable: it may have meant anything


def _follows(record: _Record, since: Epoch) -> bool:
    """Whether nothing is missing between what the reader knows and this."""
    generation, number, _ = record
    return generation == since.generation and since.number <= number <= since.number + 1


def _fields(info: bytes) -> dict[str, str]:
    """What INFO says: `name:value` by line."""
    lines = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _findings(info: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """What is wrong with how it is set up: event, what was found, remedy."""
    version = info.get("redis_version", "")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _OLDEST_VERSION:
        yield "redis-version", version or "unknown", "use Redis 6.2, Valkey 7.2 or newer"
    if info.get("role") == "slave":
        yield "redis-policy", "replica", _REMEDIES["READONLY"]
    policy = info.get("maxmemory_policy", "")
    if info.get("maxmemory") == "0":
        yield (
            "redis-policy",
            "maxmemory 0",
            "it grows until the machine is full: set maxmemory, and maxmemory-policy volatile-ttl",
        )
    elif policy == "noeviction":
        yield (
            "redis-policy",
            policy,
            "once full it keeps nothing new: set maxmemory-policy volatile-ttl or volatile-lru",
        )
    if policy.startswith("allkeys-"):
        yield (
            "redis-policy",
            policy,
            "it may forget invalidations, which voids all that is kept: set maxmemory-policy "
            "volatile-ttl or volatile-lru",
        )
