"""Changing one field of a JSON body and not a byte of the rest."""

import pytest

from preheat.wire.splice import change_field, insert_field


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
    assert insert_field(body, "b", value=True) == expected


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
    assert change_field(body, "a", lambda _: "x") == expected


@pytest.mark.parametrize("body", [b"{}", b" { } ", b'{"b":1}', b'{"b":{"a":1}}', b'{"b":"a"}'])
def test_without_the_field_nothing_changes(body: bytes) -> None:
    assert change_field(body, "a", lambda _: "x") == body
