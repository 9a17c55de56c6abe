"""The operator's side: who may see it, what it tells, and what it never tells."""

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness import Fake, Gateway, Reply, chat, running
from rawclient import Raw, chunked, get, post

KEYS = {"ADMIN": "admin-key-7f3a", "ONE": "tenant-key-51c2", "TWO": "tenant-key-9d40"}
PRICES = "[models.m1]\ninput = 2.5\ncached_input = 1.25\noutput = 10\n"
ADMIN = {"Authorization": f"Bearer {KEYS['ADMIN']}"}
GUARDED = ("stats", "ledger", "config", "workers", "openapi.json")
SECRET = "zq-marker-of-a-prompt"


@pytest.fixture(scope="module")
def local(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """No keys: one tenant, admin for this machine."""
    served = Gateway(PRICES, upstream=fake.url, folder=tmp_path_factory.mktemp("local"))
    with running(served):
        yield served
    assert_no_bug(served)


@pytest.fixture(scope="module")
def keyed(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two tenants and an admin key; everything logged."""
    served = Gateway(
        '[admin]\napi_key_env = "ADMIN"\n[tenants.one]\napi_key_env = "ONE"\n'
        '[tenants.two]\napi_key_env = "TWO"\n[telemetry]\nlog_requests = "all"\n'
        f'[engines.upstream]\nurl = "{fake.url}"\napi_key_env = "ENGINE_KEY"\n' + PRICES,
        folder=tmp_path_factory.mktemp("keyed"),
        environment={**KEYS, "ENGINE_KEY": "engine-key-0b1e"},
    )
    with running(served):
        yield served
    assert_no_bug(served)


@pytest.fixture(autouse=True)
def _clean(fake: Fake) -> None:
    fake.reset()


def assert_no_bug(served: Gateway) -> None:
    assert "Traceback" not in served.stderr, served.stderr
    assert '"event":"bug"' not in served.stderr, served.stderr


def code(reply: Reply) -> tuple[int, str]:
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return reply.status, error["code"]


def ask(served: Gateway, text: str, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    reply = served.post("/v1/chat/completions", chat(text, **fields), headers)
    assert reply.status == 200, reply.body
    return reply


def key_of(reply: Reply) -> str:
    match = re.search(r'key="([0-9a-f]{32})"', reply.cache_status)
    assert match is not None, reply.cache_status
    return match[1]


# Who may -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*(f"/preheat/v1/{name}" for name in GUARDED), "/metrics"])
def test_the_admin_key_opens_and_nothing_else_does(keyed: Gateway, path: str) -> None:
    assert keyed.get(path, ADMIN).status == 200
    for wrong in (
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer admin-key-7f3"},
        {"Authorization": "Bearer admin-key-7f3ab"},
        {"Authorization": f"Bearer {KEYS['ONE']}"},
        {"Authorization": f"Basic {KEYS['ADMIN']}"},
        {"Authorization": "Bearer \u00fc"},
        {"X-Api-Key": KEYS["ADMIN"]},
    ):
        reply = keyed.get(path, wrong)
        assert code(reply) == (401, "invalid-admin-key"), wrong
        assert reply.headers["www-authenticate"] == "Bearer"


def test_with_a_key_the_place_doesn_t_matter(keyed: Gateway) -> None:
    from_elsewhere = {**ADMIN, "Host": "admin.example", "Origin": "https://admin.example"}
    assert keyed.get("/preheat/v1/stats", from_elsewhere).status == 200


def test_invalidation_needs_the_key_too(keyed: Gateway) -> None:
    body = {"tags": ["t"]}
    assert keyed.post("/preheat/v1/invalidate", body).status == 401
    assert (
        keyed.post(
            "/preheat/v1/invalidate", body, {"Authorization": f"Bearer {KEYS['ONE']}"}
        ).status
        == 401
    )
    assert keyed.post("/preheat/v1/invalidate", body, ADMIN).status == 200


def test_health_and_readiness_are_open(keyed: Gateway) -> None:
    for path in ("/healthz", "/readyz"):
        assert keyed.get(path, {"Host": "probe.internal"}).status == 200


@pytest.mark.parametrize("path", [*(f"/preheat/v1/{name}" for name in GUARDED), "/metrics"])
def test_without_a_key_a_web_page_gets_nothing(local: Gateway, path: str) -> None:
    """It may send requests to this machine, under a name that it made resolve to here, or from
    another origin; it can't do either without saying so."""
    port = local.port
    for host in (
        f"localhost:{port}",
        "localhost",
        f"127.0.0.1:{port}",
        f"[::1]:{port}",
        "[::1]",
        "LocalHost",
    ):
        assert local.get(path, {"Host": host}).status == 200, host
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
    ):
        assert code(local.get(path, {"Host": host})) == (403, "admin-forbidden"), host
    for origin in ("https://evil.example", "null", f"http://localhost:{port}"):
        assert code(local.get(path, {"Origin": origin})) == (403, "admin-forbidden"), origin


def test_without_a_key_a_web_page_can_t_invalidate(local: Gateway) -> None:
    """Neither as a form would send it, nor as a script would."""
    body = json.dumps({"model": "m1"}).encode()
    for headers, status in (
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json", "Origin": "https://evil.example"}, 403),
        ({"Content-Type": "application/json", "Host": "evil.example"}, 403),
    ):
        assert local.request("POST", "/preheat/v1/invalidate", body, headers).status == status


def outside_address() -> str:
    """An address of this machine that isn't loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            pytest.skip("this machine has no address but loopback")


def test_without_a_key_other_machines_get_nothing(
    fake: Fake, tmp_path_factory: pytest.TempPathFactory
) -> None:
    address = outside_address()
    served = Gateway(
        '[listen]\naddress = "0.0.0.0:0"\n[tenants.one]\napi_key_env = "ONE"\n',
        "--listen",
        "0.0.0.0:0",
        upstream=fake.url,
        folder=tmp_path_factory.mktemp("outside"),
        environment=KEYS,
    )
    with running(served):
        with socket.create_connection((address, served.port), timeout=10) as client:
            client.sendall(get("/preheat/v1/stats", "Connection: close\r\n"))
            assert client.makefile("rb").read().startswith(b"HTTP/1.1 403 ")
        with Raw(served.port) as near:
            assert near.ask(get("/preheat/v1/stats")).status == 200


def test_metrics_may_be_opened_to_everybody(
    fake: Fake, tmp_path_factory: pytest.TempPathFactory
) -> None:
    served = Gateway(
        "[telemetry]\nopen_metrics = true\n",
        upstream=fake.url,
        folder=tmp_path_factory.mktemp("open"),
    )
    with running(served):
        assert served.get("/metrics", {"Host": "prometheus.internal"}).status == 200
        assert served.get("/preheat/v1/stats", {"Host": "prometheus.internal"}).status == 403


def test_admin_on_a_port_of_its_own_is_nowhere_else(
    fake: Fake, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    served = Gateway(
        f'[admin]\nlisten = "127.0.0.1:{port}"\n',
        upstream=fake.url,
        folder=tmp_path_factory.mktemp("apart"),
    )
    with running(served), Raw(served.port) as gateway, Raw(port) as admin:
        for path in ("/preheat/v1/stats", "/metrics", "/preheat/v1/config"):
            assert gateway.ask(get(path)).code == "not-found"
            assert admin.ask(get(path)).status == 200
        for path in ("/healthz", "/readyz"):  # a load balancer asks where it sends
            assert gateway.ask(get(path)).status == admin.ask(get(path)).status == 200
        assert admin.ask(post(chat())).status in {404, 405}
        assert gateway.ask(post(chat())).status == 200
        invalidation = post({"model": "m1"}, "/preheat/v1/invalidate")
        assert gateway.ask(invalidation).code == "not-found"
        assert admin.ask(invalidation).json["matched"] == 1
        assert admin.ask(post(chat(), headers="Upgrade: h2c\r\n")).status in {404, 405}


def test_a_tenant_is_known_by_its_key_alone(keyed: Gateway) -> None:
    for headers in ({"Authorization": f"Bearer {KEYS['ONE']}"}, {"X-Api-Key": KEYS["ONE"]}):
        assert ask(keyed, "tenant", headers).status == 200
    for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/models"):
        for headers in ({}, {"Authorization": "Bearer nobody"}, ADMIN, {"X-Api-Key": ""}):
            reply = keyed.request("GET" if path == "/v1/models" else "POST", path, b"{}", headers)
            assert code(reply) == (401, "invalid-api-key")
            assert reply.headers["www-authenticate"] == "Bearer"


def test_a_key_in_a_trailer_is_no_key(keyed: Gateway) -> None:
    end = f"0\r\nAuthorization: Bearer {KEYS['ONE']}\r\n\r\n".encode()
    with Raw(keyed.port) as client:
        assert client.ask(chunked(json.dumps(chat()).encode(), end=end)).code == "invalid-api-key"


def test_tenants_on_one_connection_are_kept_apart(keyed: Gateway, fake: Fake) -> None:
    """Heads are remembered; each speaks for its own key only."""
    one, two, nobody = (
        post(chat("apart"), headers=f"Authorization: Bearer {key}\r\n")
        for key in (KEYS["ONE"], KEYS["TWO"], "tenant-key-none")
    )
    with Raw(keyed.port) as client:
        for _ in range(3):
            texts = [
                client.ask(request).json["choices"][0]["message"]["content"]
                for request in (one, two)
            ]
            assert texts == ["A1", "A2"]
            assert client.ask(nobody).status == 401


# Invalidation --------------------------------------------------------------------------------

TENANT = {"one": {"X-Api-Key": KEYS["ONE"]}, "two": {"X-Api-Key": KEYS["TWO"]}}


@pytest.fixture
def stored(keyed: Gateway, fake: Fake) -> dict[str, str]:
    """Six answers by name, with their keys; nothing else is stored."""
    fake.script(default="echo")
    for tenant in TENANT:
        keyed.post("/preheat/v1/invalidate", {"tenant": tenant}, ADMIN)
    wanted = {
        "plain": ("one", {}, "m1"),
        "red": ("one", {"X-Preheat-Tags": "red"}, "m1"),
        "red-blue": ("one", {"X-Preheat-Tags": "red, blue"}, "m1"),
        "model": ("one", {}, "m2"),
        "namespace": ("one", {"X-Preheat-Namespace": "dev"}, "m1"),
        "other": ("two", {"X-Preheat-Tags": "red"}, "m1"),
    }
    keys = {}
    for name, (tenant, headers, model) in wanted.items():
        for _ in range(2):
            reply = ask(keyed, name, {**TENANT[tenant], **headers}, model=model)
        assert reply.cache == "hit"
        keys[name] = key_of(reply)
    return keys


@pytest.mark.parametrize(
    ("what", "gone"),
    [
        ({"tags": ["red"]}, {"red", "red-blue", "other"}),
        ({"tags": ["blue"]}, {"red-blue"}),
        ({"tags": ["green", "blue"]}, {"red-blue"}),
        ({"tags": ["red"], "tenant": "one"}, {"red", "red-blue"}),
        ({"model": "m2"}, {"model"}),
        ({"namespace": "dev"}, {"namespace"}),
        ({"namespace": ""}, {"plain", "red", "red-blue", "model", "other"}),
        ({"tenant": "two"}, {"other"}),
        ({"tenant": "one", "model": "m1", "namespace": ""}, {"plain", "red", "red-blue"}),
        ({"keys": ["plain", "other"]}, {"plain", "other"}),
        ({"keys": ["plain"], "tags": ["blue"]}, {"plain", "red-blue"}),
        ({"keys": ["plain", "other"], "tenant": "two"}, {"other"}),
        ({"tags": ["green"]}, set()),
        ({"keys": ["00" * 16]}, set()),
    ],
)
def test_what_is_invalidated_is_gone_and_the_rest_is_not(
    keyed: Gateway, stored: dict[str, str], what: dict[str, Any], gone: set[str]
) -> None:
    body = {**what, "keys": [stored.get(name, name) for name in what.get("keys", [])]}
    before = keyed.get("/preheat/v1/stats", ADMIN).json["l1"]
    dry = keyed.post("/preheat/v1/invalidate", {**body, "dry_run": True}, ADMIN).json
    assert (dry["matched"], dry["dry_run"]) == (len(gone), True)
    assert set(dry["entries"]) == {stored[name] for name in gone}
    assert keyed.get("/preheat/v1/stats", ADMIN).json["l1"] == before
    real = keyed.post("/preheat/v1/invalidate", body, ADMIN).json
    assert (real["matched"], real["dry_run"]) == (len(gone), False)
    assert set(real["entries"]) == set(dry["entries"])
    assert real["size_bytes"] == dry["size_bytes"]
    after = keyed.get("/preheat/v1/stats", ADMIN).json["l1"]
    assert after["entries"] == before["entries"] - len(gone)
    assert after["bytes"] == before["bytes"] - real["size_bytes"]
    left = keyed.post(
        "/preheat/v1/invalidate", {"keys": list(stored.values()), "dry_run": True}, ADMIN
    )
    assert set(left.json["entries"]) == {key for name, key in stored.items() if name not in gone}
    # Each of the two leaves a line of its own.
    for answer in (dry, real):
        line = line_with(keyed, "audit_id", answer["audit_id"])
        assert line["event"] == "invalidate"
        assert (line["matched"], line["dry_run"], line["by"]) == (
            len(gone),
            answer["dry_run"],
            "127.0.0.1",
        )


def lines(served: Gateway) -> list[dict[str, Any]]:
    return [json.loads(line) for line in served.stderr.splitlines()]


def line_with(served: Gateway, name: str, value: object, within_s: float = 5.0) -> dict[str, Any]:
    """The log line in which this has that value; a thread writes them, a moment later."""
    give_up_at = time.monotonic() + within_s
    while True:
        for line in lines(served):
            if line.get(name) == value:
                return line
        assert time.monotonic() < give_up_at, f"no line with {name} {value}"
        time.sleep(0.01)


def test_an_invalidated_answer_says_so_at_its_next_asking(
    keyed: Gateway, stored: dict[str, str]
) -> None:
    keyed.post("/preheat/v1/invalidate", {"keys": [stored["plain"]]}, ADMIN)
    reply = ask(keyed, "plain", TENANT["one"])
    assert (reply.cache, reply.detail) == ("miss", "invalidated")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"dry_run": true}',
        b'{"everything": true}',
        b'{"keys": "00"}',
        b'{"keys": ["00"]}',
        b'{"keys": ["zz"]}',
        b'{"keys": [1]}',
        b'{"tags": {}}',
        b'{"model": 1}',
        b'{"dry_run": "yes", "model": "m1"}',
        b'{"tags": ["\xff"]}',
        b'{"tags": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        json.dumps({"tags": ["x"] * 1_001}).encode(),
        json.dumps({"keys": ["00" * 16] * 10_001}).encode(),
    ],
)
def test_a_bad_invalidation_is_a_400_and_removes_nothing(
    keyed: Gateway, stored: dict[str, str], body: bytes
) -> None:
    entries = keyed.get("/preheat/v1/stats", ADMIN).json["l1"]["entries"]
    headers = {**ADMIN, "Content-Type": "application/json"}
    reply = keyed.request("POST", "/preheat/v1/invalidate", body, headers)
    assert code(reply) == (400, "invalid-body")
    assert keyed.get("/preheat/v1/stats", ADMIN).json["l1"]["entries"] == entries


# Draining ------------------------------------------------------------------------------------


def drain(served: Gateway, upstream: str, *, is_draining: bool) -> Reply:
    body = {"upstream": upstream, "drain": is_draining}
    return served.post("/preheat/v1/workers", body, ADMIN)


def test_a_drained_upstream_takes_nothing_until_it_is_let(keyed: Gateway, fake: Fake) -> None:
    fake.script(default="echo")
    tenant = {"Authorization": f"Bearer {KEYS['ONE']}"}
    reply = drain(keyed, "upstream", is_draining=True)
    assert (reply.status, reply.json["upstream"], reply.json["drain"]) == (200, "upstream", True)
    line = line_with(keyed, "audit_id", reply.json["audit_id"])
    assert (line["event"], line["upstream"], line["drain"]) == ("upstream-drain", "upstream", True)
    try:
        (upstream,) = keyed.get("/preheat/v1/workers", ADMIN).json["upstreams"]
        assert (upstream["name"], upstream["draining"], upstream["up"]) == ("upstream", True, 1)
        refused = keyed.post("/v1/chat/completions", chat("drained"), tenant)
        assert code(refused) == (503, "engine-breaker-open")
        assert keyed.get("/readyz").status == 503
    finally:
        assert drain(keyed, "upstream", is_draining=False).status == 200
    ask(keyed, "drained", tenant)


def test_who_drains_what_is_not_there_is_told_so(keyed: Gateway) -> None:
    reply = drain(keyed, "upstream.7", is_draining=True)
    assert code(reply) == (404, "not-found")
    assert "no upstream has this name" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"upstream": "upstream"}',
        b'{"upstream": "", "drain": true}',
        b'{"upstream": "upstream", "drain": 1}',
        b'{"upstream": "upstream", "drain": true, "more": 1}',
    ],
)
def test_a_bad_drain_is_a_400(keyed: Gateway, body: bytes) -> None:
    headers = {**ADMIN, "Content-Type": "application/json"}
    reply = keyed.request("POST", "/preheat/v1/workers", body, headers)
    assert code(reply) == (400, "invalid-body")


def test_draining_needs_the_admin_key_and_json(keyed: Gateway) -> None:
    body = b'{"upstream": "upstream", "drain": true}'
    assert code(keyed.request("POST", "/preheat/v1/workers", body)) == (401, "invalid-admin-key")
    as_text = {**ADMIN, "Content-Type": "text/plain"}
    reply = keyed.request("POST", "/preheat/v1/workers", body, as_text)
    assert code(reply) == (415, "unsupported-type")


@pytest.mark.parametrize(
    ("method", "path", "status", "expected"),
    [
        ("DELETE", "/preheat/v1/workers", 405, "method-not-allowed"),
        ("GET", "/preheat/v1/invalidate", 405, "method-not-allowed"),
        ("DELETE", "/preheat/v1/stats", 405, "method-not-allowed"),
        ("GET", "/preheat/v1/nothing", 404, "not-found"),
        ("GET", "/preheat/v1/../v1/stats", 404, "not-found"),
        ("GET", "/", 404, "not-found"),
        ("POST", "/healthz", 405, "method-not-allowed"),
    ],
)
def test_what_isn_t_there_is_an_error_in_the_usual_form(
    keyed: Gateway, method: str, path: str, status: int, expected: str
) -> None:
    assert code(keyed.request(method, path, None, ADMIN)) == (status, expected)


# What it tells -------------------------------------------------------------------------------


def samples(served: Gateway) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    reply = served.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        assert family.documentation
        assert family.name.startswith("preheat_")
        for sample in family.samples:
            name = (sample.name, frozenset(sample.labels.items()))
            assert name not in found
            found[name] = sample.value
    return found


def test_metrics_stats_and_ledger_tell_the_same_story(local: Gateway, fake: Fake) -> None:
    """Misses, hits, a join, a bypass, an error, a refusal, a passed path: each where it belongs."""
    fake.script({"content": "a", "delay_s": 0.2}, default="echo")
    with Raw(local.port) as first, Raw(local.port) as second:
        for client in (first, second):
            client.send(post(chat("story")))
        first.answer(), second.answer()
    for _ in range(3):
        ask(local, "story")
    ask(local, "story", temperature=1)
    ask(local, "story", {"Cache-Control": "no-store"})
    ask(local, "free", model="unpriced")
    fake.script({"status": 500, "body": {}})
    assert local.post("/v1/chat/completions", chat("fails")).status == 500
    assert local.post("/v1/chat/completions", b"{").status == 400
    assert local.post("/v1/embeddings", {"input": "x"}).status == 200

    stats, ledger, metrics = local.stats, local.ledger, samples(local)

    def metric(name: str, **labels: str) -> float:
        return metrics[name, frozenset(labels.items())]

    expected = {
        ("forward", "key-first-seen"): 2,
        ("join", "join"): 1,
        ("exact", "exact"): 3,
        ("forward", "bypass-sampled"): 1,
        ("forward", "no-store"): 1,
        ("forward", "status-500"): 1,
    }
    assert stats["answers"] == {f"{a}/{b}": count for (a, b), count in sorted(expected.items())}
    rows = {(row["model"], row["layer"], row["reason"]): row for row in ledger["rows"]}
    assert (
        ledger["requests"]
        == sum(expected.values())
        == sum(row["requests"] for row in rows.values())
    )
    for (model, layer, reason), row in rows.items():
        labels = {"tenant": "local", "model": model, "layer": layer, "reason": reason}
        assert metric("preheat_requests_total", **labels) == row["requests"]
        assert metric("preheat_tokens_total", **labels, kind="input") == row["input_tokens"]
    assert stats["hit_ratio"]["exact"]["by_requests"] == 3 / 9
    assert metric("preheat_hit_ratio", layer="join", weight="request") == 1 / 9
    assert metric("preheat_l1_entries") == stats["l1"]["entries"] == 2
    assert metric("preheat_stored_total") == stats["l1"]["stored"] == 2
    assert metric("preheat_l1_bytes") == stats["l1"]["bytes"]
    assert metric("preheat_engine_errors_total", kind="status-500") == 1
    assert metric("preheat_refused_total", code="invalid-json") == 1
    for layer, count in (("exact", 3), ("join", 1), ("forward", 5), ("pass", 1)):
        assert metric("preheat_request_seconds_count", layer=layer) == count, layer
        assert metric("preheat_request_seconds_bucket", layer=layer, le="+Inf") == count
    assert metric("preheat_flights") == 0
    assert metric("preheat_engines_ready") == 1

    # To the last picodollar.
    assert ledger["residual"] == 0 == metric("preheat_ledger_residual")
    assert all(row["residual"] == 0 for row in rows.values())
    for name in ("paid", "saved_by_us", "saved_by_provider", "price_without_us"):
        assert ledger[name] == sum(row[name] for row in rows.values())
    assert ledger["price_without_us"] == (
        ledger["paid"] + ledger["saved_by_us"] + ledger["saved_by_provider"]
    )
    hits, first_asking = rows["m1", "exact", "exact"], rows["m1", "forward", "key-first-seen"]
    assert hits["saved_by_us"] == 3 * first_asking["paid"] > 0
    free = rows["unpriced", "forward", "key-first-seen"]
    assert free["paid"] == free["price_without_us"] == 0


def test_the_interface_describes_itself(local: Gateway) -> None:
    document = local.get("/preheat/v1/openapi.json").json
    assert document["openapi"].startswith("3.")
    for name in (*GUARDED, "invalidate"):
        assert f"/preheat/v1/{name}" in document["paths"] or name == "openapi.json"


# What it never tells -------------------------------------------------------------------------


def test_prompts_answers_and_keys_are_told_nowhere(keyed: Gateway, fake: Fake) -> None:
    """Not in the log, not on any admin page, not in an error, whatever goes wrong."""
    answer_text = "zq-marker-of-an-answer"
    headers = {
        **TENANT["one"],
        "Cookie": "zq-marker-of-a-cookie",
        "X-Preheat-Session": "zq-marker-of-a-session",
        "X-Own": "zq-marker-of-a-header",
    }
    fake.script(default={"content": answer_text})
    replies = []
    for stream in (False, True):
        replies += [
            ask(keyed, SECRET, headers, stream=stream, user="zq-marker-of-a-user") for _ in range(2)
        ]
    fake.script(
        {"status": 500, "body": {"error": {"message": answer_text}}},
        {"fault": "reset"},
        {"fault": "reset"},
        {"fault": "garbage"},
        {"sse": [{"delta": {"content": answer_text}}], "fault": "end_after"},
        {"body": answer_text},
        {"sse": [answer_text, "[DONE]"]},
    )
    for place in range(7):
        keyed.post(
            "/v1/chat/completions", chat(f"{SECRET} {place}", stream=place in {4, 6}), headers
        )
    wrong: list[tuple[str, bytes, dict[str, str]]] = [
        ("/v1/chat/completions", b'{"messages": "%b' % SECRET.encode(), headers),
        (
            "/v1/chat/completions",
            b'{"%b": 1, "%b": 2}' % (SECRET.encode(), SECRET.encode()),
            headers,
        ),
        ("/v1/chat/completions", b'{"model": ["%b"]}' % SECRET.encode(), headers),
        ("/v1/chat/completions", b"{}", {**headers, "X-Preheat-Ttl": SECRET}),
        ("/v1/chat/completions", b"{}", {**headers, "X-Preheat-Namespace": f"{SECRET} !"}),
        ("/v1/chat/completions", b"{}", {"X-Api-Key": SECRET}),
        ("/v1/embeddings", b'{"input": "%b"}' % SECRET.encode(), headers),
        (f"/v1/{SECRET}", b"{}", headers),
        (f"/v1/chat/completions?{SECRET}", b"{}", headers),
        (f"/{SECRET}", b"{}", headers),
        ("/preheat/v1/invalidate", b'{"%b": 1}' % SECRET.encode(), ADMIN),
    ]
    for path, body, sent in wrong:
        replies.append(keyed.post(path, body, sent))
    with Raw(keyed.port) as client:
        client.send(f"GET /{SECRET} HTTP/1.1\r\nHost: a\r\nX-{SECRET}\r\n\r\n".encode())
        assert SECRET.encode() not in client.rest()
    for reply in replies[4:]:
        assert b"zq-marker" not in reply.body, reply.body
    line_with(keyed, "request", replies[-1 - len(wrong)].headers["x-preheat-request"])
    pages = [keyed.get(f"/preheat/v1/{name}", ADMIN) for name in GUARDED] + [
        keyed.get("/metrics", ADMIN)
    ]
    told = [keyed.stderr, *(page.body.decode() + str(page.headers) for page in pages)]
    told += [str(reply.headers) for reply in replies]
    for text in told:
        for secret in (*KEYS.values(), "engine-key-0b1e", "zq-marker"):
            assert secret not in text, (secret, text[:200])


def test_settings_are_shown_without_what_they_hide(keyed: Gateway, local: Gateway) -> None:
    shown = keyed.get("/preheat/v1/config", ADMIN).json
    assert shown["admin"]["api_key_env"] == "ADMIN"
    assert shown["tenants"]["one"]["api_key_env"] == "ONE"
    assert shown["models"]["m1"]["input"] == 2.5
    assert local.get("/preheat/v1/config").json["listen"]["address"] == "127.0.0.1:0"


def test_a_log_line_is_json_with_a_time_and_a_name(keyed: Gateway) -> None:
    reply = ask(keyed, "log", TENANT["two"])
    line_with(keyed, "request", reply.headers["x-preheat-request"])
    for line in lines(keyed):
        assert isinstance(line["at"], float)
        assert re.fullmatch(r"[a-z_-]+", line["event"])


# Sessions that are over ------------------------------------------------------------------------

OVER = {"session": "chat-41", "state": "over"}


def test_a_session_is_said_to_be_over(local: Gateway) -> None:
    """What lies in slots is shown where there are some: tests/integration/test_slot_seats.py."""
    told = local.post("/preheat/v1/sessions", OVER).json
    audit_id = told.pop("audit_id")
    assert told == {**OVER, "tenant": "local", "slots": 0, "file_bytes": 0}
    line = line_with(local, "audit_id", audit_id)
    assert (line["event"], line["tenant"]) == ("session-over", "local")
    assert "chat-41" not in json.dumps(line)


def test_whose_session_is_over_must_be_said_where_there_are_tenants(keyed: Gateway) -> None:
    path = "/preheat/v1/sessions"
    assert code(keyed.post(path, OVER)) == (401, "invalid-admin-key")
    assert code(keyed.post(path, OVER, ADMIN)) == (400, "invalid-body")
    assert keyed.post(path, {**OVER, "tenant": "one"}, ADMIN).json["tenant"] == "one"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"session": "a"},
        {"state": "over"},
        {"session": "a", "state": "open"},
        {"session": "a b", "state": "over"},
        {"session": "a\n", "state": "over"},
        {"session": "a" * 129, "state": "over"},
        {"session": "a", "state": "over", "also": 1},
        {"session": "a", "state": "over", "tenant": ""},
    ],
)
def test_a_session_that_cant_be_is_a_400(local: Gateway, body: dict[str, object]) -> None:
    assert code(local.post("/preheat/v1/sessions", body)) == (400, "invalid-body")
