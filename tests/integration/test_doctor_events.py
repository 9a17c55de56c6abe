"""`preheat doctor URL… --events ENDPOINT…`: what KV events tell, and why they don't come."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ports import free_port

pytest.importorskip("zmq", reason="KV events need pyzmq")

from doctor_asked import Examine, remarks
from engines_faked import Engine, as_events
from kv_engine import Publisher
from preheat.lab.diagnosis import events

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Examine:
    monkeypatch.setattr(events, "_MEET_S", 1.0)  # here both sides are on one machine
    monkeypatch.setattr(events, "_TOLD_S", 1.5)
    return Examine(capsys)


@contextmanager
def told(engine: Engine, *, binds: bool = True, **form: bool) -> Iterator[int]:
    """The port at which its events are published."""
    port = free_port()
    publisher = Publisher(f"tcp://127.0.0.1:{port}", binds=binds)
    engine.publish = lambda batch: publisher.publish(as_events(batch, **form))
    try:
        yield port
    finally:
        publisher.close()


@pytest.mark.parametrize("form", [{}, {"is_map": False, "is_bytes": False}])
def test_events_that_come_are_as_they_should_be(form: dict[str, bool], examine: Examine) -> None:
    with told(engine := Engine(), **form) as port:
        found = examine.one(engine, "--events", f"tcp://*:{port}")
    assert remarks(found) == {}
    assert ("maps" if not form else "arrays") in found["events"]["found"]


def test_events_of_a_publisher_that_connects_come_too(examine: Examine) -> None:
    with told(engine := Engine(), binds=False) as port:
        found = examine.one(engine, "--events", f"tcp://127.0.0.1:{port}")
    assert remarks(found) == {}


@pytest.mark.parametrize(("binds", "host"), [(True, "127.0.0.1"), (False, "*")])
def test_the_wrong_side_is_found(binds: bool, host: str, examine: Examine) -> None:
    with told(engine := Engine(), binds=binds) as port:
        found = examine.one(engine, "--events", f"tcp://{host}:{port}")
    assert remarks(found) == {"events-wrong-side": "problem"}
    assert f"tcp://*:{port}" in found["events-wrong-side"]["do"]


def test_an_endpoint_of_another_host_is_the_wrong_side(examine: Examine) -> None:
    found = examine.one(Engine(), "--events", f"tcp://192.0.2.1:{free_port()}")
    assert remarks(found) == {"events-wrong-side": "problem"}


def test_events_that_are_off_and_a_publisher_that_says_nothing_are_found(examine: Examine) -> None:
    found = examine.one(Engine(), "--events", f"tcp://*:{free_port()}")
    assert remarks(found) == {"events-off": "problem"}
    assert "enable_kv_cache_events" in found["events-off"]["do"]
    with told(Engine()) as port:
        assert remarks(examine.one(Engine(), "--events", f"tcp://*:{port}")) == {
            "events-silent": "problem"
        }


def test_no_endpoint_at_all_is_said(examine: Examine) -> None:
    found = examine.one(Engine(), "--events", "5557")
    assert "isn't an endpoint" in found["events"]["found"]


def test_a_salt_that_something_adds_is_found(examine: Examine) -> None:
    with told(engine := Engine(adds_salt=True)) as port:
        found = examine.one(engine, "--events", f"tcp://*:{port}")
    assert remarks(found) == {"no-reuse": "problem", "salt-added": "problem"}
    assert "a salt" in found["verdict"]


def test_what_is_published_by_another_engine_is_found(examine: Examine) -> None:
    other = Engine(dialect="llama3")

    def echo(_: Any) -> None:
        text = f"{other.computed} ships " * 200
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        other.answer("POST", "/v1/chat/completions", body)

    with told(other) as port:
        found = examine.one(Engine(publish=echo), "--events", f"tcp://*:{port}")
    assert remarks(found) == {"events-foreign": "problem"}


def test_what_is_no_event_is_found(examine: Examine) -> None:
    port = free_port()
    publisher = Publisher(f"tcp://127.0.0.1:{port}")
    with contextlib.closing(publisher):
        engine = Engine(publish=lambda _: publisher.publish(b"\xc1"))
        found = examine.one(engine, "--events", f"tcp://*:{port}")
    assert remarks(found) == {"events-unreadable": "problem"}


@pytest.mark.parametrize(
    ("one", "other", "form", "expected"),
    [
        (Engine(), Engine(), {}, {}),
        (Engine(), Engine(seed="1"), {}, {"hash-seed": "warning"}),
        (
            Engine(algorithm="xxhash"),
            Engine(algorithm="xxhash", seed="1"),
            {},
            {"hash-seed": "warning"},
        ),
        (Engine(), Engine(), {"is_map": False}, {"event-format": "warning"}),
        (Engine(), Engine(), {"is_bytes": False}, {"event-format": "warning"}),
    ],
)
def test_hashes_and_forms_of_two_servers_are_compared(
    one: Engine, other: Engine, form: dict[str, bool], expected: dict[str, str], examine: Examine
) -> None:
    with told(one) as first, told(other, **form) as second:
        events = ("--events", f"tcp://*:{first}", "--events", f"tcp://*:{second}")
        found = examine.pair(one, other, *events)
    assert remarks(found) == expected
    if "hash-seed" in expected:
        assert "PYTHONHASHSEED" in found["hash-seed"]["do"]
        assert one.algorithm in found["hash-seed"]["found"]
