"""What can be set, chosen, measured or gone wrong with has its place in the documents."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core_parts import Desk, request_for
from preheat.cli import COMMANDS
from preheat.config import NAMED, Settings, fields_of
from preheat.core import admission, eviction, routing
from preheat.core.stats import UpstreamCounts, snapshot
from preheat.engines import ENGINES
from preheat.stores import STORES
from preheat.telemetry.metrics import _GAUGES, render
from preheat.traces import FORMATS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "src" / "preheat").rglob("*.py"))
WORD = re.compile(r"[a-z][a-z0-9_]*(-[a-z0-9_]+)*")


def text_of(name: str) -> str:
    path = DOCS / name
    assert path.is_file(), f"docs/{name} is missing"
    return path.read_text(encoding="utf-8")


def missing(words: set[str], *pages: str) -> list[str]:
    """Those that don't stand in any of these pages as `code`."""
    spans = [span for page in pages for span in re.findall(r"`([^`\n]+)`", text_of(page))]
    known = set(chain.from_iterable(WORD.findall(span) and [span, *span.split()] for span in spans))
    return sorted(words - known)


def test_the_settings_page_is_what_its_script_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "settings_doc.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_setting_is_in_docs_settings() -> None:
    sections = {
        name: NAMED.get(name) or type(default)
        for name, _, default in fields_of(Settings)
        if name != "fallback_message"
    }
    names = {name for section in sections.values() for name, _, _ in fields_of(section)}
    assert missing(names | {"engines.fallback_message"}, "settings.md") == []


def test_every_setting_has_a_sentence() -> None:
    sections = [NAMED.get(name) or type(default) for name, _, default in fields_of(Settings)]
    silent = [
        f"{section.__name__}.{name}"
        for section in sections
        if section is not str
        for name, sentence, _ in fields_of(section)
        if not re.fullmatch(r"[A-Z\"W].*[.]", sentence)
    ]
    assert silent == []


@pytest.mark.parametrize(
    "table",
    [eviction.POLICIES, admission.POLICIES, routing.POLICIES, ENGINES, STORES],
    ids=["eviction", "admission", "routing", "engines", "stores"],
)
def test_every_table_entry_is_in_docs_adding_a_policy(table: dict[str, object]) -> None:
    assert missing(set(table), "adding-a-policy.md") == []


def test_every_trace_format_is_in_docs_traces() -> None:
    assert missing(set(FORMATS), "traces.md") == []


def test_every_command_is_in_the_documents() -> None:
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert [name for name in COMMANDS if f"preheat {name}" not in text] == []


def test_every_metric_is_in_docs_metrics() -> None:
    desk = Desk()
    desk.forward(request_for("a"), 0.0)
    desk.controller.on_request(request_for("a"), 1.0)
    desk.counters.refused["too-deep"] = desk.counters.engine_errors["reset"] = 1
    desk.counters.dropped["unfinished"] = 1
    desk.counters.l2["hit"] = desk.counters.stale["early"] = 1
    counted = snapshot(desk.ledger, desk.counters, dict.fromkeys(_GAUGES, 1.0), {})
    counted.upstreams["up"] = UpstreamCounts(up=1)
    families = list(text_string_to_metric_families(render(counted).decode()))
    assert len(families) > 20
    names = {
        f"{family.name}_total" if family.type == "counter" else family.name for family in families
    }
    assert missing(names, "metrics.md") == []


def test_every_log_event_is_in_docs_metrics() -> None:
    events = set(words_of(log_events))
    assert {"request", "listening", "engine-died", "bug"} <= events
    assert {"request-log-refused", "request-log-died", "l2-failing"} <= events
    assert missing(events, "metrics.md") == []


def test_every_error_code_is_in_docs_errors() -> None:
    codes = set(words_of(error_codes))
    assert {"too-deep", "head-timeout", "invalid-admin-key", "only-if-cached", "internal"} <= codes
    assert missing(codes, "errors.md") == []


def test_every_kind_of_engine_error_is_in_docs_errors() -> None:
    kinds = set(words_of(engine_error_kinds))
    assert {"connect", "tls", "timeout-idle", "breaker-open", "start", "internal"} <= kinds
    assert missing(kinds, "errors.md") == []


def test_every_reason_of_cache_status_is_in_docs_errors_or_docs_http() -> None:
    found = set(words_of(cache_reasons))
    finishes = {"length", "content_filter"}  # told as finish-…
    assert finishes <= found
    reasons = found - finishes | {f"finish-{reason}" for reason in finishes}
    assert {"key-first-seen", "evicted", "expired", "no-store", "bypass-sampled", "join"} <= reasons
    assert {"not-admitted", "variant-wanted", "bypass-path", "no-done"} <= reasons
    assert missing(reasons, "errors.md", "http.md") == []


def test_the_documents_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert dead == []


# What the sources say --------------------------------------------------------------------------


def words_of(find: Callable[[ast.AST], Iterator[ast.AST | None]]) -> Iterator[str]:
    """The words among the constants that `find` points at, over all of the package's sources."""
    for path in SOURCES:
        if path.name.startswith("fake"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for place in find(node):
                for one in ast.walk(place) if place is not None else ():
                    value = one.value if isinstance(one, ast.Constant) else None
                    if isinstance(value, str) and WORD.fullmatch(value):
                        yield value


def called(node: ast.AST) -> str:
    """The name of what a call calls; nothing for what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return getattr(function, "attr", None) or getattr(function, "id", "")


def keyword(node: ast.AST, name: str) -> ast.AST | None:
    assert isinstance(node, ast.Call)
    return next((one.value for one in node.keywords if one.arg == name), None)


def log_events(node: ast.AST) -> Iterator[ast.AST | None]:
    if called(node) in {"event", "on_event", "_on_event"}:
        assert isinstance(node, ast.Call)
        yield node.args[0] if node.args else None
    elif called(node) == "Child":  # it tells its death under its own name
        assert isinstance(node, ast.Call)
        name = node.args[0]
        assert isinstance(name, ast.Constant)
        yield ast.Constant(f"{name.value}-died")
    elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "event":
        yield node.value  # a line with fields of its own


def error_codes(node: ast.AST) -> Iterator[ast.AST | None]:
    if called(node) in {"RequestError", "_error", "error_body"}:
        yield keyword(node, "code")
        assert isinstance(node, ast.Call)
        yield from node.args[2:3] if called(node) == "_error" else ()
    elif called(node) == "_refuse":  # (status, code, message)
        assert isinstance(node, ast.Call)
        yield from node.args[1:2]
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        status, *rest = node.value.elts or [None]
        if isinstance(status, ast.Constant) and type(status.value) is int:
            yield from rest[:1]
    elif isinstance(node, ast.AsyncFunctionDef) and node.name == "_http_error":
        yield from (one for one in ast.walk(node) if isinstance(one, ast.Dict))
        yield from (one.args[1] for one in ast.walk(node) if called(one) == "get")
    elif called(node) == "Reject":
        assert isinstance(node, ast.Call)
        yield from node.args[1:2]


def engine_error_kinds(node: ast.AST) -> Iterator[ast.AST | None]:
    if called(node) == "EngineError":
        yield keyword(node, "kind")
    elif called(node) == "fail":
        assert isinstance(node, ast.Call)
        yield from node.args[:1]
    elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "_STATUS_OF_KIND":
        yield node.value


def cache_reasons(node: ast.AST) -> Iterator[ast.AST | None]:
    if called(node) == "Forward":
        assert isinstance(node, ast.Call)
        yield from node.args[1:2]
    elif called(node) in {"Drop", "Reject"}:
        assert isinstance(node, ast.Call)
        yield from node.args[-1:]
    elif called(node) in {"remove", "note_absent"}:
        assert isinstance(node, ast.Call)
        yield from node.args[1:2]
    elif isinstance(node, ast.FunctionDef) and re.match(r"_?why_", node.name):
        yield from (one.value for one in ast.walk(node) if isinstance(one, ast.Return))
    elif isinstance(node, ast.Assign):
        names = {getattr(one, "attr", None) or getattr(one, "id", None) for one in node.targets}
        if names & {"unstorable", "bypass"}:
            yield node.value
    elif called(node) == "Outcome":
        yield keyword(node, "unstorable")
    elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        yield from (ast.Constant(word) for word in re.findall(r"\bdetail=([a-z-]+)", text))
