"""A gateway of one process, with a keyring that gives every request the same key."""

import argparse
import asyncio
import signal
import sys
from functools import partial

from preheat import config, wiring
from preheat.cli import serve
from preheat.core.keys import Keyring
from preheat.gateway.assembly import assemble
from preheat.telemetry.logs import Log


async def live(settings: config.Settings) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    gateway = assemble(settings, Log(sys.stderr.buffer))
    await gateway.start_engines()
    print(f"listening on http://127.0.0.1:{await gateway.listen('127.0.0.1', 0, None)}", flush=True)
    await ended.wait()
    await gateway.drain(1.0)
    await gateway.aclose()


if __name__ == "__main__":
    wiring.Keyring = partial(Keyring, key_bytes=0)  # type: ignore[misc, assignment]  # a class
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    serve.add_arguments(parser)
    options = parser.parse_args()
    overrides = {"listen.address": options.listen, "engines.upstream.url": options.upstream}
    asyncio.run(live(config.load(options.config, config.environment(), overrides)))
