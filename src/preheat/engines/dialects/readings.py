"""What an engine said, read with mistrust: what isn't a number that can be is None, and no body,
however it is made, raises."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

MOST_BYTES: Final = 8 * 2**20
"""A larger body isn't read: a million token ids are 7 MiB."""
_MOST: Final = 2**53  # beyond it JSON numbers lose digits
_MOST_ID: Final = 2**31
_MOST_WHY: Final = 200


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a server is. None: it doesn't say.

    `waiting_tokens` are those that wait for prefill and aren't cached; `kv_used_share` is from 0
    to 1; `prompt_tokens_total` counts all tokens of prompts since its start, those included that
    its cache had (`cached_tokens_total`); `capacity_tokens` is what its KV cache holds.
    """

    running: int | None = None
    waiting: int | None = None
    waiting_tokens: int | None = None
    kv_used_share: float | None = None
    cached_tokens_total: int | None = None
    prompt_tokens_total: int | None = None
    capacity_tokens: int | None = None


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's KV cache holds, in tokens; in blocks of how many, or in slots of how many."""

    tokens: int | None = None
    block_tokens: int | None = None
    slots: int | None = None
    slot_tokens: int | None = None


class Tokens(msgspec.Struct, frozen=True):
    """A prompt as the engine's own tokenizer sees it; `ids` is None where it only counts."""

    count: int
    ids: list[int] | None


class Cached(msgspec.Struct, frozen=True):
    """How much of a prompt an answer says was cached, and how much it says was newly written there.

    An engine may lie: `cached_tokens` can be more than `prompt_tokens`. Whoever trusts it judges.
    `slot` is llama.cpp's, where the prompt lies now.
    """

    prompt_tokens: int
    cached_tokens: int | None
    written_tokens: int | None = None
    slot: int | None = None


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that a server knows; `name` is what a `Prompt` calls it."""

    name: str
    path: str
    is_active: bool = True


class Slot(msgspec.Struct, frozen=True):
    """One of llama.cpp's places for a sequence. `tokens`: what it holds, None where it had no
    request yet and doesn't say."""

    number: int
    ctx_tokens: int
    tokens: int | None
    is_busy: bool


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Whether something was done; None where the answer doesn't say. `why` not, in its words."""

    ok: bool | None
    why: str = ""


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A slot saved, restored or erased."""

    ok: bool
    why: str = ""
    tokens: int | None = None
    size_bytes: int | None = None


def most_cached(prompt_tokens: int, block_tokens: int) -> int:
    """The most that can be cached of a prompt: whole blocks, and never its last token, which is
    computed to have something to answer.

    >>> most_cached(1_024, 16), most_cached(1_025, 16), most_cached(10, 1)
    (1008, 1024, 9)
    """
    return max(0, (prompt_tokens - 1) // block_tokens * block_tokens)


def parsed(body: bytes) -> Any:
    """The JSON in a body; None where there is none, or too much of it."""
    if len(body) > MOST_BYTES:
        return None
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):  # msgspec's own and those of bad UTF-8 are ValueErrors
        return None


def part(value: Any, *names: str) -> Any:
    """What stands under these names, one in the other; None where something else does."""
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects of a list."""
    if isinstance(value, list):
        yield from (one for one in value if isinstance(one, dict))


def count(value: Any) -> int | None:
    """A whole number from 0 to 2**53, or None."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value <= _MOST else None


def share(value: Any) -> float | None:
    """A number from 0 to 1, or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0.0 <= value <= 1.0 else None


def plus(*values: int | None) -> int | None:
    """The sum of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def ids_of(value: Any) -> list[int] | None:
    """Token ids, all of them or none."""
    if not isinstance(value, list) or not all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < _MOST_ID for one in value
    ):
        return None
    return value


def adapters_among_models(body: bytes) -> list[Adapter] | None:
    """Adapters are listed as models with a `parent`."""
    models = part(parsed(body), "data")
    if not isinstance(models, list):
        return None
    return [
        Adapter(one["id"], root if isinstance(root := one.get("root"), str) else "")
        for one in objects(models)
        if isinstance(one.get("id"), str) and one.get("parent")
    ]


def why(status: int, body: bytes) -> str:
    """What a refusal says, in one short line: OpenAI's form, FastAPI's, SGLang's, TGI's or text."""
    value = parsed(body)
    said = (
        part(value, "error", "message"),
        part(value, "error"),
        part(value, "error_message"),
        part(value, "detail"),
        part(value, "message"),
        body[: 4 * _MOST_WHY].decode("utf-8", "replace") if value is None else None,
    )
    words = next((one for one in said if isinstance(one, str) and one), "")
    line = " ".join("".join(c if c.isprintable() else " " for c in words).split())
    return line[:_MOST_WHY] or f"status {status}"


def done(status: int, body: bytes) -> Done:
    """Whether it was done: where the body has a word of its own, that one counts."""
    success = part(parsed(body), "success")
    ok = 200 <= status < 300 and success is not False
    return Done(ok=ok, why="" if ok else why(status, body))
