"""What single values mean: addresses, and how many answers are kept."""

import ipaddress
import re
from typing import Final

from preheat.config.tree import EngineSettings
from preheat.core.controller import MAX_VARIANTS
from preheat.errors import ConfigError

_PORT: Final = re.compile(r"[0-9]{1,5}")


def address_of(text: str, key: str) -> tuple[str, int]:
    """Host and port. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not _PORT.fullmatch(port) or int(port) > 65_535:
        alone = text.removeprefix(":")
        hint = (
            f"; port {alone} of this machine is 127.0.0.1:{alone}" if _PORT.fullmatch(alone) else ""
        )
        raise ConfigError(f"{key}: expected host:port, got {text!r}{hint}")
    return host, int(port)


def upstreams_of(engine: EngineSettings) -> tuple[str, ...]:
    """The addresses of a group."""
    return engine.urls or ((engine.url,) if engine.url else ())


def variants_of(text: str, key: str) -> int:
    """How many answers are kept for a sampled request. Raises ConfigError."""
    if text in {"bypass", "reuse"}:
        return int(text == "reuse")
    match = re.fullmatch(r"variants\((\d{1,4})\)", text)
    if match is None or not 1 <= int(match[1]) <= MAX_VARIANTS:
        raise ConfigError(
            f'{key}: expected "bypass", "reuse" or "variants(k)" with k from 1 to {MAX_VARIANTS}, '
            f"got {text!r}"
        )
    return int(match[1])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
