"""Where prompts that look alike part, and what kind of text stands there: pure, and no text is told."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

_MOST_CHARS: Final = 65_536
_LEAST_CHARS: Final = 256
"""Shorter beginnings are a question, not a trunk: nobody expects them to be equal."""
_ALIKE_SHARE: Final = 0.5
_TAIL_CHARS: Final = 200
_AROUND: Final = 48
_MASKED_CHARS: Final = 2_048
"""To look for values in all of 2,000 long prompts takes minutes."""
_SYSTEM: Final = frozenset({"system", "developer"})

_MONTHS: Final = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
    r"sep(?:t(?:ember)?)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
_DAYS: Final = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_CLOCK: Final = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[ap]m)?"
_KINDS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("a UUID", r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"),
        ("a date with a time", rf"\b\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?"),
        (
            "a date",
            rf"\b(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}|"
            rf"\d{{1,2}}(?:st|nd|rd|th)?\.?\s+{_MONTHS}\.?,?(?:\s+\d{{4}})?|"
            rf"{_MONTHS}\.?\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?|{_DAYS})\b",
        ),
        ("a time of day", rf"\b{_CLOCK}\b"),
        ("a time stamp", r"\b1[5-9]\d{8}(?:\d{3}|\d{6})?(?:\.\d+)?\b"),
        ("a hexadecimal id", r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b"),
        ("an id", r"\b(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{12,}\b"),
        ("a number", r"\d+(?:[.,]\d+)*"),
        ("white space", r"\s+"),
        ("a word or a name", r"\w+"),
    )
)
_CHANGING: Final = re.compile(
    "|".join(pattern.pattern for kind, pattern in _KINDS[:8] if kind != "a word or a name"),
    re.IGNORECASE,
)


class Head(msgspec.Struct, frozen=True):
    """What a prompt begins with: its tools and its system message, or its first message, with the
    names of these places. `sorted_digest` is the same for tools and fields in another order."""

    places: tuple[tuple[str, str], ...]
    sorted_digest: bytes

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for _, text in self.places)


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """`prompts` that look alike begin in `forms` ways. They part at character `at` of `place`, with
    `before` characters before it in all, where a text of that `kind` stands; `behind` characters at
    the end are the same again."""

    prompts: int
    forms: int
    place: str
    at: int
    before: int
    kind: str
    behind: int


def head_of(body: Mapping[str, Any]) -> Head:
    """Of a request's body, in the order in which templates write it."""
    places = list(_places(body))[:4]
    left = _MOST_CHARS
    kept = []
    for place, text in places:
        kept.append((place, text[:left]))
        left -= len(kept[-1][1])
    tools = body.get("tools")
    if isinstance(tools, list):
        ordered = sorted(msgspec.json.encode(one, order="sorted") for one in tools)
        rest = [text.encode("utf-8", "replace") for place, text in kept if place != "the tools"]
        digest = _digest(b"\0".join([*ordered, *rest]))
    else:
        digest = _digest("".join(text for _, text in kept).encode("utf-8", "replace"))
    return Head(tuple(kept), digest)


def partings(heads: Sequence[Head]) -> list[Parting]:
    """Of prompts that look alike and aren't, the largest families first."""
    counts: dict[str, int] = defaultdict(int)
    by_text: dict[str, Head] = {}
    for head in heads:
        text = head.text
        counts[text] += 1
        by_text[text] = head
    left = [text for text in counts if len(text) >= _LEAST_CHARS]
    found: list[Parting] = []
    passes: tuple[tuple[Callable[[str], Any], str, int], ...] = (
        (lambda text: by_text[text].sorted_digest, "the same in another order", _MOST_CHARS),
        (_masked, "", _MASKED_CHARS),
        (lambda text: text[-_TAIL_CHARS:], "", _MOST_CHARS),
    )
    for key, kind, within in passes:
        families = _families(left, key)
        taken: set[str] = set()
        for family in families:
            parting = _parting([by_text[text] for text in family], kind, within)
            if parting is not None:
                prompts = sum(counts[text] for text in family)
                found.append(msgspec.structs.replace(parting, prompts=prompts))
                taken.update(family)
        left = [text for text in left if text not in taken]
    return sorted(found, key=lambda one: one.prompts, reverse=True)


def kind_at(text: str, at: int) -> str:
    """What kind of text stands at a place: the first of the kinds of which a piece covers it."""
    start = max(0, at - _AROUND)
    window = text[start : at + _AROUND]
    for kind, pattern in _KINDS:
        for match in pattern.finditer(window):
            if match.start() <= at - start < match.end():
                return kind
    return "other signs" if at < len(text) else "its end"


def _masked(text: str) -> str:
    """Equal for texts that differ only in values of a known kind, as far as it looks."""
    return _CHANGING.sub("#", text[:_MASKED_CHARS])[: _MASKED_CHARS // 2]


def _families(texts: Sequence[str], key: Callable[[str], Any]) -> list[list[str]]:
    groups: dict[Any, list[str]] = defaultdict(list)
    for text in texts:
        groups[key(text)].append(text)
    return [group for group in groups.values() if len(group) > 1]


def _parting(family: Sequence[Head], kind: str, within: int) -> Parting | None:
    """None where too little of them is alike, or where they part only behind so many characters."""
    first, *texts = [head.text for head in family]
    shared = [_shared(first, text) for text in texts]
    at = min(shared)
    behind = min(_alike_behind(first, text, at) for text in texts)
    shortest = min(map(len, (first, *texts)))
    if at >= within or (not kind and at + behind < _ALIKE_SHARE * shortest):
        return None
    other = texts[shared.index(at)]
    place, at_place = _place(family[0], at)
    return Parting(
        prompts=0,
        forms=len(family),
        place=place,
        at=at_place,
        before=at,
        kind=kind or _kind_of(first, other, at),
        behind=min(behind, shortest - at),
    )


def _shared(one: str, other: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _alike_behind(one: str, other: str, at: int) -> int:
    """How many characters are the same again behind a value: up to the end, or, where both are cut
    off there, from what stands behind the value on."""
    end = _shared(one[::-1], other[::-1])
    start = at + 2 * _AROUND
    found = other.find(one[start : start + _AROUND], at) if start + _AROUND < len(one) else -1
    return max(end, _shared(one[start:], other[found:]) if found >= 0 else 0)


def _kind_of(one: str, other: str, at: int) -> str:
    """Both sides are looked at: one of them may end there, or be an exception."""
    kinds = [kind_at(text, at) for text in (one, other)]
    names = [kind for kind, _ in _KINDS]
    return min(kinds, key=lambda kind: names.index(kind) if kind in names else len(names))


def _place(head: Head, at: int) -> tuple[str, int]:
    for place, text in head.places:
        if at < len(text):
            return place, at
        at -= len(text)
    return (head.places[-1][0], len(head.places[-1][1])) if head.places else ("", 0)


def _places(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tools = body.get("tools")
    if isinstance(tools, list) and tools:
        yield "the tools", msgspec.json.encode(tools).decode()
    for name in ("instructions", "system"):
        if body.get(name):
            yield f"`{name}`", _text(body[name])
            return
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list):
        yield from _messages([one for one in messages if isinstance(one, dict)])
    else:
        yield "the prompt", _text(body.get("prompt", messages))


def _messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Those of the system, or the first."""
    for number, message in enumerate(messages, 1):
        role = message.get("role")
        if number > 1 and role not in _SYSTEM:
            return
        name = role if isinstance(role, str) and role.isalpha() and len(role) < 16 else "?"
        yield f"message {number} ({name})", _text(message.get("content"))
        if role not in _SYSTEM:
            return


def _text(content: Any) -> str:
    """Texts as they are; of other parts only the kind."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = []
    for one in content:
        text = one.get("text") if isinstance(one, dict) else one
        texts.append(text if isinstance(text, str) else "\0")
    return "".join(texts)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
