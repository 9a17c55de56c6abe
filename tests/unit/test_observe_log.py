"""A log that is followed: growing, rotated, cut, piped; what a line says; in which order it is taken."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from preheat.errors import TraceError
from preheat.lab.observe import tail
from preheat.lab.observe.lines import Names, read_line
from preheat.lab.observe.settling import Settling
from preheat.lab.observe.tail import FileTail, Line, PipeTail


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def several(source: FileTail | PipeTail, looks: int = 8) -> list[tuple[int, str | None]]:
    found: list[Line] = []
    for _ in range(looks):
        found += source.read()
    return [(one.number, None if one.data is None else one.data.decode()) for one in found]


Follow = Callable[..., FileTail]


@pytest.fixture
def follow() -> Iterator[Follow]:
    with ExitStack() as stack:

        def begin(path: Path, **how: bool) -> FileTail:
            source = FileTail(path, **how)
            stack.callback(source.close)
            return source

        yield begin


# Lines as they come


def test_a_file_is_read_as_it_grows_and_a_line_only_when_it_is_whole(
    tmp_path: Path, follow: Follow
) -> None:
    path = tmp_path / "log"
    path.write_text("a\nb\nhal")
    source = follow(path)
    assert several(source) == [(1, "a"), (2, "b")]
    append(path, "f\nc\n")
    assert several(source) == [(3, "half"), (4, "c")]
    assert several(source) == []
    assert not source.is_over


def test_once_ends_at_the_end_with_what_has_no_newline(tmp_path: Path, follow: Follow) -> None:
    path = tmp_path / "log"
    path.write_text("a\nb")
    source = follow(path, once=True)
    assert several(source, 1) == [(1, "a")]
    assert several(source, 1) == [(2, "b")]
    assert source.is_over


def test_from_the_end_only_what_is_new_is_read_under_its_own_number(
    tmp_path: Path, follow: Follow
) -> None:
    path = tmp_path / "log"
    path.write_text("a\nb\nhal")
    source = follow(path, from_end=True)
    append(path, "f\nc\n")
    assert several(source) == [(3, "half"), (4, "c")]


def test_after_a_rotation_the_rest_of_the_old_file_comes_before_the_new_one(
    tmp_path: Path, follow: Follow
) -> None:
    path, old = tmp_path / "log", tmp_path / "log.1"
    path.write_text("a\n")
    source = follow(path)
    assert several(source) == [(1, "a")]
    path.rename(old)
    assert several(source) == []  # no new one is there yet
    append(old, "b\n")
    path.write_text("c\nd\n")
    append(old, "e")  # the writer has noticed only now
    assert several(source, 12) == [(2, "b"), (3, "e"), (1, "c"), (2, "d")]
    append(path, "f\n")
    assert several(source) == [(3, "f")]


def test_a_file_that_was_cut_is_read_from_its_start(tmp_path: Path, follow: Follow) -> None:
    path = tmp_path / "log"
    path.write_text("a\nbbbbbbbb\n")
    source = follow(path)
    several(source)
    path.write_text("c\n")
    assert several(source) == [(1, "c")]
    append(path, "d\n")
    assert several(source) == [(2, "d")]


def test_a_line_that_is_too_long_is_passed_over_and_said(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "MOST_LINE_BYTES", 10)
    monkeypatch.setattr(tail, "_READ_BYTES", 8)
    path = tmp_path / "log"
    path.write_text("a\n" + "x" * 100 + "\nb\n")
    assert several(follow(path), 40) == [(1, "a"), (2, None), (3, "b")]


def test_a_file_that_is_not_there_is_said(tmp_path: Path, follow: Follow) -> None:
    with pytest.raises(TraceError, match=r"can't read .*none: No such file"):
        FileTail(tmp_path / "none")


def test_a_pipe_is_read_until_its_other_end_is_closed() -> None:
    reading, writing = os.pipe()
    source = PipeTail(reading)
    assert source.read() == []
    os.write(writing, b"a\nb")
    found: list[tuple[int, str | None]] = []
    wait_until(lambda: found.extend(several(source)) or found)
    assert found == [(1, "a")]
    os.close(writing)
    wait_until(lambda: found.extend(several(source)) or source.is_over)
    assert found == [(1, "a"), (2, "b")]
    os.close(reading)


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# What a line says


MESSAGES = [{"role": "system", "content": "rules " * 300}, {"role": "user", "content": "why?"}]
USAGE = {
    "prompt_tokens": 460,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 448},
}


def line(**fields: Any) -> bytes:
    return json.dumps(
        {"timestamp": 1_700_000_000, "request": {"model": "m", "messages": MESSAGES}, **fields}
    ).encode()


def test_a_line_without_its_text() -> None:
    record = read_line(
        line(api_base="http://gpu-1:8000/v1", response={"usage": USAGE}, latency_ms=250)
    )
    seen = record.seen
    assert (seen.at, seen.worker, seen.model) == (1.7e9, "http://gpu-1:8000/v1", "m")
    assert (seen.input_tokens, seen.output_tokens, seen.cached_tokens) == (460, 5, 448)
    assert (seen.ttft_s, seen.service_s, seen.is_failed) == (-1, 0.25, False)
    assert len(seen.blocks) == seen.prompt_bytes // 512 == 3
    assert record.sighting is not None
    assert record.sighting.messages == MESSAGES
    assert "rules" not in msgspec.json.encode(seen).decode()


def test_white_space_and_the_order_of_fields_do_not_matter() -> None:
    spaced = json.dumps({"messages": [dict(reversed(one.items())) for one in MESSAGES]}, indent=2)
    tight = json.dumps({"messages": MESSAGES}, separators=(",", ":"))
    one, other = (read_line(b'{"body": %b}' % text.encode()).seen for text in (spaced, tight))
    assert one.blocks == other.blocks != []


def test_salts_and_models_share_nothing() -> None:
    bodies = [{}, {"model": "n"}, {"cache_salt": "t"}]
    heads = {
        read_line(line(request={"model": "m", "messages": MESSAGES, **one})).seen.blocks[0]
        for one in bodies
    }
    assert len(heads) == 3


@pytest.mark.parametrize(
    ("fields", "input_tokens", "cached_tokens"),
    [
        ({"response": {"usage": {"prompt_tokens": 9}}}, 9, None),
        ({"usage": USAGE}, 460, 448),
        ({"response": {"usage": {"input_tokens": 4, "cache_read_input_tokens": 90}}}, 94, 90),
        (
            {
                "response": {
                    "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}}
                }
            },
            *(9, 0),
        ),
        ({"response": {"usage": {"prompt_tokens": 9}, "timings": {"cache_n": 8}}}, 9, 8),
        ({"response": {"usage": {"prompt_tokens_details": {"cached_tokens": "many"}}}}, -1, None),
        ({"response": "not an object"}, -1, None),
    ],
)
def test_cached_tokens_as_servers_and_logs_spell_them(
    fields: dict[str, Any], input_tokens: int, cached_tokens: int | None
) -> None:
    seen = read_line(line(**fields)).seen
    assert (seen.input_tokens, seen.cached_tokens) == (input_tokens, cached_tokens)


def test_litellm_says_who_answered_and_what_was_cached() -> None:
    payload = {
        "id": "1",
        "call_type": "acompletion",
        "startTime": 1_700_000_000.0,
        "endTime": 1_700_000_002.0,
        "completionStartTime": 1_700_000_001.0,
        "model": "m",
        "messages": MESSAGES,
        "prompt_tokens": 460,
        "completion_tokens": 5,
        "hidden_params": {"api_base": "http://gpu-2:8000"},
        "metadata": {"usage_object": USAGE},
    }
    for spelled in (payload, {"standard_logging_object": payload}):
        seen = read_line(json.dumps(spelled).encode()).seen
        assert (seen.worker, seen.cached_tokens) == ("http://gpu-2:8000", 448)
        assert (seen.ttft_s, seen.service_s) == (1.0, 2.0)


def test_a_field_can_be_named_that_says_who_answered() -> None:
    data = line(response={"headers": {"x-served-by": "b"}}, worker="other")
    assert read_line(data, "response.headers.x-served-by").seen.worker == "b"
    assert read_line(data, "response.nothing").seen.worker == ""
    assert read_line(data, "nothing").seen.worker == ""


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        b"[1]",
        b"{}",
        b'{"request": {"model": "m"}}',
        b'{"custom_id": "1", "response": {"status_code": 200}}',
        b'{"messages": [{"role": "user", "content": "secret"}], "timestamp": "tomorrow"}',
        b'{"messages": "\xff"}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_request_is_refused_and_never_quoted(data: bytes) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError, RecursionError)) as refused:
        read_line(data)
    assert "secret" not in str(refused.value)


def test_failed_requests_and_prompts_without_messages() -> None:
    assert read_line(line(status=503)).seen.is_failed
    record = read_line(line(request={"model": "m", "prompt": "x" * 2_000}))
    assert record.sighting is None
    assert len(record.seen.blocks) == 3
    system = {"model": "m", "system": "x", "messages": MESSAGES}
    assert read_line(line(request=system)).sighting is None  # a trunk has no place for it


def test_hosts_that_two_servers_share_do_not_tell_them_apart() -> None:
    names = Names({"a": "http://h:1", "b": "http://h:2", "c": "http://other:1"})
    assert [names.find(one) for one in ("h", "h:2", "other", "other:9", "c", "")] == [
        *(None, 1, 2, 2, 2, None)
    ]


# Order


def test_what_is_told_late_still_comes_in_order() -> None:
    settling, done = Settling(10.0), list[tuple[str, float]]()

    def act(name: str) -> Callable[[float], None]:
        return lambda now: done.append((name, now))

    settling.began(5.0, act("b"))
    settling.add(7.0, act("event"))
    settling.began(1.0, act("a"))
    settling.run()
    assert done == []
    settling.began(15.0, act("c"))
    settling.run()
    assert done == [("a", 1.0), ("b", 5.0)]
    settling.began(2.0, act("too late"))
    settling.run()
    assert done[2:] == [("too late", 5.0)]
    assert settling.late == 1
    settling.run(20.0)
    assert done[3:] == [("event", 7.0), ("c", 15.0)]


def test_what_there_is_no_room_for_is_not_waited_for() -> None:
    settling, done = Settling(1e9, most_weight=100), list[float]()
    for at in range(1_000):
        settling.began(float(at), done.append, 10)
        settling.run()
        assert len(settling) <= 10
    assert done == [float(at) for at in range(990)]


def test_a_long_line_is_there_at_one_look(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"a" * (5 << 20) + b"\n" + b"b" * (3 << 20))
    tail = FileTail(path, once=True)
    assert [(one.number, one.data and len(one.data)) for one in tail.read()] == [(1, 5 << 20)]
    rest = [line for _ in range(2) for line in tail.read()]
    assert [(one.number, one.data and len(one.data)) for one in rest] == [(2, 3 << 20)]
    assert tail.is_over
    tail.close()
