"""What would each cache, router, tier and policy have saved on a recorded trace or log?

    preheat replay conversation.jsonl.gz
    preheat replay ~/.local/state/preheat/log --workers 4 --worker-tokens 500000 --html report.html
    preheat replay requests.jsonl --gpu-hour 2.5 --json > report.json
    preheat replay sessions.jsonl.gz --open-sessions 20 --closed

TRACE is a file or a folder: Preheat's own log, OpenAI-style JSON lines (LiteLLM, Helicone, vLLM), or
a published trace; docs/traces.md lists the formats, which are recognised by content. The decisions
are made by the code that serves, in simulated time; the engines are simulated (continuous
batching, paged KV). The baseline is a round-robin balancer without a response cache before engines with
prefix caching. Speeds are assumed unless --service says otherwise: compare arms, not clocks. From a
log of Preheat's own they can be fitted:

    preheat replay ~/.local/state/preheat/log --service fit --save-service speeds.json
    preheat replay requests.jsonl --service speeds.json
"""

import argparse
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from preheat.cli.numbers import count, count_or_none, few, positive, seconds, speed
from preheat.cli.pages import check_page, write_page
from preheat.cli.progress import Line
from preheat.cli.reading import add_reading_arguments, read_trace
from preheat.cli.service import add_service_arguments, check_service, service_of
from preheat.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_reading_arguments(parser)
    fleet = parser.add_argument_group("the fleet")
    fleet.add_argument("--workers", type=few, default=8, metavar="N", help="serving processes (8)")
    fleet.add_argument(
        "--worker-tokens",
        type=count,
        default=1_000_000,
        metavar="N",
        help="tokens of KV that a worker's memory holds (1000000)",
    )
    fleet.add_argument(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="the model's config.json: with --kv-gib it says how many tokens a worker holds",
    )
    fleet.add_argument("--kv-gib", type=positive, metavar="N", help="a worker's memory for KV")
    fleet.add_argument(
        "--kv-dtype",
        default="",
        metavar="NAME",
        help="how KV is stored: fp8, q8_0, … (as the model says)",
    )
    fleet.add_argument(
        "--tier-tokens",
        type=count_or_none,
        default=4_000_000,
        metavar="N",
        help="tokens of KV of a worker's DRAM tier, for the arm that has one (4000000; 0: none)",
    )
    fleet.add_argument(
        "--ttl", type=seconds, default=3_600.0, metavar="S", help="life of stored answers (3600)"
    )
    fleet.add_argument("--routing", default="preheat", metavar="RULE", help="ours (preheat)")
    fleet.add_argument(
        "--speed", type=speed, default=1.0, metavar="X", help="time runs X times as fast"
    )
    fleet.add_argument(
        "--closed", action="store_true", help="a session's next request waits for its answer"
    )
    add_service_arguments(parser)
    told = parser.add_argument_group("what is told")
    told.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="an order for the hit curves; repeatable",
    )
    told.add_argument(
        "--slo-ttft-s",
        type=positive,
        default=2.0,
        metavar="S",
        help="target for the first token (2)",
    )
    told.add_argument(
        "--gpu-hour", type=positive, metavar="MONEY", help="price of a GPU for an hour"
    )
    told.add_argument("--json", action="store_true", help="print the report as one JSON document")
    told.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page")


def run(options: argparse.Namespace) -> int:
    """Read, simulate, tell."""
    from preheat.cli.replay_text import told
    from preheat.core import eviction
    from preheat.core.routing import POLICIES
    from preheat.replay import report
    from preheat.replay.replay import Questions, replay
    from preheat.replay.whatif import Setup
    from preheat.traces.reading import printable

    _known("routing rule", [options.routing], POLICIES)
    _known("eviction policy", options.policy, eviction.POLICIES)
    if options.html is not None:
        check_page(options.html)
    check_service(options)
    worker_tokens = _worker_tokens(options)
    line = Line()
    line.tell("reading")
    trace = read_trace(options)
    defaults = Questions()
    service, fitted = service_of(options, trace, defaults.setup)
    asked = Questions(
        setup=Setup(
            workers=options.workers,
            worker_tokens=worker_tokens,
            loop="closed" if options.closed else "open",
            speed=options.speed,
            service=service,
        ),
        fitted=fitted,
        ours=options.routing,
        tier_tokens=options.tier_tokens,
        exact_ttl_s=options.ttl,
        policies=tuple(options.policy) or defaults.policies,
        slo_ttft_s=options.slo_ttft_s,
        rate=report.Rate(gpu_hour_money=options.gpu_hour) if options.gpu_hour else None,
        command=printable(f"preheat {shlex.join(sys.argv[1:])}"),
    )
    made = replay(trace, asked, line.tell)
    line.end()
    document = report.encode(made)
    if options.json:
        sys.stdout.buffer.write(document + b"\n")
    else:
        print(told(made))
    if options.html is not None:
        write_page(options.html, document)
    elif not options.json:
        print("\nWith --html FILE as a page, with --json as one document.")
    return 0


def _worker_tokens(options: argparse.Namespace) -> int:
    """What a worker holds: given, or its memory by what a token of the model takes."""
    if options.model_config is None and options.kv_gib is None:
        tokens: int = options.worker_tokens
        return tokens
    if options.model_config is None or options.kv_gib is None:
        raise ConfigError("--model-config and --kv-gib say together how many tokens a worker holds")
    import msgspec

    from preheat.core.kv_bytes import kv_cache

    try:
        config = msgspec.json.decode(options.model_config.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"--model-config {options.model_config}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--model-config {options.model_config}: {error}") from None
    try:
        token_bytes = kv_cache(config, dtype=options.kv_dtype).token_bytes
    except (ValueError, TypeError, ArithmeticError):  # its numbers aren't numbers
        token_bytes = 0
    if token_bytes < 1:
        raise ConfigError(
            f"--model-config {options.model_config}: a token of this model would take no memory: is it "
            "a whole config.json?"
        )
    return max(1, int(options.kv_gib * 2**30 / token_bytes))


def _known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}; known: {', '.join(known)}")
