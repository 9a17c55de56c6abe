"""A gateway before a prefill and a decode server: what a client gets, and what each of them is sent."""

import asyncio
from pathlib import Path

import pytest

from harness import Gateway, Reply
from kv_transfer_faked import Fabric, KvServer

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

PROMPT = "the quick brown fox jumps over the lazy dog " * 30


def asked(gateway: Gateway, prompt: str) -> Reply:
    body = {"model": "m1", "prompt": prompt, "max_tokens": 7, "min_tokens": 2, "temperature": 0}
    return gateway.post("/v1/completions", body)


async def test_a_completion_takes_two_steps_and_its_repeat_none(tmp_path: Path) -> None:
    fabric = Fabric()
    async with KvServer("p", fabric) as prefill, KvServer("d", fabric) as decode:
        toml = f"""
            [engines.big]
            urls = ["{prefill.url}", "{decode.url}"]
            roles = ["prefill", "decode"]
            routing = {{name = "preheat"}}
            [models.m1]
            engine = "big"
        """
        gateway = await asyncio.to_thread(lambda: Gateway(toml, folder=tmp_path))
        try:
            first = await asyncio.to_thread(asked, gateway, PROMPT)
            assert (first.status, first.json["by"]) == (200, "d")
            assert first.headers["x-preheat-worker"] == "big.1"
            assert first.headers["x-preheat-route"].startswith("overlap=0, best=0, input=")
            assert "prefill=big.0" in first.headers["x-preheat-route"]
            again = await asyncio.to_thread(asked, gateway, PROMPT)
            assert (again.cache, again.json["by"]) == ("hit", "d")
            inference = [one for one in prefill.asked if "prompt" in one]
            assert [one["max_tokens"] for one in inference] == [1]
            assert [one["max_tokens"] for one in decode.asked] == [7]
            assert prefill.ids == decode.ids
            assert (prefill.computed, decode.computed, decode.fetched) == (1, 0, 1)

            decode.mode = "loses"
            lost = await asyncio.to_thread(asked, gateway, f"lost {PROMPT}")
            assert (lost.status, lost.json["by"]) == (200, "d")
            told = '"event":"handover-failed","engine":"big","worker":"big.1","kind":"status-500"'
            async with asyncio.timeout(10.0):
                while told not in gateway.stderr:
                    await asyncio.sleep(0.05)
        finally:
            await asyncio.to_thread(gateway.stop)
