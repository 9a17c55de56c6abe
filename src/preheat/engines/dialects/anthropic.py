"""Anthropic's own API: prompt caching by breakpoints, and a question that only fills the cache.

Read: the reference of `/v1/messages` and the guide to prompt caching, October 2026. `max_tokens: 0`
computes the prompt and answers nothing; it is refused together with `stream`, thinking, an output
format, a forced tool and in batches. A breakpoint ends what is kept: 5 minutes, or 1 hour for more
money; four at most in a request. Prefixes under 512 to 4,096 tokens, by model, are silently not kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from preheat.engines.dialects.calls import Call, Prompt, post
from preheat.engines.dialects.openai import OpenAi
from preheat.engines.dialects.readings import Tokens, count, objects, parsed, part

MOST_BREAKPOINTS: Final = 4
_SHORT_S: Final = 300.0
_VERSION: Final = b"2023-06-01"
_SYSTEM: Final = frozenset({"system", "developer"})
_TURN: Final = {"role": "user", "content": "."}  # a message there must be, and it isn't kept


class Anthropic(OpenAi):
    """The dialect of `/v1/messages`."""

    name = "anthropic"
    block_tokens = 1
    least_tokens = 1_024

    def headers(self, api_key: str) -> list[tuple[bytes, bytes]]:
        """The key has a header of its own, and the API's version another."""
        named = [(b"x-api-key", api_key.encode())] if api_key else []
        return [(b"content-type", b"application/json"), (b"anthropic-version", _VERSION), *named]

    def tokenise(self, prompt: Prompt, *, opens_answer: bool = True) -> Call | None:
        """It only counts; the answer's beginning is always among them."""
        if prompt.messages is None:
            return None
        system, messages = _split(prompt.messages)
        return post(
            "/v1/messages/count_tokens",
            {
                "model": prompt.model,
                "system": system or None,
                "messages": messages or [_TURN],
                "tools": prompt.tools,
            },
        )

    def read_tokens(self, body: bytes) -> Tokens | None:
        """A count, without ids."""
        tokens = count(part(parsed(body), "input_tokens"))
        return None if tokens is None else Tokens(tokens, None)

    def warm(self, prompt: Prompt) -> Call | None:
        """All of it up to a breakpoint at its end, and no answer."""
        if prompt.messages is None:
            return None
        system, messages = _split(prompt.messages)
        others = _breakpoints(system, messages, prompt.tools)
        if others < MOST_BREAKPOINTS:
            # One of an hour may not stand behind one of five minutes.
            is_long = prompt.keep_s > _SHORT_S and others == 0
            _mark(system, messages, "1h" if is_long else "5m")
        if not messages or messages[-1].get("role") != "user":
            messages.append(_TURN)
        return post(
            "/v1/messages",
            {
                "model": prompt.model,
                "max_tokens": 0,
                "system": system or None,
                "messages": messages,
                "tools": prompt.tools,
            },
        )


def _split(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[dict[str, Any]]]:
    """The system's words as blocks, and the other messages."""
    system = [
        block
        for message in messages
        if message.get("role") in _SYSTEM
        for block in _blocks(message.get("content"))
    ]
    return system, [dict(one) for one in messages if one.get("role") not in _SYSTEM]


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [dict(block) for block in objects(content)]


def _mark(system: list[Any], messages: list[dict[str, Any]], ttl: str) -> None:
    """Put a breakpoint on the last block of what is given."""
    blocks = system
    if messages:
        blocks = messages[-1]["content"] = _blocks(messages[-1].get("content"))
    if blocks:
        blocks[-1] = {**blocks[-1], "cache_control": {"type": "ephemeral", "ttl": ttl}}


def _breakpoints(*parts: Any) -> int:
    return sum("cache_control" in one for one in _all_objects(parts))


def _all_objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Tools, blocks and messages, with the blocks inside of messages."""
    for one in value or ():
        if isinstance(one, Mapping):
            yield one
            if isinstance(one.get("content"), list):
                yield from _all_objects(one["content"])
        elif isinstance(one, list | tuple):
            yield from _all_objects(one)
