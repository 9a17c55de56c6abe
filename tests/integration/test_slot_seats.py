"""A group of llama.cpp servers whose slots are named and kept in files, through the engine that serves."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bare_llama import bare_llama
from ports import free_port
from preheat.core.blocks import prefix_of
from preheat.core.routing import POLICIES
from preheat.core.types import SessionState, Usage
from preheat.engines import slot_seats
from preheat.engines.openai import OpenAi
from preheat.engines.rules import Care, Rules
from preheat.engines.slot_keeper import SlotKeeper
from preheat.engines.slot_names import SlotNames
from preheat.engines.slot_seats import SlotRules
from preheat.transport.client import Response
from tiny_model import write_tiny_gguf

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

SESSIONS = 5
TENANT = "t"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


@asynccontextmanager
async def served(
    *urls: str, folder: Path | None, events: list[tuple[str, dict[str, object]]] | None = None
) -> AsyncIterator[OpenAi]:
    """The engine, which knows all of its servers already."""
    noted = [] if events is None else events
    rules = SlotRules(() if folder is None else (str(folder),), secret=b"s" * 32)
    engine = OpenAi(
        "many",
        urls,
        routing=POLICIES["preheat"](),
        rules=Rules(health_s=0.05),
        care=Care(poll_s=0.05, slots=rules, gate_s=10.0),
        on_event=lambda name, fields: noted.append((name, fields)),
    )
    try:
        await engine.start()
        if folder is not None:
            await until(lambda: [name for name, _ in noted].count("slot-files-on") == len(urls))
        yield engine
    finally:
        await engine.aclose()


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


def text(session: int, length: int = 1_600) -> str:
    return "".join(chr(97 + (11 * session + 7 * i + i // 31) % 26) for i in range(length))


async def ask(
    engine: OpenAi,
    session: int,
    prompt: str,
    *,
    state: SessionState = "",
    calls_tool: bool = False,
) -> Usage:
    """The answer's own counts, told as the gateway tells them."""
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0}).encode()
    response = await engine.send(
        b"POST",
        b"/completions",
        [(b"content-type", b"application/json")],
        body,
        tenant=TENANT,
        session=f"s{session}",
        state=state,
    )
    told = json.loads(await response.read(1 << 20))
    return usage_of(response, told, calls_tool=calls_tool)


async def reason(engine: OpenAi, session: int, prompt: str) -> bytes:
    """Why it was sent where it was."""
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()
    headers = [(b"content-type", b"application/json")]
    response = await engine.send(
        b"POST", b"/completions", headers, body, tenant=TENANT, session=f"s{session}"
    )
    usage_of(response, json.loads(await response.read(1 << 20)), calls_tool=False)
    assert response.placement is not None
    return response.placement.reason


def usage_of(response: Response, told: dict[str, Any], *, calls_tool: bool) -> Usage:
    usage = told["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    made = Usage(usage["prompt_tokens"], usage["completion_tokens"], cached, tells_cached=True)
    assert response.placement is not None
    response.placement.ended(made, calls_tool=calls_tool)
    response.close()
    return made


def told(events: list[tuple[str, dict[str, object]]], name: str, **fields: object) -> bool:
    return any(one == name and fields.items() <= has.items() for one, has in events)


async def test_sessions_that_were_pushed_out_of_their_slot_find_their_prefix_again(
    weights: str, tmp_path: Path
) -> None:
    with bare_llama(weights, slots=2, cache_ram_mib=0, slot_save_path=str(tmp_path)) as url:
        async with served(url, folder=tmp_path) as engine:
            for session in range(SESSIONS):
                first = await ask(engine, session, text(session))
                assert first.cached_tokens < 20
            for session in range(SESSIONS):
                again = await ask(engine, session, text(session) + " and on")
                assert again.cached_tokens >= 0.95 * first.input_tokens
            assert list(tmp_path.glob("*.kv"))


async def test_without_a_folder_the_servers_slots_are_its_own(weights: str, tmp_path: Path) -> None:
    with (
        bare_llama(weights, slots=2, cache_ram_mib=0) as url,
        bare_llama(weights, slots=2) as other,
    ):
        async with served(url, other, folder=None) as engine:
            for session in range(2):
                assert (await ask(engine, session, text(session))).input_tokens > 1_000
            assert not list(tmp_path.iterdir())
            assert [one.unsaved_slots for one in engine.workers()] == [0, 0]


async def test_what_a_draining_server_holds_is_there_after_its_restart(
    weights: str, tmp_path: Path
) -> None:
    events: list[tuple[str, dict[str, object]]] = []
    port = free_port()
    order: dict[str, Any] = {
        "slots": 2,
        "cache_ram_mib": 0,
        "slot_save_path": str(tmp_path),
        "port": port,
    }
    with bare_llama(weights, slots=2, cache_ram_mib=0, slot_save_path=str(tmp_path)) as other:
        url = f"http://127.0.0.1:{port}"
        with bare_llama(weights, **order):
            started = served(url, other, folder=tmp_path, events=events)
            engine = await started.__aenter__()
            engine.set_draining("many.1", is_draining=True)
            for session in range(2):
                await ask(engine, session, text(session))
            assert engine.workers()[0].unsaved_slots >= 1
            engine.set_draining("many.0", is_draining=True)
            await until(lambda: told(events, "slots-saved", worker="many.0"))
            assert engine.workers()[0].unsaved_slots == 0
        try:
            with bare_llama(weights, **order):
                engine.set_draining("many.0", is_draining=False)
                await until(lambda: told(events, "upstream-ready", worker="many.0", restored=2))
                for session in range(2):
                    again = await ask(engine, session, text(session) + " and on")
                    assert again.cached_tokens > 1_000
                    assert engine.workers()[0].state == "well"
        finally:
            await started.__aexit__(None, None, None)


async def test_a_folder_that_the_server_doesnt_write_to_is_told_and_costs_nothing(
    weights: str, tmp_path: Path
) -> None:
    events: list[tuple[str, dict[str, object]]] = []
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    theirs.mkdir()
    with bare_llama(weights, slots=1, cache_ram_mib=0, slot_save_path=str(theirs)) as url:
        async with served(url, folder=mine, events=events) as engine:
            for session in (0, 1, 0, 1):
                assert (await ask(engine, session, text(session))).cached_tokens < 20


async def test_a_burst_of_one_new_prefix_is_computed_once(weights: str, tmp_path: Path) -> None:
    with bare_llama(weights, slots=3, cache_ram_mib=0, slot_save_path=str(tmp_path)) as url:
        async with served(url, folder=tmp_path) as engine:
            for session in range(12):  # until speeds are known
                await ask(engine, session, text(session, 700 + 90 * session))
            burst = [ask(engine, 100 + n, text(99, 1_900) + f" {n}") for n in range(3)]
            found = sorted(one.cached_tokens for one in await asyncio.gather(*burst))
            assert found[0] < 20
            assert found[1] > 1_000


@pytest.mark.parametrize(("state", "calls_tool"), [("", True), ("tool", False)])
async def test_who_waits_for_a_tool_keeps_its_slot_longer(
    weights: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: SessionState,
    calls_tool: bool,
) -> None:
    now = 1_000.0
    monkeypatch.setattr(slot_seats, "SlotKeeper", partial(SlotKeeper, clock=lambda: now))
    with bare_llama(weights, slots=2, cache_ram_mib=0, slot_save_path=str(tmp_path)) as url:
        async with served(url, folder=tmp_path) as engine:
            for _ in range(10):
                await ask(engine, 0, text(0), state=state, calls_tool=calls_tool)
                now += 2.0
            for _ in range(10):
                await ask(engine, 1, text(1))
                now += 200.0
            await ask(engine, 0, text(0), state=state, calls_tool=calls_tool)
            now += 5.0
            await ask(engine, 1, text(1))
            await ask(engine, 2, text(2))  # takes the slot of 1, though that of 0 is older
            way = re.compile(rb"way=(\w+)")
            assert [way.findall(await reason(engine, n, text(n))) for n in (0, 1)] == [
                [b"hot"],
                [b"restore"],
            ]


async def test_a_session_that_is_over_goes_first(weights: str, tmp_path: Path) -> None:
    with bare_llama(weights, slots=2, cache_ram_mib=0, slot_save_path=str(tmp_path)) as url:
        async with served(url, folder=tmp_path) as engine:
            names = SlotNames("", b"s" * 32)

            def sessions() -> set[bytes]:
                kept = (names.read(path.name, 1, 1.0) for path in tmp_path.glob("*.kv"))
                return {one.session for one in kept if one is not None}

            await ask(engine, 0, text(0))
            await ask(engine, 1, text(1), state="over")
            await ask(engine, 2, text(2))  # takes the slot of 1, though that of 0 is older
            assert (await ask(engine, 0, text(0) + " on")).cached_tokens > 1_000
            await until(lambda: names.session(TENANT, "s2") in sessions())
            assert names.session(TENANT, "s1") not in sessions()
            freed = await engine.over(TENANT, "s2")
            assert freed.slots == 1
            assert freed.file_bytes > 0
            assert (await engine.over(TENANT, "s2")).file_bytes == 0  # known by now
            ages = [path.stat().st_mtime for path in tmp_path.glob("*.kv")]
            assert 0.0 in ages


async def test_what_a_tenant_has_in_files_is_erased_and_not_written_again(
    weights: str, tmp_path: Path
) -> None:
    with bare_llama(weights, slots=2, cache_ram_mib=0, slot_save_path=str(tmp_path)) as url:
        async with served(url, folder=tmp_path) as engine:
            for session in range(SESSIONS):
                await ask(engine, session, text(session))
            await until(lambda: len(list(tmp_path.glob("*-*.kv"))) >= SESSIONS - 2)
            assert await engine.erase("another") == 0
            assert await engine.erase(TENANT) >= SESSIONS - 2
            assert not list(tmp_path.glob("*.kv"))
            engine.set_draining("many", is_draining=True)  # writes what is worth it
            await asyncio.sleep(0.3)
            assert not list(tmp_path.glob("*.kv"))
            counts = engine.workers()[0].slot_files
            assert counts["saved"] >= SESSIONS - 2
            assert counts["written_bytes"] > 0


async def test_files_of_a_server_that_was_never_reached_are_erased_too(
    weights: str, tmp_path: Path
) -> None:
    with bare_llama(weights, slots=1, cache_ram_mib=0, slot_save_path=str(tmp_path)) as url:
        async with served(url, folder=tmp_path) as engine:
            for session in range(2):
                await ask(engine, session, text(session))
            await until(lambda: list(tmp_path.glob("*-*.kv")))
    rules = SlotRules((str(tmp_path),), secret=b"s" * 32)
    engine = OpenAi(
        "many", "http://127.0.0.1:1", routing=POLICIES["preheat"](), care=Care(slots=rules)
    )
    try:
        assert await engine.erase(TENANT) >= 1
        assert not list(tmp_path.glob("*-*.kv"))
    finally:
        await engine.aclose()


async def test_what_one_server_has_written_another_loads(weights: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"slots": 2, "cache_ram_mib": 0, "slot_save_path": str(tmp_path)}
    with bare_llama(weights, **settings) as url, bare_llama(weights, **settings) as other:
        async with served(url, other, folder=tmp_path) as engine:
            engine.set_draining("many.1", is_draining=True)
            for session in range(4):
                first = await ask(engine, session, text(session))
            engine.set_draining("many.0", is_draining=True)
            await until(lambda: engine.workers()[0].unsaved_slots == 0)
            engine.set_draining("many.1", is_draining=False)
            for session in range(4):
                again = await ask(engine, session, text(session) + " and on")
                assert again.cached_tokens >= 0.95 * first.input_tokens


async def test_files_of_another_model_are_offered_only_when_that_one_is_back(
    weights: str, tmp_path: Path
) -> None:
    events: list[tuple[str, dict[str, object]]] = []
    folder, other = tmp_path / "slots", tmp_path / "other.gguf"
    folder.mkdir()
    write_tiny_gguf(other)
    order: dict[str, Any] = {
        "slots": 1,
        "cache_ram_mib": 0,
        "slot_save_path": str(folder),
        "port": free_port(),
        "has_metrics": False,
    }
    body = json.dumps({"model": "m", "prompt": text(0), "max_tokens": 2, "temperature": 0}).encode()
    blocks = prefix_of(body, TENANT.encode()).blocks
    with bare_llama(weights, **order) as url:
        started = served(url, folder=folder, events=events)
        engine = await started.__aenter__()
        seats = engine._group._workers[0].seats
        assert seats is not None
        for session in range(2):
            await ask(engine, session, text(session))
        await until(lambda: seats.loadable(TENANT, blocks))
        seats.restarted()  # until it has said which model it has now
        assert seats.loadable(TENANT, blocks) is None
        await until(lambda: seats.loadable(TENANT, blocks))
    try:
        with bare_llama(str(other), **order):
            await until(lambda: told(events, "upstream-switched"))
            assert seats.loadable(TENANT, blocks) is None
            assert (await ask(engine, 0, text(0))).cached_tokens < 20
            assert seats.counts.restored == 0
        events.clear()
        with bare_llama(weights, **order):
            await until(lambda: told(events, "upstream-switched"))
            await until(lambda: seats.loadable(TENANT, blocks))
    finally:
        await started.__aexit__(None, None, None)
