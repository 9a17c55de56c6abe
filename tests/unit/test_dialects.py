"""Each dialect's questions and answers, against bodies of the versions that dialect_bodies names."""

from typing import Any

import msgspec
import pytest

import dialect_bodies as bodies
from preheat.engines.dialects import DIALECTS
from preheat.engines.dialects.calls import Call, Prompt, chunks
from preheat.engines.dialects.detection import PROBES, detect
from preheat.engines.dialects.llamacpp import LlamaCpp, model_identity, slot_file
from preheat.engines.dialects.readings import (
    MOST_BYTES,
    Adapter,
    Cached,
    Capacity,
    Done,
    Load,
    Moved,
    Slot,
    Tokens,
)
from preheat.engines.dialects.samples import Page

VLLM, SGLANG, TGI = DIALECTS["vllm"], DIALECTS["sglang"], DIALECTS["tgi"]
OPENAI, ANTHROPIC = DIALECTS["openai"], DIALECTS["anthropic"]
LLAMACPP = LlamaCpp()
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Is it warm?"}


def asked(call: Call | None) -> tuple[str, Any]:
    assert call is not None
    return call.path.decode(), msgspec.json.decode(call.body) if call.body else None


# Load and capacity ---------------------------------------------------------------------------


def test_vllm_load_is_over_all_its_ranks() -> None:
    assert VLLM.read_load(bodies.VLLM_METRICS) == Load(
        running=4,
        waiting=2,
        kv_used_share=0.5,
        cached_tokens_total=7_840,
        prompt_tokens_total=16_681,
        capacity_tokens=25_600,
    )


def test_vllm_before_0_10_has_other_names() -> None:
    load = VLLM.read_load(bodies.VLLM_OLD_METRICS)
    assert load == Load(
        running=5, waiting=0, kv_used_share=0.5, cached_tokens_total=32, prompt_tokens_total=64
    )


def test_vllm_capacity_is_its_own_count_where_it_has_one() -> None:
    """A hybrid model holds fewer tokens than its blocks times their size (163,072)."""
    assert VLLM.read_capacity(bodies.VLLM_HYBRID) == Capacity(tokens=141_994, block_tokens=784)
    assert VLLM.read_capacity(bodies.VLLM_METRICS) == Capacity(tokens=25_600, block_tokens=128)
    unsaid = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0'
    assert VLLM.read_capacity(unsaid) == Capacity(block_tokens=16)
    absurd = bodies.VLLM_HYBRID.replace(b'"784"', b'"%b"' % (b"9" * 5_000))
    assert VLLM.read_capacity(absurd) == Capacity(tokens=141_994)
    assert VLLM.read_capacity(b"") is None


def test_sglang_load_is_over_all_its_ranks() -> None:
    assert SGLANG.read_load(bodies.SGLANG_LOADS) == Load(
        running=5,
        waiting=2,
        waiting_tokens=900,
        kv_used_share=0.125,
        capacity_tokens=408_000,
    )


def test_sglang_metrics_have_what_its_cache_saved() -> None:
    assert SGLANG.read_load(bodies.SGLANG_METRICS) == Load(
        running=2,
        waiting=1,
        kv_used_share=0.28,
        cached_tokens_total=128,
        prompt_tokens_total=8_128,
    )


def test_sglang_capacity_of_several_ranks_isnt_that_of_one() -> None:
    info = bodies.SGLANG_INFO
    assert SGLANG.read_capacity(info) == Capacity(tokens=20_480, block_tokens=64)
    several = info.replace(b'"dp_size":1', b'"dp_size":4')
    assert SGLANG.read_capacity(several) == Capacity(block_tokens=64)


def test_tgi_load() -> None:
    assert TGI.read_load(bodies.TGI_METRICS) == Load(
        running=2, waiting=6, prompt_tokens_total=40_000
    )
    assert TGI.capacity() is None


def test_llamacpp_load_puts_cached_and_computed_tokens_together() -> None:
    assert LLAMACPP.read_load(bodies.LLAMACPP_METRICS) == Load(
        running=1, waiting=2, cached_tokens_total=800, prompt_tokens_total=2_401
    )
    older = b"llamacpp:requests_processing 1\nllamacpp:prompt_tokens_total 7\n"
    assert LLAMACPP.read_load(older) == Load(running=1)  # not to be told apart


def test_llamacpp_slots_and_capacity() -> None:
    assert LLAMACPP.read_slots(bodies.LLAMACPP_SLOTS) == [
        Slot(0, 4_096, None, is_busy=False),
        Slot(1, 4_096, 800, is_busy=True),
    ]
    for bad in (b'"x":1', b'"is_processing":"yes"', b'"is_processing":null'):
        torn = bodies.LLAMACPP_SLOTS.replace(b'"is_processing":false', bad)
        assert LLAMACPP.read_slots(torn) == [Slot(1, 4_096, 800, is_busy=True)]
    assert LLAMACPP.read_capacity(bodies.LLAMACPP_SLOTS) == Capacity(
        tokens=8_192, block_tokens=1, slots=2, slot_tokens=4_096
    )


# Cached tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "body", "cached"),
    [
        ("vllm", bodies.VLLM_CHAT, Cached(1_515, 1_408, 0)),
        ("sglang", bodies.SGLANG_GENERATED, Cached(700, 699)),
        ("sglang", bodies.OPENAI_CHAT, Cached(2_006, 1_920)),
        ("tgi", bodies.TGI_CHAT, Cached(40, None)),
        ("llamacpp", bodies.LLAMACPP_COMPLETION, Cached(401, 400, slot=1)),
        ("llamacpp", bodies.LLAMACPP_MESSAGES, Cached(21, 20)),
        ("openai", bodies.OPENAI_CHAT, Cached(2_006, 1_920)),
        ("openai", bodies.OPENAI_RESPONSE, Cached(2_006, 1_920, 64)),
        ("anthropic", bodies.ANTHROPIC_MESSAGE, Cached(5_123, 0, 5_120)),
    ],
)
def test_cached_tokens(dialect: str, body: bytes, cached: Cached) -> None:
    assert DIALECTS[dialect].read_cached(body) == cached


def test_an_engine_that_lies_is_passed_on_as_it_lies() -> None:
    """Trust is for those who compare answers; here only what can't be a count is left out."""
    lie = bodies.OPENAI_CHAT.replace(b"1920", b"5000")
    assert OPENAI.read_cached(lie) == Cached(2_006, 5_000)
    for bad in (b"-1", b"1.5", b'"1920"', b"true", b"1e99", b"null", b"9007199254740993"):
        assert OPENAI.read_cached(bodies.OPENAI_CHAT.replace(b"1920", bad)) == Cached(2_006, None)
    assert OPENAI.read_cached(bodies.OPENAI_CHAT.replace(b"2006", b"-1")) is None


# Tokens and templates ------------------------------------------------------------------------


def test_tokens_of_text() -> None:
    text = Prompt(model="m", text="Is it")
    assert asked(VLLM.tokenise(text)) == ("/tokenize", {"model": "m", "prompt": "Is it"})
    assert asked(SGLANG.tokenise(text)) == ("/tokenize", {"model": "m", "prompt": "Is it"})
    assert asked(TGI.tokenise(text)) == ("/tokenize", {"inputs": "Is it"})
    assert asked(LLAMACPP.tokenise(text)) == (
        "/tokenize",
        {"content": "Is it", "add_special": True, "parse_special": True},
    )
    assert VLLM.read_tokens(bodies.VLLM_TOKENS) == Tokens(3, [1, 5, 9])
    assert TGI.read_tokens(bodies.TGI_TOKENS) == Tokens(2, [7, 9])
    assert LLAMACPP.read_tokens(bodies.LLAMACPP_TOKENS) == Tokens(3, [71, 68, 75])


def test_tokens_of_messages() -> None:
    chat = Prompt(model="m", messages=[SYSTEM, USER])
    assert asked(VLLM.tokenise(chat, opens_answer=False)) == (
        "/tokenize",
        {"model": "m", "messages": [SYSTEM, USER], "add_generation_prompt": False},
    )
    assert asked(SGLANG.tokenise(chat))[1] == {"model": "m", "messages": [SYSTEM, USER]}
    assert asked(TGI.tokenise(chat))[0] == "/chat_tokenize"
    assert asked(ANTHROPIC.tokenise(chat)) == (
        "/v1/messages/count_tokens",
        {"model": "m", "system": [{"type": "text", "text": "Be brief."}], "messages": [USER]},
    )
    assert TGI.read_tokens(bodies.TGI_CHAT_TOKENS) == Tokens(2, [7, 9])
    assert ANTHROPIC.read_tokens(bodies.ANTHROPIC_COUNT) == Tokens(2_095, None)
    assert LLAMACPP.tokenise(chat) is None  # rendered first


def test_ids_are_all_right_or_none_is_taken() -> None:
    for bad in (b"-5", b"5.5", b'"5"', b"null", b"true", b"4294967296"):
        assert VLLM.read_tokens(bodies.VLLM_TOKENS.replace(b",5,", b",%b," % bad)) is None
    assert TGI.read_tokens(b'[{"id": 1}, "x"]') is None


def test_templates() -> None:
    chat = Prompt(messages=[USER], tools=[{"type": "function"}])
    assert asked(LLAMACPP.render(chat, opens_answer=False)) == (
        "/apply-template",
        {
            "messages": [USER],
            "tools": [{"type": "function"}],
            "add_generation_prompt": False,
        },
    )
    assert asked(TGI.render(chat))[0] == "/chat_tokenize"
    rendered = LLAMACPP.read_rendered(bodies.LLAMACPP_RENDERED)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"
    assert TGI.read_rendered(bodies.TGI_CHAT_TOKENS) == "<s>Is it"
    assert VLLM.render(chat) is None


# Warming -------------------------------------------------------------------------------------


def test_vllm_is_warmed_under_the_same_salt_and_a_low_priority() -> None:
    prompt = Prompt(model="m", ids=[1, 2], salt="tenant", priority=9)
    assert asked(VLLM.warm(prompt)) == (
        "/v1/completions",
        {"model": "m", "prompt": [1, 2], "max_tokens": 1, "cache_salt": "tenant", "priority": 9},
    )
    chat = Prompt(model="m", messages=[USER], adapter="sql")
    assert asked(VLLM.warm(chat)) == (
        "/v1/chat/completions",
        {"model": "sql", "messages": [USER], "max_tokens": 1},
    )


def test_sglang_is_warmed_where_it_tells_what_it_found() -> None:
    prompt = Prompt(model="m", ids=[1, 2], salt="tenant", priority=-9, adapter="sql")
    assert asked(SGLANG.warm(prompt)) == (
        "/generate",
        {
            "input_ids": [1, 2],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "extra_key": "tenant",
            "priority": -9,
            "lora_path": "sql",
        },
    )
    chat = Prompt(model="m", messages=[USER], salt="tenant", adapter="sql")
    assert asked(SGLANG.warm(chat)) == (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [USER],
            "max_tokens": 1,
            "cache_salt": "tenant",
            "lora_path": "sql",
        },
    )


def test_tgi_is_warmed_by_text_or_messages() -> None:
    assert asked(TGI.warm(Prompt(text="Is it", adapter="sql"))) == (
        "/generate",
        {"inputs": "Is it", "parameters": {"max_new_tokens": 1, "adapter_id": "sql"}},
    )
    assert asked(TGI.warm(Prompt(messages=[USER], adapter="sql")))[1]["model"] == "sql"
    assert TGI.warm(Prompt(ids=[1])) is None


def test_llamacpp_is_warmed_without_an_answer() -> None:
    assert asked(LLAMACPP.warm(Prompt(ids=[1, 2], slot=1, adapter="3"))) == (
        "/completion",
        {
            "prompt": [1, 2],
            "n_predict": 0,
            "response_fields": ["timings", "tokens_evaluated", "id_slot"],
            "id_slot": 1,
            "cache_prompt": True,
            "lora": [{"id": 3, "scale": 1.0}],
        },
    )
    assert asked(LLAMACPP.warm(Prompt(model="m", messages=[USER]))) == (
        "/v1/chat/completions",
        {"model": "m", "messages": [USER], "max_tokens": 0, "cache_prompt": True},
    )
    assert LLAMACPP.warm(Prompt(ids=[1], adapter="sql")) is None  # its adapters are numbers


def test_openai_is_warmed_under_a_cache_key() -> None:
    prompt = Prompt(model="gpt", messages=[SYSTEM, USER], cache_key="trunk-1", salt="left out")
    assert asked(OPENAI.warm(prompt)) == (
        "/v1/chat/completions",
        {
            "model": "gpt",
            "messages": [SYSTEM, USER],
            "max_tokens": 1,
            "prompt_cache_key": "trunk-1",
        },
    )


def test_anthropic_is_warmed_up_to_a_breakpoint_and_answers_nothing() -> None:
    path, body = asked(ANTHROPIC.warm(Prompt(model="claude", messages=[SYSTEM])))
    assert path == "/v1/messages"
    assert body["max_tokens"] == 0
    kept = {"type": "ephemeral", "ttl": "5m"}
    assert body["system"] == [{"type": "text", "text": "Be brief.", "cache_control": kept}]
    assert body["messages"] == [{"role": "user", "content": "."}]  # there must be one

    long = Prompt(model="claude", messages=[SYSTEM, USER], keep_s=3_600.0)
    body = asked(ANTHROPIC.warm(long))[1]
    kept = {"type": "ephemeral", "ttl": "1h"}
    assert body["messages"][-1]["content"] == [
        {"type": "text", "text": "Is it warm?", "cache_control": kept}
    ]
    assert "cache_control" not in body["system"][0]
    assert USER == {"role": "user", "content": "Is it warm?"}  # the caller's own is as it was


def test_anthropic_takes_four_breakpoints_and_no_fifth() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    block = {"type": "text", "text": "a", **mark}
    marked = Prompt(
        model="claude",
        messages=[
            {"role": "system", "content": [block]},
            {"role": "user", "content": [block]},
            USER,
        ],
        tools=[{"name": "f", **mark}, {"name": "g", **mark}],
    )
    body = asked(ANTHROPIC.warm(marked))[1]
    assert str(body).count("cache_control") == 4
    assert body["messages"][-1] == USER


def test_anthropic_refuses_an_hour_behind_five_minutes() -> None:
    short = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    marked = [{"role": "system", "content": [short]}, USER]
    body = asked(ANTHROPIC.warm(Prompt(messages=marked, keep_s=3_600.0)))[1]
    assert body["messages"][-1]["content"][0]["cache_control"]["ttl"] == "5m"


def test_the_key_goes_where_each_looks_for_it() -> None:
    assert dict(VLLM.headers("k")) == {
        b"content-type": b"application/json",
        b"authorization": b"Bearer k",
    }
    assert dict(ANTHROPIC.headers("k"))[b"x-api-key"] == b"k"
    assert b"anthropic-version" in dict(ANTHROPIC.headers(""))
    assert b"authorization" not in dict(OPENAI.headers(""))


def test_chunks_end_with_the_whole() -> None:
    parts = list(chunks(Prompt(ids=list(range(10)), slot=1, salt="s"), 4))
    assert [len(part.ids or ()) for part in parts] == [4, 8, 10]
    assert all(part.slot == 1 and part.salt == "s" for part in parts)
    assert [len(part.ids or ()) for part in chunks(Prompt(ids=[1, 2]), 2)] == [2]
    for bad in (Prompt(text="a"), Prompt(messages=[])):
        with pytest.raises(ValueError, match="token ids"):
            list(chunks(bad, 4))


@pytest.mark.parametrize("parts", [{}, {"text": "a", "ids": [1]}, {"messages": [], "text": ""}])
def test_a_prompt_is_one_thing(parts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="messages or text or ids"):
        Prompt(**parts)


# Adapters, resets, slots ---------------------------------------------------------------------


def test_adapters() -> None:
    assert VLLM.read_adapters(bodies.VLLM_MODELS) == [Adapter("sql", "/adapters/sql")]
    assert SGLANG.read_adapters(bodies.SGLANG_MODELS) == [Adapter("sql", "/adapters/sql")]
    assert LLAMACPP.read_adapters(bodies.LLAMACPP_ADAPTERS) == [
        Adapter("0", "sql.gguf", is_active=False),
        Adapter("1", "rust.gguf"),
    ]
    assert asked(VLLM.load_adapter("sql", "/a")) == (
        "/v1/load_lora_adapter",
        {"lora_name": "sql", "lora_path": "/a"},
    )
    assert asked(SGLANG.load_adapter("sql", "/a", is_pinned=True)) == (
        "/load_lora_adapter",
        {"lora_name": "sql", "lora_path": "/a", "pinned": True},
    )
    assert asked(VLLM.unload_adapter("sql")) == ("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert asked(SGLANG.unload_adapter("sql")) == ("/unload_lora_adapter", {"lora_name": "sql"})


def test_whether_an_adapter_was_loaded() -> None:
    said = b"Success: LoRA adapter 'sql' added successfully."
    assert VLLM.read_done(200, said) == Done(ok=True)
    error = b'{"error": {"message": "The lora adapter \'sql\' has already been loaded."}}'
    assert VLLM.read_done(400, error) == Done(
        ok=False, why="The lora adapter 'sql' has already been loaded."
    )
    assert SGLANG.read_done(200, bodies.SGLANG_LOADED) == Done(ok=True)
    refused = Done(ok=False, why="adapter sql is loaded already")
    assert SGLANG.read_done(400, bodies.SGLANG_NOT_LOADED) == refused
    assert SGLANG.read_done(200, bodies.SGLANG_NOT_LOADED) == refused  # the body counts
    assert VLLM.read_done(404, b'{"detail":"Not Found"}') == Done(ok=False, why="Not Found")
    assert VLLM.read_done(500, b"") == Done(ok=False, why="status 500")


def test_vllm_says_in_the_body_whether_its_cache_is_empty() -> None:
    assert [asked(call) for call in VLLM.reset()] == [("/reset_prefix_cache", None)]
    assert VLLM.read_reset(200, b'{"success":true}') == Done(ok=True)
    assert VLLM.read_reset(200, b'{"success":false}').ok is False
    assert VLLM.read_reset(200, b"").ok is None  # older versions
    assert VLLM.read_reset(404, b'{"detail":"Not Found"}') == Done(ok=False, why="Not Found")


def test_sglang_flushes_nothing_while_requests_run() -> None:
    assert [asked(call) for call in SGLANG.reset()] == [("/flush_cache", None)]
    assert SGLANG.read_reset(200, bodies.SGLANG_FLUSHED) == Done(ok=True)
    busy = SGLANG.read_reset(400, b"Flush cache failed.\n")
    assert busy == Done(ok=False, why="Flush cache failed.")
    assert SGLANG.read_reset(200, b"<html>a proxy's page</html>").ok is False


def test_llamacpp_is_reset_slot_by_slot() -> None:
    assert [call.path for call in LLAMACPP.reset(2)] == [
        b"/slots/0?action=erase",
        b"/slots/1?action=erase",
    ]
    assert LLAMACPP.read_reset(200, bodies.LLAMACPP_ERASED) == Done(ok=True)
    assert LLAMACPP.read_reset(501, b'{"error":{"message":"off"}}') == Done(ok=False, why="off")


def test_slots_are_saved_restored_and_erased() -> None:
    name = slot_file("ab" * 16, b"\xff")
    assert asked(LLAMACPP.save(1, name)) == ("/slots/1?action=save", {"filename": name})
    assert asked(LLAMACPP.restore(0, name)) == ("/slots/0?action=restore", {"filename": name})
    assert LLAMACPP.read_moved(200, bodies.LLAMACPP_SAVED) == Moved(
        ok=True, tokens=800, size_bytes=1_651_352
    )
    assert LLAMACPP.read_moved(200, bodies.LLAMACPP_ERASED) == Moved(ok=True, tokens=800)
    assert LLAMACPP.read_moved(400, bodies.LLAMACPP_REFUSED) == Moved(
        ok=False, why="Invalid filename"
    )
    assert not LLAMACPP.read_moved(200, b"{}").ok


@pytest.mark.parametrize("name", ["a..b", "a b", ".hid", "a.", "é.kv", "x" * 129, "a\n", "a"])
def test_a_slot_files_name_is_plain(name: str) -> None:
    with pytest.raises(ValueError, match="slot file"):
        LLAMACPP.restore(0, name)


def test_no_identity_where_the_answers_dont_tell_a_model() -> None:
    models, props = bodies.LLAMACPP_MODELS, bodies.LLAMACPP_PROPS
    assert model_identity(models, props) is not None
    for other in (b"", b"[]", bodies.VLLM_MODELS):
        assert model_identity(other, props) is None
        assert model_identity(models, other) is None


# Detection -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"/v1/models": bodies.VLLM_MODELS}, "vllm"),
        ({"/v1/models": bodies.SGLANG_MODELS}, "sglang"),
        ({"/v1/models": bodies.LLAMACPP_MODELS}, "llamacpp"),
        ({"/v1/models": bodies.ANTHROPIC_MODELS}, "anthropic"),
        ({"/v1/models": bodies.HOSTED_MODELS}, "openai"),
        ({"/props": bodies.LLAMACPP_PROPS}, "llamacpp"),
        ({"/v1/models": bodies.HOSTED_MODELS, "/info": bodies.TGI_INFO}, "tgi"),
        ({"/get_model_info": b'{"model_path":"m","is_generation":true}'}, "sglang"),
        (
            {
                "/v1/models": bodies.VLLM_MODELS.replace(b'"vllm"', b'"me"'),
                "/version": b'{"version":"0.32.0"}',
            },
            "vllm",
        ),
        ({"/version": b'{"version":"0.12.6"}'}, "openai"),  # Ollama's, for one
        ({"/v1/models": b"<html>"}, "openai"),
        ({}, "openai"),
    ],
)
def test_a_server_is_known_by_what_it_says(said: dict[str, bytes], name: str) -> None:
    assert detect({path.encode(): body for path, body in said.items()}) == name
    assert {path.encode() for path in said} <= {call.path for call in PROBES}


# A metrics page ------------------------------------------------------------------------------


def test_a_bad_line_costs_only_itself() -> None:
    page = Page(
        b'a 1\na{x=\nb{l="}\\"{ 9"} 2 1700000000\na nan\na +Inf\na -1\na 1e400\na 1.2.3\n'
        b'a\t4\na {l="1"} 8\n\xff\xfe 3\na_total 16 # {trace="1"} 5\naa 32\n#a 64\na',
        ("a", "b"),
    )
    assert [one.value for one in page.of("a")] == [1.0, 4.0, 8.0, 16.0]
    assert page.sum("a") == 29
    assert page.mean("none", "b") == 2.0
    assert page.of("b")[0].labels == {"l": '}\\"{ 9'}
    assert page.sum("none") is None


def test_a_page_that_is_too_large_isnt_read() -> None:
    assert Page(b"a 1\n" + bytes(MOST_BYTES), ("a",)).sum("a") is None
    assert Page(b"a 1e308\na 1e308\n", ("a",)).sum("a") is None
