"""Which prompts begin alike: chained hashes of a prompt's text, block by block.

Equal hashes at one place mean equal prompts up to there. `prompt_of` makes those that are written
down: nobody without the secret can test a guessed text against them, and tenants, paths and models
never share one. `prefix_of` makes those that only the router sees, four times as fast: never write
them down.
"""

import hmac
import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_intdigest

BLOCK_BYTES: Final = 512
BLOCK_UNIT: Final = "text-512"
"""What a block is: so many bytes of the prompt's JSON. About 128 tokens of English."""

HASH_BYTES: Final = 8
_MOST_BLOCKS: Final = 1_024
"""130,000 tokens of English. What is beyond them isn't hashed: it would hold up others."""

_MOST_BODY_BYTES: Final = 4_194_304
"""Even to find the text in a longer body takes too long: it has no hashes."""


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """What a log may know of a body's text.

    `blocks` are packed hashes of 64 bits, little end first, of the whole blocks; `prompt_bytes`
    is the length of all the text; of a body that is too long to be read, of the body.
    """

    blocks: bytes = b""
    prompt_bytes: int = 0
    max_tokens: int | None = None


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """What a router may know of a body: who is asked, and the chained ids of its text's blocks."""

    model: str = ""
    blocks: Sequence[int] = ()
    prompt_bytes: int = 0


class _Body(msgspec.Struct):
    """The fields that are text to the model, as they stand in the body."""

    model: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()


_BODY: Final = msgspec.json.Decoder(_Body)
_MESSAGES: Final = msgspec.json.Decoder(list[msgspec.Raw])


def prompt_of(body: bytes, secret: bytes, where: Sequence[str]) -> Prompt:
    """The prompt's hashes and lengths. `where` is what separates prompts that share nothing:
    tenant, path, model. 50 µs for 32 KB, 6 ms for the longest body that is read.

    >>> short = prompt_of(b'{"prompt": "%b"}' % (b"x" * 1500), b"secret", ["t"])
    >>> longer = prompt_of(b'{"prompt": "%b"}' % (b"x" * 1500 + b"y" * 600), b"secret", ["t"])
    >>> len(short.blocks) // 8, len(longer.blocks) // 8, longer.blocks.startswith(short.blocks)
    (2, 4, True)
    """
    if len(body) > _MOST_BODY_BYTES:
        return Prompt(prompt_bytes=len(body))
    try:
        fields = _BODY.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Prompt()
    text = _text(fields)
    key = hmac.digest(secret, b"blocks:" + json.dumps(list(where)).encode(), "sha256")
    return Prompt(_hashes(text, sha256(key)), len(text), _limit(fields))


def prefix_of(body: bytes, salt: bytes) -> Prefix:
    """The prompt's ids for routing: those of one tenant (`salt`) and model, chat or not. 15 µs for
    32 KB.

    >>> short = prefix_of(b'{"model": "m", "prompt": "%b"}' % (b"x" * 1500), b"")
    >>> longer = prefix_of(b'{"model": "m", "prompt": "%b"}' % (b"x" * 1500 + b"y" * 600), b"")
    >>> short.model, len(short.blocks), len(longer.blocks), longer.blocks[:2] == short.blocks
    ('m', 2, 4, True)
    """
    if len(body) > _MOST_BODY_BYTES:
        return Prefix(prompt_bytes=len(body))
    try:
        fields = _BODY.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Prefix(prompt_bytes=len(body))
    text = _text(fields)
    model = bytes(fields.model)
    kind = b"m" if fields.messages else b"p"
    return Prefix(
        model[1:-1].decode(errors="replace"),
        _chain(text, xxh3_64_intdigest(b"%b\0%b\0%b" % (salt, kind, model))),
        len(text),
    )


def block_ends(body: bytes, most: int) -> list[int]:
    """How many blocks of `prefix_of` are whole within a chat's first message, its first two, … of at most
    so many; none where it can't be read.

    >>> block_ends(b'{"messages": [{"content": "%b"}, {"content": "%b"}]}' % (b"x" * 600, b"y" * 500), 9)
    [1, 2]
    """
    try:
        fields = _BODY.decode(body)
        messages = _MESSAGES.decode(fields.messages)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return []
    text = _text(fields)
    end = len(text) - len(bytes(fields.messages)[:-1].rstrip())
    ends = []
    for message in messages[:most]:
        end = text.index(bytes(message), end) + len(bytes(message))
        ends.append(min(end // BLOCK_BYTES, _MOST_BLOCKS))
    return ends


def _chain(text: bytes, parent: int) -> list[int]:
    """Each block's id is its hash under its parent's, so it names all before it, too."""
    blocks = []
    for end in range(BLOCK_BYTES, min(len(text), _MOST_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        parent = xxh3_64_intdigest(text[end - BLOCK_BYTES : end], parent)
        blocks.append(parent)
    return blocks


def _text(fields: _Body) -> bytes:
    """What stands before the conversation in every engine's template, then the conversation.

    The last one loses its closing bracket or quote, so that a longer one extends it.
    """
    ahead = [bytes(raw) for raw in (fields.tools, fields.instructions, fields.system) if raw]
    last = bytes(fields.messages or fields.prompt or fields.input)[:-1].rstrip()
    return b"\0".join((*ahead, last)) if ahead else last


def _hashes(text: bytes, running: Any) -> bytes:
    """A running hash, read after each block: eight bytes don't let anybody go on from there."""
    update, digest = running.update, running.digest
    hashes = []
    for end in range(BLOCK_BYTES, min(len(text), _MOST_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        update(text[end - BLOCK_BYTES : end])
        hashes.append(digest()[:HASH_BYTES])
    return b"".join(hashes)


def _limit(fields: _Body) -> int | None:
    for raw in (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens):
        spelled = bytes(raw)
        if spelled.isdigit() and len(spelled) < 10:
            return int(spelled)
    return None
