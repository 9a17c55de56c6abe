"""A log of requests: why their prompts share nothing. No text of it is told or kept."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from preheat.errors import ConfigError
from preheat.lab.diagnosis.facts import Facts
from preheat.lab.diagnosis.partings import Head, Parting, head_of, partings
from preheat.lab.doctor.finding import Finding
from preheat.traces.exchange import exchange_of

MOST_PROMPTS: Final = 2_000
_MOST_LINE: Final = 4_194_304
_CHARS_A_TOKEN: Final = 4
_TOLD: Final = 3
_LEAST_SHARE: Final = 0.1
"""A family of fewer of the prompts is a warning."""
_OWN_SHARE: Final = 0.5
_FEW: Final = 4


class Logged(msgspec.Struct, frozen=True, kw_only=True):
    """A request of the log, without its text but for what it begins with."""

    head: Head
    model: str
    tokens: int
    salt: str = ""
    cache_key: str = ""
    refuses_cache: bool = False

    @property
    def trunk(self) -> bytes:
        """Equal for equal beginnings."""
        return self.head.sorted_digest

    @property
    def trunk_tokens(self) -> int:
        """About."""
        return len(self.head.text) // _CHARS_A_TOKEN


def read_log(path: Path) -> tuple[list[Logged], int]:
    """The first prompts, and how many lines were none. Raises ConfigError."""
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
    found: list[Logged] = []
    bad = 0
    try:
        with path.open("rb") as file:
            while len(found) < MOST_PROMPTS and (line := file.readline(_MOST_LINE)):
                if not line.strip():
                    continue
                try:
                    logged = _logged(decoder.decode(line))
                except (msgspec.MsgspecError, ValueError, RecursionError):
                    logged = None
                if logged is None:
                    bad += 1
                else:
                    found.append(logged)
    except OSError as error:
        raise ConfigError(f"--log {path}: can't be read ({error.strerror})") from error
    return found, bad


def examine_log(
    name: str, prompts: list[Logged], bad: int, facts: Facts | None, kind: str
) -> Iterator[Finding]:
    """All that can be said of them; with a server's facts, against what it holds."""
    about = f"log {name}"
    if not prompts:
        yield Finding(
            "log-unreadable",
            about,
            "problem",
            f"none of its {bad} lines is a request with a prompt",
            "nothing can be said about prompts",
            "give JSON lines with `messages`, `body` or `request`, as docs/traces.md has them",
        )
        return
    yield from _beginnings(about, prompts, bad)
    yield from _keys(about, prompts)
    yield from _names(about, prompts, facts, kind)
    if facts is not None:
        yield from _sizes(about, prompts, facts)


def families(prompts: list[Logged]) -> dict[bytes, int]:
    """Tokens of each beginning that more than one prompt has."""
    counts = Counter(one.trunk for one in prompts)
    return {one.trunk: one.trunk_tokens for one in prompts if counts[one.trunk] > 1}


def _logged(fields: dict[str, msgspec.Raw]) -> Logged | None:
    exchange = exchange_of(fields)
    if not exchange.body:
        return None
    body: dict[str, Any] = msgspec.json.decode(exchange.body, type=dict[str, Any])
    head, tokens = head_of(body), exchange.input_tokens
    if not head.text:
        return None
    return Logged(
        head=head,
        model=exchange.model,
        tokens=tokens if tokens >= 0 else len(exchange.body) // _CHARS_A_TOKEN,
        salt=_word(body.get("cache_salt")) + _word(body.get("extra_key")),
        cache_key=_word(body.get("prompt_cache_key")),
        refuses_cache=body.get("cache_prompt") is False,
    )


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _beginnings(about: str, prompts: list[Logged], bad: int) -> Iterator[Finding]:
    asked = f"where {len(prompts)} prompts part" + (f" ({bad} lines are none)" if bad else "")
    found = partings([one.head for one in prompts])
    for parting in found[:_TOLD]:
        yield _parted(about, parting, len(prompts), asked)
    if not found:
        distinct = len({one.trunk for one in prompts})
        yield Finding(
            "prompt-beginnings",
            about,
            "ok",
            f"{len(prompts)} prompts have {distinct} beginnings, and none looks like another",
            asked=asked,
        )


def _parted(about: str, one: Parting, prompts: int, asked: str) -> Finding:
    tokens = one.before // _CHARS_A_TOKEN
    is_order = one.kind.startswith("the same")
    do = (
        "write tools and their fields in one order, e.g. sorted by name"
        if is_order
        else "put what changes at the end of the prompt, behind what all share, or leave it out (a date "
        "is enough for a clock)"
    )
    return Finding(
        "prompt-parts",
        about,
        "problem" if one.prompts >= _LEAST_SHARE * prompts else "warning",
        f"{one.prompts} of {prompts} prompts look alike but begin in {one.forms} ways: they part at "
        f"character {one.at} of {one.place} (about token {tokens}), where {one.kind} stands; "
        f"{one.behind} characters behind it are the same again",
        f"only the first {tokens} tokens or so can be cached of each",
        do,
        asked,
    )


def _keys(about: str, prompts: list[Logged]) -> Iterator[Finding]:
    """Fields by which requests shut others out."""
    for check, field, values in (
        ("salt-each", "cache_salt", [one.salt for one in prompts]),
        ("cache-key-each", "prompt_cache_key", [one.cache_key for one in prompts]),
    ):
        of_trunk: dict[bytes, list[str]] = defaultdict(list)
        for one, value in zip(prompts, values, strict=True):
            if value:
                of_trunk[one.trunk].append(value)
        shared = [list_ for list_ in of_trunk.values() if len(list_) > 1]
        requests, distinct = sum(map(len, shared)), sum(len(set(one)) for one in shared)
        if requests >= _FEW and distinct > _OWN_SHARE * requests:
            yield Finding(
                check,
                about,
                "problem" if field == "cache_salt" else "warning",
                f"{requests} requests with beginnings that others have, too, carry {distinct} values "
                f"of {field}",
                "a prefix is shared only within one value",
                f"give {field} one value for all who may share: a tenant's, not a request's",
                f"{field} of {len(prompts)} requests",
            )
    refusing = sum(one.refuses_cache for one in prompts)
    if refusing:
        yield Finding(
            "cache-prompt-false",
            about,
            "problem",
            f"{refusing} of {len(prompts)} requests have cache_prompt: false",
            "llama.cpp computes their whole prompt each time",
            "leave cache_prompt out",
            "the fields of requests",
        )


def _names(about: str, prompts: list[Logged], facts: Facts | None, kind: str) -> Iterator[Finding]:
    """Models and adapters: each has a KV cache of its own."""
    models: dict[bytes, set[str]] = defaultdict(set)
    for one in prompts:
        models[one.trunk].add(one.model)
    split = [names for names in models.values() if len(names) > 1]
    if split:
        most = max(map(len, split))
        yield Finding(
            "model-names",
            about,
            "warning",
            f"{len(split)} beginnings are asked under up to {most} names of models or adapters",
            "each name has a KV cache of its own, so a prefix is computed once for each",
            "ask for one name where one will do; Preheat keeps an adapter's requests together",
            "the model of requests",
        )
    if facts is None or not facts.models or kind in {"llamacpp", "tgi", "openai"}:
        return
    known = {*facts.models, *facts.adapters}
    strangers = Counter(one.model for one in prompts if one.model and one.model not in known)
    if strangers:
        yield Finding(
            "adapter-unknown",
            about,
            "problem",
            f"{strangers.total()} of {len(prompts)} requests ask for {len(strangers)} names that the "
            "server doesn't have",
            "they fail, or something on the way gives them another name",
            "load those adapters under these names, or ask for the names that it lists",
            "the model of requests, against the server's list",
        )


def _sizes(about: str, prompts: list[Logged], facts: Facts) -> Iterator[Finding]:
    """Prompts against blocks and against the longest that it takes."""
    block_tokens = facts.block_tokens or 1
    least = max(block_tokens, facts.least_tokens) + 1
    short = sum(one.tokens < least for one in prompts)
    if short > _OWN_SHARE * len(prompts):
        yield Finding(
            "prompt-short",
            about,
            "problem",
            f"{short} of {len(prompts)} prompts have fewer than {least} tokens",
            f"only whole blocks of {block_tokens} tokens are kept, and never the last token",
            "nothing is lost with prompts as short as these; a smaller block (--block-size 16) keeps more",
            "the tokens of prompts",
        )
    capacity = facts.capacity
    holds = min(
        (n for n in (capacity.tokens, capacity.slot_tokens, facts.limit_tokens) if n), default=None
    )
    longer = sum(one.tokens > holds for one in prompts) if holds else 0
    if longer:
        yield Finding(
            "prompt-long",
            about,
            "problem",
            f"{longer} of {len(prompts)} prompts are longer than the {holds} tokens that fit",
            "they are refused, or push out everything else",
            "give it a larger context and more memory for its KV cache, or shorten them",
            "the tokens of prompts, against the server's capacity",
        )
    yield from _holdings(about, prompts, facts)


def _holdings(about: str, prompts: list[Logged], facts: Facts) -> Iterator[Finding]:
    """What comes again against all that it holds."""
    capacity = facts.capacity
    shared = families(prompts)
    total = sum(shared.values())
    if capacity.tokens and total > capacity.tokens:
        yield Finding(
            "capacity-small",
            about,
            "warning",
            f"{len(shared)} beginnings that come again have about {total} tokens, and its KV cache holds "
            f"{capacity.tokens}",
            "they push one another out",
            "spread them over more servers by their beginnings (Preheat does), or give it more memory",
            "the beginnings of prompts, against the server's capacity",
        )
    slots = capacity.slots
    if slots and len(shared) > slots and facts.has_host_cache is not True:
        yield Finding(
            "slots-few",
            about,
            "warning" if facts.has_host_cache is None else "problem",
            f"{len(shared)} beginnings come again, and it has {slots} slots",
            "each keeps one; the others are computed anew each time",
            f"start llama.cpp with --parallel {len(shared)} or with --cache-ram",
            "the beginnings of prompts, against the server's slots",
        )
