"""The key of a request, by example; tests/properties/test_keys.py holds the rules in general."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from preheat.core.keys import (
    CHECK_BYTES,
    FOLDED,
    IGNORED,
    KEY_BYTES,
    InexactError,
    Keyring,
    canonical,
    decode,
)
from preheat.errors import RequestError

SECRET = b"s" * 32


def keyring_of(secret: bytes = SECRET, **options: Any) -> Keyring:
    return Keyring(secret, lambda model: f"group/{model}", **options)


def ask(body: Any, keyring: Keyring | None = None, tenant: str = "local") -> Any:
    keyring = keyring or keyring_of()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return keyring.ask(data, keyring.partition(tenant, "/v1/chat/completions", ""))


CHAT = {"model": "m1", "messages": [{"role": "user", "content": "hi"}]}


def test_key_and_check_have_their_bits() -> None:
    asked = ask(CHAT)
    assert len(asked.key) == KEY_BYTES == 16
    assert len(asked.check) == CHECK_BYTES == 32


def test_the_ignored_fields_are_these_and_no_others() -> None:
    assert {
        "stream",
        "stream_options",
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
    } == IGNORED
    assert not IGNORED & FOLDED


@pytest.mark.parametrize(
    ("fields", "is_sampled"),
    [
        ({}, True),
        ({"temperature": None}, True),
        ({"temperature": 0}, False),
        ({"temperature": 0.0}, False),
        ({"temperature": -0.0}, False),
        ({"temperature": 1e-9}, True),
        ({"temperature": 1}, True),
        ({"temperature": False}, True),
        ({"temperature": "0"}, True),
        ({"temperature": [0]}, True),
    ],
)
def test_a_request_is_sampled_unless_its_temperature_is_0(
    fields: dict[str, Any], is_sampled: bool
) -> None:
    assert ask({**CHAT, **fields}).sampled is is_sampled


def test_a_temperature_of_0_may_be_spelled_in_any_way() -> None:
    spellings = [b"0", b"0.0", b"-0", b"0e7", b"0.000"]
    asked = [ask(b'{"model":"m1","temperature":%b}' % spelled) for spelled in spellings]
    assert {one.sampled for one in asked} == {False}
    assert len({one.key for one in asked}) == 1


def test_the_form_of_the_answer_is_told_but_not_part_of_the_key() -> None:
    plain = ask(CHAT)
    streamed = ask({**CHAT, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.key == plain.key
    assert (plain.stream, plain.include_usage, plain.has_stream_options) == (False, False, False)
    assert (streamed.stream, streamed.include_usage, streamed.has_stream_options) == (
        True,
        True,
        True,
    )
    assert ask({**CHAT, "stream_options": None}).has_stream_options
    assert not ask({**CHAT, "stream_options": {}}).include_usage


def test_a_request_to_store_its_answer_elsewhere_bypasses() -> None:
    assert ask({**CHAT, "store": True}).bypass == "bypass-store"
    assert ask({**CHAT, "store": False}).bypass == ""
    assert ask({**CHAT, "store": None}).bypass == ""


def test_without_a_model_the_name_is_empty() -> None:
    assert ask({"messages": []}).model == ""
    assert ask({"messages": [], "model": None}).model == ""
    assert ask({"messages": [], "model": ""}).key == ask({"messages": [], "model": ""}).key


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid-json", None),
        (b"{", "invalid-json", None),
        (b'{"a":1,}', "invalid-json", None),
        (b'{"a":01}', "invalid-json", None),
        (b'{"a":NaN}', "invalid-json", None),
        (b'{"a":Infinity}', "invalid-json", None),
        (b'{"a":-Infinity}', "invalid-json", None),
        (b'{"a":"\x01"}', "invalid-json", None),
        (b'{"a":"\\x"}', "invalid-json", None),
        (b'{"a":1} {}', "invalid-json", None),
        (b'\xef\xbb\xbf{"a":1}', "invalid-json", None),
        (b'{"a":"\xff"}', "invalid-json", None),
        ('{"a":1}'.encode("utf-16"), "invalid-json", None),
        (b"[]", "invalid-body", None),
        (b"null", "invalid-body", None),
        (b'"text"', "invalid-body", None),
        (b'{"model":5}', "invalid-field", "model"),
        (b'{"stream":1}', "invalid-field", "stream"),
        (b'{"stream":"true"}', "invalid-field", "stream"),
        (b'{"stream_options":[]}', "invalid-field", "stream_options"),
        (b'{"stream":1,"x":"\\ud800"}', "invalid-field", "stream"),
        (b'{"a":1,"a":1}', "duplicate-key", None),
        (b'{"a":1,"\\u0061":1}', "duplicate-key", None),
        (b'{"a":{"b":[{"c":1,"c":2}]}}', "duplicate-key", None),
        (b'{"a":' + b"[" * 250 + b"]" * 250 + b"}", "too-deep", None),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too-deep", None),
        (b"[" * 100_000, "too-deep", None),
    ],
)
def test_a_body_that_no_engine_may_see_is_a_400(body: bytes, code: str, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        ask(body)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)


def test_an_error_message_never_quotes_the_body() -> None:
    for body in (b'{"secret-text":', b'{"secret-text":1,"secret-text":2}', b'["secret-text"]'):
        with pytest.raises(RequestError) as caught:
            ask(body)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        b'"\\ud800"',
        b'"\\udc00 alone"',
        b'{"\\ud800":1}',
        b"1e400",
        b"-1e400",
        b"1e-400",
        b"0.1000000000000000055511151231257827",
        b"9007199254740993.0",
        b"18446744073709551616",
        b"-9223372036854775809",
        b"1" * 5_000,
    ],
)
@pytest.mark.parametrize("place", [b'{"x":%b}', b'{"x":[%b]}', b'{"messages":[%b]}'])
def test_what_loses_something_in_decoding_is_forwarded_uncached(place: bytes, value: bytes) -> None:
    asked = ask(place % value)
    assert asked.bypass == "bypass-inexact"
    assert not any(asked.key)


@pytest.mark.parametrize(
    "value",
    [b"0.1", b"18446744073709551615", b"-9223372036854775808", b"1e308", b"5e-324", b"0.10e1"],
)
def test_what_comes_back_as_the_same_number_is_exact(value: bytes) -> None:
    assert ask(b'{"x":%b}' % value).bypass == ""


def test_a_name_that_is_no_text_does_not_spoil_what_is_written_about_it() -> None:
    asked = ask(b'{"model":"\\ud800m"}')
    assert asked.bypass == "bypass-inexact"
    assert asked.model == "?m"


def test_the_decoded_fields_are_handed_on_with_inexact() -> None:
    with pytest.raises(InexactError) as caught:
        decode(b'{"model":"m","x":"\\ud800"}')
    assert caught.value.fields["model"] == "m"
    with pytest.raises(InexactError):
        canonical(decode(b'{"x":1e400}'))


def test_only_what_json_has_can_be_made_canonical() -> None:
    with pytest.raises(TypeError, match="JSON has no object"):
        canonical({"x": object()})
    with pytest.raises(TypeError, match="JSON has no object"):
        canonical({"x": [object()]})


# what separates


def test_tenants_never_share() -> None:
    keyring = keyring_of()
    assert ask(CHAT, keyring, "a").key != ask(CHAT, keyring, "b").key


def test_secrets_and_models_separate() -> None:
    keys = {
        ask(CHAT).key,
        ask(CHAT, keyring_of(b"t" * 32)).key,
        ask(CHAT, Keyring(SECRET, lambda model: f"other/{model}")).key,
        ask({**CHAT, "model": "m2"}).key,
    }
    assert len(keys) == 4


def test_what_answers_for_a_model_is_asked_again_after_a_change() -> None:
    group = ["old"]
    keyring = Keyring(SECRET, lambda model: group[0])
    before = ask(CHAT, keyring).key
    group[0] = "new"
    assert ask(CHAT, keyring).key == before
    keyring.forget()
    assert ask(CHAT, keyring).key not in {before, None}


def test_short_keys_collide_and_their_checks_do_not() -> None:
    keyring = keyring_of(key_bytes=1)
    asked = [ask({**CHAT, "seed": seed}, keyring) for seed in range(600)]
    assert len({one.key for one in asked}) <= 256
    assert len({one.check for one in asked}) == 600
    assert all(len(one.key) == KEY_BYTES for one in asked)


def test_a_partition_is_made_once() -> None:
    keyring = keyring_of()
    assert keyring.partition("t", "/p", "n") is keyring.partition("t", "/p", "n")


def test_equal_bodies_are_read_once() -> None:
    keyring = keyring_of()
    assert ask(CHAT, keyring) is ask(CHAT, keyring)


def test_the_memos_are_bounded() -> None:
    keyring = keyring_of(memo_entries=100)
    for seed in range(1_000):
        ask({**CHAT, "seed": seed}, keyring)
        keyring.partition(str(seed), "/p", "")
    assert keyring._bodies.size <= 100
    assert keyring._partitions.size <= 4_096
    text = "x" * 20_000
    for seed in range(300):
        ask({"messages": [text], "seed": seed}, keyring)
    assert 0 < keyring._parts.size <= 50


def test_keys_do_not_depend_on_pythons_hash_seed() -> None:
    script = (
        "from preheat.core.keys import Keyring\n"
        "keyring = Keyring(b's' * 32, lambda model: 'group')\n"
        "where = keyring.partition('t', '/p', 'n', ('a:1',))\n"
        'for body in (b\'{"b":{"y":1,"x":[1.50]},"a":1,"stop":["z"],"logit_bias":'
        '{"9":1,"8":2}}\', b\'{"tools":[{"q":1}],"messages":["\' + b\'x\' * 50000 + b\'"]}\'):\n'
        "    asked = keyring.ask(body, where)\n"
        "    print(asked.key.hex(), asked.check.hex())\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            timeout=30,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(printed) == 1
    assert len(printed.pop().split()) == 4


def test_a_models_name_is_bounded_because_the_memos_keep_it() -> None:
    keys = Keyring(b"s" * 32, lambda model: model)
    partition = keys.partition("t", "/p", "")
    assert keys.ask(b'{"model":"%b"}' % (b"m" * 256), partition).model == "m" * 256
    with pytest.raises(RequestError, match="at most 256 characters"):
        keys.ask(b'{"model":"%b"}' % (b"m" * 257), partition)
