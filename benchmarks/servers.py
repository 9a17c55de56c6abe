"""The parties of a benchmark, started as a user would: gateway, fake engine, nginx, others."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from benchmarks.process import Server, free_port, running
from benchmarks.rawhttp import HOST
from benchmarks.report import BenchmarkError

TENANTS = 4
ECHO = "echo: "
ADMIN_WITHIN_S = 30.0


class Layout(msgspec.Struct, frozen=True):
    """How the gateway is set up where that isn't by its defaults."""

    workers: int = 1
    has_l2: bool = True
    has_log: bool = False
    l1_bytes: int | None = None
    l1_entries: int | None = None
    l2_bytes: int | None = None

    @staticmethod
    def add_options(parser: argparse.ArgumentParser, *, workers: int = 1, log: bool) -> None:
        flag = argparse.BooleanOptionalAction
        parser.add_argument(
            "--workers", type=int, default=workers, help=f"processes of the gateway ({workers})"
        )
        parser.add_argument("--l2", action=flag, default=True, help="LMDB in the run's folder")
        parser.add_argument("--log", action=flag, default=log, help="the request log")

    @classmethod
    def of(cls, options: argparse.Namespace, **others: int) -> Self:
        return cls(workers=options.workers, has_l2=options.l2, has_log=options.log, **others)


class Engine:
    """The fake engine: says what it is told, and counts what it was asked."""

    def __init__(self, name: str, port: int, server: Server) -> None:
        self.name = name
        self.port = port
        self.server = server

    def answer_with(self, default: str | Mapping[str, object]) -> None:
        """Every answer from now on; `echo` gives the last message back, behind `ECHO`."""
        _json("POST", self.port, "/fake/script", {"replies": [], "default": default})

    def calls(self) -> int:
        return int(_json("GET", self.port, "/fake/log")["calls"])


class Gateway:
    """The gateway under test, with its admin door."""

    def __init__(self, server: Server, port: int, keys: Sequence[str], settings: str) -> None:
        self.server = server
        self.port = port
        self.keys = keys  # one a tenant
        self.settings = settings  # all that is in effect, as TOML

    def stats(self) -> dict[str, Any]:
        return _json("GET", self.port, "/preheat/v1/stats")

    def ledger(self) -> dict[str, Any]:
        return _json("GET", self.port, "/preheat/v1/ledger")

    def workers(self) -> list[dict[str, Any]]:
        return list(_json("GET", self.port, "/preheat/v1/workers")["workers"])


@contextlib.contextmanager
def fake_engine(
    folder: Path, *, core: int | None, name: str = "main", is_bare: bool = False
) -> Iterator[Engine]:
    """Bare, it has no KV cache and keeps no requests: as cheap as it can be."""
    command = [sys.executable, "-m", "preheat.engines.fake", "--listen", f"{HOST}:0"]
    if is_bare:
        command += ["--capacity-blocks", "0", "--logged", "0"]
    with running(f"engine-{name}", command, folder=folder, core=core) as server:
        yield Engine(name, server.wait_for_port(), server)


@contextlib.contextmanager
def gateway(
    folder: Path,
    models: Mapping[str, Engine],
    *,
    core: int | None,
    layout: Layout | None = None,
    before: Gateway | None = None,
) -> Iterator[Gateway]:
    """A gateway before the engine of each model; defaults, but for prices and tenants.

    `before` is the one that ran in this folder before: it comes back under its port and keys.
    """
    keys = before.keys if before else [f"bench-{secrets.token_hex(12)}" for _ in range(TENANTS)]
    env = {f"BENCH_KEY_{i}": key for i, key in enumerate(keys)}
    env["XDG_CACHE_HOME"] = str(folder / "cache")  # what it keeps goes with the folder
    file = folder / "preheat.toml"
    layout = layout or Layout(has_l2=False)
    file.write_text(_config(models, layout, folder, before.port if before else 0))
    settings = before.settings if before else _effective_settings(file, env)
    command = [sys.executable, "-m", "preheat", "serve", "--config", str(file)]
    if layout.workers > 1:
        command += ["--workers", str(layout.workers)]
    with running("gateway", command, folder=folder, core=core, env=env) as server:
        yield Gateway(server, server.wait_for_port(), keys, settings)


def _config(models: Mapping[str, Engine], layout: Layout, folder: Path, port: int) -> str:
    """Round prices: one input token costs a millionth, so each sum is exact in picodollars."""
    lines = ["[listen]", f'address = "{HOST}:{port}"']
    for engine in dict.fromkeys(models.values()):
        lines += [f"[engines.{engine.name}]", 'kind = "openai"']
        lines += [f'url = "http://{HOST}:{engine.port}/v1"']
    for model, engine in models.items():
        lines += [f"[models.{model}]", f'engine = "{engine.name}"']
        lines += ["input = 1.0", "cached_input = 0.5", "output = 2.0"]
    for i in range(TENANTS):
        lines += [f"[tenants.t{i}]", f'api_key_env = "BENCH_KEY_{i}"']
    if layout.l1_bytes is not None and layout.l1_entries is not None:
        lines += ["[l1]", f"bytes = {layout.l1_bytes}", f"entries = {layout.l1_entries}"]
    lines += ["[l2]", f'kind = "{"lmdb" if layout.has_l2 else "off"}"', f'path = "{folder / "l2"}"']
    if layout.l2_bytes is not None:
        lines += [f"bytes = {layout.l2_bytes}"]
    if layout.has_log:
        lines += ["[log]", "enabled = true", f'path = "{folder / "log"}"']
    return "\n".join(lines) + "\n"


def _effective_settings(file: Path, env: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", "preheat", "config", "--config", str(file)]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        raise BenchmarkError(f"`preheat config` failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


@contextlib.contextmanager
def nginx(
    folder: Path, *, core: int | None, body_bytes: int, is_tuned: bool = False
) -> Iterator[tuple[Server, int]]:
    """One worker that reads each body and answers with as many bytes as the gateway does.

    Nothing is logged and connections stay. Its buffers are nginx's defaults, or, tuned for this very
    load, large enough for one read to take head and body.
    """
    home = folder / ("nginx-tuned" if is_tuned else "nginx")
    home.mkdir()
    port = free_port()
    (home / "nginx.conf").write_text(_nginx_config(port, home, body_bytes, is_tuned))
    command = [_nginx(), "-p", str(home), "-c", str(home / "nginx.conf"), "-e", "stderr"]
    with running("nginx", command, folder=folder, core=core) as server:
        server.wait_for_connect(port)
        yield server, port


def _nginx() -> str:
    """Debian keeps it where a plain user's PATH doesn't look."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise BenchmarkError("nginx is missing: apt-get install wrk nginx-light")
    return found


def nginx_version() -> list[str]:
    return [_nginx(), "-v"]


def _nginx_config(port: int, home: Path, body_bytes: int, is_tuned: bool) -> str:
    if body_bytes > 4000:  # one token of its configuration holds 4,096 bytes
        raise BenchmarkError(f"a reply of {body_bytes} bytes is too long for nginx's `return`")
    text = json.dumps({"content": ""})
    text = text[:-2] + "x" * (body_bytes - len(text)) + text[-2:]
    folders = "\n".join(
        f"  {kind}_temp_path {home}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""
daemon off;
worker_processes 1;
pid {home}/nginx.pid;
error_log stderr error;
events {{ worker_connections 1024; }}
http {{
{folders}
  access_log off;
  server_tokens off;
  default_type application/json;
  keepalive_timeout 75s;
  keepalive_requests 1000000000;
  {"client_header_buffer_size 32k;" if is_tuned else ""}
  server {{
    listen {HOST}:{port};
    location / {{ return 200 '{text}'; }}
  }}
}}
"""


@contextlib.contextmanager
def litellm(
    folder: Path, engine: Engine, *, executable: str, core: int | None
) -> Iterator[tuple[Server, int]]:
    """LiteLLM's proxy with its cache in local memory, no database, no keys: its cheapest hit."""
    config = {
        "model_list": [
            {
                "model_name": "m1",
                "litellm_params": {
                    "model": "openai/m1",
                    "api_base": f"http://{HOST}:{engine.port}/v1",
                    "api_key": "none",
                },
            }
        ],
        "litellm_settings": {
            "cache": True,
            "cache_params": {"type": "local"},
            "telemetry": False,
        },
    }
    file = folder / "litellm.json"  # JSON is YAML
    file.write_text(json.dumps(config))
    port = free_port()
    command = [executable, "--config", str(file), "--host", HOST, "--port", str(port)]
    command += ["--num_workers", "1"]
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    env["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # else it won't start
    with running("litellm", command, folder=folder, core=core, env=env) as server:
        server.wait_for_connect(port, within_s=180)
        yield server, port


@contextlib.contextmanager
def vllm_router(
    folder: Path, engine: Engine, *, executable: str, policy: str, core: int | None
) -> Iterator[tuple[Server, int]]:
    """vLLM's router (Rust) before one worker; quiet, because each line of a log costs."""
    port = free_port()
    command = [executable, "--host", HOST, "--port", str(port), "--policy", policy]
    command += ["--worker-urls", f"http://{HOST}:{engine.port}"]
    command += ["--worker-startup-check-interval", "1", "--log-level", "warning"]
    command += ["--prometheus-port", str(free_port())]
    with running(f"vllm-router-{policy}", command, folder=folder, core=core) as server:
        server.wait_for_connect(port, within_s=60)
        yield server, port


def _json(method: str, port: int, path: str, body: object = None) -> dict[str, Any]:
    """A call to an admin door; these are few, so they may block."""
    connection = http.client.HTTPConnection(HOST, port, timeout=ADMIN_WITHIN_S)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise BenchmarkError(f"{method} {path} failed: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise BenchmarkError(f"{method} {path} answered {response.status}: {data[:300]!r}")
    return dict(json.loads(data or b"{}"))
