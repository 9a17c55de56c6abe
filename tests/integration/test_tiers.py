"""`preheat tiers`: this machine's tiers and a real server's slots, and what follows from them."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from preheat.cli import main
from preheat.cli.machine_speeds import disk, memory
from preheat.core.costs import ServiceModel, Tier

MIB = 2**20
SIZE = ["--size-mib", "8"]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["tiers", "--json", *SIZE, *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_memory_and_disk_are_measured(tmp_path: Path) -> None:
    copied = memory(8 * MIB)
    assert copied.read_bytes_per_s is not None
    assert copied.latency_s is not None
    assert 1e8 < copied.read_bytes_per_s < 1e12
    assert 0 < copied.latency_s < 0.01
    cold, warm = disk(tmp_path, 8 * MIB)
    assert cold.write_bytes_per_s is not None
    assert warm.read_bytes_per_s is not None
    assert (cold.read_bytes_per_s is None) == bool(cold.note)
    assert list(tmp_path.iterdir()) == []


def test_the_length_from_which_loading_pays_is_where_both_take_as_long(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = told(
        capsys,
        "--folder",
        str(tmp_path),
        "--prefill-tokens-per-s",
        "100",
        "--token-bytes",
        "1000",
    )
    assert report["compute_s"] == pytest.approx(81.92)
    for row in report["tiers"]:
        if row["break_even_tokens"] is None:
            continue
        tier = Tier(name="", bytes_per_s=row["read_bytes_per_s"], latency_s=row["latency_s"])
        length = row["break_even_tokens"]
        service = ServiceModel(token_s=0.01, attention_s=0.0)
        assert service.token_s * length == pytest.approx(tier.load_s(1_000 * length))
        assert row["load_s"] == pytest.approx(tier.load_s(1_000 * report["tokens"]))


def test_where_loading_never_pays_it_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fast = ["--prefill-tokens-per-s", "1e12", "--token-bytes", "1000000"]
    report = told(capsys, "--folder", str(tmp_path), *fast)
    assert {row["note"] for row in report["tiers"] if row["read_bytes_per_s"]} == {"never pays"}


def test_the_text_has_a_line_a_tier(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["tiers", *SIZE, "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:10].strip() for line in lines[:4]] == [
        "tier",
        "memory",
        "disk, cold",
        "disk, warm",
    ]
    assert "8B" in lines[-1]


def test_a_folder_that_isnt_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiers", *SIZE, "--folder", "/nowhere/at/all"]) == 1
    assert "/nowhere/at/all" in capsys.readouterr().err


def test_a_server_that_isnt_there_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    there = ["--folder", str(tmp_path)]
    assert main(["tiers", *SIZE, *there, "--server", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert main(["tiers", *SIZE, *there, "--server", "not a url"]) == 1
    assert "--server" in capsys.readouterr().err


# A real server ----------------------------------------------------------------------------------


@pytest.fixture(params=[True, False])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, Path, bool]]:
    pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
    pytest.importorskip("gguf", reason="the tiny model is written with gguf")
    from preheat.engines.child import ChildSettings, EngineChild
    from tiny_model import write_tiny_gguf

    folder = tmp_path_factory.mktemp("server")
    write_tiny_gguf(folder / "tiny.gguf")
    settings = ChildSettings(
        model=str(folder / "tiny.gguf"),
        ctx_tokens=4_096,
        cache_ram_mib=0,
        slot_save_dir=str(folder / "slots") if request.param else "",
    )
    loop = asyncio.new_event_loop()
    engine = EngineChild(settings, on_event=lambda _name, _fields: None)
    try:
        loop.run_until_complete(engine.start())
        assert engine.url is not None
        yield engine.url, engine.api_key, folder / "slots", request.param
    finally:
        loop.run_until_complete(engine.aclose())
        loop.close()


def test_a_servers_slots_are_measured_and_left_as_they_were(
    server: tuple[str, str, Path, bool],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from preheat.engines.dialects.calls import Prompt
    from preheat.engines.dialects.llamacpp import LlamaCpp
    from preheat.engines.direct import Direct

    url, key, folder, saves = server
    monkeypatch.setenv("THE_KEY", key)

    async def cached(slot: int) -> int | None:
        direct = Direct(url, api_key=key, dialect="llamacpp")
        call = LlamaCpp().warm(Prompt(ids=list(range(40, 240)), slot=slot))
        assert call is not None
        read = LlamaCpp().read_cached((await direct.ask(call))[1])
        await direct.aclose()
        assert read is not None
        return read.cached_tokens

    assert [asyncio.run(cached(slot)) for slot in (0, 1)] == [0, 0]
    there = ["--server", url, "--api-key-env", "THE_KEY", "--tokens", "800"]
    if not saves:
        assert main(["tiers", *SIZE, *there]) == 1
        assert "slot-save-path" in capsys.readouterr().err
        return
    report = told(capsys, *there, "--folder", str(folder))
    assert report["model"] == "measured"
    assert report["token_bytes"] == pytest.approx(2_048, rel=0.02)
    slot = report["tiers"][-1]
    assert slot["name"] == "slot file, warm"
    assert slot["break_even_tokens"] is not None
    assert slot["read_bytes_per_s"] > 1e7
    assert slot["load_s"] < report["compute_s"]
    assert [asyncio.run(cached(slot)) for slot in (0, 1)] == [199, 199]
    assert list(folder.iterdir()) == []
    assert main(["tiers", *SIZE, *there, "--tokens", "4096"]) == 1
    assert "smaller --tokens" in capsys.readouterr().err
