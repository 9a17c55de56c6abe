"""The token blocks of prompts, as the engine's own template and tokenizer make them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec
from xxhash import xxh3_64_intdigest

from preheat.core.kv_names import KvNames
from preheat.core.token_memo import TokenMemo
from preheat.core.tokens import token_blocks
from preheat.engines.beside import aside
from preheat.engines.dialects import Dialect
from preheat.engines.dialects.calls import Prompt
from preheat.errors import EngineError

WITHIN_S: Final = 0.25
"""What a request waits for its tokens at most, while it is unknown what computing them takes."""
_SMALL_BYTES: Final = 2_048
"""Less that isn't known of a prompt isn't waited for: 500 tokens that hardly anybody holds yet."""
_MOST_BODY_BYTES: Final = 4_194_304
_MOST_AT_ONCE: Final = 64
_FAILURES: Final = 8
_REST_S: Final = 60.0
"""After so many in a row nothing is asked for so long."""

Patience = Callable[[str, int], float]
"""Seconds that may be waited for so many bytes of a model's prompt."""
Answer = tuple[Dialect, bytes]
Tokenise = Callable[[Prompt], Awaitable[Answer | None]]
"""A server's answer to the question for a prompt's ids; None where it has none."""


class _Body(msgspec.Struct):
    """What a prompt is made of; the last ones change how, in ways that can't be asked for."""

    model: str = ""
    messages: list[msgspec.Raw] | None = None
    prompt: str | list[int] | None = None
    tools: msgspec.Raw = msgspec.Raw()
    cache_salt: str | None = None
    chat_template: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    continue_final_message: msgspec.Raw = msgspec.Raw()
    add_generation_prompt: msgspec.Raw = msgspec.Raw()
    add_special_tokens: msgspec.Raw = msgspec.Raw()
    truncate_prompt_tokens: msgspec.Raw = msgspec.Raw()
    reasoning_effort: msgspec.Raw = msgspec.Raw()
    extra_key: msgspec.Raw = msgspec.Raw()
    lora_path: msgspec.Raw = msgspec.Raw()


_BODY: Final = msgspec.json.Decoder(_Body)
_ODD: Final = tuple(field for field in _Body.__struct_fields__[5:])
_MEDIA: Final = (b'"image_url"', b'"input_audio"', b'"audio_url"', b'"video_url"', b'"input_image"')
"""Parts of messages that aren't only tokens."""


class Reading(NamedTuple):
    """A body as it is tokenised: its pieces' chained digests and sizes in bytes (messages; or all of it),
    and the question."""

    digests: list[int]
    sizes: list[int]
    root: int
    prompt: Prompt


class PromptTokens:
    """Asks for what it doesn't know, once for all who want the same, and remembers it by beginnings.

    A request waits within its `patience`, and only for as much as matters: a conversation that goes on is
    known but for its last message. Whatever goes wrong, there are just no blocks.
    """

    def __init__(self, names: KvNames, tokenise: Tokenise, patience: Patience) -> None:
        self._names = names
        self._tokenise = tokenise
        self._patience = patience
        self._memo = TokenMemo()
        self._flights: dict[int, asyncio.Task[Sequence[int]]] = {}
        self._failures = 0
        self._resting_until = 0.0

    async def blocks_of(self, body: bytes) -> Sequence[int]:
        """As many of its blocks as are known in time, root first; none where that is too little of it."""
        names = self._names
        if not names.block_tokens or len(body) > _MOST_BODY_BYTES:
            return ()
        reading = read(body, names)
        if reading is None:
            return ()
        if reading.prompt.ids is not None:
            return await _chained(reading.prompt.ids, names.block_tokens, reading.root)
        known = self._memo.find(reading.digests)
        rest_bytes = sum(reading.sizes[known.messages :])
        if not rest_bytes:
            return known.blocks
        flight = self._flight(reading, body)
        if flight is not None and rest_bytes > _SMALL_BYTES:
            try:
                async with asyncio.timeout(self._patience(reading.prompt.model, rest_bytes)):
                    return await asyncio.shield(flight) or known.blocks
            except TimeoutError:
                self._failed()
        return known.blocks if 2 * rest_bytes < sum(reading.sizes) else ()

    async def aclose(self) -> None:
        """Nobody asks any more."""
        for flight in self._flights.values():
            flight.cancel()
        await asyncio.gather(*self._flights.values(), return_exceptions=True)

    def _flight(self, reading: Reading, body: bytes) -> asyncio.Task[Sequence[int]] | None:
        key = reading.digests[-1]
        flight = self._flights.get(key)
        if flight is not None:
            return flight
        if len(self._flights) >= _MOST_AT_ONCE or time.monotonic() < self._resting_until:
            return None
        if any(one in body for one in _MEDIA):
            return None
        flight = asyncio.get_running_loop().create_task(self._learn(reading))
        self._flights[key] = flight
        flight.add_done_callback(lambda _: self._flights.pop(key, None))
        return flight

    async def _learn(self, reading: Reading) -> Sequence[int]:
        try:
            blocks = await self._asked(reading)
        except (EngineError, TimeoutError):
            blocks = None
        except Exception as bug:  # noqa: BLE001  a request without tokens is better than none
            told = {"message": "tokens of a prompt", "exception": bug}
            asyncio.get_running_loop().call_exception_handler(told)
            blocks = None
        if blocks is None:
            self._failed()
            return ()
        self._failures = 0
        self._memo.learn(reading.digests, blocks)
        return blocks

    async def _asked(self, reading: Reading) -> Sequence[int] | None:
        answer = await self._tokenise(reading.prompt)
        if answer is None:
            return None
        dialect, body = answer
        size = self._names.block_tokens
        return await aside(len(body), _read_blocks, dialect, body, size, reading.root)

    def _failed(self) -> None:
        self._failures += 1
        if self._failures >= _FAILURES:
            self._failures = 0
            self._resting_until = time.monotonic() + _REST_S


def read(body: bytes, names: KvNames) -> Reading | None:
    """None where its tokens can't be asked for."""
    asked = _asked_of(body)
    if asked is None:
        return None
    prompt, pieces, tools = asked
    root = names.asked_root(prompt.model, prompt.salt)
    # Where another process gives the names, the unit may change: what was in the old one isn't found.
    parent = xxh3_64_intdigest(
        b"%b\0%b" % (prompt.model.encode(errors="replace"), tools), root ^ names.block_tokens
    )
    digests, sizes = [], []
    for piece in pieces:
        parent = xxh3_64_intdigest(bytes(piece), parent)
        digests.append(parent)
        sizes.append(len(bytes(piece)))
    return Reading(digests, sizes, root, prompt)


def prompt_of(body: bytes) -> Prompt | None:
    """The question for a body's tokens; None where there is none. May be asked in a thread."""
    asked = _asked_of(body)
    return None if asked is None else asked[0]


def _asked_of(body: bytes) -> tuple[Prompt, Sequence[bytes | msgspec.Raw], bytes] | None:
    """The question, what the prompt is made of, and its tools."""
    try:
        fields = _BODY.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    pieces: Sequence[bytes | msgspec.Raw]
    model, salt = fields.model, fields.cache_salt or ""
    if fields.messages and fields.prompt is None:
        pieces = fields.messages
        # Raw JSON goes as it came, so that a long prompt is neither read nor written here.
        prompt = Prompt(
            model=model,
            messages=cast("Any", fields.messages),
            tools=cast("Any", fields.tools) if fields.tools else None,
            salt=salt,
        )
    elif isinstance(fields.prompt, str) and not fields.messages:
        pieces = (fields.prompt.encode(errors="replace"),)
        prompt = Prompt(model=model, text=fields.prompt, salt=salt)
    elif isinstance(fields.prompt, list) and fields.prompt and not fields.messages:
        pieces = ()
        prompt = Prompt(model=model, ids=fields.prompt, salt=salt)
    else:
        return None
    if any(getattr(fields, name) for name in _ODD):
        return None
    return prompt, pieces, bytes(fields.tools)


async def _chained(ids: Sequence[int], block_tokens: int, root: int) -> Sequence[int]:
    if min(ids) < 0 or max(ids) >= 2**32:
        return ()
    return await aside(4 * len(ids), token_blocks, ids, block_tokens, root)


def _read_blocks(
    dialect: Dialect, body: bytes, block_tokens: int, root: int
) -> Sequence[int] | None:
    tokens = dialect.read_tokens(body)
    if tokens is None or tokens.ids is None:
        return None
    return token_blocks(tokens.ids, block_tokens, root)
