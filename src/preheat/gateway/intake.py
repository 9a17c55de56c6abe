"""From an exchange to a request: who asks, what the headers want, what the body asks for."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, cast

import msgspec

from preheat.core.keys import Keyring, Partition
from preheat.core.types import FOREVER, NOTHING_SPECIAL, Request, RequestId, Want
from preheat.errors import RequestError
from preheat.transport.server import Exchange, Head

LOCAL_TENANT: Final = "local"
MAX_TTL_S: Final = 31_536_000
_MAX_TAGS: Final = 16
_KEYED_CHARACTERS: Final = 512
_TAG: Final = re.compile(r"[^\s,\x00-\x1f\x7f]{1,64}")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
SESSION: Final = r"^[\x21-\x7e]{1,128}\Z"
_SESSION: Final = re.compile(SESSION)
_SECONDS: Final = re.compile(r"\d{1,20}")
_WANTED: Final = frozenset(
    {
        b"cache-control",
        b"x-preheat-tags",
        b"x-preheat-session",
        b"x-preheat-session-state",
        b"x-preheat-priority",
        b"x-preheat-ttl",
        b"x-preheat-slo-ttft-ms",
        b"x-preheat-semantic",
    }
)
KEYED_HEADERS: Final = ("openai-beta", "openai-organization", "openai-project")
"""Request headers that go upstream and may change an answer: part of the key."""


class Tenants:
    """API keys to tenants. Only the keys' digests are held."""

    def __init__(self, tenant_of_key: Mapping[str, str]) -> None:
        self._tenant_of_digest = {
            hashlib.sha256(key.encode()).digest(): tenant for key, tenant in tenant_of_key.items()
        }

    def find(self, authorization: bytes, api_key: bytes) -> str:
        """The tenant who sent these headers. Raises RequestError (401)."""
        if not self._tenant_of_digest:
            return LOCAL_TENANT
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            token = api_key
        tenant = self._tenant_of_digest.get(hashlib.sha256(token.strip()).digest())
        if tenant is None:
            raise RequestError(
                "no tenant has this API key; send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid-api-key",
            )
        return tenant


class Sender(msgspec.Struct, frozen=True):
    """What a head says of its sender; kept with the head for the next request with the same. So is
    what is `sent` upstream of it, by engine."""

    tenant: str
    namespace: str
    partition: Partition
    want: Want
    keyed: tuple[bytes, ...]  # by which headers, when this was found out
    sent: dict[object, list[tuple[bytes, bytes]]] = {}


class Intake:
    """`admit` tells who asks; `read` makes the request that the core sees."""

    def __init__(
        self,
        tenants: Tenants,
        keyring: Keyring,
        request_prefix: str,
        keyed_headers: tuple[str, ...],
        via: bytes,
    ) -> None:
        self._via = via
        self._tenants = tenants
        self._keyring = keyring
        # A bound method of a bytes object: the cheapest way to a fresh name.
        self._name = cast("Callable[[int], RequestId]", f"{request_prefix}%x".encode().__mod__)
        self.count = 0  # of requests so far: the number in the last one's name
        self.key_by(keyed_headers)

    def key_by(self, headers: Iterable[str]) -> None:
        """From now on the key holds these headers too: those that an engine is sent."""
        self._keyed = tuple(
            name.lower().encode() for name in dict.fromkeys((*KEYED_HEADERS, *headers))
        )

    @staticmethod
    def number_of(request: RequestId) -> int:
        """The number in a request's name."""
        return int(request.rpartition(b"-")[2], 16)

    def next_id(self) -> RequestId:
        """A fresh name for a request."""
        self.count += 1
        return self._name(self.count)

    def admit(self, exchange: Exchange) -> str:
        """The tenant who asks. Raises RequestError (401)."""
        return self._admit(exchange.headers)

    def read(self, exchange: Exchange) -> Request:
        """The whole request. Raises RequestError."""
        head = exchange.head
        sender = head.memory
        if type(sender) is not Sender or sender.keyed is not self._keyed:
            sender = head.memory = self._sender(head)
        self.count += 1
        return Request(
            self._name(self.count),
            sender.tenant,
            sender.namespace,
            self._keyring.ask(exchange.body, sender.partition),
            sender.want,
        )

    def _admit(self, headers: Mapping[bytes, bytes]) -> str:
        if self._via in headers.get(b"via", b""):
            raise RequestError(
                "this request has come back to the gateway that sent it: an engine's url leads here",
                status=508,
                code="loop",
            )
        return self._tenants.find(
            headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")
        )

    def _sender(self, head: Head) -> Sender:
        headers = head.headers
        tenant = self._admit(headers)
        namespace = _text(headers, b"x-preheat-namespace") or ""
        if b"x-preheat-namespace" in headers and not _NAMESPACE.fullmatch(namespace):
            raise _bad("X-Preheat-Namespace", "1 to 64 letters, digits and . _ : -")
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise RequestError(
                "compressed request bodies aren't supported",
                status=415,
                code="unsupported-encoding",
                param="Content-Encoding",
            )
        keyed = tuple(
            f"{name.decode()}:{headers[name].decode('latin-1')}"
            for name in self._keyed
            if name in headers
        )
        if any(len(value) > _KEYED_CHARACTERS for value in keyed):
            raise RequestError(
                f"headers that are part of the key have at most {_KEYED_CHARACTERS} characters",
                status=400,
                code="invalid-header",
            )
        # The query goes upstream too, and may change the answer (Azure's api-version does).
        target = (head.path + b"?" + head.query if head.query else head.path).decode("latin-1")
        if len(target) > _KEYED_CHARACTERS:
            raise RequestError("the query is too long", status=414, code="target-too-long")
        partition = self._keyring.partition(tenant, target, namespace, keyed)
        want = NOTHING_SPECIAL if _WANTED.isdisjoint(headers) else want_of(headers)
        return Sender(tenant, namespace, partition, want, self._keyed)


def want_of(headers: Mapping[bytes, bytes]) -> Want:
    """What Cache-Control and the X-Preheat-* headers want. Raises RequestError (400)."""
    fields = _directives(_text(headers, b"cache-control") or "")
    ttl = _text(headers, b"x-preheat-ttl")
    if ttl is not None:
        fields["ttl_s"] = _seconds(ttl, "X-Preheat-Ttl", MAX_TTL_S)
    tags = _text(headers, b"x-preheat-tags")
    if tags is not None:
        fields["tags"] = _tags(tags)
    session = _text(headers, b"x-preheat-session")
    if session is not None:
        if not _SESSION.fullmatch(session):
            raise _bad("X-Preheat-Session", "1 to 128 printable characters without spaces")
        fields["session"] = session
    _choose(fields, headers, "session_state", "X-Preheat-Session-State", ("open", "tool", "over"))
    _choose(fields, headers, "semantic", "X-Preheat-Semantic", ("off", "shadow", "on"))
    priority = _text(headers, b"x-preheat-priority")
    if priority is not None:
        if not re.fullmatch(r"-?\d{1,4}", priority):
            raise _bad("X-Preheat-Priority", "a whole number from -9999 to 9999")
        fields["priority"] = int(priority)
    slo = _text(headers, b"x-preheat-slo-ttft-ms")
    if slo is not None:
        if not re.fullmatch(r"\d{1,7}", slo) or int(slo) == 0:
            raise _bad("X-Preheat-Slo-Ttft-Ms", "whole milliseconds from 1 to 9999999")
        fields["slo_ttft_s"] = int(slo) / 1_000
    return msgspec.convert(fields, Want)


def _directives(text: str) -> dict[str, object]:
    """RFC 9111 section 5.2.1; unknown directives are ignored, as section 5.2.3 asks."""
    fields: dict[str, object] = {}
    for directive in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = directive.partition("=")
        name = name.strip().lower()
        value = value.strip().strip('"')
        if name in {"no-cache", "no-store", "only-if-cached"}:
            fields[name.replace("-", "_")] = True
        elif name == "max-stale" and not equals:
            fields["max_stale_s"] = FOREVER
        elif name in {"max-age", "max-stale", "min-fresh"}:
            if not _SECONDS.fullmatch(value):
                raise _bad("Cache-Control", f"{name} in whole seconds")
            fields[name.replace("-", "_") + "_s"] = min(int(value), FOREVER)
    return fields


def _seconds(text: str, header: str, most: int) -> int:
    if not _SECONDS.fullmatch(text) or int(text) > most:
        raise _bad(header, f"whole seconds from 0 to {most}")
    return int(text)


def _tags(text: str) -> tuple[str, ...]:
    tags = tuple(part.strip() for part in text.split(","))
    if len(tags) > _MAX_TAGS or not all(_TAG.fullmatch(tag) for tag in tags):
        raise _bad("X-Preheat-Tags", f"at most {_MAX_TAGS} tags of 1 to 64 characters, by commas")
    if any(len(tag.encode()) > 64 for tag in tags):
        raise _bad("X-Preheat-Tags", "tags of at most 64 bytes")
    return tags


def _choose(
    fields: dict[str, object],
    headers: Mapping[bytes, bytes],
    field: str,
    header: str,
    words: tuple[str, ...],
) -> None:
    word = _text(headers, header.lower().encode())
    if word is not None:
        if word.lower() not in words:
            raise _bad(header, " or ".join(words))
        fields[field] = word.lower()


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("utf-8", "replace").strip()


def _bad(header: str, expected: str) -> RequestError:
    return RequestError(
        f"{header}: expected {expected}", status=400, code="invalid-header", param=header
    )
