"""What a check found."""

from typing import Literal

import msgspec

Severity = Literal["ok", "note", "unknown", "warning", "problem"]
"""`problem`: it can't work; `warning`: it works, but worse than it could; `unknown`: it can't be
known from here; `note`: good to know."""


class Finding(msgspec.Struct, frozen=True):
    """`check` is a stable word from docs/doctor.md, `about` the setting or address it is of; `asked`
    is what was done to find out, where that isn't plain."""

    check: str
    about: str
    severity: Severity
    found: str
    why: str = ""
    do: str = ""
    asked: str = ""
