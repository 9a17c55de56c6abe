"""Who warms each server of a group: one for all who want something warm there."""

from collections.abc import Sequence
from typing import Final

from preheat.core.warmup import Pace
from preheat.engines.dialects import Dialect
from preheat.engines.direct import Direct
from preheat.engines.warmer import Warmer
from preheat.engines.worker import Worker
from preheat.errors import EngineError

_PACE: Final = Pace(slack_s=0.5, first_tokens=256)
"""A server that is being readied has hardly a request to hold up."""


class Warmers:
    """Made when they are first wanted, on connections of their own, with the group's key. `dialect` is
    "auto" where each server is asked for its own."""

    def __init__(self, dialect: str, api_key: str) -> None:
        self._dialect = dialect
        self._api_key = api_key
        self._made: dict[Worker, tuple[Direct, Warmer]] = {}

    def of(self, worker: Worker) -> Warmer:
        """That of this server."""
        return self._of(worker)[1]

    def direct(self, worker: Worker) -> Direct:
        """What it asks the server through."""
        return self._of(worker)[0]

    async def known(self, workers: Sequence[Worker]) -> Dialect:
        """What kind these are, as the first that answers says. Raises EngineError."""
        failure = EngineError("there are no servers", kind="connect")
        for worker in workers:
            try:
                return await self.direct(worker).known()
            except EngineError as error:
                failure = error
        raise failure

    async def forget(self, worker: Worker) -> None:
        """That server is no more."""
        made = self._made.pop(worker, None)
        if made is not None:
            await made[0].aclose()

    async def aclose(self) -> None:
        """End all."""
        for worker in tuple(self._made):
            await self.forget(worker)

    def _of(self, worker: Worker) -> tuple[Direct, Warmer]:
        made = self._made.get(worker)
        if made is None:
            direct = Direct(worker.url, api_key=self._api_key, dialect=self._dialect)
            made = self._made[worker] = direct, Warmer(direct, pace=_PACE)
        return made
