"""The requests of a trace file: checked as a whole first, then read one by one.

A trace may be larger than memory, so neither pass holds a body. Where the lines aren't in the
order of `at`, their times and places in the file are held (16 bytes a line) and read in order.
"""

import contextlib
import re
from array import array
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from preheat.errors import ConfigError

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETION_PATH: Final = "/v1/completions"
LINE_BYTES: Final = 64 * 1024 * 1024
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_PATH: Final = re.compile(r"/[\x21-\x7e]*")
_FRAMING: Final = frozenset({"content-length", "transfer-encoding", "host", "connection"})
_BOM: Final = b"\xef\xbb\xbf"
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,40}")
"""What is told of a name that isn't known: anything else may be a text's beginning."""

_SHORTHAND: Final = ("messages", "prompt", "model", "max_tokens", "temperature", "stream")

Seconds = Annotated[float, Meta(gt=0)]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line as it is written."""

    at: Annotated[float, Meta(ge=0)]
    id: str = ""
    path: str = ""
    headers: dict[str, str] = {}
    body: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    model: str | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    stream: bool | UnsetType = UNSET
    slo_ttft_s: Seconds | None = None
    slo_e2e_s: Seconds | None = None


class Request(msgspec.Struct, frozen=True):
    """One request, ready to be sent at `at_s` seconds after the start."""

    at_s: float
    id: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    slo_ttft_s: float | None
    slo_e2e_s: float | None


class Trace:
    """A checked trace file. Raises ConfigError with the line's number where one can't be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.requests = 0
        self.length_s = 0.0
        is_ordered = True
        before_s = 0.0
        with self._opened() as file:
            for _, line in self._lines(file):
                self.requests += 1
                is_ordered = is_ordered and line.at >= before_s
                before_s = line.at
                self.length_s = max(self.length_s, line.at)
        if not self.requests:
            raise ConfigError(f"{path}: no request in it")
        self._places = None if is_ordered else self._places_by_time()

    def read(self, model: str = "") -> Iterator[Request]:
        """The requests in the order of their times; all for `model` where one is given."""
        with self._opened() as file:
            lines = (
                self._lines(file) if self._places is None else self._lines_at(file, *self._places)
            )
            for number, line in lines:
                yield _request_of(line, line.id or str(number), model)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with self._path.open("rb") as file:
                if not file.seekable():
                    raise ConfigError(
                        f"{self._path}: it is read twice, so it must be a file, not a pipe"
                    )
                yield file
        except OSError as error:  # also one on the way: a disk, or a file system far away
            raise ConfigError(f"can't read {self._path}: {error.strerror}") from None

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, _Line]]:
        """The lines with their numbers; blank ones are left out."""
        number = 0
        while text := file.readline(LINE_BYTES + 1):
            number += 1
            if len(text) > LINE_BYTES:
                raise ConfigError(f"{self._path}:{number}: a line of more than {LINE_BYTES} bytes")
            if text.strip():
                yield number, self._line(number, text)

    def _places_by_time(self) -> "tuple[array[int], array[int]]":
        """Where each line begins and its number, in the order of their times."""
        times, places, numbers = array("d"), array("q"), array("q")
        place = 0
        with self._opened() as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    times.append(self._line(number, text).at)
                    places.append(place)
                    numbers.append(number)
                place += len(text)
        # Sorting is stable: equal times keep their order in the file.
        order = sorted(range(len(times)), key=times.__getitem__)
        return array("q", map(places.__getitem__, order)), array(
            "q", map(numbers.__getitem__, order)
        )

    def _lines_at(
        self, file: BinaryIO, places: "array[int]", numbers: "array[int]"
    ) -> Iterator[tuple[int, _Line]]:
        for place, number in zip(places, numbers, strict=True):
            file.seek(place)
            yield number, self._line(number, file.readline())

    def _line(self, number: int, text: bytes) -> _Line:
        if number == 1:
            text = text.removeprefix(_BOM)
        try:
            line = _DECODER.decode(text.decode())  # a Raw isn't checked for UTF-8
            _check(line)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise ConfigError(f"{self._path}:{number}: {_said(error)}") from None
        return line


_DECODER: Final = msgspec.json.Decoder(_Line)


def _said(error: Exception) -> str:
    """What is wrong with a line; none of its values, which may be prompt text."""
    if isinstance(error, UnicodeDecodeError):
        return "it isn't UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    what = str(error)
    unknown = re.search(r"unknown field `(.*)`", what, re.DOTALL)
    if unknown is not None:
        known = ", ".join(field.name for field in msgspec.structs.fields(_Line))
        return f"unknown field{_told(unknown[1])}; known here: {known}"
    return what.replace("`$.", "`")


def _told(name: str) -> str:
    return f" {name!r}" if _NAME.fullmatch(name) else ""


def _check(line: _Line) -> None:
    """What no single field can know. Raises ValueError."""
    if not isfinite(line.at):
        raise ValueError("`at` is no finite number")
    if line.body is not UNSET:
        beside = [name for name in _SHORTHAND if getattr(line, name) is not UNSET]
        if beside:
            raise ValueError(
                f"give either a whole `body` or shorthand fields, not also {beside[0]}"
            )
        if not bytes(line.body).lstrip().startswith(b"{"):
            raise ValueError("`body` must be an object")
    elif (line.messages is UNSET) == (line.prompt is UNSET):
        raise ValueError("give a `body`, or `messages`, or a `prompt`")
    if line.path and not _PATH.fullmatch(line.path):
        raise ValueError("`path` must begin with / and hold no white space")
    for name, value in line.headers.items():
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _FRAMING:
            raise ValueError(f"`headers` can't hold{_told(name) or ' such a name'}")
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(
                f"`headers`: the value of{_told(name) or ' one'} has characters that it can't have"
            )


def _request_of(line: _Line, name: str, model: str) -> Request:
    default_path = COMPLETION_PATH if line.prompt is not UNSET else CHAT_PATH
    return Request(
        line.at,
        name,
        line.path or default_path,
        tuple((key.encode(), value.encode("latin-1")) for key, value in line.headers.items()),
        _body_of(line, model),
        line.slo_ttft_s,
        line.slo_e2e_s,
    )


def _body_of(line: _Line, model: str) -> bytes:
    if line.body is not UNSET:
        if not model:
            return bytes(line.body)
        fields = msgspec.json.decode(line.body, type=dict[str, Raw])
        return msgspec.json.encode(fields | {"model": model})
    short: dict[str, object] = {
        name: value for name in _SHORTHAND if (value := getattr(line, name)) is not UNSET
    }
    if model:
        short["model"] = model
    if line.stream is True:
        short["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(short)
