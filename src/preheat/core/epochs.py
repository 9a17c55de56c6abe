"""Which answers are void: what was invalidated, and when, in counts instead of times.

Clocks of several machines differ, so an answer says how many invalidations were known when it was
asked for (`Epoch`), and is void when a later one covers it. Nothing has to be found and deleted for
that: an invalidation is a handful of words in a table, whatever it matches.
"""

from itertools import product
from typing import Final

from preheat.core.types import Epoch, Invalidation, Key

_CAPACITY: Final = 100_000

_Scope = tuple[str | None, str | None, str | None, Key | str | None]
"""(tenant, namespace, model, key or tag): None where any will do."""


class EpochTable:
    """The number of the last invalidation of each scope.

    Beyond `capacity` scopes the older half is forgotten, and everything asked for before then is
    void: too much, never too little.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._numbers: dict[_Scope, int] = {}
        self._masks: set[tuple[bool, bool, bool, bool]] = set()
        self._floor = 0
        self.mark = Epoch()

    def reset(self, generation: str, floor: int = 0) -> None:
        """Another count, or one whose beginning is lost: what was asked for before `floor`, or in
        another generation, is void."""
        self._numbers.clear()
        self._masks.clear()
        self._floor = floor
        self.mark = Epoch(generation, floor)

    def add(self, what: Invalidation, number: int) -> None:
        """An invalidation, the count's `number`th."""
        selectors: tuple[Key | str | None, ...] = (*what.keys, *what.tags)
        for selector in selectors or (None,):
            scope: _Scope = (what.tenant, what.namespace, what.model, selector)
            # The order of the dict is that of the numbers, nearly: two may come in either order.
            self._numbers[scope] = max(number, self._numbers.pop(scope, 0))
            self._masks.add(_mask(scope))
        if number > self.mark.number:
            self.mark = Epoch(self.mark.generation, number)
        if len(self._numbers) > self._capacity:
            self._forget()

    def voids(
        self,
        epoch: Epoch,
        key: Key,
        *,
        tenant: str,
        namespace: str,
        model: str,
        tags: tuple[str, ...],
    ) -> bool:
        """Whether the answer with these properties, asked for at that epoch, is void."""
        if epoch.generation != self.mark.generation or epoch.number < self._floor:
            return True
        if epoch.number == self.mark.number:
            return False
        for has_tenant, has_namespace, has_model, has_selector in self._masks:
            scope = (
                tenant if has_tenant else None,
                namespace if has_namespace else None,
                model if has_model else None,
            )
            selectors: tuple[Key | str | None, ...] = (key, *tags) if has_selector else (None,)
            if any(self._numbers.get((*scope, one), 0) > epoch.number for one in selectors):
                return True
        return False

    def _forget(self) -> None:
        scopes = list(self._numbers)
        for scope in scopes[: len(scopes) // 2]:
            self._floor = max(self._floor, self._numbers.pop(scope))
        self._masks = {_mask(scope) for scope in self._numbers}


def _mask(scope: _Scope) -> tuple[bool, bool, bool, bool]:
    tenant, namespace, model, selector = scope
    return tenant is not None, namespace is not None, model is not None, selector is not None


MOST_MASKS: Final = len(list(product((False, True), repeat=4)))
"""Look-ups a check can cost, times the number of tags."""
