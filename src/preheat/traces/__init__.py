"""Logs of requests: our own, and those that others have published or keep.

Every format is read into one record, an `Arrival`, by one file here that says how it is
recognised and read: a `Format` named in `FORMATS`. To add one: a new file and one line. Values are
"module:name", imported when traces are read.

Our own log and compressed tables need the extra `log` (pyarrow, numpy); the other formats need
nothing, and nothing that answers requests imports these modules.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

REMEDY: Final = "pip install 'preheat[log]'"

FORMATS: Final[Mapping[str, str]] = {
    "preheat": "preheat.traces.own_log:FORMAT",
    "openai": "preheat.traces.openai_log:FORMAT",
    "mooncake": "preheat.traces.mooncake:FORMAT",
    "weka": "preheat.traces.weka:FORMAT",
    "lmcache": "preheat.traces.lmcache:FORMAT",
    "taubench": "preheat.traces.taubench:FORMAT",
    "sharegpt": "preheat.traces.sharegpt:FORMAT",
    "azure": "preheat.traces.azure:FORMAT",
    "servegen": "preheat.traces.servegen:FORMAT",
    "burstgpt": "preheat.traces.burstgpt:FORMAT",
    "alibaba": "preheat.traces.alibaba:FORMAT",
    "bing": "preheat.traces.bing:FORMAT",
    "oracle-general": "preheat.traces.oracle_general:FORMAT",
    "lirs": "preheat.traces.lirs:FORMAT",
    "adaptsize": "preheat.traces.adaptsize:FORMAT",
    "arc": "preheat.traces.arc:FORMAT",
    "int32": "preheat.traces.integers:INT32",
    "int64": "preheat.traces.integers:INT64",
}
"""In the order in which they are tried; the last two can't be told by content."""


def is_installed() -> bool:
    """Whether the extra is there; it isn't imported for that."""
    return all(find_spec(package) is not None for package in ("numpy", "pyarrow"))
