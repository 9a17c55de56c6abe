"""A trace is checked as a whole, and read in the order of its times without being held."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from preheat.errors import ConfigError
from preheat.lab.load.trace import Trace

CHAT = [{"role": "user", "content": "hi"}]


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_shorthand_becomes_a_body_of_what_was_given(tmp_path: Path) -> None:
    chat = {"at": 0, "messages": CHAT, "model": "m", "max_tokens": 5, "temperature": 0.0}
    prompt = {"at": 1, "prompt": "once", "stream": True}
    first, second = Trace(written(tmp_path, chat, prompt)).read()
    assert first.path == "/v1/chat/completions"
    assert json.loads(first.body) == {
        "messages": CHAT, "model": "m", "max_tokens": 5, "temperature": 0.0,
    }  # fmt: skip
    assert second.path == "/v1/completions"
    assert json.loads(second.body) == {
        "prompt": "once", "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_a_whole_body_is_sent_as_it_stands(tmp_path: Path) -> None:
    body = '{ "model":"m",  "messages": [],"temperature":0.0, "é":"\\u00e9" }'
    path = written(tmp_path, f'{{"at": 2, "path": "/v1/embeddings", "body": {body}}}')
    (request,) = Trace(path).read()
    assert request.body == body.encode()
    assert (request.at_s, request.path) == (2.0, "/v1/embeddings")


def test_another_model_takes_the_place_of_the_traces(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"at": 0, "messages": CHAT, "model": "m"},
        {"at": 0, "body": {"model": "m", "input": [1.0, 2]}},
    )
    assert [json.loads(one.body)["model"] for one in Trace(path).read("other")] == ["other"] * 2


def test_lines_out_of_order_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    times = [3, 1, 2, 1, 0]
    lines: list[Any] = [{"at": at, "prompt": str(number)} for number, at in enumerate(times, 1)]
    trace = Trace(written(tmp_path, lines[0], "", *lines[1:]))
    assert trace.requests == 5
    assert trace.length_s == 3
    assert [(one.at_s, json.loads(one.body)["prompt"]) for one in trace.read()] == [
        (0, "5"), (1, "2"), (1, "4"), (2, "3"), (3, "1"),
    ]  # fmt: skip
    assert [one.id for one in trace.read()] == ["6", "3", "5", "4", "1"]  # numbers of their lines


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "truncated"),
        ("[]", "object"),
        ('{"prompt": "x"}', "`at`"),
        ('{"at": -1, "prompt": "x"}', ">= 0"),
        ('{"at": "1", "prompt": "x"}', "`at`"),
        ('{"at": 1e400, "prompt": "x"}', ""),
        ('{"at": 0}', "give a `body`, or `messages`, or a `prompt`"),
        ('{"at": 0, "prompt": "x", "messages": []}', "give a `body`"),
        ('{"at": 0, "body": {}, "model": "m"}', "not also model"),
        ('{"at": 0, "body": []}', "`body` must be an object"),
        ('{"at": 0, "body": {"a": }}', "malformed"),
        ('{"at": 0, "prompt": "x", "strem": true}', "unknown field 'strem'; known here: at, id"),
        ('{"at": 0, "prompt": "x", "path": "v1"}', "`path` must begin with /"),
        ('{"at": 0, "prompt": "x", "path": "/v1 HTTP"}', "`path` must begin with /"),
        ('{"at": 0, "prompt": "x", "headers": {"Content-Length": "1"}}', "can't hold"),
        ('{"at": 0, "prompt": "x", "headers": {"a": "b\\r\\nc: d"}}', "characters"),
        ('{"at": 0, "prompt": "x", "slo_ttft_s": 0}', "slo_ttft_s"),
        ('{"at": 0, "prompt": "\udcff"}', "UTF-8"),
        ('{"at": 0, "prompt": "x", "my secret prompt": 1}', "unknown field; known here: at"),
        (f'{{"at": 0, "prompt": "x", "secret{"s" * 40}": 1}}', "unknown field; known here: at"),
        ('{"at": 0, "prompt": "x", "my\\nsecret": 1}', "unknown field; known here: at"),
        ('{"at": 0, "prompt": "x", "headers": {"my secret": "1"}}', "can't hold such a name"),
        (f'{{"at": 0, "prompt": {"[" * 50_000}{"]" * 50_000}}}', "nested too deeply"),
        (f'{{"at": 0, "zz": {"[" * 50_000}{"]" * 50_000}}}', ""),
        (f'{{"at": {"9" * 400}, "prompt": "x"}}', ""),
    ],
)
def test_a_line_that_cannot_be_used_is_named_by_its_number(
    line: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    good = '{"at": 0, "prompt": "secret words"}'
    path.write_bytes(f"{good}\n\n{line}\n{good}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as raised:
        Trace(path)
    assert str(raised.value).startswith(f"{path}:3: ")
    assert said in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_trace_without_requests_or_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no request in it"):
        Trace(written(tmp_path, ""))
    with pytest.raises(ConfigError, match="can't read"):
        Trace(tmp_path / "none.jsonl")


def test_a_byte_order_mark_at_the_beginning_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"at": 1, "prompt": "a"}\n{"at": 0, "prompt": "b"}\n')
    assert [json.loads(one.body)["prompt"] for one in Trace(path).read()] == ["b", "a"]


def test_a_file_that_cannot_be_read_on_the_way_is_refused() -> None:
    # Nothing is mapped at address 0, so that reading there is an error, after it was opened.
    with pytest.raises(ConfigError, match="can't read /proc/self/mem: Input/output error"):
        Trace(Path("/proc/self/mem"))


def test_a_body_is_read_or_named_however_deep_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    named = 0
    for levels in range(700, 1_000):  # somewhere there every interpreter's limit is
        path.write_text(f'{{"at": 0, "body": {{"a": {"[" * levels}{"]" * levels}}}}}\n')
        try:
            list(Trace(path).read("other"))
        except ConfigError:
            named += 1
    assert 0 < named < 300


def test_a_trace_from_a_pipe_is_refused() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    try:
        with pytest.raises(ConfigError, match="not a pipe"):
            Trace(Path(f"/dev/fd/{reading}"))
    finally:
        os.close(reading)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_long_trace_is_not_held_in_memory(tmp_path: Path, is_ordered: bool) -> None:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for number in range(5_000):
            at = number if is_ordered else 5_000 - number
            file.write(json.dumps({"at": at, "prompt": "x" * 4_000}) + "\n")
    tracemalloc.start()
    try:
        assert sum(1 for _ in Trace(path).read()) == 5_000
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < 2_000_000 < path.stat().st_size / 8
