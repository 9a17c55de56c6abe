"""A warmer and a server in memory with vLLM's rules: chunks, yielding, joining, refusals, proofs."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from preheat.core.warmup import Mark, Pace
from preheat.engines import idle
from preheat.engines.dialects.calls import Call, Prompt
from preheat.engines.direct import Direct
from preheat.engines.fake_kv import BlockLru
from preheat.engines.warmer import Step, Warmer
from preheat.errors import EngineError

BLOCK = 16
SYSTEM = [{"role": "system", "content": "word " * 400}]


class Vllm(Direct):
    """As much of it as a warmer sees. A token is a character; salts are separate caches."""

    def __init__(self, dialect: str = "vllm") -> None:
        super().__init__("http://127.0.0.1:9", dialect=dialect)
        self.caches: dict[str, BlockLru] = {}
        self.asked: list[dict[str, Any]] = []
        self.waiting = 0
        self.takes_priority = True
        self.tells_cached = self.tells_zero = True
        self.status = 200
        self.is_down = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.adapters: list[str] = []
        self.before: Callable[[], None] = lambda: None

    async def ask(self, call: Call, *, within_s: float | None = None) -> tuple[int, bytes]:
        if self.is_down:
            raise EngineError("it is down", kind="connect")
        await asyncio.sleep(0)
        fields = msgspec.json.decode(call.body) if call.body else {}
        if call.path == b"/metrics":
            self.before()
            return 200, (
                f"vllm:num_requests_running 0\nvllm:num_requests_waiting {self.waiting}\n"
                f'vllm:kv_cache_usage_perc 0.0\nvllm:cache_config_info{{block_size="{BLOCK}",'
                f'num_gpu_blocks="1000"}} 1\n'
            ).encode()
        if call.path == b"/tokenize":
            text = fields.get("prompt") or "".join(one["content"] for one in fields["messages"])
            ids = [ord(c) for c in text]
            return 200, msgspec.json.encode({"count": len(ids), "tokens": ids})
        if call.path == b"/v1/models":
            data = [{"id": name, "parent": "base"} for name in self.adapters]
            return 200, msgspec.json.encode({"data": data})
        if call.path == b"/v1/load_lora_adapter":
            self.adapters.append(fields["lora_name"])
            return 200, b"Success"
        return await self._completed(fields)

    async def _completed(self, fields: dict[str, Any]) -> tuple[int, bytes]:
        self.asked.append(fields)
        await self.hold.wait()
        if "priority" in fields and not self.takes_priority:
            return 400, b'{"error": {"message": "priority scheduling is not enabled"}}'
        if fields.get("model") == "missing":
            return 404, b'{"error": {"message": "no such model"}}'
        if self.status != 200:
            return self.status, b'{"error": {"message": "not now"}}'
        asked = fields["prompt"] if "prompt" in fields else fields["messages"][0]["content"]
        ids = asked if isinstance(asked, list) else [*asked.encode()]
        cache = self.caches.setdefault(fields.get("cache_salt", ""), BlockLru(1_000, BLOCK))
        usage: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": 1}
        held = cache.serve(ids) // BLOCK * BLOCK
        if self.tells_cached and (held or self.tells_zero):
            usage["prompt_tokens_details"] = {"cached_tokens": held}
        return 200, msgspec.json.encode({"usage": usage})


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_LOOK_AGAIN_S", 0.01)


def warmer_of(server: Vllm, steps: list[Step] | None = None, **options: Any) -> Warmer:
    tell = (lambda _: None) if steps is None else steps.append
    return Warmer(server, pace=Pace(first_tokens=100), on_step=tell, **options)


def prompt(**fields: Any) -> Prompt:
    return Prompt(model="m", **{"messages": SYSTEM, **fields})


def lengths(server: Vllm) -> list[int]:
    return [len(one["prompt"]) for one in server.asked]


async def warmed(server: Vllm, **fields: Any) -> None:
    outcome = await warmer_of(server).warm(prompt(**fields))
    assert outcome.state == "done", outcome


@pytest.mark.asyncio
async def test_a_prefix_is_warmed_in_chunks_at_the_lowest_priority_and_proven() -> None:
    server, steps = Vllm(), list[Step]()
    warmer = warmer_of(server, steps)
    outcome = await warmer.warm(prompt(salt="t"))
    assert (outcome.state, outcome.tokens) == ("done", 2_000)
    assert lengths(server)[0] == 100
    assert lengths(server)[-1] == 2_000
    assert 3 <= outcome.chunks == len(server.asked)
    assert all(one["max_tokens"] == 1 and one["cache_salt"] == "t" for one in server.asked)
    assert all(one["priority"] > 1_000 for one in server.asked)
    assert 2_000 <= outcome.computed_tokens < 2_000 + BLOCK * outcome.chunks
    assert [one.done_tokens for one in steps if not one.waits_for][-1] == 2_000

    proof = await warmer.prove(prompt(salt="t"))
    assert (proof.verdict, proof.cached_tokens, proof.asked_tokens) == ("proven", 1_984, 1_800)
    assert (await warmer.prove(prompt(salt="other"))).verdict == "refuted"
    server.caches.clear()
    assert (await warmer.prove(prompt(salt="t"))).verdict == "refuted"


@pytest.mark.asyncio
async def test_who_doesnt_take_priorities_is_asked_without() -> None:
    server = Vllm()
    server.takes_priority = False
    await warmed(server)
    assert ["priority" in one for one in server.asked][:3] == [True, False, False]


@pytest.mark.asyncio
@pytest.mark.parametrize(("words", "verdict"), [(400, "proven"), (150, "unknown")])
async def test_where_nobody_tells_tokens_the_whole_goes_in_one_call(
    words: int, verdict: str
) -> None:
    server = Vllm("openai")
    long = [{"role": "system", "content": "word " * words}]
    warmer = warmer_of(server)
    outcome = await warmer.warm(prompt(messages=long))
    assert (outcome.state, outcome.tokens, outcome.chunks) == ("done", 5 * words, 1)
    assert outcome.computed_tokens == 5 * words
    (asked,) = server.asked
    assert asked["messages"] == long
    assert "priority" not in asked
    server.tells_cached = words > 200  # below 1,024 tokens nothing is kept there
    assert (await warmer.prove(prompt(messages=long))).verdict == verdict
    server.tells_cached = True
    server.caches.clear()
    gone = (await warmer.prove(prompt(messages=long))).verdict
    assert gone == ("refuted" if words > 200 else "unknown")


@pytest.mark.asyncio
async def test_priorities_are_kept_where_something_else_was_refused() -> None:
    server = Vllm()
    warmer = warmer_of(server)
    server.status = 400
    assert (await warmer.warm(prompt())).state == "failed"
    assert ["priority" in one for one in server.asked] == [True, False]
    server.status = 200
    assert (await warmer.warm(prompt())).state == "done"
    assert "priority" in server.asked[-1]


@pytest.mark.asyncio
async def test_a_share_of_the_idle_time_is_left() -> None:
    server = Vllm()
    began_at = time.monotonic()
    outcome = await Warmer(server, pace=Pace(first_tokens=500, share=0.001)).warm(prompt())
    assert time.monotonic() - began_at >= 0.9 * 999 * (outcome.took_s - outcome.longest_chunk_s)


@pytest.mark.asyncio
async def test_it_yields_between_chunks_while_requests_wait() -> None:
    server, steps = Vllm(), list[Step]()
    looks = []

    def before() -> None:
        looks.append(len(server.asked))
        server.waiting = 2 if 4 <= len(looks) < 7 else 0

    server.before = before
    outcome = await warmer_of(server, steps).warm(prompt())
    assert outcome.state == "done"
    assert outcome.waited_s == pytest.approx(0.03)
    waits = [one for one in steps if one.waits_for]
    assert {one.waits_for for one in waits} == {"2 requests wait"}
    assert len({one.done_tokens for one in waits}) == 1  # nothing went on meanwhile
    assert 0 < waits[0].done_tokens < 2_000


@pytest.mark.asyncio
async def test_where_no_idle_moment_comes_it_is_told_and_nothing_is_sent() -> None:
    server = Vllm()
    server.waiting = 1
    outcome = await warmer_of(server, patience_s=0.05).warm(prompt())
    assert (outcome.state, outcome.tokens) == ("busy", 0)
    assert "1 request waits" in outcome.why
    assert server.asked == []
    proof = await warmer_of(server, patience_s=0.05).prove(prompt())
    assert proof.verdict == "unknown"


@pytest.mark.asyncio
async def test_one_prefix_is_warmed_once_for_all_who_want_it() -> None:
    server = Vllm()
    warmer = warmer_of(server)
    server.hold.clear()
    tasks = [asyncio.create_task(warmer.warm(prompt())) for _ in range(4)]
    await asyncio.sleep(0.02)
    server.hold.set()
    outcomes = await asyncio.gather(*tasks)
    assert len({id(one) for one in outcomes}) == 1
    assert len(server.asked) == outcomes[0].chunks


@pytest.mark.asyncio
async def test_when_the_leader_is_called_off_a_follower_goes_on() -> None:
    server = Vllm()
    warmer = warmer_of(server)
    server.hold.clear()
    tasks = [asyncio.create_task(warmer.warm(prompt())) for _ in range(3)]
    await asyncio.sleep(0.02)
    tasks[0].cancel()
    server.hold.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1] is outcomes[2]
    assert not isinstance(outcomes[1], BaseException)
    assert outcomes[1].state == "done"


@pytest.mark.asyncio
async def test_a_block_cache_is_walked_again_from_its_start() -> None:
    server = Vllm()
    await warmed(server)
    server.asked.clear()
    mark = Mark(worker="w", prefix="p", tokens=2_000, done_tokens=1_500)
    outcome = await warmer_of(server).warm(prompt(), mark)
    assert lengths(server)[0] == 100
    assert outcome.computed_tokens <= BLOCK * outcome.chunks  # the last block of each


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["refused", "down", "slow"])
async def test_what_a_server_wont_do_is_an_outcome(what: str) -> None:
    server = Vllm()
    server.status = {"refused": 422, "slow": 503}.get(what, 200)
    server.is_down = what == "down"
    outcome = await warmer_of(server, patience_s=0.03).warm(prompt())
    assert outcome.state == ("busy" if what == "slow" else "failed")
    assert outcome.why
    assert (await warmer_of(server, patience_s=0.03).prove(prompt())).verdict == "unknown"


@pytest.mark.asyncio
async def test_an_engine_that_doesnt_tell_leaves_it_unknown() -> None:
    server = Vllm()
    server.tells_cached = False
    await warmed(server)
    assert (await warmer_of(server).prove(prompt())).verdict == "unknown"


@pytest.mark.asyncio
async def test_one_that_leaves_out_a_zero_is_told_from_one_that_never_tells() -> None:
    server = Vllm()
    server.tells_zero = False
    await warmed(server)
    warmer = warmer_of(server)
    assert (await warmer.prove(prompt())).verdict == "proven"
    server.caches.clear()
    asked = len(server.asked)
    proof = await warmer.prove(prompt())
    assert (proof.verdict, proof.cached_tokens) == ("refuted", 0)
    assert len(server.asked) == asked + 2, "what the first has computed the second finds"

    server.caches.clear()
    assert (await warmer.prove(prompt(), tells=True)).verdict == "refuted"
    assert len(server.asked) == asked + 3, "who is known to tell isn't asked twice"

    short = Prompt(model="m", messages=[{"role": "system", "content": "w" * BLOCK}])
    assert (await warmer.prove(short)).verdict == "unknown"
    assert len(server.asked) == asked + 4, "of no whole block nobody can tell"


@pytest.mark.asyncio
async def test_an_adapter_is_loaded_and_proven() -> None:
    server = Vllm()
    warmer = warmer_of(server)
    assert (await warmer.load_adapter("sql")).state == "failed"  # from where?
    assert (await warmer.prove_adapter("sql")).verdict == "refuted"
    assert (await warmer.load_adapter("sql", "/adapters/sql")).state == "done"
    assert (await warmer.prove_adapter("sql")).verdict == "proven"
    await warmer.load_adapter("sql", "/adapters/sql")
    assert server.adapters == ["sql"]
    server.adapters.append("missing")
    assert (await warmer.prove_adapter("missing")).verdict == "refuted"
    server.is_down = True
    assert (await warmer.prove_adapter("sql")).verdict == "unknown"
    assert (await warmer.load_adapter("other", "/x")).state == "failed"
