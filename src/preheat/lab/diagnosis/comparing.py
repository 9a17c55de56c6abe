"""Servers beside one another: what differs between those that are to be equal."""

from collections.abc import Mapping, Sequence

import msgspec

from preheat.lab.diagnosis import events, remedies, wording
from preheat.lab.diagnosis.facts import Facts
from preheat.lab.diagnosis.server import Server
from preheat.lab.doctor.finding import Finding


class Patient(msgspec.Struct):
    """A server and what is known of it by now."""

    server: Server
    facts: Facts
    wording: wording.Wording
    words: int = 0
    text: str = ""
    told: events.Told | None = None


def compare(patients: Sequence[Patient], *, has_events: bool) -> list[Finding]:
    """What differs between servers that are to be equal."""
    if len(patients) < 2:
        return []
    by_url = {one.server.about: one for one in patients}
    found = wording.compare({url: one.wording for url, one in by_url.items()})
    found += compare_facts({url: one.facts for url, one in by_url.items()}, _kinds(patients))
    told = {url: one.told for url, one in by_url.items() if one.told is not None}
    known = {finding.check for finding in found}
    found += [one for one in events.compare(told) if one.check not in known]
    kinds = _kinds(patients)
    if len(told) < 2 and kinds <= {"vllm", "sglang"}:
        found.append(
            Finding(
                "hash-seed",
                " and ".join(by_url),
                "unknown",
                "whether equal blocks have equal hashes on each can't be known without their events",
                do="give --events ENDPOINT for each server, in their order"
                if not has_events
                else "see what is said of their events",
            )
        )
    return found


def compare_facts(facts: Mapping[str, Facts], kinds: set[str]) -> list[Finding]:
    """Block sizes, hash algorithms and models of servers, as they say them."""
    about, kind = " and ".join(facts), min(kinds)
    asked = "what each says of itself"
    found = []
    sizes = {one.block_tokens for one in facts.values()}
    if len(sizes) > 1:
        found.append(
            Finding(
                "block-size",
                about,
                "warning",
                f"their blocks have {_row(sizes)} tokens",
                "the same prefix is kept to another length on each, and no block of one is one of another's",
                remedies.BLOCK.get(kind, "start all with the same block size"),
                asked,
            )
        )
    algorithms = {one.algorithm for one in facts.values() if one.algorithm}
    if len(algorithms) > 1:
        found.append(
            Finding(
                "hash-algorithm",
                about,
                "warning",
                f"they hash blocks in {len(algorithms)} ways: {_row(algorithms)}",
                "Preheat maps each server's hashes to its own, so it doesn't mind; what shares blocks by "
                "hash (LMCache, Mooncake, llm-d, Dynamo) finds none of another server's",
                remedies.HASH["vllm"],
                asked,
            )
        )
    if len({one.models for one in facts.values()}) > 1:
        found.append(_other_models(about, asked))
    return found


def _other_models(about: str, asked: str) -> Finding:
    return Finding(
        "models-differ",
        about,
        "warning",
        "they don't have the same models and adapters, under the same names",
        "a request finds its prefix only where its model's name is",
        "load the same adapters under the same names on each, or declare them apart",
        asked,
    )


def _kinds(patients: Sequence[Patient]) -> set[str]:
    return {one.server.dialect.name for one in patients}


def _row(values: set[int | None] | set[str]) -> str:
    return ", ".join(sorted(map(str, values)))
