"""The settings: one frozen tree, checked as a whole."""

import os
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat import config
from preheat.config import (
    L1,
    NAMED,
    Choice,
    EngineSettings,
    Exact,
    ModelSettings,
    NamespaceSettings,
    Settings,
    Telemetry,
    TenantSettings,
)
from preheat.errors import ConfigError

UPSTREAM = {"url": "http://127.0.0.1:9"}


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        config.check(tree)
    return str(caught.value)


# mistakes


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ({"exat": {}}, ["exat: unknown key; did you mean exact?", "l1"]),
        ({"nothing": {}}, ["nothing: unknown key; known here: listen", "engines.fallback_message"]),
        ({"exact": {"ttl": 5}}, ["exact.ttl: unknown key; did you mean ttl_s?", "max_ttl_s"]),
        ({"l1": {"eviction": {"nam": "x"}}}, ["l1.eviction.nam: unknown key", "options"]),
        ({"engines": {"a": {"uri": ""}}}, ["engines.a.uri: unknown key", "url"]),
        ({"engines": {"a": UPSTREAM, "b": {"uri": ""}}}, ["engines.b.uri: unknown key"]),
        ({"models": {"m/1": {"prise": 1}}}, ["models.m/1.prise: unknown key", "cached_input"]),
        ({"exact": {"ttl_s": "x"}}, ["exact.ttl_s", "expected `float`", "got `str`"]),
        ({"exact": {"ttl_s": 0}}, ["exact.ttl_s", "> 0.0"]),
        ({"exact": {"ttl_s": -1.5}}, ["exact.ttl_s", "> 0.0"]),
        ({"exact": {"ttl_s": float("inf")}}, ["exact.ttl_s", "finite", "inf"]),
        ({"exact": {"ttl_s": float("nan")}}, ["exact.ttl_s", "finite", "nan"]),
        ({"models": {"m": {"output": float("inf")}}}, ["models.m.output", "finite"]),
        ({"l1": {"bytes": 1.5}}, ["l1.bytes", "`int`"]),
        ({"l1": {"bytes": -1}}, ["l1.bytes", ">= 0"]),
        ({"l1": {"bytes": True}}, ["l1.bytes", "`bool`"]),
        ({"l1": {"eviction": "lru"}}, ["l1.eviction", "`str`"]),
        ({"l1": {"eviction": {}}}, ["l1.eviction", "name"]),
        ({"exact": 5}, ["exact", "`int`"]),
        ({"engines": 5}, ["engines", "`int`"]),
        ({"engines": {"a": 5}}, ["engines.a", "`int`"]),
        ({"engines": {"a": {"url": 5}}}, ["engines.a.url", "`int`"]),
        (
            {"engines": {"a": {**UPSTREAM, "kind": "vllm"}}},
            ["engines.a.kind", "openai", "embedded"],
        ),
        ({"engines": {"a": {**UPSTREAM, "forward_headers": [1]}}}, ["engines.a.forward_headers"]),
        ({"engines": {"a": {}}}, ["engines.a.url", "needed"]),
        ({"engines": {"a": {"kind": "embedded", **UPSTREAM}}}, ["engines.a.url"]),
        ({"engines": {"a b": UPSTREAM}}, ["engines.a b", "letters"]),
        ({"engines": {"fallback_message": 5}}, ["engines.fallback_message", "`int`"]),
        ({"fallback_message": "x"}, ["fallback_message", "engines.fallback_message"]),
        (
            {"telemetry": {"log_requests": "some"}},
            ["telemetry.log_requests", "none", "misses", "'some'"],
        ),
        ({"exact": {"sampled": "always"}}, ["exact.sampled", "bypass", "variants(k)", "'always'"]),
        ({"exact": {"sampled": "variants(0)"}}, ["exact.sampled", "64"]),
        ({"exact": {"sampled": "variants(65)"}}, ["exact.sampled", "64"]),
        ({"namespaces": {"n": {"sampled": "x"}}}, ["namespaces.n.sampled"]),
        ({"namespaces": {"n": {"ttl_s": 0}}}, ["namespaces.n.ttl_s", "more than 0"]),
        ({"models": {"m": {"engine": "b"}}}, ["models.m.engine", "'b'", "none"]),
        (
            {"engines": {"a": UPSTREAM}, "models": {"m": {"engine": "b"}}},
            ["models.m.engine", "'b'", "known: a"],
        ),
        ({"models": {"m": {"input": -0.1}}}, ["models.m.input", ">= 0"]),
        ({"models": {"m": {"cached_input": -0.1}}}, ["models.m.cached_input", "negative"]),
        ({"tenants": {"t": {}}}, ["tenants.t", "either"]),
        ({"tenants": {"t": {"api_key_env": "A", "api_key_file": "b"}}}, ["tenants.t", "either"]),
        ({"listen": {"tls_cert": "a.pem"}}, ["listen", "tls_key"]),
        ({"listen": {"address": "0.0.0.0:80"}}, ["listen.address", "tenants"]),
        ({"listen": {"address": "[::]:80"}}, ["listen.address", "tenants"]),
        ({"listen": {"address": "127.0.0.1.example:80"}}, ["listen.address", "tenants"]),
        ({"admin": {"listen": "nowhere"}}, ["admin.listen", "host:port"]),
    ],
)
def test_a_mistake_is_named_with_its_key_and_what_was_expected(
    tree: dict[str, Any], parts: list[str]
) -> None:
    said = refusal(tree)
    assert said.startswith(parts[0])
    assert [part for part in parts if part not in said] == []


@pytest.mark.parametrize(
    "text", ["", "localhost", "8000", ":8000", "host:", "host:x", "host:65536", "host:-1", "h:²"]
)
def test_an_address_is_host_and_port(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^k: expected host:port"):
        config.address_of(text, "k")


@pytest.mark.parametrize("text", ["8000", ":8000"])
def test_a_port_alone_is_told_as_an_address(text: str) -> None:
    with pytest.raises(ConfigError, match=r"port 8000 of this machine is 127\.0\.0\.1:8000"):
        config.address_of(text, "k")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::1]:8000", "::1", 8000),
        ("gpu-1:65535", "gpu-1", 65_535),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int) -> None:
    assert config.address_of(text, "k") == (host, port)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.1", False),
        ("127.example.com", False),
        ("gpu-1", False),
    ],
)
def test_only_loopback_is_loopback(host: str, is_loopback: bool) -> None:
    assert config.is_loopback(host) is is_loopback


def test_with_tenants_it_may_be_reached_from_outside() -> None:
    tree = {"listen": {"address": "0.0.0.0:80"}, "tenants": {"t": {"api_key_env": "KEY"}}}
    assert config.check(tree).listen.address == "0.0.0.0:80"


@pytest.mark.parametrize(
    ("text", "variants"), [("bypass", 0), ("reuse", 1), ("variants(1)", 1), ("variants(64)", 64)]
)
def test_sampled_says_how_many_answers_are_kept(text: str, variants: int) -> None:
    assert config.variants_of(text, "k") == variants


# where settings come from


def test_without_anything_the_defaults_are_in_force() -> None:
    settings = config.load(None, {}, {})
    assert settings == Settings()
    assert settings.listen.address == "127.0.0.1:8000"
    assert (settings.exact.ttl_s, settings.exact.sampled) == (3_600.0, "bypass")
    assert (settings.l1.bytes, settings.l1.entries) == (268_435_456, 100_000)
    assert (settings.l1.eviction.name, settings.l1.admission.name) == ("sieve", "always")


def test_the_file_the_environment_and_the_command_line_override_in_this_order(
    tmp_path: Path,
) -> None:
    path = tmp_path / "preheat.toml"
    path.write_text("[exact]\nttl_s = 1\nstale_s = 1\nmax_ttl_s = 1\n", encoding="utf-8")
    environment = {"PREHEAT__EXACT__TTL_S": "2", "PREHEAT__EXACT__STALE_S": "2", "PATH": "/bin"}
    settings = config.load(path, environment, {"exact.ttl_s": 3})
    assert (settings.exact.ttl_s, settings.exact.stale_s, settings.exact.max_ttl_s) == (3, 2, 1)


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        ("PREHEAT__EXACT__TTL_S", "600", Settings(exact=Exact(ttl_s=600))),
        ("PREHEAT__EXACT__SAMPLED", "reuse", Settings(exact=Exact(sampled="reuse"))),
        ("PREHEAT__EXACT__SAMPLED", '"reuse"', Settings(exact=Exact(sampled="reuse"))),
        (
            "PREHEAT__TELEMETRY__OPEN_METRICS",
            "true",
            Settings(telemetry=Telemetry(open_metrics=True)),
        ),
        ("PREHEAT__L1__EVICTION__NAME", "lru", Settings(l1=L1(eviction=Choice(name="lru")))),
        (
            "PREHEAT__L1__EVICTION",
            '{ name = "lru", options = { a = 1 } }',
            Settings(l1=L1(eviction=Choice(name="lru", options={"a": 1}))),
        ),
        (
            "PREHEAT__ENGINES__GPU__URL",
            "http://gpu:8000/v1",
            Settings(engines={"gpu": EngineSettings(url="http://gpu:8000/v1")}),
        ),
        ("PREHEAT__ENGINES__FALLBACK_MESSAGE", "later", Settings(fallback_message="later")),
    ],
)
def test_the_environment_overrides_one_value(name: str, text: str, changed: Settings) -> None:
    assert config.load(None, {name: text}, {}) == changed


def test_the_environment_knows_no_case_and_the_files_spelling_wins(tmp_path: Path) -> None:
    path = tmp_path / "preheat.toml"
    path.write_text('[models.GPT-4o]\nversion = "1"\n', encoding="utf-8")
    settings = config.load(path, {"PREHEAT__MODELS__GPT-4O__VERSION": "two"}, {})
    assert settings.models == {"GPT-4o": ModelSettings(version="two")}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PREHEAT__EXACT__TTL": "1"}, "exact.ttl: unknown key"),
        ({"PREHEAT__NOTHING": "1"}, "nothing: unknown key"),
        ({"PREHEAT__EXACT": "1"}, "exact: expected"),
        ({"PREHEAT__EXACT__TTL_S": "soon"}, "exact.ttl_s: expected"),
        (
            {"PREHEAT__EXACT": "1", "PREHEAT__EXACT__TTL_S": "1"},
            "exact.ttl_s: exact isn't a section",
        ),
    ],
)
def test_a_mistake_in_the_environment_is_named_too(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, environment, {})
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PREHEAT_EXACT_TTL_S", "PREHEAT__EXACT__TTL_S"),
        ("PREHEAT_LISTEN_TLS_CERT", "PREHEAT__LISTEN__TLS_CERT"),
        ("PREHEAT_ENGINES_GPU_1_URL", "PREHEAT__ENGINES__GPU_1__URL"),
        ("PREHEAT_FALLBACK_MESSAGE", ""),
        ("PREHEAT_TENANT_KEY", ""),
        ("PREHEAT_SERVICE_HOST", ""),
        ("PREHEAT_PORT_8000_TCP_ADDR", ""),
    ],
)
def test_a_variable_with_single_underscores_that_means_a_setting_is_named(
    name: str, meant: str
) -> None:
    if not meant:
        assert config.load(None, {name: "1"}, {}) == Settings()
        return
    with pytest.raises(ConfigError) as caught:
        config.load(None, {name: "1"}, {})
    assert str(caught.value).startswith(f"{name}: ")
    assert str(caught.value).endswith(meant)


def test_a_file_that_is_not_there_or_no_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "preheat.toml"
    with pytest.raises(ConfigError, match=r"can't read .*preheat.toml"):
        config.load(path, {}, {})
    for content in (b"[exact", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"preheat.toml isn't valid TOML"):
            config.load(path, {}, {})


def test_a_secret_comes_from_the_environment() -> None:
    assert config.secret_from("KEY", "k", {"KEY": " secret\n"}) == "secret"
    for environment in ({}, {"KEY": ""}, {"KEY": "  "}):
        with pytest.raises(ConfigError, match=r"^k: the environment variable KEY is empty"):
            config.secret_from("KEY", "k", environment)


def test_a_user_without_a_home_has_to_name_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    for find, key in ((config.cache_folder, "l2.path"), (config.log_folder, "log.path")):
        with pytest.raises(ConfigError, match=f"^{key}: this user has no home folder"):
            find(Settings(), {})
        assert find(Settings(), {"XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/c"}).is_absolute()


def test_the_environment_is_the_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT__EXACT__TTL_S", "7")
    assert config.environment()["PREHEAT__EXACT__TTL_S"] == "7"


def test_the_given_tree_is_left_as_it_was() -> None:
    tree = {"engines": {"fallback_message": "later", "a": dict(UPSTREAM)}}
    settings = config.check(tree)
    assert settings.fallback_message == "later"
    assert list(settings.engines) == ["a"]
    assert tree == {"engines": {"fallback_message": "later", "a": UPSTREAM}}


# the tree as a file

names = st.from_regex(config.NAME, fullmatch=True)
words = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
times = st.floats(1e-3, 1e9)
trees = st.builds(
    Settings,
    exact=st.builds(Exact, ttl_s=times, sampled=st.sampled_from(["reuse", "variants(3)"])),
    l1=st.builds(
        L1,
        bytes=st.integers(0, 2**62),
        eviction=st.builds(
            Choice,
            name=words,
            options=st.dictionaries(words, st.integers(-9, 9) | words | st.booleans(), max_size=3),
        ),
    ),
    fallback_message=words,
    engines=st.dictionaries(
        names.filter(lambda name: name != "fallback_message"),
        st.builds(
            EngineSettings,
            url=st.just("http://h"),
            forward_headers=st.lists(st.sampled_from(["x-a", "X-B"])).map(tuple),
        ),
        max_size=2,
    ),
    models=st.dictionaries(
        names, st.builds(ModelSettings, version=words, cached_input=st.none() | times), max_size=2
    ),
    tenants=st.dictionaries(
        names, st.builds(TenantSettings, api_key_env=words.filter(bool)), max_size=2
    ),
    namespaces=st.dictionaries(
        names, st.builds(NamespaceSettings, ttl_s=st.none() | times), max_size=2
    ),
)


@given(trees)
def test_the_tree_written_as_a_file_is_the_same_tree(settings: Settings) -> None:
    assert config.check(tomllib.loads(config.to_toml(settings))) == settings


def test_the_default_file_says_everything_and_changes_nothing() -> None:
    text = config.to_toml(Settings())
    assert config.check(tomllib.loads(text)) == Settings()
    sections = [NAMED.get(name) or type(default) for name, _, default in config.fields_of(Settings)]
    for section in sections:
        if issubclass(section, msgspec.Struct):
            for name, sentence, _ in config.fields_of(section):
                assert f"{name} =" in text
                assert sentence in text


def test_every_setting_has_a_default() -> None:
    assert all(section() == section() for section in (Settings, *NAMED.values()))
