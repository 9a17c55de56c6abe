"""How the fake engine can be misconfigured, so that a doctor has something to find."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec


class Flaws(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is wrong with it, or peculiar to it.

    `owned_by` and `models` are what `/v1/models` tells; `api_key` is asked for where there is one;
    `refuses` are fields of a body that are a 400; `usage` is told, not told in streams, or never;
    `cached_tokens` in it are told or hidden; `metrics` has vLLM's counters of its prefix cache at
    `/metrics`; `token_s` is the time for each input token that the KV cache hadn't. With `loads_adapters` it is
    a vLLM that loads LoRA adapters while it runs, each in `adapter_load_s`, at most so many (`most_adapters`; 0: no
    limit), and a model that it doesn't have is a 404.
    """

    owned_by: str = "preheat"
    models: tuple[str, ...] = ("fake",)
    api_key: str = ""
    refuses: tuple[str, ...] = ()
    usage: Literal["told", "not-in-streams", "never"] = "told"
    hides_cached_tokens: bool = False
    metrics: bool = False
    token_s: float = 0.0
    loads_adapters: bool = False
    adapter_load_s: float = 0.0
    most_adapters: int = 0

    def is_refused(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request lacks the key."""
        wanted = b"Bearer " + self.api_key.encode()
        return bool(self.api_key) and headers.get(b"authorization") != wanted

    def refused_field(self, asked: Mapping[str, Any]) -> str:
        """The first field that it doesn't take, or nothing."""
        return next((name for name in self.refuses if name in asked), "")

    def told(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """What it tells of its usage."""
        if self.hides_cached_tokens:
            return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
        return dict(usage)

    def model_list(self) -> dict[str, Any]:
        """The body of `/v1/models`."""
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": self.owned_by}
            for name in self.models
        ]
        return {"object": "list", "data": data}

    def metrics_page(self, queried_tokens: int, hit_tokens: int, running: int) -> bytes:
        """The counters and how busy it is, as vLLM 0.32 writes them; nobody waits here."""
        lines = "".join(
            f'# TYPE vllm:prefix_cache_{name} counter\nvllm:prefix_cache_{name}_total{{engine="0"}}'
            f" {float(value)}\n"
            for name, value in (("queries", queried_tokens), ("hits", hit_tokens))
        )
        load = "".join(
            f'# TYPE vllm:num_requests_{name} gauge\nvllm:num_requests_{name}{{engine="0"}} {value}\n'
            for name, value in (("running", float(running)), ("waiting", 0.0))
        )
        return (load + lines).encode()
