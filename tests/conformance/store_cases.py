"""Where the battery finds a store of each kind, and other processes that use the same one.

A `Site` is one place with values: a folder, a server. Several stores can be open there, one in this
process and one in each `Other`.
"""

import asyncio
import contextlib
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from preheat.errors import StoreError
from preheat.stores import Store
from preheat.stores.keeper import Keeper
from preheat.stores.lmdb import Lmdb

HERE = Path(__file__).resolve().parent
BUDGET_BYTES = 64 * 1024 * 1024
QUEUE_BYTES = 16 * 1024 * 1024
ENDS_WITHIN_S = 10.0


class Site(Protocol):
    """One place with values."""

    name: str
    where: str
    """What another process needs to open it."""
    sees_death: bool
    """Whether a lease ends with its process."""

    def opened(self) -> AbstractAsyncContextManager[Store]:
        """A started store, this process's only one there."""

    def stalled(self) -> AbstractContextManager[None]:
        """Meanwhile whatever the store depends on is stopped, as by SIGSTOP."""

    def tidy(self) -> None:
        """Let what is expired be forgotten, where that is somebody's task."""


class LmdbSite:
    name = "lmdb"
    sees_death = True

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)

    def opened(self) -> AbstractAsyncContextManager[Store]:
        return open_lmdb(self.where)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """A process with the locks of both environments is stopped."""
        with program("hold", self.where) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            holder.send_signal(signal.SIGSTOP)
            try:
                yield
            finally:
                holder.send_signal(signal.SIGCONT)

    def tidy(self) -> None:
        """In another process: LMDB's files are opened once in each."""
        with program("tidy", self.where) as keeper:
            assert keeper.wait(ENDS_WITHIN_S) == 0


@contextlib.asynccontextmanager
async def open_lmdb(where: str) -> AsyncIterator[Store]:
    store = Lmdb(Path(where), budget_bytes=BUDGET_BYTES, queue_bytes=QUEUE_BYTES)
    await store.start()
    try:
        yield store
    finally:
        await store.aclose()


@contextlib.contextmanager
def lmdb_site(folder: Path) -> Iterator[Site]:
    yield LmdbSite(folder / "l2")


class RedisSite:
    name = "redis"
    sees_death = False

    def __init__(self, server: Any) -> None:
        self.where: str = server.url
        self._server = server

    def opened(self) -> AbstractAsyncContextManager[Store]:
        return open_redis(self.where)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        self._server.pause()
        try:
            yield
        finally:
            self._server.resume()

    def tidy(self) -> None:
        """The server does."""


def open_redis(where: str) -> AbstractAsyncContextManager[Store]:
    import store_redis

    return store_redis.opened(SimpleNamespace(url=where))


@contextlib.contextmanager
def redis_site(_folder: Path) -> Iterator[Site]:
    from redis_server import RedisServer

    with RedisServer("--maxmemory", "256mb", "--maxmemory-policy", "volatile-ttl") as server:
        yield RedisSite(server)


SITES: dict[str, Callable[[Path], AbstractContextManager[Site]]] = {
    "lmdb": lmdb_site,
    "redis": redis_site,
}
OPENERS: dict[str, Callable[[str], AbstractAsyncContextManager[Store]]] = {
    "lmdb": open_lmdb,
    "redis": open_redis,
}


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """This file as a process, which is ended."""
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(ENDS_WITHIN_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


class Other:
    """A store of another process. Its methods are called through `call`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    async def call(self, name: str, *arguments: Any) -> Any:
        """What the method returns there, or the StoreError that it raises."""
        return await asyncio.wait_for(asyncio.to_thread(self._call, name, arguments), 20)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(ENDS_WITHIN_S)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((name, arguments), self._process.stdin)
        self._process.stdin.flush()
        kind, value = pickle.load(self._process.stdout)
        if kind:
            raise StoreError(value, kind=kind)
        return value


@contextlib.contextmanager
def other_process(site: Site) -> Iterator[Other]:
    with program("serve", site.name, site.where) as process:
        yield Other(process)


# What the other process does ------------------------------------------------------------------


async def _serve(name: str, where: str) -> None:
    async with OPENERS[name](where) as store:
        while True:
            try:
                method, arguments = await asyncio.to_thread(pickle.load, sys.stdin.buffer)
            except EOFError:
                return
            try:
                found = getattr(store, method)(*arguments)
                reply = ("", await found if asyncio.iscoroutine(found) else found)
            except StoreError as error:
                reply = (error.kind, str(error))
            pickle.dump(reply, sys.stdout.buffer)
            sys.stdout.buffer.flush()


def _hold(where: str) -> None:
    import lmdb

    # Nothing of the folder is changed but the locks taken.
    held = [
        lmdb.open(f"{where}/{name}", map_size=2**40, create=False, sync=False)
        for name in ("values", "board")
    ]
    transactions = [env.begin(write=True) for env in held]
    print("held", flush=True)
    sys.stdin.read()
    del transactions


def _tidy(where: str) -> None:
    events: list[str] = []
    keeper = Keeper(Path(where), BUDGET_BYTES, lambda name, _: events.append(name))
    keeper.start()
    keeper.tick()
    keeper.close()
    assert not events, events


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    match sys.argv[1:]:
        case ["serve", name, where]:
            asyncio.run(_serve(name, where))
        case ["hold", where]:
            _hold(where)
        case ["tidy", where]:
            _tidy(where)
