"""Watch a stack from beside: what its caches hold, what routing and warm-ups would change there.

    preheat observe access.jsonl http://gpu-1:8000 http://gpu-2:8000
    preheat observe access.jsonl a=http://gpu-1:8000 b=http://gpu-2:8000 --kv-events 'tcp://*:5557'
    kubectl logs -f deploy/litellm | preheat observe - http://gpu-1:8000 --json
    preheat observe access.jsonl http://gpu-1:8000 --once --html seen.html
    preheat observe access.jsonl http://gpu-1:8000 --warm --tokens-per-hour 200000

LOG has a request with its body and its answer a line, as LiteLLM, Helicone and others write them
(docs/traces.md); it is followed as it grows, over rotations. - is standard input. Nothing passes through
here: servers are asked how busy they are and how much they hold, and, with --kv-events, what they hold and
for the tokens of prompts. With --warm, hot prefixes that a server lacks are computed there when it is
idle, where that is expected to pay. No prompt's text is ever shown; docs/observe.md explains each figure.

Ctrl-C ends it with its report. Exit code 0; 1 where no request could be read; 2 for wrong usage; 130 after
Ctrl-C.
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from preheat import config
from preheat.cli.numbers import count, positive, seconds
from preheat.cli.observe_shown import Shown
from preheat.cli.pages import check_page
from preheat.core.warmup import Pace
from preheat.engines.dialects import DIALECTS
from preheat.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from preheat.engines.direct import Direct
    from preheat.lab.observe.observer import Order
    from preheat.lab.observe.sight import Sight
    from preheat.lab.observe.tail import Tail

_TOKENS_PER_HOUR: Final = 100_000
_IDLE_PRICE: Final = 0.3
"""As of `preheat headroom --off-peak-price`: GPUs that would else be idle, against a peak's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("log", metavar="LOG", help="requests, a JSON object a line; - for stdin")
    parser.add_argument(
        "servers",
        nargs="+",
        metavar="[NAME=]URL",
        help="a server, directly; NAME is the log's word for it, if that isn't its address",
    )
    log = parser.add_argument_group("the log")
    log.add_argument("--once", action="store_true", help="read what there is, report, and end")
    log.add_argument("--new", action="store_true", help="only what is written from now on")
    log.add_argument(
        "--worker-field",
        default="",
        metavar="A.B",
        help="the field that says who answered (worker, upstream_addr, api_base, … are known)",
    )
    log.add_argument(
        "--settle",
        type=seconds,
        default=30.0,
        metavar="S",
        help="wait so long for requests that took longer, to have all in order (%(default)g)",
    )
    log.add_argument(
        "--on-bad", choices=("skip", "fail"), default="skip", help="what a bad line does (skip)"
    )
    servers = parser.add_argument_group("the servers")
    servers.add_argument(
        "--model", default="", metavar="NAME", help="what they call the model, if the log doesn't"
    )
    servers.add_argument(
        "--dialect",
        default="auto",
        choices=["auto", *DIALECTS],
        help="their kind (found out by asking)",
    )
    servers.add_argument(
        "--api-key-env",
        action="append",
        default=[],
        metavar="VAR",
        help="environment variable with their key; one for all, or one for each URL in their order",
    )
    servers.add_argument(
        "--poll",
        type=positive,
        default=5.0,
        metavar="S",
        help="between two questions (%(default)g)",
    )
    for name, what in (("--kv-events", "KV events"), ("--kv-replay", "their replays")):
        servers.add_argument(
            name,
            action="append",
            default=[],
            metavar="ENDPOINT",
            help=f"of {what}, as in the engine's --kv-events-config; one for each URL in their order, "
            "or one for all with {host} or {port}",
        )
    _add_warming_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--every", type=positive, default=5.0, metavar="S", help="between two sights (%(default)g)"
    )
    output.add_argument(
        "--json", action="store_true", help="print a JSON document a sight; with --once, one"
    )
    output.add_argument("--html", type=Path, metavar="FILE", help="write each sight as a page")


def _add_warming_arguments(parser: argparse.ArgumentParser) -> None:
    warming = parser.add_argument_group("warming")
    warming.add_argument(
        "--warm", action="store_true", help="warm what pays, on idle servers, and prove it"
    )
    warming.add_argument(
        "--tokens-per-hour",
        type=count,
        default=_TOKENS_PER_HOUR,
        metavar="N",
        help="computed at most, at all servers together (%(default)s)",
    )
    warming.add_argument(
        "--idle-price",
        type=seconds,
        default=_IDLE_PRICE,
        metavar="X",
        help="what a second of an idle server costs of a busy one's (%(default)g); at 1 nothing pays",
    )
    warming.add_argument(
        "--slack",
        type=positive,
        default=Pace().slack_s,
        metavar="S",
        help="how long a piece may hold up a live request (%(default)s)",
    )
    warming.add_argument(
        "--most-load",
        type=positive,
        default=Pace().most_load,
        metavar="SHARE",
        help="begin nothing while so much of a server is in use (%(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Watch and tell."""
    if options.html is not None:
        check_page(options.html)
    directs = _directs(options)
    order = _order(options, directs)
    shown = Shown(options)
    try:
        sight, is_stopped = asyncio.run(_watch(options, order, directs, shown))
    finally:
        shown.line.end()
    shown.last(sight)
    if is_stopped:
        return 130
    if not sight.repeats.requests and sight.bad:
        first = sight.bad_lines[0]
        raise TraceError(f"{first.path}: no request in it; line {first.line}: {first.why}")
    return 0


async def _watch(
    options: argparse.Namespace, order: "Order", directs: "dict[str, Direct]", shown: Shown
) -> "tuple[Sight, bool]":
    from preheat.lab.observe.observer import Observer

    observer = Observer(order, _tail(options), directs)
    stopped = []

    def stop() -> None:
        stopped.append(True)
        observer.stop()

    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop)
    sight = await observer.run(shown.show)
    return sight, bool(stopped)


def _tail(options: argparse.Namespace) -> "Tail":
    from preheat.lab.observe.tail import FileTail, PipeTail

    if options.log == "-":
        return PipeTail(sys.stdin.fileno())
    return FileTail(Path(options.log), once=options.once, from_end=options.new)


def _directs(options: argparse.Namespace) -> "dict[str, Direct]":
    """The servers by name; nothing is connected yet. Raises ConfigError."""
    from preheat.engines.direct import Direct

    keys = [
        config.secret_from(variable, "--api-key-env", config.environment())
        for variable in options.api_key_env
    ] or [""]
    if len(keys) == 1:
        keys *= len(options.servers)
    if len(keys) != len(options.servers):
        raise ConfigError("give one --api-key-env for all servers, or one for each")
    found: dict[str, Direct] = {}
    for word, key in zip(options.servers, keys, strict=True):
        name, equals, url = word.partition("=")
        if not equals or "://" in name:  # a URL may have an equals sign of its own
            name, url = word, word
        url = url.rstrip("/")
        try:
            config.check({"engines": {"it": {"url": url}}})
        except ConfigError as error:
            raise ConfigError(str(error).replace("engines.it.url", "URL")) from None
        name = name.rstrip("/").partition("://")[2] or name
        if name in found:
            raise ConfigError(f"{name} is named twice")
        found[name] = Direct(url, api_key=key, dialect=options.dialect)
    return found


def _order(options: argparse.Namespace, directs: "dict[str, Direct]") -> "Order":
    from preheat.lab.observe.observer import Order
    from preheat.wire.kv_places import places_of

    urls = [one.url for one in directs.values()]
    if options.kv_replay and not options.kv_events:
        raise ConfigError("--kv-replay needs --kv-events")
    return Order(
        log="standard input" if options.log == "-" else options.log,
        worker_field=options.worker_field,
        model=options.model,
        places=places_of(urls, options.kv_events, options.kv_replay) if options.kv_events else {},
        poll_s=options.poll,
        settle_s=options.settle,
        every_s=options.every,
        idle_price=options.idle_price,
        is_bad_fatal=options.on_bad == "fail",
        warms=options.warm,
        tokens_per_hour=options.tokens_per_hour,
        pace=Pace(slack_s=options.slack, most_load=options.most_load),
    )
