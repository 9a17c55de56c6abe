"""A request as the trunks see it: its messages one after the other, and whose session it is."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

MOST_MESSAGES: Final = 16
"""Of one conversation. Trunks are system prompts, tools and examples; what is behind is its own."""
_MOST_MESSAGE_BYTES: Final = 1 << 20
_ENCODE: Final = msgspec.json.Encoder(order="deterministic").encode


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as far as its beginning matters. Without a `session` all with the same messages up
    to the first of a user are taken for one. `blocks` are the router's ids of its text's blocks, of which so many
    are whole within the first message, the first two, … (`block_ends`)."""

    tenant: str
    namespace: str = ""
    model: str = ""
    session: str = ""
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    tags: tuple[str, ...] = ()
    blocks: Sequence[int] = ()
    block_ends: Sequence[int] = ()


def pieces(one: Sighting) -> Iterator[tuple[bytes, bytes]]:
    """Each message's id, which names all before it too, and its text; the first with the tools."""
    parent = _digest(_ENCODE([one.tenant, one.namespace, one.model]), b"")
    for number, message in enumerate(one.messages[:MOST_MESSAGES]):
        text = _ENCODE(message if number else [one.tools, message])
        if len(text) > _MOST_MESSAGE_BYTES:
            return
        parent = _digest(text, parent)
        yield parent, text


def _digest(text: bytes, parent: bytes) -> bytes:
    return blake2b(text, digest_size=16, key=parent).digest()


def session_of(one: Sighting) -> int:
    """64 bits. Of a named session, or of a conversation by how it begins."""
    opening: list[Any] = [one.session]
    if not one.session:
        for message in one.messages[:MOST_MESSAGES]:
            opening.append(message)
            if message.get("role") == "user":
                break
    return int.from_bytes(_digest(_ENCODE([one.tenant, opening]), b"")[:8], "big")
