"""The books of L1."""

import pytest

from core_parts import key_of, record_of, sum_of
from preheat.core.admission.always import Always
from preheat.core.admission.doorkeeper import Doorkeeper
from preheat.core.eviction.lru import Lru
from preheat.core.inventory import Inventory
from preheat.core.types import Epoch, Invalidation, Key


def inventory_of(
    budget_bytes: int = 100,
    budget_entries: int = 100,
    stale_s: float = 0.0,
    admission: type = Always,
) -> Inventory:
    return Inventory(
        Lru(),
        admission(),
        budget_bytes=budget_bytes,
        budget_entries=budget_entries,
        stale_s=stale_s,
    )


def keys(*names: object) -> tuple[Key, ...]:
    return tuple(key_of(name) for name in names)


def test_a_stored_record_is_found_whether_it_has_expired_or_not() -> None:
    inventory = inventory_of()
    record = record_of("a", expires_at=5.0)
    assert inventory.store(key_of("a"), record, 0.0) == ()
    assert inventory.find(key_of("a")) is record
    assert inventory.find(key_of("b")) is None
    assert (len(inventory), inventory.size_bytes) == (1, 1)
    assert dict(inventory.records()) == {key_of("a"): record}


def test_by_bytes_as_many_leave_as_must() -> None:
    inventory = inventory_of(budget_bytes=100)
    for name in "abc":
        inventory.store(key_of(name), record_of(name, size_bytes=30), 0.0)
    assert inventory.store(key_of("d"), record_of("d", size_bytes=60), 0.0) == keys("a", "b")
    assert inventory.size_bytes == 90
    assert inventory.why_absent(key_of("a")) == "evicted"


def test_by_number_one_leaves_for_one() -> None:
    inventory = inventory_of(budget_entries=2)
    for name in "ab":
        inventory.store(key_of(name), record_of(name), 0.0)
    first = inventory.find(key_of("a"))
    assert first is not None
    inventory.use(first, 1.0)
    assert inventory.store(key_of("c"), record_of("c"), 1.0) == keys("b")


def test_a_record_stored_again_replaces_the_old_one_and_evicts_nobody() -> None:
    inventory = inventory_of(budget_bytes=100, budget_entries=2)
    inventory.store(key_of("a"), record_of("a", size_bytes=50), 0.0)
    inventory.store(key_of("b"), record_of("b", size_bytes=50), 0.0)
    assert inventory.store(key_of("a"), record_of("a", size_bytes=40), 0.0) == ()
    assert (len(inventory), inventory.size_bytes) == (2, 90)


def test_a_record_that_grows_pushes_others_out_but_not_itself() -> None:
    inventory = inventory_of(budget_bytes=100)
    inventory.store(key_of("a"), record_of("a", size_bytes=50), 0.0)
    inventory.store(key_of("b"), record_of("b", size_bytes=50), 0.0)
    assert inventory.store(key_of("a"), record_of("a", size_bytes=80), 0.0) == keys("b")
    assert inventory.size_bytes == 80


@pytest.mark.parametrize(
    ("budget_bytes", "budget_entries"), [(10, 100), (0, 100), (100, 0), (0, 0)]
)
def test_what_can_never_fit_is_refused(budget_bytes: int, budget_entries: int) -> None:
    inventory = inventory_of(budget_bytes, budget_entries)
    stored = inventory.store(key_of("a"), record_of("a", size_bytes=11), 0.0)
    assert stored == "larger-than-cache"
    assert len(inventory) == 0
    assert inventory.why_absent(key_of("a")) == "larger-than-cache"


def test_whom_the_door_refuses_pushes_nobody_out() -> None:
    inventory = inventory_of(budget_entries=1, admission=Doorkeeper)
    for _ in range(2):
        inventory.see(key_of("a"), 0.0)
    inventory.store(key_of("a"), record_of("a"), 0.0)
    inventory.see(key_of("b"), 0.0)
    assert inventory.store(key_of("b"), record_of("b"), 0.0) == "not-admitted"
    assert inventory.why_absent(key_of("b")) == "not-admitted"
    assert inventory.find(key_of("a")) is not None


def test_the_door_is_not_asked_again_for_a_record_that_is_in() -> None:
    inventory = inventory_of(budget_entries=1, admission=Doorkeeper)
    inventory.store(key_of("a"), record_of("a"), 0.0)
    assert inventory.store(key_of("a"), record_of("a", size_bytes=2), 0.0) == ()


def test_a_key_never_seen_says_so() -> None:
    assert inventory_of().why_absent(key_of("a")) == "key-first-seen"


def test_a_removed_record_leaves_its_reason() -> None:
    inventory = inventory_of()
    inventory.store(key_of("a"), record_of("a"), 0.0)
    inventory.remove(key_of("a"), "store-failed")
    assert inventory.find(key_of("a")) is None
    assert inventory.size_bytes == 0
    assert inventory.why_absent(key_of("a")) == "store-failed"


def test_reasons_are_remembered_for_at_most_as_many_keys_as_entries_fit() -> None:
    inventory = inventory_of(budget_entries=100)
    for number in range(10_000):
        inventory.note_absent(key_of(number), "evicted")
    assert inventory._gone.size <= 100
    assert inventory.why_absent(key_of(9_999)) == "evicted"
    assert inventory.why_absent(key_of(0)) == "key-first-seen"


# expiry


def test_what_is_past_its_life_leaves_without_being_asked_for() -> None:
    inventory = inventory_of()
    for name, expires_at in (("a", 5.0), ("b", 10.0), ("c", 7.0)):
        inventory.store(key_of(name), record_of(name, expires_at=expires_at), 0.0)
    assert inventory.expire(4.9) == ()
    assert inventory.expire(7.0) == keys("a", "c")
    assert inventory.why_absent(key_of("a")) == "expired"
    assert (len(inventory), inventory.size_bytes) == (1, 1)


def test_an_expired_record_stays_as_long_as_stale_answers_are_wanted() -> None:
    inventory = inventory_of(stale_s=60.0)
    inventory.store(key_of("a"), record_of("a", expires_at=5.0), 0.0)
    assert inventory.expire(64.9) == ()
    assert inventory.expire(65.0) == keys("a")


def test_a_record_stored_again_expires_by_its_new_life_only() -> None:
    inventory = inventory_of()
    inventory.store(key_of("a"), record_of("a", expires_at=5.0), 0.0)
    inventory.store(key_of("a"), record_of("a", expires_at=50.0), 1.0)
    assert inventory.expire(49.0) == ()
    assert inventory.expire(50.0) == keys("a")


def test_a_sweep_ends_after_so_many() -> None:
    inventory = inventory_of()
    for number in range(10):
        inventory.store(key_of(number), record_of(number, expires_at=1.0), 0.0)
    assert len(inventory.expire(2.0, limit=4)) == 4
    assert len(inventory.expire(2.0, limit=100)) == 6


def test_overwriting_leaves_no_growing_trail_of_expiry_lines() -> None:
    inventory = inventory_of()
    inventory.store(key_of("other"), record_of("other", expires_at=3.0), 0.0)
    for number in range(5_000):
        record = record_of("a", expires_at=100.0 + number)
        inventory.store(key_of("a"), record, 0.0)
    assert len(inventory._expiry) <= 2 * len(inventory) + 1_001
    assert inventory.expire(3.0) == keys("other")
    assert inventory.expire(100.0 + 4_999) == keys("a")


# invalidation


def test_an_invalidation_takes_what_matches_every_field_given() -> None:
    inventory = inventory_of()
    for name, fields in {
        "a": {"model": "m1", "tenant": "t1", "namespace": "n1", "tags": ("red",)},
        "b": {"model": "m1", "tenant": "t2", "namespace": "n1", "tags": ("red", "blue")},
        "c": {"model": "m2", "tenant": "t1", "namespace": "n2", "tags": ("blue",)},
        "d": {"model": "m2", "tenant": "t2", "namespace": "n2"},
    }.items():
        inventory.store(key_of(name), record_of(name, size_bytes=3, **fields), 0.0)

    def matching(**what: object) -> set[Key]:
        removed = sum_of(inventory.sweep(Invalidation(**what), dry_run=True))
        assert removed.size_bytes == 3 * len(removed.keys)
        return set(removed.keys)

    assert matching(model="m1") == set(keys("a", "b"))
    assert matching(tenant="t1") == set(keys("a", "c"))
    assert matching(namespace="n2", tenant="t2") == set(keys("d"))
    assert matching(tags=frozenset({"blue"})) == set(keys("b", "c"))
    assert matching(tags=frozenset({"red", "blue"})) == set(keys("a", "b", "c"))
    assert matching(keys=frozenset(keys("a", "gone"))) == set(keys("a"))
    assert matching(keys=frozenset(keys("a")), tags=frozenset({"blue"})) == set(keys(*"abc"))
    assert matching(keys=frozenset(keys("a")), model="m2") == set()
    assert matching() == set(keys(*"abcd"))
    assert len(inventory) == 4  # a dry run removes nothing


def test_an_invalidation_removes_and_names_its_reason() -> None:
    inventory = inventory_of()
    inventory.store(key_of("a"), record_of("a"), 0.0)
    what = Invalidation(model="m1")
    inventory.epochs.add(what, 1)
    removed = sum_of(inventory.sweep(what, dry_run=False))
    assert removed.keys == keys("a")
    assert len(inventory) == inventory.size_bytes == 0
    assert inventory.why_absent(key_of("a")) == "invalidated"


def test_a_sweep_gives_way_between_portions_and_takes_only_what_was_there_at_its_start() -> None:
    inventory = inventory_of(budget_entries=2_000, budget_bytes=10_000)
    for number in range(1_100):
        inventory.store(key_of(number), record_of(number), 0.0)
    what = Invalidation(model="m1")
    inventory.epochs.add(what, 1)
    sweep = inventory.sweep(what, dry_run=False)
    first = next(sweep)
    inventory.store(key_of("new"), record_of("new", epoch=Epoch("", 1)), 1.0)
    inventory.remove(key_of(1_099), "evicted")
    rest = sum_of(sweep)
    assert len(first.keys) == 512
    assert len(first.keys) + len(rest.keys) == 1_099
    assert [key for key, _ in inventory.records()] == [key_of("new")]


def test_what_was_asked_for_before_an_invalidation_is_not_kept_after_it() -> None:
    inventory = inventory_of()
    inventory.epochs.add(Invalidation(model="m1"), 10)
    assert inventory.store(key_of("a"), record_of("a", epoch=Epoch("", 9)), 11.0) == "invalidated"
    assert inventory.store(key_of("a"), record_of("a", epoch=Epoch("", 10)), 11.0) == ()
    assert inventory.store(key_of("b"), record_of("b", model="m2", epoch=Epoch("", 9)), 11.0) == ()


def test_what_was_asked_for_earlier_does_not_replace_what_was_asked_for_later() -> None:
    inventory = inventory_of()
    inventory.store(key_of("a"), record_of("a", asked_at=5.0), 6.0)
    assert inventory.store(key_of("a"), record_of("a", asked_at=4.0), 7.0) == "superseded"
    assert inventory.store(key_of("a"), record_of("a", asked_at=5.0), 8.0) == ()
