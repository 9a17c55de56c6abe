"""Where each request goes: what a group of equal workers holds, has to do, and how fast it is."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

import msgspec

from preheat.core.adapters import Adapters
from preheat.core.beside import Ghost, Shadow
from preheat.core.costs import Errors, ServiceLearner, ServiceModel, ServiceTimes, Timing
from preheat.core.index import PrefixIndex, Stay
from preheat.core.memo import Memo
from preheat.core.placing import Candidate, Placing
from preheat.core.ramp import Ramp
from preheat.core.routing import RoutingPolicy
from preheat.core.routing.preheat import Preheat
from preheat.core.slot_ways import Prospect, quickest
from preheat.core.slots import SlotResidency
from preheat.core.told import Change, ToldResidency
from preheat.core.types import Usage
from preheat.core.warmup.found import WarmedPrefixes

_SESSIONS: Final = 65_536
_MODELS: Final = 4_096
_TOKEN_BYTES: Final = 4.0
"""Of English, until a model's own answers have told."""
_UNKNOWN: Final = ServiceModel()
_WEIGHT: Final = 0.05
_HALF: Final = 0.5
"""How much of a session's last prompt is thought to be its next one's, where no hash can tell."""
_MUCH: Final = 1_000
_LATE_SHARE: Final = 0.1
"""Of the usual time to say an answer: so much more one is given that takes longer."""
_BEATEN: Final = 1.01
"""Who takes that much longer isn't `preheat`'s equal."""
_QUIET_SHARE: Final = 0.1
"""An answer whose wait in the queue was more of its time than this says little about speeds."""


class Loadable(NamedTuple):
    """What a worker can load of a prompt from a tier below its cache: so many tokens from its beginning on,
    in so many seconds all of them."""

    tokens: int
    load_s: float


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What the router may know of a request. `blocks` are hashes of `block_bytes` bytes each of its
    prompt of `prompt_bytes`, chained, root first. A `session`'s name is its tenant's. `token_blocks` are those of its tokens, `block_tokens`
    each, where they are known: what workers that tell by events are looked up by. `loadable` is by
    worker, and so are the seconds until its adapter is there (`core.adapters`)."""

    model: str
    blocks: Sequence[int] = ()
    block_bytes: int = 512
    prompt_bytes: int = 0
    session: str = ""
    token_blocks: Sequence[int] = ()
    block_tokens: int = 0
    loadable: Mapping[int, Loadable] | None = None
    adapter_s: Mapping[int, float] | None = None
    tenant: str = ""


class Ticket(msgspec.Struct, gc=False):
    """A request that was placed, from its sending to its end. Seconds are expected ones. One that is held
    back for another has no `stay` yet."""

    number: int
    worker: int
    ask: Ask
    placing: Placing
    stay: Stay | None
    overlap_tokens: int
    miss_s: float
    queue_s: float
    in_flight: int
    ghost_blocks: int
    sent_at: float
    first_at: float = -1.0
    told_stay: Stay | None = None
    """The same stay in blocks of tokens, where the worker tells of those."""


class Lead(NamedTuple):
    """Who computes the same prefix there at this moment, where waiting for its end is cheaper than a
    second prefill; and the seconds until then, as expected."""

    ticket: Ticket
    wait_s: float


class Route(msgspec.Struct, frozen=True, gc=False):
    """Which worker, and why: the prompt's expected tokens and those of them that it holds, the most
    that any of the others holds, the seconds of its queue beside the shortest one, and the tokens more
    that it loads.

    With a `lead` it isn't sent yet: the driver holds it back (`Router.leads`), then says `Router.go`.
    """

    ticket: Ticket
    input_tokens: int
    overlap_tokens: int
    best_overlap_tokens: int
    queue_s: float
    least_queue_s: float
    lead: Lead | None = None
    loadable_tokens: int = 0


class Known(msgspec.Struct, frozen=True):
    """What is known of one worker. `trust` is how (`core.residency`). Of the answers whose prompt tokens it
    counted: those tokens, those its cache had, and those that it would have had with round robin
    (`core.beside`): the difference is what routing saved. Of its requests, how many a second rule would have
    sent there too, and how much sooner (in sum) the first tokens of the others were expected here."""

    trust: str = ""
    held_blocks: int = 0
    capacity_blocks: int = 0
    queue_s: float = 0.0
    input_tokens: int = 0
    cached_tokens: int = 0
    ghost_tokens: int = 0
    shadow_agreed: int = 0
    shadow_differed: int = 0
    shadow_sooner_s: float = 0.0
    is_back: bool = False
    """It came back cold and gets a growing share of the requests only (`core.ramp`)."""


class _Lane:
    """What one worker was given and hasn't answered."""

    def __init__(self, number: int) -> None:
        self.candidate = Candidate(number=number)
        self.slots: SlotResidency | None = None
        self.lead: Lead | None = None  # of the request that is being placed
        self.guess_blocks: float = 0  # which that one may find in its slots, or may not
        self.tickets: dict[int, Ticket] = {}
        self.waiting: dict[int, Ticket] = {}  # no first byte yet, oldest first
        self.waiting_s = 0.0
        self.head_at = 0.0  # when the first of them came to be computed
        self.ends_at = -inf  # when all of them are, if none takes longer than expected
        self.rest_s = 0.0  # what all but the first take
        self.reported_s = 0.0  # what others have sent there, by the worker's own word
        self.reported_at = 0.0  # when it said so; it is being done since
        self.input_tokens = self.cached_tokens = self.ghost_tokens = 0
        self.tells = False
        self.shadow_agreed = self.shadow_differed = 0
        self.shadow_sooner_s = 0.0

    def queue_s(self, now: float) -> float:
        """Seconds of prefill before one that comes now."""
        left_s = max(self.ends_at - now, self.rest_s)
        if self.reported_s:
            left_s += max(0.0, self.reported_s - (now - self.reported_at))
        return left_s

    def has_now(self, blocks: Sequence[int]) -> bool:
        """Whether the guess about its slots is known to be right, at a glance."""
        if self.slots is None or not self.slots.has_now(blocks, int(self.guess_blocks)):
            return False
        self.guess_blocks = 0
        return True

    def add(self, ticket: Ticket, now: float) -> None:
        if not self.waiting:
            self.head_at = now
        self.tickets[ticket.number] = self.waiting[ticket.number] = ticket
        self.waiting_s += ticket.miss_s
        self._note()

    def began(self, ticket: Ticket, now: float) -> None:
        """Its prompt is computed, or never will be."""
        if self.waiting.pop(ticket.number, None) is not None:
            self.waiting_s -= ticket.miss_s
            self.head_at = now
            self._note()

    def over(self, ticket: Ticket) -> None:
        """It has ended."""
        self.tickets.pop(ticket.number, None)
        self.candidate.in_flight = len(self.tickets)

    def _note(self) -> None:
        """What is asked of each worker for each request is kept at hand."""
        self.candidate.in_flight, self.candidate.waiting = len(self.tickets), len(self.waiting)
        if self.waiting:
            self.ends_at = self.head_at + self.waiting_s
            self.rest_s = max(0.0, self.waiting_s - next(iter(self.waiting.values())).miss_s)
        else:
            self.waiting_s = self.rest_s = 0.0  # a sum of what came and went isn't exactly nothing
            self.ends_at = -inf


class Router:
    """One group's requests, each to the worker where the policy's cost is least.

    The driver says who may be asked, sends, and reports: `placed`, `began` at the first byte, then
    `ended` or `failed`. What a prompt costs is learned from answers (`core.costs`), each model's
    bytes a token too; so nobody states an engine's speed.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        *,
        shadow: RoutingPolicy | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.index = PrefixIndex()
        self.adapters = adapters or Adapters()
        self.warmed = WarmedPrefixes()
        self._policy = self._ramp = Ramp(policy)
        self._shadow = None if shadow is None else Shadow(shadow)
        self._goes_by_seconds = shadow is None and isinstance(policy, Preheat)
        self._ghost = Ghost()
        self._learner = ServiceLearner()
        self._service: Memo[str, ServiceModel] = Memo(_MODELS)
        self._token_bytes: Memo[str, float] = Memo(_MODELS)
        self._decoding = ServiceTimes()
        self._sessions: Memo[str, tuple[int, int]] = Memo(_SESSIONS)
        self._lanes: dict[int, _Lane] = {}
        self._numbers = 0
        self._has_loadable = False  # of the request before
        self._miss_s = 0.0
        self._block_tokens = 512 / _TOKEN_BYTES

    def place(self, ask: Ask, allowed: Sequence[int], now: float) -> Route:
        """Of these workers (at least one), the one that gets it; it counts as sent there, unless it is
        held back."""
        chosen, placing, best_tokens, least_queue_s = self.choose(ask, allowed, now)
        ticket = self._sent(ask, placing, chosen, allowed, now)
        lead = self._lanes[chosen.number].lead
        if lead is None:
            self.go(ticket, now)
        return Route(
            ticket,
            placing.input_tokens,
            chosen.overlap_tokens,
            best_tokens,
            chosen.queue_s,
            least_queue_s,
            lead,
            chosen.loadable_tokens,
        )

    def leads(self, ticket: Ticket, now: float) -> Lead | None:
        """For whom one that is held back should wait now; None: it may `go`."""
        lane = self._lanes.get(ticket.worker)
        if lane is None or lane.slots is None:
            return None
        self._foretell(lane, ticket.ask, ticket.placing.input_tokens, now)
        return lane.lead

    def go(self, ticket: Ticket, now: float) -> None:
        """It is sent now; to a worker that has left meanwhile nothing is noted."""
        if ticket.stay is None and ticket.worker in self._lanes:
            ask = ticket.ask
            ticket.stay = self.index.sent(ticket.worker, ask.blocks, now)
            if ask.token_blocks:
                ticket.told_stay = self.index.sent_tokens(ticket.worker, ask.token_blocks, now)

    def choose(
        self, ask: Ask, allowed: Sequence[int], now: float
    ) -> tuple[Candidate, Placing, int, float]:
        """The rule's choice alone, with the prompt as it saw it, the most tokens of it that any of all
        workers holds, and the seconds that wait at the least busy of these."""
        token_bytes = self._token_bytes[ask.model] or _TOKEN_BYTES
        tokens = max(1, round(ask.prompt_bytes / token_bytes))
        block_tokens = ask.block_bytes / token_bytes
        service = self._service[ask.model] or _UNKNOWN
        session = f"{ask.tenant}\0{ask.session}" if ask.session else ""
        placing = Placing(tokens, ask.blocks, max(1, round(block_tokens)), session)
        overlaps: Mapping[int, float] = self.index.overlaps(ask.blocks) if ask.blocks else {}
        if ask.token_blocks and self.index.listened:
            overlaps = self._as_told(overlaps, ask, block_tokens)
        best = max(overlaps.values(), default=0) * block_tokens
        prior = None if ask.blocks or not session else self._sessions[session]
        if prior is not None:
            overlaps = {prior[0]: _HALF * prior[1] / block_tokens}
        found: dict[float, tuple[int, float]] = {0: (0, service.prefill_s(tokens))}
        lanes, depths = self._lanes, overlaps.get
        candidates: list[Candidate] = []
        guessed: list[_Lane] = []
        for number in allowed:
            lane = lanes.get(number) or self._lane(number)
            one, left_s = lane.candidate, lane.ends_at - now
            one.queue_s = left_s if left_s > lane.rest_s else lane.rest_s  # noqa: FURB136  for speed
            if lane.reported_s:
                one.queue_s = lane.queue_s(now)
            depth = depths(number, 0)
            here = found.get(depth)
            if here is None:
                known = min(int(depth * block_tokens), tokens - 1)
                here = found[depth] = known, service.prefill_s(tokens - known, known)
            one.overlap_tokens, one.miss_s = here
            if lane.slots is not None:
                lane.lead = None
                lane.guess_blocks = depth
                if depth:
                    guessed.append(lane)
            candidates.append(one)
        if guessed and ask.blocks:
            self._foretell_all(guessed, ask, tokens, found[0][1], now)
        if ask.loadable or ask.adapter_s or self._has_loadable:
            self._lay_below(ask, candidates, tokens, service)
        chosen = candidates[self._policy.choose(placing, candidates, now)]
        if guessed and ask.blocks and lanes[chosen.number].guess_blocks:
            self._foretell(lanes[chosen.number], ask, tokens, now)
        if self._shadow is not None:
            self._compare(self._shadow, placing, candidates, chosen, now)
        least_queue_s = min([one.queue_s for one in candidates])
        return chosen, placing, min(int(best), tokens - 1), least_queue_s

    def waited(self, ticket: Ticket, wait_s: float) -> None:
        """It is sent only now, so long after it was placed: that says nothing about prompts."""
        ticket.queue_s += wait_s

    def began(self, ticket: Ticket, now: float) -> None:
        """Its first byte has come."""
        if ticket.first_at < 0.0:
            ticket.first_at = now
            self._computed(ticket, now)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float) -> None:
        """It was answered whole; in one piece where nothing had begun before. `usage` is the engine's
        count, if it gave one."""
        found: int | None = None
        if usage is not None and usage.input_tokens > 0:
            usage = self.counted(ticket.worker, usage)
            self._learn(ticket, usage, now)
            self._count(ticket, usage)
            if usage.tells_cached:
                found = usage.cached_tokens
        self.began(ticket, now)
        self._decoding.learn(ticket.ask.model, now - ticket.first_at)
        self._over(ticket, now)
        self._arrived(ticket, found, now)

    def failed(self, ticket: Ticket, now: float) -> None:
        """It has ended otherwise: what was computed by then, if anything, stays there."""
        is_computed = ticket.first_at >= 0.0
        self._computed(ticket, now)
        self._over(ticket, now)
        if is_computed:
            self._arrived(ticket, None, now)
            return
        for stay in (ticket.stay, ticket.told_stay):
            if stay is not None:
                self.index.failed(stay, now)

    def counted(self, worker: int, usage: Usage) -> Usage:
        """What an answer's count means: vLLM and SGLang tell cached tokens, but leave out a zero. So one
        that has told some once tells always."""
        lane = self._lanes.get(worker)
        if lane is None or usage.tells_cached:
            if lane is not None:
                lane.tells = True
            return usage
        return msgspec.structs.replace(usage, tells_cached=lane.tells)

    def tells(self, worker: int) -> bool:
        """Whether its answers are known to tell cached tokens."""
        lane = self._lanes.get(worker)
        return lane is not None and lane.tells

    def service(self, model: str) -> ServiceModel | None:
        """What was learned of this model's speed; None before ten answers."""
        return self._service[model]

    def expected_s(self, ticket: Ticket) -> float:
        """From its prompt's beginning to the end of its answer; inf before ten answers."""
        decoding_s = self._decoding.expected_s(ticket.ask.model)
        return inf if decoding_s is None else ticket.miss_s + decoding_s

    def has_files(self, worker: int, tokens: int, now: float) -> None:
        """Its slots are named by us and kept in files, which together hold so many tokens: what runs is
        waited for, and what is pushed out comes back, by whoever names them."""
        lane = self._lane(worker)
        if lane.slots is not None:
            lane.slots = lane.lead = None
            lane.guess_blocks = 0
            self.index.left(worker)
        self.holds_tokens(worker, tokens, now)

    def errors(self, model: str) -> Errors | None:
        """How far off the expected TTFTs were."""
        return self._learner.errors(model)

    def known(self, worker: int, now: float) -> Known:
        """All that an operator may want to see of a worker."""
        lane, residency = self._lane(worker), self.index.best_known(worker)
        return Known(
            residency.trust,
            len(residency),
            residency.capacity_blocks,
            lane.queue_s(now),
            lane.input_tokens,
            lane.cached_tokens,
            lane.ghost_tokens,
            lane.shadow_agreed,
            lane.shadow_differed,
            lane.shadow_sooner_s,
            self._ramp.is_back(worker),
        )

    def queue_s(self, worker: int, now: float) -> float:
        """Seconds of prefill that wait at this worker."""
        lane = self._lanes.get(worker)
        return 0.0 if lane is None else lane.queue_s(now)

    def has_slots(self, worker: int, slots: int) -> None:
        """It is a llama.cpp server with so many, whose prompts share nothing while they run."""
        self.index.has_slots(worker, slots)
        residency = self.index.residency(worker)
        self._lane(worker).slots = residency if isinstance(residency, SlotResidency) else None
        self._ghost.has_slots(worker, slots)

    def holds_tokens(self, worker: int, tokens: int, now: float) -> None:
        """What its KV cache holds, by its own word."""
        blocks = max(1, int(tokens / self._block_tokens))
        self.index.resized(worker, blocks, now)
        self._ghost.resized(worker, blocks, now)

    def reported(self, worker: int, waiting: int, now: float) -> None:
        """How many wait there in all, by its own word: who sent the others is unknown, each is
        thought to take what ours took lately."""
        lane = self._lane(worker)
        others = max(0, waiting - len(lane.waiting))
        lane.reported_s = others * self._miss_s
        lane.reported_at = now

    def hears(self, worker: int, told: ToldResidency) -> None:
        """It tells by events what it holds from now on."""
        self.index.hears(worker, told)

    def told(self, worker: int, change: Change) -> None:
        """What its events have changed."""
        self.index.told(worker, change)

    def learned(
        self, worker: int, blocks: Sequence[int], token_blocks: Sequence[int], now: float
    ) -> None:
        """Another process of ours has sent a prompt there."""
        for stay in (
            self.index.sent(worker, blocks, now),
            self.index.sent_tokens(worker, token_blocks, now),
        ):
            if stay is not None:
                self.index.ended(stay, now, None)

    def returned(self, worker: int, now: float) -> None:
        """It takes requests again after a restart, or it is new: a growing share of them."""
        self._ramp.returned(worker, now)

    def cleared(self, worker: int) -> None:
        """Its cache is empty: it was restarted, or reset."""
        self.warmed.cleared(worker)
        self.index.cleared(worker)
        self.adapters.cleared(worker)
        self._ghost.cleared(worker)

    def left(self, worker: int) -> None:
        """It is no more."""
        self.index.left(worker)
        self.adapters.left(worker)
        self._ghost.left(worker)
        self._ramp.left(worker)
        self.warmed.cleared(worker)
        self._lanes.pop(worker, None)

    def _lane(self, number: int) -> _Lane:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane(number)
        return lane

    def _sent(
        self, ask: Ask, placing: Placing, chosen: Candidate, allowed: Sequence[int], now: float
    ) -> Ticket:
        self._numbers += 1
        ticket = Ticket(
            self._numbers,
            chosen.number,
            ask,
            placing,
            None,
            chosen.overlap_tokens,
            chosen.miss_s,
            chosen.queue_s,
            chosen.in_flight,
            self._ghost.sent(self._numbers, ask.blocks, allowed, now),
            now,
        )
        self._lanes[chosen.number].add(ticket, now)
        self._miss_s += _WEIGHT * (chosen.miss_s - self._miss_s)
        if placing.session:
            self._sessions.put(placing.session, (chosen.number, placing.input_tokens))
        return ticket

    def _as_told(
        self, sent: Mapping[int, float], ask: Ask, block_tokens: float
    ) -> Mapping[int, float]:
        """Whoever tells by events holds what it has told, whatever was sent there; in blocks of text."""
        listened, unit = self.index.listened, ask.block_tokens / block_tokens
        told = self.index.overlaps(ask.token_blocks)
        found = {worker: blocks for worker, blocks in sent.items() if worker not in listened}
        found.update((one, blocks * unit) for one, blocks in told.items() if one in listened)
        return found

    def _lay_below(
        self,
        ask: Ask,
        candidates: Sequence[Candidate],
        tokens: int,
        service: ServiceModel,
    ) -> None:
        """What each would load behind what its cache holds, into its candidate; who has some of it loads it,
        quicker than computing or not. Before it its adapter, where it lacks that."""
        loadable, adapter_s = ask.loadable or {}, ask.adapter_s or {}
        for lane in self._lanes.values():
            one = lane.candidate
            one.loadable_tokens, one.load_s = 0, adapter_s.get(one.number, 0.0)
        self._has_loadable = bool(loadable or adapter_s)
        for one in candidates:
            below = loadable.get(one.number)
            known = 0 if below is None else min(below.tokens, tokens - 1)
            if below is None or known <= one.overlap_tokens:
                continue
            one.loadable_tokens = known - one.overlap_tokens
            one.load_s += below.load_s * one.loadable_tokens / below.tokens
            one.miss_s = service.prefill_s(tokens - known, known)

    def _arrived(self, ticket: Ticket, cached_tokens: int | None, now: float) -> None:
        """Its prompt is computed there; so much of it was, by the engine's count."""
        found = told = None
        if cached_tokens is not None:
            found = cached_tokens / ticket.placing.block_tokens
            told = cached_tokens / max(1, ticket.ask.block_tokens)
            told = min(told, len(ticket.ask.token_blocks))  # its end may not have been tokenised
        if ticket.stay is not None:
            self.index.ended(ticket.stay, now, found)
        if ticket.told_stay is not None:
            self.index.ended(ticket.told_stay, now, told)

    def _foretell_all(
        self, lanes: list[_Lane], ask: Ask, tokens: int, cold_s: float, now: float
    ) -> None:
        """Their candidates so far have all that is anywhere in their slots, the least that a request can
        cost there. For a rule that goes by seconds only those are looked at more closely that aren't
        beaten even so by one that is sure; of these who would be close counts as cold."""
        if self._ramp.is_on or not self._goes_by_seconds:
            for lane in lanes:
                self._foretell(lane, ask, tokens, now)
            return
        least_s = [lane.candidate.queue_s + lane.candidate.miss_s for lane in lanes]
        near_s = _BEATEN * min(least_s)
        sure_s = sure_miss_s = inf
        for lane, seconds in zip(lanes, least_s, strict=True):
            if seconds <= near_s and lane.has_now(ask.blocks):
                sure_s, sure_miss_s = seconds, lane.candidate.miss_s
        most_s = _BEATEN * sure_s
        for lane in [
            lane
            for lane, seconds in zip(lanes, least_s, strict=True)
            if seconds <= most_s or lane.candidate.miss_s < sure_miss_s
        ]:
            one = lane.candidate
            if not lane.guess_blocks:
                continue
            if one.queue_s + one.miss_s >= sure_s and one.miss_s >= sure_miss_s:
                one.overlap_tokens, one.miss_s = 0, cold_s
                continue
            self._foretell(lane, ask, tokens, now)
            if one.queue_s + one.miss_s < sure_s:
                sure_s, sure_miss_s = one.queue_s + one.miss_s, one.miss_s

    def _foretell(self, lane: _Lane, ask: Ask, tokens: int, now: float) -> None:
        """What a prompt would find in a server's slots, and whether it should wait for one that
        computes it: into the lane's candidate and its `lead`. What runs is shared with nobody."""
        assert lane.slots is not None
        lane.lead, one = None, lane.candidate
        most, lane.guess_blocks = int(lane.guess_blocks) or None, 0
        usable = lane.slots.usable(ask.blocks, most)
        service = self._service[ask.model] or _UNKNOWN
        block_tokens = ask.block_bytes / (self._token_bytes[ask.model] or _TOKEN_BYTES)
        here = min(int(usable.blocks * block_tokens), tokens - 1)
        one.overlap_tokens = here
        one.miss_s = service.prefill_s(tokens - here, here)
        leader = _holder(lane.tickets.values(), usable.running)
        decoding_s = self._decoding.expected_s(ask.model)
        if leader is None or decoding_s is None:
            return
        later = min(int(usable.later_blocks * block_tokens), tokens - 1)
        rest_s = service.prefill_s(tokens - later, later)
        leader_s = _left_s(leader, decoding_s, now)
        prospect = Prospect(
            queue_s=one.queue_s, recompute_s=one.miss_s, leader_s=leader_s, led_rest_s=rest_s
        )
        if quickest(prospect).way == "wait":
            one.overlap_tokens, one.miss_s = later, rest_s
            one.queue_s = max(one.queue_s, leader_s)
            lane.lead = Lead(leader, leader_s)

    def _computed(self, ticket: Ticket, now: float) -> None:
        lane = self._lanes.get(ticket.worker)
        if lane is not None:
            lane.began(ticket, now)

    def _over(self, ticket: Ticket, now: float) -> None:
        lane = self._lanes.get(ticket.worker)
        if lane is not None:
            lane.over(ticket)
        self._policy.finished(ticket.placing, ticket.worker, now)
        if self._shadow is not None:
            self._shadow.finished(ticket.placing, ticket.worker, now)
        self._ghost.ended(ticket.number, now)

    def _count(self, ticket: Ticket, usage: Usage) -> None:
        if not usage.tells_cached:
            return
        ghost_tokens = ticket.ghost_blocks * ticket.placing.block_tokens
        lane = self._lane(ticket.worker)
        lane.input_tokens += usage.input_tokens
        lane.cached_tokens += usage.cached_tokens
        lane.ghost_tokens += min(ghost_tokens, usage.input_tokens - 1)

    def _compare(
        self,
        shadow: Shadow,
        placing: Placing,
        candidates: Sequence[Candidate],
        chosen: Candidate,
        now: float,
    ) -> None:
        is_same, sooner_s = shadow.compare(placing, candidates, chosen, now)
        lane = self._lane(chosen.number)
        lane.shadow_agreed += is_same
        lane.shadow_differed += not is_same
        lane.shadow_sooner_s += sooner_s

    def _learn(self, ticket: Ticket, usage: Usage, now: float) -> None:
        model = ticket.ask.model
        if ticket.ask.prompt_bytes:
            said = ticket.ask.prompt_bytes / usage.input_tokens
            known = self._token_bytes[model]
            self._token_bytes.put(
                model, said if known is None else known + _WEIGHT * (said - known)
            )
        ttft_s = ticket.first_at - ticket.sent_at if ticket.first_at >= 0.0 else None
        service_s = now - ticket.sent_at
        if ticket.queue_s > _QUIET_SHARE * (service_s if ttft_s is None else ttft_s):
            return
        # One that doesn't say what was cached is believed to have had what it is thought to hold.
        cached = usage.cached_tokens if usage.tells_cached else ticket.overlap_tokens
        cached = min(cached, usage.input_tokens - 1)
        self._learner.learn(
            model,
            Timing(
                new_tokens=usage.input_tokens - cached,
                context_tokens=cached,
                output_tokens=usage.output_tokens,
                ttft_s=ttft_s,
                service_s=service_s,
                sequences=ticket.in_flight + 1.0,
            ),
        )
        learned = self._learner.service(model)
        # Of hits alone nobody learns what a miss costs: it would look free.
        if learned is not None and learned.prefill_s(_MUCH) > 0.0:
            self._service.put(model, learned)


def _holder(tickets: Iterable[Ticket], blocks: Sequence[int] | None) -> Ticket | None:
    """Whose prompt these very blocks are."""
    if blocks is None:
        return None
    return next((one for one in tickets if one.ask.blocks is blocks), None)


def _left_s(ticket: Ticket, decoding_s: float, now: float) -> float:
    """Until a request under way ends, as expected; one that is late already takes a little longer."""
    if ticket.first_at >= 0.0:
        return max(_LATE_SHARE * decoding_s, ticket.first_at + decoding_s - now)
    return max(0.0, ticket.sent_at + ticket.queue_s + ticket.miss_s - now) + decoding_s
