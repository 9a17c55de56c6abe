"""Several equal servers behind one name: who is asked, and who else, over real connections."""
# ruff: noqa: SIM117  (peers first, then the group between them)

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate
from pathlib import Path

import pytest

from certificate import make_certificate
from peer import Peer
from preheat.core.breaker import Breaker
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.engines.openai import OpenAi
from preheat.engines.rules import Rules
from preheat.engines.worker import OnEvent, WorkerState
from preheat.errors import ConfigError, EngineError
from preheat.transport.client import Response, Timeouts

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

SHORT = Timeouts(connect_s=1.0, first_byte_s=0.3, idle_s=0.3, queue_s=0.3)


@contextlib.asynccontextmanager
async def group_of(
    *peers: Peer | str,
    rules: Rules = Rules(health_s=0.05),  # noqa: B008 - frozen
    failures: int = 3,
    open_s: float = 60.0,
    timeouts: Timeouts = SHORT,
    max_connections: int = 64,
    on_event: OnEvent | None = None,
) -> AsyncIterator[OpenAi]:
    engine = OpenAi(
        "many",
        [one if isinstance(one, str) else one.url for one in peers],
        api_key="secret",
        timeouts=timeouts,
        max_connections=max_connections,
        breaker=Breaker(failures, open_s),
        rules=rules,
        on_event=on_event,
    )
    try:
        yield engine
    finally:
        await engine.aclose()


async def ask(engine: OpenAi) -> Response:
    response = await engine.send(b"POST", b"/chat/completions", [], b"{}")
    try:
        await response.read(65_536)
    finally:
        response.close()
    return response


async def failure(engine: OpenAi) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await ask(engine)
    return caught.value


def states(engine: OpenAi) -> list[str]:
    return [one.state for one in engine.workers()]


def worker(engine: OpenAi, position: int) -> WorkerState:
    return engine.workers()[position]


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def dead() -> Peer:
    """Nobody listens there any more."""
    peer = Peer()
    await peer.start()
    await peer.die()
    return peer


# Who is chosen ------------------------------------------------------------------------------


async def test_equally_loaded_ones_take_turns() -> None:
    async with Peer() as one, Peer() as two, Peer() as three:
        async with group_of(one, two, three) as engine:
            names = [(await ask(engine)).worker for _ in range(6)]
            assert names == ["many.0", "many.1", "many.2"] * 2
            assert one.keys == {"bearer secret"}


async def test_the_one_with_fewest_requests_under_way_is_asked() -> None:
    async with Peer("held") as busy, Peer() as free, group_of(busy, free) as engine:
        held = [asyncio.create_task(ask(engine))]
        await until(lambda: busy.asked)
        assert [(await ask(engine)).worker for _ in range(4)] == ["many.1"] * 4
        assert [one.in_flight for one in engine.workers()] == [1, 0]
        busy.release.set()
        await asyncio.gather(*held)
        assert [one.in_flight for one in engine.workers()] == [0, 0]


async def test_a_single_one_bears_the_name_of_its_engine() -> None:
    async with Peer() as only, group_of(only) as engine:
        assert (await ask(engine)).worker == "many"
        only.mode = "reset"
        assert (await failure(engine)).worker == "many"
        assert worker(engine, 0).address == f"127.0.0.1:{only.port}"


async def test_those_that_are_well_share_the_turns_of_one_that_is_not() -> None:
    async with Peer() as one, Peer() as two:
        gone = await dead()
        async with group_of(one, gone, two, failures=1) as engine:
            for _ in range(20):
                await ask(engine)
            assert abs(one.asked - two.asked) <= 1


# Retries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["429 Too Many", "502 Bad", "503 Busy", "504 Late"])
async def test_a_refusal_is_asked_elsewhere(status: str) -> None:
    async with Peer(status) as bad, Peer() as good, group_of(bad, good) as engine:
        for _ in range(6):
            response = await ask(engine)
            assert (response.status, response.worker) == (200, "many.1")
        assert worker(engine, 0).retries == worker(engine, 0).failures or status[:3] == "429"
        assert worker(engine, 0).last_error_kind == f"status-{status[:3]}"


@pytest.mark.parametrize("status", ["502 Bad", "503 Busy", "504 Late"])
async def test_what_must_not_be_done_twice_is_not_asked_again_where_it_may_have_been(
    status: str,
) -> None:
    async with Peer(status) as bad, Peer() as good, group_of(bad, good) as engine:
        response = await engine.send(b"POST", b"/batches", [], b"{}", is_repeatable=False)
        await response.read(65_536)
        response.close()
        assert (response.status, response.worker) == (int(status[:3]), "many.0")
        assert (bad.asked, good.asked) == (1, 0)


async def test_what_must_not_be_done_twice_is_asked_elsewhere_where_nothing_was_done() -> None:
    async with Peer("429 Slow") as bad, Peer() as good:
        gone = await dead()
        async with group_of(gone, bad, good) as engine:
            response = await engine.send(b"POST", b"/batches", [], b"{}", is_repeatable=False)
            await response.read(65_536)
            response.close()
            assert (response.status, response.worker) == (200, "many.2")


async def test_a_share_of_nothing_asks_no_refused_request_elsewhere() -> None:
    async with Peer("503 Busy") as bad, Peer() as good:
        async with group_of(bad, good, rules=Rules(retry_ratio=0.0)) as engine:
            assert (await ask(engine)).status == 503
            assert (bad.asked, good.asked) == (1, 0)


async def test_no_request_fails_while_one_of_two_is_dead() -> None:
    async with Peer() as good:
        gone = await dead()
        patient = Timeouts(connect_s=1.0, first_byte_s=5.0, idle_s=5.0, queue_s=5.0)
        async with group_of(gone, good, timeouts=patient) as engine:
            answers = await asyncio.gather(*(ask(engine) for _ in range(200)))
            assert {one.status for one in answers} == {200}
            assert states(engine) == ["down", "well"]
            assert worker(engine, 0).last_error_kind == "connect"


async def test_no_request_fails_while_nobody_vouches_for_one_of_two(tmp_path: Path) -> None:
    async with Peer() as good, Peer(tls=make_certificate(tmp_path)[0]) as bad:
        async with group_of(bad, good) as engine:
            answers = await asyncio.gather(*(ask(engine) for _ in range(50)))
            assert {one.status for one in answers} == {200}
            assert worker(engine, 0).last_error_kind == "tls"


@pytest.mark.parametrize("status", ["503 Busy", "429 Too Many"])
async def test_no_request_fails_while_one_of_two_refuses_all(status: str) -> None:
    async with Peer(status) as bad, Peer() as good, group_of(bad, good) as engine:
        answers = await asyncio.gather(*(ask(engine) for _ in range(100)))
        assert {one.status for one in answers} == {200}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("hang", "timeout-first-byte"), ("garbage", "protocol")],
)
async def test_what_may_have_been_worked_on_is_not_asked_again(mode: str, kind: str) -> None:
    async with Peer(mode) as bad, Peer() as good, group_of(bad, good) as engine:
        error = await failure(engine)
        assert (error.kind, error.worker) == (kind, "many.0")
        assert (bad.asked, good.asked) == (1, 0)


async def test_one_whose_connection_broke_before_its_answer_is_asked_elsewhere_once() -> None:
    async with Peer("reset") as bad, Peer() as good, group_of(bad, good) as engine:
        assert (await ask(engine)).worker == "many.1"
        assert (bad.asked, good.asked) == (1, 1)
        state = worker(engine, 0)
        assert (state.failures, state.retries, state.last_error_kind) == (1, 1, "reset")
    async with Peer("reset") as bad, Peer("reset") as worse, Peer() as good:
        async with group_of(bad, worse, good) as engine:
            error = await failure(engine)
            assert (error.kind, error.worker) == ("reset", "many.1")
            assert (bad.asked, worse.asked, good.asked) == (1, 1, 0)


@pytest.mark.parametrize(
    ("rules", "is_repeatable"),
    [
        (Rules(health_s=0.05, retries=0), True),
        (Rules(health_s=0.05, retry_ratio=0.0), True),
        (Rules(health_s=0.05), False),
    ],
    ids=["no retries", "no budget", "it may do something"],
)
async def test_one_whose_connection_broke_is_not_asked_again(
    rules: Rules, is_repeatable: bool
) -> None:
    async with Peer("reset") as bad, Peer() as good, group_of(bad, good, rules=rules) as engine:
        with pytest.raises(EngineError) as caught:
            await engine.send(b"POST", b"/batches", [], b"{}", is_repeatable=is_repeatable)
        assert caught.value.kind == "reset"
        assert (bad.asked, good.asked) == (1, 0)


async def test_all_that_wait_at_one_that_is_killed_are_answered_by_another() -> None:
    patient = Timeouts(first_byte_s=20.0, idle_s=20.0)
    async with Peer("held") as one, Peer("held") as two:
        async with group_of(one, two, timeouts=patient, failures=1) as engine:
            asking = [asyncio.create_task(ask(engine)) for _ in range(60)]
            await until(lambda: one.asked + two.asked == 60)
            assert one.asked > 20, "both have much to do"
            await one.die()
            await until(lambda: two.asked == 60)
            two.release.set()
            answers = await asyncio.gather(*asking)
            assert {(one.status, one.worker) for one in answers} == {(200, "many.1")}
            assert (states(engine)[0], worker(engine, 0).in_flight) == ("down", 0)
            assert worker(engine, 0).retries == one.asked


async def test_an_answer_that_breaks_after_its_first_byte_is_not_asked_again() -> None:
    async with Peer("reset-after") as bad, Peer() as good, group_of(bad, good) as engine:
        error = await failure(engine)
        assert (error.kind, error.before_first_byte) == ("reset", False)
        assert (bad.asked, good.asked) == (1, 0)


@pytest.mark.parametrize("status", ["500 Oops", "400 Bad", "404 Gone", "401 Who"])
async def test_other_answers_are_passed_on_as_they_are(status: str) -> None:
    async with Peer(status) as bad, Peer() as good, group_of(bad, good) as engine:
        assert (await ask(engine)).status == int(status[:3])
        assert (bad.asked, good.asked) == (1, 0)


async def test_the_last_refusal_is_what_the_client_gets() -> None:
    async with Peer("429 Slow") as one, Peer("429 Slow") as two, group_of(one, two) as engine:
        two.headers = "Retry-After: 7\r\nx-ratelimit-remaining-requests: 0\r\n"
        response = await ask(engine)
        assert (response.status, response.worker) == (429, "many.1")
        assert (b"retry-after", b"7") in response.headers
        assert (b"x-ratelimit-remaining-requests", b"0") in response.headers


async def test_at_most_so_many_others_are_asked() -> None:
    gone = [await dead() for _ in range(4)]
    async with group_of(*gone, rules=Rules(retries=2), failures=100) as engine:
        await failure(engine)
        assert sum(one.failures for one in engine.workers()) == 3


async def test_without_retries_the_first_failure_is_the_answer() -> None:
    async with Peer() as good:
        gone = await dead()
        async with group_of(gone, good, rules=Rules(retries=0)) as engine:
            assert (await failure(engine)).kind == "connect"


async def test_retries_of_refusals_stay_within_their_share() -> None:
    async with Peer("502 Bad") as one, Peer("502 Bad") as two:
        async with group_of(one, two, rules=Rules(retry_ratio=0.1), failures=10**6) as engine:
            for _ in range(600):
                await ask(engine)
            # 100 at hand, a tenth of 600 more, and five a second.
            assert 600 + 100 <= one.asked + two.asked <= 600 + 100 + 60 + 5 * 20


async def test_a_refused_answer_leaves_its_connection_usable() -> None:
    async with Peer("503 Busy") as bad, Peer() as good:
        async with group_of(bad, good, failures=1_000) as engine:
            for _ in range(10):
                await ask(engine)
            assert bad.asked >= 5
            assert bad.open == 1


# Health -------------------------------------------------------------------------------------


async def test_one_that_is_down_is_asked_for_its_health_and_comes_back() -> None:
    async with Peer() as good, Peer() as other, group_of(other, good) as engine:
        await other.die()
        for _ in range(8):
            assert (await ask(engine)).status == 200
        assert states(engine) == ["down", "well"]
        await other.start()
        await until(lambda: states(engine) == ["well", "well"])
        assert {(await ask(engine)).worker for _ in range(2)} == {"many.0", "many.1"}
        probed = other.probed
        await asyncio.sleep(0.2)
        assert other.probed == probed, "only those that are down are asked for their health"


@pytest.mark.parametrize("health_path", ["/health", ""])
async def test_going_down_and_coming_back_are_told_once_each(health_path: str) -> None:
    told: list[tuple[str, dict[str, object]]] = []
    rules = Rules(health_s=0.05, health_path=health_path)
    async with Peer("503 Busy", health=503) as bad, Peer() as good:
        async with group_of(
            bad, good, rules=rules, open_s=0.05, on_event=lambda *one: told.append(one)
        ) as engine:
            for _ in range(12):
                await ask(engine)
                await asyncio.sleep(0.01)
            where = {"worker": "many.0", "address": f"127.0.0.1:{bad.port}"}
            assert told == [("upstream-down", {**where, "kind": "status-503"})]
            bad.mode, bad.health = "fine", 200
            async with asyncio.timeout(5):
                while states(engine) != ["well", "well"]:
                    await ask(engine)
                    await asyncio.sleep(0.01)
            for _ in range(4):
                await ask(engine)
            assert told[1:] == [("upstream-well", where)]


async def test_one_that_says_it_is_unwell_stays_down() -> None:
    async with Peer("503 Busy", health=503) as bad, Peer() as good:
        async with group_of(bad, good, open_s=0.01) as engine:
            for _ in range(8):
                await ask(engine)
            await until(lambda: bad.probed > 3)
            asked = bad.asked
            for _ in range(8):
                await ask(engine)
            assert bad.asked == asked
            bad.mode, bad.health = "fine", 200
            await until(lambda: states(engine) == ["well", "well"])


async def test_after_its_return_one_more_failure_is_enough() -> None:
    async with Peer("503 Busy") as bad, Peer() as good, group_of(bad, good) as engine:
        for _ in range(8):
            await ask(engine)
        assert states(engine)[0] == "down"
        await until(lambda: states(engine)[0] == "well")
        asked = bad.asked
        for _ in range(4):
            await ask(engine)
        assert bad.asked == asked + 1


@pytest.mark.parametrize("health_path", ["/health", ""])
async def test_without_a_health_path_a_request_finds_out(health_path: str) -> None:
    async with Peer("503 Busy", health=404) as bad, Peer() as good:
        rules = Rules(health_s=0.05, health_path=health_path)
        async with group_of(bad, good, rules=rules, open_s=0.2) as engine:
            for _ in range(8):
                await ask(engine)
            bad.mode = "fine"
            asked = bad.asked
            await asyncio.sleep(0.3)
            assert bad.probed == (1 if health_path else 0)
            assert bad.asked == asked
            await ask(engine)
            assert bad.asked == asked + 1
            assert states(engine) == ["well", "well"]


@pytest.mark.parametrize(
    ("status", "retry_after"),
    [
        ("429 Slow", lambda: "30"),
        ("503 Busy", lambda: "30"),
        ("429 Slow", lambda: formatdate(time.time() + 30, usegmt=True)),
    ],
)
async def test_who_says_retry_after_is_left_alone_until_then(
    status: str, retry_after: Callable[[], str]
) -> None:
    async with Peer(status) as bad, Peer() as good, group_of(bad, good) as engine:
        bad.headers = f"Retry-After: {retry_after()}\r\n"
        for _ in range(10):
            await ask(engine)
        assert bad.asked == 1
        assert states(engine) == ["avoided", "well"]


async def test_where_all_want_to_be_left_alone_one_is_asked_all_the_same() -> None:
    async with Peer("429 Slow") as one, Peer("429 Slow") as two, group_of(one, two) as engine:
        one.headers, two.headers = "Retry-After: 50\r\n", "Retry-After: 20\r\n"
        await ask(engine)
        assert states(engine) == ["avoided", "avoided"]
        response = await ask(engine)
        assert (response.status, response.worker) == (429, "many.1")
        assert one.asked == 1
        assert engine.is_ready


async def test_where_all_are_down_the_error_says_when_to_ask_again() -> None:
    gone = [await dead(), await dead()]
    async with group_of(*gone, failures=1, open_s=9.0) as engine:
        assert (await failure(engine)).kind == "connect"
        error = await failure(engine)
        assert error.kind == "breaker-open"
        assert 1.0 <= error.retry_after_s <= 9.0
        assert not engine.is_ready


async def test_where_all_are_down_one_is_tried_after_a_while() -> None:
    async with Peer() as one, Peer() as two:
        async with group_of(one, two, failures=1, open_s=0.1, rules=Rules(health_s=60)) as engine:
            await one.die()
            await two.die()
            await failure(engine)
            await two.start()
            await asyncio.sleep(0.15)
            assert (await ask(engine)).worker == "many.1"


async def test_a_full_queue_at_one_leads_to_another_and_is_no_failure() -> None:
    async with Peer("held") as one, Peer("held") as two:
        limits = Timeouts(first_byte_s=10.0, queue_s=0.3)
        async with group_of(one, two, max_connections=1, timeouts=limits) as engine:
            held = [asyncio.create_task(ask(engine)) for _ in range(2)]
            await until(lambda: one.asked + two.asked == 2)
            waiting = asyncio.create_task(ask(engine))
            await asyncio.sleep(0.1)
            two.mode = "fine"
            two.release.set()
            assert (await waiting).worker == "many.1"
            assert [one.failures for one in engine.workers()] == [0, 0]
            one.release.set()
            await asyncio.gather(*held)


# Under load ---------------------------------------------------------------------------------


async def test_one_killed_in_the_middle_of_load_costs_only_what_it_was_working_on() -> None:
    async with Peer() as one, Peer() as two, group_of(one, two) as engine:
        outcomes: list[int | str] = []

        async def client() -> None:
            for _ in range(60):
                try:
                    outcomes.append((await ask(engine)).status)
                except EngineError as error:
                    outcomes.append(error.kind)
                await asyncio.sleep(0.001)

        clients = [asyncio.create_task(client()) for _ in range(16)]
        await until(lambda: len(outcomes) > 200)
        at_work = worker(engine, 0).in_flight
        await one.die()
        await asyncio.gather(*clients)
        assert len(outcomes) == 16 * 60
        failed = [one for one in outcomes if one != 200]
        assert len(failed) <= at_work
        assert set(failed) <= {"reset"}


async def test_a_client_that_leaves_frees_its_place() -> None:
    async with Peer("hang") as one, Peer("hang") as two:
        async with group_of(one, two, timeouts=Timeouts(first_byte_s=20)) as engine:
            asking = [asyncio.create_task(ask(engine)) for _ in range(4)]
            await until(lambda: one.asked + two.asked == 4)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await until(lambda: one.open + two.open == 0)
            assert [one.in_flight for one in engine.workers()] == [0, 0]
            assert [one.failures for one in engine.workers()] == [0, 0]


# Draining and other addresses ---------------------------------------------------------------


async def test_one_that_is_drained_takes_nothing_more_and_ends_what_it_has() -> None:
    async with Peer("held") as one, Peer() as two, group_of(one, two) as engine:
        held = asyncio.create_task(ask(engine))
        await until(lambda: one.asked)
        assert engine.set_draining("many.0", is_draining=True)
        assert not engine.set_draining("many.7", is_draining=True)
        one.release.set()
        assert (await held).worker == "many.0"
        assert {(await ask(engine)).worker for _ in range(4)} == {"many.1"}
        assert states(engine) == ["draining", "well"]
        assert engine.set_draining("many.0", is_draining=False)
        assert {(await ask(engine)).worker for _ in range(4)} == {"many.0", "many.1"}


async def test_where_all_are_drained_nothing_is_asked() -> None:
    async with Peer() as only, group_of(only) as engine:
        engine.set_draining("many", is_draining=True)
        assert (await failure(engine)).kind == "breaker-open"
        assert only.asked == 0
        assert not engine.is_ready


async def test_new_addresses_are_taken_over_without_a_lost_request() -> None:
    async with Peer("held") as old, Peer() as kept, Peer() as new, group_of(old, kept) as engine:
        held = asyncio.create_task(ask(engine))
        await until(lambda: old.asked)
        await ask(engine)
        connections = kept.open
        engine.reconfigure([kept.url, new.url], Rules())
        assert {(await ask(engine)).worker for _ in range(4)} == {"many.0", "many.1"}
        assert (kept.open, old.asked, new.asked) == (connections, 1, 2)
        assert states(engine) == ["well", "well", "draining"]
        old.release.set()
        assert (await held).status == 200
        await until(lambda: old.open == 0)
        assert states(engine) == ["well", "well"]


async def test_one_that_stays_keeps_its_state() -> None:
    async with Peer() as good:
        gone = await dead()
        async with group_of(gone, good, failures=1, rules=Rules(health_path="")) as engine:
            await ask(engine)
            await ask(engine)
            engine.reconfigure([good.url, gone.url], Rules(health_path=""))
            assert states(engine) == ["well", "down"]
            assert [one.name for one in engine.workers()] == ["many.0", "many.1"]


@pytest.mark.parametrize(
    "urls",
    [
        [],
        ["ftp://x"],
        ["http://[::"],
        ["http://a:b"],
        ["http://a?b"],
        ["http://a:1", "http://a:1"],
        ["http://a:1", "http://u:p@b"],
    ],
)
async def test_addresses_that_cannot_be_change_nothing(urls: list[str]) -> None:
    async with Peer() as one, group_of(one) as engine:
        with pytest.raises(ConfigError, match=r"engines\.many\.url"):
            engine.reconfigure(urls, Rules())
        assert (await ask(engine)).worker == "many"


@pytest.mark.parametrize("path", ["health", "/a b", "/\N{SNOWMAN}", "/a\r\nb"])
async def test_a_health_path_that_cannot_be_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"engines\.many\.health_path"):
        OpenAi("many", ["http://a", "http://b"], rules=Rules(health_path=path))


async def test_an_engine_that_retires_ends_what_is_under_way() -> None:
    async with Peer("held") as one, group_of(one, timeouts=Timeouts()) as engine:
        held = asyncio.create_task(ask(engine))
        await until(lambda: one.asked)
        retiring = asyncio.create_task(engine.retire())
        await asyncio.sleep(0.15)
        assert not retiring.done()
        one.release.set()
        assert (await held).status == 200
        await asyncio.wait_for(retiring, 5)
        await until(lambda: one.open == 0)


async def test_a_closed_group_leaves_no_task() -> None:
    gone = await dead()
    async with Peer() as good, group_of(gone, good, failures=1) as engine:
        await ask(engine)
        await ask(engine)
        await engine.aclose()
        assert asyncio.all_tasks() - {asyncio.current_task()} == good._tasks


async def test_with_a_rule_the_same_beginning_goes_to_the_same_server_and_says_why() -> None:
    async with Peer() as one, Peer() as two, Peer() as three:
        engine = OpenAi(
            "many", [one.url, two.url, three.url], routing=POLICIES["preheat"](), timeouts=SHORT
        )
        body = b'{"model":"m","prompt":"%b"}'
        try:
            chosen = []
            for ending in (b"a", b"b", b"c", b"d"):
                response = await engine.send(
                    b"POST", b"/completions", [], body % (b"x" * 40_000 + ending), tenant="t"
                )
                await response.read(65_536)
                placement = response.placement
                assert placement is not None
                placement.ended(Usage(10_000, 1))
                response.close()
                chosen.append((response.worker, placement.reason))
            elsewhere = await engine.send(
                b"POST", b"/completions", [], body % (b"y" * 40_000), tenant="t"
            )
            elsewhere.close()
        finally:
            await engine.aclose()
    assert len({worker for worker, _ in chosen}) == 1
    assert chosen[0][1].startswith(b"overlap=0, best=0, input=10000")
    assert 9_900 < int(chosen[1][1].partition(b"overlap=")[2].partition(b",")[0]) < 10_000
    assert elsewhere.worker != chosen[0][0]


async def test_a_server_that_broke_down_is_thought_empty_when_it_is_back() -> None:
    body = b'{"model":"m","prompt":"%b"}' % (b"x" * 40_000)
    async with Peer() as one, Peer() as two:
        engine = OpenAi(
            "many",
            [one.url, two.url],
            routing=POLICIES["preheat"](),
            timeouts=SHORT,
            breaker=Breaker(1, 60.0),
            rules=Rules(health_s=0.05),
        )

        async def reason() -> tuple[str, bytes]:
            response = await engine.send(b"POST", b"/completions", [], body)
            await response.read(65_536)
            assert response.placement is not None
            response.placement.ended(None)
            response.close()
            return response.worker, response.placement.reason

        try:
            home, _ = await reason()
            assert (await reason())[1].startswith(b"overlap=9984")
            peer = (one, two)[int(home[-1])]
            peer.mode = "reset"
            assert (await reason())[0] != home
            (one, two)[1 - int(home[-1])].mode = "reset"
            with pytest.raises(EngineError):
                await reason()
            one.mode = two.mode = "fine"
            await until(lambda: states(engine) == ["well", "well"])
            assert (await reason())[1].startswith(b"overlap=0, best=0")
        finally:
            await engine.aclose()


async def test_a_defect_in_what_goes_on_beside_the_requests_is_told() -> None:
    events: list[tuple[str, dict[str, object]]] = []

    async def broken() -> None:
        raise KeyError("a prompt's text")

    async with Peer() as one, group_of(one, on_event=lambda *told: events.append(told)) as engine:
        engine._group._members.own(broken())
        await until(lambda: events)
        assert (await ask(engine)).status == 200
    assert [name for name, _ in events] == ["bug"]
    assert "a prompt's text" not in str(events)
