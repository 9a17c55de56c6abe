"""One of several equal servers: its connections, and how it has been of late."""

import asyncio
import contextlib
import email.utils
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from preheat.core.breaker import Breaker
from preheat.core.router import Known
from preheat.engines.kv_feed import FeedCounts
from preheat.engines.slot_seats import SlotSeats
from preheat.errors import EngineError
from preheat.transport.client import Response

Headers = Sequence[tuple[bytes, bytes]]
OnEvent = Callable[[str, dict[str, object]], None]
State = Literal["well", "down", "draining", "avoided", "warming"]

REFUSALS: Final = frozenset({429, 502, 503, 504})
"""Answers by which a server says that another should be asked."""
UNASKED: Final = frozenset({"connect", "timeout-connect", "tls"})
"""Errors before anything was asked: asking another costs nobody twice."""
_FAILURES: Final = frozenset({502, 503, 504})
_AVOID_S: Final = 1.0  # who says 429 and not how long: it would look idle, and draw all requests
_MOST_AVOID_S: Final = 60.0
_PROBE_BYTES: Final = 65_536


class HttpClient(Protocol):
    """What a worker is asked through."""

    host: str
    port: int

    async def request(
        self, method: bytes, target: bytes, headers: Headers, body: bytes
    ) -> Response:
        """Return once the answer's head is there. Raises EngineError."""

    @property
    def in_flight(self) -> int:
        """Requests under way, those that wait for a connection included."""

    @property
    def has_room(self) -> bool:
        """Whether a request would be sent at once."""

    async def aclose(self) -> None:
        """Close every connection."""


class AdapterCounts(msgspec.Struct):
    """What adapters a server has, how many it was given by us in how many seconds, and how often it wouldn't have
    one."""

    names: list[str] = []
    loads: int = 0
    load_s: float = 0.0
    refused: int = 0


class Readied(msgspec.Struct):
    """How often a worker was held back to be readied for requests, in how many cases its time was over
    (`late`), and what it was given by then: prefixes read from files and warmed, the tokens of these, and adapters."""

    gates: int = 0
    late: int = 0
    held_s: float = 0.0
    restored: int = 0
    warmed: int = 0
    tokens: int = 0
    adapters: int = 0


class WorkerState(msgspec.Struct, frozen=True):
    """A worker as an operator sees it. `is_up`: it isn't left alone for its failures; `retries`
    were answered by others instead. `dialect` is what it said it is; `known` is the router's, where it
    is one of several. `events` is what was heard of its KV events. So many `unsaved_slots` would be lost with its process; a draining one's are being
    written to files."""

    name: str
    address: str
    in_flight: int
    state: State
    is_up: bool
    failures: int
    retries: int
    last_error_kind: str
    dialect: str = ""
    known: Known | None = None
    unsaved_slots: int = 0
    slot_files: dict[str, int] = {}
    events: FeedCounts | None = None
    readied: Readied = msgspec.field(default_factory=Readied)
    adapters: AdapterCounts | None = None
    starts: dict[str, int] = {}


class Worker:
    """One address of a group."""

    def __init__(
        self,
        number: int,
        name: str,
        url: str,
        client: HttpClient,
        breaker: Breaker,
        on_down: Callable[["Worker"], None],
        on_event: OnEvent,
        on_back: Callable[["Worker"], None] = lambda _: None,
    ) -> None:
        self.number = number  # of its group's, as long as it is there
        self.name = name
        self.url = url
        self.client = client
        self.breaker = breaker
        self.is_draining = False
        self.is_gated = False  # until it is warm; asked only where nobody else is well
        self.restore: Callable[[], Awaitable[int]] | None = (
            None  # what is in files; how many were read
        )
        self.readied = Readied()
        self.starts = {"restarted": 0, "switched": 0}  # how often it was seen to be another one
        self.is_probed = False  # while it is down; else a request finds out how it is
        self.knows_health = True
        self.seats: SlotSeats | None = None  # where its slots are kept in files
        self.avoided_until = 0.0
        self.failures = 0
        self.retries = 0
        self.last_error_kind = ""
        # A bare address means the usual place.
        self._base = urlsplit(url).path.rstrip("/").encode() or b"/v1"
        self.root = self._base.removesuffix(b"/v1")
        self._on_down = on_down
        self._on_back = on_back
        self._on_event = on_event

    async def ask(self, method: bytes, path: bytes, headers: Headers, body: bytes) -> Response:
        """Ask it, and remember how that went."""
        try:
            response = await self.client.request(method, self._base + path, headers, body)
        except EngineError as error:
            error.worker = self.name
            if error.kind != "queue":  # that is our own limit, not the engine's failure
                self._failed(error.kind)
            raise
        response.worker = self.name
        if response.status not in REFUSALS:
            self._answered()
        else:
            self._refused(response)
        return response

    async def aclose(self) -> None:
        """Close its connections."""
        if self.seats is not None:
            await self.seats.aclose()
        await self.client.aclose()

    def may_be_tried(self, now: float) -> bool:
        """Whether it is time that a request finds out if it is well again; a yes is one request."""
        breaker = self.breaker
        if breaker.is_closed or self.is_probed or self.is_draining:
            return False
        return breaker.allows(now)

    def state(self, now: float) -> WorkerState:
        """How it is."""
        state: State = "well"
        if self.is_draining:
            state = "draining"
        elif not self.breaker.is_closed:
            state = "down"
        elif now < self.avoided_until:
            state = "avoided"
        elif self.is_gated:
            state = "warming"
        return WorkerState(
            name=self.name,
            address=self._address,
            in_flight=self.client.in_flight,
            state=state,
            is_up=self.breaker.is_closed,
            failures=self.failures,
            retries=self.retries,
            last_error_kind=self.last_error_kind,
            readied=msgspec.structs.replace(self.readied),
            starts=dict(self.starts),
        )

    async def probe(self, target: bytes, headers: Headers, timeout_s: float) -> None:
        """Ask whether it is well again. One that doesn't know the question isn't asked again."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                response = await self.client.request(b"GET", target, headers, b"")
                try:
                    await response.read(_PROBE_BYTES)
                finally:
                    response.close()
                    if response.status < 300:
                        was_closed = self.breaker.is_closed
                        self.breaker.recovered()
                        self._note_return(was_closed=was_closed)
                    elif response.status < 500 and response.status != 429:
                        self.is_probed = self.knows_health = False

    def _answered(self) -> None:
        was_closed = self.breaker.is_closed
        self.breaker.succeeded()
        self._note_return(was_closed=was_closed)

    def _note_return(self, *, was_closed: bool) -> None:
        if not was_closed:
            self._on_event("upstream-well", {"worker": self.name, "address": self._address})
            self._on_back(self)

    def _failed(self, kind: str) -> None:
        was_closed = self.breaker.is_closed
        self.failures += 1
        self.last_error_kind = kind
        if self.seats is not None:
            self.seats.doubt()
        self.breaker.failed(time.monotonic())
        if was_closed and not self.breaker.is_closed:
            self._on_event(
                "upstream-down", {"worker": self.name, "address": self._address, "kind": kind}
            )
            self._on_down(self)

    def _refused(self, response: Response) -> None:
        kind = f"status-{response.status}"
        if response.status in _FAILURES:
            self._failed(kind)
        else:
            self.last_error_kind = kind
            self._answered()
        if response.status in {429, 503}:
            given = next((value for name, value in response.headers if name == b"retry-after"), b"")
            wait_s = _seconds(given.decode("latin-1"), time.time())
            if wait_s is None:
                wait_s = _AVOID_S if response.status == 429 else 0.0
            self.avoided_until = time.monotonic() + min(wait_s, _MOST_AVOID_S)

    @property
    def _address(self) -> str:
        host = f"[{self.client.host}]" if ":" in self.client.host else self.client.host
        return f"{host}:{self.client.port}"


def name_at(engine: str, position: int, of: int) -> str:
    """What the server at this place among the engine's urls is called."""
    return engine if of == 1 else f"{engine}.{position}"


def _seconds(retry_after: str, now: float) -> float | None:
    """How long a Retry-After means, in seconds or as a date; None where it means nothing.

    >>> _seconds("7", 0.0), _seconds("Thu, 01 Jan 1970 00:00:09 GMT", 4.0), _seconds("soon", 0.0)
    (7.0, 5.0, None)
    """
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - now)
    except (ValueError, OverflowError):
        return None
