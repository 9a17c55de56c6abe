"""How fast KV comes back from each memory tier of this machine, and from how many tokens on that pays.

    preheat tiers
    preheat tiers --folder /mnt/nvme/slots --size-mib 1024
    preheat tiers --server http://127.0.0.1:8080 --folder /var/lib/slots --json

Copies memory, writes and reads a file in --folder (where slot files are to lie), and, with --server,
computes prompts on a llama.cpp server, saves their slot to a file and loads it back. Each tier's
break-even length is where loading becomes quicker than computing. Without --server it is that of
the speed and the KV size given, else of an 8B model at 200 TFLOP/s with 128 KiB a token.

The server is measured in an idle slot, whose content is put back; run it while nobody asks. It needs
--slots and --slot-save-path. Exit code 1 where the server or the folder can't be measured.
"""

import argparse
import asyncio
import tempfile
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from preheat import config
from preheat.cli.numbers import count, positive
from preheat.cli.progress import Line

if TYPE_CHECKING:
    from preheat.cli.machine_speeds import Speed
    from preheat.core.costs import ServiceModel, Tier
    from preheat.lab.slot_speeds import SlotSpeed

_USUAL_TOKEN_BYTES: Final = 131_072
_SHOWN_TOKENS: Final = 8_192
_MIB: Final = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="whose disk is measured (the temporary folder)"
    )
    parser.add_argument(
        "--size-mib",
        type=count,
        default=256,
        metavar="N",
        help="how much is copied, written and read (256)",
    )
    server = parser.add_argument_group("a llama.cpp server")
    server.add_argument("--server", default="", metavar="URL", help="measure its slots, too")
    server.add_argument(
        "--tokens",
        type=count,
        default=1_024,
        metavar="N",
        help="the longest prompt computed (1024)",
    )
    server.add_argument(
        "--api-key-env", default="", metavar="VAR", help="environment variable with its key"
    )
    model = parser.add_argument_group("another model")
    model.add_argument(
        "--prefill-tokens-per-s", type=positive, metavar="N", help="how fast it computes a prompt"
    )
    model.add_argument("--token-bytes", type=count, metavar="N", help="KV of one token (131072)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Measure, then say what it means."""
    from preheat.cli.machine_speeds import disk, memory

    line = Line()
    folder = options.folder or Path(tempfile.gettempdir())
    size_bytes = max(8, options.size_mib // 4 * 4) * _MIB
    line.tell("copying memory")
    speeds = [memory(size_bytes)]
    line.tell(f"writing and reading {folder}")
    speeds += disk(folder, size_bytes)
    served = None
    if options.server:
        line.tell(f"computing prompts on {options.server}")
        served = asyncio.run(_served(options))
    line.end()
    report = _report(options, speeds, served, str(folder))
    print(msgspec.json.encode(report).decode() if options.json else _text(report), flush=True)
    return 0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One tier. `break_even_tokens`: from there on loading is quicker than computing; None is never,
    or not known. `load_s` and `compute_s` are of `tokens` tokens."""

    name: str
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    latency_s: float | None
    write_latency_s: float | None
    break_even_tokens: float | None
    load_s: float | None
    note: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    folder: str
    server: str
    model: str
    token_bytes: float
    prefill_token_s: float
    prefill_pair_s: float
    prefill_step_s: float
    tokens: int
    compute_s: float
    tiers: list[Row]


def _report(
    options: argparse.Namespace, speeds: "list[Speed]", served: "SlotSpeed | None", folder: str
) -> Report:
    from preheat.cli.machine_speeds import Speed
    from preheat.core.costs import ServiceModel

    service, about = ServiceModel(), "8B, 200 TFLOP/s"
    token_bytes: float = options.token_bytes or _USUAL_TOKEN_BYTES
    if served is not None:
        service, token_bytes, about = served.service, served.token_bytes, "measured"
        speeds = [
            *speeds,
            Speed(
                name="slot file, warm",
                read_bytes_per_s=served.load_bytes_per_s,
                write_bytes_per_s=served.save_bytes_per_s,
                latency_s=served.load_latency_s,
                write_latency_s=served.save_latency_s,
            ),
        ]
    if options.prefill_tokens_per_s:
        service = ServiceModel(token_s=1.0 / options.prefill_tokens_per_s, attention_s=0.0)
        about = "as given"
    return Report(
        folder=folder,
        server=options.server,
        model=about,
        token_bytes=token_bytes,
        prefill_token_s=service.token_s,
        prefill_pair_s=service.attention_s,
        prefill_step_s=service.step_s,
        tokens=_SHOWN_TOKENS,
        compute_s=service.prefill_s(_SHOWN_TOKENS),
        tiers=[_row(one, service, token_bytes) for one in speeds],
    )


def _row(speed: "Speed", service: "ServiceModel", token_bytes: float) -> Row:
    from preheat.core.costs import break_even_tokens

    tier = _tier(speed)
    least = None if tier is None else break_even_tokens(service, tier, token_bytes)
    return Row(
        name=speed.name,
        read_bytes_per_s=speed.read_bytes_per_s,
        write_bytes_per_s=speed.write_bytes_per_s,
        latency_s=speed.latency_s,
        write_latency_s=speed.write_latency_s,
        break_even_tokens=None if least is None or isinf(least) else least,
        load_s=None if tier is None else tier.load_s(_SHOWN_TOKENS * token_bytes),
        note=speed.note or ("never pays" if least is not None and isinf(least) else ""),
    )


def _tier(speed: "Speed") -> "Tier | None":
    from preheat.core.costs import Tier

    if speed.read_bytes_per_s is None or speed.latency_s is None:
        return None
    return Tier(name=speed.name, bytes_per_s=speed.read_bytes_per_s, latency_s=speed.latency_s)


async def _served(options: argparse.Namespace) -> "SlotSpeed":
    from preheat.engines.direct import Direct
    from preheat.errors import ConfigError
    from preheat.lab.slot_speeds import FILES, slots

    key = ""
    if options.api_key_env:
        key = config.secret_from(options.api_key_env, "--api-key-env", config.environment())
    try:
        direct = Direct(options.server, api_key=key, dialect="llamacpp")
    except ValueError as error:
        raise ConfigError(f"--server: expected http(s)://host[:port] ({error})") from None
    try:
        return await slots(direct, options.tokens)
    finally:
        await direct.aclose()
        if options.folder is not None:
            for name in FILES:
                (options.folder / name).unlink(missing_ok=True)


def _text(report: Report) -> str:
    head = ("tier", "read", "write", "latency", "synced write", "8k tokens", "pays from")
    rows = [
        (
            row.name,
            _rate(row.read_bytes_per_s),
            _rate(row.write_bytes_per_s),
            _short(row.latency_s),
            _short(row.write_latency_s),
            _short(row.load_s),
            _from(row.break_even_tokens),
        )
        for row in report.tiers
    ]
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    lines += [f"{row.name}: {row.note}" for row in report.tiers if row.note]
    return "\n".join(
        [
            *lines,
            f"Computing {report.tokens:,} tokens takes {_short(report.compute_s)} ({report.model}; "
            f"{report.token_bytes:,.0f} bytes of KV a token). The disk is that of {report.folder}.",
        ]
    )


def _from(tokens: float | None) -> str:
    if tokens is None:
        return "-"
    return "the first" if tokens < 1.0 else f"{tokens:,.0f} tokens"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:,.2f} GB/s"


def _short(took_s: float | None) -> str:
    if took_s is None:
        return "-"
    for least_s, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if took_s >= least_s:
            return f"{took_s / least_s:,.1f} {unit}"
    return "< 1 µs"
