"""What the name of a slot file says: the model, whose it is, which prefix, how long, its check sum.

All that is known of a file stands there, so a new process knows what an old one left, and nothing
beside the files can be lost or disagree with them. Prefix, tenant and session are digests under a
secret, since a server may log the names.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from preheat.core.slot_desk import Holding
from preheat.engines.dialects.llamacpp import slot_file

_CHAIN: Final = 12
_WHO: Final = 6
_COUNT: Final = 4
MOST_TOKENS: Final = 2 ** (8 * _COUNT) - 1
"""What a name can say."""
_CHECK: Final = 8
_CUTS: Final = (_CHAIN, _WHO, _WHO, _COUNT, _COUNT, _CHECK)
_NAME: Final = re.compile(rf"([0-9a-f]{{32}})-([0-9a-f]{{{2 * sum(_CUTS)}}})\.kv")


class Kept(msgspec.Struct, eq=False):
    """One file: the first `blocks` blocks of a prompt, as `chain` names them, and what followed, in
    `tokens` tokens."""

    name: str
    chain: bytes
    tenant: bytes
    session: bytes
    blocks: int
    tokens: int
    check: bytes
    size_bytes: int
    used_at: float
    is_checked: bool = False

    @property
    def is_over(self) -> bool:
        """Its session won't come back: the file's time says that it was never used."""
        return self.used_at == 0.0


class SlotNames:
    """The names of one model's files."""

    def __init__(self, identity: str, secret: bytes) -> None:
        self.identity = identity
        self._secret = secret

    def chain(self, tenant: str, blocks: Sequence[int]) -> bytes:
        """Names a prefix: its last block's id names all before it."""
        told = blocks[-1].to_bytes(8, "big") + len(blocks).to_bytes(_COUNT, "big") + tenant.encode()
        return self._digest(told, _CHAIN)

    def tenant(self, tenant: str) -> bytes:
        """Names a tenant."""
        return self._digest(b"t" + tenant.encode(), _WHO)

    def session(self, tenant: str, session: str) -> bytes:
        """Names a tenant's session; zeros where there is none."""
        if not session:
            return bytes(_WHO)
        return self._digest(b"s" + self.tenant(tenant) + session.encode(), _WHO)

    def make(self, holding: Holding, check: bytes, size_bytes: int, now: float) -> Kept:
        """The file that has this."""
        kept = Kept(
            "",
            self.chain(holding.tenant, holding.blocks),
            self.tenant(holding.tenant),
            self.session(holding.tenant, holding.session),
            len(holding.blocks),
            holding.tokens,
            check,
            size_bytes,
            now,
            is_checked=True,
        )
        counts = b"".join(count.to_bytes(_COUNT, "big") for count in (kept.blocks, kept.tokens))
        told = kept.chain + kept.tenant + kept.session + counts + check
        kept.name = slot_file(self.identity, told)
        return kept

    def read(self, name: str, size_bytes: int, used_at: float) -> Kept | None:
        """What a name says, of whatever model; None where it is no slot file's."""
        named = _NAME.fullmatch(name)
        if named is None:
            return None
        told, parts = bytes.fromhex(named[2]), []
        for size in _CUTS:
            parts.append(told[:size])
            told = told[size:]
        chain, tenant, session, blocks, tokens, check = parts
        counts = int.from_bytes(blocks, "big"), int.from_bytes(tokens, "big")
        return Kept(name, chain, tenant, session, *counts, check, size_bytes, used_at)

    def is_ours(self, kept: Kept) -> bool:
        """Whether it is a file of this model."""
        return kept.name.startswith(self.identity)

    def _digest(self, told: bytes, size: int) -> bytes:
        return hashlib.blake2b(told, digest_size=size, key=self._secret[:64]).digest()
