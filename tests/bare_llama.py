"""llama.cpp's server with settings that the embedded engine doesn't have, as someone may start it.

    python tests/bare_llama.py '{"path": "tiny.gguf", "slots": 2, "cache_prompt": false}'

Its address is the one line on stdout. It serves until stdin ends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bare_llama(path: str, **settings: Any) -> Iterator[str]:
    """Its address."""
    order = json.dumps({"path": path, **settings})
    process = subprocess.Popen(
        [sys.executable, __file__, order],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def main(order: dict[str, Any]) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = order["path"]
    params.hostnames, params.port = ["127.0.0.1"], order.get("port", 0)
    params.endpoint_slots = True
    if "slot_save_path" in order:
        params.slot_save_path = order["slot_save_path"].rstrip("/") + "/"
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_parallel = order.get("slots", 2)
    params.n_ctx = order.get("ctx_tokens", 2_048) * params.n_parallel
    params.cache_ram_mib = order.get("cache_ram_mib", 64)
    params.cache_prompt = order.get("cache_prompt", True)
    params.endpoint_metrics = order.get("has_metrics", True)
    params.fit_params = params.ui = False
    params.verbosity = 0
    if "template" in order:
        params.chat_template = order["template"]
    report = os.dup(1)
    os.dup2(2, 1)
    server = xllamacpp.Server(params)
    os.write(report, server.listening_address.encode() + b"\n")
    os.close(report)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
