"""No slot of a llama.cpp server is believed to hold what it lost: by restarts, and by requests that named none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytest.importorskip("gguf", reason="the tiny model is written with gguf")

from bare_llama import bare_llama
from named_slots import Event, Served, ask, known, prompt_of, served, until
from ports import free_port
from tiny_model import write_tiny_gguf

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

Order = Callable[[], dict[str, Any]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


def order(folder: Path, **more: Any) -> dict[str, Any]:
    """A server that counts nothing by which a restart could be known."""
    fixed = {"slots": 2, "cache_ram_mib": 0, "slot_save_path": str(folder), "port": free_port()}
    return {**fixed, "has_metrics": False, **more}


async def said(engine: Served, session: int) -> str:
    """How a session gets its prefix. What is said to be hot is, as the server counts it."""
    answer = await ask(engine, session, prompt_of(session) + " and on")
    if answer.way in {"hot", "restore"}:
        assert answer.cached_tokens >= 0.9 * len(prompt_of(session))
    return answer.way


async def test_what_a_drain_has_saved_is_loaded_though_the_server_counts_nothing(
    weights: str, tmp_path: Path
) -> None:
    events: list[Event] = []
    mine, other = order(tmp_path), order(tmp_path)
    url = f"http://127.0.0.1:{mine['port']}"
    with bare_llama(weights, **other) as second:
        with bare_llama(weights, **mine):
            started = served(url, second, folder=tmp_path, events=events)
            engine = await started.__aenter__()
            engine.set_draining("many.1", is_draining=True)
            for session in range(2):
                await ask(engine, session, prompt_of(session))
            engine.set_draining("many.0", is_draining=True)
            await until(lambda: known(events, "slots-saved", worker="many.0"))
        try:
            with bare_llama(weights, **mine):
                engine.set_draining("many.0", is_draining=False)
                await until(lambda: known(events, "upstream-ready", worker="many.0", restored=2))
                assert [await said(engine, session) for session in range(2)] == ["hot", "hot"]
        finally:
            await started.__aexit__(None, None, None)


async def test_a_drain_without_a_restart_keeps_what_is_there(weights: str, tmp_path: Path) -> None:
    events: list[Event] = []
    with bare_llama(weights, **order(tmp_path)) as url:
        async with served(url, folder=tmp_path, events=events) as engine:
            for session in range(2):
                await ask(engine, session, prompt_of(session))
            engine.set_draining("many", is_draining=True)
            await until(lambda: known(events, "slots-saved", worker="many"))
            engine.set_draining("many", is_draining=False)
            assert [await said(engine, session) for session in range(2)] == ["hot", "hot"]
            assert not known(events, "upstream-restarted", worker="many")


@pytest.mark.parametrize("poll_s", [0.05, 30.0])
async def test_a_restart_that_no_count_tells_is_seen_in_the_slots(
    weights: str, tmp_path: Path, poll_s: float
) -> None:
    """By looking now and then, or by the first request that fails or finds nothing."""
    events: list[Event] = []
    mine = order(tmp_path)
    with bare_llama(weights, **mine) as url:
        started = served(url, folder=tmp_path, events=events, poll_s=poll_s)
        engine = await started.__aenter__()
        for session in range(2):
            await ask(engine, session, prompt_of(session))
    try:
        if poll_s > 1.0:  # fewer failures than it takes to be left alone
            with pytest.raises(Exception, match="ECONNREFUSED"):
                await ask(engine, 7, prompt_of(7))
        with bare_llama(weights, **mine):
            if poll_s < 1.0:
                await until(lambda: known(events, "upstream-restarted", worker="many"))
            for session in range(2):
                await said(engine, session)
            assert known(events, "upstream-restarted", worker="many")
            assert [name for name, _ in events].count("upstream-restarted") == 1
    finally:
        await started.__aexit__(None, None, None)


async def test_who_finds_nothing_where_something_was_believed_is_the_last(
    weights: str, tmp_path: Path
) -> None:
    """Started again between two looks, with nothing asked meanwhile."""
    events: list[Event] = []
    mine = order(tmp_path, slots=3)
    with bare_llama(weights, **mine) as url:
        started = served(url, folder=tmp_path, events=events, poll_s=30.0)
        engine = await started.__aenter__()
        for session in range(3):
            await ask(engine, session, prompt_of(session))
    try:
        with bare_llama(weights, **mine):
            first = await ask(engine, 0, prompt_of(0) + " and on")
            assert first.cached_tokens < 20
            for session in (1, 2):
                await said(engine, session)
            assert known(events, "upstream-restarted", worker="many")
    finally:
        await started.__aexit__(None, None, None)


async def test_a_request_that_named_no_slot_leaves_no_wrong_belief(
    weights: str, tmp_path: Path
) -> None:
    with bare_llama(weights, **order(tmp_path)) as url:
        async with served(url, folder=tmp_path, poll_s=30.0) as engine:
            for session in range(2):
                await ask(engine, session, prompt_of(session))
            body = {"model": "m", "prompt": prompt_of(9, 900), "max_tokens": 1, "id_slot": 1}
            headers = [(b"content-type", b"application/json")]
            response = await engine.send(
                b"POST", b"/completions", headers, json.dumps(body).encode()
            )
            assert json.loads(await response.read(1 << 20))["usage"]["prompt_tokens"] >= 900
            assert response.placement is not None
            response.placement.ended(None)
            assert "hot" in [await said(engine, session) for session in range(2)]
