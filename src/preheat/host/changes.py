"""Which settings differ, and what it takes to apply them."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from preheat.config import OF_EMBEDDED, EngineSettings, Settings
from preheat.errors import ConfigError
from preheat.host.embedded import DEFAULT

_IN_PLACE: Final = frozenset({"engines", "models", "namespaces", "fallback_message", "exact"})
_NOT_IN_PLACE: Final = "exact.secret_env"
_FIXED: Final = (
    ("listen", "address"),
    ("listen", "workers"),
    ("admin", "listen"),
    ("l2",),
    ("log",),
)
"""What the supervisor itself holds: only a new start changes it."""


def check_reload(old: Settings, new: Settings) -> None:
    """Raise ConfigError where the running workers can't go on with the new settings."""
    check_restart(old, new)
    keys = [
        key
        for key in differing(old, new)
        if key.partition(".")[0] not in _IN_PLACE or key == _NOT_IN_PLACE
    ]
    if keys:
        raise ConfigError(
            f"{', '.join(keys)}: can't change in place; send SIGUSR2 for a rolling restart"
        )


def check_restart(old: Settings, new: Settings) -> None:
    """Raise ConfigError where even new workers can't have the new settings."""
    keys = [".".join(path) for path in _FIXED if _at(old, path) != _at(new, path)]
    was, wanted = _embedded(old), _embedded(new)
    keys += [
        f"engines.{name}" for name in sorted(was | wanted) if was.get(name) != wanted.get(name)
    ]
    if keys:
        raise ConfigError(f"{', '.join(keys)}: only a new start changes this")


def applied_by(section: str, field: str) -> str:
    """What applies a change of this setting: SIGHUP, else SIGUSR2, else a new start. All settings
    of an embedded engine need that one."""
    path = (section, field)
    is_embedded = section == "engines" and field in {"kind", *OF_EMBEDDED}
    if is_embedded or any(path[: len(fixed)] == fixed for fixed in _FIXED):
        return "start"
    if section in _IN_PLACE and ".".join(path) != _NOT_IN_PLACE:
        return "SIGHUP"
    return "SIGUSR2"


def differing(old: Settings, new: Settings) -> Iterator[str]:
    """The keys whose values differ, by section and, where it has a fixed form, setting."""
    for section in old.__struct_fields__:
        was, wanted = getattr(old, section), getattr(new, section)
        if was == wanted:
            continue
        if not isinstance(was, msgspec.Struct):
            yield section
            continue
        for field in was.__struct_fields__:
            if getattr(was, field) != getattr(wanted, field):
                yield f"{section}.{field}"


def _at(settings: Settings, path: tuple[str, ...]) -> Any:
    found: Any = settings
    for word in path:
        found = getattr(found, word)
    return found


def _embedded(settings: Settings) -> dict[str, EngineSettings]:
    """The engines that are processes of ours."""
    engines = settings.engines or {DEFAULT: EngineSettings(kind="embedded")}
    return {name: one for name, one in engines.items() if one.kind == "embedded"}
