"""Prompts to warm, as people have them in files: messages, text or token ids."""

import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from preheat.engines.dialects.calls import Prompt
from preheat.errors import ConfigError

_MOST_BYTES: Final = 256 * 2**20
_MOST_ID: Final = 2**31
_FORMS: Final = (
    'a list of messages, a list of token ids, a string, or an object with "messages", "prompt", '
    '"text" or "ids"'
)


def read_prompts(path: str, *, is_text: bool = False) -> list[Prompt]:
    """Those of a file, or of standard input for "-": one JSON document, JSON lines, or else the whole
    is one text. Raises ConfigError, which says where, and never quotes what stands there."""
    data = _read(path)
    where = "standard input" if path == "-" else path
    if is_text:
        return [_text(data, where)]
    if data.lstrip()[:1] not in {b"{", b"[", b'"'}:
        return [_text(data, where)]
    try:
        whole = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return _of_lines(data, where)
    if _is_many(whole):
        return [_prompt(one, f"{where}, item {i}") for i, one in enumerate(whole, 1)]
    return [_prompt(whole, where)]


def _read(path: str) -> bytes:
    try:
        if path == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: it has more than {_MOST_BYTES >> 20} MiB")
    if not data.strip():
        raise ConfigError(f"{path}: there is nothing in it to warm")
    return data


def _text(data: bytes, where: str) -> Prompt:
    try:
        return Prompt(text=data.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: it is neither JSON nor UTF-8 text") from None


def _of_lines(data: bytes, where: str) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
        except (ValueError, RecursionError):
            raise ConfigError(
                f"{where}, line {number}: it isn't JSON; if the whole is one text, say --text"
            ) from None
        prompts.append(_prompt(value, f"{where}, line {number}"))
    return prompts


def _is_many(value: Any) -> bool:
    """A list of prompts; a list of messages or of ids is one."""
    if not isinstance(value, list) or not value:
        return False
    return not (_is_id(value[0]) or (isinstance(value[0], dict) and "role" in value[0]))


def _prompt(value: Any, where: str) -> Prompt:
    fields: dict[str, Any] = {}
    if isinstance(value, dict) and "role" not in value:
        fields = value.get("body", value)
        if not isinstance(fields, dict):
            raise ConfigError(f'{where}: "body" must be an object')
        names = ("messages", "prompt", "text", "ids")
        value = next((fields[name] for name in names if name in fields), None)
    model, tools = fields.get("model", ""), fields.get("tools")
    if not isinstance(model, str) or not (tools is None or isinstance(tools, list)):
        raise ConfigError(f'{where}: "model" must be a string, "tools" a list')
    if isinstance(value, str) and value:
        return Prompt(model=model, text=value)
    if isinstance(value, list) and value:
        if all(map(_is_id, value)):
            return Prompt(model=model, ids=value)
        if all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in value):
            return Prompt(model=model, messages=value, tools=tools)
    raise ConfigError(f"{where}: expected {_FORMS}")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_ID
