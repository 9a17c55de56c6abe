"""The secret that lies beside the files: made once, and for its owner only."""

import contextlib
import os
import pwd
import secrets
import stat
from pathlib import Path
from typing import Final

from preheat.errors import ConfigError

_BYTES: Final = 32
_ELSEWHERE: Final = (
    "set l2.path to a folder of this user's own, or exact.secret_env to the name of a variable with "
    "the secret"
)


def secret_at(folder: Path, known: bytes = b"") -> bytes:
    """The folder's secret; the first process that asks makes it, of `known` where that isn't
    empty. Raises ConfigError."""
    path = folder / "secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make(path, known or secrets.token_bytes(_BYTES))
        found = path.stat()
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or type(error).__name__}{_owner(path)}; {_ELSEWHERE}"
        ) from error
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path}: it is another user's{_owner(path)}; {_ELSEWHERE}")
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{path}: others than its owner can read it, so it is no secret any more; remove it (what "
            "is stored becomes unreadable and is made anew)"
        )
    if len(secret) != _BYTES:
        raise ConfigError(f"{path}: expected {_BYTES} bytes, found {len(secret)}; remove it")
    return secret


def _owner(path: Path) -> str:
    """Whose the nearest thing there is, as far as it can be seen, where it isn't ours."""
    for one in (path, *path.parents):
        try:
            owner = one.stat().st_uid
        except OSError:
            continue
        if owner == os.geteuid():
            return ""
        try:
            return f" ({one} belongs to {pwd.getpwuid(owner).pw_name})"
        except KeyError:
            return f" ({one} belongs to user {owner})"
    return ""


def _make(path: Path, secret: bytes) -> None:
    """Whole or not at all: a link fails if another process was faster, and then its secret counts."""
    draft = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secret)
        os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        os.close(descriptor)
        draft.unlink()
