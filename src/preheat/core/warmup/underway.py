"""One warm-up of a prefix at a time: who wants the same joins it."""

import msgspec


class Run(msgspec.Struct, eq=False):
    """A warm-up under way. `joined` others wait for it."""

    where: str
    prefix: bytes
    joined: int = 0


class Underway:
    """What is being warmed at this moment, by place (a server, with adapter and salt).

    `prefix` is any form of which the beginnings are prefixes too: packed token ids, or text.

    >>> underway = Underway()
    >>> run, leads = underway.begin("a", b"a long prefix")
    >>> leads, underway.begin("a", b"a long") == (run, False), underway.begin("b", b"a long")[1]
    (True, True, True)
    """

    def __init__(self) -> None:
        self._runs: dict[str, list[Run]] = {}

    def begin(self, where: str, prefix: bytes) -> tuple[Run, bool]:
        """The run that warms this, and whether the caller is to carry it out."""
        runs = self._runs.setdefault(where, [])
        for run in runs:
            if run.prefix.startswith(prefix):
                run.joined += 1
                return run, False
        run = Run(where, prefix)
        runs.append(run)
        return run, True

    def end(self, run: Run) -> None:
        """It is over, well or not: the next who wants it carries it out."""
        runs = self._runs.get(run.where, [])
        if run in runs:
            runs.remove(run)
        if not runs:
            self._runs.pop(run.where, None)

    def __len__(self) -> int:
        """How many there are."""
        return sum(map(len, self._runs.values()))
