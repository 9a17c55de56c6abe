"""The doctor's command in this process, and what it found."""

import json
from typing import Any

import pytest

from engines_faked import Engine, served
from preheat.cli import main


class Examine:
    """Runs the command; its findings by check, and `verdict`, `code` and `said` (on stderr)."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *options: str) -> dict[str, Any]:
        code = main(["doctor", "--json", "--timeout", "20", *options])
        out = self._capsys.readouterr()
        document = json.loads(out.out)
        found = {one["check"]: one for one in document["findings"]}
        return found | {"verdict": document["verdict"], "code": code, "said": out.err}

    def one(self, engine: Engine, *options: str) -> dict[str, Any]:
        with served(engine) as url:
            return self(url, *options)

    def pair(self, one: Engine, other: Engine, *options: str) -> dict[str, Any]:
        with served(one) as first, served(other) as second:
            return self(first, second, *options)


def remarks(found: dict[str, Any]) -> dict[str, str]:
    """Severities of what isn't as it should be."""
    findings = {check: one for check, one in found.items() if isinstance(one, dict)}
    return {check: one["severity"] for check, one in findings.items() if one["severity"] != "ok"}
