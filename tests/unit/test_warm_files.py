"""The files of `preheat warm`: prompts as people have them, and what is remembered between runs."""

import io
import json
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from preheat.cli import main
from preheat.cli.marks import Marks, usual_place
from preheat.cli.prompts import read_prompts
from preheat.core.warmup import Mark
from preheat.engines.dialects.calls import Prompt
from preheat.engines.prefixes import bytes_of, name_of
from preheat.errors import ConfigError

CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def read(tmp_path: Path, text: str, **options: Any) -> list[Prompt]:
    file = tmp_path / "in"
    file.write_text(text)
    return read_prompts(str(file), **options)


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        (CHAT, [Prompt(messages=CHAT)]),
        ([1, 2, 3], [Prompt(ids=[1, 2, 3])]),
        ("a text", [Prompt(text="a text")]),
        (CHAT[0] | {}, None),
        ({"messages": CHAT, "model": "m", "tools": TOOLS}, [Prompt(model="m", messages=CHAT, tools=TOOLS)]),
        ({"prompt": "a"}, [Prompt(text="a")]),
        ({"prompt": [7]}, [Prompt(ids=[7])]),
        ({"ids": [7]}, [Prompt(ids=[7])]),
        ({"text": "a"}, [Prompt(text="a")]),
        ({"at": 1.0, "body": {"messages": CHAT, "model": "m"}}, [Prompt(model="m", messages=CHAT)]),
        ([CHAT, [1, 2], {"text": "a"}], [Prompt(messages=CHAT), Prompt(ids=[1, 2]), Prompt(text="a")]),
        ([], None),
        ({}, None),
        ({"messages": []}, None),
        ({"messages": CHAT, "model": 3}, None),
        ({"ids": [1, -2]}, None),
        ({"ids": [True]}, None),
        ([CHAT, []], None),
        ({"body": 3}, None),
        ("", None),
    ],
)  # fmt: skip
def test_every_form_is_read_or_refused(
    tmp_path: Path, value: Any, prompts: list[Prompt] | None
) -> None:
    if prompts is None:
        with pytest.raises(ConfigError, match="in"):
            read(tmp_path, json.dumps(value))
    else:
        assert read(tmp_path, json.dumps(value)) == prompts


def test_one_a_line_and_plain_text(tmp_path: Path) -> None:
    lines = "\n".join(map(json.dumps, [CHAT, {"ids": [1]}, "text"])) + "\n\n"
    assert [one.ids for one in read(tmp_path, lines)] == [None, [1], None]
    assert read(tmp_path, "You are\n[helpful].") == [Prompt(text="You are\n[helpful].")]
    assert read(tmp_path, "[1, 2]", is_text=True) == [Prompt(text="[1, 2]")]


def test_a_bad_line_is_named_and_not_quoted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2: it isn't JSON.*--text") as caught:
        read(tmp_path, '{"text": "a"}\n{"secret words"\n')
    assert "secret" not in str(caught.value)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="neither JSON nor UTF-8"):
        read_prompts(str(tmp_path / "bytes"))
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(str(tmp_path / "missing"))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"You are")))
    assert read_prompts("-") == [Prompt(text="You are")]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b" \n")))
    with pytest.raises(ConfigError, match="nothing in it"):
        read_prompts("-")


def test_a_prefix_has_one_name_and_others_have_others() -> None:
    prompts = [
        Prompt(text="a"),
        Prompt(text="b"),
        Prompt(ids=[97]),
        Prompt(messages=CHAT),
        Prompt(messages=CHAT, tools=TOOLS),
        Prompt(text="a", model="m"),
        Prompt(text="a", adapter="m"),
        Prompt(text="a", salt="m"),
    ]
    assert len({name_of(one) for one in prompts}) == len(prompts)
    assert name_of(Prompt(messages=[dict(reversed(one.items())) for one in CHAT])) == name_of(
        Prompt(messages=CHAT)
    )
    assert bytes_of(Prompt(ids=[1, 2, 3])).startswith(bytes_of(Prompt(ids=[1, 2])))


def mark(prefix: str, at: float, done: int = 5) -> Mark:
    return Mark(worker="w", prefix=prefix, tokens=9, done_tokens=done, at=at)


def test_marks_are_kept_merged_and_for_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "warm.json"
    first, second = Marks(path), Marks(path)
    first.put(mark("a", 1.0))
    first.save()
    second.put(mark("b", 2.0))
    second.put(mark("a", 3.0, done=9))
    second.save()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Marks(path)
    assert again.of("w", "a") == mark("a", 3.0, done=9)
    assert again.of("w", "b") == mark("b", 2.0)
    assert again.of("other", "b") is None
    assert list(path.parent.iterdir()) == [path]


def test_only_the_newest_marks_are_kept(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "m")
    for number in range(10_010):
        marks.put(mark(str(number), float(number)))
    marks.save()
    again = Marks(tmp_path / "m")
    assert again.of("w", "9") is None
    assert again.of("w", "10") is not None


@pytest.mark.parametrize("torn", [b"", b"{", b'{"version": 1, "marks": 3}', b"[1]", b"\xff"])
def test_a_damaged_file_is_set_aside(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "warm.json"
    path.write_bytes(torn)
    marks = Marks(path)
    marks.put(mark("a", 1.0))
    marks.save()
    assert (tmp_path / "warm.json.damaged").read_bytes() == torn
    assert Marks(path).of("w", "a") == mark("a", 1.0)


def test_marks_have_a_usual_place_and_say_where_they_cant_be(tmp_path: Path) -> None:
    assert usual_place({"XDG_STATE_HOME": "/s"}) == Path("/s/preheat/warm.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--state"):
        Marks(tmp_path / "file" / "warm.json").save()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "name a FILE"),
        (["missing", "--url", "http://127.0.0.1:9"], "No such file"),
        (["{file}", "--url", "ftp://x"], "--url"),
    ],
)
@pytest.mark.parametrize("command", ["warm", "verify"])
def test_what_cant_be_is_said_before_anything_is_sent(
    command: str,
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in").write_text("text")
    filled = [one.format(file=tmp_path / "in") for one in arguments]
    assert main([command, *filled, "--state", str(tmp_path / "s")]) == 1
    assert said in capsys.readouterr().err


def test_a_server_that_isnt_there_fails_a_warm_up_and_leaves_a_proof_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("text")
    rest = [str(tmp_path / "in"), "--url", "http://127.0.0.1:9", "--state", str(tmp_path / "s")]
    assert main(["warm", *rest]) == 1
    assert "failed" in capsys.readouterr().out
    assert main(["verify", *rest, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["counts"] == {"unknown": 1}
    assert document["proofs"][0]["proof"]["why"]
