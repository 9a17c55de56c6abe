"""What an observer sees at one moment: the document that `preheat observe --json` prints. No text."""

from typing import Final

import msgspec

from preheat.engines.kv_feed import FeedCounts
from preheat.lab.observe.fleet import Repeats
from preheat.lab.observe.warming import Totals, WarmUp
from preheat.traces.arrival import BadLine

SCHEMA: Final = "preheat.observe/1"


class ServerSight(msgspec.Struct, frozen=True, kw_only=True):
    """One server. `down_why` is empty where it answers; `running` and `waiting` are its own words.

    Of the answers that tell cached tokens (`told`): `agreed` found about what was thought to be there
    (`thought_tokens`, by `trust`); with round robin `ghost_tokens` would have been cached.
    `engine_…` are its own counts since it is watched. None: it doesn't say.
    """

    name: str
    url: str
    down_why: str
    dialect: str
    restarts: int
    running: int | None
    waiting: int | None
    capacity_tokens: int | None
    held_tokens: int
    trust: str
    requests: int
    failed: int
    told: int
    agreed: int
    input_tokens: int
    thought_tokens: int
    cached_tokens: int
    ghost_tokens: int
    engine_input_tokens: int | None
    engine_cached_tokens: int | None
    events: FeedCounts | None = None
    events_refused: str = ""


class RoutingSight(msgspec.Struct, frozen=True, kw_only=True):
    """What Preheat's rule would have chosen at each request that the log gives to a server: as was
    done, or otherwise; and how much sooner the first tokens were then expected, in sum."""

    agreed: int
    differed: int
    sooner_s: float


class MissingSight(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix at a server that hasn't all of it: the warm-up inequality in figures. `chance`: that it
    is used before it is pushed out, `hold_s` after it came."""

    server: str
    missing_tokens: int
    hold_s: float
    chance: float
    costs_s: float
    room_s: float
    gains_s: float
    spends_s: float
    pays: bool


class PrefixSight(msgspec.Struct, frozen=True, kw_only=True):
    """A hot prefix; `name` is a digest, the same as of `preheat warm`. `held` is the share of it that
    each server holds, None where nobody knows."""

    name: str
    model: str
    tokens: int
    sessions: int
    uses_per_h: float
    held: dict[str, float | None]
    missing: list[MissingSight]


class WarmSight(msgspec.Struct, frozen=True, kw_only=True):
    """What warming came to: all, and the last ones."""

    budget_factor: float
    left_tokens: int
    totals: Totals
    booked: list[WarmUp]


class Sight(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag=SCHEMA):
    """All of it. `at` is where the log was by then, `first_at` where it began; seconds since 1970.

    `unplaced` requests aren't given to one of these servers by the log; `late` were told of too late
    to stand in order. `without_…` lack what is named (`usage`: cached tokens). `speeds` are the models
    whose speed was learned.
    """

    log: str
    at: float | None
    first_at: float | None
    is_over: bool
    lines: int
    bad: int
    bad_lines: list[BadLine]
    unplaced: int
    late: int
    undated: int
    without_prompt: int
    without_usage: int
    without_duration: int
    speeds: list[str]
    idle_price: float
    repeats: Repeats
    servers: list[ServerSight]
    routing: RoutingSight | None
    prefixes: list[PrefixSight]
    warming: WarmSight | None = None
    cautions: list[str] = []
