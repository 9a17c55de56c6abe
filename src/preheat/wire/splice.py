"""Changing one field of a JSON body and not a byte of the rest.

A body that is decoded and encoded again can lose what the engine's own prompt cache hangs on:
key order, number spelling, escapes.
"""

import json
from collections.abc import Callable
from typing import Final

_SPACE: Final = " \t\r\n"
_VALUE: Final = json.JSONDecoder(parse_int=str, parse_float=str)


def insert_field(body: bytes, name: str, value: bytes) -> bytes:
    """The object with one more field, which it must not have yet.

    >>> insert_field(b'{"a": 1}', "b", b"true")
    b'{"b":true,"a": 1}'
    """
    head, brace, rest = body.partition(b"{")
    comma = b"" if rest.lstrip().startswith(b"}") else b","
    return b"".join((head, brace, json.dumps(name).encode(), b":", value, comma, rest))


def change_field(body: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """The object with the bytes of this field's value changed in place; unchanged without it.

    >>> change_field(b'{"a": 1,  "b":2}', "a", lambda value: value + b"0")
    b'{"a": 10,  "b":2}'
    """
    text = body.decode()
    position = _skip(text, text.index("{") + 1)
    while text[position] == '"':
        found, position = _VALUE.raw_decode(text, position)
        start = _skip(text, _skip(text, position) + 1)  # past the colon
        _, end = _VALUE.raw_decode(text, start)
        if found == name:
            changed = change(text[start:end].encode())
            return b"".join((text[:start].encode(), changed, text[end:].encode()))
        position = _skip(text, end)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return body


def set_field(value: bytes, name: str, field: bytes) -> bytes:
    """The object with this field, replaced or inserted; a null becomes an object.

    >>> set_field(b'{"a": false}', "a", b"true"), set_field(b"null", "a", b"true")
    (b'{"a": true}', b'{"a":true}')
    """
    if not value.startswith(b"{"):
        value = b"{}"
    if name in json.loads(value, parse_int=str, parse_float=str):
        return change_field(value, name, lambda _: field)
    return insert_field(value, name, field)


def _skip(text: str, position: int) -> int:
    while text[position] in _SPACE:
        position += 1
    return position
