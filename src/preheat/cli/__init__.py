"""The command line: says what to run. One file a command, imported when it is chosen."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from errno import ENOSPC
from importlib import import_module
from typing import Final

from preheat import __version__
from preheat.errors import PreheatError

COMMANDS: Final[Mapping[str, str]] = {
    "serve": "run the gateway; without any settings, a small real model answers",
    "config": "show all settings with their meaning, or check a file",
    "load": "send a recorded load to a live address, paced, and report what came back",
    "replay": "what each cache, router, tier and policy would have saved on a trace or log",
    "headroom": "how much each lever could save at most on a trace: routing, tiers, restarts",
    "warm": "have prefixes computed on servers before anybody asks, in idle moments only",
    "verify": "tell which prefixes are warm on which server: proven, refuted or unknown",
    "observe": "watch a stack from beside: its log, its servers, what routing and warming would change",
    "tiers": "how fast KV comes back from memory, disk and slot files, and from when that pays",
    "doctor": "find out why something doesn't work, or why there are no hits",
}

_EPILOG: Final = """\
examples:
  preheat serve                                   the gateway with a small model of its own
  preheat serve --upstream http://gpu-1:8000      the gateway before your vLLM
  preheat config > preheat.toml                   every setting, with its default
  preheat COMMAND --help                          what a command takes
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0, 1 for a failure, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="preheat",
        description="An OpenAI-compatible gateway that has the answer ready.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"preheat {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, sentence in COMMANDS.items():
        module = import_module(f"preheat.cli.{name}")
        module.add_arguments(
            commands.add_parser(
                name,
                help=sentence,
                description=module.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    options = parser.parse_args(arguments)
    try:
        code: int = import_module(f"preheat.cli.{options.command}").run(options)
        sys.stdout.flush()
    except PreheatError as error:
        print(f"preheat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except OSError as error:
        if error.errno != ENOSPC:
            raise
        print(f"preheat: {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        return 1
    return code
