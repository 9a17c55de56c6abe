"""What an engine is asked: a method, a path and a body, made here and sent elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

_ENCODE = msgspec.json.Encoder().encode


class Call(msgspec.Struct, frozen=True):
    """A question to a server. `path` is from its root, not from `/v1`; a body is always JSON."""

    method: bytes
    path: bytes
    body: bytes = b""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a prompt: as messages, as text or as token ids, one of the three.

    `salt` separates tenants in the engine's cache, `cache_key` is OpenAI's `prompt_cache_key`,
    `keep_s` is how long it ought to be kept where that can be asked for, `slot` is one of
    llama.cpp's. What an engine has no word for is left out of the call: look at `salt_field` and
    `priority_lower_first` where that matters.
    """

    model: str = ""
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    ids: Sequence[int] | None = None
    adapter: str = ""
    salt: str = ""
    priority: int | None = None
    cache_key: str = ""
    keep_s: float = 0.0
    slot: int | None = None

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.messages, self.text, self.ids)) != 1:
            raise ValueError("a prompt is messages or text or ids, and one of them only")


def chunks(prompt: Prompt, chunk_tokens: int) -> Iterator[Prompt]:
    """Prefixes of a prompt of token ids, each longer than the one before by `chunk_tokens`.

    Warmed one after another they cost what one call costs (3.38 s of CPU time in 20 calls, 3.27 in
    one, llama.cpp), and a warmer can stop between two of them.

    >>> [list(part.ids) for part in chunks(Prompt(ids=[7, 8, 9]), 2)]
    [[7, 8], [7, 8, 9]]
    """
    if prompt.ids is None or chunk_tokens < 1:
        raise ValueError("chunks are of token ids, and of one token at least")
    for end in range(chunk_tokens, len(prompt.ids) + chunk_tokens, chunk_tokens):
        yield msgspec.structs.replace(prompt, ids=prompt.ids[:end])


def get(path: str) -> Call:
    """A question without a body."""
    return Call(b"GET", path.encode())


def post(path: str, fields: Mapping[str, Any] | None = None) -> Call:
    """One with a JSON body: those fields that aren't None."""
    if fields is None:
        return Call(b"POST", path.encode())
    body = {name: value for name, value in fields.items() if value is not None}
    return Call(b"POST", path.encode(), _ENCODE(body))
