"""New settings on SIGHUP: what changes does so for everybody at once, and what can't, not at all."""

import contextlib
import io
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import Fake, Gateway, Reply, chat, running
from preheat.config import L2, EngineSettings, ModelSettings, Settings
from preheat.errors import ConfigError
from preheat.gateway.assembly import assemble
from preheat.telemetry.logs import Log
from rawclient import Raw, post

QUIET = '[l2]\nkind = "off"\n'


@pytest.fixture(autouse=True)
def _clean(fake: Fake, other: Fake) -> None:
    fake.reset()
    other.reset()


@pytest.fixture(scope="module")
def other() -> Iterator[Fake]:
    """A second engine."""
    engine = Fake()
    with running(engine):
        yield engine


def engine(name: str, *engines: Fake, more: str = "") -> str:
    urls = json.dumps([one.url for one in engines])
    return f"[engines.{name}]\nurls = {urls}\nbreaker_failures = 1000\n{more}\n"


def model(name: str = "m1", **fields: Any) -> str:
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())
    return f"[models.{name}]\n{lines}\n"


def wait_for(condition: Callable[[], object], within_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "it doesn't come true"
        time.sleep(0.01)


class Served:
    """A gateway whose settings a test changes."""

    def __init__(self, gateway: Gateway, folder: Path) -> None:
        self.gateway = gateway
        self._path = folder / "preheat.toml"

    def reload(self, text: str) -> None:
        """Have it go on with these settings."""
        before = self._count("reloaded")
        refused = self._count("reload-refused")
        self._path.write_text(text)
        self.gateway.process.send_signal(signal.SIGHUP)
        wait_for(
            lambda: self._count("reloaded") > before or self._count("reload-refused") > refused
        )
        assert self._count("reload-refused") == refused, self.gateway.stderr

    def refused(self, text: str | None) -> str:
        """Have it refuse these settings, or that there are none: why."""
        before = self._count("reload-refused")
        if text is None:
            self._path.unlink()
        else:
            self._path.write_text(text)
        self.gateway.process.send_signal(signal.SIGHUP)
        wait_for(lambda: self._count("reload-refused") > before)
        lines = [one for one in self.gateway.stderr.splitlines() if '"reload-refused"' in one]
        return str(json.loads(lines[-1])["why"])

    def ask(self, text: str = "hi", namespace: str = "", **fields: Any) -> Reply:
        headers = {"X-Preheat-Namespace": namespace} if namespace else {}
        return self.gateway.post("/v1/chat/completions", chat(text, **fields), headers)

    @property
    def config(self) -> Any:
        return self.gateway.get("/preheat/v1/config").json

    def _count(self, event: str) -> int:
        return self.gateway.stderr.count(f'"event":"{event}"')


@contextlib.contextmanager
def served(text: str, folder: Path, **environment: str) -> Iterator[Served]:
    gateway = Gateway(text, folder=folder, environment=environment)
    with running(gateway):
        yield Served(gateway, folder)
        assert "Traceback" not in gateway.stderr, gateway.stderr
        assert '"event":"bug"' not in gateway.stderr, gateway.stderr
        assert gateway.ledger["residual"] == 0


def said(reply: Reply) -> str:
    assert reply.status == 200, (reply.status, reply.body)
    return str(reply.json["choices"][0]["message"]["content"])


def asked_model(engine: Fake) -> str:
    return str(json.loads(engine.bodies[-1])["model"])


# What changes --------------------------------------------------------------------------------


def test_another_engine_answers_and_what_the_old_one_has_begun_it_ends(
    fake: Fake, other: Fake, tmp_path: Path
) -> None:
    fake.script(
        {"content": "a b c d", "pieces": 4, "chunk_delay_s": 0.3}, {"content": "w", "delay_s": 1}
    )
    other.script(default={"content": "the other"})
    with (
        served(QUIET + engine("one", fake), tmp_path) as gateway,
        Raw(gateway.gateway.port) as stream,
        Raw(gateway.gateway.port) as whole,
    ):
        stream.send(post(chat("stream", stream=True)))
        wait_for(lambda: fake.calls == 1)
        whole.send(post(chat("whole")))
        wait_for(lambda: fake.calls == 2)
        gateway.reload(QUIET + engine("two", other))
        reply = gateway.ask("new")
        assert (said(reply), reply.headers["x-preheat-worker"]) == ("the other", "two")
        assert gateway.ask("whole").cache == "miss"  # it is another engine's question now
        assert fake.log["running"] == 2
        assert said(whole.answer()) == "w"
        answer = stream.answer()
        assert answer.is_complete
        assert answer.events[-1] == "[DONE]"
    assert (fake.calls, other.calls) == (2, 2)
    assert fake.log["cancelled"] == 0


def test_one_engine_more(fake: Fake, other: Fake, tmp_path: Path) -> None:
    other.script(default={"content": "the other"})
    with served(QUIET + engine("one", fake), tmp_path) as gateway:
        assert said(gateway.ask()) == "A1"
        text = QUIET + engine("one", fake) + engine("two", other) + model("m2", engine="two")
        gateway.reload(text)
        assert gateway.ask().cache == "hit"
        assert said(gateway.ask(model="m2")) == "the other"
        gateway.reload(QUIET + engine("one", fake))
        assert said(gateway.ask(model="m2")) == "A2"  # the first one's again
        assert gateway.ask().cache == "hit"


@pytest.mark.parametrize("workers", [1, 2])
def test_other_addresses_of_a_group_lose_no_request(
    fake: Fake, other: Fake, tmp_path: Path, workers: int
) -> None:
    head = QUIET + f"[listen]\nworkers = {workers}\n"
    for one in (fake, other):
        one.script(default={"content": "x", "delay_s": 0.02})
    failures: list[str] = []
    counts = [0] * 4
    over = threading.Event()

    def ask(port: int, place: int) -> None:
        with Raw(port, within_s=20) as client:
            while not over.is_set():
                counts[place] += 1
                reply = client.ask(post(chat(f"{place} {counts[place]}", stream=place % 2 == 0)))
                if reply.status != 200 or not reply.is_complete:
                    failures.append(f"{reply.status} {reply.body[:200]!r}")

    with served(head + engine("up", fake), tmp_path) as gateway:
        gateway.ask("kept")
        threads = [
            threading.Thread(target=ask, args=(gateway.gateway.port, place), daemon=True)
            for place in range(4)
        ]
        for thread in threads:
            thread.start()
        for group in ((fake, other), (other,), (fake,), (other, fake), (other,)):
            enough = sum(counts) + 20
            wait_for(lambda enough=enough: sum(counts) >= enough)
            gateway.reload(head + engine("up", *group))
        wait_for(lambda: fake.log["running"] == 0)
        was = fake.calls
        enough = sum(counts) + 40
        wait_for(lambda: sum(counts) >= enough)
        over.set()
        for thread in threads:
            thread.join(20)
        assert failures == []
        assert fake.calls == was, "nobody asks the one that has left"
        assert was > 20
        assert other.calls > 20
        cache = {gateway.ask("kept").cache for _ in range(8)}
        assert "hit" in cache  # a group's name stands for its servers
        total = sum(counts) + 9
        assert gateway.gateway.ledger["requests"] == total


def test_an_alias_and_a_version(fake: Fake, tmp_path: Path) -> None:
    """An answer of one version is never told for another; the old one's is still there."""
    base = QUIET + engine("one", fake)
    with served(base + model(version="1"), tmp_path) as gateway:
        assert said(gateway.ask()) == "A1"
        gateway.reload(base + model(version="2"))
        assert said(gateway.ask()) == "A2"
        assert gateway.ask().cache == "hit"
        gateway.reload(base + model(version="2", alias="real"))
        assert (said(gateway.ask()), asked_model(fake)) == ("A3", "real")
        gateway.reload(base + model(version="1"))
        assert (said(gateway.ask()), gateway.ask().cache) == ("A1", "hit")
        gateway.reload(base)
        reply = gateway.ask("without a name of its own")
        assert (said(reply), asked_model(fake)) == ("A4", "m1")
        listed = {one["id"] for one in gateway.gateway.get("/v1/models").json["data"]}
        assert "real" not in listed


def test_nobody_joins_a_flight_of_another_version(fake: Fake, tmp_path: Path) -> None:
    base = QUIET + engine("one", fake)
    fake.script({"content": "old", "delay_s": 0.6}, {"content": "new"})
    with (
        served(base + model(version="1"), tmp_path) as gateway,
        Raw(gateway.gateway.port) as client,
    ):
        client.send(post(chat()))
        wait_for(lambda: fake.calls == 1)
        gateway.reload(base + model(version="2"))
        assert said(gateway.ask()) == "new"
        assert said(client.answer()) == "old"
        assert (said(gateway.ask()), gateway.ask().cache) == ("new", "hit")


def test_a_header_that_an_engine_is_sent_from_now_on_is_part_of_the_key(
    fake: Fake, tmp_path: Path
) -> None:
    with served(QUIET + engine("one", fake), tmp_path) as gateway:

        def ask(team: str) -> Reply:
            return gateway.gateway.post("/v1/chat/completions", chat(), {"X-Team": team})

        assert (said(ask("a")), said(ask("b"))) == ("A1", "A1")
        gateway.reload(QUIET + engine("one", fake, more='forward_headers = ["X-Team"]'))
        assert (said(ask("a")), said(ask("b"))) == ("A2", "A3")
        assert fake.log["requests"][-1]["headers"]["x-team"] == "b"
        assert (said(ask("a")), ask("b").cache) == ("A2", "hit")
        gateway.reload(QUIET + engine("one", fake))
        assert (said(ask("a")), said(ask("b"))) == ("A1", "A1")


def test_prices_hold_for_what_is_booked_from_then_on(fake: Fake, tmp_path: Path) -> None:
    usage = {"prompt_tokens": 1_000, "completion_tokens": 10, "total_tokens": 1_010}
    fake.script(default={"content": "x", "usage": usage})
    base = QUIET + engine("one", fake)
    with served(base + model(input=1.0, output=10.0), tmp_path) as gateway:
        gateway.ask("first")
        gateway.ask("first")
        first = 1_000 * 1_000_000 + 10 * 10_000_000
        ledger = gateway.gateway.ledger
        assert (ledger["paid"], ledger["saved_by_us"]) == (first, first)
        gateway.reload(base + model(input=2.0, output=10.0))
        assert gateway.gateway.ledger["paid"] == first
        gateway.ask("second")
        gateway.ask("second")
        second = 1_000 * 2_000_000 + 10 * 10_000_000
        ledger = gateway.gateway.ledger
        assert (ledger["paid"], ledger["saved_by_us"]) == (first + second, first + second)
        assert ledger["residual"] == 0
        gateway.reload(base)
        gateway.ask("third")
        assert gateway.gateway.ledger["paid"] == first + second


def test_namespaces_and_the_exact_caches_rules(fake: Fake, tmp_path: Path) -> None:
    base = QUIET + engine("one", fake)
    with served(base, tmp_path) as gateway:
        assert gateway.ask(temperature=1).cache == gateway.ask(temperature=1).cache == "bypass"
        fake.script({"status": 404, "body": {}}, {"status": 404, "body": {}}, default="echo")
        assert [gateway.ask("gone", "n").status for _ in range(3)] == [404, 404, 200]
        gateway.reload(
            base
            + '[exact]\nsampled = "reuse"\nttl_s = 50\n'
            + '[namespaces.n]\nttl_s = 20\nnegative_ttl_s = 60\nsampled = "bypass"\n'
        )
        assert gateway.ask("s", temperature=1).cache == "miss"
        assert gateway.ask("s", temperature=1).cache == "hit"
        assert gateway.ask("s", "n", temperature=1).cache == "bypass"
        for namespace, ttl in (("", "ttl=49"), ("n", "ttl=19")):
            gateway.ask("life", namespace)
            assert ttl in gateway.ask("life", namespace).cache_status
        fake.script({"status": 404, "body": {}})
        assert [gateway.ask("gone too", "n").status for _ in range(3)] == [404] * 3
        gateway.reload(base)
        assert gateway.ask("s", temperature=1).cache == "bypass"
        gateway.ask("long", "n")
        assert "ttl=3599" in gateway.ask("long", "n").cache_status


def test_stale_windows_hold_for_what_is_already_stored(fake: Fake, tmp_path: Path) -> None:
    base = QUIET + engine("one", fake) + "[exact]\nttl_s = 0.2\nstale_if_error_s = 60\n"
    with served(base, tmp_path) as gateway:
        assert said(gateway.ask()) == "A1"
        time.sleep(0.22)
        gateway.reload(base + "stale_while_revalidate_s = 60\n")
        reply = gateway.ask()
        assert (said(reply), reply.detail) == ("A1", "stale-while-revalidate")


# What can't ----------------------------------------------------------------------------------

MISTAKES = {
    "toml": ("[listen\n", "isn't valid TOML"),
    "no-file": ("", "preheat.toml"),
    "unknown-key": ("[exact]\nttl = 5\n", "exact"),
    "unknown-section": ("[exakt]\nttl_s = 5\n", "exakt"),
    "type": ('[exact]\nttl_s = "long"\n', "exact.ttl_s"),
    "range": ("[exact]\nttl_s = -1\n", "exact.ttl_s"),
    "word": ('[exact]\nsampled = "sometimes"\n', "exact.sampled"),
    "variants": ('[namespaces.n]\nsampled = "variants(0)"\n', "sampled"),
    "no-such-engine": ('[models.m3]\nengine = "nowhere"\n', "nowhere"),
    "url": ('[engines.b]\nurl = "ftp://x"\n', "engines.b.url"),
    "url-and-urls": ('[engines.b]\nurl = "http://x"\nurls = ["http://y"]\n', "engines.b"),
    "no-url": ("[engines.b]\n", "engines.b"),
    "key-variable": (
        '[engines.b]\nurl = "http://127.0.0.1:1"\napi_key_env = "NOT_THERE"\n',
        "NOT_THERE",
    ),
    "kind-that-starts": ('[engines.b]\nkind = "fake"\n', "engines.b: kind fake needs a new start"),
    "embedded": ('[engines.b]\nkind = "embedded"\nmodel = "/nowhere.gguf"\n', "engines.b"),
    "listen": ("[listen]\nidle_s = 5\n", "listen.idle_s: can't change in place"),
    "workers": ("[listen]\nworkers = 3\n", "listen.workers: only a new start"),
    "l1": ("[l1]\nentries = 5\n", "l1.entries: can't change in place"),
    "secret": ('[exact]\nsecret_env = "HOME"\n', "exact.secret_env: can't change in place"),
    "tenants": ('[tenants.t]\napi_key_env = "HOME"\n', "tenants: can't change in place"),
    "admin": ('[admin]\napi_key_env = "HOME"\n', "admin.api_key_env: can't change in place"),
    "log": ("[log]\nenabled = true\n", "log"),
}


@pytest.fixture(scope="module", params=[1, 2])
def stubborn(
    request: pytest.FixtureRequest, fake: Fake, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One gateway that all the mistakes are tried on; none may leave a trace."""
    folder = tmp_path_factory.mktemp("stubborn")
    with served(STUBBORN.format(workers=request.param) + engine("up", fake), folder) as gateway:
        for _ in range(24):  # so that each worker has it
            assert gateway.ask("kept").status == 200
        yield gateway


STUBBORN = QUIET + "[listen]\nworkers = {workers}\n"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_changes_nothing_and_the_log_says_why(
    stubborn: Served, fake: Fake, other: Fake, mistake: str
) -> None:
    text, why = MISTAKES[mistake]
    workers = stubborn.config["listen"]["workers"]
    before = stubborn.config
    # All of this is sound, and none of it may happen.
    changed = (
        engine("up", other)
        + model(alias="changed", version="9", input=5.0)
        + '[engines]\nfallback_message = "changed"\n'
    )
    sound = STUBBORN.format(workers=workers) + changed
    if mistake == "workers":
        sound = sound.replace(f"[listen]\nworkers = {workers}\n", "")
    if text.startswith("[listen]\n") and "[listen]\n" in sound:
        settings = sound.replace("[listen]\n", text)
    else:
        settings = sound + text
    assert why in stubborn.refused(settings if text else None)
    assert stubborn.config == before
    assert {stubborn.ask("kept").cache for _ in range(4 * workers)} == {"hit"}
    assert stubborn.ask(f"asked after {mistake}").status == 200
    assert asked_model(fake) == "m1"
    assert other.calls == 0
    assert stubborn.gateway.get("/healthz").status == 200


@pytest.mark.asyncio
async def test_what_one_worker_has_prepared_and_another_refused_changes_nothing(
    fake: Fake, other: Fake
) -> None:
    """Of a worker that could have gone on with them, and is told to forget it."""
    old = {"up": EngineSettings(url=fake.url)}
    settings = Settings(engines=old, l2=L2(kind="off"))
    gateway = assemble(settings, Log(io.BytesIO()))
    try:
        await gateway.start_engines()
        await gateway.listen("127.0.0.1", 0, None)
        before = gateway.snapshot(), gateway.proxy.fallback, settings
        for engines in (
            {"up": EngineSettings(url=other.url)},
            {"b": EngineSettings(url=other.url)},
        ):
            gateway.prepare(
                Settings(
                    engines=engines,
                    models={"m1": ModelSettings(version="2")},
                    fallback_message="x",
                    l2=L2(kind="off"),
                )
            )
        with pytest.raises(ConfigError, match="NOT_THERE"):
            gateway.prepare(
                Settings(engines={"b": EngineSettings(url=other.url, api_key_env="NOT_THERE")})
            )
        after = gateway.snapshot(), gateway.proxy.fallback, gateway.reload.settings
        assert after == before
        assert set(gateway.reload._upstreams.engines) == {"up"}
        assert not gateway.reload._upstreams.models
    finally:
        await gateway.aclose()


def test_after_a_mistake_the_next_file_holds(fake: Fake, other: Fake, tmp_path: Path) -> None:
    with served(QUIET + engine("up", fake), tmp_path) as gateway:
        assert "isn't valid TOML" in gateway.refused("[listen\n")
        gateway.reload(QUIET + engine("up", other) + model(alias="real"))
        gateway.ask()
        assert asked_model(other) == "real"


def test_many_signals_at_once_end_with_the_last_file(
    fake: Fake, other: Fake, tmp_path: Path
) -> None:
    with served(QUIET + engine("up", fake), tmp_path) as gateway:
        for number in range(30):
            text = QUIET + engine("up", fake) + model(alias=f"real-{number}")
            (tmp_path / "preheat.new").write_text(text)
            (tmp_path / "preheat.new").replace(tmp_path / "preheat.toml")
            gateway.gateway.process.send_signal(signal.SIGHUP)

        def is_last() -> bool:
            gateway.ask(f"{time.monotonic()}")
            return asked_model(fake) == "real-29"

        wait_for(is_last)


def test_servers_that_come_by_a_reload_are_looked_after(
    fake: Fake, other: Fake, tmp_path: Path
) -> None:
    with served(QUIET + engine("one", fake), tmp_path) as gateway:
        gateway.ask("alone")
        assert '"event":"upstream-known"' not in gateway.gateway.stderr
        gateway.reload(QUIET + engine("one", fake, other))
        wait_for(lambda: gateway.gateway.stderr.count('"event":"upstream-known"') == 2)
        gateway.reload(QUIET + engine("another", fake, other))
        wait_for(lambda: gateway.gateway.stderr.count('"event":"upstream-known"') == 4)
        reply = gateway.ask("many")
        assert reply.headers["x-preheat-route"].startswith("overlap=0, best=0, input=")
