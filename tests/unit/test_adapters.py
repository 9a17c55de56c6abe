"""Which server has which adapter: by its own word, by what was loaded, and until when a refusal counts."""

from typing import Any

import pytest

from preheat import config
from preheat.core.adapters import REFUSED_S, Adapters
from preheat.core.router import Ask, Router
from preheat.core.routing import POLICIES
from preheat.errors import ConfigError


def both() -> Adapters:
    made = Adapters({"sql": "/sql", "law": "/law"})
    made.lists(0, ["sql"], 0.0, can_load=True)
    made.lists(1, [], 0.0, can_load=True)
    return made


def test_who_has_it_needs_no_load_and_who_lacks_it_a_learned_time() -> None:
    made = both()
    assert made.places("sql", [0, 1], 1.0) == {0: 0.0, 1: 2.0}
    made.began(1, "sql", 1.0)
    made.loaded(1, "sql", 8.0, 9.0)
    assert made.places("sql", [0, 1], 9.0) == {0: 0.0, 1: 0.0}
    made.lost(1, "sql")
    assert made.places("sql", [0, 1], 9.0) == {0: 0.0, 1: 8.0}
    law_s = made.places("law", [0], 9.0)[0]
    assert 2.0 < law_s < 8.0, "others' loads tell of one that was never loaded"


def test_a_load_under_way_is_cheaper_than_another_one_and_never_free() -> None:
    made = both()
    made.began(0, "law", 0.0)
    assert made.places("law", [0, 1], 0.0) == {0: 1.0, 1: 2.0}
    assert made.places("law", [0, 1], 1.5)[0] == 0.5
    assert made.places("law", [0, 1], 2.0)[0] == 0.2
    assert made.places("law", [0, 1], 5.0) == {0: 3.2, 1: 2.0}, "who is late may be later"
    made.stopped(0, "law")
    assert made.places("law", [0], 60.0) == {0: 2.0}


def test_a_refusal_counts_for_a_stated_time_or_until_it_is_started_again() -> None:
    made = both()
    made.refused(1, "law", 10.0)
    assert made.places("law", [0, 1], 10.0) == {0: 2.0}
    assert made.places("sql", [1], 10.0) == {1: 2.0}, "another adapter may fit"
    assert made.retry_s("law", [0, 1], 20.0) == REFUSED_S - 10.0
    assert made.places("law", [1], 10.0 + REFUSED_S) == {1: 2.0}
    made.refused(1, "law", 100.0)
    made.cleared(1)
    assert made.places("law", [1], 100.0) == {1: 2.0}


def test_a_name_that_nobody_configured_is_known_by_lists_alone() -> None:
    made = Adapters()
    assert made.named("sql") == ""
    made.lists(0, ["sql"], 0.0, can_load=True)
    made.lists(1, [], 0.0, can_load=True)
    assert made.named("sql") == made.named("base:sql") == "sql"
    assert made.places("sql", [0, 1], 0.0) == {0: 0.0}, "nobody says where it lies"
    made.cleared(0)
    assert made.named("sql") == "sql", "it isn't a model of the other's"
    assert made.places("sql", [0, 1], 0.0) == {}
    made.lists(0, [], 1.0, can_load=True)
    assert made.named("sql") == ""
    made.lists(0, ["sql"], 2.0, can_load=True)
    made.left(0)
    assert made.named("sql") == ""


def test_a_list_asked_for_before_a_load_ended_doesnt_undo_it() -> None:
    made = both()
    made.loaded(1, "law", 1.0, 5.0)
    made.lists(1, [], 4.0, can_load=True)
    assert made.held(1) == ["law"]
    made.lists(1, [], 6.0, can_load=True)
    assert made.held(1) == []


def test_one_that_loads_none_while_it_runs_is_no_place_for_others() -> None:
    made = Adapters({"sql": "/sql"})
    made.lists(0, [], 0.0, can_load=False)
    assert made.places("sql", [0, 1], 0.0) == {1: 2.0}, "of the other nothing is known yet"
    assert made.wanted(0, 0.0) == []


def test_lists_are_bounded() -> None:
    made = Adapters()
    made.lists(0, ["x" * 257, "", *(f"a{one}" for one in range(10_000))], 0.0, can_load=True)
    made.lists(1, [f"b{one}" for one in range(10_000)], 0.0, can_load=True)
    assert len(made.held(0)) + len(made.held(1)) <= 4_096
    assert made.named("x" * 257) == ""


def test_what_was_asked_of_it_is_wanted_back_the_most_asked_for_first() -> None:
    made = both()
    for at in range(3):
        made.asked("law", 0, float(at))
    made.asked("sql", 0, 3.0)
    made.asked("sql", 1, 3.0)
    made.cleared(0)
    assert made.wanted(0, 4.0) == ["law", "sql"]
    assert made.wanted(1, 4.0) == ["sql"], "its own demand, not the others'"
    assert made.wanted(2, 4.0) == ["law", "sql"], "a new one gets what all are asked for"
    made.loaded(0, "law", 1.0, 5.0)
    assert made.wanted(0, 5.0) == ["sql"]
    assert made.wanted(2, 604.0) == []


def test_the_router_weighs_a_load_against_a_queue() -> None:
    router = Router(POLICIES["preheat"](), adapters=both())

    def place() -> int:
        places = router.adapters.places("sql", [0, 1], 0.0)
        return router.place(
            Ask("sql", (), 512, 20_000, adapter_s=places), [0, 1], 0.0
        ).ticket.worker

    sent = [place() for _ in range(60)]
    assert sent[:5] == [0] * 5
    assert 1 in sent, "once the wait is longer than a load"
    base = router.place(Ask("m", (), 512, 100), [1], 0.0)
    assert router.queue_s(1, 0.0) >= 0.0
    router.failed(base.ticket, 0.0)
    assert router.choose(Ask("m", (), 512, 100), [1], 0.0)[0].load_s == 0.0, "it needs no adapter"


def test_waiting_for_a_load_teaches_nothing_about_prompts() -> None:
    router = Router(POLICIES["preheat"]())
    route = router.place(Ask("sql", (), 512, 4_000), [0], 0.0)
    router.waited(route.ticket, 30.0)
    assert route.ticket.queue_s >= 30.0


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"adapters": {"sql": " "}}, "adapters.sql: say where it lies"),
        ({"adapters": {"a\nb": "/x"}}, "1 to 256 printable"),
        ({"adapters": {"sql": "/x"}, "dialect": "llamacpp"}, "llamacpp loads none while it runs"),
        ({"adapters": {"sql": "/x"}, "poll_s": 0.0}, "poll_s 0"),
        ({"adapters": {f"a{one}": "/x" for one in range(1_025)}}, "at most 1024, got 1025"),
        ({"adapters": {"sql": "/x"}, "kind": "fake", "url": ""}, "means nothing for kind fake"),
    ],
)
def test_settings_that_cant_work_are_refused(engine: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.check({"engines": {"gpu": {"url": "http://gpu:8000", **engine}}})
