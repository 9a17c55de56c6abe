"""Run the gateway. OpenAI clients point their base_url at it.

    preheat serve                                a small real model answers (see the README)
    preheat serve --upstream http://gpu-1:8000   before your own vLLM, SGLang, TGI, llama.cpp
    preheat serve --upstream https://api.example.com --api-key-env API_KEY   it wants a key
    preheat serve --model FILE.gguf              another model in the embedded engine
    preheat serve --workers 4                    four processes on one port
    preheat serve --config preheat.toml          everything else: see 'preheat config'

It says on standard output where it listens, and writes JSON log lines to standard error. Signals to
this process:

    SIGTERM, Ctrl-C   let the requests under way end (listen.drain_s); a second one ends at once
    SIGHUP            read the settings anew; in place change: engines (not embedded ones), models,
                      namespaces, exact (not exact.secret_env), engines.fallback_message
    SIGUSR2           read them anew and replace one worker after the other, without a lost request:
                      all of these, tenants, l1, telemetry, admin.api_key_env, exact.secret_env, and
                      the rest of listen

Only a new start changes listen.address, listen.workers, admin.listen, l2, log and embedded engines.
A change that a signal can't apply is refused whole: reload-refused or restart-refused in the log
names the keys. docs/settings.md says for each setting what applies it.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from preheat import config, traces
from preheat.errors import ConfigError

if TYPE_CHECKING:
    from preheat.host.child import Child
    from preheat.host.keeping import Keeper
    from preheat.telemetry.logs import Log

_ENDS: Final = (signal.SIGTERM, signal.SIGINT)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, in TOML")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="where to listen (default 127.0.0.1:8000)"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that answer (default 1)"
    )
    answering = parser.add_mutually_exclusive_group()
    answering.add_argument(
        "--upstream", metavar="URL", help="an OpenAI-compatible server to stand before"
    )
    answering.add_argument("--model", metavar="GGUF", help="model file for the embedded engine")
    parser.add_argument(
        "--api-key-env", metavar="VAR", help="environment variable with the key of --upstream"
    )
    parser.add_argument(
        "--ask",
        metavar="TEXT",
        help="once it serves, ask this twice and show both answers with their Cache-Status",
    )
    parser.add_argument("--once", action="store_true", help="end after --ask instead of serving on")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    wrong = _misused(options)
    if wrong:
        print(f"usage: preheat serve [options]\npreheat serve: {wrong}", file=sys.stderr)
        return 2
    _watch_signals()
    try:
        return asyncio.run(_serve(_read(options), options))
    except _StoppedError:
        for name in _ENDS:
            signal.signal(name, signal.SIG_IGN)
        _tell_stopped()
        return 0


class _StoppedError(SystemExit):
    """A signal came before the supervisor watched for it."""


def _watch_signals() -> None:
    """Until the supervisor does, which takes modules that aren't loaded yet."""

    def stop(*_: object) -> None:
        raise _StoppedError

    for name in _ENDS:
        signal.signal(name, stop)
    for name in (signal.SIGHUP, signal.SIGUSR2):  # what they would have us read is read anyway
        signal.signal(name, signal.SIG_IGN)


def _tell_stopped() -> None:
    from preheat.host.stderr import log_to_stderr

    log = log_to_stderr()
    log.event("stopped-while-starting")
    log.close()


def _read(options: argparse.Namespace) -> config.Settings:
    """The settings, at the start and whenever a signal asks for them. Raises ConfigError."""
    settings = config.load(options.config, config.environment(), _overrides(options))
    if options.ask and (settings.tenants or settings.listen.tls_cert):
        raise ConfigError("--ask speaks plain HTTP and has no key: leave out tenants and TLS")
    _refuse_itself(settings)
    return settings


def _misused(options: argparse.Namespace) -> str:
    if options.once and not options.ask:
        return "--once needs --ask TEXT"
    for name in ("listen", "upstream", "model", "ask", "api_key_env"):
        if getattr(options, name) == "":
            return f"--{name.replace('_', '-')} is empty; is a variable unset?"
    if options.api_key_env and not options.upstream:
        return "--api-key-env needs --upstream URL"
    return ""


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if options.listen:
        overrides["listen.address"] = options.listen
    if options.workers is not None:
        overrides["listen.workers"] = options.workers
    if options.upstream:
        overrides["engines.upstream.url"] = options.upstream
    if options.api_key_env:
        overrides["engines.upstream.api_key_env"] = options.api_key_env
    if options.model:
        overrides["engines.embedded.kind"] = "embedded"
        overrides["engines.embedded.model"] = options.model
    return overrides


def _refuse_itself(settings: config.Settings) -> None:
    """A gateway that is its own engine would ask itself until its connections run out."""
    host, port = config.address_of(settings.listen.address, "listen.address")
    for name, engine in settings.engines.items():
        for url in config.upstreams_of(engine):
            upstream = urlsplit(url)
            is_here = config.is_loopback(upstream.hostname or "") or upstream.hostname == host
            if is_here and upstream.port == port != 0:
                raise ConfigError(
                    f"engines.{name}.{'url' if engine.url else 'urls'}: {url} is where this gateway "
                    "listens; choose another port for it, e.g. --listen 127.0.0.1:8080"
                )


def _keeper(settings: config.Settings, log: "Log") -> "Keeper | None":
    """Who looks after the store on this machine's disk."""
    if settings.l2.kind != "lmdb":
        return None
    from preheat.stores.keeper import Keeper

    def on_event(event: str, fields: dict[str, object]) -> None:
        log.event(event, **fields)

    folder = config.cache_folder(settings, config.environment())
    return Keeper(folder, settings.l2.bytes, on_event)


def _children(settings: config.Settings, log: "Log") -> "list[Child]":
    """The process that writes the request log, where there is to be one."""
    if not settings.log.enabled or not traces.is_installed():  # the workers refuse, with the remedy
        return []
    from preheat.host.child import Child

    folder = config.log_folder(settings, config.environment())
    command = [sys.executable, "-P", "-m", "preheat.host.logger", "--lifeline-fd", "0"]
    command += ["--folder", str(folder)]
    command += ["--socket", str(config.log_socket(settings, config.environment()))]
    command += ["--bytes", str(settings.log.bytes), "--days", str(settings.log.days)]
    return [Child("request-log", [*command, "--roll-s", str(settings.log.roll_s)], log)]


def _learner(path: str, log: "Log") -> "Child | None":
    """The process that hears the servers' events for several workers."""
    if not path:
        return None
    from preheat.host.child import Child

    command = [sys.executable, "-P", "-m", "preheat.host.learner", "--lifeline-fd", "0"]
    return Child("learner", [*command, "--socket", path], log)


def _learner_path(settings: config.Settings, stack: contextlib.ExitStack) -> str:
    """Where it is to listen, now or after a reload: in a folder that only its owner may enter."""
    if settings.listen.workers < 2:
        return ""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="preheat-"))
    return f"{folder}/learner.sock"


async def _serve(settings: config.Settings, options: argparse.Namespace) -> int:
    # Imported here so that --help and mistakes in the settings are quick.
    from preheat.host.stderr import log_to_stderr
    from preheat.host.supervisor import Supervisor

    async def on_listening(url: str, admin_url: str) -> int:
        print(f"preheat: listening on {url}   (OpenAI base_url: {url}/v1)", flush=True)
        if admin_url:
            print(f"preheat: admin routes on {admin_url}", flush=True)
        if not options.ask:
            return 0
        from preheat.cli.ask import ask_twice

        return await asyncio.to_thread(ask_twice, url, options.ask)

    log = log_to_stderr()
    try:
        with contextlib.ExitStack() as stack:
            path = _learner_path(settings, stack)
            supervisor = Supervisor(
                settings,
                lambda: _read(options),
                log,
                keeper=_keeper(settings, log),
                children=_children(settings, log),
                learner=_learner(path, log),
                learner_path=path,
            )
            return await supervisor.run(on_listening, once=options.once)
    finally:
        log.close()
