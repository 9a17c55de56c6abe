"""How long answers live, through real processes: stale ones, early refreshes, kept refusals."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness import Fake, Gateway, Reply, chat, running
from rawclient import Raw, post
from structured import Bare, list_of

LIFE_S = 0.2
RULES = f"""
[exact]
stale_s = 60
[namespaces.swr]
ttl_s = {LIFE_S}
stale_while_revalidate_s = 60
[namespaces.brief]
ttl_s = {LIFE_S}
stale_while_revalidate_s = 0.3
[namespaces.sie]
ttl_s = {LIFE_S}
stale_if_error_s = 60
[namespaces.brisk]
ttl_s = 3
[namespaces.plain]
ttl_s = {LIFE_S}
[namespaces.neg]
negative_ttl_s = 0.6
stale_while_revalidate_s = 60
stale_if_error_s = 60
[namespaces.drawn]
ttl_s = {LIFE_S}
stale_while_revalidate_s = 60
sampled = "variants(2)"
"""
ENGINE = """
[engines.up]
url = "{url}"
first_byte_s = 0.6
breaker_failures = 100000
max_connections = 64
"""


def settings(fake: Fake, *, l2: str = "off", more: str = "", workers: int = 1) -> str:
    return (
        f'{more}\n[l2]\nkind = "{l2}"\n[listen]\nworkers = {workers}\ndrain_s = 5\n{RULES}'
        + ENGINE.format(url=fake.url)
    )


@pytest.fixture(autouse=True)
def _clean(fake: Fake) -> None:
    fake.reset()


@pytest.fixture(scope="module", params=["off", "lmdb"])
def gateway(
    request: pytest.FixtureRequest, fake: Fake, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """With and without an L2: the ways that a decision takes differ."""
    served = Gateway(settings(fake, l2=request.param), folder=tmp_path_factory.mktemp("fresh"))
    with running(served):
        yield served
        assert_sound(served)


def assert_sound(served: Gateway) -> None:
    """Nobody has seen a bug, no call is left over, and the books balance."""
    assert "Traceback" not in served.stderr, served.stderr
    assert '"event":"bug"' not in served.stderr, served.stderr
    wait_for(lambda: "preheat_flights 0.0" in served.get("/metrics").body.decode())
    assert served.ledger["residual"] == 0


def wait_for(condition: Callable[[], object], within_s: float = 8.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "it doesn't come true"
        time.sleep(0.01)


def ask(
    served: Gateway,
    text: str,
    namespace: str,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> Reply:
    sent = {"X-Preheat-Namespace": namespace, **(headers or {})}
    return served.post("/v1/chat/completions", chat(text, **fields), sent)


def raw(text: str, namespace: str, headers: str = "", **fields: Any) -> bytes:
    return post(chat(text, **fields), headers=f"X-Preheat-Namespace: {namespace}\r\n{headers}")


def said(reply: Reply) -> str:
    assert reply.status == 200, (reply.status, reply.body)
    if reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.events[-1] == "[DONE]"
        choices = [choice for one in reply.events[:-1] for choice in one["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    return str(reply.json["choices"][0]["message"]["content"])


def told(reply: Reply) -> dict[str, Bare]:
    """The parameters of Cache-Status, after checking it, and Age, by RFC 9211 and RFC 9111."""
    [(cache, found)] = list_of(reply.headers["cache-status"])
    assert cache == "preheat"
    is_hit = found.get("hit", False)
    assert isinstance(is_hit, bool)
    assert not (is_hit and "fwd" in found)
    assert found.get("fwd", "miss") in {"miss", "stale", "request", "bypass"}
    assert isinstance(found.get("ttl", 0), int)
    assert isinstance(found.get("key", ""), str)
    assert isinstance(found["detail"], str)
    assert ("age" in reply.headers) is is_hit
    if is_hit:
        assert reply.headers["age"].isdecimal()
        assert len(str(found["key"])) == 32
        assert "ttl" in found
    return found


def is_stale(reply: Reply, detail: str) -> bool:
    found = told(reply)
    ttl = found.get("ttl")
    return (
        found.get("hit") is True
        and isinstance(ttl, int)
        and ttl < 0
        and (found["detail"] == detail)
    )


def expire(served: Gateway, text: str, namespace: str, **fields: Any) -> str:
    """Have it answered once, and let that answer's life end."""
    reply = ask(served, text, namespace, **fields)
    assert told(reply)["fwd"] == "miss" or fields.get("temperature"), reply.cache_status
    time.sleep(LIFE_S + 0.02)
    return said(reply)


# Stale while revalidate ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_an_expired_answer_is_told_at_once_and_replaced(
    gateway: Gateway, fake: Fake, stream: bool
) -> None:
    text = f"replaced {stream}"
    old = expire(gateway, text, "swr", stream=not stream)
    fake.script({"content": "new", "delay_s": 0.4, "pieces": 2})
    began_at = time.monotonic()
    reply = ask(gateway, text, "swr", stream=stream)
    assert time.monotonic() - began_at < 0.35
    assert (said(reply), reply.headers["age"]) == (old, "0")
    assert is_stale(reply, "stale-while-revalidate")
    wait_for(lambda: fake.calls == 2)
    during = ask(gateway, text, "swr", stream=not stream)
    assert said(during) == old
    assert is_stale(during, "stale-while-revalidate")
    wait_for(lambda: fake.log["running"] == 0)
    wait_for(lambda: said(ask(gateway, text, "swr", stream=stream)) == "new")


def test_many_at_once_cost_one_refresh(gateway: Gateway, fake: Fake) -> None:
    old = expire(gateway, "many", "swr")
    fake.script({"content": "new", "delay_s": 0.5})
    with ExitStack() as stack:
        crowd = [stack.enter_context(Raw(gateway.port)) for _ in range(100)]
        for place, client in enumerate(crowd):
            client.send(raw("many", "swr", stream=place % 2 == 0))
        answers = [client.answer() for client in crowd]
    assert {said(answer) for answer in answers} == {old}
    assert all(is_stale(answer, "stale-while-revalidate") for answer in answers)
    wait_for(lambda: fake.log["running"] == 0 and fake.calls == 2)
    assert fake.calls == 2


def test_past_the_window_it_is_asked_for_first(gateway: Gateway, fake: Fake) -> None:
    expire(gateway, "past", "brief")
    time.sleep(0.3)
    reply = ask(gateway, "past", "brief")
    assert (told(reply)["fwd"], reply.detail, said(reply)) == ("stale", "expired", "A2")


BROKEN: dict[str, dict[str, Any]] = {
    "500": {"status": 500, "body": {"error": {"message": "no"}}},
    "429": {"status": 429, "body": {"error": {"message": "no"}}},
    "404": {"status": 404, "body": {"error": {"message": "no"}}},
    "reset": {"fault": "reset"},
    "broken": {"fault": "reset_after", "sse": ["x", "y"]},
    "no-answer": {"body": {"choices": []}},
}


@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN)
def test_a_refresh_that_fails_leaves_the_old_answer_and_is_tried_again_but_not_in_a_storm(
    gateway: Gateway, fake: Fake, fault: dict[str, Any]
) -> None:
    text = f"fails {fault}"
    old = expire(gateway, text, "swr")
    fake.script(default=fault)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        reply = ask(gateway, text, "swr")
        assert said(reply) == old
        assert is_stale(reply, "stale-while-revalidate")
    assert 2 <= fake.calls <= 4  # a reset of a used connection is tried once more
    fake.script(default={"content": "well again"})
    wait_for(lambda: said(ask(gateway, text, "swr")) == "well again", 3)


@pytest.mark.parametrize("leave", ["close", "reset"])
def test_a_refresh_outlives_the_client_that_caused_it(
    gateway: Gateway, fake: Fake, leave: str
) -> None:
    text = f"outlives {leave}"
    expire(gateway, text, "swr")
    fake.script({"content": "new", "delay_s": 0.3})
    with Raw(gateway.port) as client:
        client.ask(raw(text, "swr"))
        getattr(client, leave)()
    wait_for(lambda: fake.calls == 2)
    wait_for(lambda: fake.log["running"] == 0)
    assert fake.log["cancelled"] == 0
    wait_for(lambda: said(ask(gateway, text, "swr")) == "new")


def test_a_refresh_outlives_who_joined_it(gateway: Gateway, fake: Fake) -> None:
    """Who takes no stale answer waits for the refresh; when that one leaves, it goes on."""
    expire(gateway, "joined", "swr")
    fake.script({"content": "new", "delay_s": 0.4})
    ask(gateway, "joined", "swr")
    wait_for(lambda: fake.calls == 2)
    with Raw(gateway.port) as leaving, Raw(gateway.port) as staying:
        for client in (leaving, staying):
            client.send(raw("joined", "swr", "Cache-Control: max-age=0\r\n"))
        leaving.reset()
        answer = staying.answer()
        assert (said(answer), answer.cache) == ("new", "join")
    assert (fake.calls, fake.log["cancelled"]) == (2, 0)
    expire(gateway, "left", "swr")
    fake.script({"content": "new", "delay_s": 0.4})
    ask(gateway, "left", "swr")
    wait_for(lambda: fake.calls == 4)
    with Raw(gateway.port) as leaving:
        leaving.send(raw("left", "swr", "Cache-Control: max-age=0\r\n"))
        assert gateway.get("/healthz").status == 200
        leaving.reset()
    wait_for(lambda: fake.log["running"] == 0)
    assert fake.log["cancelled"] == 0
    wait_for(lambda: said(ask(gateway, "left", "swr")) == "new")


def test_a_refresh_brings_both_forms(gateway: Gateway, fake: Fake) -> None:
    """A whole body told by a streaming request's refresh, and the other way round."""
    for stream in (True, False):
        text = f"forms {stream}"
        expire(gateway, text, "swr", stream=stream)
        fake.script({"content": "new words", "pieces": 2})
        ask(gateway, text, "swr", stream=stream)
        wait_for(lambda text=text: said(ask(gateway, text, "swr", stream=True)) == "new words")
        assert said(ask(gateway, text, "swr")) == "new words"


def test_expired_variants_are_refreshed_too(gateway: Gateway, fake: Fake) -> None:
    for _ in range(2):
        assert ask(gateway, "variants", "drawn", temperature=1).cache == "miss"
    time.sleep(LIFE_S + 0.02)
    reply = ask(gateway, "variants", "drawn", temperature=1)
    assert said(reply) in {"A1", "A2"}
    assert is_stale(reply, "stale-while-revalidate")
    wait_for(lambda: fake.calls == 3)


@pytest.mark.parametrize("l2", ["lmdb"])
def test_two_workers_refresh_once(fake: Fake, tmp_path: Path, l2: str) -> None:
    served = Gateway(settings(fake, l2=l2, workers=2), folder=tmp_path)
    with running(served):
        for turn in range(4):
            text = f"two {turn}"
            calls = fake.calls
            old = expire(served, text, "swr")
            fake.script({"content": f"new {turn}", "delay_s": 0.5})
            began_at = time.monotonic()
            with ExitStack() as stack:
                crowd = [stack.enter_context(Raw(served.port)) for _ in range(40)]
                for client in crowd:
                    client.send(raw(text, "swr", "X-Preheat-Ttl: 60\r\n"))
                answers = [client.answer() for client in crowd]
            assert time.monotonic() - began_at < 0.45, "somebody waited for the refresh"
            assert {said(answer) for answer in answers} == {old}
            assert all(is_stale(answer, "stale-while-revalidate") for answer in answers)
            wait_for(lambda: fake.log["running"] == 0)
            assert fake.calls == calls + 2
            new = f"new {turn}"
            wait_for(lambda text=text, new=new: said(ask(served, text, "swr")) == new)
            wait_for(  # the other one has it from L2, a refresh interval later at most
                lambda text=text, new=new: (
                    {said(ask(served, text, "swr")) for _ in range(10)} == {new}
                )
            )
            assert fake.calls == calls + 2
        assert_sound(served)


def test_two_workers_ask_once_for_an_answer_that_is_expired_but_kept(
    fake: Fake, tmp_path: Path
) -> None:
    served = Gateway(settings(fake, l2="lmdb", workers=2), folder=tmp_path)
    with running(served):
        expire(served, "kept", "sie")
        fake.script({"content": "new", "delay_s": 0.5})
        with ExitStack() as stack:
            crowd = [stack.enter_context(Raw(served.port)) for _ in range(40)]
            for client in crowd:
                client.send(raw("kept", "sie"))
            assert {said(client.answer()) for client in crowd} == {"new"}
        assert fake.calls == 2
        assert_sound(served)


def test_a_drain_lets_a_refresh_end(fake: Fake, tmp_path: Path) -> None:
    served = Gateway(settings(fake), folder=tmp_path)
    with running(served):
        expire(served, "drain", "swr")
        fake.script({"content": "new", "delay_s": 0.5})
        ask(served, "drain", "swr")
        wait_for(lambda: fake.calls == 2)
        began_at = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - began_at < 4
    assert "Traceback" not in served.stderr, served.stderr
    assert '"event":"bug"' not in served.stderr, served.stderr
    wait_for(lambda: fake.log["running"] == 0)


def test_a_drain_does_not_wait_for_ever_for_a_refresh(fake: Fake, tmp_path: Path) -> None:
    text = settings(fake).replace("drain_s = 5", "drain_s = 0.3").replace("0.6", "60")
    served = Gateway(text, folder=tmp_path)
    with running(served):
        expire(served, "endless", "swr")
        fake.script({"fault": "hang"})
        ask(served, "endless", "swr")
        wait_for(lambda: fake.calls == 2)
        began_at = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - began_at < 4
    assert "Traceback" not in served.stderr, served.stderr
    wait_for(lambda: fake.log["running"] == 0)


# Stale if error ------------------------------------------------------------------------------

DOWN: dict[str, dict[str, Any]] = {
    **{
        str(status): {"status": status, "body": {"error": {"message": "no"}}}
        for status in (500, 502, 503, 504)
    },
    "hang": {"fault": "hang"},
    "reset": {"fault": "reset"},
    "garbage": {"fault": "garbage"},
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("fault", DOWN.values(), ids=DOWN)
def test_a_stale_answer_stands_in_for_the_leader_and_the_followers(
    gateway: Gateway, fake: Fake, fault: dict[str, Any], stream: bool
) -> None:
    text = f"down {fault} {stream}"
    old = expire(gateway, text, "sie")
    fake.script(default={"delay_s": 0.1, **fault})
    with ExitStack() as stack:
        crowd = [stack.enter_context(Raw(gateway.port)) for _ in range(5)]
        for place, client in enumerate(crowd):
            client.send(raw(text, "sie", stream=stream is (place % 2 == 0)))
        answers = [client.answer() for client in crowd]
    assert [said(answer) for answer in answers] == [old] * 5
    assert all(is_stale(answer, "stale-if-error") for answer in answers)
    assert fake.calls <= 3  # one, or with a reset of a used connection one more
    fake.script(default="count")
    assert ask(gateway, text, "sie").cache == "miss"


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 501])
def test_what_is_no_failure_of_the_engine_is_told(
    gateway: Gateway, fake: Fake, status: int
) -> None:
    expire(gateway, f"no failure {status}", "sie")
    fake.script({"status": status, "body": {"error": {"message": "no"}}})
    assert ask(gateway, f"no failure {status}", "sie").status == status


def test_after_the_first_byte_nothing_stands_in(gateway: Gateway, fake: Fake) -> None:
    expire(gateway, "first byte", "sie")
    fake.script({"content": "a b c", "pieces": 3, "fault": "reset_after", "after": 2})
    with Raw(gateway.port) as client:
        answer = client.ask(raw("first byte", "sie", stream=True))
    assert (answer.status, answer.is_complete) == (200, False)
    assert answer.events[-1]["error"]["code"] == "engine-reset"
    assert told(answer)["fwd"] == "stale"


def test_past_its_window_and_without_one_the_failure_is_told(gateway: Gateway, fake: Fake) -> None:
    expire(gateway, "none", "plain")
    fake.script({"status": 503, "body": {"error": {"message": "no"}}})
    assert ask(gateway, "none", "plain").status == 503


@pytest.mark.parametrize("directive", ["no-cache", "no-store", "max-age=0", "min-fresh=1"])
def test_nothing_stands_in_for_who_wants_nothing_stale(
    gateway: Gateway, fake: Fake, directive: str
) -> None:
    expire(gateway, directive, "sie")
    fake.script({"status": 503, "body": {"error": {"message": "no"}}})
    reply = ask(gateway, directive, "sie", {"Cache-Control": directive})
    assert (reply.status, reply.cache) != (200, "hit")
    assert reply.status == 503


@pytest.mark.parametrize("l2", ["off", "lmdb"])
def test_where_nobody_listens_the_stale_answer_comes_before_the_operators_words(
    l2: str, tmp_path: Path
) -> None:
    engine = Fake()
    more = '[engines]\nfallback_message = "try later"'
    served = Gateway(settings(engine, l2=l2, more=more), folder=tmp_path)
    with running(served, engine):
        old = expire(served, "refused", "sie")
        expire(served, "refused", "plain")
        engine.stop()
        for stream in (True, False):
            reply = ask(served, "refused", "sie", stream=stream)
            assert said(reply) == old
            assert is_stale(reply, "stale-if-error")
            assert said(ask(served, "refused", "plain", stream=stream)) == "try later"
        lines = [line for line in served.stderr.splitlines() if '"event":"request"' in line]
        names = [line.partition('"request":"')[2][:20] for line in lines]
        assert len(names) == len(set(names)), "a request is in the log once"
        assert_sound(served)


def test_the_operators_words_come_where_no_answer_is_left(fake: Fake, tmp_path: Path) -> None:
    more = '[engines]\nfallback_message = "try later"'
    served = Gateway(settings(fake, more=more), folder=tmp_path)
    with running(served):
        old = expire(served, "down", "sie")
        fake.script(default={"status": 503, "body": {"error": {"message": "no"}}})
        assert said(ask(served, "down", "sie")) == old
        assert said(ask(served, "never seen", "sie")) == "try later"


# XFetch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("l2", "workers"), [("off", 1), ("lmdb", 1), ("lmdb", 2)])
def test_near_its_end_an_answer_is_refreshed_once(
    fake: Fake, tmp_path: Path, l2: str, workers: int
) -> None:
    text = settings(fake, l2=l2, workers=workers).replace("[exact]", "[exact]\nearly_refresh = 100")
    served = Gateway(text, folder=tmp_path)
    with running(served):
        fake.script(
            {"content": "old", "delay_s": 0.1},
            {"content": "new", "delay_s": 0.5},
            default={"status": 500},
        )
        assert said(ask(served, "early", "brisk")) == "old"
        time.sleep(0.15)  # what is so new isn't told apart from what comes back from L2
        began_at = time.monotonic()
        with ExitStack() as stack:
            crowd = [stack.enter_context(Raw(served.port)) for _ in range(40)]
            for client in crowd:
                client.send(raw("early", "brisk"))
            answers = [client.answer() for client in crowd]
        assert time.monotonic() - began_at < 0.45, "somebody waited for the refresh"
        assert {said(answer) for answer in answers} == {"old"}
        assert {told(answer)["detail"] for answer in answers} == {"exact"}
        assert all(int(str(told(answer)["ttl"])) in {1, 2} for answer in answers)
        wait_for(lambda: fake.calls == 2)
        assert fake.calls == 2
        wait_for(lambda: said(ask(served, "early", "brisk")) == "new")
        wait_for(lambda: fake.log["running"] == 0)
        assert_sound(served)


def test_without_a_beta_nothing_is_refreshed(gateway: Gateway, fake: Fake) -> None:
    fake.script({"content": "old", "delay_s": 0.2})
    ask(gateway, "no beta", "plain", {"X-Preheat-Ttl": "1"})
    until = time.monotonic() + 0.9
    while time.monotonic() < until:
        assert ask(gateway, "no beta", "plain").detail == "exact"
    assert fake.calls == 1


# Kept refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_is_told_again_for_its_time_and_no_longer(
    gateway: Gateway, fake: Fake, status: int, stream: bool
) -> None:
    text = f"refusal {status} {stream}"
    fake.script({"status": status, "body": "<no/>", "content_type": "application/problem+xml"})
    first = ask(gateway, text, "neg", stream=stream)
    again = ask(gateway, text, "neg", stream=stream)
    other = ask(gateway, text, "neg", stream=not stream)
    for reply in (first, again, other):
        assert (reply.status, reply.body) == (status, b"<no/>")
        assert reply.headers["content-type"] == "application/problem+xml"
    assert told(first)["fwd"] == "miss"
    assert told(again)["hit"] is told(other)["hit"] is True
    assert fake.calls == 1
    time.sleep(0.62)
    assert ask(gateway, text, "neg", stream=stream).cache == "miss"  # not even as a stale one
    assert fake.calls == 2


def test_a_refusal_stands_in_for_nothing(gateway: Gateway, fake: Fake) -> None:
    fake.script({"status": 404, "body": {}}, {"status": 503, "body": {}})
    assert ask(gateway, "stands", "neg").status == 404
    time.sleep(0.62)
    assert ask(gateway, "stands", "neg").status == 503


def test_followers_get_the_refusal_too(gateway: Gateway, fake: Fake) -> None:
    fake.script({"status": 404, "body": {"error": {"message": "gone"}}, "delay_s": 0.2})
    with ExitStack() as stack:
        crowd = [stack.enter_context(Raw(gateway.port)) for _ in range(20)]
        for client in crowd:
            client.send(raw("together", "neg"))
        answers = [client.answer() for client in crowd]
    assert {answer.status for answer in answers} == {404}
    assert fake.calls == 1


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_other_failures_are_never_kept(gateway: Gateway, fake: Fake, status: int) -> None:
    fake.script(default={"status": status, "body": {"error": {"message": "no"}}})
    for _ in range(2):
        assert ask(gateway, f"never {status}", "neg").status == status
    assert fake.calls == 2


@pytest.mark.parametrize("namespace", ["", "plain", "swr"])
def test_refusals_are_kept_only_where_that_is_set(
    gateway: Gateway, fake: Fake, namespace: str
) -> None:
    fake.script(default={"status": 404, "body": {"error": {"message": "no"}}})
    for _ in range(2):
        assert ask(gateway, f"off {namespace}", namespace or "other").status == 404
    assert fake.calls == 2


def test_no_store_keeps_no_refusal(gateway: Gateway, fake: Fake) -> None:
    fake.script(default={"status": 404, "body": {"error": {"message": "no"}}})
    for _ in range(2):
        reply = ask(gateway, "private", "neg", {"Cache-Control": "no-store"})
        assert (reply.status, told(reply)["fwd"]) == (404, "bypass")
    assert fake.calls == 2


# What requests want --------------------------------------------------------------------------


def test_a_requests_own_ttl(gateway: Gateway, fake: Fake) -> None:
    ask(gateway, "ttl", "main", {"X-Preheat-Ttl": "1"})
    assert told(ask(gateway, "ttl", "main"))["hit"] is True
    time.sleep(1.02)
    assert told(ask(gateway, "ttl", "main"))["fwd"] in {"miss", "stale"}
    ask(gateway, "zero", "main", {"X-Preheat-Ttl": "0"})
    assert ask(gateway, "zero", "main").detail == "ttl-zero"
    ask(gateway, "long", "plain", {"X-Preheat-Ttl": "31536000"})
    assert told(ask(gateway, "long", "plain"))["ttl"] in {86399, 86400}


@pytest.mark.parametrize(
    ("namespace", "directive", "is_told"),
    [
        ("plain", "max-stale", True),
        ("plain", "max-stale=60", True),
        ("plain", "max-stale=0", False),
        ("plain", "max-stale, max-age=60", True),
        ("plain", "max-stale, max-age=0", False),
        ("plain", "max-stale, min-fresh=1", False),
        ("plain", "max-stale, no-cache", False),
        ("plain", "max-stale, no-store", False),
        ("plain", "max-age=60", False),
        ("swr", "max-age=60", False),
        ("swr", "max-age=0", False),
        ("swr", "min-fresh=1", False),
        ("swr", "no-cache", False),
        ("swr", "max-stale=60", True),
        ("swr", "max-age=60, max-stale=60", True),
    ],
)
@pytest.mark.parametrize("only", ["", "only-if-cached"])
def test_what_a_request_wants_holds_for_an_expired_answer(
    gateway: Gateway, fake: Fake, namespace: str, directive: str, is_told: bool, only: str
) -> None:
    text = f"wants {namespace} {directive} {only}"
    old = expire(gateway, text, namespace)
    wanted = f"{directive}, {only}" if only else directive
    reply = ask(gateway, text, namespace, {"Cache-Control": wanted})
    if is_told:
        assert said(reply) == old
        assert told(reply)["hit"] is True
        assert int(str(told(reply)["ttl"])) < 0
    elif only:
        assert (reply.status, reply.detail) == (504, "only-if-cached")
    else:
        assert said(reply) == "A2"
        assert told(reply)["fwd"] in {"request", "stale", "bypass"}


def test_only_if_cached_gets_a_stale_answer_and_causes_no_call(
    gateway: Gateway, fake: Fake
) -> None:
    old = expire(gateway, "only", "swr")
    reply = ask(gateway, "only", "swr", {"Cache-Control": "only-if-cached"})
    assert said(reply) == old
    assert is_stale(reply, "stale-while-revalidate")
    assert gateway.get("/healthz").status == 200
    assert fake.calls == 1


def test_no_cache_replaces_the_expired_answer(gateway: Gateway, fake: Fake) -> None:
    expire(gateway, "fresh", "swr")
    reply = ask(gateway, "fresh", "swr", {"Cache-Control": "no-cache", "X-Preheat-Ttl": "60"})
    assert (said(reply), told(reply)["fwd"]) == ("A2", "request")
    assert told(ask(gateway, "fresh", "swr"))["hit"] is True
