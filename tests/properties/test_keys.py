"""A key holds everything that may change an answer, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from preheat.core import keys
from preheat.core.keys import InexactError, Keyring, decode
from preheat.core.types import Ask
from preheat.errors import RequestError
from properties import json_bodies
from properties.json_bodies import (
    FOLDED,
    IGNORED,
    Writer,
    at,
    bodies,
    meaning,
    places,
    seeds,
    values,
    with_value,
    without,
)

CUT = keys._WORTH_CUTTING_BYTES
HOLE = keys._HOLE.decode()
SECRET = b"s" * 32
PLACE = ("local", "/v1/chat/completions", "")


def fresh() -> Keyring:
    return Keyring(SECRET, lambda model: f"group/{model}")


def written(fields: Any) -> bytes:
    return json.dumps(fields).encode()


def ask(body: bytes, keyring: Keyring | None = None) -> Ask:
    keyring = keyring or fresh()
    return keyring.ask(body, keyring.partition(*PLACE))


def names_of(asked: Ask) -> tuple[bytes, bytes]:
    assert asked.bypass != "bypass-inexact"
    return asked.key, asked.check


# everything that may change an answer


@settings(deadline=None, max_examples=150)
@given(bodies, st.data())
def test_any_change_in_any_place_changes_key_and_check(
    body: dict[str, Any], data: st.DataObject
) -> None:
    place = data.draw(st.sampled_from([p for p in places(body) if p[0] not in IGNORED]))
    old = at(body, place)
    if place == ("model",):
        new = data.draw(st.none() | json_bodies.texts)
        assume((new or "") != (old or ""))
    else:
        new = data.draw(values | st.just([old]) | st.just({"": old}))
    assume(meaning(new) != meaning(old))
    before, after = ask(written(body)), ask(written(with_value(body, place, new)))
    assert before.key != after.key
    assert before.check != after.check


@settings(deadline=None, max_examples=120)
@given(bodies, st.data())
def test_leaving_anything_out_changes_the_key(body: dict[str, Any], data: st.DataObject) -> None:
    there = [
        p for p in places(body) if p[0] not in IGNORED and not (len(p) == 1 and body[p[0]] is None)
    ]
    place = data.draw(st.sampled_from(there))
    assert names_of(ask(written(body))) != names_of(ask(written(without(body, place))))


@settings(deadline=None, max_examples=120)
@given(bodies, st.data())
def test_the_order_of_a_list_is_part_of_the_key(body: dict[str, Any], data: st.DataObject) -> None:
    lists = [p for p in places(body) if isinstance(at(body, p), list) and p[0] not in IGNORED]
    place = data.draw(st.sampled_from(lists))
    turned = at(body, place)[::-1]
    assume(meaning(turned) != meaning(at(body, place)))
    assert names_of(ask(written(body))) != names_of(ask(written(with_value(body, place, turned))))


@settings(deadline=None, max_examples=100)
@given(bodies, json_bodies.texts, values)
def test_a_field_that_nobody_knows_changes_the_key(
    body: dict[str, Any], name: str, value: Any
) -> None:
    assume(name not in {*body, *IGNORED, "model"} and value is not None)
    assert names_of(ask(written(body))) != names_of(ask(written({**body, name: value})))


# nothing else


@settings(deadline=None, max_examples=150)
@given(bodies, seeds, seeds)
def test_space_escapes_order_and_spelling_outside_schemas_do_not_change_the_key(
    body: dict[str, Any], seed: int, other: int
) -> None:
    expected = names_of(ask(written(body)))
    assert names_of(ask(Writer(seed).body(body))) == expected
    keyring = fresh()
    assert names_of(ask(Writer(seed).body(body), keyring)) == expected
    assert names_of(ask(Writer(other).body(body), keyring)) == expected


@settings(deadline=None, max_examples=120)
@given(bodies, json_bodies.ignored)
def test_ignored_fields_do_not_change_the_key(
    body: dict[str, Any], skipped: dict[str, Any]
) -> None:
    kept = {name: value for name, value in body.items() if name not in IGNORED}
    expected = names_of(ask(written(kept)))
    assert names_of(ask(written({**kept, **skipped}))) == expected
    assert names_of(ask(written({**skipped, **kept}))) == expected


@settings(deadline=None, max_examples=100)
@given(bodies, json_bodies.texts)
def test_a_null_at_the_top_means_absent(body: dict[str, Any], name: str) -> None:
    assume(name not in {*body, "messages"})
    assert names_of(ask(written({**body, name: None}))) == names_of(ask(written(body)))


@pytest.mark.parametrize("name", [*sorted(FOLDED), "tools", "response_format", "unknown"])
def test_a_null_inside_means_something(name: str) -> None:
    given, absent = {name: [{"a": 1, "b": None}]}, {name: [{"a": 1}]}
    assert names_of(ask(written(given))) != names_of(ask(written(absent)))
    given, absent = {name: [None]}, {name: []}
    assert names_of(ask(written(given))) != names_of(ask(written(absent)))


@pytest.mark.parametrize("name", [*sorted(FOLDED), "tools", "response_format", "unknown"])
def test_order_and_spelling_matter_where_a_schema_may_be(name: str) -> None:
    folds = name in FOLDED
    plain = ask(b'{"%b":{"x":1,"y":{"p":[2,10]}}}' % name.encode())
    for changed in (
        b'{"y":{"p":[2,10]},"x":1}',
        b'{"x":1.0,"y":{"p":[2,10]}}',
        b'{"x":1,"y":{"p":[2,1e1]}}',
    ):
        same = names_of(ask(b'{"%b":%b}' % (name.encode(), changed))) == names_of(plain)
        assert same is folds, (name, changed)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(json_bodies.texts, values, min_size=2, max_size=4), st.data())
def test_swapping_two_properties_of_a_schema_changes_the_key(
    schema: dict[str, Any], data: st.DataObject
) -> None:
    names = data.draw(st.permutations(sorted(schema)))
    body = {"messages": [], "response_format": {"schema": schema}}
    swapped = {"messages": [], "response_format": {"schema": {k: schema[k] for k in names}}}
    same = names_of(ask(written(body))) == names_of(ask(written(swapped)))
    assert same is (names == list(schema))


# one key twice


@settings(deadline=None, max_examples=120)
@given(bodies, st.data(), seeds, st.booleans())
def test_one_key_twice_in_any_object_is_a_400_however_it_is_written(
    body: dict[str, Any], data: st.DataObject, seed: int, is_large: bool
) -> None:
    if is_large:
        body = {**body, "messages": [*body["messages"], {"pad": "x" * CUT}]}
    objects = [(), *places(body)]
    place = data.draw(
        st.sampled_from([p for p in objects if isinstance(at(body, p), dict) and at(body, p)])
    )
    doubled = Writer(seed, twice=place).body(body)
    keyring = fresh()
    ask(Writer(seed).body(body), keyring)  # what it might be taken for is known
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            ask(doubled, keyring)
        assert (caught.value.status, caught.value.code) == (400, "duplicate-key")


# what is not exact


@settings(deadline=None, max_examples=150)
@given(
    bodies,
    st.data(),
    st.sampled_from(['"\\ud800"', '"\\udfff\\ud800"', "1e400", "0." + "1" * 40, "9" * 30]),
    st.booleans(),
)
def test_a_value_that_loses_something_anywhere_makes_its_body_inexact(
    body: dict[str, Any], data: st.DataObject, lossy: str, is_large: bool
) -> None:
    if is_large:
        body = {**body, "messages": [*body["messages"], {"pad": "x" * CUT}]}
    skipped = {*IGNORED, "model"}
    place = data.draw(st.sampled_from([p for p in places(body) if p[0] not in skipped]))
    mark = "a mark of no other text"
    text = written(with_value(body, place, mark)).replace(written(mark), lossy.encode())
    keyring = fresh()
    assert [ask(text, keyring).bypass for _ in range(2)] == ["bypass-inexact"] * 2


# who shares


PARTITIONS = st.tuples(
    json_bodies.texts,
    json_bodies.texts,
    json_bodies.texts,
    st.lists(json_bodies.texts, max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=150)
@given(PARTITIONS, PARTITIONS)
def test_tenant_path_namespace_and_headers_separate_without_ambiguity(one: Any, other: Any) -> None:
    first = Keyring(SECRET, lambda model: "group")
    second = Keyring(SECRET, lambda model: "group")
    here, there = first.partition(*one), second.partition(*other)
    body = b'{"messages":[]}'
    is_same = one == other
    assert (here.name == there.name) is is_same
    assert (names_of(first.ask(body, here)) == names_of(second.ask(body, there))) is is_same
    assert (here.secret == there.secret) is (one[0] == other[0])


@settings(deadline=None, max_examples=50)
@given(st.lists(json_bodies.texts, min_size=2, max_size=4))
@pytest.mark.parametrize("glue", ["", ",", "\n", "\0", ":", '", "'])
def test_words_run_together_are_other_words(glue: str, words: list[str]) -> None:
    keyring = fresh()
    apart = keyring.partition("t", "/p", words[0], tuple(words[1:]))
    together = keyring.partition("t", "/p", glue.join(words))
    assert apart.name != together.name


@settings(deadline=None)
@given(json_bodies.texts, json_bodies.texts)
def test_what_answers_is_part_of_the_key(identity: str, other: str) -> None:
    body = b'{"model":"m","messages":[]}'
    one, two = Keyring(SECRET, lambda model: identity), Keyring(SECRET, lambda model: other)
    assert (names_of(ask(body, one)) == names_of(ask(body, two))) is (identity == other)


# the shortcut for large bodies agrees with the long way


def plainly(body: bytes) -> Ask | str:
    """What a body asks for without any memo: the ask, or the code of the refusal."""
    keyring = fresh()
    try:
        fields = decode(body)
    except InexactError as inexact:
        return keys._ask(inexact.fields, None)
    except RequestError as error:
        return error.code
    return keys._ask(fields, keyring._digest(fields, keyring.partition(*PLACE)))


def told(body: bytes, keyring: Keyring) -> Ask | str:
    try:
        return ask(body, keyring)
    except RequestError as error:
        return error.code


LONG = "x" * (2 * CUT)
MESSAGES = json.dumps([{"role": "user", "content": LONG}])
TOOLS = json.dumps([{"type": "function", "function": {"name": LONG, "parameters": {"a": 1}}}])
LIST = "[1,2]"
ADVERSARIAL = [
    text.replace("M", MESSAGES).replace("T", TOOLS).replace("#", HOLE).replace("L", LIST)
    for text in (
        '{"messages":M}',
        '{"messages":M,"tools":T}',
        '{"tools":T,"messages":M}',
        ' {\n"messages" : M , "tools": T , "x": 1 }\r\n',
        '{"messages":M,"user":"u","stream":true,"metadata":{"a":1}}',
        '{"messages":M,"store":true}',
        '{"messages":M,"temperature":0}',
        '{"messages":M,"temperature":0.0}',
        '{"messages":M,"model":"m1","stream_options":{"include_usage":true}}',
        '{"messages":M,"x":null}',
        '{"messages":M,"x":{"b":1,"a":2}}',
        '{"messages":M,"x":{"a":2,"b":1}}',
        '{"messages":M,"x":1e0}',
        # their bytes stand elsewhere too
        '{"x":M,"messages":M}',
        '{"messages":M,"x":M}',
        '{"messages":M,"tools":M}',
        '{"tools":[M],"messages":M}',
        '{"messages":[T],"tools":T}',
        '{"tools":T,"messages":[T]}',
        '{"x":[M,T],"messages":M,"tools":T}',
        '{"messages":L,"tools":T,"x":L}',
        '{"x":L,"messages":L,"tools":T}',
        '{"x":{"messages":M}}',
        '{"x":{"messages":M},"messages":L}',
        # the hole's number stands there already
        '{"messages":#,"tools":T}',
        '{"tools":#,"messages":M}',
        '{"messages":M,"x":#}',
        '{"x":#,"messages":M}',
        '{"messages":M,"tools":#}',
        '{"messages":#,"tools":#,"x":M}',
        '{"messages":#.0,"tools":T}',
        '{"messages":M,"seed":#}',
        # scalars and empty ones
        '{"messages":null,"tools":T}',
        '{"messages":M,"tools":null}',
        '{"messages":[],"tools":T}',
        '{"messages":{},"tools":T}',
        '{"messages":"","tools":T}',
        '{"messages":1,"tools":T,"seed":11}',
        '{"seed":11,"messages":1,"tools":T}',
        '{"x":1e5,"messages":5,"tools":T}',
        '{"temperature":0,"messages":0,"tools":T}',
        '{"temperature":0,"messages":0,"tools":T,"user":"u"}',
        '{"messages":true,"tools":T}',
        '{"messages":M,"tools":[]}',
        '{"messages":M,"tools":""}',
        '{"tools":T}',
        # one key twice
        '{"messages":M,"messages":M}',
        '{"messages":M,"messages":#}',
        '{"messages":#,"messages":M}',
        '{"messages":M,"messages":1}',
        '{"messages":L,"messages":M}',
        '{"messages":M,"tools":T,"tools":T}',
        '{"messages":M,"tools":L,"tools":T}',
        '{"messages":M,"\\u006dessages":M}',
        '{"\\u006dessages":M,"messages":M}',
        '{"\\u006dessages":M}',
        '{"messages":[{"a":1,"a":2},M]}',
        '{"messages":[{"a":1,"\\u0061":2},M]}',
        '{"tools":[{"a":1,"a":2},T]}',
        '{"messages":M,"x":1,"x":2}',
        '{"messages":M,"x":{"a":1,"\\u0061":1}}',
        # what isn't exact, and what isn't JSON
        '{"messages":["\\ud800",M]}',
        '{"messages":["\\udc00",M]}',
        '{"messages":[1e400,M]}',
        '{"messages":[18446744073709551616,M]}',
        '{"tools":[1e400,T]}',
        '{"messages":M,"x":1e400}',
        '{"messages":M,"x":"\\ud800"}',
        '{"messages":M,"seed":18446744073709551616}',
        '{"messages":[NaN,M]}',
        '{"messages":[01,M]}',
        '{"messages":[M',
        '{"messages":M}}',
        '{"messages":M} {"messages":M}',
        '{"messages":M,}',
        '{"messages":[' + "[" * 300 + "]" * 300 + ",M]}",
        '{"messages":[' + "[" * 50_000 + "]" * 50_000 + ",M]}",
        '{"messages":M,"x":' + "[" * 300 + "]" * 300 + "}",
        '{"messages":M,"stream":1}',
        '{"messages":M,"model":7}',
        '{"messages":M,"stream_options":[]}',
        '[{"messages":M}]',
        '\ufeff{"messages":M}',
    )
]


@pytest.mark.parametrize("text", ADVERSARIAL, ids=lambda text: text.replace(LONG, "…")[:60])
def test_a_body_made_to_fool_the_shortcut_does_not(text: str) -> None:
    body = text.encode()
    keyring = fresh()
    told(ADVERSARIAL[0].encode(), keyring)
    told(ADVERSARIAL[1].encode(), keyring)
    assert [told(body, keyring), told(body, keyring)] == [plainly(body)] * 2


EXPECTED = [plainly(text.encode()) for text in ADVERSARIAL]


@settings(deadline=None, max_examples=15)
@given(st.permutations(range(len(ADVERSARIAL))))
def test_in_whatever_order_they_come_none_is_taken_for_another(order: list[int]) -> None:
    keyring = fresh()
    for number in order:
        assert told(ADVERSARIAL[number].encode(), keyring) == EXPECTED[number]


def test_bytes_that_are_no_text_do_not_fool_it_either() -> None:
    keyring = fresh()
    body = b'{"messages":["%b\xff"]}' % LONG.encode()
    assert [told(body, keyring), told(body, keyring)] == ["invalid-json"] * 2


@settings(deadline=None, max_examples=100)
@given(
    bodies,
    st.sampled_from(["messages", "tools", "x"]),
    st.integers(-300, 300),
    st.lists(seeds, min_size=2, max_size=3),
    st.booleans(),
)
def test_large_bodies_are_read_alike_with_and_without_the_memo(
    body: dict[str, Any], where: str, size: int, writings: list[int], folds: bool
) -> None:
    value = body.get(where)
    padded = {**body, where: [*(value if isinstance(value, list) else [value])]}
    missing = CUT + size - len(written(padded))
    padded[where].append("x" * max(0, missing))
    keyring = fresh()
    for seed in writings:
        # Written alike but for what is ignored, so that the second memo knows its parts.
        for ignored in ({}, {"user": "u"}, {"stream": True}):
            changed = {**{k: v for k, v in padded.items() if k not in ignored}, **ignored}
            text = Writer(seed).body(changed) if folds else written(changed)
            expected = plainly(text)
            assert told(text, keyring) == expected
            assert told(text, keyring) == expected


def test_the_shortcut_is_taken_at_all() -> None:
    keyring = fresh()
    for user in ("a", "b"):
        ask(written({"messages": [LONG], "user": user}), keyring)
    assert keyring._parts.size == 1
