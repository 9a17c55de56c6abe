"""The process above the workers: owns what must outlive one of them, and serves nobody itself.

It is light on purpose, and imports nothing of the gateway but the words in which it is spoken of.
"""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from preheat import config
from preheat.config import Settings
from preheat.errors import ConfigError
from preheat.host import messages, sockets
from preheat.host.changes import check_reload, check_restart
from preheat.host.child import Child
from preheat.host.embedded import EmbeddedEngines
from preheat.host.keeping import Keeper, Keeping
from preheat.host.pool import Pool
from preheat.host.secret import Secret
from preheat.host.sockets import Set
from preheat.host.worker_process import Common
from preheat.telemetry.logs import Log

_ENDS: Final = (signal.SIGTERM, signal.SIGINT)

OnListening = Callable[[str, str], Awaitable[int]]
"""Told the gateway's URL and that of the admin routes, or "" where they have none of their own;
gives the exit code."""


class Supervisor:
    """Starts everything, changes it on SIGHUP and SIGUSR2, and ends it on SIGTERM or SIGINT.

    `read` gives the settings anew. `children` are started before the workers and ended after
    them; `keeper` looks after the store. `learner`, which listens at that path, is a child that is started as
    soon as there is a choice between servers.
    """

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],
        log: Log,
        *,
        children: Sequence[Child] = (),
        keeper: Keeper | None = None,
        learner: Child | None = None,
        learner_path: str = "",
    ) -> None:
        self._settings = settings
        self._read = read
        self._log = log
        self._children = children
        self._keeping = Keeping(keeper, log) if keeper is not None else None
        self._learner = learner
        self._common = Common(Secret(log), learner_path)
        self._engines = EmbeddedEngines(settings, log, self._on_engines)
        self._listen: list[Set] = []
        self._admin: list[Set] = []
        self._pool: Pool | None = None
        self._stopping = asyncio.Event()
        self._code = 0
        self._changes: asyncio.Queue[str] = asyncio.Queue(maxsize=2)

    async def run(self, on_listening: OnListening, *, once: bool = False) -> int:
        """Serve until a signal, or `once`; the exit code. Raises ConfigError or EngineError where it can't
        start."""
        self._watch_signals()
        changing: asyncio.Task[None] | None = None
        try:
            self._bind()
            self._pool = self._made_pool()
            starting = asyncio.create_task(self._start(self._pool))
            if not await self._unless_stopped(starting):
                self._log.event("stopped-while-starting")
                return 0
            changing = asyncio.create_task(self._change(self._pool))
            serving = asyncio.create_task(self._serve(on_listening, once=once))
            await self._unless_stopped(serving)
            changing.cancel()
            await asyncio.wait({changing})
            await self._drain(self._pool)
            return self._code
        finally:
            if changing is not None:
                changing.cancel()
            await self._aclose()

    # Start -----------------------------------------------------------------------------------

    def _bind(self) -> None:
        listen, admin = self._settings.listen, self._settings.admin.listen
        host, port = config.address_of(listen.address, "listen.address")
        self._listen = sockets.bind(
            host, port, listen.workers, key="listen.address", shown=listen.address
        )
        if admin:
            host, port = config.address_of(admin, "admin.listen")
            self._admin = sockets.bind(host, port, listen.workers, key="admin.listen", shown=admin)

    def _made_pool(self) -> Pool:
        return Pool(
            self._settings,
            self._listen,
            self._admin,
            self._log,
            self._common,
            on_death=self._on_death,
        )

    async def _start(self, pool: Pool) -> None:
        await asyncio.to_thread(self._common.secret.told, self._settings)
        await pool.spawn()
        if self._keeping is not None:
            await asyncio.to_thread(self._keeping.start)
        for child in self._children:
            await child.start()
        await self._learn(self._settings)
        await self._engines.start()
        await pool.start()

    async def _learn(self, settings: Settings) -> None:
        """Start the learner, if it isn't yet and these settings give it something to do."""
        is_wanted = any(len(config.upstreams_of(one)) > 1 for one in settings.engines.values())
        if self._learner is not None and is_wanted and not self._learner.is_started:
            await self._learner.start()

    async def _serve(self, on_listening: OnListening, *, once: bool) -> None:
        is_tls = bool(self._settings.listen.tls_cert)
        url = _url(self._settings.listen.address, self._listen, is_tls=is_tls)
        admin_url = _url(self._settings.admin.listen, self._admin) if self._admin else ""
        self._log.event("listening", url=url, admin_url=admin_url or url)
        self._code = await on_listening(url, admin_url)
        if not once:
            await self._stopping.wait()

    # Change ----------------------------------------------------------------------------------

    async def _change(self, pool: Pool) -> None:
        """One change after the other."""
        while True:
            what = await self._changes.get()
            is_reload = what == "reload"
            try:
                settings = await asyncio.to_thread(self._read)
                (check_reload if is_reload else check_restart)(pool.settings, settings)
                await self._learn(settings)
                await (pool.reload if is_reload else pool.roll)(settings)
            except ConfigError as error:
                self._log.event(
                    "reload-refused" if is_reload else "restart-refused", why=str(error)
                )
            except Exception as bug:  # noqa: BLE001  the next one may go better
                self._log.event("bug", type=type(bug).__name__, where=what)
            else:
                self._log.event("reloaded" if is_reload else "restarted")

    def _on_engines(self) -> None:
        self._common.engines = self._engines.addresses()
        if self._pool is not None:
            self._pool.tell(messages.Engines(self._common.engines))

    def _on_death(self, by_signal: int) -> None:
        if self._keeping is not None:
            self._keeping.after_death(by_signal)

    # End -------------------------------------------------------------------------------------

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for name in _ENDS:
            loop.add_signal_handler(name, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._want, "reload")
        loop.add_signal_handler(signal.SIGUSR2, self._want, "restart")

    def _want(self, what: str) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # those that wait read the same settings
            self._changes.put_nowait(what)

    async def _drain(self, pool: Pool) -> None:
        self._log.event("draining")
        self._stopping.clear()  # the next signal ends it at once
        self._close_sockets()
        draining = asyncio.create_task(pool.drain(pool.settings.listen.drain_s))
        await self._unless_stopped(draining)

    def _close_sockets(self) -> None:
        sockets.close(self._listen)
        sockets.close(self._admin)

    async def _aclose(self) -> None:
        self._close_sockets()
        if self._pool is not None:
            await self._pool.aclose()
        learner = [] if self._learner is None else [self._learner]
        await asyncio.gather(*(child.aclose() for child in (*self._children, *learner)))
        await self._engines.aclose()
        if self._keeping is not None:
            await asyncio.to_thread(self._keeping.close)

    async def _unless_stopped(self, task: "asyncio.Task[Any]") -> bool:
        """Whether the task ended before a signal came; raises what it raised. Where both came, the
        signal may have been the reason: it may have gone to all processes of ours."""
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if self._stopping.is_set():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return False
        task.result()
        return True


def _url(address: str, listen: list[Set], *, is_tls: bool = False) -> str:
    host, _ = config.address_of(address, "listen.address")
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{shown}:{sockets.port_of(listen)}"
