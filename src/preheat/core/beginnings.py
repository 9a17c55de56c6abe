"""How prompts begin: where one parts from the trunk that many share."""

from collections.abc import Sequence


class Beginnings:
    """Counts how many of the last requests, at least `window` and less than twice as many, began with
    each block. What fewer than `share` of them began with is a prompt's own."""

    def __init__(self, share: float, window: int) -> None:
        self._share = share
        self._window = window
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._seen = 0

    def own(self, blocks: Sequence[int]) -> int | None:
        """A request begins with these: the first that is its own, else the last; None of none.

        Behind its own block nothing is counted.
        """
        if self._seen >= 2 * self._window:
            self._old, self._young = self._young, {}
            self._seen = self._window
        self._seen += 1
        most = self._share * max(self._seen, self._window)
        for block in blocks:
            self._young[block] = self._young.get(block, 0) + 1
            if self._young[block] + self._old.get(block, 0) <= most:
                return block
        return blocks[-1] if blocks else None
