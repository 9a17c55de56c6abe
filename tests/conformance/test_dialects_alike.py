"""Every dialect: each question is one that can be sent, no answer can make it stumble, and what it
can't do is what the documents say."""

import json  # msgspec writes no integer beyond 64 bits
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dialect_bodies
from preheat.engines.dialects import DIALECTS, Dialect
from preheat.engines.dialects.calls import Call, Prompt
from preheat.engines.dialects.detection import detect
from preheat.engines.dialects.llamacpp import model_identity
from preheat.engines.dialects.openai import OpenAi

DOCS = Path(__file__).resolve().parents[2] / "docs"
MOST = 2**53
every_dialect = pytest.mark.parametrize("name", DIALECTS)

words = st.text(max_size=20)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"])},
        optional={
            "content": words
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words}), max_size=2)
        },
    ),
    max_size=4,
)
parts = st.one_of(
    st.fixed_dictionaries({"messages": messages}),
    st.fixed_dictionaries({"text": words}),
    st.fixed_dictionaries({"ids": st.lists(st.integers(0, 2**31 - 1), max_size=8)}),
)


@st.composite
def prompts(draw: Any) -> Prompt:
    return Prompt(
        **draw(parts),
        model=draw(words),
        adapter=draw(st.sampled_from(["", "sql", "3"])),
        salt=draw(words),
        priority=draw(st.none() | st.integers(-5, 5)),
        cache_key=draw(words),
        keep_s=draw(st.floats(0.0, 1e6)),
        slot=draw(st.none() | st.integers(0, 9)),
        tools=draw(st.none() | st.just([{"type": "function"}])),
    )


# Odd values in place of what should stand in a body.
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 2**53 + 1, 2**63, 2**64, 10**30, -(10**30), 1.5, -0.0, 1e308, 5e-324]),
    st.floats(allow_nan=False, allow_infinity=False),
    words,
    st.just([]),
    st.just({}),
    st.recursive(st.none(), lambda inner: st.lists(inner) | st.dictionaries(words, inner)),
)
json_values = st.recursive(
    odd, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3)
)


def mutated(value: Any, draw: Any) -> Any:
    """The value with some of what is in it replaced, removed or nested once more."""
    if draw(st.integers(0, 9)) == 0:
        return draw(odd)
    if isinstance(value, dict):
        return {k: mutated(v, draw) for k, v in value.items() if draw(st.integers(0, 9)) != 0}
    if isinstance(value, list):
        return [mutated(one, draw) for one in value]
    return value


@st.composite
def answers(draw: Any, engine: str = "") -> bytes:
    """Answers of this engine or of any, whole, torn or with something else in them, and noise."""
    known = dialect_bodies.ALL.items()
    body: bytes = draw(st.sampled_from([b for n, b in known if n.startswith(engine.upper())]))
    kind = draw(
        st.sampled_from(["whole", "torn", "changed", "changed", "mutated", "mutated", "noise"])
    )
    if kind == "torn":
        return body[: draw(st.integers(0, len(body)))]
    if kind == "changed":
        number = draw(
            st.sampled_from([b"-7", b"1e999", b"NaN", b"99999999999999999999", b'"', b"\xff"])
        )
        return re.sub(rb"\d+", number, body, count=draw(st.integers(1, 3)))
    if kind == "mutated" and body[:1] in b"[{":
        return _encoded(mutated(msgspec.json.decode(body), draw))
    if kind == "noise":
        return draw(st.binary(max_size=60) | json_values.map(_encoded))
    return body


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def calls_of(dialect: Dialect, prompt: Prompt) -> Iterator[Call | None]:
    yield from (dialect.health(), dialect.load(), dialect.capacity(), dialect.adapters())
    yield from (dialect.tokenise(prompt, opens_answer=is_open) for is_open in (True, False))
    yield from (dialect.render(prompt, opens_answer=is_open) for is_open in (True, False))
    yield dialect.warm(prompt)
    yield dialect.load_adapter("a", "/b", is_pinned=True)
    yield from (dialect.unload_adapter("a"), dialect.slots(), dialect.erase(1))
    yield from (dialect.save(1, "a.kv"), dialect.restore(1, "a.kv"))
    yield from dialect.reset(2)


READERS: dict[str, Callable[[Dialect, int, bytes], Any]] = {
    "read_load": lambda dialect, _status, body: dialect.read_load(body),
    "read_capacity": lambda dialect, _status, body: dialect.read_capacity(body),
    "read_tokens": lambda dialect, _status, body: dialect.read_tokens(body),
    "read_rendered": lambda dialect, _status, body: dialect.read_rendered(body),
    "read_cached": lambda dialect, _status, body: dialect.read_cached(body),
    "read_adapters": lambda dialect, _status, body: dialect.read_adapters(body),
    "read_slots": lambda dialect, _status, body: dialect.read_slots(body),
    "read_done": lambda dialect, status, body: dialect.read_done(status, body),
    "read_reset": lambda dialect, status, body: dialect.read_reset(status, body),
    "read_moved": lambda dialect, status, body: dialect.read_moved(status, body),
}


def numbers_in(value: Any) -> Iterator[float]:
    for one in msgspec.structs.astuple(value) if isinstance(value, msgspec.Struct) else [value]:
        if isinstance(one, bool):
            continue
        if isinstance(one, int | float):
            yield one
        elif isinstance(one, list):
            for inner in one:
                yield from numbers_in(inner)


@every_dialect
@given(prompt=prompts())
def test_each_question_can_be_sent(name: str, prompt: Prompt) -> None:
    before = msgspec.json.encode(prompt)
    for call in calls_of(DIALECTS[name], prompt):
        if call is None:
            continue
        assert call.method in {b"GET", b"POST"}
        assert re.fullmatch(rb"/[!-~]+", call.path)
        if call.method == b"GET":
            assert call.body == b""
        elif call.body:
            body = msgspec.json.decode(call.body)
            assert isinstance(body, dict)
            assert None not in body.values()
    assert msgspec.json.encode(prompt) == before  # it is the caller's


@every_dialect
@settings(max_examples=200)
@given(data=st.data())
def test_no_answer_is_believed_blindly(name: str, data: st.DataObject) -> None:
    body = data.draw(answers(name) | answers())
    status = data.draw(st.sampled_from([200, 204, 400, 404, 500, 503]))
    for read in READERS.values():
        value = read(DIALECTS[name], status, body)
        assert all(0 <= number <= MOST * 4 for number in numbers_in(value))
    done = DIALECTS[name].read_reset(status, body)
    assert status < 300 or not done.ok
    assert done.ok or (done.why.isprintable() and 0 < len(done.why) <= 200)


@every_dialect
@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff" * 99, b" " * 9 * 2**20]
)
def test_a_body_that_is_a_trap_reads_as_nothing(name: str, body: bytes) -> None:
    for reader, read in READERS.items():
        value = read(DIALECTS[name], 200, body)
        assert value is None or reader in {"read_done", "read_reset", "read_moved"}


@given(paths=st.dictionaries(st.sampled_from([b"/v1/models", b"/props", b"/info"]), answers()))
def test_whatever_a_server_says_of_itself_it_is_given_a_dialect(paths: dict[bytes, bytes]) -> None:
    assert detect(paths) in DIALECTS


@given(models=answers(), props=answers(), adapters=answers())
def test_an_identity_is_made_of_anything_or_none(
    models: bytes, props: bytes, adapters: bytes
) -> None:
    identity = model_identity(models, props, adapters)
    assert identity is None or re.fullmatch(r"[0-9a-f]{32}", identity)


def test_the_table_names_each_by_its_own_name() -> None:
    assert [dialect.name for dialect in DIALECTS.values()] == list(DIALECTS)
    assert all(isinstance(dialect, OpenAi) for dialect in DIALECTS.values())


# What the documents say ----------------------------------------------------------------------

TEXT, CHAT, IDS = (
    Prompt(text="a"),
    Prompt(messages=[{"role": "user", "content": "a"}]),
    Prompt(ids=[1]),
)


def _path(call: Call | None) -> str:
    return f"`{call.path.decode().partition('?')[0]}`" if call is not None else "—"


def _paths(*calls: Call | None) -> str:
    return ", ".join(dict.fromkeys(_path(call) for call in calls if call is not None)) or "—"


def _fact(value: Any) -> str:
    return {None: "—", True: "yes", False: "no"}.get(value, f"`{value}`")


CAN: dict[str, Callable[[Dialect], str]] = {
    "well?": lambda d: _path(d.health()),
    "load": lambda d: _path(d.load()),
    "capacity": lambda d: _path(d.capacity()),
    "tokens of text": lambda d: _path(d.tokenise(TEXT)),
    "tokens of messages": lambda d: _path(d.tokenise(CHAT)),
    "template": lambda d: _path(d.render(CHAT)),
    "warm text or ids": lambda d: _paths(d.warm(TEXT), d.warm(IDS)),
    "warm messages": lambda d: _path(d.warm(CHAT)),
    "adapters": lambda d: _path(d.adapters()),
    "load an adapter": lambda d: _path(d.load_adapter("a", "b")),
    "give one up": lambda d: _path(d.unload_adapter("a")),
    "empty the cache": lambda d: _paths(*(call for call in d.reset(1))).replace("/0", "/{id}"),
    "slots": lambda d: _path(d.slots()),
    "save, restore": lambda d: _paths(d.save(0, "aa"), d.restore(0, "aa")).replace("/0", "/{id}"),
    "salt": lambda d: _fact(d.salt_field),
    "lower priority first": lambda d: _fact(d.priority_lower_first),
    "running prompts share": lambda d: _fact(d.shares_running),
    "tokens a block": lambda d: str(d.block_tokens),
    "least tokens kept": lambda d: f"{d.least_tokens:,}" if d.least_tokens else "—",
}


def rows_of(page: str) -> dict[str, list[str]]:
    """The rows of a page's tables by their first cell."""
    text = (DOCS / page).read_text(encoding="utf-8")
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {row[0].strip("*"): row[1:] for row in cells}


def test_the_page_on_engines_says_what_each_dialect_can_do() -> None:
    rows = rows_of("engines.md")
    assert rows["question"] == [f"`{name}`" for name in DIALECTS]
    for question, answer in CAN.items():
        assert rows[question] == [answer(dialect) for dialect in DIALECTS.values()], question


LEVERS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tgi": "TGI",
    "llamacpp": "llama.cpp",
    "openai": "OpenAI** (hosted)",
    "anthropic": "Anthropic** (hosted)",
}


@every_dialect
def test_the_page_on_levers_offers_what_the_dialect_has(name: str) -> None:
    """Its columns: observe, evict, pin, TTL, copy, restore, warm, order."""
    dialect, row = DIALECTS[name], rows_of("levers.md")[LEVERS[name]]
    observe, evict, _pin, _ttl, copy, restore, warm, order = row
    tells = name != "tgi"  # its usage has no such field
    assert tells == ("cached_tokens" in observe or "cache_read_input_tokens" in observe)
    assert bool(dialect.reset()) == (evict != "—")
    if name in {"vllm", "sglang"}:
        assert dialect.reset()[0].path.decode() in evict
    has_slots = dialect.save(0, "aa") is not None
    assert has_slots == ("slot file" in restore) == ("slot file" in copy)
    assert (dialect.warm(CHAT) is not None) == (warm != "—")
    assert (dialect.priority_lower_first is not None) == ("priority" in order)
    if dialect.priority_lower_first is not None:
        assert ("lower first" if dialect.priority_lower_first else "higher first") in order


@pytest.mark.parametrize("name", ["vllm", "sglang", "tgi", "llamacpp"])
def test_the_page_on_levers_loads_what_adapters_the_dialect_loads(name: str) -> None:
    lines = (DOCS / "levers.md").read_text(encoding="utf-8").splitlines()
    engine = LEVERS[name]
    row = next(one for one in lines if one.startswith(f"| LoRA adapter | {engine}")).split(" | ")
    observe, evict, warm = row[2], row[3], row[8]
    dialect = DIALECTS[name]
    load, unload, listed = (
        dialect.load_adapter("a", "b"),
        dialect.unload_adapter("a"),
        dialect.adapters(),
    )
    assert _path(load) in warm if load is not None else "at start only" in warm
    assert unload is None or _path(unload) in evict
    assert _path(listed) in observe
