"""`POST /preheat/v1/warm` to a gateway before a real llama.cpp server whose slots it names."""

import time
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytest.importorskip("gguf", reason="the tiny model is written with gguf")

from bare_llama import bare_llama
from harness import Gateway
from named_slots import prompt_of
from tiny_model import write_tiny_gguf

pytestmark = pytest.mark.timeout(90)

SYSTEM = {"role": "system", "content": prompt_of(0, 1_200)}
TOML = """
[engines.local]
urls = ["{}"]
slot_folders = ["{}"]
poll_s = 0.1
"""


def test_the_next_request_finds_what_was_warmed(tmp_path: Path) -> None:
    weights, slots = tmp_path / "tiny.gguf", tmp_path / "slots"
    write_tiny_gguf(weights)
    slots.mkdir()
    settings = {"slots": 2, "cache_ram_mib": 0, "slot_save_path": str(slots)}
    with bare_llama(str(weights), **settings) as url:
        gateway = Gateway(TOML.format(url, slots), folder=tmp_path)
        try:
            until = time.monotonic() + 20.0
            while '"slot-files-on"' not in gateway.stderr and time.monotonic() < until:
                time.sleep(0.05)
            body = {"model": "m", "messages": [SYSTEM]}
            warmed = gateway.post("/preheat/v1/warm", body, {}).json
            assert (warmed["done"], warmed["of"]) == (1, 1), warmed
            verified = gateway.post("/preheat/v1/verify", body, {}).json
            assert verified["proven"] == 1, verified
            asked = {**body, "messages": [SYSTEM, {"role": "user", "content": "?"}]}
            reply = gateway.post("/v1/chat/completions", {**asked, "max_tokens": 2}, {})
            assert reply.status == 200, reply.body
            assert int(reply.headers["x-preheat-cached-tokens"]) > 1_200
            assert "way=hot" in reply.headers["x-preheat-route"]
        finally:
            gateway.stop()
        assert '"event":"bug"' not in gateway.stderr, gateway.stderr
