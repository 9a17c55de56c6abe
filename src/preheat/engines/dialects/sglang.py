"""SGLang.

Read: its sources of September and October 2026 (`http_server.py`, `v1_loads.py`, `protocol.py`).
Flags: `--enable-cache-report` for cached tokens in `usage`, `--enable-metrics` for `/metrics`,
`--enable-priority-scheduling` for priorities, `--enable-lora` for adapters. With an admin key set,
`/flush_cache` and adapters want that key.
"""

from typing import Any, Final

from preheat.engines.dialects.calls import Call, Prompt, get, post
from preheat.engines.dialects.openai import OpenAi, cached_in_usage, openai_call
from preheat.engines.dialects.readings import (
    Adapter,
    Cached,
    Capacity,
    Done,
    Load,
    Tokens,
    adapters_among_models,
    count,
    ids_of,
    objects,
    parsed,
    part,
    plus,
    share,
    why,
)
from preheat.engines.dialects.samples import Page

_RUNNING: Final = "sglang:num_running_reqs"
_WAITING: Final = "sglang:num_queue_reqs"
_USED: Final = "sglang:token_usage"
_CACHED: Final = "sglang:cached_tokens"
_PROMPT: Final = "sglang:prompt_tokens"


class SgLang(OpenAi):
    """Its prefixes are exact to the token unless it is started with larger pages."""

    name = "sglang"
    priority_lower_first = False
    salt_field = "cache_salt"
    shares_running = True
    block_tokens = 1
    least_tokens = 0

    def health(self) -> Call:
        return get("/health")

    def load(self) -> Call | None:
        return get("/v1/loads?include=core")

    def read_load(self, body: bytes) -> Load | None:
        """Over all ranks. A page of `/metrics` is read too: it has the tokens its cache saved, which
        `/v1/loads` hasn't, and not what the KV cache holds."""
        value = parsed(body)
        if value is None:
            return _load_of_page(body)
        ranks = list(objects(part(value, "loads")))
        used, most = _sum(ranks, "num_used_tokens"), _sum(ranks, "max_total_num_tokens")
        if not any("num_running_reqs" in rank for rank in ranks):
            return None
        return Load(
            running=_sum(ranks, "num_running_reqs"),
            waiting=_sum(ranks, "num_waiting_reqs"),
            waiting_tokens=_sum(ranks, "num_waiting_uncached_tokens"),
            kv_used_share=share(used / most) if used is not None and most else None,
            capacity_tokens=most,
        )

    def capacity(self) -> Call | None:
        return get("/server_info")

    def read_capacity(self, body: bytes) -> Capacity | None:
        """Its size is one rank's: with several only `/v1/loads` knows the whole."""
        value = parsed(body)
        tokens = count(part(value, "max_total_num_tokens"))
        block_tokens = count(part(value, "page_size")) or None
        if count(part(value, "dp_size")) not in {None, 0, 1}:
            tokens = None
        if tokens is None and block_tokens is None:
            return None
        return Capacity(tokens=tokens, block_tokens=block_tokens)

    def tokenise(self, prompt: Prompt, *, opens_answer: bool = True) -> Call | None:
        """Messages in newer versions only, and always with the answer's beginning."""
        if prompt.ids is not None:
            return None
        return post(
            "/tokenize",
            {
                "model": prompt.model or None,
                "prompt": prompt.text,
                "messages": prompt.messages,
                "tools": prompt.tools,
            },
        )

    def read_tokens(self, body: bytes) -> Tokens | None:
        ids = ids_of(part(parsed(body), "tokens"))
        return None if ids is None else Tokens(len(ids), ids)

    def warm(self, prompt: Prompt) -> Call | None:
        """Ids and text go to `/generate`, which tells cached tokens without a flag. What is
        `cache_salt` elsewhere is `extra_key` there: the server makes one of the other."""
        adapter, salt = prompt.adapter or None, prompt.salt or None
        if prompt.messages is not None:
            return openai_call(
                _without_adapter(prompt),
                max_tokens=1,
                cache_salt=salt,
                priority=prompt.priority,
                lora_path=adapter,
            )
        return post(
            "/generate",
            {
                "text": prompt.text,
                "input_ids": None if prompt.ids is None else list(prompt.ids),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "extra_key": salt,
                "priority": prompt.priority,
                "lora_path": adapter,
            },
        )

    def read_cached(self, body: bytes) -> Cached | None:
        """From `usage`, or from the `meta_info` of `/generate`."""
        value = parsed(body)
        found = cached_in_usage(part(value, "usage"))
        tokens = count(part(value, "meta_info", "prompt_tokens"))
        if found is not None or tokens is None:
            return found
        return Cached(tokens, count(part(value, "meta_info", "cached_tokens")))

    def adapters(self) -> Call | None:
        return get("/v1/models")

    def read_adapters(self, body: bytes) -> list[Adapter] | None:
        return adapters_among_models(body)

    def load_adapter(self, name: str, path: str, *, is_pinned: bool = False) -> Call | None:
        return post(
            "/load_lora_adapter",
            {"lora_name": name, "lora_path": path, "pinned": is_pinned or None},
        )

    def unload_adapter(self, name: str) -> Call | None:
        return post("/unload_lora_adapter", {"lora_name": name})

    def reset(self, slots: int = 1) -> list[Call]:
        return [post("/flush_cache")]

    def read_reset(self, status: int, body: bytes) -> Done:
        """Text: 400 while requests run; older versions said 200 and flushed nothing then."""
        if 200 <= status < 300 and body.startswith(b"Cache flushed"):
            return Done(ok=True)
        return Done(ok=False, why=why(status, body))


def _without_adapter(prompt: Prompt) -> Prompt:
    return Prompt(model=prompt.model, messages=prompt.messages, tools=prompt.tools)


def _sum(ranks: list[dict[str, Any]], field: str) -> int | None:
    return plus(*(count(rank.get(field)) for rank in ranks))


def _load_of_page(body: bytes) -> Load | None:
    page = Page(body, (_RUNNING, _WAITING, _USED, _CACHED, _PROMPT))
    if not page.of(_RUNNING, _WAITING, _USED):
        return None
    return Load(
        running=page.sum(_RUNNING),
        waiting=page.sum(_WAITING),
        kv_used_share=share(page.mean(_USED)),
        cached_tokens_total=page.sum(_CACHED),
        prompt_tokens_total=page.sum(_PROMPT),
    )
