"""How fast an engine is, for commands that simulate one: assumed, given in a file, or fitted."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from preheat.errors import ConfigError

if TYPE_CHECKING:
    from preheat.core.costs import ServiceModel
    from preheat.replay.fitting import Fitted
    from preheat.replay.whatif import Setup
    from preheat.traces.arrival import Trace

FIT: Final = "fit"
"""In the place of a file: from the log itself."""
_ROUGH: Final = 0.3
"""A share: of simulated engines' logs, calm ones are told to 1 to 24 %, overloaded ones to 37 to 98 %
(docs/replay.md)."""


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """Where an engine's speeds come from, and where they are kept."""
    service = parser.add_argument_group(
        "the engine's speeds",
        "A step takes step_s + token_s·new + attention_s·new·context of prompts,\n"
        "and sequence_s·sequences + context_s·contexts of what decodes.\n"
        "Without --service they are an 8B model's on a big GPU.",
    )
    service.add_argument(
        "--service",
        metavar="fit|FILE",
        help="fit: from the times in TRACE, which must be Preheat's own log; FILE: from JSON with "
        "these names, in seconds",
    )
    service.add_argument(
        "--save-service",
        type=Path,
        metavar="FILE",
        help="keep what --service fit found, for --service FILE",
    )


def check_service(options: argparse.Namespace) -> None:
    """Before the work: whether the file says speeds, and what is found could be kept. Raises
    ConfigError."""
    if options.service not in (None, FIT):
        _read(Path(options.service))
    path = options.save_service
    if path is None:
        return
    if options.service != FIT:
        raise ConfigError("--save-service keeps what --service fit finds: give both")
    if path.is_dir():
        raise ConfigError(f"--save-service {path}: it is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--save-service {path}: its folder doesn't exist")


def service_of(
    options: argparse.Namespace, trace: "Trace", setup: "Setup"
) -> "tuple[ServiceModel, Fitted | None]":
    """The model to simulate with, and its fit to this trace if it is one, which is told and kept.
    Raises ConfigError."""
    if options.service is None:
        return setup.service, None
    if options.service != FIT:
        return _read(Path(options.service)), None
    fitted = _fit(options, trace, setup.step_tokens)
    if options.save_service is not None:
        _keep(fitted.model, options.save_service)
    print(_text_of(fitted, trace), end="\n\n", file=sys.stderr if options.json else None)
    return fitted.model, fitted


def _read(path: Path) -> "ServiceModel":
    import msgspec

    from preheat.core.costs import ServiceModel

    try:
        given = msgspec.json.decode(path.read_bytes(), type=ServiceModel)
    except OSError as error:
        more = "" if path.exists() else f"; --service {FIT} fits one to a log"
        raise ConfigError(f"--service {path}: {error.strerror}{more}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--service {path}: {error}") from None
    for name, value in msgspec.structs.asdict(given).items():
        if not 0 <= value < 1e6:
            raise ConfigError(
                f"--service {path}: {name} is {value:g}, and must be seconds from 0 to a million"
            )
    if not given.prefill_s(1_000):
        raise ConfigError(
            f"--service {path}: a prompt takes no time by it: are its prices left out?"
        )
    return given


def _fit(options: argparse.Namespace, trace: "Trace", step_tokens: int) -> "Fitted":
    """From the log that the trace was read from."""
    from preheat.replay.fitting import fit_times, served_in

    what = f"--service {FIT}: {trace.name}"
    if trace.format != "preheat":
        raise ConfigError(
            f"{what} is a trace ({trace.format}) without its engines' measured times: only Preheat's "
            "own request log has them (docs/request-log.md). Give speeds with --service FILE"
        )
    served = served_in(options.trace)
    if all(one.first_s is None for one in served):
        raise ConfigError(
            f"{what} has no measured times: none of its {len(trace.arrivals):,} requests is a streamed "
            "answer of an engine that told its tokens, and didn't come in one piece. Give speeds with "
            "--service FILE"
        )
    try:
        return fit_times(served, batch_tokens=step_tokens)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}, or give speeds with --service FILE") from None


def _keep(model: "ServiceModel", path: Path) -> None:
    import msgspec

    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(model)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--save-service {path}: {error.strerror}") from None


def _text_of(fitted: "Fitted", trace: "Trace") -> str:
    """What was found, in words."""
    import msgspec

    named = msgspec.structs.asdict(fitted.model).items()
    lines = [
        f"Service model, fitted to {trace.name}: "
        + ", ".join(f"{name} {value:.3g}" for name, value in named),
        *str(fitted).splitlines(),
        "(of the last third of these requests, told by a fit to those before)",
    ]
    if max(fitted.ttft.p50, fitted.decode.p50) > _ROUGH:
        lines.append(
            "That is rough: the engine was overloaded, or its speed isn't all that these times tell. "
            "A log of a calmer time fits better."
        )
    models = {one.model for one in trace.arrivals}
    if len(models) > 1:
        lines.append(f"{len(models)} models are in the log: these speeds are a blend of theirs.")
    return "\n".join(lines)
