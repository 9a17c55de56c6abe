"""The gateway learns what sessions begin with, beside their requests, and forgets it when it is told."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Fake, Gateway, running
from redis_server import RedisServer

pytestmark = pytest.mark.timeout(60)

KEY = "0123456789abcdef0123456789abcdef"
SYSTEM = "You help with orders, zq-shared-by-all. " * 20


def ask(served: Gateway, session: str, system: str = SYSTEM, **headers: str) -> None:
    body = {
        "model": "m1",
        "temperature": 0,
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": f"zq-own-of-{session}"},
        ],
    }
    reply = served.post("/v1/chat/completions", body, {"X-Preheat-Session": session, **headers})
    assert reply.status == 200, reply.body


def metric(served: Gateway, name: str) -> float:
    lines = served.get("/metrics").body.decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def until(condition: Callable[[], object]) -> None:
    ends_at = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


def test_text_that_three_sessions_share_is_kept_and_erased_from_the_disk(
    fake: Fake, tmp_path: Path
) -> None:
    file = tmp_path / "preheat" / "trunks"
    settings = '[trunks]\nkeep = "file"\n'
    served = Gateway(
        settings, upstream=fake.url, folder=tmp_path, environment={"XDG_CACHE_HOME": str(tmp_path)}
    )
    with running(served):
        for session in ("s1", "s2"):
            ask(served, session)
        ask(served, "s3", "zq-not-to-be-stored" * 20, **{"Cache-Control": "no-store"})
        time.sleep(0.6)
        assert metric(served, "preheat_trunks_messages") == 0
        ask(served, "s3")
        until(lambda: metric(served, "preheat_trunks_messages") == 1)
        assert metric(served, "preheat_trunks_bytes") > len(SYSTEM)
    kept = file.read_bytes()
    assert b"zq-shared-by-all" in kept
    assert b"zq-own-of" not in kept
    assert file.stat().st_mode & 0o077 == 0
    again = Gateway(
        settings, upstream=fake.url, folder=tmp_path, environment={"XDG_CACHE_HOME": str(tmp_path)}
    )
    with running(again):
        assert metric(again, "preheat_trunks_messages") == 1
        reply = again.post("/preheat/v1/invalidate", {"tenant": "local", "dry_run": True})
        assert reply.status == 200
        assert b"zq-shared-by-all" in file.read_bytes()
        assert again.post("/preheat/v1/invalidate", {"tenant": "local"}).status == 200
        assert b"zq-shared-by-all" not in file.read_bytes()
        assert metric(again, "preheat_trunks_messages") == 0
        until(lambda: '"event":"trunks-erased","messages":1' in again.stderr)
    assert '"event":"bug"' not in served.stderr + again.stderr


def test_with_several_worker_processes_each_forgets_and_one_writes(
    fake: Fake, tmp_path: Path
) -> None:
    pytest.importorskip("nacl", reason="the extra encrypt isn't installed")
    served = Gateway(
        '[trunks]\nkeep = "file"\nkey_env = "TRUNKS"\n',
        "--workers",
        "2",
        upstream=fake.url,
        folder=tmp_path,
        environment={"XDG_CACHE_HOME": str(tmp_path), "TRUNKS": KEY},
    )
    file = tmp_path / "preheat" / "trunks"
    with running(served):

        def learned() -> bool:
            for number in range(12):  # connections are spread over both
                ask(served, f"s{time.monotonic()}-{number}")
            return metric(served, "preheat_trunks_messages") == 2

        until(learned)
        until(file.exists)
        assert b"zq-shared" not in file.read_bytes()
        size_bytes = file.stat().st_size
        assert served.post("/preheat/v1/invalidate", {"model": "m1"}).status == 200
        assert metric(served, "preheat_trunks_messages") == 0
        assert file.stat().st_size < size_bytes - len(SYSTEM)
    assert '"event":"bug"' not in served.stderr


def test_nothing_is_kept_where_that_is_off(fake: Fake, tmp_path: Path) -> None:
    served = Gateway('[trunks]\nkeep = "off"\n', upstream=fake.url, folder=tmp_path)
    with running(served):
        for session in ("s1", "s2", "s3"):
            ask(served, session)
        assert "preheat_trunks_messages" not in served.get("/metrics").body.decode()


def test_what_another_gateway_invalidates_while_this_one_is_away_is_erased_at_its_start(
    fake: Fake, tmp_path: Path
) -> None:
    folders = [tmp_path / "here", tmp_path / "there"]
    settings = '[exact]\nsecret_env = "SECRET"\n[trunks]\nkeep = "file"\n[l2]\nkind = "redis"\n'

    def started(folder: Path) -> Gateway:
        folder.mkdir(exist_ok=True)
        environment = {"XDG_CACHE_HOME": str(folder), "SECRET": KEY}
        toml = f'{settings}url = "{server.url}"\ntimeout_s = 0.5\n'
        return Gateway(toml, upstream=fake.url, folder=folder, environment=environment)

    with RedisServer() as server:
        here = started(folders[0])
        with running(here):
            for session in ("s1", "s2", "s3"):
                ask(here, session)
            until(lambda: metric(here, "preheat_trunks_messages") == 1)
        file = folders[0] / "preheat" / "trunks"
        assert b"zq-shared-by-all" in file.read_bytes()
        there = started(folders[1])
        with running(there):
            assert there.post("/preheat/v1/invalidate", {"tenant": "local"}).status == 200
        assert b"zq-shared-by-all" in file.read_bytes()
        again = started(folders[0])
        with running(again):
            until(lambda: b"zq-shared-by-all" not in file.read_bytes())
            for session in ("s1", "s2", "s3"):
                ask(again, session, SYSTEM + "once more")
            until(lambda: metric(again, "preheat_trunks_messages") == 1)
        later = started(folders[0])
        with running(later):
            time.sleep(0.6)
            assert metric(later, "preheat_trunks_messages") == 1  # learned since
        for served in (here, there, again, later):
            assert '"event":"bug"' not in served.stderr
