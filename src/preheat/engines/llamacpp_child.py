"""llama.cpp's server in a process of its own, which lives no longer than its parent.

    python -m preheat.engines.llamacpp_child

One line of JSON settings comes in over stdin, one line of JSON goes out over stdout:
`{"event": "ready", "url": …}` or `{"event": "failed", "why": …}`. Then it serves until stdin
ends. Other signals than SIGKILL don't end it: a terminal or a service manager sends them to all
processes, and the parent may still have requests to answer.
"""

import ctypes
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from preheat.engines.child import ChildSettings

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_LOG_WARNINGS: Final = 2  # llama.cpp's scale: 1 errors, 2 warnings, 3 everything it does


class _Order(ChildSettings, frozen=True, kw_only=True):
    api_key: str


def main() -> int:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    _die_with_parent()
    report_fd = _take_stdout()
    try:
        order = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Order)
        server = _serve(order)
    except (
        AttributeError,  # a wheel too old or too new for a setting of ours
        ImportError,
        OSError,
        RuntimeError,
        msgspec.MsgspecError,
    ) as error:
        _report(report_fd, {"event": "failed", "why": str(error)})
        return 1
    _hush()
    _report(report_fd, {"event": "ready", "url": server.listening_address})
    while os.read(0, 4_096):
        pass
    # Not `return`: the server's destructor waits for the batch it is in, and nothing in this
    # process is worth waiting for.
    os._exit(0)


def _die_with_parent() -> None:
    """Have Linux kill us with the parent's last breath.

    End of input says the same, but not while the model loads (the constructor holds the GIL),
    and not while another process has inherited the other end of the pipe.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_stdout() -> int:
    """Keep stdout for the report alone; whatever else is printed there goes to stderr."""
    report_fd = os.dup(1)
    os.dup2(2, 1)
    return report_fd


def _hush() -> None:
    """From the first request on, say nothing.

    llama.cpp quotes the request in its log when it can't parse it (a bad byte, a bad grammar,
    bad tools), some of that at every verbosity.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _report(report_fd: int, report: dict[str, str]) -> None:
    with os.fdopen(report_fd, "wb") as pipe:
        pipe.write(msgspec.json.encode(report) + b"\n")


def _serve(order: _Order) -> Any:
    """Return the server once the model is loaded and the socket listens."""
    model = Path(order.model)
    if not model.is_file():
        raise FileNotFoundError(f"there is no model file at {model}")
    with model.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise RuntimeError(f"{model} is not a GGUF file")
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    _set(params, order)
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise RuntimeError(f"llama.cpp can't serve {model}: {error}") from error


def _set(params: Any, order: _Order) -> None:
    params.model.path = order.model
    params.model_alias = {order.alias or Path(order.model).stem}
    params.hostnames = [order.host]
    params.port = order.port
    params.api_keys = [order.api_key]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = order.threads
    params.n_ctx = order.ctx_tokens
    params.n_parallel = order.slots
    params.n_batch = params.n_ubatch = order.batch_tokens
    params.cache_ram_mib = order.cache_ram_mib
    params.fit_params = False  # what was asked for or an error, not what happens to fit
    params.endpoint_metrics = True
    params.ui = False
    params.verbosity = _LOG_WARNINGS
    if order.slot_save_dir:
        folder = Path(order.slot_save_dir)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # KV is prompt text in disguise
        params.slot_save_path = f"{folder}{os.sep}"  # it is only ever put before a name


if __name__ == "__main__":
    sys.exit(main())
