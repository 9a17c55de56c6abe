"""Which server holds which LoRA adapter, who could load one, and how long that takes."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, inf
from typing import Final

from preheat.core.memo import Memo

_MOST: Final = 4_096
"""Names that are known, and of them those that one server lists."""
_MOST_CHARACTERS: Final = 256
_LOAD_S: Final = 2.0
"""Until one was loaded: some 100 MB from a disk and over PCIe, and what the engine does before it."""
_WEIGHT: Final = 0.3
_SHARED: Final = 0.5
"""A load under way costs at most so much of one that is yet to begin: another one would cost another server."""
_LATE: Final = 0.1
"""So much of a load is still thought to come at its end; and of one that is late, as much again as it is late."""
REFUSED_S: Final = 60.0
"""So long after a refusal that server isn't asked for that adapter again, unless it is started again."""
_DEMAND_S: Final = 300.0
"""Demand is forgotten over this; who wasn't asked for in twice as long is in none."""
_MOST_WANTED: Final = 64


class Adapters:
    """Of one group of equal servers. `sources` are those that may be loaded, by name: where they lie as the
    servers see it. All else is known by the servers' own lists.

    A server takes an adapter's name for a model's, so a request's model says which it needs, and its
    prefixes are its own (`core.blocks` has the model in the root of each chain).
    """

    def __init__(self, sources: Mapping[str, str] | None = None) -> None:
        self.sources: Mapping[str, str] = dict(sources or {})
        self._holders: dict[str, set[int]] = {name: set() for name in self.sources}
        self._listed: dict[int, frozenset[str]] = {}
        self._unable: set[int] = set()
        self._loading: dict[tuple[int, str], float] = {}  # when it began
        self._loaded: dict[tuple[int, str], float] = {}  # when it ended well
        self._refused: dict[tuple[int, str], float] = {}  # until when
        self._load_s: Memo[str, float] = Memo(_MOST)
        self._mean_s = _LOAD_S
        self._demand: dict[int, Memo[str, tuple[float, float]]] = {}  # how much, and when that was

    def named(self, model: str) -> str:
        """The adapter that this model is; "": it is none. SGLang's word for one is `model:adapter`.

        >>> Adapters({"sql": "/sql"}).named("sql"), Adapters({"sql": "/sql"}).named("m:sql")
        ('sql', 'sql')
        """
        if model in self._holders:
            return model
        if self._holders and ":" in model:
            name = model.rpartition(":")[2]
            return name if name in self._holders else ""
        return ""

    def places(self, name: str, workers: Iterable[int], now: float) -> dict[int, float]:
        """Of these servers those that have it (0.0), or can load it, with the seconds until it is there."""
        holders = self._holders.get(name, ())
        found = {}
        for worker in workers:
            if worker in holders:
                found[worker] = 0.0
            elif self._may_load(worker, name, now):
                found[worker] = self._left_s(worker, name, now)
        return found

    def retry_s(self, name: str, workers: Iterable[int], now: float) -> float:
        """Until the first of these that has refused it may be asked again; 0.0 where none has."""
        ends = [self._refused.get((worker, name), now) - now for worker in workers]
        return max(0.0, min((left_s for left_s in ends if left_s > 0), default=0.0))

    def held(self, worker: int) -> list[str]:
        """All that it has."""
        return sorted(name for name, holders in self._holders.items() if worker in holders)

    # What is told of a server.

    def lists(self, worker: int, names: Iterable[str], asked_at: float, *, can_load: bool) -> None:
        """It has these, by its own word, which was asked for at that time; what was loaded since then
        it couldn't say. `can_load`: it loads others while it runs."""
        (self._unable.discard if can_load else self._unable.add)(worker)
        fitting = [name for name in names if 0 < len(name) <= _MOST_CHARACTERS]
        told = frozenset(fitting[:_MOST])
        for name in told:
            if name in self._holders or len(self._holders) < _MOST:
                self._holders.setdefault(name, set()).add(worker)
        self._listed[worker] = told
        for name in tuple(self._holders):
            if name not in told and self._loaded.get((worker, name), -inf) < asked_at:
                self.lost(worker, name)
                self._forget_unheld(name)

    def lost(self, worker: int, name: str) -> None:
        """It hasn't that one any more."""
        self._holders.get(name, set()).discard(worker)
        self._loaded.pop((worker, name), None)

    def began(self, worker: int, name: str, now: float) -> None:
        """It is loading it."""
        self._loading[worker, name] = now

    def loaded(self, worker: int, name: str, took_s: float, now: float) -> None:
        """It has it now; 0.0 seconds: it had it before."""
        self.stopped(worker, name)
        self._refused.pop((worker, name), None)
        if name not in self._holders:
            return
        self._holders[name].add(worker)
        self._loaded[worker, name] = now
        if took_s > 0.0:
            known_s = self._load_s[name]
            known_s = took_s if known_s is None else known_s + _WEIGHT * (took_s - known_s)
            self._load_s.put(name, known_s)
            self._mean_s += _WEIGHT * (took_s - self._mean_s)

    def refused(self, worker: int, name: str, now: float) -> None:
        """It wouldn't load it: it is full, can't read it, or doesn't answer."""
        self.stopped(worker, name)
        if name in self.sources:
            self._refused[worker, name] = now + REFUSED_S

    def stopped(self, worker: int, name: str) -> None:
        """It isn't loading it any more, well or not."""
        self._loading.pop((worker, name), None)

    def cleared(self, worker: int) -> None:
        """It was started again: it has none until it says so, and may be asked for all. Names stay known: its
        adapters are none of the others' models."""
        for holders in self._holders.values():
            holders.discard(worker)
        for table in (self._loading, self._loaded, self._refused):
            for key in [key for key in table if key[0] == worker]:
                del table[key]
        self._unable.discard(worker)

    def left(self, worker: int) -> None:
        """It is no more."""
        self.cleared(worker)
        self._demand.pop(worker, None)
        for name in self._listed.pop(worker, frozenset()):
            self._forget_unheld(name)

    # What is asked for.

    def asked(self, name: str, worker: int, now: float) -> None:
        """A request for it goes there."""
        demand = self._demand.get(worker)
        if demand is None:
            demand = self._demand[worker] = Memo(_MOST)
        known = demand[name]
        demand.put(name, (1.0 if known is None else 1.0 + _now(known, now), now))

    def wanted(self, worker: int, now: float) -> Sequence[str]:
        """What it should load before it gets requests, the most asked for first: what was asked of it lately,
        and where that is nothing, of any. It doesn't have these, and they may be loaded."""
        own = self._demand.get(worker)
        found = self._sums([own] if own else [], now)
        found = found or self._sums(self._demand.values(), now)
        names = sorted(found, key=lambda name: (-found[name], name))
        able = (name for name in names if self._may_load(worker, name, now))
        return [name for name in able if worker not in self._holders[name]][:_MOST_WANTED]

    def _sums(
        self, demands: Iterable[Memo[str, tuple[float, float]]], now: float
    ) -> dict[str, float]:
        sums: dict[str, float] = {}
        for demand in demands:
            for name, known in demand.items():
                if known is not None and now - known[1] < 2.0 * _DEMAND_S:
                    sums[name] = sums.get(name, 0.0) + _now(known, now)
        return sums

    def _may_load(self, worker: int, name: str, now: float) -> bool:
        return (
            name in self.sources
            and worker not in self._unable
            and now >= self._refused.get((worker, name), -inf)
        )

    def _left_s(self, worker: int, name: str, now: float) -> float:
        load_s = self._load_s[name] or self._mean_s
        began_at = self._loading.get((worker, name))
        if began_at is None:
            return load_s
        left_s = load_s - (now - began_at)
        if left_s < 0.0:
            return _LATE * load_s - left_s
        return max(_LATE * load_s, min(_SHARED * load_s, left_s))

    def _forget_unheld(self, name: str) -> None:
        """Unless somebody has it, or had it before he was started again."""
        if name in self.sources or self._holders.get(name):
            return
        if any(name in listed for listed in self._listed.values()):
            return
        self._holders.pop(name, None)
        for table in (self._loading, self._loaded, self._refused):
            for key in [key for key in table if key[1] == name]:
                del table[key]


def _now(known: tuple[float, float], now: float) -> float:
    """How much of it isn't forgotten."""
    much, at = known
    return much * exp(-max(0.0, now - at) / _DEMAND_S)
