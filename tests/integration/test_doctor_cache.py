"""`preheat doctor URL…`: each cause of zero cached tokens, on a real llama.cpp and on faithful fakes."""

import json
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bare_llama import bare_llama
from dialect_bodies import ALL
from doctor_asked import Examine, remarks
from engines_faked import Engine, served
from ports import free_port
from preheat.cli import main
from preheat.lab.diagnosis.server import MOST_COMPUTED, MOST_FREE
from tiny_model import write_tiny_gguf
from upstream import End, Upstream

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Examine:
    return Examine(capsys)


# engines that are well


def test_a_vllm_that_is_well_has_nothing_to_remark(examine: Examine) -> None:
    found = examine.one(engine := Engine(), "--adapter", "sql")
    assert remarks(found) == {}
    assert found["code"] == 0
    assert found["verdict"].startswith("Nothing is wrong")
    assert {"reachable", "reuse", "metrics", "template", "priority", "adapter"} <= set(found)
    assert engine.computed <= 6


def test_an_sglang_that_is_well_has_nothing_to_remark(examine: Examine) -> None:
    engine = Engine(kind="sglang", block_tokens=1, capacity_blocks=65_536)
    assert remarks(examine.one(engine)) == {}


def test_a_tgi_that_is_well_can_only_be_known_by_time(examine: Examine) -> None:
    assert remarks(examine.one(Engine(kind="tgi"))) == {"cached-tokens-unknown": "unknown"}


def test_it_says_before_what_it_will_ask_at_most_and_keeps_it(examine: Examine) -> None:
    for engine in (Engine(), Engine(caches=False), Engine(kind="sglang", tells=False)):
        found = examine.one(engine)
        assert f"at most {MOST_COMPUTED} prompts" in found["said"]
        assert f"at most {MOST_FREE} questions" in found["said"]
        assert engine.computed <= MOST_COMPUTED
        assert len(engine.asked) - engine.computed <= MOST_FREE


def test_it_computes_nothing_with_no_ask(examine: Examine) -> None:
    found = examine.one(engine := Engine(), "--no-ask")
    assert engine.computed == 0
    assert remarks(found) == {}
    assert "no prompts" in found["said"]
    assert not any(method.startswith("POST /v1/chat") for method, _ in engine.asked)


# prefix caching, and what is told of it


@pytest.mark.parametrize(
    ("engine", "check", "flag"),
    [
        (Engine(caches=False), "prefix-cache-off", "--no-enable-prefix-caching"),
        (Engine(caches=False, has_labels=False), "prefix-cache-off", "--no-enable-prefix-caching"),
        (Engine(kind="sglang", caches=False), "prefix-cache-off", "--disable-radix-cache"),
        (Engine(tells=False), "cached-tokens-hidden", "--enable-prompt-tokens-details"),
        (Engine(kind="sglang", tells=False), "cached-tokens-hidden", "--enable-cache-report"),
        (Engine(adds_salt=True), "no-reuse", "salt"),
        (Engine(adds_text=True), "prompt-changed", "proxy"),
        (Engine(capacity_blocks=20), "capacity", "--gpu-memory-utilization"),
        (Engine(forgets_after=1), "no-reuse", ""),
        (Engine(forgets_after=3), "cache-reset", "/reset_prefix_cache"),
    ],
)
def test_why_nothing_is_reused_is_found(
    engine: Engine, check: str, flag: str, examine: Examine
) -> None:
    found = examine.one(engine)
    assert remarks(found) == {check: "problem"}
    assert flag in found[check]["do"]
    assert found[check]["found"] in found["verdict"]
    assert found["code"] == 1


def test_an_engine_that_lies_is_found(examine: Examine) -> None:
    found = examine.one(Engine(kind="sglang", block_tokens=1, lies=1_200))
    assert found["cached-tokens-wrong"]["severity"] == "warning"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_several_servers_behind_one_address_are_found(count: int, examine: Examine) -> None:
    with served(*(Engine() for _ in range(count))) as url:
        found = examine(url)
    assert remarks(found) == {"several-servers": "problem"}
    assert "engines.NAME.urls" in found["several-servers"]["do"]


def test_several_servers_without_metrics_are_found_by_their_answers(examine: Examine) -> None:
    with served(*(Engine(has_metrics=False) for _ in range(2))) as url:
        assert examine(url)["several-servers"]["severity"] == "problem"


# flags beside it


def test_flags_that_are_missing_are_found_with_their_names(examine: Examine) -> None:
    engine = Engine(has_metrics=False, takes_priority=False, updates_adapters=False, adapters=())
    found = examine.one(engine, "--adapter", "sql")
    assert remarks(found) == {
        "metrics-off": "warning", "priority-off": "note", "adapter-unknown": "problem",
        "lora-updating-off": "warning",
    }  # fmt: skip
    assert "--disable-log-stats" in found["metrics-off"]["do"]
    assert "--scheduling-policy priority" in found["priority-off"]["do"]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in found["lora-updating-off"]["do"]


def test_sglang_says_its_flags_itself(examine: Examine) -> None:
    engine = Engine(kind="sglang", has_metrics=False, takes_priority=False, updates_adapters=False)
    found = examine.one(engine, "--adapter", "sq1")
    assert "--enable-metrics" in found["metrics-off"]["do"]
    assert "--enable-priority-scheduling" in found["priority-off"]["do"]
    assert "--enable-lora" in found["lora-updating-off"]["do"]
    assert found["adapter-unknown"]["do"] == "ask for sql"


def test_nothing_is_loaded_or_emptied_to_find_out(examine: Examine) -> None:
    examine.one(engine := Engine(caches=False), "--adapter", "sql")
    posted = {path for path, _ in engine.asked if path.startswith("POST")}
    assert posted == {"POST /tokenize", "POST /v1/chat/completions"}


# templates and tokens


def test_a_template_with_a_date_and_one_that_moves_turns_are_found(examine: Examine) -> None:
    found = examine.one(Engine(kind="tgi", template="dated"))
    assert found["template-date"]["severity"] == "warning"
    found = examine.one(Engine(template="latest first"))
    assert remarks(found) == {"template-turns": "warning", "beginning-lost": "problem"}


def test_equal_servers_are_equal_but_for_what_only_events_tell(examine: Examine) -> None:
    assert remarks(examine.pair(Engine(), Engine())) == {"hash-seed": "unknown"}


@pytest.mark.parametrize(
    ("other", "check", "flag"),
    [
        (Engine(dialect="llama3"), "tokenizer-differs", "--tokenizer"),
        (Engine(template="other"), "template-differs", "--chat-template"),
        (Engine(block_tokens=32), "block-size", "--block-size"),
        (Engine(algorithm="xxhash"), "hash-algorithm", "--prefix-caching-hash-algo"),
        (Engine(adapters=("sql", "rust")), "models-differ", "same names"),
    ],
)
def test_what_differs_between_servers_is_found(
    other: Engine, check: str, flag: str, examine: Examine
) -> None:
    found = examine.pair(Engine(), other)
    assert set(remarks(found)) == {check, "hash-seed"}
    assert flag in found[check]["do"]


# a real llama.cpp


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
    pytest.importorskip("gguf", reason="the tiny model is written with gguf")
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


@pytest.mark.parametrize(
    ("settings", "expected", "flag"),
    [
        ({}, {}, ""),
        ({"cache_ram_mib": 0}, {"cache-ram-off": "warning"}, "--cache-ram"),
        ({"cache_prompt": False}, {"cache-prompt-off": "problem"}, "--no-cache-prompt"),
        ({"has_metrics": False}, {"metrics-off": "warning"}, "--metrics"),
        ({"slots": 9, "ctx_tokens": 512}, {"cache-ram": "unknown"}, ""),
        ({"template": "{% for m in messages|reverse %}{{ m['content'] }}\n{% endfor %}"},
         {"template-turns": "warning", "beginning-lost": "problem"}, "--chat-template"),
        ({"template": "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"},
         {"template-date": "warning"}, "--chat-template"),
    ],
)  # fmt: skip
def test_a_real_llama_cpp(
    settings: dict[str, Any],
    expected: dict[str, str],
    flag: str,
    weights: str,
    examine: Examine,
) -> None:
    with bare_llama(weights, **settings) as url:
        found = examine(url)
    assert remarks(found) == expected
    for check in expected:
        assert flag in found[check]["do"]


def test_two_real_llama_cpps_with_other_templates_are_compared(
    weights: str, examine: Examine
) -> None:
    plain = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    with ExitStack() as stack:
        urls = [
            stack.enter_context(bare_llama(weights, **more))
            for more in ({}, {}, {"template": plain})
        ]
        assert remarks(examine(*urls[:2])) == {}
        assert remarks(examine(*urls[1:])) == {"template-differs": "problem"}


def test_more_beginnings_in_a_log_than_slots_are_found(
    weights: str, tmp_path: Path, examine: Examine
) -> None:
    path = tmp_path / "log.jsonl"
    bodies = [
        {
            "messages": [
                {"role": "system", "content": f"{name} " * 60},
                {"role": "user", "content": "?"},
            ]
        }
        for name in ("alpha", "beta", "gamma")
        for _ in range(2)
    ]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    with bare_llama(weights, cache_ram_mib=0) as url:
        found = examine(url, "--log", str(path))
    assert found["slots-few"]["severity"] == "problem"
    assert "--parallel 3" in found["slots-few"]["do"]


# a log, and the command


def test_a_log_alone_asks_no_server(tmp_path: Path, examine: Examine) -> None:
    path = tmp_path / "log.jsonl"
    tail = "You answer questions about ships. " * 20
    path.write_text(
        "".join(
            json.dumps(
                {"messages": [{"role": "system", "content": f"It is 2026-11-{day}. {tail}"}]}
            )
            + "\n"
            for day in (28, 29, 30)
        )
    )
    found = examine("--log", str(path))
    assert remarks(found) == {"prompt-parts": "problem"}
    assert "character 14 of message 1 (system)" in found["prompt-parts"]["found"]
    assert "a date stands" in found["prompt-parts"]["found"]
    assert "ships" not in json.dumps(found)
    assert "nothing is asked" in found["said"]


def test_a_log_that_is_not_there_and_what_is_no_url_are_problems(
    tmp_path: Path, examine: Examine
) -> None:
    assert "can't be read" in examine("--log", str(tmp_path / "none"))["settings"]["found"]
    assert examine("gpu-1:8000")["code"] == 1


def test_a_server_that_hangs_ends_in_time(examine: Examine) -> None:
    with Upstream() as server:
        server.play([End.HANG])
        found = examine(server.url, "--within", "0.5")
    assert remarks(found) == {"out-of-time": "unknown"}


def test_a_server_that_is_gone_does_not_hide_the_other(examine: Examine) -> None:
    with served(Engine()) as url:
        found = examine(f"http://127.0.0.1:{free_port()}", url)
    assert found["refused"]["severity"] == "problem"
    assert found["reuse"]["severity"] == "ok"


def test_the_text_begins_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Engine(caches=False)) as url:
        assert main(["doctor", url]) == 1
        lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{url}: it computes a repeated prompt")
    assert "--no-enable-prefix-caching" in lines[1]
    assert any(line.startswith(f"ok       {url}: reachable, ") for line in lines)
    assert len(lines) < 12


def test_options_that_need_a_server_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--events", "tcp://*:5557"]) == 2
    assert main(["doctor", "--adapter", "sql"]) == 2
    assert "needs a URL" in capsys.readouterr().err


class Parrot(Engine):
    """Answers each question with what some engine says to another one."""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        draw = Random(f"{self.seed} {path} {len(self.asked)}")
        self.asked.append((path, body))
        if path == "/v1/models" and draw.random() < 0.9:
            names = ("VLLM_MODELS", "SGLANG_MODELS", "LLAMACPP_MODELS", "HOSTED_MODELS")
            return 200, ALL[names[int(self.seed) % 4]].decode()
        said = draw.choice([*ALL.values(), *HOSTILE]).decode("latin-1")
        return draw.choice([200, 200, 200, 400, 404, 500]), said


HOSTILE = (
    b"",
    b"[" * 50_000,
    b'{"data":[{"id":5}]}',
    b'{"usage":{"prompt_tokens":%b}}' % (b"9" * 99),
)


@pytest.mark.parametrize("seed", range(12))
def test_nonsense_ends_in_findings(seed: int, examine: Examine) -> None:
    parrot = Parrot(seed=str(seed))
    found = examine.one(parrot, "--adapter", "sql", "--within", "20")
    assert found["verdict"]
    assert len(parrot.asked) <= MOST_COMPUTED + MOST_FREE + 8
