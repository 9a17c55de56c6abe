"""Settings that `serve` couldn't use are refused before it starts, and no password is quoted."""

import io
import threading
from typing import Any

import pytest

from preheat import config
from preheat.errors import ConfigError
from preheat.telemetry.logs import Log


@pytest.mark.parametrize(
    "url",
    [
        "http://h:99999",
        "http://[::1",
        "http://h/é",
        "http://h/v 1",
        "ftp://h",
        "h:1",
        "http://user:sekret@h",
        "http://h:sekret",
        "http://h/v1/chat/completions",
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"engines\.a\.url") as refused:
        config.check({"engines": {"a": {"url": url}}})
    assert "sekret" not in str(refused.value)


@pytest.mark.parametrize("header", ["authorization", "Host", "content-length", "x y", "é", ""])
def test_a_header_that_must_not_go_upstream_is_refused(header: str) -> None:
    with pytest.raises(ConfigError, match=r"engines\.a\.forward_headers"):
        config.check({"engines": {"a": {"url": "http://h", "forward_headers": [header]}}})


@pytest.mark.parametrize(
    "engine",
    [
        {"url": "http://h", "model": "Qwen"},
        {"url": "http://h", "slots": 4},
        {"kind": "embedded", "api_key_env": "KEY"},
        {"kind": "fake", "url": "http://h"},
    ],
)
def test_a_setting_of_another_kind_of_engine_is_refused(engine: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="means nothing for kind"):
        config.check({"engines": {"a": engine}})


class Stuck(io.BytesIO):
    """A stream that takes nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()

    def write(self, data: Any) -> int:
        self.may.wait(10)
        return super().write(data)


def test_an_audit_line_is_written_where_others_are_dropped() -> None:
    stream = Stuck()
    log = Log(stream, capacity=2)
    for _ in range(10):
        log.event("request")
    log.audit("invalidate", audit_id="a1")
    stream.may.set()
    log.close(5.0)
    assert log.dropped > 0
    assert b'"audit_id":"a1"' in stream.getvalue()
