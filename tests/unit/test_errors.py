"""Whose fault it is decides the answer."""

import pytest

from preheat import errors
from preheat.errors import (
    ConfigError,
    EngineError,
    PreheatError,
    RequestError,
    UpstreamError,
)


def test_every_error_is_one_of_the_tree() -> None:
    found = [one for one in vars(errors).values() if isinstance(one, type)]
    assert all(issubclass(one, PreheatError) for one in found)
    assert issubclass(EngineError, UpstreamError)
    assert not issubclass(ConfigError, (RequestError, UpstreamError))


def test_a_request_error_names_status_code_and_field() -> None:
    error = RequestError("no", status=400, code="invalid-field", param="model")
    assert (str(error), error.status, error.code, error.param) == (
        "no",
        400,
        "invalid-field",
        "model",
    )


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("connect", 502),
        ("reset", 502),
        ("protocol", 502),
        ("a kind of tomorrow", 502),
        ("queue", 503),
        ("start", 503),
        ("breaker-open", 503),
        ("timeout-connect", 504),
        ("timeout-first-byte", 504),
        ("timeout-idle", 504),
    ],
)
def test_an_engine_error_has_the_status_of_its_kind(kind: str, status: int) -> None:
    assert EngineError("no", kind=kind).status == status


def test_an_engine_error_tells_whether_anything_had_arrived() -> None:
    assert EngineError("no", kind="reset").before_first_byte
    assert not EngineError("no", kind="reset", before_first_byte=False).before_first_byte
