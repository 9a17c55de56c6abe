"""OpenAI's own dialect, which every other engine speaks too: hosted APIs, and whatever isn't known
better.

Read: the API reference and the guide to prompt caching, October 2026. Caching is automatic from
1,024 tokens, in steps of 128. `prompt_cache_key` keeps requests of one prefix on one machine, up to
some 15 a minute.
"""

from typing import Any, Final

from preheat.engines.dialects.calls import Call, Prompt, get, post
from preheat.engines.dialects.readings import (
    Adapter,
    Cached,
    Capacity,
    Done,
    Load,
    Moved,
    Slot,
    Tokens,
    count,
    done,
    parsed,
    part,
)


class OpenAi:
    """What any server of this API understands; None for what it has no question for."""

    name: str = "openai"
    priority_lower_first: bool | None = None
    salt_field: str | None = None
    shares_running: bool | None = None
    block_tokens: int = 128
    least_tokens: int = 1_024

    def headers(self, api_key: str) -> list[tuple[bytes, bytes]]:
        """What each of these questions is sent with; vLLM refuses a body without its type."""
        named = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        return [(b"content-type", b"application/json"), *named]

    def health(self) -> Call:
        """Whether it is up: a status of 200 says so, no body does."""
        return get("/v1/models")

    def load(self) -> Call | None:
        """How busy it is."""
        return None

    def read_load(self, body: bytes) -> Load | None:
        """The same, read."""
        return None

    def capacity(self) -> Call | None:
        """How much its KV cache holds."""
        return None

    def read_capacity(self, body: bytes) -> Capacity | None:
        """The same, read."""
        return None

    def tokenise(self, prompt: Prompt, *, opens_answer: bool = True) -> Call | None:
        """The tokens of text, or of messages under the model's template; `opens_answer`: with the
        template's beginning of an answer, where that can be chosen."""
        return None

    def read_tokens(self, body: bytes) -> Tokens | None:
        """The same, read."""
        return None

    def render(self, prompt: Prompt, *, opens_answer: bool = True) -> Call | None:
        """The text that the model's template makes of messages."""
        return None

    def read_rendered(self, body: bytes) -> str | None:
        """The same, read."""
        return None

    def warm(self, prompt: Prompt) -> Call | None:
        """The cheapest question that has this prompt computed and kept: here one token of answer.
        None where it can't be asked for a prompt of this form."""
        return openai_call(prompt, max_tokens=1, prompt_cache_key=prompt.cache_key or None)

    def read_cached(self, body: bytes) -> Cached | None:
        """How much of the prompt was cached, from any complete answer."""
        return cached_in_usage(part(parsed(body), "usage"))

    def adapters(self) -> Call | None:
        """Which LoRA adapters it knows."""
        return None

    def read_adapters(self, body: bytes) -> list[Adapter] | None:
        """The same, read."""
        return None

    def load_adapter(self, name: str, path: str, *, is_pinned: bool = False) -> Call | None:
        """Load one under a name. It is then a model, or a `Prompt.adapter`."""
        return None

    def unload_adapter(self, name: str) -> Call | None:
        """Give it up."""
        return None

    def read_done(self, status: int, body: bytes) -> Done:
        """Whether an adapter was loaded or unloaded."""
        return done(status, body)

    def reset(self, slots: int = 1) -> list[Call]:
        """Empty its KV cache; no call where nobody can."""
        return []

    def read_reset(self, status: int, body: bytes) -> Done:
        """Whether one of those calls did it, by the body's own words."""
        return done(status, body)

    def slots(self) -> Call | None:
        """Its slots."""
        return None

    def read_slots(self, body: bytes) -> list[Slot] | None:
        """The same, read."""
        return None

    def save(self, slot: int, file_name: str) -> Call | None:
        """Write a slot's KV to a file on the server's side. Raises ValueError for a bad name."""
        return None

    def restore(self, slot: int, file_name: str) -> Call | None:
        """Read it back, into this slot or another. Raises ValueError for a bad name."""
        return None

    def erase(self, slot: int) -> Call | None:
        """Empty a slot."""
        return None

    def read_moved(self, status: int, body: bytes) -> Moved | None:
        """Whether a slot was saved, restored or erased."""
        return None


def openai_call(prompt: Prompt, **fields: Any) -> Call:
    """A question to `/v1/chat/completions` for messages, to `/v1/completions` for the rest."""
    asked = {"model": prompt.adapter or prompt.model or None, **fields}
    if prompt.messages is not None:
        return post(
            "/v1/chat/completions", {"messages": prompt.messages, "tools": prompt.tools, **asked}
        )
    text = prompt.text if prompt.ids is None else list(prompt.ids)
    return post("/v1/completions", {"prompt": text, **asked})


_PROMPT: Final = ("prompt_tokens", "input_tokens")
_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")
_READ: Final = "cache_read_input_tokens"
_CREATED: Final = "cache_creation_input_tokens"
_WRITTEN: Final = ("created_cache_tokens", "cache_write_tokens")


def cached_in_usage(usage: Any) -> Cached | None:
    """A `usage` in the form of chat, completions, responses or messages.

    In the last one `input_tokens` are only those that were neither read from the cache nor written
    to it; llama.cpp's `/v1/messages` says it like this too. What was written is told by Anthropic,
    by vLLM (`created_cache_tokens`) and by OpenAI's newest models (`cache_write_tokens`).
    """
    prompt_tokens = next((n for f in _PROMPT if (n := count(part(usage, f))) is not None), None)
    if prompt_tokens is None:
        return None
    if _READ in usage or _CREATED in usage:
        read, created = count(usage.get(_READ)), count(usage.get(_CREATED))
        return Cached(prompt_tokens + (read or 0) + (created or 0), read, created)
    details = next((d for f in _DETAILS if isinstance(d := part(usage, f), dict)), None)
    written = next((n for f in _WRITTEN if (n := count(part(details, f))) is not None), None)
    return Cached(prompt_tokens, count(part(details, "cached_tokens")), written)
