"""One line of an access log: the request, who answered it, and what that one's cache had."""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from preheat.core.blocks import prefix_of
from preheat.engines.dialects.readings import count, objects, parsed, part
from preheat.stores.sighting import Sighting
from preheat.traces.exchange import Exchange, Fields, exchange_of

_RECORD: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BODY: Final = msgspec.json.Decoder(dict[str, Any])
_ENCODE: Final = msgspec.json.Encoder(order="deterministic").encode
_WRAPPERS: Final = ("standard_logging_object", "standard_logging_payload")
_BOM: Final = b"\xef\xbb\xbf"

WORKER_FIELDS: Final = (
    *("worker", "upstream", "upstream_addr", "api_base", "backend", "server", "target_url"),
    "replica",
)
"""Names under which logs say who answered: nginx, LiteLLM (`api_base`), Helicone (`target_url`)."""
_ANSWERS: Final = ("response", "response_body")
_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")


class Seen(msgspec.Struct, kw_only=True):
    """A request and what came of it, without its text. `at` is when it came, in seconds since 1970,
    None where the log doesn't say; lengths and times are -1 where it doesn't. `worker` is the log's
    own word. `cached_tokens` is None where the answer doesn't tell."""

    at: float | None
    worker: str
    session: str
    model: str
    blocks: Sequence[int]
    prompt_bytes: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    ttft_s: float
    service_s: float
    is_failed: bool
    token_blocks: Sequence[int] = ()


class Record(msgspec.Struct, frozen=True):
    """A line. `body` is the request's, spelled in one way, whatever the client's white space; empty
    where the log has no prompts. `sighting` is its text, for a moment."""

    seen: Seen
    body: bytes
    sighting: Sighting | None


def read_line(data: bytes, worker_field: str = "") -> Record:
    """Raises ValueError or msgspec.MsgspecError, neither of which quotes the line."""
    fields: Fields = _RECORD.decode(data.removeprefix(_BOM))
    exchange = exchange_of(fields)
    if exchange.is_answer_only:
        raise ValueError("an answer without its request")
    for name in _WRAPPERS:
        if name in fields:
            fields = _RECORD.decode(fields[name])
    body: dict[str, Any] = {}
    if exchange.body:
        body = _BODY.decode(exchange.body)
    spelled = _ENCODE(body) if body else b""
    salt = _word(body.get("cache_salt")) or _word(body.get("extra_key"))
    prefix = prefix_of(spelled, salt.encode())
    answer = next((parsed(bytes(fields[name])) for name in _ANSWERS if name in fields), None)
    usage = _usage(fields, answer)
    seen = Seen(
        at=exchange.at,
        worker=_worker(fields, worker_field),
        session=exchange.session,
        model=prefix.model or exchange.model,
        blocks=prefix.blocks if body else (),
        prompt_bytes=prefix.prompt_bytes if body else 0,
        input_tokens=_input_tokens(exchange, usage),
        output_tokens=exchange.output_tokens,
        cached_tokens=_cached_tokens(usage, answer),
        ttft_s=exchange.ttft_s,
        service_s=exchange.service_s,
        is_failed=exchange.stop == "failure" or exchange.stop.startswith("status-"),
    )
    return Record(seen, spelled, _sighting(exchange, body, seen.model, salt))


def _worker(fields: Fields, named: str) -> str:
    """The log's word for who answered."""
    if named:
        first, *rest = named.split(".")
        value = part(parsed(bytes(fields[first])), *rest) if first in fields else None
        return _word(value)
    hidden = parsed(bytes(fields["hidden_params"])) if "hidden_params" in fields else None
    for name in WORKER_FIELDS:
        word = _word(parsed(bytes(fields[name]))) if name in fields else ""
        word = word or _word(part(hidden, name))
        if word:
            return word
    return ""


def _usage(fields: Fields, answer: Any) -> Any:
    """The engine's count, as the log has it: beside the answer, in it, or (LiteLLM) apart."""
    apart = (
        part(parsed(bytes(fields["metadata"])), "usage_object") if "metadata" in fields else None
    )
    beside = parsed(bytes(fields["usage"])) if "usage" in fields else None
    found = (part(answer, "usage"), beside, apart)
    return next((one for one in found if isinstance(one, dict)), {})


def _input_tokens(exchange: Exchange, usage: Any) -> int:
    read, written = (
        count(usage.get(f"cache_{what}_input_tokens")) for what in ("read", "creation")
    )
    if read is not None and "prompt_tokens" not in usage:  # Anthropic counts what is new only
        return (count(usage.get("input_tokens")) or 0) + read + (written or 0)
    said = count(usage.get("prompt_tokens")) if exchange.input_tokens < 0 else None
    return exchange.input_tokens if said is None else said


def _cached_tokens(usage: Any, answer: Any) -> int | None:
    told = (
        *(count(part(usage, name, "cached_tokens")) for name in _DETAILS),
        count(usage.get("cache_read_input_tokens")),
        count(part(answer, "timings", "cache_n")),
    )
    return next((one for one in told if one is not None), None)


def _sighting(
    exchange: Exchange, body: Mapping[str, Any], model: str, salt: str
) -> Sighting | None:
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        return None
    # What else stands before messages isn't in a trunk.
    if body.get("system") or body.get("instructions") or not isinstance(tools, list | None):
        return None
    if sum(1 for _ in objects(messages)) < len(messages):
        return None
    return Sighting(
        tenant=exchange.tenant,
        namespace=salt,
        model=model,
        session=exchange.session,
        messages=messages,
        tools=tools,
    )


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


class Names:
    """Which server a log means: by its name, its url, its host and port, or its host where no other
    has that.

    >>> names = Names({"a": "http://10.0.0.1:8000/v1", "b": "http://10.0.0.2:8000"})
    >>> [names.find(word) for word in ("b", "10.0.0.1:8000", "http://10.0.0.2:8000/v1", "10.0.0.9")]
    [1, 0, 1, None]
    >>> names.find("10.0.0.1:8000, 10.0.0.2:8000")  # nginx asked the second after the first
    1
    """

    def __init__(self, urls: Mapping[str, str]) -> None:
        places = [urlsplit(url) for url in urls.values()]
        hosts = [one.hostname or "" for one in places]
        self._known: dict[str, int] = {}
        for number, (name, place) in enumerate(zip(urls, places, strict=True)):
            if hosts.count(hosts[number]) == 1:
                self._known[hosts[number]] = number
            self._known[place.netloc] = number
            self._known[name] = number

    def find(self, word: str) -> int | None:
        """Its number; None for one that isn't among them."""
        last = word.rpartition(",")[2].strip()
        if "://" in last:
            last = urlsplit(last).netloc
        found = self._known.get(last)
        return self._known.get(last.rpartition(":")[0]) if found is None and ":" in last else found
