"""Logs of requests: our own, and those that others have published.

Needs the extra `log` (pyarrow, numpy); nothing that answers requests imports its modules.
"""

from importlib.util import find_spec
from typing import Final

REMEDY: Final = "pip install 'preheat[log]'"


def is_installed() -> bool:
    """Whether the extra is there; it isn't imported for that."""
    return all(find_spec(package) is not None for package in ("numpy", "pyarrow"))
