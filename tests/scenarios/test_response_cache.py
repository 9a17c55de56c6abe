"""Faults that users of other caches have reported, played against this one."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runner import UnreadableError, play, read
from stage import HERE, Stage

from harness import Fake, Gateway, Reply, chat, running
from openai_shapes import CHAT, text_of
from preheat.core.keys import Keyring

SECRET = "a secret for keys that outlive a process"

SCENARIOS: dict[str, dict[str, Any]] = {
    scenario["id"]: scenario
    for scenario in map(json.loads, (HERE / "response_cache.jsonl").read_text().splitlines())
}

LATER = {
    **dict.fromkeys((f"S1-{number}" for number in range(25, 36)), "needs the semantic layer"),
    "S1-44": "embeddings aren't cached yet",
    "S1-45": "the Responses API isn't cached yet",
}
"""Scenarios of parts that the product doesn't have yet: they aren't played at all."""

LATER_IN_PART = {
    "S1-23": "its paraphrases need the semantic layer",
    "S1-37": "played with a Redis that hangs; there is no embedder yet that could",
}
"""Scenarios of which one part waits for what the product doesn't have yet."""

NOW = [name for name in SCENARIOS if name not in LATER]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    served = Stage(tmp_path_factory.mktemp("stage"))
    yield served
    served.close()


@pytest.mark.parametrize("name", NOW)
def test_a_reported_fault_does_not_happen_here(name: str, stage: Stage) -> None:
    play(read(SCENARIOS[name]), stage)


def test_every_scenario_is_played_or_named_with_its_reason() -> None:
    assert set(LATER) | set(LATER_IN_PART) <= set(SCENARIOS)
    assert not set(LATER) & set(LATER_IN_PART)
    assert [f"S1-{number:02}" for number in range(1, 49)] == list(SCENARIOS)


@pytest.mark.parametrize("name", NOW)
def test_no_word_of_a_scenario_is_passed_over(name: str) -> None:
    """A word more, wherever it stands, makes the scenario unreadable."""
    for where in _places(SCENARIOS[name]):
        with pytest.raises(UnreadableError):
            read(_with_one_word_more(SCENARIOS[name], where))


def _places(scenario: dict[str, Any]) -> list[tuple[str | int, ...]]:
    """The objects in which the scenario's own words stand; what is sent may hold anything."""
    found: list[tuple[str | int, ...]] = [()]
    for name in ("expect", "expect_with_header", "with_header", "cfg", "load"):
        found += [(name,)] if isinstance(scenario.get(name), dict) else []
    for name in ("steps", "variants", "parallel_posts", "up"):
        for number, part in enumerate(scenario.get(name, ())):
            if isinstance(part, dict):
                found.append((name, number))
                found += [(name, number, "expect")] if "expect" in part else []
                found += [(name, number, "admin")] if "admin" in part else []
    found += [("price", model) for model in scenario.get("price", ())]
    return found


def _with_one_word_more(scenario: dict[str, Any], where: tuple[str | int, ...]) -> dict[str, Any]:
    changed: Any = copy.deepcopy(scenario)
    part = changed
    for name in where:
        part = part[name]
    part["a_word_more"] = 1
    return dict(changed)


def test_a_scenario_with_an_unknown_word_in_a_known_place_is_unreadable() -> None:
    for change in (
        {"up": "shout"},
        {"also": ["the moon is full"]},
        {"hook": "force_luck", "digest": "0"},
        {"hook": "force_digest"},
        {"steps": [{"cache": "perhaps"}]},
        {"steps": [{"patch": {}}]},
        {"raw_steps": []},
        {"up": [{}]},
        {"up": [{"content": "yes", "status": 500}]},
        {"price": {"m1": {"in": 1.0}}},
        {"base": "hello"},
    ):
        with pytest.raises(UnreadableError):
            read(SCENARIOS["S1-01"] | change)


# What a scenario says in passing -------------------------------------------------------------


def test_who_answers_is_part_of_the_key() -> None:
    """S1-03, within one process: only what the model's name leads to differs."""
    body = json.dumps(chat("Name a prime above 90.")).encode()
    a, b = (Keyring(bytes(32), lambda model, name=name: f"{name}/{model}") for name in ("a", "b"))
    ask_a, ask_b = (ring.ask(body, ring.partition("local", CHAT, "")) for ring in (a, b))
    assert ask_a.key != ask_b.key
    assert ask_a.check != ask_b.check


@pytest.fixture(scope="module")
def engine() -> Iterator[Fake]:
    with running(served := Fake()):
        yield served


def _key_from(engine: Fake, folder: Path, toml: str, hash_seed: str) -> str:
    """The key of one and the same request in a new process."""
    environment = {"PYTHONHASHSEED": hash_seed, "KEY_SECRET": SECRET}
    toml = f'exact.secret_env = "KEY_SECRET"\n{toml}'
    served = Gateway(toml, upstream=engine.url, folder=folder, environment=environment)
    with running(served):
        asked = chat("Book it.", tools=SCENARIOS["S1-08"]["base"]["tools"])
        served.post(CHAT, asked)
        reply = served.post(CHAT, asked)
    assert reply.cache == "hit"
    return reply.cache_status.partition('key="')[2].partition('"')[0]


def test_a_restart_and_another_hash_seed_leave_the_key_as_it_is(
    engine: Fake, tmp_path: Path
) -> None:
    """S1-08 across starts, for operators who set a secret."""
    assert _key_from(engine, tmp_path, "", "0") == _key_from(engine, tmp_path, "", "4242")


def test_another_alias_or_version_changes_the_key(engine: Fake, tmp_path: Path) -> None:
    """S1-03 across starts: without the alias in the key, a store that outlives them would answer."""
    keys = {
        _key_from(engine, tmp_path, toml, "0")
        for toml in ("", '[models.m1]\nalias = "b/m1"', '[models.m1]\nversion = "2"')
    }
    assert len(keys) == 3


def test_a_collision_is_a_miss_for_both_however_often_they_are_asked(engine: Fake) -> None:
    """S1-12, further: the two answers never mix, though they fight for one place."""
    launcher = (str(HERE / "colliding_keys.py"),)
    served = Gateway(
        upstream=engine.url, launcher=launcher, environment={"PREHEAT__L2__KIND": "off"}
    )
    with running(served):
        first = [_ask(served, word) for word in ("Alpha?", "Omega?", "Alpha?", "Omega?")]
        again = [_ask(served, word) for word in ("Omega?", "Alpha?")]
    assert [reply.cache for reply in first] == ["miss"] * 4
    assert [reply.detail for reply in first[1:]] == ["collision"] * 3
    assert len({text_of(reply) for reply in first}) == 4
    assert [reply.cache for reply in again] == ["hit", "miss"]
    assert text_of(again[0]) == text_of(first[3])


def _ask(served: Gateway, text: str) -> Reply:
    return served.post(CHAT, chat(text))
