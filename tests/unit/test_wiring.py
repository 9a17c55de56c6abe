"""Names become objects, once."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat import config, wiring
from preheat.config import Choice, EngineSettings, Settings
from preheat.core import admission, eviction
from preheat.core.admission.doorkeeper import Doorkeeper
from preheat.core.eviction.lru import Lru
from preheat.engines.child import weights_of
from preheat.errors import ConfigError
from preheat.telemetry.logs import Log


class Own:
    """A policy that isn't in the tree."""

    def __init__(self, ratio: float, size: int = 3, word: str = "") -> None:
        if ratio > 1:
            raise ValueError("ratio is at most 1")
        self.ratio = ratio
        self.size = size


HERE = f"{__name__}:Own"
A_FUNCTION = f"{__name__}:settings_of"


def settings_of(**tree: Any) -> Settings:
    return config.check(tree)


def build(name: str, **options: Any) -> Any:
    return wiring.build(
        "l1.x", Choice(name=name, options=options), {"lru": Lru, "door": Doorkeeper}
    )


# policies


@pytest.mark.parametrize("name", eviction.POLICIES)
def test_every_eviction_policy_is_built_by_its_name(name: str) -> None:
    built = wiring.build("l1.eviction", Choice(name=name), eviction.POLICIES)
    assert isinstance(built, eviction.POLICIES[name])


@pytest.mark.parametrize("name", admission.POLICIES)
def test_every_admission_policy_is_built_by_its_name(name: str) -> None:
    built = wiring.build("l1.admission", Choice(name=name), admission.POLICIES)
    assert isinstance(built, admission.POLICIES[name])


def test_a_policy_gets_its_options() -> None:
    assert build("door", window=7)._window == 7


def test_a_policy_may_come_from_elsewhere() -> None:
    own = build(HERE, ratio=1, size=5)
    assert (own.ratio, own.size) == (1, 5)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("lfu", {}, "l1.x.name: unknown policy 'lfu'; known: lru, door"),
        ("lru", {"a": 1}, "l1.x.options: 'lru' has no 'a'; it has no options"),
        ("door", {"windo": 1}, "l1.x.options: 'door' has no 'windo'; it has window"),
        ("door", {"window": "x"}, "l1.x.options.window: expected int, got str"),
        ("door", {"window": True}, "l1.x.options.window: expected int, got bool"),
        ("door", {"window": 1.5}, "l1.x.options.window: expected int, got float"),
        (HERE, {"ratio": "x"}, "l1.x.options.ratio: expected float, got str"),
        (HERE, {}, f"l1.x.options: '{HERE}' refuses them: "),
        (HERE, {"ratio": 2.0}, f"l1.x.options: '{HERE}' refuses them: ratio is at most 1"),
        ("no_such_module:Lru", {}, "l1.x.name: can't import no_such_module:Lru: "),
        (
            "preheat.core.eviction.lru:No",
            {},
            "l1.x.name: can't import preheat.core.eviction.lru:No",
        ),
        (":Lru", {}, "l1.x.name: can't import :Lru"),
        (A_FUNCTION, {}, f"l1.x.name: {A_FUNCTION} isn't a class"),
    ],
)
def test_a_choice_that_cannot_be_built_is_named(
    name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name, **options)
    assert str(caught.value).startswith(said)


# engines and their models


def test_without_engines_there_is_the_embedded_one() -> None:
    settings = wiring.with_defaults(settings_of(exact={"ttl_s": 5}))
    assert settings.engines == {"embedded": EngineSettings(kind="embedded")}
    assert settings.exact.ttl_s == 5
    chosen = settings_of(engines={"a": {"url": "http://h"}})
    assert wiring.with_defaults(chosen) is chosen


def test_a_model_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    with pytest.raises(ConfigError, match=r"engines.e.model: there is no file .*none.gguf"):
        weights_of("e", str(path))
    path.write_bytes(b"")
    assert weights_of("e", str(path)) == path


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log(io.BytesIO())
    yield made
    made.close()


def test_an_engine_gets_its_settings_and_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-1")
    settings = EngineSettings(url="http://h:1/base", api_key_env="UPSTREAM_KEY", inject_usage=False)
    made, identity = wiring.engine("e", settings, log)
    assert (made.name, made.inject_usage, identity) == ("e", False, "")
    assert made._key == [(b"authorization", b"Bearer sk-1")]


def test_an_engine_without_its_key_is_named(tmp_path: Path, log: Log) -> None:
    settings = EngineSettings(url="http://h:1", api_key_env="NO_SUCH_VARIABLE")
    with pytest.raises(ConfigError, match=r"^engines.e.api_key_env: .* NO_SUCH_VARIABLE"):
        wiring.engine("e", settings, log)


@pytest.mark.parametrize("url", ["gpu:8000", "ftp://h", "http://", "//h"])
def test_an_address_that_is_none_is_named(url: str, tmp_path: Path, log: Log) -> None:
    with pytest.raises(ConfigError, match=r"^engines.e.url: expected http"):
        wiring.engine("e", EngineSettings(url=url), log)


def test_an_embedded_model_is_identified_by_its_bytes(tmp_path: Path, log: Log) -> None:
    weights = tmp_path / "tiny.gguf"
    identities = set()
    for content in (b"one", b"two"):
        weights.write_bytes(content)
        settings = EngineSettings(kind="embedded", model=str(weights), threads=3)
        made, identity = wiring.engine("e", settings, log)
        identities.add(identity)
        assert made.name == "e"
        assert not made.is_ready
    assert len(identities) == 2


def test_the_events_of_an_embedded_engine_go_to_the_log(tmp_path: Path, log: Log) -> None:
    weights = tmp_path / "tiny.gguf"
    weights.write_bytes(b"GGUF")
    made, _ = wiring.engine("e", EngineSettings(kind="embedded", model=str(weights)), log)
    made._child._on_event("engine-died", {"pid": 7})
    log.close()
    written = log._stream.getvalue()
    assert b'"event":"engine-died","engine":"e","pid":7' in written


# secrets


def test_keys_are_stable_with_the_operators_secret_and_with_the_one_made_at_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(settings: Settings) -> bytes:
        ring = wiring.keyring(settings, wiring.secret(settings), lambda model: "group")
        return ring.ask(b'{"messages":[]}', ring.partition("t", "/p", "")).key

    monkeypatch.setenv("SALT", "x" * 32)
    stable = settings_of(exact={"secret_env": "SALT"})
    assert key(stable) == key(stable)
    here, there = (settings_of(l2={"path": str(tmp_path / name)}) for name in ("here", "there"))
    assert key(here) == key(here)
    assert key(here) != key(there)
    monkeypatch.setenv("SALT", "y" * 32)
    changed = key(stable)
    monkeypatch.setenv("SALT", "x" * 32)
    assert key(stable) != changed


def test_a_short_secret_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALT", "hunter2")
    with pytest.raises(ConfigError, match=r"^exact.secret_env: SALT has fewer than 32") as caught:
        wiring.secret(settings_of(exact={"secret_env": "SALT"}))
    assert "hunter2" not in str(caught.value)


def test_tenants_have_their_keys_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("k1\n\n k2 \n")
    monkeypatch.setenv("KEY", "k3")
    tenants = {"a": {"api_key_file": str(path)}, "b": {"api_key_env": "KEY"}}
    assert wiring.tenant_keys(settings_of(tenants=tenants)) == {"k1": "a", "k2": "a", "k3": "b"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "tenants.a.api_key_file: .* holds no key"),
        (b"\xff", "tenants.a.api_key_file: can't read"),
        (None, "tenants.a.api_key_file: can't read"),
        (b"k3", "tenants.b: its key is also that of a"),
    ],
)
def test_a_tenant_without_a_key_of_its_own_is_named(
    content: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("KEY", "k3")
    tenants = {"a": {"api_key_file": str(path)}, "b": {"api_key_env": "KEY"}}
    with pytest.raises(ConfigError, match=said) as caught:
        wiring.tenant_keys(settings_of(tenants=tenants))
    assert "k3" not in str(caught.value)


def test_one_tenant_may_have_one_key_twice(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("k1 k1")
    assert wiring.tenant_keys(settings_of(tenants={"a": {"api_key_file": str(path)}})) == {
        "k1": "a"
    }


def test_the_admin_key_is_there_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wiring.admin_key(settings_of()) == ""
    chosen = settings_of(admin={"api_key_env": "ADMIN"})
    monkeypatch.setenv("ADMIN", "sk-admin")
    assert wiring.admin_key(chosen) == "sk-admin"
    monkeypatch.delenv("ADMIN")
    with pytest.raises(ConfigError, match=r"^admin.api_key_env"):
        wiring.admin_key(chosen)


# the rest


def test_without_a_certificate_there_is_no_tls() -> None:
    assert wiring.tls(settings_of()) is None


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for path in (broken, tmp_path / "none.pem"):
        listen = {"tls_cert": str(path), "tls_key": str(path)}
        with pytest.raises(ConfigError, match=r"^listen.tls_cert: can't use"):
            wiring.tls(settings_of(listen=listen))


def test_a_certificate_is_used(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj"
    try:
        subprocess.run(
            [*command.split(), "/CN=localhost", "-keyout", str(key), "-out", str(cert)],
            check=True,
            capture_output=True,
            timeout=30,
        )
    except FileNotFoundError:
        pytest.skip("openssl isn't installed")
    context = wiring.tls(settings_of(listen={"tls_cert": str(cert), "tls_key": str(key)}))
    assert context is not None


@pytest.mark.parametrize("package", ["numpy", "pyarrow"])
def test_a_request_log_without_its_packages_is_refused_with_the_remedy(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings_of(log={"enabled": True})
    wiring.check_request_log(wanted)
    monkeypatch.setitem(sys.modules, package, None)
    wiring.check_request_log(settings_of())
    with pytest.raises(ConfigError, match=r"^log\.enabled: .*pip install 'preheat\[log\]'"):
        wiring.check_request_log(wanted)


def test_limits_are_those_of_the_settings() -> None:
    limits = wiring.limits(settings_of(listen={"body_bytes": 5, "head_lines": 6, "idle_s": 7}))
    assert (limits.body_bytes, limits.head_lines, limits.idle_s) == (5, 6, 7.0)


def test_the_parts_follow_the_settings(tmp_path: Path, log: Log) -> None:
    settings = settings_of(
        exact={"ttl_s": 5, "max_ttl_s": 50, "stale_s": 2},
        l1={"bytes": 1_000, "entries": 10, "entry_bytes": 100, "eviction": {"name": "lru"}},
        models={"m": {"input": 1.0, "output": 2.0}, "n": {"input": 1.0, "cached_input": 0.5}},
        namespaces={"chat": {"sampled": "variants(3)"}, "short": {"ttl_s": 1}},
    )
    parts = wiring.Parts(settings, log)
    assert (parts.inventory.budget_bytes, parts.inventory.budget_entries) == (1_000, 10)
    assert parts.inventory.stale_s == 2.0
    assert isinstance(parts.inventory._eviction, Lru)
    assert parts.ledger.price("m").cached_input == parts.ledger.price("m").input == 10**6
    assert parts.ledger.price("n").cached_input == 5 * 10**5
    freshness = parts.controller._freshness_of
    assert (freshness("").ttl_s, freshness("").max_ttl_s, freshness("").variants) == (5, 50, 0)
    assert (freshness("chat").ttl_s, freshness("chat").variants) == (5, 3)
    assert (freshness("short").ttl_s, freshness("short").variants) == (1, 0)
