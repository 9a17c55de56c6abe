"""Changing one field of a JSON body and not a byte of the rest.

A body that is decoded and encoded again can lose what the engine's own prompt cache hangs on:
key order, number spelling, escapes.
"""

import json
from collections.abc import Callable
from typing import Any, Final

_SPACE: Final = " \t\r\n"
_VALUE: Final = json.JSONDecoder(parse_int=str, parse_float=str)


def insert_field(body: bytes, name: str, value: Any) -> bytes:
    """The object with one more field, which it must not have yet.

    >>> insert_field(b'{"a": 1}', "b", True)
    b'{"b":true,"a": 1}'
    """
    head, brace, rest = body.partition(b"{")
    comma = b"" if rest.lstrip().startswith(b"}") else b","
    field = json.dumps({name: value}, separators=(",", ":")).encode()[1:-1]
    return b"".join((head, brace, field, comma, rest))


def change_field(body: bytes, name: str, change: Callable[[Any], Any]) -> bytes:
    """The object with this field's value changed in place; unchanged where it has none.

    >>> change_field(b'{"a": 1,  "b":2}', "a", lambda value: value + 1)
    b'{"a": 2,  "b":2}'
    """
    text = body.decode()
    position = _skip(text, text.index("{") + 1)
    while text[position] == '"':
        found, position = _VALUE.raw_decode(text, position)
        start = _skip(text, _skip(text, position) + 1)  # past the colon
        _, end = _VALUE.raw_decode(text, start)
        if found == name:
            changed = json.dumps(change(json.loads(text[start:end])), separators=(",", ":"))
            return (text[:start] + changed + text[end:]).encode()
        position = _skip(text, end)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return body


def _skip(text: str, position: int) -> int:
    while text[position] in _SPACE:
        position += 1
    return position
