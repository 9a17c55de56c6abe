"""What a flight tells of its answer to whoever placed it: whether it calls a tool, in every form."""

import json
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from answer_forms import FORMS, Form

from preheat.core.types import Ask, Check, Epoch, Key, Request, RequestId, Usage, Want
from preheat.engines import Engine
from preheat.gateway.flights import Flight, Tower
from preheat.gateway.listeners import Call
from preheat.transport.client import Response
from preheat.wire import openai

pytestmark = pytest.mark.asyncio


class Placed:
    """Hears how it went."""

    reason = b""

    def __init__(self) -> None:
        self.heard: list[tuple[Usage | None, bool]] = []

    def began(self) -> None: ...

    def ended(self, usage: Usage | None, *, calls_tool: bool = False) -> None:
        self.heard.append((usage, calls_tool))

    def gone(self) -> None: ...


class Said:
    """A response as the client reads it, in pieces that end anywhere."""

    status = 200
    worker = ""

    def __init__(self, content_type: bytes, body: bytes, placed: Placed) -> None:
        self.headers = [(b"content-type", content_type)]
        self.placement = placed
        self._pieces = [body[start : start + 100] for start in range(0, len(body), 100)]

    def __aiter__(self) -> "Said":
        return self

    async def __anext__(self) -> bytes:
        if not self._pieces:
            raise StopAsyncIteration
        return self._pieces.pop(0)

    def hand_to(self, sink: Callable[[bytes], bool]) -> None: ...

    def close(self) -> None: ...


class Sending:
    """An engine that says one thing, and what it was told."""

    name = "e"

    def __init__(self, said: Said) -> None:
        self._said = said
        self.told: dict[str, Any] = {}

    async def send(self, *_: object, **told: Any) -> Response:
        self.told = told
        return cast("Response", self._said)


class Ground:
    """A tower that does nothing."""

    def on_answer(self, flight: Flight) -> None: ...

    def on_bug(self, bug: Exception) -> None:
        raise bug

    def on_overflow(self, flight: Flight) -> None: ...

    def on_failure(self, flight: Flight, error: object) -> None: ...


async def flown(form: Form, content_type: bytes, body: bytes) -> tuple[Placed, dict[str, Any]]:
    placed = Placed()
    engine = Sending(Said(content_type, body, placed))
    dialect = openai.DIALECTS[form.path.encode()]
    call = Call(cast("Engine", engine), b"", [], b"", dialect, is_usage_injected=False)
    ask = Ask(Key(b"k"), Check(b"c"), "m")
    want = Want(session="s", session_state="tool")
    flight = Flight(
        call,
        Request(RequestId(b"1"), "t", "", ask, want),
        cast("Tower", Ground()),
        reason="",
        epoch=Epoch(),
        generation=0,
        fallback="",
        clock=time.monotonic,
    )
    await flight.run()
    return placed, engine.told


@pytest.mark.parametrize("name", FORMS)
async def test_whether_an_answer_calls_a_tool_is_told(name: str) -> None:
    form = FORMS[name]
    calls = any(one.get("finish_reason") == "tool_calls" for one in form.whole["choices"])
    whole = json.dumps(form.whole, separators=(",", ":")).encode()
    spaced = json.dumps(form.whole, indent=1).encode()
    events: list[Any] = form.as_stream()["sse"]
    stream = "".join(f"data: {one}\n\n" for one in events).encode()
    for content_type, body in (
        (b"application/json", whole),
        (b"application/json", spaced),
        (b"text/event-stream", stream),
    ):
        placed, told = await flown(form, content_type, body)
        assert [one[1] for one in placed.heard] == [calls]
        assert (told["session"], told["state"]) == ("s", "tool")


async def test_both_kinds_of_answers_are_among_the_forms() -> None:
    reasons = {one.get("finish_reason") for form in FORMS.values() for one in form.whole["choices"]}
    assert {"stop", "tool_calls"} <= reasons
