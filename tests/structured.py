"""A strict parser of RFC 9651's lists of items with parameters, as Cache-Status is one."""

import re
from typing import Final

Bare = str | int | float | bool
Item = tuple[Bare, dict[str, Bare]]

_KEY: Final = re.compile(r"[a-z*][a-z0-9_.*-]*")
_NUMBER: Final = re.compile(r"-?(?:\d{1,12}\.\d{1,3}|\d{1,15})(?![\d.])")
_STRING: Final = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_TOKEN: Final = re.compile(r"[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]*")


def list_of(text: str) -> list[Item]:
    """The items of a field's value. Raises ValueError."""
    items = []
    at = 0
    while True:
        value, at = _bare(text, at)
        parameters: dict[str, Bare] = {}
        while text[at : at + 1] == ";":
            name, at = _take(_KEY, text, _blank(text, at + 1))
            parameters[name] = True
            if text[at : at + 1] == "=":
                parameters[name], at = _bare(text, at + 1)
        items.append((value, parameters))
        at = _blank(text, at)
        if at == len(text):
            return items
        if text[at] != ",":
            raise ValueError(f"at {at}: {text!r}")
        at = _blank(text, at + 1)


def _bare(text: str, at: int) -> tuple[Bare, int]:
    first = text[at : at + 1]
    if first == '"':
        string, at = _take(_STRING, text, at)
        return re.sub(r"\\(.)", r"\1", string[1:-1]), at
    if first == "?" and text[at + 1 : at + 2] in {"0", "1"}:
        return text[at + 1] == "1", at + 2
    if first == "-" or first.isdigit():
        number, at = _take(_NUMBER, text, at)
        return (float(number) if "." in number else int(number)), at
    return _take(_TOKEN, text, at)


def _take(pattern: re.Pattern[str], text: str, at: int) -> tuple[str, int]:
    match = pattern.match(text, at)
    if match is None:
        raise ValueError(f"at {at}: {text!r}")
    return match[0], match.end()


def _blank(text: str, at: int) -> int:
    while text[at : at + 1] == " ":
        at += 1
    return at
