"""How a group of equal servers is treated: what a failure means, and how each is looked after."""

from collections.abc import Mapping

import msgspec

from preheat.engines.roles import Role
from preheat.engines.salts import Salts
from preheat.engines.slot_seats import SlotRules
from preheat.engines.warmth import Warmth


class Rules(msgspec.Struct, frozen=True):
    """How a group treats failures; each is a setting of `engines.NAME`."""

    retries: int = 2
    retry_ratio: float = 0.2
    health_path: str = "/health"
    health_s: float = 2.0
    seat_s: float = 300.0
    """How long a request waits for a slot."""
    roles: tuple[Role, ...] = ()
    """One for each url, in order; none: all are for all."""


class Care(msgspec.Struct, frozen=True):
    """How each server of a group is looked after: the dialect that it speaks ("auto": it is asked),
    the key that opens it, how often it is asked how busy it is, and where its slots are saved. Who comes cold is
    held back for `gate_s` at most, and given what is hot (`warmth`). `salts` set tenants apart in its cache; `adapters`
    are those that it may load, by name: where they lie for it."""

    dialect: str = "auto"
    api_key: str = ""
    poll_s: float = 5.0
    slots: SlotRules = SlotRules()
    gate_s: float = 0.0
    warmth: Warmth | None = None
    salts: Salts | None = None
    adapters: Mapping[str, str] = {}
