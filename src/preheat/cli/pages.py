"""A report as a page on a disk, for every command that writes one."""

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

    try:
        path.write_bytes(page(document))
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror}") from None
