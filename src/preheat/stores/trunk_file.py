"""The trunks' file: whole or not at all, for its owner only, encrypted on request.

One header byte says how the rest is kept: plain with a checksum, or sealed (XChaCha20-Poly1305 with a
random nonce of 192 bits, by libsodium through PyNaCl, the extra `encrypt`).
"""

import contextlib
import fcntl
import os
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from preheat.errors import ConfigError, StoreError

_PLAIN: Final = b"preheat trunks 1 plain\n"
_SEALED: Final = b"preheat trunks 1 sealed\n"
_SUM_BYTES: Final = 16
_MOST_BYTES: Final = 2**30


class Row(msgspec.Struct, array_like=True):
    """One message of a trunk. `parent` is the id of the one before it, or empty; `session` the last
    that began with it. `heat` counts its sessions, older ones for less, and is that of `seen_at`."""

    tenant: str
    namespace: str
    model: str
    id: bytes
    parent: bytes
    text: bytes
    sessions: int
    session: int
    seen_at: float
    tags: list[str]
    heat: float = 0.0


class Kept(msgspec.Struct, array_like=True):
    """What is in the file: rows, parents first, and which invalidations are applied to them, as the count's
    generation and number (`core.types.Epoch`)."""

    rows: list[Row] = []
    generation: str = ""
    number: int = 0


_ENCODE: Final = msgspec.msgpack.Encoder().encode
_KEPT: Final = msgspec.msgpack.Decoder(Kept)


class TrunkFile:
    """`secret` is any that lasts; empty: the file isn't encrypted. `on_damage` hears why a file was
    set aside, and must not raise. Of several processes one has it (`take`); all may read."""

    def __init__(
        self, path: Path, *, secret: bytes = b"", on_damage: Callable[[str], None] = lambda _: None
    ) -> None:
        """Raises ConfigError where the library for a secret isn't installed."""
        self._path = path
        self._aside = path.with_name(f"{path.name}.damaged")
        self._box = _box(secret) if secret else None
        self._on_damage = on_damage
        self._lock: int | None = None

    def take(self) -> bool:
        """Have it for as long as this process lives, or until `release`; False where another one has it, or
        the folder can't be written to."""
        if self._lock is not None:
            return True
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    @property
    def is_ours(self) -> bool:
        """Whether this process has it."""
        return self._lock is not None

    def release(self) -> None:
        """Let another process have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self) -> Kept:
        """What is in it; nothing where there is no file, or a damaged one, which is set aside. Raises ConfigError for one that is sealed, without a secret, or that can't be opened."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return Kept()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from None
        if data.startswith(_SEALED) and self._box is None:
            raise ConfigError(
                f"{self._path} is encrypted: give its secret, or remove the file (what is warmed is "
                "then learned anew)"
            )
        try:
            return _KEPT.decode(self._opened(data))
        except _DamagedError as error:
            why = str(error)
        except (ValueError, RecursionError):
            why = "its rows can't be read"
        with contextlib.suppress(OSError):
            self._path.replace(self._aside)
        self._on_damage(why)
        return Kept()

    def write(self, kept: Kept, *, erasing: bool = False) -> None:
        """Put this in the place of what was there. Raises StoreError; where something is being
        erased, the old file is removed first then."""
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.draft")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._closed(_ENCODE(kept)))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            if erasing:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)
            raise StoreError(f"{self._path}: {error.strerror}", kind="disk") from error

    def remove_damaged(self) -> None:
        """What was set aside is text, too."""
        with contextlib.suppress(OSError):
            self._aside.unlink(missing_ok=True)

    def _closed(self, body: bytes) -> bytes:
        if self._box is None:
            return _PLAIN + _sum(body) + body
        return _SEALED + bytes(self._box.encrypt(body, _SEALED))

    def _opened(self, data: bytes) -> bytes:
        if data.startswith(_SEALED):
            assert self._box is not None
            try:
                return bytes(self._box.decrypt(data[len(_SEALED) :], _SEALED))
            except (ValueError, import_module("nacl.exceptions").CryptoError):
                raise _DamagedError("it is damaged, or sealed with another secret") from None
        if not data.startswith(_PLAIN):
            raise _DamagedError("it has no beginning that is known")
        body = data[len(_PLAIN) + _SUM_BYTES :]
        if data[len(_PLAIN) : len(_PLAIN) + _SUM_BYTES] != _sum(body):
            raise _DamagedError("its checksum is another")
        return body


class _DamagedError(Exception):
    """It isn't what was written."""


def _sum(body: bytes) -> bytes:
    return blake2b(body, digest_size=_SUM_BYTES).digest()


def _box(secret: bytes) -> Any:
    try:
        aead = import_module("nacl.secret").Aead
    except ImportError:
        raise ConfigError(
            "trunks can't be encrypted: run pip install 'preheat[encrypt]', or give no secret"
        ) from None
    return aead(blake2b(secret, digest_size=32, person=b"preheat trunks").digest())
