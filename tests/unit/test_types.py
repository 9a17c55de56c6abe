"""The nouns: frozen, comparable, free of the collector, and without room for request text."""

import gc

import msgspec
import pytest

from preheat.core import types
from preheat.core.types import NOTHING_SPECIAL, Ask, Check, Invalidation, Key, Want

STRUCTS = [
    value
    for value in vars(types).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct)
]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_a_record_is_a_frozen_value(struct: type[msgspec.Struct]) -> None:
    # An ask carries the inventory's short cut to its entry, which changes.
    assert struct.__struct_config__.frozen or struct is Ask


def test_what_is_kept_by_the_hundred_thousand_costs_the_collector_nothing() -> None:
    ask = Ask(Key(bytes(16)), Check(bytes(32)), "m")
    assert not gc.is_tracked(ask)


def test_an_ask_has_no_field_for_text() -> None:
    assert not {"body", "messages", "prompt", "text"} & set(Ask.__struct_fields__)


def test_decisions_and_effects_are_told_apart_on_the_wire() -> None:
    decisions = [types.Hit, types.Join, types.Forward, types.Reject, types.Keep, types.Drop]
    assert len({one.__struct_config__.tag for one in decisions}) == len(decisions)


def test_nothing_special_is_what_a_request_without_headers_wants() -> None:
    assert Want() == NOTHING_SPECIAL
    assert NOTHING_SPECIAL.max_age_s == types.FOREVER == 2**31


def test_an_invalidation_that_names_nothing_equals_the_empty_one() -> None:
    assert Invalidation(keys=frozenset(), tags=frozenset()) == Invalidation()
    assert Invalidation(model="m") != Invalidation()
