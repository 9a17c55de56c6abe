"""Chained hashes of prompts: what they share, what they must not share."""

import json

from preheat.core.blocks import BLOCK_BYTES, HASH_BYTES, Prompt, prompt_of

SECRET = b"s" * 32
HERE = ("tenant", "/v1/chat/completions", "m@1")


def chat(*texts: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", **fields, "messages": messages}).encode()


def shared(one: bytes, other: bytes) -> int:
    count = 0
    while (count + 1) * HASH_BYTES <= min(len(one), len(other)) and (
        one[: (count + 1) * HASH_BYTES] == other[: (count + 1) * HASH_BYTES]
    ):
        count += 1
    return count


def hashes(body: bytes, secret: bytes = SECRET, where: tuple[str, ...] = HERE) -> bytes:
    return prompt_of(body, secret, where).blocks


def test_a_longer_conversation_extends_the_hashes_of_a_shorter_one() -> None:
    short = prompt_of(chat("a" * 2000), SECRET, HERE)
    longer = prompt_of(chat("a" * 2000, "b" * 2000), SECRET, HERE)
    assert len(short.blocks) == short.prompt_bytes // BLOCK_BYTES * HASH_BYTES
    assert longer.blocks.startswith(short.blocks)
    assert len(longer.blocks) > len(short.blocks)


def test_pretty_printed_conversations_extend_too() -> None:
    texts = [{"role": "user", "content": str(place) * 1200} for place in range(2)]
    short = json.dumps({"messages": texts[:1]}, indent=2).encode()
    longer = json.dumps({"messages": texts}, indent=2).encode()
    assert hashes(longer).startswith(hashes(short))


def test_a_difference_changes_its_block_and_all_after_it() -> None:
    one, other = chat("a" * 1000 + "x" + "b" * 2000), chat("a" * 1000 + "y" + "b" * 2000)
    assert shared(hashes(one), hashes(other)) == 2 - 1 or shared(hashes(one), hashes(other)) == 2
    assert hashes(one)[-HASH_BYTES:] != hashes(other)[-HASH_BYTES:]


def test_fields_that_are_no_text_change_nothing() -> None:
    assert hashes(chat("a" * 2000, temperature=0)) == hashes(chat("a" * 2000, user="u", n=1))


def test_tools_and_instructions_stand_before_the_conversation() -> None:
    tools = [{"name": "t" * 600}]
    one, other = chat("a" * 2000, tools=tools), chat("b" * 2000, tools=tools)
    assert shared(hashes(one), hashes(other)) == 1
    assert shared(hashes(chat("a" * 2000)), hashes(one)) == 0
    told = json.dumps({"instructions": "i" * 1500, "input": "x" * 900}).encode()
    again = json.dumps({"instructions": "i" * 1500, "input": "y" * 900}).encode()
    assert shared(hashes(told), hashes(again)) == 2


def test_tenants_paths_models_and_secrets_share_nothing() -> None:
    body = chat("a" * 2000)
    for where in (
        ("other", *HERE[1:]),
        (HERE[0], "/v1/responses", HERE[2]),
        (*HERE[:2], "m@2"),
    ):
        assert shared(hashes(body), hashes(body, where=where)) == 0
    assert shared(hashes(body), hashes(body, secret=b"t" * 32)) == 0


def test_prompts_and_inputs_of_other_endpoints_are_hashed() -> None:
    for field in ("prompt", "input"):
        one = json.dumps({field: "x" * 1100}).encode()
        more = json.dumps({field: "x" * 1100 + "y" * 900}).encode()
        assert hashes(one)
        assert hashes(more).startswith(hashes(one))


def test_what_limits_the_output_is_read() -> None:
    assert prompt_of(chat("a", max_tokens=7), SECRET, HERE).max_tokens == 7
    assert prompt_of(chat("a", max_completion_tokens=8), SECRET, HERE).max_tokens == 8
    assert prompt_of(b'{"input":"x","max_output_tokens":9}', SECRET, HERE).max_tokens == 9
    for odd in ("7", -1, 1.5, None, True, 10**30):
        assert prompt_of(chat("a", max_tokens=odd), SECRET, HERE).max_tokens is None


def test_bodies_that_cannot_be_read_have_no_hashes() -> None:
    for body in (b"", b"[]", b"{", b'{"messages":', b"\xff", b"[" * 100_000):
        assert prompt_of(body, SECRET, HERE) == Prompt()


def test_the_hashes_of_an_endless_prompt_are_bounded() -> None:
    prompt = prompt_of(chat("a" * 2_000_000), SECRET, HERE)
    assert len(prompt.blocks) == 1_024 * HASH_BYTES
    assert prompt.prompt_bytes > 2_000_000
    assert hashes(chat("a" * 2_000_000, "b")) == prompt.blocks


def test_a_body_that_is_too_long_to_be_read_has_its_length_only() -> None:
    body = chat("a" * 4_200_000, max_tokens=7)
    assert prompt_of(body, SECRET, HERE) == Prompt(prompt_bytes=len(body))
    at_most = body[: 4 * 1024 * 1024 - 4] + b'"}]}'
    assert prompt_of(at_most, SECRET, HERE).blocks
