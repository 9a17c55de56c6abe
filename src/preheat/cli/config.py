"""Show every setting with its meaning and its value, or check a file.

    preheat config                      the defaults, as a file to begin with
    preheat config --config FILE        what is in force with that file and the environment
    preheat config check FILE           exit 0 if serve can use the file here (secrets and files that
                                        it names must be there), 1 and the reason if not

PREHEAT__SECTION__KEY in the environment overrides one value, e.g. PREHEAT__EXACT__TTL_S=600.
Secrets are never in the settings: they name environment variables or files.
"""

import argparse
import os
import sys
from pathlib import Path

import msgspec

from preheat import config, wiring
from preheat.core import admission, eviction
from preheat.telemetry.logs import Log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("action", nargs="?", choices=["show", "check"], default="show")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the file to check")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, in TOML")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print or check."""
    if (options.action == "check") != (options.file is not None):
        print("usage: preheat config [--config FILE] | preheat config check FILE", file=sys.stderr)
        return 2
    path = options.file or options.config
    settings = config.load(path, config.environment(), {})
    wiring.build("l1.eviction", settings.l1.eviction, eviction.POLICIES)
    wiring.build("l1.admission", settings.l1.admission, admission.POLICIES)
    if options.action == "check":
        _check_as_serve_does(settings)
        print(f"{path}: fine")
    elif options.json:
        print(msgspec.json.encode(settings).decode())
    else:
        print(config.to_toml(settings), end="")
    return 0


def _check_as_serve_does(settings: config.Settings) -> None:
    """Everything that `serve` needs before it listens: secrets, files, the engines' options."""
    from preheat.gateway.assembly import assemble

    with Path(os.devnull).open("wb") as nowhere:
        log = Log(nowhere)
        assemble(settings, log)
        wiring.tls(settings)
        log.close()
