"""`preheat doctor`: each finding is provoked by something that really is that way."""

import ast
import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import Fake, Gateway, running
from preheat.cli import main
from preheat.core.types import Key
from redis_server import RedisServer, SlowWay, server_binary
from tiny_model import write_tiny_gguf
from upstream import End, Upstream, answer

ROOT = Path(__file__).resolve().parents[2]
# So that nothing but the doctor's own requests takes a scripted reply.
PLAIN = {"owned_by": "vllm", "metrics": True}


class Doctor:
    """Runs the command in this process; its findings by check."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._capsys = capsys
        self.code = 0
        self.document: Any = None

    def __call__(self, *options: str, toml: str = "") -> dict[str, Any]:
        if toml:
            path = self._folder / "preheat.toml"
            path.write_text(toml)
            options = (*options, "--config", str(path))
        self.code = main(["doctor", "--json", "--timeout", "20", *options])
        self.document = json.loads(self._capsys.readouterr().out)
        return {one["check"]: one for one in self.document["findings"]}

    def engine(self, url: str, *options: str) -> dict[str, Any]:
        return self("--upstream", url, *options)


@pytest.fixture
def doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Doctor(tmp_path, capsys)


@pytest.fixture(autouse=True)
def _fresh(fake: Fake) -> None:
    fake.reset()


def is_problem(finding: dict[str, Any]) -> bool:
    return bool(finding["severity"] == "problem" and finding["why"] and finding["do"])


# an engine that is well


def test_nothing_is_wrong_with_an_engine_that_is_well(fake: Fake, doctor: Doctor) -> None:
    fake.script(default="echo")
    found = doctor.engine(fake.url)
    assert {"reachable", "usage", "stream-usage", "cached-tokens", "greedy"} <= set(found)
    assert {one["severity"] for one in found.values()} == {"ok"}
    assert doctor.code == 0
    assert re.search(r"1\d\d\d of 1\d\d\d tokens", found["cached-tokens"]["found"])


def test_an_engine_is_asked_nothing_with_no_ask(fake: Fake, doctor: Doctor) -> None:
    found = doctor.engine(fake.url, "--no-ask")
    assert "reachable" in found
    assert "usage" not in found
    assert [one for one in fake.log["requests"] if one["method"] != "GET"] == []


# an engine that can't be reached


def test_an_engine_that_is_stopped_is_refused(doctor: Doctor) -> None:
    with running(gone := Fake()):
        url = gone.url
    found = doctor.engine(url)
    assert is_problem(found["refused"])
    assert doctor.code == 1


def test_a_host_that_nobody_knows_is_found(doctor: Doctor) -> None:
    found = doctor.engine("http://no-such-host.invalid:8000")
    assert is_problem(found["unknown-host"])


def test_an_engine_that_hangs_gives_no_answer(doctor: Doctor) -> None:
    with Upstream() as server:
        server.play([End.HANG])
        found = doctor.engine(server.url, "--timeout", "0.3")
    assert is_problem(found["no-answer"])


def test_what_speaks_no_http_is_found(doctor: Doctor) -> None:
    with Upstream() as server:
        server.play([b"SSH-2.0-OpenSSH_9.2\r\n", End.CLOSE])
        found = doctor.engine(server.url)
    assert is_problem(found["not-http"])


def test_a_server_with_an_untrusted_certificate_is_found(doctor: Doctor, tmp_path: Path) -> None:
    with tls_server(tmp_path) as port:
        found = doctor.engine(f"https://127.0.0.1:{port}")
    assert is_problem(found["tls"])
    assert "certificate" in found["tls"]["do"]


def test_http_to_a_port_that_speaks_tls_is_found(doctor: Doctor, tmp_path: Path) -> None:
    with tls_server(tmp_path) as port:
        found = doctor.engine(f"http://127.0.0.1:{port}")
    assert is_problem(found["not-http"])
    assert "https://" in found["not-http"]["do"]


def test_https_to_a_port_that_speaks_http_is_found(fake: Fake, doctor: Doctor) -> None:
    found = doctor.engine(fake.url.replace("http:", "https:"))
    assert is_problem(found["tls"])
    assert "write http://" in found["tls"]["do"]


class tls_server:  # noqa: N801 (used like a function)
    """A TLS server with a certificate that nobody has signed."""

    def __init__(self, folder: Path) -> None:
        key, cert = folder / "key.pem", folder / "cert.pem"
        if shutil.which("openssl") is None:
            pytest.skip("no openssl here to make a certificate")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
             "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=x"],
            check=True, capture_output=True, timeout=20,
        )  # fmt: skip
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(cert, key)

    def __enter__(self) -> int:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return int(self._socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.settimeout(5)
            try:
                with self._context.wrap_socket(connection, server_side=True) as wrapped:
                    wrapped.recv(1)
            except OSError:
                connection.close()


# a server that isn't what it should be


def test_a_server_that_is_no_openai_api_is_found(doctor: Doctor) -> None:
    with Upstream() as server:
        server.play([answer(b"<html>grafana</html>", kind="text/html")])
        assert is_problem(doctor.engine(server.url)["not-openai"])
        server.play([answer(b"{}", status="404 Not Found")])
        assert is_problem(doctor.engine(server.url)["not-openai"])


def test_the_api_at_another_path_is_found(fake: Fake, doctor: Doctor) -> None:
    found = doctor.engine(f"{fake.url}/openai")
    assert is_problem(found["wrong-path"])
    assert f'url = "{fake.url}/v1"' in found["wrong-path"]["do"]


def test_a_redirect_is_found(doctor: Doctor) -> None:
    with Upstream() as server:
        location = "Location: https://gpu.example/v1/models?token=1\r\n"
        server.play([answer(b"", location, "301 Moved Permanently")])
        found = doctor.engine(server.url)
    assert is_problem(found["redirect"])
    assert "https://gpu.example" in found["redirect"]["do"]
    assert "token" not in json.dumps(found)


HOSTILE = {
    "nested": b'{"data":%b}' % (b"[" * 100_000 + b"]" * 100_000),
    "unfinished": b"[" * 100_000,
    "odd": b'{"data":[1,null,{"id":5}],"error":"x","usage":{"prompt_tokens":-5}}',
    "many digits": b'{"data":[{"id":"m","owned_by":"vllm"}],"choices":[],"usage":{"prompt_tokens":'
    b'%b,"prompt_tokens_details":{"cached_tokens":%b}}}' % (b"9" * 400, b"9" * 400),
    "escapes": json.dumps({"data": [{"id": "\x1b[31m" + "z" * 100_000}] * 50}).encode(),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_answers_are_findings_too(kind: str, doctor: Doctor) -> None:
    with Upstream() as server:
        server.play(*([answer(HOSTILE[kind])] for _ in range(20)))
        found = doctor.engine(server.url, "--model", "m" * 200)
        assert found
        assert "z" * 1_000 not in json.dumps(found)
        assert "u001b" not in json.dumps(found)
        assert is_problem(doctor("--gateway", server.url)["not-a-gateway"])


def test_a_gateway_whose_errors_are_no_objects_is_told(doctor: Doctor) -> None:
    ours = "Cache-Status: preheat; fwd=bypass\r\n"
    with Upstream() as server:
        replies = (answer(b"{}"), answer(b"{}", ours), answer(b"{}"))
        refusal = answer(b'{"error": "\\u001b[31mno"}', ours, "400 Bad Request")
        server.play(*([reply] for reply in (*replies, refusal)))
        found = doctor("--gateway", server.url)
    assert "status 400: [31mno" in found["gateway-error"]["found"]


def test_a_redirect_to_nowhere_is_found(doctor: Doctor) -> None:
    with Upstream() as server:
        server.play([answer(b"", "Location: http://[::1\r\n", "302 Found")])
        assert is_problem(doctor.engine(server.url)["redirect"])


def test_an_engine_that_is_still_loading_is_failing(doctor: Doctor) -> None:
    with Upstream() as server:
        loading = b'{"error": {"message": "Loading model", "code": 503}}'
        server.play([answer(loading, status="503 Service Unavailable")])
        found = doctor.engine(server.url)
    assert is_problem(found["failing"])
    assert "Loading model" in found["failing"]["found"]


def test_an_engine_without_a_model_is_found(doctor: Doctor) -> None:
    with Upstream() as server:
        server.play([answer(b'{"data": []}')])
        assert is_problem(doctor.engine(server.url)["no-model"])


def test_a_gateway_in_the_place_of_an_engine_is_found(gateway: Gateway, doctor: Doctor) -> None:
    found = doctor.engine(gateway.url)
    assert found["engine-is-gateway"]["severity"] == "warning"
    assert "usage" not in found


# keys


@pytest.fixture
def guarded(fake: Fake) -> str:
    fake.script(default="echo", flaws={"api_key": "sk-right"})
    return fake.url


def test_a_missing_key_and_a_wrong_one_are_found(
    guarded: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = doctor.engine(guarded)["key"]
    assert is_problem(missing)
    assert "set api_key_env" in missing["do"]
    monkeypatch.setenv("ENGINE_KEY", "sk-hunter2")
    wrong = doctor.engine(guarded, "--api-key-env", "ENGINE_KEY")["key"]
    assert is_problem(wrong)
    assert "right key" in wrong["do"]
    assert "hunter2" not in json.dumps(doctor.document)
    monkeypatch.setenv("ENGINE_KEY", "sk-right")
    assert "usage" in doctor.engine(guarded, "--api-key-env", "ENGINE_KEY")


def test_a_key_whose_variable_is_empty_is_a_finding(guarded: str, doctor: Doctor) -> None:
    found = doctor(toml=f'[engines.a]\nurl = "{guarded}"\napi_key_env = "NOT_SET"\n')
    assert found["settings"]["severity"] == "problem"
    assert "NOT_SET" in found["settings"]["found"]


# models


def test_a_model_that_the_engine_lacks_is_found_with_the_nearest_name(
    fake: Fake, doctor: Doctor
) -> None:
    fake.script(
        default="echo", flaws={"models": ["meta/llama-3.1-8b", "other"], "owned_by": "vllm"}
    )
    toml = f"""
[engines.a]
url = "{fake.url}"
[models."llama-3.1-8b"]
[models.other]
[models.nice]
alias = "other"
"""
    doctor("--no-ask", toml=toml)
    told = [one for one in doctor.document["findings"] if one["check"].startswith("model")]
    assert [(one["check"], one["severity"]) for one in told] == [
        ("model-unknown", "problem"), ("model", "ok"), ("model", "ok"),
    ]  # fmt: skip
    assert "meta/llama-3.1-8b" in told[0]["do"]
    assert doctor.code == 1


def test_a_name_that_clients_use_can_be_checked(fake: Fake, doctor: Doctor) -> None:
    fake.script(default="echo")
    assert is_problem(doctor.engine(fake.url, "--model", "gpt-9")["model-unknown"])
    assert doctor.engine(fake.url, "--model", "fake")["model"]["severity"] == "ok"


# usage, streams


def test_missing_usage_is_found(fake: Fake, doctor: Doctor) -> None:
    fake.script(default="echo", flaws={"usage": "never"})
    found = doctor.engine(fake.url)
    assert found["usage-missing"]["severity"] == "warning"
    assert found["stream-usage-missing"]["severity"] == "warning"


def test_usage_that_is_missing_in_streams_only_is_found(fake: Fake, doctor: Doctor) -> None:
    fake.script(default="echo", flaws={"usage": "not-in-streams"})
    found = doctor.engine(fake.url)
    assert found["usage"]["severity"] == "ok"
    assert found["stream-usage-missing"]["severity"] == "warning"


def test_refused_stream_options_are_found(fake: Fake, doctor: Doctor) -> None:
    fake.script(default="echo", flaws={"refuses": ["stream_options"]})
    found = doctor.engine(fake.url)
    assert is_problem(found["stream-options-refused"])
    assert "engines.upstream.inject_usage = false" in found["stream-options-refused"]["do"]
    toml = f'[engines.a]\nurl = "{fake.url}"\ninject_usage = false\n'
    assert doctor(toml=toml)["stream-options-refused"]["severity"] == "note"
    assert doctor.code == 0


def test_an_engine_that_refuses_streams_is_found(fake: Fake, doctor: Doctor) -> None:
    fake.script(default="echo", flaws={"refuses": ["stream"]})
    assert is_problem(doctor.engine(fake.url)["stream-refused"])


def test_a_stream_without_its_end_is_found(fake: Fake, doctor: Doctor) -> None:
    fake.script(
        {"content": "a"}, {"fault": "end_after", "content": "a"}, default="echo", flaws=PLAIN
    )
    assert doctor.engine(fake.url)["stream-unfinished"]["severity"] == "warning"


def test_an_engine_that_refuses_a_small_chat_is_found(fake: Fake, doctor: Doctor) -> None:
    fake.script(default={"status": 422, "body": {"detail": "no template"}})
    found = doctor.engine(fake.url)
    assert is_problem(found["asked"])
    assert "no template" in found["asked"]["found"]


def test_an_engine_that_wants_another_name_for_the_limit_gets_it(
    fake: Fake, doctor: Doctor
) -> None:
    refusal = {"error": {"message": "Unsupported: use max_completion_tokens instead"}}
    fake.script(
        {"status": 400, "body": refusal}, default="echo", flaws={**PLAIN, "refuses": ["max_tokens"]}
    )
    assert doctor.engine(fake.url)["usage"]["severity"] == "ok"


# the prefix cache


@pytest.mark.parametrize(
    ("owner", "flag"),
    [("vllm", "--enable-prompt-tokens-details"), ("sglang", "--enable-cache-report")],
)
def test_hidden_cached_tokens_are_proved_by_the_counters(
    owner: str, flag: str, fake: Fake, doctor: Doctor
) -> None:
    flaws = {"owned_by": owner, "hides_cached_tokens": True, "metrics": True}
    fake.script(default="echo", flaws=flaws)
    found = doctor.engine(fake.url)["cached-tokens-hidden"]
    assert found["severity"] == "warning"
    assert "counter of hits" in found["found"]
    assert flag in found["do"]


def test_hidden_cached_tokens_are_seen_by_the_time(fake: Fake, doctor: Doctor) -> None:
    fake.script(default="echo", flaws={"hides_cached_tokens": True, "token_s": 0.0003})
    found = doctor.engine(fake.url)["cached-tokens-hidden"]
    assert "instead of" in found["found"]


def test_hidden_and_off_cannot_be_told_apart_without_a_witness(fake: Fake, doctor: Doctor) -> None:
    fake.script(default="echo", flaws={"hides_cached_tokens": True})
    assert doctor.engine(fake.url)["cached-tokens-unknown"]["severity"] == "warning"


@pytest.mark.parametrize("hides", [True, False])
def test_a_prefix_cache_that_is_off_is_found(hides: bool, doctor: Doctor) -> None:
    with running(bare := Fake("--capacity-blocks", "0")):
        flaws = {"owned_by": "vllm", "hides_cached_tokens": hides, "metrics": True}
        bare.script(default="echo", flaws=flaws)
        found = doctor.engine(bare.url)["prefix-cache-off"]
    assert found["severity"] == "warning"
    assert "--no-enable-prefix-caching" in found["do"]
    assert ("counters" if hides else "cached_tokens is 0") in found["found"]


def test_a_prompt_that_is_too_long_for_the_engine_is_no_verdict(fake: Fake, doctor: Doctor) -> None:
    too_long = {"status": 400, "body": {"error": {"message": "maximum context length is 512"}}}
    fake.script({"content": "a"}, {"content": "a"}, too_long, default="echo", flaws=PLAIN)
    found = doctor.engine(fake.url)
    assert found["cached-tokens-unknown"]["severity"] == "note"
    assert "maximum context length" in found["cached-tokens-unknown"]["found"]


def test_greedy_answers_that_differ_are_noted(fake: Fake, doctor: Doctor) -> None:
    assert doctor.engine(fake.url)["greedy-differs"]["severity"] == "note"  # it counts
    assert doctor.code == 0


# a real llama.cpp


WITHOUT_CACHE = """
import sys
from preheat.engines import llamacpp_child as child
usual = child._set
def without(params, order):
    usual(params, order)
    params.cache_prompt = False
child._set = without
sys.exit(child.main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


@pytest.fixture
def llama(model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Starts one as it is told to; its key is in ENGINE_KEY."""
    monkeypatch.setenv("ENGINE_KEY", "sk-right")
    processes: list[subprocess.Popen[bytes]] = []

    def start(*program: str, **settings: Any) -> str:
        process = subprocess.Popen(
            [sys.executable, *(program or ("-m", "preheat.engines.llamacpp_child"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        processes.append(process)
        order = {"model": model, "alias": "tiny", "api_key": "sk-right", **settings}
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        return str(json.loads(process.stdout.readline())["url"])

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=10)


def test_nothing_is_wrong_with_llama_cpp_as_it_is_embedded(
    llama: Callable[..., str], doctor: Doctor
) -> None:
    found = doctor.engine(llama(), "--api-key-env", "ENGINE_KEY", "--model", "tiny")
    assert found["reachable"]["found"].startswith("llama.cpp at ")
    assert {"usage", "stream-usage", "cached-tokens", "greedy", "model"} <= set(found)
    assert doctor.code == 0


def test_a_llama_cpp_that_caches_no_prefixes_is_found(
    llama: Callable[..., str], doctor: Doctor
) -> None:
    found = doctor.engine(llama("-c", WITHOUT_CACHE), "--api-key-env", "ENGINE_KEY")
    assert "--no-cache-prompt" in found["prefix-cache-off"]["do"]


def test_a_llama_cpp_asked_without_its_key_is_found(
    llama: Callable[..., str], doctor: Doctor
) -> None:
    # It lists its models to anybody; only a real request shows that it wants a key.
    found = doctor.engine(llama())
    assert is_problem(found.get("asked") or found["key"])
    assert "api_key_env" in (found.get("asked") or found["key"])["do"]


def test_a_llama_cpp_with_a_short_context_is_no_verdict(
    llama: Callable[..., str], doctor: Doctor
) -> None:
    url = llama(ctx_tokens=1_024, slots=1)
    found = doctor.engine(url, "--api-key-env", "ENGINE_KEY")
    assert found["cached-tokens-unknown"]["severity"] == "note"


def test_llama_cpp_answers_any_name_so_a_wrong_one_is_a_warning(
    llama: Callable[..., str], doctor: Doctor
) -> None:
    found = doctor.engine(llama(), "--api-key-env", "ENGINE_KEY", "--model", "gpt-9", "--no-ask")
    assert found["model-unknown"]["severity"] == "warning"


# settings


@pytest.mark.parametrize(
    ("toml", "about", "said"),
    [
        ("[exact]\nttl = 1\n", "exact.ttl", "unknown key"),
        ("[exact\n", "settings", "isn't valid TOML"),
        ('[exact]\nsecret_env = "SHORT"\n', "exact.secret_env", "fewer than 32"),
        ('[exact]\nsecret_env = "NOT_SET"\n', "exact.secret_env", "empty or not set"),
        ('[tenants.a]\napi_key_env = "NOT_SET"\n', "tenants.a.api_key_env", "empty or not set"),
        ('[admin]\napi_key_env = "NOT_SET"\n', "admin.api_key_env", "empty or not set"),
        (
            '[listen]\ntls_cert = "/nowhere"\ntls_key = "/nowhere"\n',
            "listen.tls_cert",
            "can't use /nowhere",
        ),
        ('[engines.a]\nurl = "gpu:8000"\n', "engines.a.url", "expected http"),
        (
            '[engines.a]\nkind = "embedded"\nmodel = "/nowhere.gguf"\n',
            "engines.a.model",
            "there is no file",
        ),
    ],
)
def test_settings_that_cannot_work_are_a_finding(
    toml: str, about: str, said: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORT", "hunter2")
    found = doctor(toml=toml)["settings"]
    assert found["severity"] == "problem"
    assert found["about"] == about
    assert said in found["found"]
    assert not found["found"].startswith(f"{about}: ")  # it is told once
    assert doctor.code == 1
    assert "hunter2" not in json.dumps(doctor.document)


def test_the_parts_of_an_embedded_engine_are_examined(doctor: Doctor, model: str) -> None:
    found = doctor(toml=f'[engines.a]\nkind = "embedded"\nmodel = "{model}"\n')
    assert found["embedded"]["severity"] == "ok"


def test_the_request_logs_folder_is_examined(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    toml = '[engines.a]\nkind = "fake"\n[log]\nenabled = true\npath = "{}"\n'
    found = doctor(toml=toml.format(tmp_path / "file" / "log"))
    assert is_problem(found["not-writable"])
    doctor(toml=toml.format(tmp_path / "log"))
    assert ("absent", "log.path") in {
        (one["check"], one["about"]) for one in doctor.document["findings"]
    }


# L2 in LMDB


def stored(folder: Path, *, budget_bytes: int = 8_388_608, count: int = 200) -> Path:
    """A folder that a gateway has used."""
    pytest.importorskip("lmdb", reason="lmdb isn't installed")
    from preheat.stores.lmdb import Lmdb

    async def fill() -> None:
        store = Lmdb(folder, budget_bytes=budget_bytes, queue_bytes=8_388_608)
        await store.start()
        for number in range(count):
            await store.put(Key(struct.pack(">QQ", number, 0)), bytes(10_000), time.time() + 600)
        await store.aclose()

    asyncio.run(fill())
    return folder


def l2(doctor: Doctor, folder: Path, *more: str) -> dict[str, Any]:
    lines = "\n".join([f'[l2]\npath = "{folder}"', *more])
    return doctor(toml=f'{lines}\n[engines.a]\nkind = "fake"\n')


def test_l2_that_is_well_is_told_with_its_size(doctor: Doctor, tmp_path: Path) -> None:
    found = l2(doctor, stored(tmp_path / "l2"))
    assert found["l2"]["found"].startswith("200 answers, ")
    assert {one["severity"] for one in found.values()} == {"ok"}
    assert doctor.code == 0


def test_looking_at_l2_changes_nothing_in_it(doctor: Doctor, tmp_path: Path) -> None:
    folder = stored(tmp_path / "l2")

    def content() -> dict[str, bytes]:
        return {
            str(one): one.read_bytes()
            for one in sorted(folder.rglob("*"))
            if one.is_file() and one.name != "lock.mdb"
        }

    before = content()
    l2(doctor, folder)
    assert content() == before


def overwrite_head(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(os.urandom(8_192))


def overwrite_roots(file: Path) -> None:
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.seek(8_192)
        opened.write(os.urandom(size - 8_192))


def truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def mislead(file: Path) -> None:
    """The root page says that its first entry lies behind the file's end: reading it is a SIGBUS."""
    data = bytearray(file.read_bytes())
    assert len(data) < 16 * 4_096
    metas = [struct.unpack_from("<88xQQQ", data, page * 4_096 + 40) for page in (0, 1)]
    root, _, _ = max(metas, key=lambda meta: meta[2])
    struct.pack_into("<HHHH", data, root * 4_096 + 10, 2, 18, 100, 0xFFF0)
    file.write_bytes(data)


def mark(file: Path) -> None:
    (file.parent / "damaged").touch()


@pytest.mark.parametrize("harm", [overwrite_head, overwrite_roots, truncate, mislead, mark])
def test_a_damaged_file_is_found(
    harm: Callable[[Path], None], doctor: Doctor, tmp_path: Path
) -> None:
    folder = stored(tmp_path / "l2", count=1 if harm is mislead else 200)
    harm(folder / "values" / "data.mdb")
    found = l2(doctor, folder)["damaged"]
    assert is_problem(found)
    if harm is mislead:
        assert "ended the process" in found["found"]
    assert doctor.code == 1


def test_files_that_cannot_be_opened_are_found(doctor: Doctor, tmp_path: Path) -> None:
    folder = stored(tmp_path / "l2")
    (folder / "values" / "lock.mdb").unlink()
    (folder / "values" / "lock.mdb").mkdir()
    assert is_problem(l2(doctor, folder)["not-readable"])


def test_files_of_a_machine_that_stopped_are_noted(doctor: Doctor, tmp_path: Path) -> None:
    folder = stored(tmp_path / "l2")
    (folder / "values" / "boot").write_text("another boot")
    assert l2(doctor, folder)["cut-off"]["severity"] == "note"


def test_files_that_were_set_aside_are_noted(doctor: Doctor, tmp_path: Path) -> None:
    folder = stored(tmp_path / "l2")
    shutil.copytree(folder / "values", folder / "values.damaged-20260101-000000-000001")
    assert l2(doctor, folder)["set-aside"]["severity"] == "note"


def test_a_folder_that_others_can_read_is_found(doctor: Doctor, tmp_path: Path) -> None:
    folder = stored(tmp_path / "l2")
    folder.chmod(0o755)
    assert l2(doctor, folder)["readable-by-others"]["severity"] == "warning"


def test_a_secret_that_others_can_read_is_found(doctor: Doctor, tmp_path: Path) -> None:
    folder = stored(tmp_path / "l2")
    (folder / "secret").write_bytes(bytes(32))
    (folder / "secret").chmod(0o644)
    assert l2(doctor, folder)["secret"]["severity"] == "problem"


def test_a_folder_that_cannot_be_written_is_found(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert is_problem(l2(doctor, tmp_path / "file" / "l2")["not-writable"])


def test_a_folder_in_which_no_secret_can_be_made_is_what_serve_refuses(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "l2"
    found = l2(doctor, folder)["secret"]
    assert (found["severity"], found["why"]) == ("problem", "serve doesn't start with it")
    monkeypatch.setenv("SALT", "x" * 32)
    monkeypatch.setenv("PREHEAT__EXACT__SECRET_ENV", "SALT")
    assert "secret" not in l2(doctor, folder)


def test_a_budget_larger_than_the_disk_is_found(doctor: Doctor, tmp_path: Path) -> None:
    found = l2(doctor, stored(tmp_path / "l2"), "bytes = 1_000_000_000_000_000")
    assert found["disk-space"]["severity"] == "warning"


def test_more_than_the_budget_is_found(doctor: Doctor, tmp_path: Path) -> None:
    found = l2(doctor, stored(tmp_path / "l2"), "bytes = 1_048_576")
    assert found["over-budget"]["severity"] == "warning"


READER = """
import lmdb, os, sys
env = lmdb.open(sys.argv[1], readonly=True, max_readers=2048)
txn = env.begin()
print("reading", flush=True)
os.kill(os.getpid(), 9)
"""


def test_readers_that_died_are_found(doctor: Doctor, tmp_path: Path) -> None:
    folder = stored(tmp_path / "l2")
    path = str(folder / "values")
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(path, readonly=True, max_readers=2048):  # else the dead one's lock file is new
        subprocess.run([sys.executable, "-c", READER, path], check=False, timeout=20)
        done = subprocess.run(
            [sys.executable, "-m", "preheat", "doctor", "--json", "--no-ask", "--config",
             str(config_of(tmp_path, folder))],
            capture_output=True, timeout=60, check=False,
        )  # fmt: skip
    checks = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert checks["stale-readers"]["severity"] == "note"


def config_of(tmp_path: Path, folder: Path) -> Path:
    path = tmp_path / "preheat.toml"
    path.write_text(f'[l2]\npath = "{folder}"\n[engines.a]\nkind = "fake"\n')
    return path


def test_no_l2_is_noted(doctor: Doctor) -> None:
    found = doctor(toml='[l2]\nkind = "off"\n[engines.a]\nkind = "fake"\n')
    assert found["l2-off"]["severity"] == "note"


# L2 in Redis


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    pytest.importorskip("redis", reason="redis isn't installed")
    fitting = ("--maxmemory", "64mb", "--maxmemory-policy", "volatile-ttl")
    with RedisServer(*fitting, binary=server_binary()) as server:
        yield server


def redis_l2(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, url: str, *more: str
) -> dict[str, Any]:
    monkeypatch.setenv("SECRET", "s" * 32)
    lines = "\n".join([f'[l2]\nkind = "redis"\nurl = "{url}"', *more])
    return doctor(toml=f'{lines}\n[exact]\nsecret_env = "SECRET"\n[engines.a]\nkind = "fake"\n')


def test_a_redis_that_is_well_is_told(
    redis: RedisServer, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = redis_l2(doctor, monkeypatch, redis.url, "timeout_s = 0.5")
    assert {"redis-latency", "l2"} <= set(found)
    assert {one["severity"] for one in found.values()} == {"ok"}
    assert doctor.code == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("maxmemory", "0"), ("maxmemory-policy", "noeviction"), ("maxmemory-policy", "allkeys-lru")],
)
def test_a_memory_policy_that_does_not_fit_is_found(
    name: str, value: str, redis: RedisServer, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"maxmemory": "64mb", "maxmemory-policy": "volatile-ttl"}[name]
    redis.config_set(name, value)
    try:
        found = redis_l2(doctor, monkeypatch, redis.url, "timeout_s = 0.5")["redis-policy"]
    finally:
        redis.config_set(name, usual)
    assert found["severity"] == "warning"
    assert "maxmemory" in found["do"]


def test_a_redis_that_is_stopped_is_found(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    found = redis_l2(doctor, monkeypatch, "redis://127.0.0.1:1/0")
    assert is_problem(found["redis-unreachable"])


def test_a_redis_that_wants_a_password_is_found(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer("--requirepass", "hunter2", binary=server_binary()) as server:
        found = redis_l2(doctor, monkeypatch, server.url)
        assert is_problem(found["redis-unreachable"])
        monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
        better = redis_l2(
            doctor, monkeypatch, server.url, 'password_env = "REDIS_PASSWORD"', "timeout_s = 0.5"
        )
    assert "l2.password_env" in found["redis-unreachable"]["do"]
    assert "redis-latency" in better
    assert "hunter2" not in json.dumps(doctor.document)


def test_a_redis_that_is_too_slow_is_found(
    redis: RedisServer, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.new_event_loop()
    way = SlowWay(redis.port, 0.02)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(way.__aenter__(), loop).result(5)
    try:
        found = redis_l2(doctor, monkeypatch, way.url)["redis-slow"]
    finally:
        asyncio.run_coroutine_threadsafe(way.__aexit__(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
    assert is_problem(found)
    assert "l2.timeout_s" in found["do"]


# a gateway


def test_a_gateway_that_is_well_hits(fake: Fake, gateway: Gateway, doctor: Doctor) -> None:
    found = doctor("--gateway", gateway.url)
    assert found["hit"]["severity"] == "ok"
    assert doctor.code == 0


def test_what_is_no_gateway_is_found(fake: Fake, doctor: Doctor) -> None:
    assert is_problem(doctor("--gateway", fake.url)["not-a-gateway"])


def test_a_gateway_that_is_stopped_is_refused(doctor: Doctor) -> None:
    with running(gone := Fake()):
        url = gone.url
    assert is_problem(doctor("--gateway", url)["refused"])


def test_a_gateway_without_a_hit_says_why(fake: Fake, gateway: Gateway, doctor: Doctor) -> None:
    fake.script(default={"content": "a", "finish_reason": "length"})
    found = doctor("--gateway", gateway.url)["no-hit"]
    assert found["severity"] == "note"
    assert "finish-length" in found["do"]


def test_a_gateway_whose_engine_is_down_is_found(doctor: Doctor) -> None:
    with running(engine := Fake()):
        served = Gateway(upstream=engine.url)
    with running(served):
        found = doctor("--gateway", served.url)
        assert is_problem(found["gateway-error"])
        assert "engine-connect" in found["gateway-error"]["found"]


def test_a_gateway_that_is_its_own_engine_is_found(doctor: Doctor) -> None:
    # Through a door of another name: serve itself sees no more than addresses.
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        served = Gateway(upstream=f"http://127.0.0.1:{port}")
        with running(served), passing_on(door, served.port):
            found = doctor("--gateway", served.url)
    assert is_problem(found["loop"])


class passing_on:  # noqa: N801 (used like a function)
    """Passes each connection on to another port."""

    def __init__(self, door: socket.socket, port: int) -> None:
        self._door, self._port = door, port
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> None:
        self._threads[0].start()

    def __exit__(self, *_: object) -> None:
        for one in (self._door, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                came, _ = self._door.accept()
                there = socket.create_connection(("127.0.0.1", self._port), timeout=20)
                self._sockets += (came, there)
                for pair in ((came, there), (there, came)):
                    thread = threading.Thread(target=self._pump, args=pair, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def test_a_gateway_for_tenants_needs_a_key(
    fake: Fake, doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.script(default="echo")
    monkeypatch.setenv("TENANT_KEY", "sk-tenant")
    toml = f'[engines.a]\nurl = "{fake.url}"\n[tenants.t]\napi_key_env = "TENANT_KEY"\n'
    served = Gateway(toml, folder=tmp_path)
    with running(served):
        assert is_problem(doctor("--gateway", served.url)["key"])
        found = doctor("--gateway", served.url, "--gateway-key-env", "TENANT_KEY")
    assert found["hit"]["severity"] == "ok"


# the command


def test_the_text_tells_what_why_and_what_to_do(
    fake: Fake, doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.script(default="echo", flaws={"refuses": ["stream_options"]})
    assert main(["doctor", "--upstream", fake.url]) == 1
    shown = capsys.readouterr().out
    assert "problem  engines.upstream: it refuses stream_options" in shown
    assert "why it matters: " in shown
    assert "what to do: set engines.upstream.inject_usage = false" in shown
    assert shown.endswith("1 problem\n")


def test_a_key_without_an_upstream_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--api-key-env", "A"]) == 2
    assert "usage: preheat doctor" in capsys.readouterr().err


def test_every_finding_is_in_the_document() -> None:
    told = set(re.findall(r"`([a-z0-9-]+)`", (ROOT / "docs" / "doctor.md").read_text()))
    checks: set[str] = set()
    for path in (ROOT / "src" / "preheat" / "lab").glob("d*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                checks |= {one.value for one in _named(node) if isinstance(one, ast.Constant)}
    words = {"refused", "no-connection", "unknown-host", "not-http", "no-answer", "tls",
             "redis-policy", "redis-version"}  # fmt: skip
    checks = {check for check in checks if isinstance(check, str)}
    assert len(checks) > 80
    assert sorted((checks | words) - told) == []


def _named(call: ast.Call) -> Iterator[ast.AST]:
    """Where the check's word stands in a call that makes a finding; none in another one."""
    name = getattr(call.func, "id", getattr(call.func, "attr", None))
    if name == "Finding" or (
        name in {"_finding", "finding"} and isinstance(call.func, ast.Attribute)
    ):
        yield from ast.walk(call.args[0])
    elif name == "_finding":
        yield from ast.walk(call.args[1])
    elif name == "_compared":
        yield from (
            part for one in call.keywords if one.arg == "checks" for part in ast.walk(one.value)
        )
