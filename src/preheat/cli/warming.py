"""What `preheat warm` and `preheat verify` have in common: prompts, servers, their options."""

import argparse
import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from preheat import config
from preheat.cli.marks import Marks, usual_place
from preheat.cli.numbers import positive, seconds
from preheat.core.warmup import Pace
from preheat.engines.dialects import DIALECTS
from preheat.errors import ConfigError

if TYPE_CHECKING:
    from preheat.engines.dialects.calls import Prompt
    from preheat.engines.direct import Direct

FORMS: Final = """\
FILE is - for standard input, or has one of these:
  [{"role": "system", "content": "…"}, …]     messages, as clients send them (--model, "tools" too)
  [1, 15043, 29892, …]                        token ids
  {"messages": …} {"prompt": …} {"ids": …}    a request's body, or the "body" of a load trace's line
  any of these one a line, or in a list       several prefixes
  anything else, or --text                    one text"""


class Wanted(msgspec.Struct, frozen=True):
    """A prefix of the file: its place there, from 1, and its digest."""

    number: int
    prompt: "Prompt"
    name: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of both."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="the prefixes; - for stdin")
    parser.add_argument(
        "--url",
        action="append",
        required=True,
        metavar="URL",
        help="a server, directly, not a gateway before it; repeatable",
    )
    parser.add_argument(
        "--text", action="store_true", help="FILE is one text, whatever it looks like"
    )
    parser.add_argument("--model", default="", metavar="NAME", help="the model to ask for")
    parser.add_argument("--salt", default="", help="the tenant's salt, where the server takes one")
    parser.add_argument(
        "--dialect",
        default="auto",
        choices=["auto", *DIALECTS],
        help="the kind of server (found out by asking it)",
    )
    parser.add_argument(
        "--api-key-env",
        default="",
        metavar="VAR",
        help="environment variable with the servers' key",
    )
    parser.add_argument(
        "--most-load",
        type=positive,
        default=Pace().most_load,
        metavar="SHARE",
        help="begin nothing while so much of a server is in use (%(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="S",
        help="for idle moments, a prefix (%(default)g)",
    )
    parser.add_argument(
        "--timeout", type=positive, default=300.0, metavar="S", help="for one answer (%(default)g)"
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="how far each prefix came; no text ($XDG_STATE_HOME/preheat/warm.json)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def wanted_of(options: argparse.Namespace, adapter: str) -> list[Wanted]:
    """The file's prefixes, for that adapter. Raises ConfigError."""
    from preheat.cli.prompts import read_prompts
    from preheat.engines.prefixes import name_of

    if options.file is None:
        if not adapter:
            raise ConfigError("name a FILE with what is to be warm, or an --adapter")
        return []
    prompts = []
    for number, prompt in enumerate(read_prompts(options.file, is_text=options.text), 1):
        whole = msgspec.structs.replace(
            prompt, model=options.model or prompt.model, adapter=adapter, salt=options.salt
        )
        prompts.append(Wanted(number, whole, name_of(whole)))
    return prompts


def servers_of(options: argparse.Namespace) -> "list[Direct]":
    """The servers, each once; nothing is connected yet. Raises ConfigError."""
    from preheat.engines.direct import Direct

    key = ""
    if options.api_key_env:
        key = config.secret_from(options.api_key_env, "--api-key-env", config.environment())
    urls = list(dict.fromkeys(url.rstrip("/") for url in options.url))
    for url in urls:
        try:
            config.check({"engines": {"it": {"url": url}}})
        except ConfigError as error:
            raise ConfigError(str(error).replace("engines.it.url", "--url")) from None
    return [
        Direct(url, api_key=key, dialect=options.dialect, most_s=options.timeout) for url in urls
    ]


def marks_of(options: argparse.Namespace) -> Marks:
    """What earlier runs left. Raises ConfigError."""
    return Marks(options.state or usual_place(config.environment()))


async def on_each(
    servers: "Sequence[Direct]", work: "Callable[[Direct], Coroutine[Any, Any, None]]"
) -> bool:
    """Do it on all of them at once, until Ctrl-C or SIGTERM; whether it was stopped."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(work(server)) for server in servers]
    stopping = asyncio.Event()

    def stop() -> None:
        stopping.set()
        for task in tasks:
            task.cancel()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop)
    try:
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for server in servers:
            await server.aclose()
    for one in ended:
        if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError):
            raise one
    return stopping.is_set()
