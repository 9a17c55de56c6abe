"""Text is kept only of what three sessions began with, within bounds, and is gone when it is told."""

import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from preheat.core.types import Epoch, Invalidation, Key
from preheat.errors import ConfigError, StoreError
from preheat.stores import News
from preheat.stores.sighting import Sighting
from preheat.stores.trunk_file import TrunkFile
from preheat.stores.trunks import LEAST_SESSIONS, Trunks

SYSTEM = {"role": "system", "content": "You help with orders."}
EXAMPLE = {"role": "user", "content": "An example of a question"}
TOOLS = [{"type": "function", "function": {"name": "find"}}]
SECRET = b"a secret"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def seen(session: str, *messages: dict[str, str], **fields: Any) -> Sighting:
    return Sighting(**{"tenant": "t", "session": session, "messages": messages, **fields})


def fill(trunks: Trunks, *messages: dict[str, str], now: float = 0.0, **fields: Any) -> None:
    for number in range(LEAST_SESSIONS):
        trunks.saw(seen(f"s{number}", *messages, user(f"q{number}"), **fields), now)


def test_text_is_kept_from_the_third_session_on() -> None:
    trunks = Trunks()
    for number in range(LEAST_SESSIONS):
        assert trunks.hot(0.0) == []
        for turn in range(5):  # many turns of one session are one session
            trunks.saw(seen(f"s{number}", SYSTEM, user(f"q{number} {turn}")), 1.0)
    (trunk,) = trunks.hot(0.0)
    assert (trunk.messages, trunk.tools, trunk.sessions) == ([SYSTEM], None, 3)
    assert len(trunks) == 1  # nobody's question is in it


def test_trunks_are_aligned_to_messages_and_the_longest_of_equals_is_told() -> None:
    trunks = Trunks()
    fill(trunks, SYSTEM, EXAMPLE, tools=TOOLS)
    (trunk,) = trunks.hot(0.0)
    assert (trunk.messages, trunk.tools) == ([SYSTEM, EXAMPLE], TOOLS)
    trunks.saw(seen("another", SYSTEM, user("else"), tools=TOOLS), 1.0)
    assert [(one.messages, one.sessions) for one in trunks.hot(1.0)] == [
        ([SYSTEM], 4),
        ([SYSTEM, EXAMPLE], 3),
    ]
    fill(trunks, SYSTEM)  # without tools it is another prefix
    assert len(trunks.hot(1.0)) == 3


def test_without_a_session_conversations_are_told_apart_by_how_they_begin() -> None:
    trunks = Trunks()
    for _ in range(10):
        trunks.saw(seen("", SYSTEM, user("the same")), 0.0)
    assert len(trunks) == 0
    for number in range(2):
        trunks.saw(seen("", SYSTEM, user(f"q{number}"), user("more")), 0.0)
    assert [one.messages for one in trunks.hot(0.0)] == [[SYSTEM]]


@pytest.mark.parametrize("field", ["tenant", "namespace", "model"])
def test_nothing_is_counted_across_tenants_namespaces_or_models(field: str) -> None:
    trunks = Trunks()
    for number in range(6):
        trunks.saw(seen(f"s{number}", SYSTEM, **{field: f"x{number % 3}"}), 0.0)
    assert len(trunks) == 0
    trunks.saw(seen("s9", SYSTEM, **{field: "x0"}), 0.0)
    (trunk,) = trunks.hot(0.0)
    assert getattr(trunk, field) == "x0"
    assert trunks.hot(0.0, tenant="nobody") == []


def test_what_nobody_began_with_for_long_is_forgotten() -> None:
    trunks = Trunks(most_age_s=100.0)
    fill(trunks, SYSTEM, now=0.0)
    fill(trunks, user("younger"), now=50.0)
    trunks.saw(seen("s9", user("younger")), 90.0)
    assert len(trunks.hot(100.0)) == 2
    assert [one.messages for one in trunks.hot(101.0)] == [[user("younger")]]
    assert trunks.hot(1_000.0) == []
    assert (len(trunks), trunks.size_bytes) == (0, 0)


def test_bytes_are_bounded_and_the_largest_tenant_gives_way() -> None:
    trunks = Trunks(most_bytes=40_000)
    fill(trunks, user("x" * 3_000), tenant="small")
    for number in range(100):
        fill(trunks, user(f"{number}" + "x" * 3_000), now=float(number), tenant="large")
        assert trunks.size_bytes <= 40_000
    kept = trunks.hot(100.0)
    assert {one.tenant for one in kept} == {"small", "large"}
    numbers = [one.messages[0]["content"][:2] for one in kept if one.tenant == "large"]
    assert "99" in numbers
    assert "50" not in numbers


def test_a_message_too_long_ends_the_trunk_before_it() -> None:
    trunks = Trunks()
    fill(trunks, SYSTEM, user("x" * 2_000_000))
    assert [one.messages for one in trunks.hot(0.0)] == [[SYSTEM]]


def test_a_beginning_outlives_what_stands_on_it() -> None:
    """Under any traffic every kept message's parent is kept, and the bytes are what is there."""
    chance = random.Random(1)
    trunks = Trunks(most_bytes=30_000)
    for step in range(3_000):
        depth = chance.randint(1, 5)
        messages = [user("ab"[chance.random() < 0.3] * chance.randint(1, 3)) for _ in range(depth)]
        tenant = chance.choice("tu")
        trunks.saw(seen(str(chance.randint(0, 5)), *messages, tenant=tenant), float(step))
        if step % 100 == 0:
            trunks.expire(step - 500.0)
        for rows in trunks._tenants.values():
            assert all(not row.parent or row.parent in rows for row in rows.values())
        assert 0 <= trunks.size_bytes <= 30_000
    assert len(trunks) > 20
    assert sum(trunks._sizes.values()) == trunks.size_bytes


# invalidation


@pytest.mark.parametrize(
    ("what", "left"),
    [
        (Invalidation(tenant="t"), {"u"}),
        (Invalidation(tenant="t", namespace="other"), {"t", "u"}),
        (Invalidation(model="m"), set()),
        (Invalidation(tags=frozenset({"prices"})), {"u"}),
        (Invalidation(keys=frozenset({Key(b"k" * 16)})), {"t", "u"}),
        (Invalidation(), set()),
    ],
)
def test_an_invalidation_erases_what_it_covers(
    what: Invalidation, left: set[str], tmp_path: Path
) -> None:
    file = TrunkFile(tmp_path / "trunks")
    trunks = Trunks(file=file)
    fill(trunks, SYSTEM, user("few"), model="m", tags=("prices",))
    fill(trunks, SYSTEM, model="m", tenant="u")
    trunks.save()
    trunks.saw(seen("s8", user("half way"), model="m"), 0.0)
    trunks.saw(seen("s9", user("half way"), model="m"), 0.0)
    gone = trunks.invalidate(what)
    assert gone == (0 if "t" in left else 2) + (0 if "u" in left else 1)
    assert {one.tenant for one in trunks.hot(0.0)} == left
    assert {one.tenant for one in Trunks(file=file).hot(0.0)} == left
    if "t" not in left:
        assert b"few" not in (tmp_path / "trunks").read_bytes()
    trunks.saw(seen("s10", user("half way"), model="m"), 0.0)
    assert user("half way") not in [one.messages[-1] for one in trunks.hot(0.0)]


def test_what_stands_on_something_erased_goes_too() -> None:
    trunks = Trunks()
    fill(trunks, SYSTEM, EXAMPLE)
    trunks.saw(seen("s9", SYSTEM, tags=("prices",)), 0.0)
    assert trunks.invalidate(Invalidation(tags=frozenset({"prices"}))) == 2
    assert (len(trunks), trunks.size_bytes) == (0, 0)


def test_where_the_disk_fails_what_is_erased_isnt_there_either(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    trunks = Trunks(file=TrunkFile(folder / "trunks"))
    fill(trunks, SYSTEM)
    trunks.save()
    (folder / f"trunks.{os.getpid()}.draft").mkdir()  # in the draft's place
    fill(trunks, EXAMPLE)
    with pytest.raises(StoreError):
        trunks.save()
    assert (folder / "trunks").exists()
    with pytest.raises(StoreError):
        trunks.invalidate(Invalidation(tenant="t"))
    assert not (folder / "trunks").exists()
    assert len(trunks) == 0


# the file


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_they_survive_a_restart_with_order_and_counts(secret: bytes, tmp_path: Path) -> None:
    if secret:
        pytest.importorskip("nacl", reason="the extra encrypt isn't installed")
    path = tmp_path / "deep" / "trunks"
    trunks = Trunks(file=TrunkFile(path, secret=secret))
    for number in range(5):
        fill(trunks, SYSTEM, user(f"e{number}"), now=float(number))
    trunks.saw(seen("s9", SYSTEM, user("e0")), 9.0)
    trunks.save()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (b"You help" in path.read_bytes()) is not bool(secret)
    again = Trunks(file=TrunkFile(path, secret=secret), most_age_s=8.5)
    assert again.hot(0.0) == trunks.hot(0.0)
    assert again.size_bytes == trunks.size_bytes
    assert {one.messages[-1]["content"] for one in again.hot(10.0)} == {
        *(SYSTEM["content"], "e0", "e2", "e3", "e4")
    }  # e1 was the oldest


def test_a_sealed_file_needs_its_secret(tmp_path: Path) -> None:
    pytest.importorskip("nacl", reason="the extra encrypt isn't installed")
    path = tmp_path / "trunks"
    trunks = Trunks(file=TrunkFile(path, secret=SECRET))
    fill(trunks, SYSTEM)
    trunks.save()
    with pytest.raises(ConfigError, match="secret"):
        Trunks(file=TrunkFile(path))
    told: list[str] = []
    assert len(Trunks(file=TrunkFile(path, secret=b"another", on_damage=told.append))) == 0
    assert "another secret" in told[0]


def test_turning_encryption_on_keeps_what_is_there(tmp_path: Path) -> None:
    pytest.importorskip("nacl", reason="the extra encrypt isn't installed")
    path = tmp_path / "trunks"
    trunks = Trunks(file=TrunkFile(path))
    fill(trunks, SYSTEM)
    trunks.close()
    sealed = Trunks(file=TrunkFile(path, secret=SECRET))
    sealed.saw(seen("s9", SYSTEM), 1.0)
    sealed.save()
    assert b"You help" not in path.read_bytes()
    assert len(Trunks(file=TrunkFile(path, secret=SECRET))) == 1


@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_file_is_set_aside_and_goes_with_the_next_invalidation(
    harm: str, secret: bytes, tmp_path: Path
) -> None:
    if secret:
        pytest.importorskip("nacl", reason="the extra encrypt isn't installed")
    path = tmp_path / "trunks"
    trunks = Trunks(file=TrunkFile(path, secret=secret))
    fill(trunks, SYSTEM)
    trunks.close()
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[:-5],
            "flip": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
            "empty": b"",
            "foreign": b"something else",
        }[harm]
    )
    told: list[str] = []
    again = Trunks(file=TrunkFile(path, secret=secret, on_damage=told.append))
    assert len(again) == 0
    assert len(told) == 1
    aside = tmp_path / "trunks.damaged"
    assert aside.exists()
    fill(again, EXAMPLE)
    again.save()
    assert len(Trunks(file=TrunkFile(path, secret=secret))) == 1
    again.invalidate(Invalidation(tenant="nobody"))
    assert not aside.exists()
    assert len(again) == 1


def test_of_several_processes_one_writes_and_the_next_goes_on_with_what_it_knew(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trunks"
    first, second = Trunks(file=TrunkFile(path)), Trunks(file=TrunkFile(path))
    fill(first, SYSTEM)
    first.save()
    fill(second, EXAMPLE)
    second.save()  # not its file
    assert b"An example" not in path.read_bytes()
    second.invalidate(Invalidation(tenant="t"))
    assert (len(second), b"You help" in path.read_bytes()) == (0, True)
    fill(second, EXAMPLE)
    first.close()
    second.save()
    assert {one.messages[0]["content"] for one in second.hot(0.0)} == {
        SYSTEM["content"],
        EXAMPLE["content"],
    }
    assert all(text in path.read_bytes() for text in (b"You help", b"An example"))
    second.invalidate(Invalidation(tenant="t"))
    assert b"You help" not in path.read_bytes()


def test_who_was_seen_of_late_is_hotter_than_who_was_seen_often() -> None:
    trunks = Trunks()
    for number in range(20):
        trunks.saw(seen(f"s{number}", SYSTEM), 0.0)
    fill(trunks, EXAMPLE, now=900.0)
    assert [one.messages for one in trunks.hot(900.0)] == [[EXAMPLE], [SYSTEM]]


def test_what_the_router_knows_them_by_counts_too() -> None:
    trunks = Trunks(most_bytes=50_000)
    for number in range(20):
        ids = range(2**64 - 1_000, 2**64)
        text = user(f"{number}")
        fill(trunks, SYSTEM, text, blocks=ids, block_ends=[1, 1_000], now=float(number))
        assert trunks.size_bytes <= 50_000
        assert sum(trunks._sizes.values()) == trunks.size_bytes
    held = [trunk for trunk in trunks.hot(20.0) if len(trunk.blocks) == 1_000]
    assert 4 <= len(held) <= 6, "8 KB each, and a little for the text"
    assert max(map(max, trunks._blocks.values())) == 2**64 - 1
    fill(trunks, SYSTEM, user("19"), blocks=[1, 2], block_ends=[1, 2], now=20.0)
    trunks.invalidate(Invalidation())
    assert (len(trunks), trunks.size_bytes) == (0, 0)


def test_a_trunk_tells_the_blocks_by_which_the_router_knows_it() -> None:
    trunks = Trunks()
    fill(trunks, SYSTEM, EXAMPLE, blocks=[7, 8, 9, 10], block_ends=[1, 3, 4])
    (trunk,) = trunks.hot(0.0)
    assert (trunk.messages, trunk.blocks) == ([SYSTEM, EXAMPLE], (7, 8, 9))
    trunks.invalidate(Invalidation(tenant="t"))
    assert trunks.hot(0.0) == []


def news(number: int, *voids: int, generation: str = "g", floor: int = 0) -> News:
    """As a board tells it to who has just come: invalidations of tenants t1, t2, …"""
    told = tuple((one, Invalidation(tenant=f"t{one}")) for one in voids)
    return News(Epoch(generation, number), told, is_all=True, floor=floor)


def test_what_was_invalidated_while_nobody_ran_is_erased_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "trunks"
    trunks = Trunks(file=TrunkFile(path))
    assert trunks.catch_up(news(2, 1, 2)) == 0
    for number in range(1, 5):
        fill(trunks, SYSTEM, tenant=f"t{number}")
    trunks.close()
    again = Trunks(file=TrunkFile(path))
    assert again.catch_up(news(4, 1, 2, 3, 4)) == 2  # it was learned after the first two
    assert {one.tenant for one in again.hot(0.0)} == {"t1", "t2"}
    assert {row.tenant for row in TrunkFile(path).read().rows} == {"t1", "t2"}
    assert again.catch_up(news(4, 1, 2, 3, 4)) == 0


@pytest.mark.parametrize("lost", [{"generation": "another"}, {"floor": 3}])
def test_where_the_record_is_lost_all_goes(lost: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "trunks"
    trunks = Trunks(file=TrunkFile(path))
    trunks.catch_up(news(2))
    fill(trunks, SYSTEM)
    trunks.close()
    again = Trunks(file=TrunkFile(path))
    assert again.catch_up(news(5, **lost)) == 1
    assert TrunkFile(path).read().rows == []
