"""Where KV events are heard, as the settings say it."""

from typing import Any

import pytest

from preheat import config
from preheat.config import EngineSettings
from preheat.errors import ConfigError
from preheat.gateway.reload import _is_same_group
from preheat.wire.kv_places import KvPlace, places_of

URLS = ["http://gpu-1:8000/v1", "http://gpu-2:8000/v1"]
TWO = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
ANY = "tcp://*:5557"


def group(**fields: Any) -> dict[str, Any]:
    return {"engines": {"a": {"urls": URLS, **fields}}}


def test_one_endpoint_is_that_of_each_host() -> None:
    places = places_of(URLS, [ANY], ["tcp://*:5558"])
    assert places[URLS[1]] == KvPlace(ANY, "tcp://*:5558", "gpu-2")
    assert places_of(URLS, ["tcp://{host}:5557"], [])[URLS[0]] == KvPlace(ANY, "", "gpu-1")


def test_several_servers_of_one_host_have_one_each() -> None:
    ours = places_of(TWO, ["ipc:///run/kv-{port}"], [])
    assert [one.endpoint for one in ours.values()] == ["ipc:///run/kv-8001", "ipc:///run/kv-8002"]
    assert [one.endpoint for one in places_of(TWO, [ANY, "tcp://*:5559"], []).values()] == [
        ANY,
        "tcp://*:5559",
    ]
    with pytest.raises(ConfigError, match=r"tcp://127.0.0.1:5557 would be that of two streams"):
        places_of(TWO, [ANY], [])
    with pytest.raises(ConfigError, match="two streams"):
        places_of(TWO, [ANY, "tcp://*:5559"], ["tcp://*:5558", ANY])
    with pytest.raises(ConfigError, match="two streams"):
        places_of(URLS, ["tcp://10.0.0.1:5557"], [])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_events": ["tcp://*"]}, r"engines.a.kv_events: KV events: 'tcp://\*' .* isn't an"),
        ({"kv_events": [ANY] * 3}, "engines.a.kv_events: give one endpoint for all"),
        ({"kv_replay": [ANY]}, "engines.a.kv_replay: means nothing without kv_events"),
        ({"kv_events": [ANY], "dialect": "llamacpp"}, "llamacpp publishes none; vllm and sglang"),
        ({"kv_events": [ANY], "poll_s": 0.0}, "poll_s 0 means that no server is asked"),
        ({"kv_events": ANY}, "engines.a.kv_events: expected `array`, got `str`"),
    ],
)
def test_what_can_t_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.check(group(**fields))


def test_servers_in_another_order_are_another_group_where_each_has_its_own_endpoint() -> None:
    def engine(urls: list[str], events: list[str]) -> EngineSettings:
        return config.check(group(urls=urls, kv_events=events)).engines["a"]

    one_each, turned = ["tcp://*:5557", "tcp://*:5559"], URLS[::-1]
    assert not _is_same_group(engine(URLS, one_each), engine(turned, one_each))
    assert _is_same_group(engine(URLS, one_each), engine(URLS, one_each))
    assert _is_same_group(engine(URLS, [ANY]), engine(turned, [ANY]))
    assert not _is_same_group(engine(URLS, [ANY]), engine(URLS, []))
    for folders, same in ((["a", "b"], False), (["a"], True)):
        old, new = (
            config.check(group(urls=urls, slot_folders=folders)).engines["a"]
            for urls in (URLS, turned)
        )
        assert _is_same_group(old, new) is same


def test_what_can_be_isn_t() -> None:
    tree = config.check(group(kv_events=[ANY], kv_replay=["tcp://*:5558"]))
    assert tree.engines["a"].kv_events == (ANY,)
    with pytest.raises(ConfigError, match="kv_events: means nothing for kind embedded"):
        config.check({"engines": {"a": {"kind": "embedded", "kv_events": [ANY]}}})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"slot_folders": [""]}, "folders of their own"),
        ({"slot_folders": ["/"]}, "folders of their own"),
        ({"slot_folders": ["./"]}, "folders of their own"),
        ({"slot_folders": ["/s"], "dialect": "vllm"}, "vllm has no slots"),
    ],
)
def test_slot_folders_that_can_t_be_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.check(group(urls=["http://a:1"], **fields))
