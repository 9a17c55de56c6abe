"""Every exception Preheat raises. The branch says whose fault it is, and that decides the answer.

```
PreheatError
├── ConfigError          the operator: raised at start only, exit code 1
│   └── TraceError       a trace that can't be read as it is
├── RequestError         the client: an HTTP 4xx (or 501, 504 for only-if-cached)
└── UpstreamError        what Preheat depends on
    ├── EngineError      502, 503 or 504
    └── StoreError       never reaches a client: it is a miss
```
"""

from typing import Final


class PreheatError(Exception):
    """The root of the tree; never raised itself."""


class ConfigError(PreheatError):
    """The operator's settings can't work: says which key, what was found and what to do."""


class TraceError(ConfigError):
    """A trace can't be read: says which file and line, what was wrong and what to do.

    The message never quotes a line's text, which may be a prompt.
    """


class RequestError(PreheatError):
    """The client's request can't be answered.

    `code` is a stable word from docs/errors.md, `param` the field or header at fault.
    The message never quotes request text.
    """

    def __init__(self, message: str, *, status: int, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class UpstreamError(PreheatError):
    """Something Preheat depends on failed."""


class EngineError(UpstreamError):
    """An engine gave no (complete) answer.

    `kind` is a stable word from docs/errors.md. `before_first_byte` tells whether nothing of
    the answer had arrived yet, so that asking again can't show a client two beginnings.
    `retry_after_s` is when asking again has a chance, `worker` which of several equal ones it was.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        before_first_byte: bool = True,
        retry_after_s: float = 1.0,
        worker: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.worker = worker
        self.before_first_byte = before_first_byte
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """The HTTP status a client gets for it."""
        return _STATUS_OF_KIND.get(self.kind, 502)


class StoreError(UpstreamError):
    """A store gave no answer, or not in time. `kind` is a stable word from docs/errors.md."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def place_of(bug: Exception) -> dict[str, object]:
    """A defect as it is logged: where it happened, not what was in the values, which may be somebody's text."""
    trace = bug.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "?"
    return {"type": type(bug).__name__, "where": where}


_STATUS_OF_KIND: Final = {
    "adapter": 503,
    "breaker-open": 503,
    "queue": 503,
    "start": 503,
    "timeout-connect": 504,
    "timeout-first-byte": 504,
    "timeout-idle": 504,
}
