"""Whatever is invalidated while answers come and go: nothing void is told once the invalidation is
answered, and nothing that was asked for later is lost. Two workers, their L2, and any order."""

from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from core_parts import Desk, key_of, outcome_of, request_for
from preheat.core import inventory
from preheat.core.epochs import EpochTable
from preheat.core.types import (
    Entry,
    Epoch,
    Forward,
    Hit,
    Invalidation,
    Join,
    Keep,
    Key,
    Look,
    Refresh,
    Request,
    Want,
)

NAMES = ("a", "b")
TAGS = ("red", "blue")
MODELS = ("m1", "m2")
WORKERS = (0, 1)

worker = st.sampled_from(WORKERS)
place = st.integers(0, 9)
scopes = st.builds(
    Invalidation,
    keys=st.just(frozenset())
    | st.frozensets(st.sampled_from([key_of((n, m)) for n in NAMES for m in MODELS])),
    tags=st.just(frozenset()) | st.frozensets(st.sampled_from([*TAGS, "green"]), max_size=2),
    model=st.none() | st.sampled_from(MODELS),
    namespace=st.none() | st.sampled_from(["", "n"]),
)
asks = st.tuples(
    st.just("ask"),
    worker,
    st.sampled_from(NAMES),
    st.sampled_from(MODELS),
    st.lists(st.sampled_from(TAGS), max_size=2, unique=True).map(tuple),
)
steps = st.lists(
    asks
    | st.tuples(st.sampled_from(["find", "answer", "write", "hear", "sweep"]), place)
    | st.tuples(st.just("invalidate"), scopes),
    max_size=80,
)


class Asked:
    """One engine call: since when, and what its answer may be invalidated by."""

    def __init__(self, at: int, request: Request, worker: int, epoch: Epoch) -> None:
        self.at = at
        self.request = request
        self.worker = worker
        self.epoch = epoch

    def is_covered(self, what: Invalidation) -> bool:
        return what.covers(
            self.request.ask.key,
            model=self.request.ask.model,
            namespace=self.request.namespace,
            tenant=self.request.tenant,
            tags=self.request.want.tags,
        )


class Pending:
    """An invalidation that isn't answered yet: it is published, and each worker has still to hear
    of it and to sweep."""

    def __init__(self, at: int, number: int, what: Invalidation) -> None:
        self.at = at
        self.number = number
        self.what = what
        self.heard_at: dict[int, int] = {}
        self.sweeps: list[Iterator[object]] = []
        self.answered_at: int | None = None


class World:
    """Two workers whose steps a test puts in any order, and what they may and must tell."""

    def __init__(self) -> None:
        self.now = 0
        self.desks = [Desk(has_l2=True) for _ in WORKERS]
        self.l2: dict[Key, Entry] = {}
        self.asked: dict[str, Asked] = {}
        self.invalidations: list[Pending] = []
        self.looks: list[tuple[int, Request, list[Entry]]] = []
        self.flights: list[tuple[Asked, str]] = []
        self.writes: list[Entry] = []

    def step(self, what: str, *more: Any) -> None:
        self.now += 1
        getattr(self, what)(*more)
        for one in self.invalidations:
            if one.answered_at is None and len(one.heard_at) == len(WORKERS) and not one.sweeps:
                one.answered_at = self.now

    def step_all(self, words: list[str]) -> None:
        for what in words:
            if what == "ask":
                self.ask_all()
            else:
                for place in range(40):
                    self.step(what, place)

    def ask_all(self) -> None:
        for name in NAMES:
            for model in MODELS:
                for worker in WORKERS:
                    self.step("ask", worker, name, model, ())

    def ask(self, worker: int, name: str, model: str, tags: tuple[str, ...]) -> None:
        request = request_for((name, model), Want(tags=tags), model=model)
        decision = self.desks[worker].controller.on_request(request, float(self.now))
        if isinstance(decision, Look):
            found = self.l2.get(request.ask.key)  # read now, told to the controller some time later
            self.looks.append((worker, request, [found] if found is not None else []))
        else:
            self._check(worker, decision)

    def find(self, place: int) -> None:
        if not self.looks:
            return
        worker, request, entries = self.looks.pop(place % len(self.looks))
        controller = self.desks[worker].controller
        epoch = controller.epoch
        decision = controller.on_found(request, entries, float(self.now))
        if isinstance(decision, Forward):
            answer = f"answer {self.now}"
            self.asked[answer] = Asked(self.now, request, worker, epoch)
            self.flights.append((self.asked[answer], answer))
        else:
            self._check(worker, decision)

    def answer(self, place: int) -> None:
        if not self.flights:
            return
        asked, answer = self.flights.pop(place % len(self.flights))
        outcome = outcome_of(asked.request, float(asked.at), answer=answer, epoch=asked.epoch)
        controller = self.desks[asked.worker].controller
        known = self.desks[asked.worker].inventory.find(asked.request.ask.key)
        effects = controller.on_outcome(outcome, "x", float(self.now))
        if self._is_void(answer):
            assert not isinstance(effects, Keep), "what is void was kept"
        elif self._is_untouched(asked) and (known is None or known.asked_at <= asked.at):
            assert isinstance(effects, Keep), f"lost: {effects}"
        if isinstance(effects, Keep):
            self.writes.append(effects.entry)

    def write(self, place: int) -> None:
        """It arrives in L2, possibly after what was asked for later, or invalidated meanwhile."""
        if self.writes:
            entry = self.writes.pop(place % len(self.writes))
            self.l2[entry.key] = entry

    def invalidate(self, what: Invalidation) -> None:
        self.invalidations.append(Pending(self.now, len(self.invalidations) + 1, what))

    def hear(self, place: int) -> None:
        """One worker hears of one invalidation: in any order, and perhaps more than once."""
        if not self.invalidations:
            return
        one = self.invalidations[place // 2 % len(self.invalidations)]
        worker = place % 2
        controller = self.desks[worker].controller
        controller.on_invalidate(one.what, one.number)
        if worker not in one.heard_at:
            one.heard_at[worker] = self.now
            one.sweeps.append(controller.sweep(one.what, dry_run=False))

    def sweep(self, place: int) -> None:
        """A portion of a sweep; others come in between."""
        sweeping = [one for one in self.invalidations if one.sweeps]
        if sweeping:
            one = sweeping[place % len(sweeping)]
            held = [
                {key: str(record.hit.answer) for key, record in desk.inventory.records()}
                for desk in self.desks
            ]
            if next(one.sweeps[-1], None) is None:
                one.sweeps.pop()
            for desk, before in zip(self.desks, held, strict=True):
                left = {key for key, _ in desk.inventory.records()}
                lost = [self.asked[answer] for key, answer in before.items() if key not in left]
                assert not any(self._is_untouched(asked) for asked in lost), "a sweep took too much"

    def _check(self, worker: int, decision: object) -> None:
        if isinstance(decision, Join):
            leading = [one for one, _ in self.flights if one.request.id == decision.leader]
            assert not any(self._is_void_call(one) for one in leading), "it joined what is void"
            return
        assert isinstance(decision, Hit | Refresh)
        hit = decision if isinstance(decision, Hit) else decision.hit
        assert not self._is_void(str(hit.answer)), f"worker {worker} told what is void"

    def _is_void(self, answer: str) -> bool:
        return self._is_void_call(self.asked[answer])

    def _is_void_call(self, asked: Asked) -> bool:
        """Whether it was asked for before an invalidation that covers it and is answered."""
        return any(
            one.answered_at is not None and one.at > asked.at and asked.is_covered(one.what)
            for one in self.invalidations
        )

    def _is_untouched(self, asked: Asked) -> bool:
        """Whether its worker had heard of all that covers it before it asked."""
        return all(
            one.heard_at.get(asked.worker, asked.at) < asked.at or not asked.is_covered(one.what)
            for one in self.invalidations
        )


@settings(deadline=None, max_examples=1_500)
@given(steps, st.permutations(["hear", "sweep", "ask", "find", "answer", "write", "ask", "find"]))
def test_nothing_void_is_told_and_nothing_later_is_lost(steps: list[Any], ends: list[str]) -> None:
    """`ends`: in which order all that is under way is brought to its end, and everybody asks."""
    portion, inventory._PORTION = inventory._PORTION, 1
    try:
        world = World()
        for step in steps:
            world.step(*step)
        world.step_all(ends)
    finally:
        inventory._PORTION = portion


@settings(deadline=None, max_examples=500)
@given(st.lists(scopes, min_size=1, max_size=12), st.data())
def test_the_order_in_which_invalidations_are_heard_of_makes_no_difference(
    told: list[Invalidation], data: st.DataObject
) -> None:
    numbered = list(enumerate(told, start=1))
    table = EpochTable()
    heard = data.draw(st.permutations(numbered))
    again = data.draw(st.lists(st.sampled_from(numbered), max_size=5))
    for number, what in (*heard, *again):
        table.add(what, number)
    for asked_at in range(len(told) + 1):
        for name in NAMES:
            for model in MODELS:
                for tags in ((), ("red",), ("blue", "red")):
                    fields = {"tenant": "t", "namespace": "n", "model": model, "tags": tags}
                    wanted = any(
                        number > asked_at and what.covers(key_of((name, model)), **fields)
                        for number, what in numbered
                    )
                    is_void = table.voids(Epoch("", asked_at), key_of((name, model)), **fields)
                    assert is_void is wanted
