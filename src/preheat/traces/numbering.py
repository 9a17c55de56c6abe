"""Small numbers for whatever names a block or a key: from 0, in order of first appearance."""

from collections.abc import Hashable, Iterable
from hashlib import blake2b
from typing import Final

import msgspec

CHUNK_BYTES: Final = 512
"""As in `core.blocks`, where it is the gateway's block."""

BYTES_PER_TOKEN: Final = 4
CHUNK_TOKENS: Final = CHUNK_BYTES // BYTES_PER_TOKEN
TEXT_RULE: Final = f"Texts: a token is {BYTES_PER_TOKEN} bytes, a block {CHUNK_BYTES} bytes ({CHUNK_TOKENS} tokens)."

_DIGEST_BYTES: Final = 16


class Numbering:
    """Numbers names. Holds digests or numbers, never text."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, name: Hashable) -> int:
        """The name's number."""
        return self._numbers.setdefault(name, len(self._numbers))

    def of_text(self, *texts: bytes) -> int:
        """The number of these texts together."""
        digest = blake2b(digest_size=_DIGEST_BYTES)
        for text in texts:
            digest.update(len(text).to_bytes(8, "little") + text)
        return self.of(digest.digest())

    def blocks(self, text: bytes, space: bytes = b"") -> tuple[int, ...]:
        """Chained numbers of a text's blocks; the last may be partial, but has at least a token.

        Texts of different spaces never share one.

        >>> number = Numbering()
        >>> number.blocks(b"a" * 1100), number.blocks(b"a" * 1024 + b"b" * 600)
        ((0, 1, 2), (0, 1, 3, 4))
        """
        running = blake2b(len(space).to_bytes(8, "little") + space, digest_size=_DIGEST_BYTES)
        numbers = []
        for start in range(0, len(text) - BYTES_PER_TOKEN + 1, CHUNK_BYTES):
            running.update(text[start : start + CHUNK_BYTES])
            numbers.append(self.of(running.digest()))
        return tuple(numbers)


def tokens_of(text: bytes) -> int:
    """By the text rule."""
    return len(text) // BYTES_PER_TOKEN


class Ratio(msgspec.Struct, frozen=True):
    """How many tokens a prompt's bytes are, and whether anybody counted them."""

    per_byte: float
    is_counted: bool

    @property
    def block_tokens(self) -> int:
        """Of a block of bytes."""
        return max(1, round(CHUNK_BYTES * self.per_byte))

    @property
    def rule(self) -> str:
        """As a sentence, for `Trace.rules`."""
        whence = (
            "from the rows whose usage is known; the others get as many tokens as their bytes say"
            if self.is_counted
            else f"{BYTES_PER_TOKEN} bytes each: no row says its usage"
        )
        return f"{CHUNK_BYTES} bytes of prompt are {self.block_tokens} tokens here ({whence})."


def ratio_of(known: Iterable[tuple[int, int]]) -> Ratio:
    """The mean of prompts whose tokens and bytes are known and above 0; else the text rule's."""
    pairs = [(tokens, size) for tokens, size in known if tokens > 0 and size > 0]
    if not pairs:
        return Ratio(1 / BYTES_PER_TOKEN, is_counted=False)
    tokens, size = map(sum, zip(*pairs, strict=True))
    return Ratio(tokens / size, is_counted=True)
