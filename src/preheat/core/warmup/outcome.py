"""What one warm-up came to: booked whether it was proven or not."""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Literal

import msgspec

from preheat.core.warmup.proof import Proof


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One object at one worker.

    `state` is how the warm-up itself ended: `busy` where no idle moment came in time. `tokens` of
    it are warm as far as is known, `computed_tokens` were computed for that, over `took_s` of the
    server's time; `waited_s` more went by for live requests. `proof` is None until somebody has
    looked. `object` names it: a digest, or an adapter's name.
    """

    kind: Literal["prefix", "adapter", "response"]
    worker: str
    object: str
    state: Literal["done", "busy", "failed"]
    why: str = ""
    tenant: str = ""
    tokens: int = 0
    computed_tokens: int = 0
    chunks: int = 0
    longest_chunk_s: float = 0.0
    took_s: float = 0.0
    waited_s: float = 0.0
    slot: int | None = None
    proof: Proof | None = None


def digest_of(parts: Iterable[bytes]) -> str:
    """A name for a prefix: 32 hex digits over its text or ids and all that sets it apart. Nobody can
    read the prefix in it, but who has the text can tell that it is the same.

    >>> digest_of([b"ab", b"c"]) == digest_of([b"a", b"bc"])
    False
    """
    whole = blake2b(digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()
