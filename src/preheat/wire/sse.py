"""Server-sent events: bytes to blocks, blocks to data (WHATWG HTML, section 9.2)."""

import re
from typing import Final

_BLANK_LINE: Final = re.compile(rb"(?>\r\n|\n|\r){2}")
_LONGEST_BLANK: Final = 4
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BOM: Final = b"\xef\xbb\xbf"


class EventTooLargeError(Exception):
    """One event is larger than anybody should send."""


class SseDecoder:
    """Cuts a byte stream into event blocks, wherever the network has cut it.

    A block keeps its bytes, the blank line included, so that it can be passed on unchanged.
    """

    def __init__(self, limit_bytes: int = 8_388_608) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = b""
        self._is_start = True

    def feed(self, data: bytes) -> list[bytes]:
        """The blocks that are complete now. Raises EventTooLargeError past the limit."""
        known_bytes = len(self._buffer)
        if (
            data.endswith(b"\n\n")
            and not known_bytes
            and not self._is_start
            and data.find(b"\n\n") == len(data) - 2
            and b"\r" not in data
        ):
            return [data]  # one event, as most servers send each
        buffer = self._buffer + data if known_bytes else data
        if self._is_start and buffer:
            self._is_start = _BOM.startswith(buffer[:3]) and len(buffer) < 3
            buffer = buffer.removeprefix(_BOM)
        blocks = []
        start = 0
        # What was there before holds no blank line, but may hold the beginning of one.
        for match in _BLANK_LINE.finditer(buffer, max(0, known_bytes - _LONGEST_BLANK + 1)):
            if match.end() == len(buffer) and match[0].endswith(b"\r") and b"\n" in match[0]:
                break  # the line feed of this CR LF is still to come
            blocks.append(buffer[start : match.end()])
            start = match.end()
        self._buffer = buffer[start:]
        if len(self._buffer) > self._limit_bytes:
            raise EventTooLargeError
        return blocks

    @property
    def rest(self) -> bytes:
        """What has come since the last complete block."""
        return self._buffer


def data_of(block: bytes) -> bytes | None:
    """The data of an event, or None for a block without any (a comment, a keep-alive).

    >>> data_of(b"event: ping\\ndata: a\\ndata:b\\n\\n")
    b'a\\nb'
    >>> data_of(b": still working\\n\\n") is None
    True
    """
    if block.startswith(b"data: ") and block.find(b"\n") == len(block) - 2 and b"\r" not in block:
        return block[6:-2]  # the one form that everybody sends
    lines = [
        line[5:].removeprefix(b" ")
        for line in _LINE_END.split(block)
        if line.startswith(b"data:") or line == b"data"
    ]
    return b"\n".join(lines) if lines else None
