"""No door at all."""

from preheat.core.types import Key


class Always:
    """Everything comes in."""

    def see(self, key: Key, now: float) -> None:
        """Nothing is remembered."""

    def admit(self, candidate: Key, victim: Key | None, now: float) -> bool:
        return True
