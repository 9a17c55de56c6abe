"""The nouns and the decisions: frozen values that pass between the core and its drivers.

Records are `msgspec.Struct`s with `gc=False`: they hold no cycles, and an L1 of a hundred
thousand tracked objects would cost a full collection tens of milliseconds.
"""

from typing import Any, Final, Literal, NewType

import msgspec

Key = NewType("Key", bytes)
"""128 bits: the name of a cached response."""

Check = NewType("Check", bytes)
"""256 bits, independent of the key, compared on every hit: two requests never share an answer
because their keys happen to collide."""

RequestId = NewType("RequestId", bytes)

SessionState = Literal["", "open", "tool", "over"]
"""What a client says of its session with a request: a tool runs after it, or it was the last."""

FOREVER: Final = 2**31
"""Seconds; RFC 9111 section 1.2.2 takes a larger delta-seconds for this one."""


class Ask(msgspec.Struct, gc=False):
    """What a body asks for: everything the core may know of it. Memoised, so never per request.

    `bypass` names the reason why the answer must be neither looked up nor stored, or is empty.
    `stream` and `include_usage` shape the reply only; they aren't part of the key.
    `has_stream_options` says whether the body has that field at all, `is_bare` that it has
    none of those that aren't part of the key: an engine's refusal may be about one of them. `record` is what the
    inventory last had under the key: a short cut that the controller checks and renews. `ref` is
    the request log's name for all this.
    """

    key: Key
    check: Check
    model: str
    sampled: bool = False
    stream: bool = False
    include_usage: bool = False
    has_stream_options: bool = False
    is_bare: bool = True
    bypass: str = ""
    record: Any = None
    ref: int = -1


class Want(msgspec.Struct, frozen=True, gc=False):
    """What the headers want of the cache: RFC 9111 request directives and `X-Preheat-*`.

    Seconds throughout. `max_age_s` limits an entry's age, `max_stale_s` how long past its
    expiry it may be, `min_fresh_s` how long it must still live.
    """

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    max_age_s: float = FOREVER
    max_stale_s: float = 0.0
    min_fresh_s: float = 0.0
    ttl_s: float | None = None
    tags: tuple[str, ...] = ()
    session: str = ""
    session_state: SessionState = ""
    priority: int = 0
    slo_ttft_s: float | None = None
    semantic: Literal["", "off", "shadow", "on"] = ""


NOTHING_SPECIAL: Final = Want()


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request as the core sees it; its body stays with the driver."""

    id: RequestId
    tenant: str
    namespace: str
    ask: Ask
    want: Want = NOTHING_SPECIAL


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one answer as its engine counted them.

    `cached_tokens` is the part of `input_tokens` that the engine's own cache had; zero also where it
    isn't one that `tells_cached`.
    """

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    tells_cached: bool = False


class Epoch(msgspec.Struct, frozen=True, gc=False):
    """How many invalidations were known at some moment: what was asked for then is void if a later
    one covers it. A new `generation` begins where the count was lost, and voids everything."""

    generation: str = ""
    number: int = 0


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A stored answer and all that is known of it: what L2 keeps and L1 is filled from.

    `asked_at` and `stored_at` are on the clock of whoever holds it. `status` is 200, but for an
    error that is kept for a while on the operator's wish. `answer` is the driver's.
    """

    key: Key
    check: Check
    tenant: str
    namespace: str
    model: str
    tags: tuple[str, ...]
    epoch: Epoch
    asked_at: float
    stored_at: float
    ttl_s: float
    service_s: float
    usage: Usage | None
    size_bytes: int
    answer: Any
    status: int = 200


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What came of one engine call. `unstorable` names the reason it may not be kept, or is empty.

    `answer` is whatever the driver wants back at a hit, `size_bytes` its size. `status` is the
    engine's, and other than 200 only where an error may be kept.

    `asked_at` is when the call began, `epoch` what was invalidated by then: a later invalidation
    forbids keeping it. `warmed_tokens` of its prompt were cached because we had warmed them, in `warmed_s`.
    `is_refresh`: nobody waited for it. `service_s` is measured from there to the last byte. `joined` are the
    followers it served.
    """

    request: Request
    asked_at: float
    service_s: float
    answer: Any = None
    size_bytes: int = 0
    usage: Usage | None = None
    unstorable: str = ""
    joined: tuple[Request, ...] = ()
    epoch: Epoch = Epoch()
    status: int = 200
    is_refresh: bool = False
    warmed_tokens: int = 0
    warmed_s: float = 0.0


class Traits(msgspec.Struct, frozen=True, gc=False):
    """What a policy may weigh of an object besides its size and its uses.

    `cost_s` are the seconds that one hit saves. `kind` numbers its class: objects of one class are
    used again alike. `tokens` is how much of a prompt stands before and in it, where it is a block.
    """

    cost_s: float = 1.0
    kind: int = 0
    tokens: int = 0


PLAIN: Final = Traits()


# Decisions -----------------------------------------------------------------------------------


class Hit(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answer from L1. Made once an entry, and said again at every hit.

    `label` is the key in hexadecimal, as Cache-Status shows it (a variant's key may differ from
    the request's). `answer` is what the driver handed in with the outcome; the core never looks
    at it. Until it is `plain_s` old nothing need be considered but that.
    """

    key: Key
    label: bytes
    stored_at: float
    ttl_s: float
    answer: Any
    plain_s: float
    status: int = 200

    @property
    def expires_at(self) -> float:
        """When its life ends."""
        return self.stored_at + self.ttl_s


class Refresh(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answer with this, though it is expired or soon will be, and start a flight that nobody
    waits for: its answer takes the place of this one. Not where that `is_due` to nobody: a flight
    is under way, or has just failed."""

    hit: Hit
    reason: Literal["stale-while-revalidate", "early"]
    is_due: bool = True


class Look(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ask L2 for these keys, and tell `on_found` what it had. `joinable`: equal requests join
    meanwhile, and other processes are asked not to compute the same."""

    keys: tuple[Key, ...]
    joinable: bool


class Join(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Listen to the flight that the leader, an equal request, has started."""

    leader: RequestId


class Forward(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Start a flight. `fwd` and `reason` are what RFC 9211's Cache-Status shall say."""

    fwd: Literal["miss", "bypass", "stale", "request"]
    reason: str
    joinable: bool


class Reject(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Refuse, with an HTTP status and a word for the reason."""

    status: int
    reason: str


Decision = Hit | Refresh | Look | Join | Forward | Reject


# Effects -------------------------------------------------------------------------------------


class Keep(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer is worth keeping; who had to leave L1 for it is gone. `refused` is why L1 itself
    doesn't hold it, or empty: L2 may all the same."""

    entry: Entry
    evicted: tuple[Key, ...] = ()
    refused: str = ""


class Drop(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer isn't kept; `reason` says why not."""

    reason: str


Effects = Keep | Drop


class Invalidation(msgspec.Struct, frozen=True):
    """Which entries to forget: those that match every field that is given (keys, tags: any one)."""

    keys: frozenset[Key] = frozenset()
    tags: frozenset[str] = frozenset()
    model: str | None = None
    namespace: str | None = None
    tenant: str | None = None

    def covers(
        self, key: Key, *, model: str, namespace: str, tenant: str, tags: tuple[str, ...]
    ) -> bool:
        """Whether it means the answer with this key and these properties."""
        for wanted, found in (
            (self.model, model),
            (self.namespace, namespace),
            (self.tenant, tenant),
        ):
            if wanted is not None and wanted != found:
                return False
        named = key in self.keys or not self.tags.isdisjoint(tags)
        return named or not (self.keys or self.tags)


class Removed(msgspec.Struct, frozen=True):
    """What an invalidation found; with a dry run nothing of it was removed."""

    keys: tuple[Key, ...]
    size_bytes: int
