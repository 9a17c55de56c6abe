"""Anthropic's messages: which parts a prompt has, and marking those that a cached prefix ends with."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from preheat.core.breakpoints import Kind, Part
from preheat.wire.splice import change_field, insert_field

_MARK: Final = b'{"type":"ephemeral"}'
_UNMARKABLE: Final = re.compile(rb'"type"\s*:\s*"(?:redacted_)?thinking"|"text"\s*:\s*""')
"""Blocks that the API refuses a mark on."""
_CHANGES: Final = re.compile(
    rb"\d{4}-\d\d-\d\d"  # a date
    rb"|\b\d{1,2}:\d\d\b"  # a time of day
    rb"|\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    rb"|\b1[5-9]\d{8}(?:\d{3})?\b",  # a Unix time of this century, in seconds or milliseconds
    re.IGNORECASE,
)


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"[]")


class _Body(msgspec.Struct):
    tools: list[msgspec.Raw] = []
    system: msgspec.Raw = msgspec.Raw(b"[]")
    messages: list[msgspec.Raw] = []


_BODY: Final = msgspec.json.Decoder(_Body)
_MESSAGE: Final = msgspec.json.Decoder(_Message)
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])

Place = tuple[str, int, int]
"""Tools, system or messages; which of them; which part of its content, -1 where it is a bare text."""


def with_breakpoints(body: bytes, choose: Callable[[Sequence[Part]], Iterable[int]]) -> bytes:
    """The body with the chosen ones of its parts marked with `cache_control`, and every other byte as it
    was, but that a bare text becomes a list of one. As it came where it has marks of the client's,
    or isn't a request that can be read.
    """
    if b'"cache_control"' in body:
        return body
    try:
        places, parts = _parts(_BODY.decode(body))
        for number in choose(parts):
            body = _marked(body, places[number])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return body
    return body


def _parts(body: _Body) -> tuple[list[Place], list[Part]]:
    """The parts in the order in which the provider reads them."""
    places: list[Place] = []
    parts: list[Part] = []
    parent = 0

    def add(place: Place, kind: Kind, raw: bytes) -> None:
        nonlocal parent
        parent = xxh3_64_intdigest(raw, parent)
        changes = kind != "turn" and _CHANGES.search(raw) is not None
        places.append(place)
        parts.append(Part(kind, parent, len(raw), changes))

    for number, tool in enumerate(body.tools):
        add(("tools", number, 0), "tools", bytes(tool))
    for number, raw in _blocks(bytes(body.system)):
        add(("system", 0, number), "system", raw)
    for message, whole in enumerate(body.messages):
        blocks = _blocks(bytes(_MESSAGE.decode(whole).content))
        for _, raw in blocks[:-1]:
            parent = xxh3_64_intdigest(raw, parent)
        for number, raw in blocks[-1:]:
            if _UNMARKABLE.search(raw):
                parent = xxh3_64_intdigest(raw, parent)
            else:
                add(("messages", message, number), "turn", raw)
    return places, parts


def _blocks(content: bytes) -> list[tuple[int, bytes]]:
    """A content's blocks with their numbers; a bare text is one, with -1."""
    if content.startswith(b'"'):
        return [(-1, content)] if len(content) > len(b'""') else []
    return list(enumerate(bytes(raw) for raw in _LIST.decode(content)))


def _marked(body: bytes, place: Place) -> bytes:
    where, number, block = place
    if where == "tools":
        return change_field(body, "tools", lambda value: _mark_one(value, number))
    if where == "system":
        return change_field(body, "system", lambda value: _mark_content(value, block))
    return change_field(
        body,
        "messages",
        lambda value: _change_one(
            value,
            number,
            lambda raw: change_field(raw, "content", lambda inner: _mark_content(inner, block)),
        ),
    )


def _mark_content(value: bytes, block: int) -> bytes:
    if block < 0:
        return b'[{"type":"text","text":%b,"cache_control":%b}]' % (value, _MARK)
    return _mark_one(value, block)


def _mark_one(value: bytes, number: int) -> bytes:
    return _change_one(value, number, lambda raw: insert_field(raw, "cache_control", _MARK))


def _change_one(value: bytes, number: int, change: Callable[[bytes], bytes]) -> bytes:
    """A list with one element changed; the white space between its elements is lost."""
    raws = [bytes(raw) for raw in _LIST.decode(value)]
    raws[number] = change(raws[number])
    return b"[%b]" % b",".join(raws)
