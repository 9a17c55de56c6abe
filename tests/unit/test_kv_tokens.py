"""Prompts become blocks of tokens: asked for once, in time or not at all."""

import asyncio
import json
from typing import Any

import pytest

from preheat.core.kv_names import KvNames
from preheat.core.tokens import token_blocks
from preheat.engines.dialects import DIALECTS
from preheat.engines.dialects.calls import Prompt
from preheat.engines.kv_tokens import Answer, Patience, PromptTokens, read
from preheat.errors import EngineError

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

BLOCK = 16
LONG = "word " * 1_000


def within(seconds: float) -> Patience:
    return lambda model, size_bytes: seconds


def names() -> KvNames:
    made = KvNames(b"secret")
    made.learn_size(BLOCK)
    return made


def chat(*texts: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def ids_of(body: bytes) -> list[int]:
    """One a byte of all messages."""
    return [one for m in json.loads(body)["messages"] for one in m["content"].encode()]


class Server:
    """Tokenises a byte to an id, after a while; `fails`: it doesn't."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        self.asked: list[Prompt] = []
        self.fails = False

    async def tokenise(self, prompt: Prompt) -> Answer | None:
        self.asked.append(prompt)
        await asyncio.sleep(self.wait_s)
        if self.fails:
            raise EngineError("down", kind="connect")
        call = DIALECTS["vllm"].tokenise(prompt)
        assert call is not None
        asked = json.loads(call.body)
        tokens = ids_of(call.body) if asked.get("messages") else list(asked["prompt"].encode())
        return DIALECTS["vllm"], json.dumps({"tokens": tokens}).encode()


def expected(body: bytes, salt: str = "") -> list[int]:
    return token_blocks(ids_of(body), BLOCK, names().root(salt, ""))


async def test_a_prompt_s_blocks_are_those_that_its_events_will_name() -> None:
    server = Server()
    prompts = PromptTokens(names(), server.tokenise, within(5.0))
    body = chat(LONG, "a question")
    assert await prompts.blocks_of(body) == expected(body)
    salted = chat(LONG, "a question", cache_salt="s")
    assert await prompts.blocks_of(salted) == expected(salted, "s") != expected(body)
    assert len(server.asked) == 2
    assert await prompts.blocks_of(body) == expected(body)
    assert len(server.asked) == 2, "known"


async def test_what_comes_again_longer_is_not_waited_for() -> None:
    server = Server()
    prompts = PromptTokens(names(), server.tokenise, within(5.0))
    first = chat(LONG)
    await prompts.blocks_of(first)
    server.wait_s = 20.0
    assert await prompts.blocks_of(chat(LONG, "answer", "more")) == expected(first)
    await prompts.aclose()


async def test_many_who_want_the_same_ask_once() -> None:
    server = Server(wait_s=0.05)
    prompts = PromptTokens(names(), server.tokenise, within(5.0))
    body = chat(LONG)
    found = await asyncio.gather(*(prompts.blocks_of(body) for _ in range(20)))
    assert found == [expected(body)] * 20
    assert len(server.asked) == 1


async def test_late_answers_are_of_use_to_the_next() -> None:
    server = Server(wait_s=0.2)
    prompts = PromptTokens(names(), server.tokenise, within(0.01))
    body = chat(LONG)
    assert await prompts.blocks_of(body) == ()
    await asyncio.sleep(0.4)
    assert await prompts.blocks_of(body) == expected(body)


async def test_of_a_late_answer_what_was_known_before_counts_if_it_is_the_most() -> None:
    server = Server()
    prompts = PromptTokens(names(), server.tokenise, within(0.05))
    first = chat(LONG)
    server.wait_s = 0.0
    while not await prompts.blocks_of(first):
        pass
    server.wait_s = 20.0
    assert await prompts.blocks_of(chat(LONG, "x" * 3_000)) == expected(first)
    assert await prompts.blocks_of(chat(LONG, "x" * 30_000)) == ()
    await prompts.aclose()


async def test_who_fails_again_and_again_is_left_alone() -> None:
    server = Server()
    server.fails = True
    prompts = PromptTokens(names(), server.tokenise, within(5.0))
    for one in range(40):
        assert await prompts.blocks_of(chat(LONG, str(one))) == ()
    assert len(server.asked) == 8


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": 1}',
        chat(),
        chat(LONG, chat_template="x"),
        chat(LONG, prompt="x"),
        b'{"model":"m","messages":[{"content":[{"type":"image_url","image_url":{}}]}]}',
        b'{"model":"m","prompt":[-1]}',
        b'{"model":"m","prompt":[]}',
        b'{"model":"m","prompt":["a","b"]}',
        b'{"model":"m","input":"embed this"}',
        b'{"model":"\xff","prompt":"x"}',
    ],
)
async def test_what_isn_t_a_prompt_of_text_is_not_asked_about(body: bytes) -> None:
    server = Server()
    assert await PromptTokens(names(), server.tokenise, within(5.0)).blocks_of(body) == ()
    assert not server.asked


async def test_before_blocks_have_a_size_nothing_is_asked() -> None:
    server = Server()
    assert (
        await PromptTokens(KvNames(b"s"), server.tokenise, within(5.0)).blocks_of(chat(LONG)) == ()
    )
    assert not server.asked


async def test_text_and_token_ids_are_prompts_too() -> None:
    server = Server()
    prompts = PromptTokens(names(), server.tokenise, within(5.0))
    root = names().root("", "")
    for size in (100, 5_000):
        ids = [one % 256 for one in range(size)]
        body = json.dumps({"model": "m", "prompt": ids}).encode()
        assert await prompts.blocks_of(body) == token_blocks(ids, BLOCK, root)
    assert not server.asked
    body = json.dumps({"model": "m", "prompt": LONG}).encode()
    assert await prompts.blocks_of(body) == token_blocks(list(LONG.encode()), BLOCK, root)


async def test_a_server_that_answers_nonsense_gives_no_blocks() -> None:
    async def nonsense(_: Prompt) -> Answer | None:
        return DIALECTS["vllm"], b'{"tokens": ["a"]}'

    assert await PromptTokens(names(), nonsense, within(5.0)).blocks_of(chat(LONG)) == ()


async def test_whatever_goes_wrong_there_are_just_no_blocks() -> None:
    async def broken(_: Prompt) -> Answer | None:
        raise KeyError("a defect")

    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what["exception"]))
    prompts = PromptTokens(names(), broken, within(5.0))
    assert await prompts.blocks_of(chat(LONG)) == ()
    assert [type(one) for one in told] == [KeyError], "it is logged as a defect"
    assert await prompts.blocks_of(b'{"model":"\\ud800","prompt":"\\udfff"}') == ()


async def test_models_tools_and_messages_tell_prompts_apart() -> None:
    made = names()
    tools = [{"type": "function", "function": {"name": "f"}}]
    bodies = [chat("a", "b"), chat("ab"), chat("a", "b", tools=tools), chat("b", "a")]
    bodies.append(chat("a", "b").replace(b'"m"', b'"n"'))
    readings = [read(body, made) for body in bodies]
    assert len({one.digests[-1] for one in readings if one is not None}) == len(bodies)
