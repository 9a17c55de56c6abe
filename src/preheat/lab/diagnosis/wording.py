"""What becomes of a prompt before it is computed: its template and its tokens."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from preheat.engines.dialects.calls import Prompt
from preheat.lab.diagnosis.facts import Facts
from preheat.lab.diagnosis.server import Server
from preheat.lab.doctor.finding import Finding

_SAMPLE: Final = (
    "The quick brown fox; l'été à Zürich, 東京 2026, 12,345.678 µs!\n\n\tdef f(x):  return x**2 "
    "🙂 <b>naïve</b> don't   stop.\r\nनमस्ते مرحبا."
)
"""Words, numbers, spaces, code and other scripts: where tokenizers differ."""
_TURNS: Final = (
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Red."},
    {"role": "user", "content": "Another one."},
)
_ALWAYS_OPEN: Final = frozenset({"sglang", "tgi"})
_SLACK: Final = 12
_FIRST: Final = 2
"""So many of these are the first turn."""
_MONTHS: Final = (
    "January|February|March|April|May|June|July|August|September|October|November|December"
)
_DATE: Final = re.compile(
    rf"\b(?:\d{{1,2}}\s+(?:{_MONTHS}|[A-Z][a-z]{{2}})\.?,?\s+20\d\d"
    rf"|(?:{_MONTHS}|[A-Z][a-z]{{2}})\.?\s+\d{{1,2}},?\s+20\d\d"
    r"|20\d\d-\d\d-\d\d|\d{1,2}[./]\d{1,2}[./]20\d\d)(?!\d)"
)
_CLOCK: Final = re.compile(r"strftime_now|now\(\)|datetime\.|time\.time")


class Wording(msgspec.Struct, frozen=True, kw_only=True):
    """As one server does it; None where it can't be asked. `rendered` and `ids`: of a first turn with
    the beginning of an answer; `longer`: of a second turn, `shorter`: of the first without it. Some can't
    leave it out, and an answer may begin otherwise than it is asked for: so much of the end is `slack`."""

    sample: Sequence[int] | None = None
    rendered: str | None = None
    ids: Sequence[int] | None = None
    shorter: str | Sequence[int] | None = None
    longer: str | Sequence[int] | None = None
    slack: int = 0
    source: str = ""


async def wording_of(server: Server, facts: Facts) -> Wording:
    """Ask it. Raises EngineError."""
    return Wording(
        sample=await _ids(server, Prompt(model=server.model, text=_SAMPLE)),
        rendered=await _rendered(server, _FIRST, opens=True),
        ids=await _ids(server, _turns(server, _FIRST)),
        shorter=await _either(server, _FIRST),
        longer=await _either(server, len(_TURNS)),
        slack=_SLACK if server.dialect.name in _ALWAYS_OPEN else 0,
        source=facts.template,
    )


def template_findings(about: str, wording: Wording) -> list[Finding]:
    """What is wrong with one server's template."""
    asked = "the chat template, on messages of the doctor's own"
    if _has_date(wording):
        return [
            Finding(
                "template-date",
                about,
                "warning",
                "its chat template writes a date or a time that changes into every prompt",
                "prompts part there, so nothing behind it is cached from one day (or second) to the next",
                "give a fixed one, e.g. by chat_template_kwargs, or another --chat-template",
                asked,
            )
        ]
    shorter, longer = wording.shorter, wording.longer
    if shorter is None or longer is None:
        return [
            Finding(
                "template", about, "unknown", "it can't be asked for its template", "", "", asked
            )
        ]
    at = _parted(shorter, longer)
    if at < len(shorter) - wording.slack:
        unit = "character" if isinstance(shorter, str) else "token"
        return [
            Finding(
                "template-turns",
                about,
                "warning",
                f"a conversation's second turn doesn't begin with its first: they part at {unit} {at} "
                f"of {len(shorter)}",
                "what was cached of one turn can't be used by the next",
                "use another --chat-template: some drop or move what earlier turns had",
                asked,
            )
        ]
    return [Finding("template", about, "ok", "a second turn begins with the first", "", "", asked)]


def compare(wordings: Mapping[str, Wording]) -> list[Finding]:
    """What differs between servers that are to be equal."""
    if len(wordings) < 2:
        return []
    about = " and ".join(wordings)
    tokens = _alike([one.sample for one in wordings.values()])
    forms = [_form(one) for one in wordings.values()]
    templates = _alike(
        forms if tokens is not False else [one.rendered for one in wordings.values()]
    )
    found = [
        _compared(
            about,
            alike=tokens,
            checks=("tokenizer", "tokenizer-differs"),
            what="tokenize the same text",
            do="run the same model and the same tokenizer (--tokenizer, same revision) on all",
        )
    ]
    if tokens is not False or templates is not None:
        found.append(
            _compared(
                about,
                alike=templates,
                checks=("templates", "template-differs"),
                what="make the same prompt of the same messages",
                do="start all with the same --chat-template, from the same model files",
            )
        )
    return found


def _compared(
    about: str, *, alike: bool | None, checks: tuple[str, str], what: str, do: str
) -> Finding:
    asked = "one text of the doctor's own on each"
    if alike is None:
        return Finding(
            checks[0], about, "unknown", f"not all can be asked whether they {what}", "", "", asked
        )
    if alike:
        return Finding(checks[0], about, "ok", f"they {what} in the same way", "", "", asked)
    return Finding(
        checks[1],
        about,
        "problem",
        f"they don't {what} in the same way",
        "a prefix of one isn't one of the other, and answers differ too: they aren't equal servers",
        do,
        asked,
    )


async def _ids(server: Server, prompt: Prompt) -> Sequence[int] | None:
    body = await server.told(server.dialect.tokenise(prompt))
    tokens = server.dialect.read_tokens(body) if body is not None else None
    return tokens.ids if tokens is not None else None


async def _rendered(server: Server, turns: int, *, opens: bool) -> str | None:
    call = server.dialect.render(_turns(server, turns), opens_answer=opens)
    body = await server.told(call)
    return server.dialect.read_rendered(body) if body is not None else None


async def _either(server: Server, turns: int) -> str | Sequence[int] | None:
    """As text, else as tokens; without the beginning of an answer, where that can be left out."""
    text = await _rendered(server, turns, opens=False)
    if text is not None:
        return text
    call = server.dialect.tokenise(_turns(server, turns), opens_answer=False)
    body = await server.told(call)
    tokens = server.dialect.read_tokens(body) if body is not None else None
    return tokens.ids if tokens is not None else None


def _turns(server: Server, count: int) -> Prompt:
    return Prompt(model=server.model, messages=_TURNS[:count])


def _form(wording: Wording) -> object:
    return wording.rendered if wording.rendered is not None else wording.ids


def _alike(values: Sequence[object]) -> bool | None:
    if any(value is None for value in values) or len({type(one) for one in values}) > 1:
        return None
    return all(value == values[0] for value in values)


def _has_date(wording: Wording) -> bool:
    """In what it made; the source alone proves it only where it asks for the time."""
    if wording.rendered is not None:
        return _DATE.search(wording.rendered) is not None
    return bool(_CLOCK.search(wording.source))


def _parted(one: str | Sequence[int], other: str | Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
