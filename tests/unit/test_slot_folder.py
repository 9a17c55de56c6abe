"""The folder of slot files: what is found, what goes first, what is refused. No server here."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from preheat.core.slot_desk import Holding
from preheat.engines.slot_folder import SlotFolder
from preheat.engines.slot_names import Kept
from preheat.engines.slot_seats import SlotFolders, SlotRules
from preheat.errors import ConfigError

ONE, OTHER = "1" * 32, "2" * 32
PLENTY = 2**40


def folder_of(
    path: Path,
    *,
    identity: str = ONE,
    secret: bytes = b"s",
    budget: int = 1_000,
    age_s: float = 99.0,
) -> SlotFolder:
    folder = SlotFolder(
        path,
        identity=identity,
        secret=secret,
        budget_bytes=budget,
        max_age_s=age_s,
        free_bytes=lambda _: PLENTY,
    )
    folder.open(0.0)
    return folder


def written(folder: SlotFolder, holding: Holding, *, size: int = 100, now: float = 1.0) -> Kept:
    """As a server would."""
    part = folder.begin(size, now)
    assert part is not None
    (folder.path / part).write_bytes(os.urandom(size))
    kept = folder.finish(part, holding, size, now)
    assert isinstance(kept, Kept)
    return kept


def talk(session: str, *blocks: int, tenant: str = "t") -> Holding:
    return Holding(tenant, session, list(blocks), 10 * len(blocks))


def names(folder: SlotFolder) -> set[str]:
    return {path.name for path in folder.path.iterdir()}


def test_files_are_nobody_elses_and_their_names_tell_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    path.mkdir(mode=0o755)
    folder = folder_of(path)
    kept = written(folder, talk("session-7", 0xABCDEF, 0x123456))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / kept.name).stat().st_mode) == 0o600
    assert names(folder) == {kept.name}
    assert "123456" not in kept.name
    assert kept.name.startswith(ONE)


def test_the_longest_beginning_is_found_and_only_for_its_tenant(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    trunk = written(folder, talk("", 1, 2))
    longer = written(folder, talk("a", 1, 2, 3))
    assert folder.find("t", [1, 2, 3, 4]) is longer
    assert folder.find("t", [1, 2, 9, 9]) is trunk
    assert folder.find("t", [1]) is None
    assert folder.find("other", [1, 2, 3, 4]) is None


def test_a_later_turn_takes_the_place_of_earlier_ones_of_its_session(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    trunk = written(folder, talk("", 1))
    elsewhere = written(folder, talk("b", 1, 2))
    written(folder, talk("a", 1, 2, 3))
    last = written(folder, talk("a", 1, 2, 3, 4))
    assert names(folder) == {trunk.name, last.name, elsewhere.name}
    parted = written(folder, talk("a", 1, 9, 9, 9, 9))  # the client went back to an earlier turn
    assert names(folder) == {trunk.name, last.name, elsewhere.name, parted.name}


def test_a_new_process_finds_what_the_old_one_left_newest_first(tmp_path: Path) -> None:
    before = folder_of(tmp_path)
    for number, at in ((1, 30.0), (2, 10.0), (3, 20.0)):
        kept = written(before, talk(f"s{number}", number), now=at)
        before.used(kept, at)
    before.over("t", "s3")
    (tmp_path / f"part-{'a' * 16}.kv").write_bytes(b"never finished")
    (tmp_path / "somebody-elses.kv").write_bytes(b"not ours")
    after = folder_of(tmp_path)
    assert [after.find("t", [number]) for number in (1, 2)] == after.newest()
    assert after.find("t", [3]) is not None
    assert "somebody-elses.kv" in names(after)
    assert f"part-{'a' * 16}.kv" not in names(after)
    assert after.newest()[0].tokens == 10
    assert not after.newest()[0].is_checked
    assert folder_of(tmp_path, secret=b"another").find("t", [1]) is None


def test_sessions_that_are_over_go_first_then_the_one_used_longest_ago(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, budget=400)
    kept = [written(folder, talk(f"s{n}", n), now=float(n)) for n in (1, 2, 3, 4)]
    folder.over("t", "s3")
    folder.used(kept[0], 5.0)
    written(folder, talk("s6", 6), now=6.0)
    assert folder.find("t", [3]) is None
    written(folder, talk("s7", 7), now=7.0)
    assert folder.find("t", [2]) is None
    assert folder.find("t", [1]) is kept[0]
    assert folder.size_bytes == 400


def test_files_of_another_model_are_never_found_and_go_first(tmp_path: Path) -> None:
    other = folder_of(tmp_path, identity=OTHER)
    written(other, talk("a", 1), now=50.0)
    folder = folder_of(tmp_path, budget=200)
    assert folder.find("t", [1]) is None
    mine = written(folder, talk("b", 1), now=1.0)
    assert folder.size_bytes == 200
    written(folder, talk("c", 2), now=2.0)
    assert folder.find("t", [1]) is mine
    assert all(name.startswith(ONE) for name in names(folder))


def test_what_is_too_old_goes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, age_s=10.0)
    written(folder, talk("a", 1), now=1.0)
    assert folder.begin(1, 12.0) is not None
    assert folder.find("t", [1]) is None
    assert names(folder) == set()


def test_where_there_is_no_room_nothing_is_begun(tmp_path: Path) -> None:
    assert folder_of(tmp_path, budget=50).begin(51, 0.0) is None
    full = SlotFolder(
        tmp_path,
        identity=ONE,
        secret=b"s",
        budget_bytes=1_000,
        max_age_s=9.0,
        free_bytes=lambda _: 2**20,
    )
    full.open(0.0)
    assert full.begin(1, 0.0) is None


def test_a_full_disk_costs_old_files_not_the_new_one(tmp_path: Path) -> None:
    folder = SlotFolder(
        tmp_path,
        identity=ONE,
        secret=b"s",
        budget_bytes=10_000,
        max_age_s=99.0,
        free_bytes=lambda path: 2**28 + 250 - sum(one.stat().st_size for one in path.iterdir()),
    )
    folder.open(0.0)
    for number in (1, 2, 3):
        written(folder, talk(f"s{number}", number), now=float(number))
    assert [folder.find("t", [number]) is not None for number in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize("harm", ["cut", "flip", "gone", "link"])
def test_a_damaged_file_is_noticed_and_deleted(tmp_path: Path, harm: str) -> None:
    written(folder_of(tmp_path / "s"), talk("a", 1))
    folder = folder_of(tmp_path / "s")  # a new process: it has checked nothing yet
    kept = folder.find("t", [1])
    assert kept is not None
    path = folder.path / kept.name
    content = path.read_bytes()
    path.unlink()
    if harm == "cut":
        path.write_bytes(content[:-1])
    elif harm == "flip":
        path.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
    elif harm == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    assert not folder.is_whole(kept)
    assert folder.find("t", [1]) is None
    assert names(folder) == set()


def test_a_whole_file_is_whole_and_read_once(tmp_path: Path) -> None:
    written(folder_of(tmp_path), talk("a", 1))
    folder = folder_of(tmp_path)
    kept = folder.find("t", [1])
    assert kept is not None
    assert folder.is_whole(kept)
    assert kept.is_checked
    assert folder.is_whole(kept)


def test_what_the_server_wrote_otherwise_or_elsewhere_isnt_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    part = folder.begin(10, 0.0)
    assert part is not None
    assert folder.finish(part, talk("a", 1), 10, 0.0) == "elsewhere"
    (tmp_path / part).write_bytes(b"short")
    assert folder.finish(part, talk("a", 1), 10, 0.0) == "changed"
    folder.abandon(part)
    assert names(folder) == set()


def test_what_comes_after_it_was_given_up_is_swept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    part = folder.begin(10, 0.0)
    assert part is not None
    folder.abandon(part)
    (tmp_path / part).write_bytes(b"late")
    folder.begin(10, 0.0)
    assert names(folder) == set()


def test_a_tenant_or_a_session_is_erased(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    written(folder, talk("a", 1))
    written(folder, talk("b", 2))
    theirs = written(folder, talk("a", 1, tenant="u"))
    assert folder.erase("t", "a") == 1
    assert folder.find("t", [1]) is None
    assert folder.erase("t") == 1
    assert names(folder) == {theirs.name}


def test_one_file_that_cant_be_deleted_keeps_no_other_and_is_tried_again(tmp_path: Path) -> None:
    rules = SlotRules((str(tmp_path / "one"), str(tmp_path / "two")))
    folders = SlotFolders(rules)
    opened = [folders.opened(Path(path), ONE) for path in rules.folders]
    stuck = written(opened[0], talk("a", 1))
    written(opened[0], talk("b", 2))
    written(opened[1], talk("a", 1))
    (opened[0].path / stuck.name).unlink()
    (opened[0].path / stuck.name).mkdir()  # in the file's place: it can't be unlinked
    for _ in range(2):
        with pytest.raises(ConfigError, match="can't be deleted"):
            folders.erase("t")
        assert [names(one) for one in opened] == [{stuck.name}, set()]
    (opened[0].path / stuck.name).rmdir()
    assert folders.erase("t") == 1
    assert opened[0].find("t", [1]) is None


def test_a_folder_that_cant_be_is_the_operators_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="can't hold slot files"):
        folder_of(tmp_path / "file")
    everybodys = tmp_path / "tmp"
    everybodys.mkdir()
    everybodys.chmod(0o1777)
    with pytest.raises(ConfigError, match="everybody's"):
        folder_of(everybodys)
    assert stat.S_IMODE(everybodys.stat().st_mode) == 0o1777, "left as it was"


def test_servers_that_open_their_folder_at_once_have_the_same_one(tmp_path: Path) -> None:
    barrier = Barrier(8)

    def opened(folders: SlotFolders) -> SlotFolder:
        barrier.wait()
        return folders.opened(tmp_path, ONE)

    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            folders = SlotFolders(SlotRules((str(tmp_path),), secret=b"s"))
            found = list(threads.map(opened, [folders] * 8))
            assert len({id(one) for one in found}) == 1
