"""A report as a page on a disk, for every command that writes one."""

import contextlib
from pathlib import Path

from preheat.errors import ConfigError


def check_page(path: Path) -> None:
    """Before the work: whether a page could be written there. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(f"--html {path}: it is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--html {path}: its folder doesn't exist")


def write_page(path: Path, document: bytes) -> None:
    """The page of a report that is encoded. Raises ConfigError where the disk won't take it."""
    from preheat.dashboard import page

    # Beside it first: a full disk leaves the page that was there before.
    new = path.with_name(f".{path.name}.new") if path.is_file() or not path.exists() else path
    try:
        new.write_bytes(page(document))
        if new != path:
            new.replace(path)
    except OSError as error:
        if new != path:
            with contextlib.suppress(OSError):
                new.unlink()
        raise ConfigError(f"--html {path}: {error.strerror}") from None
