"""What all findings come to: one or two sentences."""

from collections.abc import Sequence
from typing import Final

from preheat.lab.doctor.finding import Finding

_RANK: Final = (
    *("asked", "prefix-cache-off", "cache-prompt-off", "several-servers", "cache-reset"),
    *(
        "cached-tokens-hidden",
        "tokenizer-differs",
        "template-differs",
        "salt-added",
        "prompt-changed",
    ),
    *(
        "no-reuse",
        "salt-each",
        "cache-prompt-false",
        "prompt-parts",
        "template-date",
        "template-turns",
        "adapter-unknown",
    ),
    *("prompt-short", "prompt-long", "capacity", "slots-few", "capacity-small", "block-size"),
    *("hash-algorithm", "hash-seed", "events-off", "events-wrong-side", "events-silent"),
)
"""What explains zeros best comes first; what isn't here (a server that isn't reached) before it."""


def verdict(findings: Sequence[Finding]) -> str:
    """All of it in a sentence or two: the best explanation, and what to do."""
    for severity in ("problem", "warning"):
        causes = [one for one in findings if one.severity == severity]
        if causes:
            first = min(causes, key=_rank)
            others = len(causes) - 1
            more = f" ({others} more {severity}{'s' * (others > 1)} below)" if others else ""
            lead = "" if severity == "problem" else "It works, but: "
            return f"{lead}{first.about}: {first.found}.{more}\n{first.do}".rstrip()
    unknown = sum(one.severity == "unknown" for one in findings)
    if any(one.check == "reuse" and one.severity == "ok" for one in findings):
        tail = f" {unknown} thing{'s' * (unknown > 1)} can't be known." if unknown else ""
        return f"Nothing is wrong: prefixes are cached, and the usage tells it.{tail}"
    return f"Nothing wrong was found; {unknown} thing{'s' * (unknown != 1)} can't be known."


def _rank(finding: Finding) -> int:
    return _RANK.index(finding.check) + 1 if finding.check in _RANK else 0
