"""A stored answer as bytes for L2, and back.

    version (1) | digest (16) | MessagePack of the entry

The digest is keyed BLAKE2b over the key and all that follows, so a torn, damaged, foreign or forged
value, or one that lies under another's key, is never taken for an answer. Times in it are
wall-clock, since a process's own clock means nothing to others.
"""

import hmac
from hashlib import blake2b
from typing import Final

import msgspec

from preheat.core.types import Check, Entry, Epoch, Key, Usage
from preheat.wire.openai import Answer, RefusedAnswer

_VERSION: Final = b"\x01"
_DIGEST_BYTES: Final = 16
_HEAD_BYTES: Final = 1 + _DIGEST_BYTES


class _Stored(msgspec.Struct, array_like=True, gc=False):
    """The form inside. New fields go to the end, with a default."""

    check: bytes
    tenant: str
    namespace: str
    model: str
    tags: tuple[str, ...]
    generation: str
    number: int
    asked_at: float
    stored_at: float
    ttl_s: float
    service_s: float
    usage: tuple[int, int, int] | None
    status: int
    parts: tuple[bytes, ...]


_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = msgspec.msgpack.Decoder(_Stored).decode


class Codec:
    """Entries to bytes and back, under one secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = blake2b(secret, digest_size=32, person=b"preheat-entry").digest()

    def encode(self, entry: Entry, ahead_s: float) -> bytes:
        """The bytes of an entry; `ahead_s` is how far the wall clock is ahead of the entry's."""
        usage, answer = entry.usage, entry.answer
        parts = (
            (answer.body, answer.cuts, answer.usage_tail)
            if isinstance(answer, Answer)
            else (answer.content_type, answer.body)
        )
        payload = _ENCODE(
            _Stored(
                entry.check,
                entry.tenant,
                entry.namespace,
                entry.model,
                entry.tags,
                entry.epoch.generation,
                entry.epoch.number,
                entry.asked_at + ahead_s,
                entry.stored_at + ahead_s,
                entry.ttl_s,
                entry.service_s,
                (usage.input_tokens, usage.output_tokens, usage.cached_tokens) if usage else None,
                entry.status,
                parts,
            )
        )
        return _VERSION + self._digest(entry.key, payload) + payload

    def decode(self, key: Key, raw: bytes, ahead_s: float, now: float) -> Entry:
        """The entry, on the clock of `now`. Raises ValueError for bytes that aren't one.

        A clock that was set back can't make an entry younger than new.
        """
        payload = raw[_HEAD_BYTES:]
        if raw[:1] != _VERSION or not hmac.compare_digest(
            raw[1:_HEAD_BYTES], self._digest(key, payload)
        ):
            raise ValueError("not an entry under this key and secret")
        stored = _DECODE(payload)
        parts = stored.parts
        answer = Answer(*parts) if stored.status == 200 else RefusedAnswer(*parts)
        return Entry(
            key=key,
            check=Check(stored.check),
            tenant=stored.tenant,
            namespace=stored.namespace,
            model=stored.model,
            tags=stored.tags,
            epoch=Epoch(stored.generation, stored.number),
            asked_at=min(stored.asked_at - ahead_s, now),
            stored_at=min(stored.stored_at - ahead_s, now),
            ttl_s=stored.ttl_s,
            service_s=stored.service_s,
            usage=Usage(*stored.usage) if stored.usage else None,
            size_bytes=answer.size_bytes,
            answer=answer,
            status=stored.status,
        )

    def _digest(self, key: Key, payload: bytes) -> bytes:
        digest = blake2b(key, digest_size=_DIGEST_BYTES, key=self._key)
        digest.update(payload)
        return digest.digest()
