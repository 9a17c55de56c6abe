"""The llama.cpp dialect asks a real llama.cpp server."""

import asyncio
import http.client
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytest.importorskip("gguf", reason="the tiny model is written with gguf")

from preheat.engines.child import ChildSettings, EngineChild
from preheat.engines.dialects.calls import Call, Prompt, chunks
from preheat.engines.dialects.detection import PROBES, detect
from preheat.engines.dialects.llamacpp import LlamaCpp, model_identity, slot_file
from preheat.engines.dialects.readings import Cached, Capacity, most_cached
from tiny_model import KV_BYTES_A_TOKEN, write_tiny_gguf

pytestmark = pytest.mark.timeout(120)

SLOTS = 2
SLOT_TOKENS = 2_048
DIALECT = LlamaCpp()
CHAT = [
    {"role": "system", "content": "Answer in one word. " * 20},
    {"role": "user", "content": "Is it warm?"},
]


class Server:
    """A running engine; `ask` sends a call and gives back status and body."""

    def __init__(self, engine: EngineChild, folder: Path) -> None:
        self._engine = engine
        self.folder = folder

    def ask(self, call: Call | None) -> tuple[int, bytes]:
        assert call is not None
        connection = http.client.HTTPConnection(urlsplit(self._engine.url).netloc, timeout=30)
        try:
            headers = {"Authorization": f"Bearer {self._engine.api_key}"}
            connection.request(call.method.decode(), call.path.decode(), call.body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def told(self, call: Call | None) -> bytes:
        status, body = self.ask(call)
        assert status == 200, body
        return body

    def cached(self, prompt: Prompt) -> int:
        """Warm it, and say what of it was cached."""
        cached = DIALECT.read_cached(self.told(DIALECT.warm(prompt)))
        assert cached is not None
        assert cached.cached_tokens is not None
        assert prompt.ids is None or cached.prompt_tokens == len(prompt.ids)
        return cached.cached_tokens


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


def running(weights: str, folder: Path, cache_ram_mib: int) -> Iterator[Server]:
    settings = ChildSettings(
        model=weights,
        slots=SLOTS,
        ctx_tokens=SLOTS * SLOT_TOKENS,
        cache_ram_mib=cache_ram_mib,
        slot_save_dir=str(folder),
    )
    loop = asyncio.new_event_loop()
    engine = EngineChild(settings, on_event=lambda _name, _fields: None)
    try:
        loop.run_until_complete(engine.start())
        yield Server(engine, folder)
    finally:
        loop.run_until_complete(engine.aclose())
        loop.close()


@pytest.fixture
def server(weights: str, tmp_path: Path) -> Iterator[Server]:
    yield from running(weights, tmp_path / "slots", 0)


@pytest.fixture
def server_with_host_cache(weights: str, tmp_path: Path) -> Iterator[Server]:
    yield from running(weights, tmp_path / "slots", 64)


def ids_of(server: Server, text: str) -> list[int]:
    tokens = DIALECT.read_tokens(server.told(DIALECT.tokenise(Prompt(text=text))))
    assert tokens is not None
    assert tokens.ids is not None
    assert tokens.count == len(tokens.ids)
    return tokens.ids


def words(first: int, length: int) -> list[int]:
    """Token ids that share no beginning with those of another `first`."""
    return [30 + (first + 7 * i) % 200 for i in range(length)]


def test_it_is_known_for_what_it_is(server: Server) -> None:
    assert server.ask(DIALECT.health())[0] == 200
    answers = {call.path: server.ask(call) for call in PROBES}
    bodies = {path: body for path, (status, body) in answers.items() if status == 200}
    assert detect(bodies) == "llamacpp"
    assert detect({b"/props": bodies[b"/props"]}) == "llamacpp"


def test_messages_rendered_and_tokenised_are_what_its_own_chat_computes(server: Server) -> None:
    rendered = DIALECT.read_rendered(server.told(DIALECT.render(Prompt(messages=CHAT))))
    assert rendered is not None
    assert rendered.endswith("<|im_start|>assistant\n")
    ids = ids_of(server, rendered)
    chat = DIALECT.read_cached(server.told(DIALECT.warm(Prompt(messages=CHAT))))
    assert chat == Cached(len(ids), 0)
    assert server.cached(Prompt(ids=ids)) == len(ids) - 1  # the last is always computed

    prefix = DIALECT.render(Prompt(messages=CHAT[:1]), opens_answer=False)
    begun = DIALECT.read_rendered(server.told(prefix))
    assert begun is not None
    assert rendered.startswith(begun)
    assert ids[: len(ids_of(server, begun))] == ids_of(server, begun)


def test_a_prefix_is_warmed_in_chunks_and_found(server: Server) -> None:
    ids = words(1, 900)
    found = [server.cached(part) for part in chunks(Prompt(ids=ids, slot=1), 250)]
    assert found == [0, 250, 500, 750]  # each chunk computes only its own
    assert server.cached(Prompt(ids=ids, slot=1)) == most_cached(900, 1)
    assert server.cached(Prompt(ids=[*ids, 77], slot=1)) == 900
    assert server.cached(Prompt(ids=ids, slot=0)) == 0  # slots share nothing


def test_its_slots_say_what_they_hold(server: Server) -> None:
    server.cached(Prompt(ids=words(1, 300), slot=1))
    slots = DIALECT.read_slots(server.told(DIALECT.slots()))
    assert slots is not None
    assert [(slot.number, slot.tokens, slot.is_busy) for slot in slots] == [
        (0, None, False),  # it had no request yet
        (1, 300, False),
    ]
    capacity = DIALECT.read_capacity(server.told(DIALECT.capacity()))
    assert capacity == Capacity(
        tokens=SLOTS * SLOT_TOKENS, block_tokens=1, slots=SLOTS, slot_tokens=SLOT_TOKENS
    )


def test_its_load_counts_cached_tokens_among_those_of_prompts(server: Server) -> None:
    server.cached(Prompt(ids=words(1, 300), slot=0))
    server.cached(Prompt(ids=words(1, 400), slot=0))
    load = DIALECT.read_load(server.told(DIALECT.load()))
    assert load is not None
    assert (load.running, load.waiting) == (0, 0)
    assert (load.cached_tokens_total, load.prompt_tokens_total) == (300, 700)
    assert load.kv_used_share is None


def test_a_saved_slot_survives_its_erasure_and_fills_another(server: Server) -> None:
    ids = words(1, 600)
    server.cached(Prompt(ids=ids, slot=0))
    name = slot_file("0" * 32, b"\x01\x02")
    saved = DIALECT.read_moved(*server.ask(DIALECT.save(0, name)))
    assert saved.ok
    assert saved.tokens == 600
    assert saved.size_bytes is not None
    assert saved.size_bytes >= 600 * KV_BYTES_A_TOKEN
    assert (server.folder / name).stat().st_size == saved.size_bytes

    erased = DIALECT.read_moved(*server.ask(DIALECT.erase(0)))
    assert (erased.ok, erased.tokens) == (True, 600)
    assert server.cached(Prompt(ids=ids, slot=0)) == 0
    assert DIALECT.read_moved(*server.ask(DIALECT.erase(0))).ok

    for slot in range(SLOTS):
        restored = DIALECT.read_moved(*server.ask(DIALECT.restore(slot, name)))
        assert (restored.ok, restored.tokens) == (True, 600)
        assert restored.size_bytes == saved.size_bytes
        assert server.cached(Prompt(ids=[*ids, 77], slot=slot)) == 600


def test_a_saved_slot_survives_a_restart(weights: str, tmp_path: Path) -> None:
    ids = words(3, 500)
    for server in running(weights, tmp_path, 0):
        server.cached(Prompt(ids=ids, slot=0))
        assert DIALECT.read_moved(*server.ask(DIALECT.save(0, "kept.kv"))).ok
    for server in running(weights, tmp_path, 0):
        assert DIALECT.read_moved(*server.ask(DIALECT.restore(1, "kept.kv"))).ok
        assert server.cached(Prompt(ids=[*ids, 77], slot=1)) == 500


def test_what_cant_be_restored_is_told(server: Server) -> None:
    server.cached(Prompt(ids=words(1, 100), slot=0))
    missing = DIALECT.read_moved(*server.ask(DIALECT.restore(0, "nobody-wrote-it.kv")))
    assert not missing.ok
    assert "Unable to restore slot" in missing.why
    (server.folder / "torn.kv").write_bytes(b"ggsq" + bytes(60))
    torn = DIALECT.read_moved(*server.ask(DIALECT.restore(0, "torn.kv")))
    assert not torn.ok
    assert "Unable to restore slot" in torn.why


@pytest.mark.parametrize(
    "name", ["../up.kv", "a/b.kv", "", ".", "..", " a", "a.", "a:b", "x" * 300]
)
def test_names_that_the_server_refuses_are_never_sent(server: Server, name: str) -> None:
    with pytest.raises(ValueError, match="slot file"):
        DIALECT.save(0, name)
    refused = Call(b"POST", b"/slots/0?action=save", msgspec.json.encode({"filename": name}))
    answer = DIALECT.read_moved(*server.ask(refused))
    assert not answer.ok
    assert answer.why == "Invalid filename"


def test_the_server_takes_the_file_of_any_model_of_the_same_shape(
    weights: str, tmp_path: Path
) -> None:
    """Why files are named after `model_identity`: nobody else tells these two apart."""
    other = tmp_path / "other.gguf"
    other.write_bytes(Path(weights).read_bytes()[:-4_096] + bytes(4_096))
    identities = []
    for model in (weights, str(other)):
        for server in running(model, tmp_path / "slots", 0):
            told = [server.told(Call(b"GET", path)) for path in (b"/v1/models", b"/props")]
            identities.append(model_identity(*told))
            if model == weights:
                server.cached(Prompt(ids=words(1, 200), slot=0))
                assert DIALECT.read_moved(*server.ask(DIALECT.save(0, "first.kv"))).ok
            else:
                assert DIALECT.read_moved(*server.ask(DIALECT.restore(0, "first.kv"))).ok
    assert None not in identities
    assert identities[0] != identities[1]


def test_a_slot_number_that_isnt_there_means_another_slot(server: Server) -> None:
    """Why a number is looked up in `slots()` first: the server takes it modulo their count."""
    server.cached(Prompt(ids=words(1, 200), slot=1))
    wrong = DIALECT.read_moved(*server.ask(DIALECT.save(2 * SLOTS + 1, "wrong.kv")))
    assert wrong.ok
    assert wrong.tokens == 200


def test_a_reset_empties_all_slots(server: Server) -> None:
    for slot in range(SLOTS):
        server.cached(Prompt(ids=words(slot, 200), slot=slot))
    done = [DIALECT.read_reset(*server.ask(call)) for call in DIALECT.reset(SLOTS)]
    assert [one.ok for one in done] == [True, True]
    for slot in range(SLOTS):
        assert server.cached(Prompt(ids=words(slot, 200), slot=slot)) == 0


def test_a_reset_doesnt_reach_the_host_memory_cache(server_with_host_cache: Server) -> None:
    """A prefix that another pushed out of its slot is there still, for who names no slot."""
    server = server_with_host_cache
    for first in range(SLOTS + 1):
        server.cached(Prompt(ids=words(first * 3, 400)))
    assert all(DIALECT.read_reset(*server.ask(call)).ok for call in DIALECT.reset(SLOTS))
    assert server.cached(Prompt(ids=[*words(0, 400), 77], slot=0)) == 0
    assert server.cached(Prompt(ids=[*words(0, 400), 78])) == 400


def test_a_prompt_that_is_too_long_or_no_tokens_at_all_reads_as_nothing(server: Server) -> None:
    for ids in (words(1, SLOT_TOKENS + 1), [99_999]):
        status, body = server.ask(DIALECT.warm(Prompt(ids=ids)))
        assert status == 400
        assert DIALECT.read_cached(body) is None
        assert DIALECT.read_done(status, body).why


def test_a_slot_file_is_bound_to_its_model(server: Server, weights: str) -> None:
    models, props, adapters = (
        server.told(Call(b"GET", path)) for path in (b"/v1/models", b"/props", b"/lora-adapters")
    )
    assert DIALECT.read_adapters(adapters) == []
    identity = model_identity(models, props, adapters)
    assert identity is not None
    assert len(identity) == 32
    assert identity == model_identity(models, props, adapters)
    assert weights.encode() in props
    others = {
        model_identity(models, props.replace(b"tiny.gguf", b"other.gguf"), adapters),
        model_identity(models.replace(b'"n_params":919680', b'"n_params":919681'), props, adapters),
        model_identity(models, props, b'[{"id":0,"path":"a.gguf","scale":1.0}]'),
        model_identity(models, props, adapters, weights="sha256:1"),
    }
    assert len(others | {identity}) == 5
    off = b'[{"id":0,"path":"a.gguf","scale":0.0}]'
    assert model_identity(models, props, off) == identity
    assert DIALECT.save(0, slot_file(identity, bytes(32))) is not None
