"""Which answers are void."""

import pytest

from core_parts import key_of
from preheat.core.epochs import MOST_MASKS, EpochTable
from preheat.core.types import Epoch, Invalidation

ONE = {"tenant": "t", "namespace": "n", "model": "m", "tags": ("red", "blue")}


def is_void(table: EpochTable, number: int, **others: object) -> bool:
    return table.voids(Epoch("", number), key_of("a"), **{**ONE, **others})


@pytest.mark.parametrize(
    "what",
    [
        {},
        {"tenant": "t"},
        {"namespace": "n"},
        {"model": "m"},
        {"tags": frozenset({"blue", "other"})},
        {"keys": frozenset({key_of("a")})},
        {"keys": frozenset({key_of("x")}), "tags": frozenset({"red"})},
        {"tenant": "t", "namespace": "n", "model": "m", "tags": frozenset({"red"})},
    ],
)
def test_what_an_invalidation_covers_is_void_for_who_asked_before_it(
    what: dict[str, object],
) -> None:
    table = EpochTable()
    table.add(Invalidation(**what), 3)
    assert table.mark == Epoch("", 3)
    assert is_void(table, 2)
    assert not is_void(table, 3)


@pytest.mark.parametrize(
    "what",
    [
        {"tenant": "other"},
        {"namespace": ""},
        {"model": "other"},
        {"tags": frozenset({"green"})},
        {"keys": frozenset({key_of("x")})},
        {"tenant": "t", "tags": frozenset({"green"})},
        {"tenant": "other", "tags": frozenset({"red"})},
    ],
)
def test_what_it_does_not_cover_stays(what: dict[str, object]) -> None:
    table = EpochTable()
    table.add(Invalidation(**what), 3)
    assert not is_void(table, 0)


def test_a_table_agrees_with_the_invalidations_it_was_told() -> None:
    """Against the plain reading: any later invalidation that covers it."""
    words = [None, "t", "other"]
    told: list[tuple[int, Invalidation]] = []
    table = EpochTable()
    for number, tenant in enumerate(words * 3, start=1):
        what = Invalidation(
            tenant=tenant,
            model="m" if number % 2 else None,
            tags=frozenset({"red"} if number % 4 == 0 else ()),
        )
        table.add(what, number)
        told.append((number, what))
    for asked in range(10):
        for tenant in ("t", "other", "third"):
            for tags in ((), ("red",), ("blue",)):
                fields = {"tenant": tenant, "namespace": "", "model": "m", "tags": tags}
                wanted = any(
                    number > asked and what.covers(key_of("a"), **fields) for number, what in told
                )
                assert table.voids(Epoch("", asked), key_of("a"), **fields) is wanted


def test_an_earlier_one_that_is_heard_of_later_takes_nothing_back() -> None:
    table = EpochTable()
    for number in (2, 1):
        table.add(Invalidation(model="m"), number)
    assert is_void(table, 1)


def test_another_generation_voids_everything() -> None:
    table = EpochTable()
    table.reset("second")
    assert is_void(table, 0)
    assert not table.voids(Epoch("second", 0), key_of("a"), **ONE)


def test_a_count_whose_beginning_is_lost_voids_what_was_asked_before() -> None:
    table = EpochTable()
    table.reset("", 7)
    assert is_void(table, 6)
    assert not is_void(table, 7)


def test_what_is_forgotten_voids_too_much_rather_than_too_little() -> None:
    table = EpochTable(capacity=10)
    for number in range(1, 12):
        table.add(Invalidation(tags=frozenset({f"tag-{number}"})), number)
    assert len(table._numbers) <= 10
    assert is_void(table, 4)  # the fifth is forgotten, and could have been anybody's
    assert not is_void(table, 5)
    assert is_void(table, 10, tags=("tag-11",))


def test_a_check_costs_a_bounded_number_of_look_ups() -> None:
    table = EpochTable()
    for number in range(1, 200):
        table.add(
            Invalidation(
                tenant="t" if number & 1 else None,
                namespace="n" if number & 2 else None,
                model="m" if number & 4 else None,
                tags=frozenset({"x"} if number & 8 else ()),
            ),
            number,
        )
    assert len(table._masks) == MOST_MASKS == 16
