"""The heads of answers: status lines, RFC 9211's Cache-Status, and our X-Preheat-* headers."""

from http import HTTPStatus
from math import ceil, floor
from typing import Final

from preheat.core.types import RequestId
from preheat.errors import EngineError, RequestError
from preheat.transport.server import Refusal
from preheat.wire.openai import error_body

JSON: Final = b"Content-Type: application/json\r\n"
_REQUIRED_WITH: Final = {
    401: b"WWW-Authenticate: Bearer\r\n",
    405: b"Allow: POST, OPTIONS\r\n",  # of the cacheable paths, which alone refuse a method here
}
_NAME_BYTES: Final = len(b'{"id":"","created":1234567890,')
EVENTS: Final = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


def status_line(status: int) -> bytes:
    """The first line of an answer."""
    return _LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


def hit(
    request_id: RequestId,
    label: bytes,
    age_s: float,
    ttl_s: float,
    content_type: bytes,
    status: int = 200,
    detail: bytes = b"exact",
    layer: bytes = b"exact",
) -> bytes:
    """The head of a stored answer; `label` is its key in hexadecimal."""
    return (
        b'%b%bCache-Status: preheat; hit; ttl=%d; key="%b"; detail=%b\r\n'
        b"Age: %d\r\nX-Preheat-Layer: %b\r\nX-Preheat-Request: %b\r\n"
        % (_LINES[status], content_type, floor(ttl_s), label, detail, age_s, layer, request_id)
    )


def whole_hit(
    request_id: RequestId,
    label: bytes,
    age_s: float,
    ttl_s: float,
    date: bytes,
    id_prefix: bytes,
    created: int,
    rest: bytes,
) -> bytes:
    """A whole answer from L1, head, framing and body, written in one piece because it is the most
    frequent message of all; `rest` is its body after `id` and `created`."""
    size_bytes = len(id_prefix) + len(request_id) + len(rest) + _NAME_BYTES
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        b'Cache-Status: preheat; hit; ttl=%d; key="%b"; detail=exact\r\nAge: %d\r\n'
        b"X-Preheat-Layer: exact\r\nX-Preheat-Request: %b\r\n%bContent-Length: %d\r\n\r\n"
        b'{"id":"%b%b","created":%010d,%b'
        % (
            ttl_s,
            label,
            age_s,
            request_id,
            date,
            size_bytes,
            id_prefix,
            request_id,
            created,
            rest,
        )
    )


def forwarded(
    status_text: str,
    request_id: RequestId,
    worker: str,
    cached_tokens: int | None,
    route: bytes = b"",
) -> bytes:
    """Our lines of an answer that an engine gave; `status_text` is what Cache-Status says, `route` why
    it was asked of that worker."""
    routed = b"X-Preheat-Route: %b\r\n" % route if route else b""
    cached = b"" if cached_tokens is None else b"X-Preheat-Cached-Tokens: %d\r\n" % cached_tokens
    return (
        b"Cache-Status: preheat; %b\r\nX-Preheat-Layer: forward\r\nX-Preheat-Worker: %b\r\n"
        b"X-Preheat-Request: %b\r\n%b%b"
        % (status_text.encode(), worker.encode(), request_id, cached, routed)
    )


def joined(request_id: RequestId, worker: str) -> bytes:
    """Our lines of an answer that another request's flight gave."""
    return (
        b"Cache-Status: preheat; fwd=miss; collapsed; detail=join\r\nX-Preheat-Layer: join\r\n"
        b"X-Preheat-Worker: %b\r\nX-Preheat-Request: %b\r\n" % (worker.encode(), request_id)
    )


def local(request_id: RequestId) -> bytes:
    """Our lines of an answer that Preheat itself gives."""
    return b"Cache-Status: preheat; detail=local\r\nX-Preheat-Request: %b\r\n" % request_id


def request_error(error: RequestError, request_id: RequestId | None = None) -> tuple[bytes, bytes]:
    """Head and body of a client's error."""
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    return _error(error.status, kind, error.code, str(error), error.param, request_id)


def refusal(refused: Refusal) -> tuple[bytes, bytes]:
    """Head and body for a request that was refused for its form."""
    return _error(
        refused.status, "invalid_request_error", refused.code, refused.message, None, None
    )


def engine_error(
    error: EngineError, request_id: RequestId, fwd: str = "fwd=bypass"
) -> tuple[bytes, bytes]:
    """Head and body where an engine gave no answer; `fwd` is why it was asked."""
    code = f"engine-{error.kind}"
    head, body = _error(error.status, "upstream_error", code, str(error), None, request_id)
    head = head.replace(b"preheat; detail=", b"preheat; %b; detail=" % fwd.encode(), 1)
    if error.status == 503:
        head += b"Retry-After: %d\r\n" % ceil(error.retry_after_s)
    return head, body


def internal_error(request_id: RequestId | None) -> tuple[bytes, bytes]:
    """Head and body where the fault is ours."""
    message = "Preheat has failed on this request; its log says where"
    return _error(500, "server_error", "internal", message, None, request_id)


def _error(
    status: int, kind: str, code: str, message: str, param: str | None, request_id: RequestId | None
) -> tuple[bytes, bytes]:
    named = b"X-Preheat-Request: %b\r\n" % request_id if request_id else b""
    required = _REQUIRED_WITH.get(status, b"")
    head = b"%b%bCache-Status: preheat; detail=%b\r\n%b%b" % (
        status_line(status),
        JSON,
        code.encode(),
        required,
        named,
    )
    return head, error_body(message, kind=kind, code=code, param=param)
