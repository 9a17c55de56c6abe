"""The tree as a file. It holds no secret."""

import re
from typing import Any

import msgspec

from preheat.config.tree import NAMED, Choice, Section, Settings, fields_of


def to_toml(settings: Settings) -> str:
    """The whole tree as a file, every setting with its sentence. It holds no secret."""
    lines = ["# Preheat's settings. What is commented out is absent by default."]
    for name, _, _ in fields_of(Settings):
        value = getattr(settings, name)
        if name in NAMED:
            for entry, section in value.items():
                lines += ["", f"[{name}.{_toml_key(entry)}]", *_section_lines(section)]
            if not value:
                lines += ["", f"# # {(NAMED[name].__doc__ or '').strip()}", f"# [{name}.NAME]"]
                lines += [f"# {line}" for line in _section_lines(NAMED[name]())]
        elif isinstance(value, Section):
            lines += [
                "",
                f"# {(type(value).__doc__ or '').strip()}",
                f"[{name}]",
                *_section_lines(value),
            ]
        else:
            lines += ["", "[engines]", *_setting_lines(name, _sentence(Settings, name), value)]
    return "\n".join(lines) + "\n"


def _section_lines(section: Section) -> list[str]:
    lines: list[str] = []
    for name, sentence, _ in fields_of(type(section)):
        lines += _setting_lines(name, sentence, getattr(section, name))
    return lines


def _setting_lines(name: str, sentence: str, value: Any) -> list[str]:
    shown = f"# {name} =" if value is None else f"{name} = {_toml_value(value)}"
    return [f"# {sentence}", shown]


def _sentence(section: type[Section], name: str) -> str:
    return next(sentence for field, sentence, _ in fields_of(section) if field == name)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Choice):
        return f"{{ name = {_toml_value(value.name)}, options = {_toml_value(value.options)} }}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    # JSON's strings are TOML's, but for DEL.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
