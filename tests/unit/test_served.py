"""What a server says of its model and version, by kind; what is no sign of another one."""

import json

import pytest

from dialect_bodies import (
    LLAMACPP_MODELS,
    LLAMACPP_PROPS,
    SGLANG_LOADS,
    TGI_INFO,
    VLLM_MODELS,
)
from preheat.engines.dialects import DIALECTS
from preheat.engines.dialects.identity import Served, questions, served

VERSION = b'{"version":"0.32.0"}'
SGLANG_MODEL = b'{"model_path":"org/m","is_generation":true,"weight_version":"default"}'
LOADS = b"/v1/loads?include=core"


def changed(body: bytes, **fields: object) -> bytes:
    return json.dumps({**json.loads(body), **fields}).encode()


def of_first(models: bytes, **fields: object) -> bytes:
    listed = json.loads(models)
    listed["data"][0] |= fields
    return json.dumps(listed).encode()


def grown(models: bytes) -> bytes:
    described = json.loads(models)["data"][0]["meta"]
    return of_first(models, meta={**described, "size": described["size"] + 1})


SAID: dict[str, dict[bytes, bytes]] = {
    "vllm": {b"/v1/models": VLLM_MODELS, b"/version": VERSION},
    "sglang": {b"/get_model_info": SGLANG_MODEL, LOADS: SGLANG_LOADS},
    "tgi": {b"/info": TGI_INFO},
    "llamacpp": {
        b"/props": changed(LLAMACPP_PROPS, build_info="b11549-abc"),
        b"/v1/models": LLAMACPP_MODELS,
    },
}
OTHERS = [
    ("vllm", b"/v1/models", of_first(VLLM_MODELS, root="org/other")),
    ("vllm", b"/v1/models", of_first(VLLM_MODELS, id="other")),
    ("vllm", b"/version", b'{"version":"0.33.0"}'),
    ("sglang", b"/get_model_info", changed(SGLANG_MODEL, model_path="org/other")),
    ("sglang", b"/get_model_info", changed(SGLANG_MODEL, weight_version="7")),
    ("sglang", LOADS, changed(SGLANG_LOADS, version="0.6.1")),
    ("tgi", b"/info", changed(TGI_INFO, model_id="org/other")),
    ("tgi", b"/info", changed(TGI_INFO, model_sha="77")),
    ("tgi", b"/info", changed(TGI_INFO, version="3.3.6")),
    ("llamacpp", b"/props", changed(LLAMACPP_PROPS, model_path="/models/other.gguf")),
    ("llamacpp", b"/props", changed(LLAMACPP_PROPS, build_info="b11600-def")),
    ("llamacpp", b"/v1/models", grown(LLAMACPP_MODELS)),
]
"""What of one answer is another model's, weights' or version's."""
RUBBISH = [b"", b"null", b"[]", b"{}", b"\xff", b'{"data":{"id":1}}', b'{"data":[{"root":{}}]}']


@pytest.mark.parametrize(("kind", "path", "body"), OTHERS)
def test_another_model_its_weights_or_version_differs(kind: str, path: bytes, body: bytes) -> None:
    before = served(kind, SAID[kind])
    assert before.differs(served(kind, {**SAID[kind], path: body}))


@pytest.mark.parametrize("kind", SAID)
def test_each_says_what_it_is_and_what_it_leaves_out_is_no_difference(kind: str) -> None:
    before = served(kind, SAID[kind])
    assert before.model
    assert before.version
    for path in SAID[kind]:
        for body in RUBBISH:
            now = served(kind, {**SAID[kind], path: body})
            assert not before.differs(now)
            assert before.updated(now) == before
    assert before.updated(Served()) == before
    assert {one.path for one in questions(kind)} == set(SAID[kind])


def test_the_time_of_an_answer_and_adapters_are_nobody_else() -> None:
    before = served("vllm", SAID["vllm"])
    models = json.loads(VLLM_MODELS)
    models["data"][0]["created"] = 1_900_000_000
    models["data"].append({"id": "new", "root": "/adapters/new", "parent": models["data"][0]["id"]})
    now = served("vllm", {**SAID["vllm"], b"/v1/models": json.dumps(models).encode()})
    assert now == before


@pytest.mark.parametrize("kind", sorted({*DIALECTS} - {*SAID}))
def test_others_arent_asked(kind: str) -> None:
    assert questions(kind) == ()
    assert served(kind, {b"/v1/models": VLLM_MODELS}) == Served()


def test_what_it_says_is_short_and_one_line() -> None:
    told = served("tgi", {b"/info": json.dumps({"model_id": "a\nb\x00" + "x" * 999}).encode()})
    assert told.model.startswith("a b")
    assert len(told.model) == 200
    assert str(told).isprintable()
