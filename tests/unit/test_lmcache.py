"""LMCache's answers as the real one gave them (0.5.6), and what is made of them."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_faked import Lmcache
from preheat import config
from preheat.core.router import Ask, Loadable, Router
from preheat.core.routing import POLICIES
from preheat.core.sharing import Sharing
from preheat.engines import lmcache, lmcache_tier
from preheat.engines.dialects import DIALECTS
from preheat.engines.lmcache import Held, Instance, Names
from preheat.engines.lmcache_fleet import Found, LmcacheFleet, LmcacheRules
from preheat.engines.lmcache_tier import LmcacheTier
from preheat.errors import ConfigError
from preheat.gateway.reload import _is_same_group

RECORDED = json.loads(
    (Path(__file__).parent.parent / "recorded" / "lmcache.json").read_text("utf-8")
)
IDS = list(range(14))
NAMES = Names("org/model", 2)


def said(method: str, path: str, *, at: int = 0, status: int = 200) -> bytes:
    """What the real one answered to this question, the `at`'th time."""
    found = [
        one
        for one in RECORDED["asked"]
        if (one["method"], one["path"], one["status"]) == (method, path, status)
    ]
    return msgspec.json.encode(found[at]["answer"])


def faked() -> Lmcache:
    """In the state in which the real one was asked."""
    made = Lmcache(chunk_tokens=4, world_size=2)
    made.instances = {"n0": ("127.0.0.1", 1), "n1": ("127.0.0.2", 1)}
    made.store(IDS[:8], "n0")
    made.store(IDS, "n0", "l2")
    made.store(IDS[:4], "n1", "l2", shared=True, ranks=2)
    return made


def test_the_real_one_is_understood() -> None:
    instances = lmcache.read_instances("coordinator", said("GET", "/instances"))
    assert instances is not None
    assert [(one.name, one.host, one.port > 0) for one in instances] == [
        ("n0", "127.0.0.1", True),
        ("n1", "127.0.0.2", True),
    ]
    path = lmcache.keys("n0").path.decode()
    assert lmcache.read_names(said("GET", path)) is None, "nothing is stored yet"
    assert lmcache.read_names(said("GET", path, at=1)) == NAMES
    question = lmcache.lookup(IDS, NAMES, "")
    assert json.loads(question.body) == RECORDED["asked"][2]["body"]
    before = lmcache.read_lookup(said("POST", "/directory/lookup"), 14)
    assert before is not None
    assert before.held("n0") == Held(0, 0, 0)
    found = lmcache.read_lookup(said("POST", "/directory/lookup", at=1), 14)
    assert found is not None
    assert found.chunk_tokens == 4
    assert found.held("n0") == Held(12, 6_000, 2_000), "two chunks of memory, one of its disk"
    assert found.held("n1") == Held(4, 2_000, 2_000), "what all share"
    assert {name: len(keys) for name, keys in found.in_memory(4).items()} == {"n0": 2}
    assert found.in_memory(5) == {}, "a chunk that is partly others' stays"
    short = lmcache.read_lookup(said("POST", "/directory/lookup", at=2), 1)
    assert short is not None
    assert short.held("n0").tokens == 0
    assert lmcache.read_prefetch(said("POST", "/cache/prefetches")) == "a" * 32
    assert lmcache.read_prefetched(said("GET", f"/cache/prefetches/n0/{'a' * 32}"))
    for status in (422, 400):
        assert lmcache.read_lookup(said("POST", "/directory/lookup", status=status), 14) is None


def test_the_apis_are_told_apart_by_their_answers() -> None:
    old = {one["path"]: one for one in RECORDED["asked"] if one["api"] == "controller"}
    new = {one["path"]: one for one in RECORDED["asked"] if one["api"] == "coordinator"}
    assert old["/instances"]["status"] == new["/controller/workers"]["status"] == 404
    workers = msgspec.json.encode(old["/controller/workers"]["answer"])
    assert lmcache.read_instances("controller", workers) == []
    assert lmcache.read_instances("coordinator", workers) is None
    assert lmcache.read_controller_lookup(msgspec.json.encode(old["/lookup"]["answer"]), 14) is None


@pytest.mark.parametrize("one", RECORDED["asked"], ids=lambda one: one["method"] + one["path"])
def test_the_fake_has_the_real_one_s_fields(one: dict[str, Any]) -> None:
    """Not its hashes, and not how it words a refusal."""
    fake = faked()
    fake.is_old = one["api"] == "controller"
    if fake.is_old:
        fake.instances, fake.placed = {}, {}
    at = RECORDED["asked"].index(one)
    if at < 3:
        fake.placed = {}
    if one["path"].startswith("/cache/prefetches/"):
        fake.jobs = {"a" * 32: 0.0}
    status, answer = fake.answer(one["method"], one["path"], one["body"] or {})
    assert status == one["status"]
    if status == 200:
        assert fields(answer) == fields(one["answer"])


def fields(value: Any) -> Any:
    """All names, and how many there are of each thing."""
    if isinstance(value, dict):
        return {name: fields(one) for name, one in value.items()}
    if isinstance(value, list):
        return [fields(one) for one in value]
    return type(value).__name__


def test_without_a_chunk_s_tokens_its_size_is_the_least_it_can_be() -> None:
    fake = faked()
    fake.tells_tokens = False
    _, answer = fake.answer(
        "POST", "/directory/lookup", json.loads(lmcache.lookup(IDS, NAMES, "").body)
    )
    found = lmcache.read_lookup(msgspec.json.encode(answer), 14)
    assert found is not None
    assert found.chunk_tokens == 4, "three chunks of 14 tokens: four each, and two are left"


def test_a_part_that_one_rank_lacks_is_a_gap() -> None:
    fake = Lmcache(chunk_tokens=4, world_size=2)
    fake.store(IDS, "n0", ranks=1)
    _, answer = fake.answer(
        "POST", "/directory/lookup", json.loads(lmcache.lookup(IDS, NAMES, "").body)
    )
    found = lmcache.read_lookup(msgspec.json.encode(answer), 14)
    assert found is not None
    assert found.held("n0").tokens == 0


def test_of_several_instances_the_controller_tells_nothing() -> None:
    fake = Lmcache(chunk_tokens=4, is_old=True, instances={"a": ("x", 1), "b": ("y", 1)})
    fake.store(IDS[:8], "a")

    def told() -> tuple[str, Held] | None:
        _, answer = fake.answer("POST", "/lookup", json.loads(lmcache.controller_lookup(IDS).body))
        return lmcache.read_controller_lookup(msgspec.json.encode(answer), 14)

    assert told() == ("a", Held(8, 8 * lmcache.TOKEN_BYTES, 0))
    fake.store(IDS, "b")
    assert told() is None, "its 12 tokens of b may be the third chunk alone"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(
            ["instances", "workers", "keys", "key", "kv_rank", "model_name", "results", "chunks",
             "placements", "token_ids", "layout_info", "instance_id", "ip", "request_id", "deleted"]
        ), inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(JSON.map(msgspec.json.encode) | st.binary(max_size=64))
def test_nothing_that_is_read_raises(body: bytes) -> None:
    for api in lmcache.LISTS:
        lmcache.read_instances(api, body)
    lmcache.read_names(body)
    found = lmcache.read_lookup(body, 1_000)
    if found is not None:
        assert 0 <= found.held("n0").tokens <= 1_000
        found.in_memory(0)
    lmcache.read_prefetch(body)
    lmcache.read_prefetched(body)
    assert lmcache.read_deleted(body) >= 0
    held = lmcache.read_controller_lookup(body, 1_000)
    assert held is None or 0 < held[1].tokens <= 1_000


def test_an_instance_without_an_address_is_none() -> None:
    body = msgspec.json.encode(
        {
            "instances": [
                {"instance_id": "", "ip": "x"},
                {"instance_id": "n"},
                {"instance_id": "m", "ip": "h"},
            ]
        }
    )
    assert lmcache.read_instances("coordinator", body) == [Instance("m", "h")]


def test_a_prompt_goes_where_it_is_loaded_quicker_than_computed() -> None:
    router = Router(POLICIES["cost"]())
    blocks = tuple(range(100))

    def placed(loadable: dict[int, Loadable] | None) -> tuple[int, int]:
        ask = Ask("m", blocks, 512, 51_200, loadable=loadable)
        route = router.place(ask, [0, 1], 0.0)
        router.failed(route.ticket, 0.0)
        return route.ticket.worker, route.loadable_tokens

    assert placed({1: Loadable(10_000, 0.01)}) == (1, 10_000)
    assert placed(None) == (0, 0), "what was of another request is forgotten"
    assert placed({1: Loadable(10_000, 1e6)}) == (0, 0), "slower than anything"
    assert placed({1: Loadable(99_999, 0.01)}) == (1, 12_799), "the last token is computed"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 6))))
def test_what_others_have_had_is_never_a_session_s_own(asked: list[tuple[str, int, int]]) -> None:
    """Prompts of a trunk and, behind it, an end that depends on the second number."""
    sharing = Sharing()
    prompts = [
        (session, [*range(16), *range(1_000 * end + 100, 1_000 * end + 100 + 8 * length)])
        for session, end, length in asked
    ]
    for session, blocks in prompts:
        sharing.saw(session, blocks)
    for session, blocks in prompts:
        own = sharing.own_from(session, blocks)
        others = {block for one, its in prompts if one != session for block in its}
        assert own is None or not others & set(blocks[own:])


URL = "http://cache:9300"
URLS = ["http://gpu-1:8000/v1", "http://gpu-2:8000/v1"]


def group(**fields: Any) -> dict[str, Any]:
    return {"engines": {"a": {"urls": URLS, **fields}}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lmcache": "cache:9300"}, r"engines.a.lmcache: expected http\(s\)://host"),
        ({"lmcache_instances": ["a"]}, "lmcache_instances: means nothing without lmcache"),
        ({"lmcache": URL, "lmcache_instances": ["a"] * 3}, "one instance for all servers, or one"),
        ({"lmcache": URL, "dialect": "sglang"}, "LMCache stands behind vLLM, not behind sglang"),
        ({"lmcache": URL, "poll_s": 0.0}, "poll_s 0 means that no server is asked"),
    ],
)
def test_what_can_t_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.check(group(**fields))


def test_servers_in_another_order_are_another_group_where_each_has_its_own_instance() -> None:
    def same(*names: str) -> bool:
        old, new = (
            config.check(group(lmcache=URL, lmcache_instances=list(names), urls=urls)).engines["a"]
            for urls in (URLS, URLS[::-1])
        )
        return _is_same_group(old, new)

    assert same("one")
    assert same()
    assert not same("one", "two")


@pytest.mark.asyncio
async def test_of_those_that_are_never_said_to_have_ended_the_last_ones_are_known() -> None:
    tier = LmcacheTier(LmcacheRules(URL), lambda *_: None)
    for number in range(300):
        ask = Ask("m", [number], session=str(number))
        tier.begun(ask, b"{}", "t", is_over=True)
    tier.begun(Ask("m", [1], session="long"), b" " * 5_000_000, "t", is_over=True)
    assert list(tier._last) == [("t", str(number)) for number in range(44, 300)]
    await tier.aclose()


class Named(NamedTuple):
    """A worker, as far as it is looked at."""

    url: str = "http://a"
    number: int = 0


class Fleet:
    """Instead of LMCache: it fails at first, and for prompts without a salt."""

    def __init__(self) -> None:
        self.opened = 0

    async def open(self, urls: Sequence[str]) -> dict[str, str]:
        self.opened += 1
        if self.opened == 1:
            raise KeyError("x")
        return dict.fromkeys(urls, "n0")

    async def look_up(self, ids: Sequence[int], salt: str) -> Found:
        if not salt:
            raise KeyError("x")
        return Found(ids, salt, {"n0": Held(len(ids), 1, 0)})

    async def aclose(self) -> None:
        pass


@pytest.mark.asyncio
async def test_defects_are_told_and_end_neither_opening_nor_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lmcache_tier, "_FIRST_AGAIN_S", 0.01)
    events: list[tuple[str, dict[str, object]]] = []
    tier = LmcacheTier(LmcacheRules(URL), lambda *one: events.append(one))
    await tier._fleet.aclose()
    tier._fleet = cast("LmcacheFleet", Fleet())
    tier.follow(cast("Any", {Named(): SimpleNamespace(is_up=True, dialect=DIALECTS["vllm"])}))
    async with asyncio.timeout(10):
        while not tier._behind:
            await asyncio.sleep(0.01)
    assert [event for event, _ in events] == ["bug", "lmcache-off", "lmcache-on"]
    ask = Ask("m", [1], prompt_bytes=9_000)
    for salt, loadable in (("", {}), ("s", {0: 1_500})):
        body = msgspec.json.encode({"prompt": list(range(1_500)), "cache_salt": salt})
        lookup = tier.look_up(ask, body, 1.0)
        assert lookup is not None
        told = (await lookup.within(ask)).loadable or {}
        assert {one: held.tokens for one, held in told.items()} == loadable
    assert [event for event, _ in events[3:]] == ["bug"]
    assert "test_lmcache.py:" in str(events[3][1]["where"])
    await tier.aclose()
