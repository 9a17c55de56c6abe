"""Our own ids for blocks of tokens: each names its block with all before it.

They are computed from what an engine is told, or tells, never from its own hashes: so its seed, its
algorithm and its version don't matter.
"""

import hmac
import json
from collections.abc import Iterator, Sequence
from struct import iter_unpack, pack

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4


def chain_root(secret: bytes, model: str, salt: str = "", lora_name: str = "") -> int:
    """Where the chains of all prompts begin that may share KV. Who doesn't know the secret can't make
    two prompts look alike, or test a guessed one.

    >>> chain_root(b"secret", "m") == chain_root(b"secret", "m", "", "")
    True
    >>> len({chain_root(b"s", "m"), chain_root(b"s", "m", "a"), chain_root(b"s", "m", "", "a")})
    3
    """
    where = json.dumps([model, salt, lora_name]).encode()
    return int.from_bytes(hmac.digest(secret, b"tokens:" + where, "sha256")[:8], "little")


def token_blocks(tokens: Sequence[int], block_tokens: int, root: int) -> list[int]:
    """The ids of a prompt's whole blocks, 64 bits each: XXH3 of a block's tokens, seeded with the id
    before it. Token ids are below 2³².

    >>> short, longer = token_blocks([1, 2, 3, 4, 5], 2, 7), token_blocks([1, 2, 3, 4, 6, 7], 2, 7)
    >>> len(short), longer[:2] == short
    (2, True)
    """
    return list(chain(packed(tokens), block_tokens, root))


def packed(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes, `TOKEN_BYTES` each."""
    return pack(f"<{len(tokens)}I", *tokens)


def chain(text: bytes, block_tokens: int, parent: int) -> Iterator[int]:
    """The ids of the whole blocks of packed tokens."""
    size = block_tokens * TOKEN_BYTES
    for (block,) in iter_unpack(f"{size}s", text[: len(text) // size * size]):
        parent = xxh3_64_intdigest(block, parent)
        yield parent


def mixed(parent: int, extras: Sequence[str | bytes]) -> int:
    """The id a chain goes on from where something else than tokens counts, too (an image)."""
    for one in extras:
        parent = xxh3_64_intdigest(b"x" + (one.encode() if isinstance(one, str) else one), parent)
    return parent
