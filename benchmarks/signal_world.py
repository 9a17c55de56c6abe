"""One llama.cpp server's slots with their files, in virtual time: `signals` plays sessions there."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import msgspec

from preheat.core.costs import ServiceModel
from preheat.core.pauses import Pauses
from preheat.core.slot_desk import Holding, Seat, SlotDesk, alike
from preheat.core.slot_ways import is_worth_writing

TENANT = "t"
TOOL_CALL = "tool-call"
OUTPUT_TOKEN_S = 0.01
"""A token said, whatever else the server does."""


class Turn(msgspec.Struct, frozen=True):
    """A request, `pause_s` after the answer before it (the first: after the start of all). Blocks are
    the prompt's whole ones. `says_over`: the client knows that it is the last, and says so."""

    pause_s: float
    blocks: Sequence[int]
    tokens: int
    output_tokens: int
    calls_tool: bool = False
    says_over: bool = False


class Prices(msgspec.Struct, frozen=True):
    """Of computing; bytes of a token; seconds of the engine to save and to load a byte, and for each
    file besides."""

    service: ServiceModel
    token_bytes: float
    save_byte_s: float
    load_byte_s: float
    move_s: float


class Rules(msgspec.Struct, frozen=True):
    """Which signals are heard. `judged`: by the chance of a return what isn't worth a file goes first and gets
    none; with `returns` everybody is thought to return. Nothing is written without `writes`. `sees_all`: it is
    known when each session returns, and whether."""

    over: bool = False
    tool: bool = False
    judged: bool = False
    returns: bool = False
    writes: bool = True
    sees_all: bool = False


class Counted(msgspec.Struct):
    """What came of all requests that arrived after the warm-up."""

    ttfts_s: list[float] = []
    written_bytes: float = 0.0
    saves: int = 0
    loads: int = 0
    prefill_s: float = 0.0
    engine_s: float = 0.0


class _File(msgspec.Struct, eq=False):
    session: str
    holding: Holding
    used_at: float


class _Files:
    """Of each session the latest; over budget those that are over go, then the one used longest ago.
    A prompt finds the file with most of its beginning, whosever it is."""

    def __init__(self, budget_tokens: float) -> None:
        self._budget = budget_tokens
        self._of: dict[str, _File] = {}
        self._by_block: dict[int, _File] = {}

    def add(self, holding: Holding, now: float) -> None:
        file = _File(holding.session, holding, now)
        self._of[holding.session] = file
        for block in holding.blocks:
            self._by_block[block] = file
        while sum(one.holding.tokens for one in self._of.values()) > self._budget:
            least = min(self._of.values(), key=lambda one: one.used_at)
            del self._of[least.session]

    def find(self, blocks: Sequence[int]) -> tuple[_File, int] | None:
        """A file that is there, and how many of these blocks it has."""
        for block in reversed(blocks):
            file = self._by_block.get(block)
            if file is not None and self._of.get(file.session) is file:
                return file, alike(file.holding.blocks, blocks)
        return None

    def over(self, session: str) -> None:
        if session in self._of:
            self._of[session].used_at = -1.0


class _Asked(msgspec.Struct, eq=False):
    session: int
    turn: int
    at: float


class World:
    """The server computes, loads and saves one thing at a time; saying answers goes on beside it and
    keeps the slot. A request waits for a slot in the order of asking, then for the engine."""

    def __init__(
        self,
        sessions: Sequence[Sequence[Turn]],
        prices: Prices,
        rules: Rules,
        *,
        slots: int,
        file_tokens: float,
        warm_s: float,
    ) -> None:
        self.counted = Counted()
        self._sessions = sessions
        self._prices = prices
        self._rules = rules
        self._warm_s = warm_s
        self._pauses = Pauses()
        self._desk = SlotDesk(slots)
        self._files = _Files(file_tokens)
        self._now = 0.0
        self._engine_at = 0.0
        self._waiting: deque[_Asked] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self) -> Counted:
        """To the end of the last session."""
        for number, turns in enumerate(self._sessions):
            self._arrives(number, 0, turns[0].pause_s)
        while self._events:
            self._now, _, do = heappop(self._events)
            do()
        return self.counted

    def _at(self, when: float, do: Callable[[], None]) -> None:
        heappush(self._events, (when, next(self._order), do))

    def _arrives(self, session: int, turn: int, at: float) -> None:
        asked = _Asked(session, turn, at)
        self._at(at, lambda: self._asks(asked))

    def _asks(self, asked: _Asked) -> None:
        self._pauses.came(self._turn(asked).blocks, self._now)
        self._waiting.append(asked)
        self._seat_next()

    def _seat_next(self) -> None:
        while self._waiting and self._desk.idle:
            asked = self._waiting.popleft()
            self._judge()
            seat = self._desk.take(TENANT, self._turn(asked).blocks)
            assert seat is not None
            if self._rules.sees_all:  # what is left of it elsewhere is of no use
                self._desk.over(TENANT, str(asked.session))
            self._served(asked, seat)

    def _served(self, asked: _Asked, seat: Seat) -> None:
        turn, prices = self._turn(asked), self._prices
        self._engine_at = max(self._engine_at, self._now)
        if seat.losing is not None:
            self._saved(seat.slot, seat.losing)
        most = turn.tokens - 1
        found = min(seat.found_tokens, most)
        prefill_s = prices.service.prefill_s(turn.tokens - found, found)
        file = self._files.find(turn.blocks)
        if file is not None:
            kept, blocks = file
            tokens = kept.holding.tokens
            held = min(tokens * blocks // len(kept.holding.blocks), most)
            size = tokens * prices.token_bytes
            load_s = prices.move_s + size * prices.load_byte_s
            rest_s = prices.service.prefill_s(turn.tokens - held, held)
            if held > found and load_s + rest_s < prefill_s:
                self._engine_at += load_s
                prefill_s = rest_s
                kept.used_at = self._now
                self._count(loads=1, engine_s=load_s)
        self._engine_at += prefill_s
        if asked.at >= self._warm_s:
            self.counted.ttfts_s.append(self._engine_at - asked.at)
        self._count(prefill_s=prefill_s, engine_s=prefill_s)
        ends_at = self._engine_at + turn.output_tokens * OUTPUT_TOKEN_S
        self._at(ends_at, lambda: self._ended(asked, seat.slot))

    def _ended(self, asked: _Asked, slot: int) -> None:
        turn, session, rules = self._turn(asked), str(asked.session), self._rules
        later = self._sessions[asked.session][asked.turn + 1 :]
        if later:
            self._arrives(asked.session, asked.turn + 1, self._now + later[0].pause_s)
        holding = None
        if turn.blocks:
            holding = Holding(TENANT, session, turn.blocks, turn.tokens + turn.output_tokens)
        is_over = (rules.over and turn.says_over) or (rules.sees_all and not later)
        longer_s, kind = 0.0, ""
        if later and rules.sees_all:
            longer_s = 2.0 * self._now + later[0].pause_s  # so the latest to return goes first
        elif rules.tool and not is_over:
            kind = TOOL_CALL if turn.calls_tool else ""
            longer_s = self._pauses.ended(turn.blocks, kind, self._now)
        self._desk.ended(slot, holding, self._now, longer_s, kind)
        if is_over:
            self._desk.over(TENANT, session)
            self._files.over(session)
        self._save_ahead()
        self._seat_next()

    def _judge(self) -> None:
        if self._rules.judged:
            self._desk.judge(self._is_over, self._now)

    def _is_over(self, holding: Holding, kind: str, idle_s: float) -> bool:
        prices = self._prices
        size = holding.tokens * prices.token_bytes
        load_s, save_s = (
            prices.move_s + size * byte_s for byte_s in (prices.load_byte_s, prices.save_byte_s)
        )
        chance = 1.0 if self._rules.returns else self._pauses.returns(kind, idle_s)
        return not is_worth_writing(
            chance, prices.service.prefill_s(holding.tokens) - load_s, save_s
        )

    def _save_ahead(self) -> None:
        self._judge()
        unsaved = self._desk.unsaved()
        slot = unsaved[0][0] if unsaved else None
        if slot is not None and self._desk.next_slot == slot and not self._desk.is_judged(slot):
            self._engine_at = max(self._engine_at, self._now)
            self._saved(*unsaved[0])

    def _saved(self, slot: int, holding: Holding) -> None:
        prices = self._prices
        size = holding.tokens * prices.token_bytes
        load_s = prices.move_s + size * prices.load_byte_s
        if load_s >= prices.service.prefill_s(holding.tokens) or not self._rules.writes:
            return
        save_s = prices.move_s + size * prices.save_byte_s
        self._engine_at += save_s
        self._files.add(holding, self._now)
        self._desk.saved(slot, holding)
        self._count(saves=1, written_bytes=size, engine_s=save_s)

    def _count(self, **more: float) -> None:
        if self._now >= self._warm_s:
            for name, value in more.items():
                setattr(self.counted, name, getattr(self.counted, name) + value)

    def _turn(self, asked: _Asked) -> Turn:
        return self._sessions[asked.session][asked.turn]
