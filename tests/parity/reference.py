"""The same controller under the replay's driver, before the same engines.

It knows nothing of HTTP, tasks or clients; where the gateway differs from it, one of the two does
something of its own.
"""

import io
from collections.abc import Sequence

from parity.diary import Diary
from parity.simulation import PATH, Run, Words, settings
from parity.traffic import DELAYS_S, Arrival
from preheat import wiring
from preheat.core.stats import snapshot
from preheat.core.types import Request, RequestId
from preheat.gateway.hosting import Alone
from preheat.gateway.hot_sets import HotSets
from preheat.gateway.intake import LOCAL_TENANT
from preheat.gateway.table import engines_of, table_of
from preheat.gateway.upstreams import Upstreams
from preheat.replay.kernel import Kernel
from preheat.replay.runner import Flight, Runner, Said
from preheat.telemetry.logs import Log


class Reference:
    """One run."""

    def __init__(self, asked: Sequence[Arrival], words: Words) -> None:
        chosen = settings()
        log = Log(io.BytesIO())
        self._parts = wiring.Parts(chosen, log)
        self._diary = Diary(self._parts.controller)
        secret, hot_sets = wiring.secret(chosen), HotSets(self._parts.ledger)
        engines = engines_of(chosen, log, Alone(), secret, hot_sets.of)
        upstreams = Upstreams(table_of(chosen, engines), b"parity")
        self._keyring = wiring.keyring(chosen, secret, upstreams.identity_of)
        self._partition = self._keyring.partition(LOCAL_TENANT, PATH.decode(), "")
        self._asked = asked
        self._words = words
        self._kernel = Kernel()
        self._runner = Runner(self._diary, self._kernel, self._call)
        log.close()

    def run(self) -> Run:
        for number, arrival in enumerate(self._asked, start=1):
            self._kernel.plan(arrival.at, self._arrive, number)
            if arrival.leaves_at is not None:
                self._kernel.plan(arrival.leaves_at, self._runner.leave, _name(number))
        self._kernel.run()
        inventory = self._parts.inventory
        inventory.settle(self._kernel.now)
        counted = snapshot(self._parts.ledger, self._parts.counters, {}, {})
        return Run(self._diary.lines, [key for key, _ in inventory.records()], counted)

    def _arrive(self, number: int) -> None:
        ask = self._keyring.ask(self._asked[number - 1].body(), self._partition)
        self._runner.arrive(Request(_name(number), LOCAL_TENANT, "", ask))

    def _call(self, flight: Flight) -> None:
        arrival = self._arrival_of(flight)
        self._kernel.plan(self._kernel.now + DELAYS_S[arrival.model], self._answer, flight)

    def _answer(self, flight: Flight) -> None:
        arrival = self._arrival_of(flight)
        said = self._words[arrival.model, arrival.prompt, arrival.is_stream]
        self._runner.ended(flight, Said(said.answer, said.answer.size_bytes, said.usage))

    def _arrival_of(self, flight: Flight) -> Arrival:
        return self._asked[int(flight.request.id.rpartition(b"-")[2], 16) - 1]


def _name(number: int) -> RequestId:
    return RequestId(b"r-%x" % number)
