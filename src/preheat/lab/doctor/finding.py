"""What a check found."""

from typing import Literal

import msgspec

Severity = Literal["ok", "note", "warning", "problem"]
"""`problem`: it can't work; `warning`: it works, but worse than it could; `note`: good to know."""


class Finding(msgspec.Struct, frozen=True):
    """`check` is a stable word from docs/doctor.md, `about` the setting or address it is of."""

    check: str
    about: str
    severity: Severity
    found: str
    why: str = ""
    do: str = ""
