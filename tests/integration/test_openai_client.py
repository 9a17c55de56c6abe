"""OpenAI's own client works as it does before OpenAI, and sees what the cache does for it."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from answer_forms import FORMS
from openai import AsyncOpenAI, OpenAI, Stream
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from harness import Fake, Gateway, running

KEY = "sk-its-own"


@pytest.fixture(scope="module")
def gateway(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that knows one tenant."""
    served = Gateway(
        '[tenants.team]\napi_key_env = "TEAM_KEY"',
        upstream=fake.url,
        folder=tmp_path_factory.mktemp("gateway"),
        environment={"TEAM_KEY": KEY},
    )
    with running(served):
        yield served
    assert '"event":"bug"' not in served.stderr


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with client_of(gateway) as made:
        yield made


def client_of(gateway: Gateway, key: str = KEY) -> OpenAI:
    return OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=20)


@pytest.fixture(autouse=True)
def _fresh(fake: Fake) -> None:
    fake.reset()


def asking(text: str, **fields: Any) -> dict[str, Any]:
    """A greedy question, as the client's arguments."""
    return {
        "model": "m1",
        "temperature": 0,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }


def read_through(stream: Stream[ChatCompletionChunk]) -> tuple[list[ChatCompletionChunk], Any]:
    """The chunks, and what the client's own accumulator makes of them."""
    state = ChatCompletionStreamState()
    chunks = []
    with stream:
        for chunk in stream:
            state.handle_chunk(chunk)
            chunks.append(chunk)
    return chunks, state.get_final_completion()


def status_of(raw: Any) -> str:
    return str(raw.headers["cache-status"])


def test_an_answer_comes_and_comes_again_without_the_engine(client: OpenAI, fake: Fake) -> None:
    asked = asking("What is slate?")
    first, again = (client.chat.completions.create(**asked) for _ in range(2))
    assert first.choices[0].message.content == "A1"
    assert again.choices == first.choices
    assert again.usage == first.usage
    assert again.id != first.id
    assert fake.calls == 1


def test_headers_say_what_the_cache_did(client: OpenAI) -> None:
    asked = asking("What do the headers say?")
    raws = [client.chat.completions.with_raw_response.create(**asked) for _ in range(2)]
    assert status_of(raws[0]).startswith("preheat; fwd=miss; detail=key-first-seen")
    assert status_of(raws[1]).startswith("preheat; hit; ttl=")
    assert raws[0].parse().choices == raws[1].parse().choices
    assert raws[1].headers["x-preheat-layer"] == "exact"
    assert int(raws[1].headers["age"]) >= 0


def test_headers_say_it_of_streams_too(client: OpenAI) -> None:
    asked = asking("What do a stream's headers say?", stream=True)
    said = []
    for _ in range(2):
        raw = client.chat.completions.with_raw_response.create(**asked)
        chunks, _ = read_through(raw.parse())
        said.append((status_of(raw).split(";")[1].strip(), len(chunks) > 1))
    assert said == [("fwd=miss", True), ("hit", True)]


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_is_put_together_to_the_same_answer_each_time(
    usage: bool, client: OpenAI, fake: Fake
) -> None:
    fake.script({"content": "one two three four", "pieces": 4, "reasoning": "count"})
    asked = asking("Count.", stream=True)
    if usage:
        asked |= {"stream_options": {"include_usage": True}, "seed": 1}
    told = [read_through(client.chat.completions.create(**asked)) for _ in range(2)]
    whole = client.chat.completions.create(**(asked | {"stream": False}))
    for chunks, final in told:
        assert final.choices[0].message.content == "one two three four"
        assert final.choices[0].message.reasoning_content == "count"
        assert final.choices[0].finish_reason == "stop"
        assert (final.usage == whole.usage) is usage
        assert len({chunk.id for chunk in chunks}) == 1
    assert [c.choices for c in told[0][0]] == [c.choices for c in told[1][0]]
    assert whole.choices[0].message.content == "one two three four"
    assert fake.calls == 1


def test_the_client_s_stream_helper_works(client: OpenAI, fake: Fake) -> None:
    fake.script({"content": "one two", "pieces": 2})
    asked = asking("Help with a stream.")
    rounds = []
    for _ in range(2):
        with client.chat.completions.stream(**asked) as stream:
            rounds.append([event.type for event in stream])
            final = stream.get_final_completion()
        assert final.choices[0].message.content == "one two"
    assert rounds[0] == rounds[1]
    assert rounds[0][-1] == "content.done"
    assert fake.calls == 1


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("is_stream_first", [False, True])
def test_two_parallel_tool_calls_arrive_whole_in_both_forms(
    is_stream_first: bool, client: OpenAI, fake: Fake
) -> None:
    form = FORMS["two parallel tool calls"]
    fake.script(form.as_stream() if is_stream_first else form.as_body())
    asked = asking(f"Weather and time? {is_stream_first}", tools=[WEATHER])
    for is_stream in (is_stream_first, True, False):
        if is_stream:
            _, said = read_through(client.chat.completions.create(**asked, stream=True))
        else:
            said = client.chat.completions.create(**asked)
        assert said.choices[0].finish_reason == "tool_calls"
        calls = said.choices[0].message.tool_calls
        assert [(call.id, call.function.name) for call in calls] == [
            ("call_1", "weather"),
            ("call_2", "clock"),
        ]
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Bergen"}, {}]
    assert fake.calls == 1


def test_a_conversation_with_a_tool_goes_on(client: OpenAI, fake: Fake) -> None:
    """What the client sends back of an answer is a request that can be hit as well."""
    fake.script(FORMS["one tool call"].as_body(), {"content": "It rains."})
    for _ in range(2):
        asked = asking("Weather in Bergen?", tools=[WEATHER])
        message = client.chat.completions.create(**asked).choices[0].message
        assert message.tool_calls is not None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        asked["messages"] += [message.model_dump(exclude_none=True), result]
        last = client.chat.completions.create(**asked)
        assert last.choices[0].message.content == "It rains."
    assert fake.calls == 2


class Metal(BaseModel):
    name: str
    number: int


def test_json_mode_and_schemas_are_parsed(client: OpenAI, fake: Fake) -> None:
    fake.script(
        {"content": '{"name":"tin","number":50}'}, {"content": '{"name":"lead","number":82}'}
    )
    for _ in range(2):
        plain = client.chat.completions.create(
            **asking("A metal?"), response_format={"type": "json_object"}
        )
        assert json.loads(plain.choices[0].message.content or "")["name"] == "tin"
        parsed = client.chat.completions.parse(**asking("A metal?"), response_format=Metal)
        assert parsed.choices[0].message.parsed == Metal(name="lead", number=82)
    assert fake.calls == 2


def test_several_choices_keep_their_places(client: OpenAI, fake: Fake) -> None:
    fake.script(FORMS["two choices"].as_stream())
    asked = asking("Two fish?", n=2)
    _, streamed = read_through(client.chat.completions.create(**asked, stream=True))
    whole = client.chat.completions.create(**asked)
    for said in (streamed, whole):
        assert [choice.message.content for choice in said.choices] == ["One fish", "Two fish"]
    assert fake.calls == 1


def test_completions_work_in_both_forms(client: OpenAI, fake: Fake) -> None:
    fake.script({"content": "upon a time", "pieces": 3})
    asked: dict[str, Any] = {"model": "m1", "temperature": 0, "prompt": "Once"}
    whole = client.completions.create(**asked)
    with client.completions.create(**asked, stream=True) as stream:
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert whole.choices[0].text == text == "upon a time"
    assert fake.calls == 1


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]


def test_embeddings_go_through(client: OpenAI, fake: Fake) -> None:
    raw = client.embeddings.with_raw_response.create(model="e1", input=["a", "b"])
    assert [one.index for one in raw.parse().data] == [0, 1]
    assert "bypass" in status_of(raw)
    assert fake.calls == 1


# Errors -------------------------------------------------------------------------------------


def test_a_wrong_key_is_an_authentication_error(gateway: Gateway, fake: Fake) -> None:
    with client_of(gateway, "sk-wrong") as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.chat.completions.create(**asking("Who am I?"))
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
    assert caught.value.code == "invalid-api-key"
    assert "sk-wrong" not in str(caught.value)
    assert fake.calls == 0


def test_a_body_we_cannot_read_is_a_bad_request(client: OpenAI, fake: Fake) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asking("Stream?", stream="yes"))
    assert (caught.value.code, caught.value.param) == ("invalid-field", "stream")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **asking("How long?"), extra_headers={"X-Preheat-Ttl": "soon"}
        )
    assert caught.value.param == "X-Preheat-Ttl"
    assert fake.calls == 0


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (409, openai.ConflictError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_s_error_is_the_client_s_own_class_with_the_engine_s_words(
    stream: bool, status: int, kind: type[openai.APIStatusError], client: OpenAI, fake: Fake
) -> None:
    error = {"message": "that won't do", "type": "its_type", "param": "p", "code": "its_code"}
    fake.script({"status": status, "body": {"error": error}, "headers": {"Retry-After": "7"}})
    with pytest.raises(kind, match="that won't do") as caught:
        client.chat.completions.create(**asking(f"What about {status}?", stream=stream))
    assert (caught.value.status_code, caught.value.code) == (status, "its_code")
    assert (caught.value.type, caught.value.param) == ("its_type", "p")
    assert caught.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_down_is_an_internal_server_error(stream: bool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens: a connection is refused
        served = Gateway(upstream=f"http://127.0.0.1:{taken.getsockname()[1]}")
        with (
            running(served),
            client_of(served) as client,
            pytest.raises(openai.InternalServerError) as caught,
        ):
            client.chat.completions.create(**asking("Anybody?", stream=stream))
    assert caught.value.status_code == 502
    assert caught.value.code == "engine-connect"


@pytest.mark.parametrize(
    "said",
    [
        {"fault": "end_after", "after": 2, "pieces": 3},
        {"fault": "reset_after", "after": 2, "pieces": 3},
        {"fault": "half_event", "after": 2, "pieces": 3},
    ],
    ids=lambda said: said["fault"],
)
def test_a_stream_that_fails_midway_raises_after_what_had_come(
    said: dict[str, Any], client: OpenAI, fake: Fake
) -> None:
    fake.script(said | {"content": "one two three"})
    came: list[str | None] = []
    asked = asking(f"Midway, {said['fault']}?", stream=True)
    with client.chat.completions.create(**asked) as stream:
        texts = (chunk.choices[0].delta.content for chunk in stream)
        with pytest.raises(openai.APIError) as caught:
            came.extend(texts)
    assert "".join(piece or "" for piece in came) == "one t"
    assert str(caught.value.code).startswith("engine-")
    assert type(caught.value) is openai.APIError


@pytest.mark.parametrize("done", [False, True])
def test_an_error_that_the_engine_tells_midway_is_raised_in_its_words(
    done: bool, client: OpenAI, fake: Fake
) -> None:
    error = json.dumps({"error": {"message": "out of memory", "code": "oom"}})
    fake.script({"sse": [{"delta": {"content": "x"}}, error, *(["[DONE]"] if done else [])]})
    with pytest.raises(openai.APIError, match="out of memory"):
        read_through(client.chat.completions.create(**asking(f"Oom, {done}?", stream=True)))


def test_an_error_in_a_body_of_status_200_is_raised_from_a_stream(
    client: OpenAI, fake: Fake
) -> None:
    fake.script({"body": {"error": {"message": "no such adapter"}}})
    with pytest.raises(openai.APIError, match="no such adapter"):
        read_through(client.chat.completions.create(**asking("Status 200?", stream=True)))


# Many at once -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_fifty_clients_at_once_get_fifty_answers(gateway: Gateway, fake: Fake) -> None:
    fake.script(default="echo", delay_s=0.02)

    async def ask(client: AsyncOpenAI, number: int) -> str:
        asked = asking(f"token {number % 25}", stream=number % 2 == 0)
        if number % 2:
            said = await client.chat.completions.create(**asked)
            return said.choices[0].message.content or ""
        async with await client.chat.completions.create(**asked) as stream:
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0, timeout=20
    ) as client:
        said = await asyncio.gather(*(ask(client, number) for number in range(50)))
    assert said == [f"echo: token {number % 25}" for number in range(50)]
    assert fake.calls == 25
