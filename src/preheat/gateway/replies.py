"""Stored answers on their way to a client, in the form that was asked for."""

import time
from collections.abc import Iterator
from typing import Final

from preheat.core.types import Hit, Request
from preheat.gateway import heads
from preheat.transport.server import Exchange
from preheat.wire import openai

ID_PREFIX: Final = {path: dialect.id_prefix for path, dialect in openai.DIALECTS.items()}
_SLICE_BYTES: Final = 65_536


def send_hit(
    exchange: Exchange,
    request: Request,
    hit: Hit,
    now: float,
    detail: bytes = b"exact",
    layer: bytes = b"exact",
) -> None:
    """Answer with what is stored; `detail` is the word for Cache-Status, `layer` where it was."""
    ask, name = request.ask, request.id
    age_s = now - hit.stored_at
    ttl_s = hit.ttl_s - age_s
    if hit.status != 200:
        refused: openai.RefusedAnswer = hit.answer
        lines = heads.hit(
            name, hit.label, age_s, ttl_s, refused.content_type, hit.status, detail, layer
        )
        exchange.reply(lines, refused.body)
        return
    answer: openai.Answer = hit.answer
    id_prefix = ID_PREFIX[exchange.head.path]
    created = int(time.time())
    if ask.stream:
        events = openai.events(
            answer,
            openai.DIALECTS[exchange.path],
            id_prefix + name,
            created,
            include_usage=ask.include_usage,
        )
        _replay(
            exchange,
            heads.hit(name, hit.label, age_s, ttl_s, heads.EVENTS, 200, detail, layer),
            events,
        )
    else:
        exchange.reply(
            heads.hit(name, hit.label, age_s, ttl_s, heads.JSON, 200, detail, layer),
            openai.whole(answer, id_prefix + name, created),
        )


def _replay(exchange: Exchange, head: bytes, events: Iterator[bytes]) -> None:
    """A stored stream at the client's pace: a few events in one piece, many as they are taken.
    What is kept at two bytes a token is told at two hundred."""
    first = _take(events)
    if len(first) < _SLICE_BYTES:
        exchange.reply(head, first)
        return

    def go_on() -> None:
        while exchange.is_writable and not exchange.is_done:
            piece = _take(events)
            if not piece:
                exchange.on_writable = None
                exchange.end()
            exchange.write(piece)

    exchange.begin(head)
    exchange.write(first)
    exchange.on_writable = go_on
    go_on()


def _take(events: Iterator[bytes]) -> bytes:
    """The next events, up to about a slice."""
    taken = bytearray()
    for event in events:
        taken += event
        if len(taken) >= _SLICE_BYTES:
            break
    return bytes(taken)
