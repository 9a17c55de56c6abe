"""What the events of one stream have in common: all bytes but those of a text.

Most chunks of a stream differ from the one before in nothing but the text of their delta. Once
one of them was decoded, the next ones are told by their first and last bytes, and only the string
between is decoded.
"""

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


class Templates:
    """Finds the template of a stream, and finds it again when it changes (a new `created`)."""

    __slots__ = ("_dialect", "_known", "_tries_left", "current")

    def __init__(self, dialect: openai.Dialect) -> None:
        self.current: Template | None = None
        """The form of the last event, if it was a plain one."""
        self._dialect = dialect
        self._known: Template | None = None
        self._tries_left = _MOST_TRIES

    def learn(self, block: bytes, text: str | None) -> None:
        """The next event, which had to be decoded, and the text that is all it adds: None if it
        isn't plain. Whoever changes every chunk beside its text isn't tried for ever."""
        self.current = None
        if text is None:
            return
        if self._known is not None and self._known.text_in(block) == text:
            self._tries_left = _MOST_TRIES
            self.current = self._known
        elif self._tries_left:
            self._tries_left -= 1
            self._known = self.current = _template_of(block, text, self._dialect)


def _template_of(block: bytes, text: str, dialect: openai.Dialect) -> Template | None:
    """The block's form. That the place of its text is found is checked: with another string there
    the chunk must be the same but for its text."""
    before, found, after = block.partition(openai.encode(text))
    # A line feed that may belong to the blank line can still be to come after any other end.
    if not found or not after.endswith((b"\n\n", b"\r\n\r\n")):
        return None
    try:
        chunk = _holder_of(block, dialect)
        holed = _holder_of(b'%b"%b"%b' % (before, _HOLE.encode(), after), dialect)
    except ValueError:
        return None
    return None
