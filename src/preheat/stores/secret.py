"""The secret that lies beside the files: made once, and for its owner only."""

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from preheat.errors import ConfigError

_BYTES: Final = 32


def secret_at(folder: Path) -> bytes:
    """The folder's secret; the first process that asks makes it. Raises ConfigError."""
    path = folder / "secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
        found = path.stat()
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; make the folder writable for this user, or set "
            "exact.secret_env"
        ) from error
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path}: others than its owner can read it, so it is no secret any more; remove it (what "
            "is stored becomes unreadable and is made anew)"
        )
    if len(secret) != _BYTES:
        raise ConfigError(f"{path}: expected {_BYTES} bytes, found {len(secret)}; remove it")
    return secret


def _make(path: Path) -> None:
    """Whole or not at all: a link fails if another process was faster, and then its secret counts."""
    draft = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(_BYTES))
        os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        os.close(descriptor)
        draft.unlink()
