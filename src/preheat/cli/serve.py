"""Run the gateway. OpenAI clients point their base_url at it.

    preheat serve                                a small real model answers (see the README)
    preheat serve --upstream http://gpu-1:8000   before your own vLLM, SGLang, TGI, llama.cpp
    preheat serve --model FILE.gguf              another model in the embedded engine
    preheat serve --workers 4                    four processes on one port
    preheat serve --config preheat.toml          everything else: see 'preheat config'

It says on standard output where it listens, and writes JSON log lines to standard error. Signals:

    SIGTERM, Ctrl-C   let the requests under way end (listen.drain_s); a second one ends at once
    SIGHUP            read engines, models, namespaces and freshness anew, without a pause
    SIGUSR2           read all settings anew, and replace one worker after the other
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from preheat import config
from preheat.errors import ConfigError

if TYPE_CHECKING:
    from preheat.host.child import Child
    from preheat.host.keeping import Keeper
    from preheat.telemetry.logs import Log


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
    return asyncio.run(_serve(_read(options), options))


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
    for name in ("listen", "upstream", "model", "ask"):
        if getattr(options, name) == "":
            return f"--{name} is empty; is a variable unset?"
    return ""


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if options.listen:
        overrides["listen.address"] = options.listen
    if options.workers is not None:
        overrides["listen.workers"] = options.workers
    if options.upstream:
        overrides["engines.upstream.url"] = options.upstream
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
    if not settings.log.enabled:
        return []
    from preheat.host.child import Child

    folder = config.log_folder(settings, config.environment())
    command = [sys.executable, "-P", "-m", "preheat.host.logger", "--lifeline-fd", "0"]
    command += ["--folder", str(folder)]
    command += ["--socket", str(config.log_socket(settings, config.environment()))]
    command += ["--bytes", str(settings.log.bytes), "--days", str(settings.log.days)]
    return [Child("request-log", [*command, "--roll-s", str(settings.log.roll_s)], log)]


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
        supervisor = Supervisor(
            settings,
            lambda: _read(options),
            log,
            keeper=_keeper(settings, log),
            children=_children(settings, log),
        )
        return await supervisor.run(on_listening, once=options.once)
    finally:
        log.close()
