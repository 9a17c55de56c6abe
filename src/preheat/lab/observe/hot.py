"""Which prefixes are hot: beginnings that at least three sessions had, and how often they are used.

What is hot is what was seen. Whoever forecasts what will be replaces `uses_per_s` by what it expects:
nothing else here or in `plan` asks about the past.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

import msgspec

from preheat.core.blocks import prefix_of
from preheat.engines.dialects.calls import Prompt
from preheat.engines.prefixes import name_of
from preheat.lab.observe.rates import Rate
from preheat.stores.sighting import Sighting
from preheat.stores.trunks import Trunk, Trunks

_MOST: Final = 64
_LONGEST_BODY: Final = 4_194_304
_ENCODE: Final = msgspec.json.Encoder(order="deterministic").encode


class Prefix(msgspec.Struct, kw_only=True):
    """A hot one. `name` is what `preheat warm` calls it, `model` is the log's word; `uses_at` are those
    of each worker."""

    name: str
    model: str
    prompt: Prompt
    body: bytes
    blocks: Sequence[int]
    size_bytes: int
    sessions: int
    uses: Rate
    uses_at: dict[int, Rate]
    since: float
    token_blocks: Sequence[int] = ()

    def uses_per_s(self, now: float) -> float:
        """At all workers."""
        return self.uses.per_s(now)

    def share_at(self, worker: int, workers: int, now: float) -> float:
        """Of its uses that come to this worker, as far as is known: one use is thought to have been
        everywhere."""
        each = [self._at(one, now) for one in range(workers)]
        one = 1.0 / max(60.0, now - self.since)
        return (each[worker] + one / workers) / (sum(each) + one)

    def _at(self, worker: int, now: float) -> float:
        rate = self.uses_at.get(worker)
        return 0.0 if rate is None else rate.per_s(now)


class HotSet:
    """The text is kept in memory only, as `stores.trunks` keeps it."""

    def __init__(self, model: str = "") -> None:
        """`model` is what servers call it, where the log has another name."""
        self.prefixes: list[Prefix] = []
        self._since = inf
        self._model = model
        self._trunks = Trunks()
        self._ends: dict[int, Prefix] = {}

    def saw(self, sighting: Sighting, at: float) -> None:
        """A prompt came."""
        self._since = min(self._since, at)
        self._trunks.saw(sighting, at)

    def used(self, blocks: Sequence[int], worker: int | None, now: float) -> list[Prefix]:
        """Those of which this prompt is a use, the shortest first."""
        found = [self._ends[one] for one in blocks if one in self._ends]
        for prefix in found:
            prefix.uses.add(1.0, now)
            if worker is not None:
                rate = prefix.uses_at.setdefault(worker, Rate(self._since))
                rate.add(1.0, now)
        return found

    def refresh(self, now: float) -> None:
        """Find out anew which are hot."""
        ends: dict[int, Prefix] = {}
        for trunk in self._trunks.hot(now, most=_MOST):
            body = _body_of(trunk)
            prefix = prefix_of(body, trunk.namespace.encode())
            if not prefix.blocks or len(body) > _LONGEST_BODY:
                continue  # too short to be worth anything
            end = prefix.blocks[-1]
            if end in ends:  # several tenants'
                ends[end].sessions += trunk.sessions
                continue
            known = self._ends.get(end)
            if known is None:
                known = self._made(trunk, body, prefix.blocks, prefix.prompt_bytes)
            known.sessions = trunk.sessions
            ends[end] = known
        self._ends = ends
        self.prefixes = sorted(ends.values(), key=lambda one: -one.uses_per_s(now))

    def _made(self, trunk: Trunk, body: bytes, blocks: Sequence[int], size_bytes: int) -> Prefix:
        """A new one: each of its sessions has used it once at least."""
        prompt = Prompt(
            model=self._model or trunk.model,
            messages=trunk.messages,
            tools=trunk.tools,
            salt=trunk.namespace,
        )
        return Prefix(
            name=name_of(prompt),
            model=trunk.model,
            prompt=prompt,
            body=body,
            blocks=blocks,
            size_bytes=size_bytes,
            sessions=trunk.sessions,
            uses=Rate(self._since, trunk.sessions),
            uses_at={},
            since=self._since,
        )


def _body_of(trunk: Trunk) -> bytes:
    """Spelled as `lines` spells a request's, so that its blocks are those of requests."""
    body = {"model": trunk.model, "messages": trunk.messages}
    if trunk.tools is not None:
        body["tools"] = trunk.tools
    if trunk.namespace:
        body["cache_salt"] = trunk.namespace
    return _ENCODE(body)
