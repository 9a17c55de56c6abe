"""What the gateway would know of a stack if it stood before it: its index, its router, its ghost, fed from
what the stack did by itself."""

from collections.abc import Sequence
from math import inf
from typing import Final

import msgspec

from preheat.core.blocks import BLOCK_BYTES
from preheat.core.costs import ServiceModel
from preheat.core.memo import Memo
from preheat.core.placing import Candidate, Placing
from preheat.core.router import Ask, Known, Router, Ticket
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.lab.observe.lines import Seen
from preheat.lab.observe.rates import Rate

_SEEN_BLOCKS: Final = 524_288
"""67 million tokens of English, 60 MB of ours: what is older than these counts as new."""
_MODELS: Final = 256
_TOKEN_BYTES: Final = 4.0
_AGREED: Final = 0.9
"""A share of what was thought to be cached that counts as found, as in `core.witness`."""
_UNPLACED: Final = 0.1
"""A share of the requests: with more of them at unknown places nobody knows what a server lacks."""
_UNKNOWN: Final = ServiceModel()


class Followed:
    """The rule that was followed: whatever the stack did."""

    def __init__(self) -> None:
        self.number = 0

    def choose(
        self,
        placing: Placing,  # noqa: ARG002  the prompt doesn't matter, nor the time
        candidates: Sequence[Candidate],
        now: float,  # noqa: ARG002
    ) -> int:
        """The place of the worker that answered."""
        return next(at for at, one in enumerate(candidates) if one.number == self.number)

    def finished(self, placing: Placing, number: int, now: float) -> None:
        """Nothing is learned from that."""


class Account(msgspec.Struct, kw_only=True):
    """What one worker did. Tokens are those of the answers that tell how many were cached (`told`);
    of them `thought_tokens` were thought to be cached, and `agreed` answers found about as much."""

    inflow: Rate
    requests: int = 0
    failed: int = 0
    told: int = 0
    agreed: int = 0
    input_tokens: int = 0
    thought_tokens: int = 0
    cached_tokens: int = 0


class Repeats(msgspec.Struct, kw_only=True):
    """Prompts of all workers together. `repeated_tokens` stood at the beginning of an earlier prompt,
    too. Of the requests whose answers tell what was cached (`told_…`): that, and `again_tokens` that
    somebody had computed before and that were computed again, in `again_s` of `prefill_s` seconds
    (of those whose model's speed was known by then)."""

    requests: int = 0
    input_tokens: int = 0
    repeated_tokens: int = 0
    told_input_tokens: int = 0
    told_repeated_tokens: int = 0
    told_cached_tokens: int = 0
    again_tokens: int = 0
    again_s: float = 0.0
    prefill_s: float = 0.0


class Fleet:
    """Pure: the time of each event is given, and never goes back.

    The router's rule is what was done; ours is its shadow, so that the difference is what ours would
    have changed, one request at a time, each from where the stack's own choices had led.
    """

    def __init__(self, workers: int) -> None:
        self._followed = Followed()
        self.router = Router(self._followed, shadow=POLICIES["preheat"]())
        self.accounts = [Account(inflow=Rate()) for _ in range(workers)]
        self.repeats = Repeats()
        self.unplaced = 0
        self.block_tokens = 0
        """Of blocks of which servers tell by events; 0 before they do."""
        self._seen: Memo[int, int] = Memo(_SEEN_BLOCKS)
        self._token_bytes: Memo[str, list[int]] = Memo(_MODELS)

    def began(self, seen: Seen, worker: int | None, now: float) -> tuple[Ticket | None, int]:
        """A request came, and that worker answered it later; None: nobody says who. Returns it as placed,
        and how many tokens of its prompt somebody had been asked before."""
        repeated = self._repeated(seen)
        if worker is None:
            self.unplaced += 1
            return None, repeated
        ask = Ask(
            seen.model,
            seen.blocks,
            BLOCK_BYTES,
            seen.prompt_bytes,
            seen.session,
            seen.token_blocks,
            self.block_tokens,
        )
        self._followed.number = worker
        self.accounts[worker].requests += 1
        route = self.router.place(ask, range(len(self.accounts)), now)
        self.router.go(route.ticket, now)  # nobody was held back
        return route.ticket, repeated

    def ended(self, ticket: Ticket, seen: Seen, repeated: int, now: float) -> None:
        """It was answered, or failed."""
        account = self.accounts[ticket.worker]
        if seen.is_failed:
            account.failed += 1
            self.router.failed(ticket, now)
            return
        usage = self._usage(ticket.worker, seen)
        if seen.service_s < 0.0:
            # Without a duration nothing can be learned of speeds. The router learns none from one that
            # waited long in a queue.
            ticket.queue_s = inf
        self.router.ended(ticket, usage, now)
        if usage is None:
            return
        had = usage.cached_tokens if usage.tells_cached else ticket.overlap_tokens
        account.inflow.add(max(0, usage.input_tokens - had), now)
        if usage.tells_cached:
            self._compare(account, ticket, usage)
            self._count(seen.model, usage, repeated)

    def cached_tokens(self, worker: int, seen: Seen) -> int | None:
        """What an answer tells, and be it by silence."""
        silent = 0 if self.router.tells(worker) else None
        return silent if seen.cached_tokens is None else seen.cached_tokens

    def known(self, worker: int, now: float) -> Known:
        """What the router knows of it: all that it holds is counted for that."""
        return self.router.known(worker, now)

    def learned(self, model: str) -> ServiceModel | None:
        """Its speeds; None as long as its answers don't tell what a token of a prompt takes: of prompts
        that are all of one length nobody can say."""
        service = self.router.service(model)
        return service if service is not None and service.prefill_s(1) else None

    def service(self, model: str) -> ServiceModel:
        """Its speeds, learned or assumed."""
        return self.learned(model) or _UNKNOWN

    def tokens(self, model: str, prompt_bytes: int) -> int:
        """About how many a text has, by what its model's answers counted."""
        said = self._token_bytes[model]
        return round(prompt_bytes / (said[0] / said[1] if said else _TOKEN_BYTES))

    def held_tokens(self, worker: int, known: Known) -> int:
        """About how many a worker holds, by what is known of it."""
        is_told = worker in self.router.index.listened
        size = self.block_tokens if is_told else BLOCK_BYTES / _TOKEN_BYTES
        return int(known.held_blocks * size)

    def held(self, blocks: Sequence[int], token_blocks: Sequence[int]) -> list[float | None]:
        """Which share of a prefix each worker holds: by its own word where it tells, and the prefix's
        tokens are known; else by what it was sent. None where too often nobody says who was."""
        index = self.router.index
        is_known = self.unplaced <= _UNPLACED * self.repeats.requests
        shares: list[float | None] = [0.0 if is_known else None] * len(self.accounts)
        for names, is_told in ((blocks, False), (token_blocks, True)):
            found = index.overlaps(names) if names else {}
            for worker in range(len(shares)):
                if is_told != (worker in index.listened and bool(token_blocks)):
                    continue
                if is_told or is_known:
                    shares[worker] = found.get(worker, 0) / len(names)
        return shares

    def _repeated(self, seen: Seen) -> int:
        """How many tokens of it stood at the beginning of an earlier prompt."""
        known = next(
            (at for at, one in enumerate(seen.blocks) if not self._seen[one]), len(seen.blocks)
        )
        for one in seen.blocks[known:]:
            self._seen.put(one, 1)
        if seen.input_tokens > 0 and seen.prompt_bytes:
            said = self._token_bytes[seen.model] or [0, 0]
            self._token_bytes.put(
                seen.model, [said[0] + seen.prompt_bytes, said[1] + seen.input_tokens]
            )
        tokens = max(0, seen.input_tokens) or self.tokens(seen.model, seen.prompt_bytes)
        repeated = 0
        if known:
            repeated = min(round(tokens * known * BLOCK_BYTES / seen.prompt_bytes), tokens - 1)
        self.repeats.requests += 1
        self.repeats.input_tokens += tokens
        self.repeats.repeated_tokens += repeated
        return repeated

    def _usage(self, worker: int, seen: Seen) -> Usage | None:
        if seen.input_tokens <= 0:
            return None
        usage = Usage(
            seen.input_tokens,
            max(0, seen.output_tokens),
            min(seen.cached_tokens or 0, seen.input_tokens),
            tells_cached=seen.cached_tokens is not None,
        )
        return self.router.counted(worker, usage)

    @staticmethod
    def _compare(account: Account, ticket: Ticket, usage: Usage) -> None:
        thought, block = ticket.overlap_tokens, ticket.placing.block_tokens
        account.told += 1
        account.input_tokens += usage.input_tokens
        account.thought_tokens += thought
        account.cached_tokens += usage.cached_tokens
        is_less = usage.cached_tokens < _AGREED * thought - block
        account.agreed += not is_less and usage.cached_tokens <= thought + block

    def _count(self, model: str, usage: Usage, repeated: int) -> None:
        one = self.repeats
        one.told_input_tokens += usage.input_tokens
        one.told_repeated_tokens += repeated
        one.told_cached_tokens += usage.cached_tokens
        again = max(0, repeated - usage.cached_tokens)
        one.again_tokens += again
        service = self.learned(model)
        if service is not None:
            fresh = usage.input_tokens - usage.cached_tokens
            whole_s = service.prefill_s(fresh, usage.cached_tokens)
            one.prefill_s += whole_s
            one.again_s += whole_s - service.prefill_s(fresh - again, usage.cached_tokens + again)
