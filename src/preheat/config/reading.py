"""Defaults, the file, the environment and the command line become one tree, checked as a whole."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from preheat.config.checks import check_finite, check_together
from preheat.config.explaining import explained
from preheat.config.tree import NAMED, Settings, fields_of
from preheat.errors import ConfigError

_PREFIX: Final = "PREHEAT__"


def load(
    path: Path | None, environment: Mapping[str, str], overrides: Mapping[str, Any]
) -> Settings:
    """Defaults, then the file, then PREHEAT__SECTION__KEY, then the command line's options."""
    tree = _read(path) if path is not None else {}
    for words, value in _from_environment(environment):
        _put(tree, words, value)
    for dotted, value in overrides.items():
        words = dotted.split(".")
        _put(tree, words, value)
        if words[0] == "engines" and isinstance(tree["engines"], dict):
            # What the command line names comes first: it answers for every model not configured.
            name = _same_key(tree["engines"], words[1])
            tree["engines"] = {name: tree["engines"][name], **tree["engines"]}
    return check(tree)


def check(tree: dict[str, Any]) -> Settings:
    """The tree as settings. Raises ConfigError naming the key and what was expected."""
    tree = dict(tree)
    engines = tree.get("engines")
    if isinstance(engines, dict) and isinstance(engines.get("fallback_message"), str):
        tree["fallback_message"] = engines["fallback_message"]
        tree["engines"] = {k: v for k, v in engines.items() if k != "fallback_message"}
    elif "fallback_message" in tree:
        raise ConfigError("fallback_message: unknown key; it is engines.fallback_message")
    check_finite(tree, "")
    try:
        settings = msgspec.convert(tree, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(explained(str(error), tree)) from None
    check_together(settings)
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} isn't valid TOML: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[list[str], Any]]:
    for name in sorted(environment):
        if name.startswith(_PREFIX):
            yield name.removeprefix(_PREFIX).lower().split("__"), _parsed(environment[name])
        elif name.startswith("PREHEAT_"):
            _check_meant(name)


def _check_meant(name: str) -> None:
    """Raise ConfigError for a variable that would name a setting but for its single underscores."""
    words = name.removeprefix("PREHEAT_").lower()
    for section, _, default in fields_of(Settings):
        if not words.startswith(f"{section}_"):
            continue
        rest = words.removeprefix(f"{section}_")
        kind = NAMED.get(section) or type(default)
        for field, _, _ in fields_of(kind):
            entry = rest.removesuffix(f"_{field}") if section in NAMED else ""
            if rest == (f"{entry}_{field}" if entry else field):
                path = "__".join(filter(None, (section, entry, field))).upper()
                raise ConfigError(
                    f"{name}: no setting is read from this; sections are parted by two underscores: "
                    f"{_PREFIX}{path}"
                )


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(tree: dict[str, Any], words: list[str], value: Any) -> None:
    for word in words[:-1]:
        tree = tree.setdefault(_same_key(tree, word), {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{'.'.join(words)}: {word} isn't a section")
    tree[_same_key(tree, words[-1])] = value


def _same_key(tree: Mapping[str, Any], word: str) -> str:
    """Names in the environment have no case: the file's spelling wins."""
    return next((key for key in tree if key.lower() == word.lower()), word)
