"""What was wrong, by the key as it stands in the file."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, cast, get_args, get_type_hints

import msgspec

from preheat.config.tree import NAMED, Section, Settings, fields_of


def explained(message: str, tree: Mapping[str, Any]) -> str:
    """The message of msgspec with the key in front, as it stands in the file."""
    what, _, where = message.partition(" - at `$")
    key = where.rstrip("`").lstrip(".")
    table = key.partition("[...]")[0]
    section = NAMED.get(table) if "[...]" in key else None
    if section is not None:
        key = key.replace("[...]", f".{_wrong_entry(tree[table], section)}", 1)
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown is not None:
        names = [name for name, _, _ in fields_of(section or _section_of(key))]
        known = ", ".join(names)
        if not key:
            known = known.replace("fallback_message", "engines.fallback_message")
        prefix = f"{key}." if key else ""
        near = difflib.get_close_matches(unknown[1], names, n=1)
        guess = f"did you mean {near[0]}? Known here: " if near else "known here: "
        return f"{prefix}{unknown[1]}: unknown key; {guess}{known}"
    if what.startswith("Invalid enum value"):
        above, _, field = key.rpartition(".")
        field, _, is_one_of_several = field.partition("[")
        hint = get_type_hints(section or _section_of(above))[field]
        words = get_args(get_args(hint)[0] if is_one_of_several else hint)
        return (
            f"{key}: expected {' or '.join(words)}, got {what.removeprefix('Invalid enum value ')}"
        )
    return f"{key}: {what[:1].lower()}{what[1:]}"


def _wrong_entry(entries: Mapping[str, Any], section: type[Section]) -> str:
    """The entry of a table that doesn't fit: msgspec doesn't tell which one it means."""
    return next(name for name, entry in entries.items() if not _fits(entry, section))


def _fits(entry: Any, section: type[Section]) -> bool:
    try:
        msgspec.convert(entry, section)
    except msgspec.ValidationError:
        return False
    return True


def _section_of(key: str) -> type[Section]:
    section: Any = Settings
    for word in filter(None, key.split(".")):
        section = type(next(default for name, _, default in fields_of(section) if name == word))
    return cast("type[Section]", section)
