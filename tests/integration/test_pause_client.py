"""The clients of `pause_return` on a real server: the same requests in each way, and where prefixes come from."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytest.importorskip("gguf", reason="the tiny model is written with gguf")

from benchmarks.closure_live import Engine, engine
from benchmarks.pause_client import Clients, Seen, keeping, plain
from benchmarks.pause_script import Turn
from benchmarks.report import Progress
from preheat.engines.child import ChildSettings
from tiny_model import write_tiny_gguf

SLOTS = 2
SCRIPT = [[Turn(0.05 * place, 200), Turn(0.3, 20), Turn(0.3, 20)] for place in range(3 * SLOTS)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, str, Path]]:
    folder, key = tmp_path_factory.mktemp("server"), secrets.token_hex(8)
    write_tiny_gguf(folder / "tiny.gguf")
    settings = ChildSettings(
        model=str(folder / "tiny.gguf"),
        alias="m",
        slots=SLOTS,
        ctx_tokens=SLOTS * 4_096,
        cache_ram_mib=0,
        slot_save_dir=str(folder / "slots"),
    )
    with engine("tiny", settings, key, folder=folder, core=None) as running:
        yield running, key, folder / "slots"


@pytest.mark.asyncio
async def test_what_was_computed_once_is_loaded_and_both_ways_ask_the_same(
    server: tuple[Engine, str, Path],
) -> None:
    running, key, folder = server
    seen: dict[str, list[Seen]] = {}
    for arm in ("recompute", "restore", "restore again"):
        opened = (
            plain(running.url, key) if arm == "recompute" else keeping(running.url, key, folder)
        )
        async with opened as way:
            await way.emptied(SLOTS)
            seen[arm] = await Clients(way, SCRIPT, arm, 0, 1, 8).run(Progress("test"))
    firsts = {
        arm: sorted((one.session, one.prompt_tokens) for one in some if not one.turn)
        for arm, some in seen.items()
    }
    assert firsts["recompute"] == firsts["restore"] == firsts["restore again"]
    for arm in ("restore", "restore again"):
        returns = [one for one in seen[arm] if one.turn]
        assert {one.way for one in returns} <= {"restore", "hot"}
        assert min(one.cached_tokens / one.prompt_tokens for one in returns) > 0.8
        assert all(one.cached_tokens < 100 for one in seen[arm] if not one.turn)
        assert sum(one.read_bytes for one in seen[arm]) > 0
    assert sum(one.prefill_s for one in seen["restore"]) < sum(
        one.prefill_s for one in seen["recompute"]
    )
    assert {(one.way, one.written_bytes) for one in seen["recompute"]} == {("engine", 0)}
    assert all(one.ttft_s > 0.0 for some in seen.values() for one in some)
