"""Random request bodies, and the many ways to write one of them."""

import json
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]

# Written down here once more, so that a slip there shows here.
FOLDED = frozenset({"messages", "prompt", "input", "logit_bias", "stop"})
IGNORED = frozenset(
    {"stream", "stream_options", "user", "metadata", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_retention", "service_tier"}
)

seeds = st.integers(0, 2**32)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
numbers = st.integers(-(2**53), 2**53) | st.floats(-1e6, 1e6, allow_nan=False).map(float)
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
_parts = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": texts}),
    min_size=1,
    max_size=2,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={"content": texts | st.none() | _parts, "name": texts, "tool_calls": values},
    ),
    max_size=3,
)
tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": texts, "parameters": st.dictionaries(texts, values, max_size=3)}
            ),
        }
    ),
    max_size=2,
)
ignored = st.fixed_dictionaries(
    {},
    optional={
        "stream": st.booleans() | st.none(),
        "stream_options": st.dictionaries(texts, values, max_size=2) | st.none(),
        **dict.fromkeys(sorted(IGNORED - {"stream", "stream_options"}), values),
    },
)
_own = st.fixed_dictionaries(
    {"messages": messages},
    optional={
        "model": texts | st.none(),
        "temperature": numbers | st.none(),
        "max_tokens": st.integers(0, 10_000),
        "stop": st.lists(texts, max_size=2) | texts,
        "seed": st.integers(-(2**63), 2**64 - 1),
        "logit_bias": st.dictionaries(texts, numbers, max_size=3),
        "tools": tools,
        "response_format": st.dictionaries(texts, values, max_size=3),
        "prompt": texts,
        "input": values,
    },
)
_strange = st.dictionaries(texts, values, max_size=2)


def _joined(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    strange, skipped, own = parts
    named = {*own, *IGNORED, "model"}
    return {**{k: v for k, v in strange.items() if k not in named}, **skipped, **own}


bodies = st.tuples(_strange, ignored, _own).map(_joined)
"""Chat bodies as clients send them, and fields that nobody knows."""


# What a body means -----------------------------------------------------------------------------


def meaning(value: Any) -> Any:
    """Equal for values that JSON can't tell apart, and for no others."""
    if isinstance(value, dict):
        return ("object", frozenset((k, meaning(v)) for k, v in value.items()))
    if isinstance(value, list):
        return ("array", tuple(meaning(v) for v in value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return ("number", Decimal(repr(value)))
    return (type(value).__name__, value)


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every place in a value, the value's own left out."""
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for name, one in inner:
        yield (*path, name)
        yield from places(one, (*path, name))


def at(value: Any, path: Path) -> Any:
    for name in path:
        value = value[name]
    return value


def with_value(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value in this place."""
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = with_value(value[path[0]], path[1:], new)
    return copied


def without(value: Any, path: Path) -> Any:
    """A copy without this place."""
    copied = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1:
        del copied[path[0]]
    else:
        copied[path[0]] = without(value[path[0]], path[1:])
    return copied


# How it is written -----------------------------------------------------------------------------


class Writer:
    """Writes a body in one of the ways that mean the same: white space, escapes, and, where no
    schema is, key order and number spelling. `twice` names an object whose first key it doubles.
    """

    def __init__(self, seed: int, twice: Path | None = None) -> None:
        self._random = random.Random(seed)
        self._twice = twice

    def body(self, fields: dict[str, Any]) -> bytes:
        names = list(fields)
        self._random.shuffle(names)
        lines = [
            (name, self._value(fields[name], (name,), folds=_folds(name, fields[name])))
            for name in names
        ]
        return (self._space() + self._object(lines, ()) + self._space()).encode()

    def _value(self, value: Any, path: Path, *, folds: bool) -> str:
        if isinstance(value, dict):
            names = list(value)
            if folds:
                self._random.shuffle(names)
            lines = [(k, self._value(value[k], (*path, k), folds=folds)) for k in names]
            return self._object(lines, path)
        if isinstance(value, list):
            inner = [self._value(v, (*path, i), folds=folds) for i, v in enumerate(value)]
            return "[" + self._space() + self._comma().join(inner) + self._space() + "]"
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self._random.choice(spellings(value)) if folds else json.dumps(value)
        return json.dumps(value)

    def _object(self, lines: list[tuple[str, str]], path: Path) -> str:
        if lines and path == self._twice:
            place = self._random.randrange(1, len(lines) + 1)
            lines = [*lines[:place], (lines[0][0], "null"), *lines[place:]]
        pairs = [
            self._text(k) + self._space() + ":" + self._space() + written for k, written in lines
        ]
        return "{" + self._space() + self._comma().join(pairs) + self._space() + "}"

    def _comma(self) -> str:
        return self._space() + "," + self._space()

    def _space(self) -> str:
        return self._random.choice(["", "", "", " ", "\n", "\r\n\t"])

    def _text(self, text: str) -> str:
        start, rest = text[:50], text[50:]  # the rest only makes it long
        ending = json.dumps(rest, ensure_ascii=False)[1:]
        return '"' + "".join(map(self._character, start)) + ending

    def _character(self, one: str) -> str:
        if self._random.random() < 0.3:
            units = one.encode("utf-16-be")
            escape = self._random.choice(["\\u{:04x}", "\\u{:04X}"])
            return "".join(
                escape.format(int.from_bytes(units[i : i + 2], "big"))
                for i in range(0, len(units), 2)
            )
        if one == "/":
            return self._random.choice(["/", "\\/"])
        return json.dumps(one, ensure_ascii=False)[1:-1]


def _folds(name: str, value: Any) -> bool:
    return name in FOLDED or not isinstance(value, (dict, list))


def spellings(number: float) -> list[str]:
    """Ways to write the same number; those with a point or an exponent are exact doubles."""
    if isinstance(number, int) and abs(number) > 2**53:
        return [str(number)]
    exact = Decimal(repr(number))
    shown = [json.dumps(number), f"{exact:e}", f"{exact:E}", f"{exact * 10:f}e-1"]
    if exact == exact.to_integral_value():
        shown += [f"{int(exact)}", f"{int(exact)}.0", f"{int(exact)}.00E+0"]
    if exact == 0:
        shown += ["-0", "0e5", "-0.0"]
    return shown
