"""What is asked: chats drawn by Zipf's law, and the same chat spelled in ever other bytes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from benchmarks import chat

Filler = Literal["space", "digits"]

MARK = "\x01"  # stands where the load tool puts a number that never repeats
UNUSED: dict[Filler, str] = {"space": " " * 16, "digits": "-" * 16}  # no number looks like these
COMPACT: dict[str, Any] = {"separators": (",", ":")}
SPACES = (" ", "  ", "\n", "\t", "\n  ", " \n", "\r\n", "   ")
SPACE_SHARE = 0.15  # of the places where white space may stand: about a tenth more bytes
SYSTEM = (
    "You answer the customers of a parcel service. Be brief and friendly, name the parcel's "
    "number in each answer, never promise a date that isn't in the tracking data, and hand over "
    "to a person when a customer asks for one or when an amount above 100 is at stake. "
)
TOOLS = (
    ("track_parcel", "Where a parcel is and when it was scanned", "number", "carrier"),
    ("list_parcels", "All parcels of a customer in a time span", "customer", "since"),
    ("open_claim", "Opens a claim for a lost or damaged parcel", "number", "reason"),
    ("claim_state", "What became of a claim and who has it now", "claim", "customer"),
    ("change_address", "Sends a parcel that is under way elsewhere", "number", "address"),
    ("find_shop", "The nearest shops that hand out parcels", "postcode", "radius_km"),
    ("quote_price", "The price of a parcel by weight and target", "weight_g", "country"),
    ("refund", "Pays back up to 100 without a person's consent", "invoice", "amount"),
    ("read_invoice", "The lines of an invoice with their amounts", "invoice", "language"),
    ("call_person", "Hands the talk over to a person who is free", "topic", "language"),
)


class Request(msgspec.Struct, frozen=True):
    """A body (with `MARK` where a number goes) and the tenant who sends it."""

    tenant: int
    body: str


class Workload(msgspec.Struct, frozen=True):
    """Distinct requests, the order in which they are sent again and again, and what fills marks."""

    requests: list[Request]
    order: list[int]
    filler: Filler = "space"

    def first_bodies(self) -> list[tuple[int, bytes]]:
        """Each request once, with its tenant, in bytes that are never sent later."""
        unused = UNUSED[self.filler]
        return [(r.tenant, r.body.replace(MARK, unused).encode()) for r in self.requests]


class Zipf:
    """Ranks 0 to n-1, rank r with a weight of 1 / (r + 1)."""

    def __init__(self, n: int) -> None:
        self._ranks = range(n)
        self._weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(n)))

    def draw(self, rng: random.Random, n: int) -> list[int]:
        return rng.choices(self._ranks, cum_weights=self._weights, k=n)

    def draws(self, rng: random.Random) -> Iterator[int]:
        """Without end; drawn in lots, which is three times as fast."""
        while True:
            yield from self.draw(rng, 10_000)


def plain(*, chats: int, tenants: int, draws: int, seed: int) -> Workload:
    """Chats of 1 KB, each always in the same bytes."""
    return _drawn(chats, tenants, draws, seed, lambda n: json.dumps(_chat(n), **COMPACT))


def rescalared(*, chats: int, tenants: int, draws: int, seed: int) -> Workload:
    """Chats with ten tools that differ each time, but only in `user`, which the key ignores."""

    def spell(number: int) -> str:
        user, rest = {"user": f"user-{MARK}"}, _chat(number) | {"tools": _tools()}
        fields = user | rest if number % 2 else rest | user  # before what counts, or behind it
        return json.dumps(fields, **COMPACT).replace(json.dumps(MARK)[1:-1], MARK)

    drawn = _drawn(chats, tenants, draws, seed, spell)
    return msgspec.structs.replace(drawn, filler="digits")


def rekeyed(*, chats: int, tenants: int, draws: int, seed: int) -> Workload:
    """Chats with ten tools, the same key in other bytes each time.

    Each draw gets its own order of the fields (of the request and of each message; inside tools
    order is meaning) and its own white space; the mark inside messages and the one inside tools
    make each repetition of a draw differ from all before in both places.
    """
    rng = random.Random(seed)
    spelling = Spelling(rng)
    requests = [
        Request(rng.randrange(tenants), spelling.of(_chat(number) | {"tools": _tools()}))
        for number in Zipf(chats).draw(rng, draws)
    ]
    return Workload(requests, list(range(draws)))


class Spelling:
    """JSON of the same meaning in other bytes, with a mark in messages and one in tools."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def of(self, fields: Mapping[str, Any]) -> str:
        members = []
        for name in self._shuffled(fields):
            mark = MARK if name in ("messages", "tools") else ""
            value = self._value(fields[name], shuffle=name == "messages", mark=mark)
            members.append(self._member(name, value))
        return "{" + ",".join(members) + self._space() + "}"

    def _value(self, value: Any, *, shuffle: bool, mark: str = "") -> str:
        if isinstance(value, dict):
            names = self._shuffled(value) if shuffle else list(value)
            inner = [
                self._member(name, self._value(value[name], shuffle=shuffle)) for name in names
            ]
            return "{" + ",".join(inner) + self._space() + "}"
        if isinstance(value, list):
            items = [self._space() + self._value(item, shuffle=shuffle) for item in value]
            return "[" + mark + ",".join(items) + self._space() + "]"
        return json.dumps(value)

    def _member(self, name: str, value: str) -> str:
        space = self._space
        return f"{space()}{json.dumps(name)}{space()}:{space()}{value}{space()}"

    def _shuffled(self, fields: Mapping[str, Any]) -> list[str]:
        names = list(fields)
        self._rng.shuffle(names)
        return names

    def _space(self) -> str:
        return self._rng.choice(SPACES) if self._rng.random() < SPACE_SHARE else ""


def _drawn(
    chats: int, tenants: int, draws: int, seed: int, spell: Callable[[int], str]
) -> Workload:
    rng = random.Random(seed)
    drawn = [(number, rng.randrange(tenants)) for number in Zipf(chats).draw(rng, draws)]
    index = {pair: i for i, pair in enumerate(dict.fromkeys(drawn))}
    requests = [Request(tenant, spell(number)) for number, tenant in index]
    return Workload(requests, [index[pair] for pair in drawn])


def _chat(number: int) -> dict[str, Any]:
    """The chat of this number: about 1,000 bytes as JSON."""
    text = chat.words(random.Random(number), 610)
    return {
        "model": "m1",
        "temperature": 0,
        "max_tokens": 256,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Case {number:06d}: {text}"},
        ],
    }


def _tools() -> list[dict[str, Any]]:
    """Ten tools, together about 3,500 bytes as JSON."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": about,
                "parameters": {
                    "type": "object",
                    "properties": {
                        first: {"type": "string", "description": f"The {first} in question"},
                        second: {"type": "string", "description": f"The {second}, if known"},
                    },
                    "required": [first],
                    "additionalProperties": False,
                },
            },
        }
        for name, about, first, second in TOOLS
    ]
