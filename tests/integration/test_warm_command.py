"""`preheat warm` and `preheat verify` on a real llama.cpp server."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytest.importorskip("gguf", reason="the tiny model is written with gguf")

from preheat.cli import main
from preheat.engines.child import ChildSettings, EngineChild
from preheat.engines.direct import Direct
from tiny_model import write_tiny_gguf

pytestmark = pytest.mark.timeout(120)

CHATS = [[{"role": "system", "content": f"{word} " * 150}] for word in ("alpha", "bravo")]


class Place:
    """A server, and a folder with a file of prompts."""

    def __init__(self, engine: EngineChild, folder: Path) -> None:
        assert engine.url is not None
        self.url = engine.url
        self.key = engine.api_key
        self.folder = folder
        self.file = folder / "prompts.jsonl"
        self.write(CHATS)

    def write(self, prompts: list[Any]) -> None:
        self.file.write_text("".join(json.dumps(one) + "\n" for one in prompts))

    def arguments(self, command: str) -> list[str]:
        return [
            *(command, str(self.file), "--url", self.url, "--api-key-env", "WARM_KEY", "--json"),
            *("--state", str(self.folder / "state.json"), "--slack", "0.1"),
        ][: None if command == "warm" else -2]

    def erase(self, slot: int) -> None:
        async def ask() -> None:
            direct = Direct(self.url, api_key=self.key)
            call = (await direct.known()).erase(slot)
            assert call is not None
            assert (await direct.ask(call))[0] == 200
            await direct.aclose()

        asyncio.run(ask())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


@pytest.fixture
def place(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    settings = ChildSettings(
        model=weights,
        slots=3,
        ctx_tokens=3 * 16_384,
        cache_ram_mib=0,
        slot_save_dir=str(tmp_path / "slots"),
    )
    loop = asyncio.new_event_loop()
    engine = EngineChild(settings, on_event=lambda _name, _fields: None)
    try:
        loop.run_until_complete(engine.start())
        monkeypatch.setenv("WARM_KEY", engine.api_key)
        yield Place(engine, tmp_path)
    finally:
        loop.run_until_complete(engine.aclose())
        loop.close()


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_what_was_warmed_is_proven_and_what_was_erased_refuted(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(place.arguments("warm")) == 0
    warmed = told(capsys)
    assert warmed["counts"] == {"done": 2}
    outcomes = [row["outcome"] for row in warmed["outcomes"]]
    assert all(one["tokens"] > 900 and one["chunks"] > 1 for one in outcomes)

    assert main(place.arguments("verify")) == 0
    proofs = told(capsys)
    assert proofs["counts"] == {"proven": 2}
    assert [row["proof"]["cached_tokens"] for row in proofs["proofs"]] == [
        one["tokens"] - 1 for one in outcomes
    ]

    place.erase(outcomes[1]["slot"])
    assert main(place.arguments("verify")) == 1
    verdicts = [row["proof"]["verdict"] for row in told(capsys)["proofs"]]
    assert verdicts == ["proven", "refuted"]


def test_a_second_run_finds_it_done_and_every_slot_can_be_filled(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.write(CHATS[:1])
    assert main(place.arguments("warm")) == 0
    first = told(capsys)["outcomes"][0]["outcome"]
    assert main([*place.arguments("warm"), "--every-slot"]) == 0
    (row,) = told(capsys)["outcomes"]
    assert (row["outcome"]["computed_tokens"], row["outcome"]["chunks"]) == (1, 1)
    assert row["slots"][0] == first["slot"]
    assert sorted(row["slots"]) == [0, 1, 2]


def test_ctrl_c_stops_it_and_the_same_command_goes_on(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.write([[{"role": "system", "content": "delta " * 700}]])
    command = [sys.executable, "-m", "preheat", *place.arguments("warm")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    try:
        wait_for_work(place)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert json.loads(out)["is_interrupted"]
    (mark,) = json.loads((place.folder / "state.json").read_text())["marks"]
    assert 0 < mark["done_tokens"] < mark["tokens"]
    assert "delta" not in (place.folder / "state.json").read_text()

    assert main(place.arguments("warm")) == 0
    outcome = told(capsys)["outcomes"][0]["outcome"]
    assert outcome["tokens"] == mark["tokens"] > 4_000
    assert outcome["computed_tokens"] <= mark["tokens"] - mark["done_tokens"] + 1


def wait_for_work(place: Place) -> None:
    async def until() -> None:
        direct = Direct(place.url, api_key=place.key)
        deadline = time.monotonic() + 30
        while not any((one.tokens or 0) > 500 for one in await direct.slots() or ()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await direct.aclose()

    asyncio.run(until())


def test_people_get_tables(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    warm = [one for one in place.arguments("warm") if one != "--json"]
    assert main(warm) == 0
    assert "done" in capsys.readouterr().out
    verify = [one for one in place.arguments("verify") if one != "--json"]
    assert main([*verify, "--adapter", "0"]) == 1  # there is none
    out = capsys.readouterr().out
    assert "0 isn't among its adapters" in out
    assert out.rstrip().endswith("unknown")
