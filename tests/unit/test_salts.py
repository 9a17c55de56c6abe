"""A tenant's prompts are set apart in an engine's cache, whatever its client sends."""

import json

import pytest

from preheat.engines.salts import Salts

BODY = b'{"model":"m", "messages": [{"role":"user","content":"q"}], "seed": 1.0}'


def salt_of(body: bytes) -> str:
    pairs = json.loads(body, object_pairs_hook=list)
    (salt,) = [value for name, value in pairs if name == "cache_salt"]
    return str(salt)


def test_each_tenant_has_its_own_that_lasts_and_that_nobody_can_derive() -> None:
    salts = Salts(b"secret")
    assert len({salts.of("a"), salts.of("b"), Salts(b"another").of("a"), "a"}) == 4
    assert salts.of("a") == Salts(b"secret").of("a")


@pytest.mark.parametrize(
    "path", [b"/chat/completions", b"/completions", b"/responses", b"/completions?x=1"]
)
def test_it_is_put_in_and_not_a_byte_of_the_rest_changes(path: bytes) -> None:
    salts = Salts(b"secret")
    assert salts.takes(path)
    salted = salts.salted(BODY, "a", "cache_salt")
    assert salt_of(salted) == salts.of("a")
    assert salted.endswith(BODY[1:])


@pytest.mark.parametrize(
    "own", [b'"mine"', b'"m\\u0069ne"', b'"' + b"x" * 500 + b'"', b"7", b"{}", b'"\\ud800"']
)
def test_a_clients_own_sets_its_prompts_apart_and_leads_to_nobody_elses(own: bytes) -> None:
    salts = Salts(b"secret")
    for spelled in (b"cache_salt", b"cache_s\\u0061lt"):
        body = BODY[:-1] + b',"%b": %b}' % (spelled, own)
        mine, others = (salt_of(salts.salted(body, who, "cache_salt")) for who in "ab")
        assert len({mine, others, salts.of("a"), salts.of("b")}) == 4
    forged = BODY[:-1] + b',"cache_salt": "%b"}' % salts.of("b").encode()
    assert salt_of(salts.salted(forged, "a", "cache_salt")) != salts.of("b")


def test_null_and_empty_are_none() -> None:
    salts = Salts(b"secret")
    for own in (b"null", b'""'):
        body = BODY[:-1] + b',"cache_salt": %b}' % own
        assert salt_of(salts.salted(body, "a", "cache_salt")) == salts.of("a")


@pytest.mark.parametrize("body", [b"no JSON", b"[1]", b""])
def test_what_takes_none_stays_as_it_is(body: bytes) -> None:
    salts = Salts(b"secret")
    assert salts.salted(body, "a", "cache_salt") == body
    assert not any(map(salts.takes, (b"/embeddings", b"/models", b"/messages")))
