"""Changing one field of a JSON body and not a byte of the rest."""

import pytest

from preheat.wire.splice import change_field, insert_field, set_field


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": 1}', b'{"b":true,"a": 1}'),
        (b"{}", b'{"b":true}'),
        (b" \r\n{ \t }\n", b' \r\n{"b":true \t }\n'),
        (b'{\n  "a" : {}\n}', b'{"b":true,\n  "a" : {}\n}'),
        (b'{"}":1}', b'{"b":true,"}":1}'),
    ],
)
def test_a_field_is_put_in_front(body: bytes, expected: bytes) -> None:
    assert insert_field(body, "b", b"true") == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": 1,  "b":2}', b'{"a": "x",  "b":2}'),
        (b'{"b":2,"a":1}', b'{"b":2,"a":"x"}'),
        (b'{"a":null}', b'{"a":"x"}'),
        (b'{"a":[1, {"a":2}], "b":"a"}', b'{"a":"x", "b":"a"}'),
        (b'{"b":{"a":1},"a":2}', b'{"b":{"a":1},"a":"x"}'),
        (b'{"\\u0061" : 1e5 }', b'{"\\u0061" : "x" }'),
        (b' {\n"b"\t:\r-1.50E+3 ,\n"a":\n"\\"}"\n}\n', b' {\n"b"\t:\r-1.50E+3 ,\n"a":\n"x"\n}\n'),
        (b'{"a":"\\ud800"}', b'{"a":"x"}'),
        ('{"ä":"ü","a":"ß"}'.encode(), '{"ä":"ü","a":"x"}'.encode()),
    ],
)
def test_a_value_is_replaced_in_its_place(body: bytes, expected: bytes) -> None:
    assert change_field(body, "a", lambda _: b'"x"') == expected


@pytest.mark.parametrize("body", [b"{}", b" { } ", b'{"b":1}', b'{"b":{"a":1}}', b'{"b":"a"}'])
def test_without_the_field_nothing_changes(body: bytes) -> None:
    assert change_field(body, "a", lambda _: b'"x"') == body


@pytest.mark.parametrize("number", [b"1e400", b"1" * 5_000, b"0.10"])
def test_a_changed_value_keeps_the_spelling_of_its_numbers(number: bytes) -> None:
    changed = change_field(
        b'{"a":{"x":%b}}' % number, "a", lambda old: set_field(old, "y", b"true")
    )
    assert changed == b'{"a":{"y":true,"x":%b}}' % number


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"null", b'{"a":true}'),
        (b"{}", b'{"a":true}'),
        (b'{"b": 1}', b'{"a":true,"b": 1}'),
        (b'{"b":{"a":1}, "a" : false}', b'{"b":{"a":1}, "a" : true}'),
        (b'{"\\u0061":0}', b'{"\\u0061":true}'),
    ],
)
def test_a_field_is_set_whether_or_not_it_is_there(value: bytes, expected: bytes) -> None:
    assert set_field(value, "a", b"true") == expected
