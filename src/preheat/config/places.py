"""Where things are on this machine: the environment, secrets, folders."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from preheat.config.tree import Settings
from preheat.errors import ConfigError

_SOCKET_PATH_BYTES: Final = 100


def secret_from(variable: str, key: str, environment: Mapping[str, str]) -> str:
    """A secret that the settings name. Raises ConfigError where it isn't there."""
    value = environment.get(variable, "").strip()
    if not value:
        raise ConfigError(f"{key}: the environment variable {variable} is empty or not set")
    return value


def cache_folder(settings: Settings, environment: Mapping[str, str]) -> Path:
    """Where L2's files and the secret are."""
    if settings.l2.path:
        return Path(settings.l2.path)
    home = environment.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else _home("l2.path") / ".cache") / "preheat"


def log_folder(settings: Settings, environment: Mapping[str, str]) -> Path:
    """Where the request log is."""
    if settings.log.path:
        return Path(settings.log.path)
    home = environment.get("XDG_STATE_HOME", "")
    return (Path(home) if home else _home("log.path") / ".local" / "state") / "preheat" / "log"


def _home(key: str) -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError(f"{key}: this user has no home folder; name a folder here") from None


def log_socket(settings: Settings, environment: Mapping[str, str]) -> Path:
    """Where the log process listens. Raises ConfigError for a path that no socket can have."""
    path = log_folder(settings, environment) / "log.sock"
    if len(str(path).encode()) > _SOCKET_PATH_BYTES:
        raise ConfigError(
            f"log.path: {path} is longer than the {_SOCKET_PATH_BYTES} bytes that a socket's path may "
            "have; choose a shorter folder"
        )
    return path


def environment() -> Mapping[str, str]:
    """The process's environment: the one place where it is read."""
    return os.environ
