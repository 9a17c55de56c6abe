"""Chats as clients send them, and what a client can tell from the answer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.rawhttp import Reply

PATH = "/v1/chat/completions"
TEXT = (
    "the order was shipped on monday and the customer asks why a second parcel with the same "
    "number came one day later please compare both invoices name what differs in price weight "
    "and date then write a short friendly answer that explains which of them is to be paid"
)
WORDS = TEXT.split()


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int | None] | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details or {}).get("cached_tokens") or 0


class Answer(msgspec.Struct, frozen=True):
    """What came back: the text, its usage, and where the gateway says it is from."""

    content: str
    usage: Usage | None
    finish_reason: str | None
    is_complete: bool
    cache_status: frozenset[str]

    @property
    def is_hit(self) -> bool:
        return "hit" in self.cache_status

    @property
    def is_join(self) -> bool:
        return "collapsed" in self.cache_status


class _Piece(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Piece | None = None
    delta: _Piece | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: Usage | None = None


_completions = msgspec.json.Decoder(_Completion)


def body(
    messages: Sequence[Mapping[str, str]],
    *,
    model: str,
    temperature: float = 0,
    stream: bool = False,
    **others: object,
) -> bytes:
    """A compact request body; a stream asks for its usage, so that it can be priced."""
    fields: dict[str, object] = {"model": model, "temperature": temperature, "messages": messages}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(fields | others)


def ask(prompt: str, *, model: str, temperature: float = 0, stream: bool = False) -> bytes:
    """The body of a chat with one message."""
    message = {"role": "user", "content": prompt}
    return body([message], model=model, temperature=temperature, stream=stream)


def words(rng: random.Random, size_bytes: int) -> str:
    """Prose of about this size."""
    text = " ".join(rng.choices(WORDS, k=size_bytes // 4 + 1))
    return text[:size_bytes]


def read(reply: Reply) -> Answer:
    """The answer in a reply of either form; raises msgspec.DecodeError where it is neither."""
    status = cache_status(reply)
    if reply.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        return _read_stream(reply.body, status)
    completion = _completions.decode(reply.body)
    choice = completion.choices[0]
    content = (choice.message and choice.message.content) or ""
    return Answer(content, completion.usage, choice.finish_reason, True, status)


def cache_status(reply: Reply) -> frozenset[str]:
    """The members of Cache-Status (RFC 9211), as `hit` or `fwd=miss`."""
    value = reply.headers.get(b"cache-status", b"").decode("latin-1")
    return frozenset(member.strip() for member in value.split(";")[1:])


def _read_stream(data: bytes, status: frozenset[str]) -> Answer:
    pieces: list[str] = []
    usage: Usage | None = None
    finish_reason: str | None = None
    is_complete = False
    for line in data.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        event = line[5:].strip()
        if event == b"[DONE]":
            is_complete = True
            continue
        chunk = _completions.decode(event)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append((choice.delta and choice.delta.content) or "")
            finish_reason = choice.finish_reason or finish_reason
    return Answer("".join(pieces), usage, finish_reason, is_complete, status)
