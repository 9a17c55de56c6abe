"""Run the gateway. OpenAI clients point their base_url at it.

    preheat serve                                a small real model answers (see the README)
    preheat serve --upstream http://gpu-1:8000   before your own vLLM, SGLang, TGI, llama.cpp
    preheat serve --model FILE.gguf              another model in the embedded engine
    preheat serve --config preheat.toml          everything else: see 'preheat config'

It says on standard output where it listens, writes JSON log lines to standard error, and on
SIGTERM or Ctrl-C lets the requests under way end (listen.drain_s; a second signal ends at once).
"""

import argparse
import asyncio
import contextlib
import gc
import resource
import signal
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from preheat import config
from preheat.errors import ConfigError
from preheat.telemetry.logs import Log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, in TOML")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="where to listen (default 127.0.0.1:8000)"
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
    settings = config.load(options.config, config.environment(), _overrides(options))
    if options.ask and (settings.tenants or settings.listen.tls_cert):
        raise ConfigError("--ask speaks plain HTTP and has no key: leave out tenants and TLS")
    _refuse_itself(settings)
    try:
        import uvloop
    except ImportError:  # no wheel for this platform: a third more CPU, the same behaviour
        return asyncio.run(_serve(settings, options))
    return uvloop.run(_serve(settings, options))


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
        upstream = urlsplit(engine.url)
        is_here = config.is_loopback(upstream.hostname or "") or upstream.hostname == host
        if engine.url and is_here and upstream.port == port != 0:
            raise ConfigError(
                f"engines.{name}.url: {engine.url} is where this gateway listens; choose another "
                "port for it, e.g. --listen 127.0.0.1:8080"
            )


async def _serve(settings: config.Settings, options: argparse.Namespace) -> int:
    # Imported here so that --help and mistakes in the settings are quick.
    from preheat.gateway.assembly import assemble, listen

    log = Log(sys.stderr.buffer)
    _raise_file_limit(settings, log)
    gateway = assemble(settings, log)
    stopping = _stop_on_signals()
    try:
        starting = asyncio.ensure_future(gateway.start_engines())
        if not await _unless_stopped(starting, stopping):
            return 1
        try:
            url = await listen(gateway, settings)
        except OSError as error:
            raise ConfigError(
                f"listen.address: can't listen on {settings.listen.address}: {error.strerror}; "
                "is another program there? choose with --listen HOST:PORT"
            ) from None
        print(f"preheat: listening on {url}   (OpenAI base_url: {url}/v1)", flush=True)
        if gateway.admin_url:
            print(f"preheat: admin routes on {gateway.admin_url}", flush=True)
        log.event("listening", url=url, admin_url=gateway.admin_url or url)
        _settle_collector()
        code = 0
        if options.ask:
            from preheat.cli.ask import ask_twice

            asking = asyncio.ensure_future(asyncio.to_thread(ask_twice, url, options.ask))
            if await _unless_stopped(asking, stopping):
                code = asking.result()
        if not options.once:
            await stopping.wait()
        log.event("draining")
        await _unless_stopped(
            asyncio.ensure_future(gateway.drain(settings.listen.drain_s)), _again(stopping)
        )
        return code
    finally:
        await gateway.aclose()


def _stop_on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    return stopping


def _again(stopping: asyncio.Event) -> asyncio.Event:
    """Wait for the next signal."""
    stopping.clear()
    return stopping


async def _unless_stopped(task: "asyncio.Future[Any]", stopping: asyncio.Event) -> bool:
    """Whether the task ended before a signal came; raises what it raised."""
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not task.done():
        task.cancel()
        return False
    task.result()
    return True


def _raise_file_limit(settings: config.Settings, log: Log) -> None:
    """Room for every connection that the settings allow, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    engines = settings.engines.values()
    wanted = settings.listen.connections + sum(one.max_connections for one in engines) + 64
    if soft < wanted:
        log.event("few-files", limit=soft, wanted=wanted)


def _settle_collector() -> None:
    """What is there now lives as long as the process: no full collection need look at it again."""
    gc.collect()
    gc.freeze()
