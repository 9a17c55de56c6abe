"""Where prefixes are marked for a provider that bills their writing, and that nothing else changes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core.breakpoints import MOST, Breakpoints
from preheat.wire.anthropic import with_breakpoints

LONG = "word " * 2_000


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def marked(body: dict[str, Any], rule: Breakpoints | None = None) -> list[str]:
    """Where marks are, as paths."""
    sent = json.loads(with_breakpoints(json.dumps(body).encode(), (rule or Breakpoints()).places))
    return list(_marks(sent, ""))


def _marks(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        if value.get("cache_control") == {"type": "ephemeral"}:
            yield path
        for name, inner in value.items():
            yield from _marks(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _marks(inner, f"{path}.{number}")


def test_tools_the_system_prompt_and_the_last_two_turns_are_ends() -> None:
    turns = [
        {"role": "user" if n % 2 == 0 else "assistant", "content": f"turn {n}"} for n in range(5)
    ]
    body = {"tools": [{"name": "a", "description": LONG}], "system": LONG, "messages": turns}
    assert marked(body) == ["tools.0", "system.0", "messages.3.content.0", "messages.4.content.0"]


@pytest.mark.parametrize(
    "changing",
    [
        "Now: 2026-01-01",
        "It is 10:05.",
        "id 123e4567-e89b-12d3-a456-426614174000",
        "at 1767225600",
    ],
)
def test_what_looks_as_if_it_changed_ends_what_is_cached(changing: str) -> None:
    body = {
        "system": [text(LONG), text(changing), text(LONG)],
        "messages": [{"role": "user", "content": LONG}],
    }
    assert marked(body) == ["system.0"]


def test_what_came_again_and_again_stays_whatever_it_looks_like() -> None:
    rule = Breakpoints()
    body = {"system": [text(LONG), text("Your knowledge ends 2024-10-01.")], "messages": []}
    found = [marked(body, rule) for _ in range(4)]
    assert found == [["system.0"], ["system.0"], ["system.0"], ["system.1"]]


def test_a_place_with_another_part_in_each_request_changes_whatever_it_looks_like() -> None:
    rule = Breakpoints()
    bodies = [
        {"system": [text(LONG), text(f"You talk to customer {name}.")], "messages": []}
        for name in ("Ann", "Bob", "Cid")
    ]
    assert [marked(body, rule) for body in bodies] == [["system.1"], ["system.1"], ["system.0"]]


def test_short_prefixes_and_blocks_that_cant_be_marked_are_let_be() -> None:
    assert marked({"system": "short", "messages": [{"role": "user", "content": "Hi"}]}) == []
    thinking = {"role": "assistant", "content": [{"type": "thinking", "thinking": LONG}]}
    assert marked({"system": LONG, "messages": [thinking]}) == ["system.0"]


def test_a_client_that_marks_by_itself_is_left_alone() -> None:
    own = text(LONG) | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = json.dumps({"system": [own], "messages": []}).encode()
    assert with_breakpoints(body, Breakpoints().places) is body


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"system": 3}', b'{"messages": [{"content": {}}]}', b"\xff" * 9]
)
def test_what_cant_be_read_goes_as_it_came(body: bytes) -> None:
    assert with_breakpoints(body, Breakpoints().places) is body


blocks = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=20)}), max_size=3
)
contents = st.one_of(st.text(max_size=20), blocks)
bodies = st.fixed_dictionaries(
    {
        "model": st.text(max_size=5),
        "temperature": st.sampled_from([0, 1.0, 1e-7]),
        "system": contents,
        "tools": st.lists(st.fixed_dictionaries({"name": st.text(max_size=5)}), max_size=3),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.just("user"), "content": contents}), max_size=4
        ),
    }
)


@given(bodies)
def test_nothing_is_said_otherwise_and_never_more_than_four_marks(body: dict[str, Any]) -> None:
    sent = json.loads(with_breakpoints(json.dumps(body).encode(), Breakpoints(0).places))
    assert len(list(_marks(sent, ""))) <= MOST
    assert _plain(sent) == _plain(body)


def _plain(value: Any) -> Any:
    """Without marks, and with each bare content as a list of one."""
    if isinstance(value, dict):
        return {
            name: _plain(
                [text(inner)] if name in {"content", "system"} and isinstance(inner, str) else inner
            )
            for name, inner in value.items()
            if name != "cache_control"
        }
    return [_plain(one) for one in value] if isinstance(value, list) else value
