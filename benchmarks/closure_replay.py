"""The replayed side of `closure`: the gateway's rules before simulated llama.cpp servers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from preheat.replay.fitting import Fitted, fit, served_of
from preheat.replay.kernel import Kernel
from preheat.replay.llamacpp import Host, Prompt, Server, ServerSpec
from preheat.replay.shared_text import TextOverlap, seams_of
from preheat.traces.own import Logged


class Asked(msgspec.Struct, frozen=True):
    """What the log says of a request, and of how it was answered."""

    at: float
    key: str
    session: str
    blocks: tuple[int, ...]
    prompt_bytes: int
    input_tokens: int
    output_tokens: int
    max_tokens: int
    layer: str
    worker: str
    cached_tokens: int
    ttft_s: float
    service_s: float

    @classmethod
    def of(cls, logged: Logged, began_us: int) -> Asked:
        row = logged.fields
        return cls(
            at=(logged.at_us - began_us) / 1e6,
            key=row["key"].hex(),
            session=row["session"].hex() if row["session"] else "",
            blocks=tuple(logged.blocks.tolist()),
            prompt_bytes=row["prompt_bytes"],
            input_tokens=row["input_tokens"],
            output_tokens=row["output_tokens"],
            max_tokens=row["max_tokens"],
            layer=logged.layer,
            worker=row["engine_worker"] or "",
            cached_tokens=row["cached_tokens"] or 0,
            ttft_s=row["ttft_s"] or 0.0,
            service_s=row["service_s"] or 0.0,
        )

    @property
    def is_kept(self) -> bool:
        """Whether its answer was stored: it ended by itself."""
        return self.output_tokens < self.max_tokens

    def prompt(self, number: int, worker: int = -1) -> Prompt:
        """As a slot sees it."""
        return Prompt(
            number,
            self.at,
            self.input_tokens,
            self.output_tokens,
            self.blocks,
            self.prompt_bytes,
            self.session,
            self.key,
            worker,
        )


class Replayed(msgspec.Struct):
    """What came of one request: which layer answered, and of a forward its prompt."""

    layer: str
    prompt: Prompt | None = None


class Learned(msgspec.Struct, frozen=True):
    """What the first part of a log tells of the engines."""

    service: Fitted
    overlap: TextOverlap


def learned(rows: Sequence[Logged], asked: Sequence[Asked], spec: ServerSpec) -> Learned:
    """From the requests that an engine answered."""
    forwards = [one for one in asked if one.layer == "forward"]
    prompts = []
    for number, one in enumerate(forwards):
        prompt = one.prompt(number)
        prompt.cached_tokens = one.cached_tokens
        prompts.append(prompt)
    return Learned(
        fit(served_of(rows), batch_tokens=spec.batch_tokens, is_one_host=True),
        TextOverlap(seams=seams_of(prompts)),
    )


class Replay:
    """The whole run from its arrivals alone. `placed` says which server each forward went to; else
    the gateway's rule does. `prefill_s` is the engines' count from `split_at` on."""

    def __init__(
        self,
        asked: Sequence[Asked],
        known: Learned,
        spec: ServerSpec,
        *,
        split_at: float = 0.0,
        servers: int = 2,
        placed: Sequence[int] | None = None,
    ) -> None:
        self.came: list[Replayed] = []
        self.prefill_s = 0.0
        self._asked = asked
        self._placed = placed
        self._kernel = Kernel()
        service, host = known.service.model, Host(known.service.slowdown)
        self._servers = [
            Server(spec, service, self._kernel, known.overlap, self._ended, host=host)
            for _ in range(servers)
        ]
        self._turn = 0
        self._stored: set[str] = set()
        self._flights: set[str] = set()
        for number, one in enumerate(asked):
            self._kernel.plan(one.at, self._arrive, number)
        self._kernel.run(split_at)
        before_s = self._computed_s()
        self._kernel.run()
        self.prefill_s = self._computed_s() - before_s

    def _computed_s(self) -> float:
        return sum(server.prefill_s for server in self._servers)

    def _arrive(self, number: int) -> None:
        one = self._asked[number]
        if one.key in self._stored:
            self.came.append(Replayed("exact"))
        elif one.key in self._flights:
            self.came.append(Replayed("join"))
        else:
            if self._placed is not None:
                place = self._placed[number]
            else:
                place = least_loaded([server.in_flight for server in self._servers], self._turn)
                self._turn = place + 1
            prompt = one.prompt(number, place)
            self.came.append(Replayed("forward", prompt))
            self._flights.add(one.key)
            self._servers[place].submit(prompt)

    def _ended(self, prompt: Prompt) -> None:
        one = self._asked[prompt.number]
        self._flights.discard(one.key)
        if one.is_kept:
            self._stored.add(one.key)


def least_loaded(loads: Sequence[int], turn: int) -> int:
    """Who of a group of equal upstreams the gateway asks: fewest in flight, in turn where that is
    several (`preheat.engines.group`)."""
    count = len(loads)
    return min(((turn + step) % count for step in range(count)), key=loads.__getitem__)
