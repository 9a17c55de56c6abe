"""L2 in LMDB, through two real workers under load: whatever befalls the files, no request fails."""

import contextlib
import http.client
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from comparison import Comparison, shown
from crowd import wait_for
from harness import Fake, Gateway, chat, running

CHAT = "/v1/chat/completions"
BEFORE_S, AFTER_S = 0.25, 0.005
"""What a request may take longer until the breaker opens, and from then on."""

# A process of its own that holds the write locks of both environments.
HOLDER = """
import sys, lmdb
held = [
    lmdb.open(f"{sys.argv[1]}/{name}", map_size=2**40, create=False, sync=False).begin(write=True)
    for name in ("values", "board")
]
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _clean(fake: Fake) -> None:
    fake.reset()


@contextlib.contextmanager
def served(fake: Fake, home: Path, folder: Path | None) -> Iterator[Gateway]:
    """Two workers with their L2 in that folder, or without one."""
    home.mkdir(exist_ok=True)
    path = (
        f'path = "{folder}"\nbytes = 67108864\nbreaker_open_s = 1.0' if folder else 'kind = "off"'
    )
    toml = f'[listen]\nworkers = 2\n[l2]\n{path}\n[engines.up]\nurl = "{fake.url}"\n'
    gateway = Gateway(toml, folder=home)
    with running(gateway):
        yield gateway
    assert '"event":"bug"' not in gateway.stderr, gateway.stderr
    assert "Traceback" not in gateway.stderr, gateway.stderr


@contextlib.contextmanager
def compared(fake: Fake, tmp_path: Path, folder: Path) -> Iterator[tuple[Gateway, Comparison]]:
    with (
        served(fake, tmp_path / "tested", folder) as tested,
        served(fake, tmp_path / "plain", None) as plain,
    ):
        with Comparison(tested, plain) as comparison:
            yield tested, comparison
        assert comparison.failures == []
        assert comparison.answered > 100


@contextlib.contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A stopped process that holds both write locks."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"held\n"
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


def stores(gateway: Gateway) -> bool:
    """Whether an answer arrives in L2."""
    before = gateway.stats["l2"]["events"].get("put", 0)
    for number in range(4):
        gateway.post(CHAT, chat(f"stored? {number} {time.monotonic()}"))
    time.sleep(0.05)
    return bool(gateway.stats["l2"]["events"].get("put", 0) >= before + 4)


def assert_cheap(name: str, comparison: Comparison) -> None:
    first, rest = comparison.added_s(20), comparison.added_s(150)
    print(shown(f"{name}, first", first))
    print(shown(f"{name}, then", rest))
    assert max(first) <= BEFORE_S
    assert statistics.median(rest) <= AFTER_S


def test_without_a_fault_it_costs_little(fake: Fake, tmp_path: Path) -> None:
    with compared(fake, tmp_path, tmp_path / "l2") as (gateway, comparison):
        assert_cheap("well", comparison)
        assert stores(gateway)


def test_a_stopped_process_that_holds_the_write_locks(fake: Fake, tmp_path: Path) -> None:
    folder = tmp_path / "l2"
    with compared(fake, tmp_path, folder) as (gateway, comparison):
        assert stores(gateway)
        with holder(folder):
            assert_cheap("locked", comparison)
            refused = gateway.post("/preheat/v1/invalidate", {"model": "none"})
            assert (refused.status, refused.json["error"]["code"]) == (503, "store-unreachable")
        wait_for(lambda: stores(gateway))


def test_a_stopped_process_that_holds_the_write_locks_at_the_start(
    fake: Fake, tmp_path: Path
) -> None:
    folder = tmp_path / "l2"
    with served(fake, tmp_path / "before", folder) as gateway:
        assert stores(gateway)
    with holder(folder), served(fake, tmp_path / "during", folder) as gateway:
        for number in range(20):
            assert gateway.post(CHAT, chat(f"locked {number}")).status == 200


def test_a_folder_that_is_removed(fake: Fake, tmp_path: Path) -> None:
    folder = tmp_path / "l2"
    with compared(fake, tmp_path, folder) as (gateway, comparison):
        assert stores(gateway)
        shutil.rmtree(folder)
        assert_cheap("removed", comparison)
        wait_for(lambda: folder.is_dir() and stores(gateway))


@pytest.mark.parametrize("name", ["values", "board"])
def test_a_file_that_is_overwritten(fake: Fake, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "l2"
    with compared(fake, tmp_path, folder) as (gateway, comparison):
        assert stores(gateway)
        with (folder / name / "data.mdb").open("r+b") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            file.seek(8192)
            file.write(b"\xa5" * (size_bytes - 8192))
        assert_cheap(f"{name} overwritten", comparison)
        wait_for(lambda: stores(gateway), within_s=20)


@pytest.mark.parametrize("name", ["values", "board"])
def test_a_file_that_is_cut_short_costs_no_more_than_the_workers_that_read_it(
    fake: Fake, tmp_path: Path, name: str
) -> None:
    """Reading mapped pages that aren't there ends a process: the one damage that can't be a miss."""
    folder = tmp_path / "l2"
    with served(fake, tmp_path / "tested", folder) as gateway:
        for number in range(50):
            gateway.post(CHAT, chat(f"{number}"))
        assert stores(gateway)
        os.truncate(folder / name / "data.mdb", 8192)
        lost, well = 0, 0
        give_up_at = time.monotonic() + 30
        while well < 100:
            assert time.monotonic() < give_up_at
            try:
                assert gateway.post(CHAT, chat(f"{well}")).status == 200
                well += 1
            except (OSError, http.client.HTTPException):
                lost, well = lost + 1, 0
        assert lost <= 4
        wait_for(lambda: stores(gateway), within_s=20)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of that size, at the folder; skips where this isn't allowed."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
        timeout=10,
    )
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


@pytest.mark.parametrize("when", ["before the start", "under load"])
def test_a_full_disk(fake: Fake, tmp_path: Path, when: str) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "8m"):
        filler = disk / "filler"
        if when == "before the start":
            with served(fake, tmp_path / "before", disk / "l2"):
                pass  # so that it has its secret
            for name in ("values", "board"):
                shutil.rmtree(disk / "l2" / name)
            fill(filler)
        with compared(fake, tmp_path, disk / "l2") as (gateway, comparison):
            if when == "under load":
                assert stores(gateway)
                fill(filler)
            fake.script(default={"content": "x" * 20_000})
            assert_cheap("full disk", comparison)
            filler.unlink()
            wait_for(lambda: stores(gateway), within_s=20)


def fill(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as out:
        while True:
            out.write(bytes(4096))
