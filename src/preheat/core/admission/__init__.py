"""Whether a new entry is worth the place of the one that would leave for it.

To add a policy: a new file here and one line in `POLICIES` (docs/adding-a-policy.md).
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from preheat.core.admission.always import Always
from preheat.core.admission.doorkeeper import Doorkeeper
from preheat.core.types import Key


class AdmissionPolicy(Protocol):
    """A door before the cache."""

    def see(self, key: Key, now: float) -> None:
        """The key was asked for, whether or not it is stored."""

    def admit(self, candidate: Key, victim: Key | None, now: float) -> bool:
        """May the candidate come in? `victim` is who would leave first, None where there is room."""


POLICIES: Final[Mapping[str, Callable[..., AdmissionPolicy]]] = {
    "always": Always,
    "doorkeeper": Doorkeeper,
}
