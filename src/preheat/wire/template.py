"""What the events of one stream have in common: all bytes but those of a text.

Most chunks of a stream differ from the one before in nothing but the text of their delta. Once
one of them was decoded, the next ones are told by their first and last bytes, and only the string
between is decoded.
"""

from collections.abc import Mapping
from typing import Any, Final

import jiter

from preheat.wire import openai
from preheat.wire.sse import data_of

_HOLE: Final = "here stands the text"
_MOST_TRIES: Final = 8


class Template:
    """An event with a hole, into which any JSON string fits.

    Only that: whether a chunk with another text may be taken for one more of the same is for the
    Assembler to say.
    """

    __slots__ = ("_after", "_before", "_end", "_start")

    def __init__(self, before: bytes, after: bytes) -> None:
        """Both without the string's quotes."""
        self._before = before + b'"'
        self._after = b'"' + after
        self._start = len(before)
        self._end = -len(after)

    def text_in(self, block: bytes) -> str | None:
        """The text of an event of this form; None for any other.

        If what stands in the hole, its quotes included, is one JSON string, the block is one
        event (a string holds no line end), and its chunk is the known one but for that string.
        """
        if not (block.startswith(self._before) and block.endswith(self._after)):
            return None
        try:
            text: str = jiter.from_json(block[self._start : self._end])
        except ValueError:
            return None
        return text


class PlainEvents:
    """Feeds an Assembler with the events that are plain, by the stream's template, which it finds,
    and finds again when it changes (a new `created`)."""

    __slots__ = ("_assembler", "_current", "_dialect", "_known", "_tries_left", "tells_usage")

    def __init__(self, assembler: openai.Assembler, dialect: openai.Dialect) -> None:
        self.tells_usage = False  # the last event, and so each plain one after it
        self._assembler = assembler
        self._dialect = dialect
        self._current: Template | None = None  # the last event's, if that was a plain one
        self._known: Template | None = None
        self._tries_left = _MOST_TRIES

    def take(self, block: bytes) -> bool:
        """Whether the bytes are one event, and like the last one but for its text; then that is
        fed."""
        if self._current is None:
            return False
        text = self._current.text_in(block)
        if text is None:
            return False
        self._assembler.feed_text(text)
        self._tries_left = _MOST_TRIES
        return True

    def feed(self, block: bytes, chunk: Mapping[str, Any]) -> None:
        """An event that had to be decoded. Raises ValueError as the Assembler does. Whoever
        changes each chunk beside its text isn't tried for ever."""
        self._current = None
        self._assembler.feed(chunk)
        text = self._assembler.plain_text
        if text is None:
            return
        self.tells_usage = "usage" in chunk
        if self._known is not None and self._known.text_in(block) == text:
            self._current = self._known
        elif self._tries_left:
            self._tries_left -= 1
            self._known = self._current = _template_of(block, chunk, self._dialect)


def _template_of(
    block: bytes, chunk: Mapping[str, Any], dialect: openai.Dialect
) -> Template | None:
    """The form of this plain chunk's event. That its text stands where it was found is checked by
    putting another string there: only its text may change. (A chunk with floats has no form: as
    they are kept as spelled, they equal nothing, and the Assembler takes them for changed.)"""
    holder, field = _place(chunk, dialect)
    text = holder[field]
    before, found, after = block.partition(openai.encode(text))
    # After any other end than these, a line feed that belongs to it may be still to come.
    if not found or text == _HOLE or not after.endswith((b"\n\n", b"\r\n\r\n")):
        return None
    try:
        holed = openai.decode(data_of(b'%b"%b"%b' % (before, _HOLE.encode(), after)) or b"")
        holder, field = _place(holed, dialect)
        holder[field] = text
    except (ValueError, LookupError):
        return None  # what was found was a key, or no string at all
    return Template(before, after) if holed == chunk else None


def _place(chunk: Mapping[str, Any], dialect: openai.Dialect) -> tuple[dict[str, Any], str]:
    """What holds the first choice's text, and under which name."""
    choice = chunk["choices"][0]
    return (choice[dialect.delta], "content") if dialect.delta else (choice, "text")
