"""What the supervisor and a worker tell each other.

A *call* is answered: with the message named in its docstring, or with `Refused`. Whatever else is
told isn't.
"""

from typing import Final, Self

import msgspec

from preheat.config import Settings
from preheat.core.ledger import Account, AccountName
from preheat.core.stats import Snapshot
from preheat.core.types import Invalidation, Removed
from preheat.engines.child import Address
from preheat.gateway.hosting import ProcessState

_MOST_INT: Final = 2**63 - 1


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Told apart by the name of its class, and shown by it: some hold keys."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"


# From the supervisor -------------------------------------------------------------------------


class Start(_Message, frozen=True):
    """The first one. `listen` and `admin` are descriptors of sockets that the worker inherited;
    `engines` are the embedded ones, None while one is starting; `name` and `secret` are the same in
    all workers; no secret: the settings say where it is; `draining` are upstreams that take nothing
    more; `learner` is the path of its socket, where there is one."""

    settings: Settings
    slot: int
    generation: int
    listen: tuple[int, ...]
    admin: tuple[int, ...]
    engines: dict[str, Address | None]
    name: str
    secret: bytes = b""
    draining: tuple[str, ...] = ()
    learner: str = ""


class Engines(_Message, frozen=True):
    """Where the embedded engines answer from now on."""

    addresses: dict[str, Address | None]


class Collect(_Message, frozen=True):
    """A call: what did you count? `Counted`."""


class Invalidate(_Message, frozen=True):
    """A call, in both directions: forget this (in your L1; in all of the machine). `Forgotten`."""

    what: Invalidation
    number: int | None
    dry_run: bool


class DrainUpstream(_Message, frozen=True):
    """A call, in both directions: let this server of an engine take nothing more from you (from
    all of you), or again. `Done` (`Known`)."""

    name: str
    is_draining: bool


class Prepare(_Message, frozen=True):
    """A call: could you go on with these settings? `Done`."""

    settings: Settings


class Commit(_Message, frozen=True):
    """A call: go on with what you prepared. `Done`."""


class Abort(_Message, frozen=True):
    """Forget what you prepared."""


class Drain(_Message, frozen=True):
    """Accept nothing more, end what is under way within this time, and end. Idle connections stay
    for `linger_s`: a request that is on its way to us is still answered. The last one counts."""

    within_s: float
    linger_s: float = 0.0


# From a worker -------------------------------------------------------------------------------


class Ready(_Message, frozen=True):
    """It accepts requests."""

    pid: int


class Failed(_Message, frozen=True):
    """It can't start; the message is for the operator."""

    message: str


class Counted(_Message, frozen=True):
    """What it counted: an answer, and told once a second. Silence means that it is stuck.

    Money is in small units, and MessagePack's integers have 64 bits: accounts that don't fit are
    apart, in decimals.
    """

    fitting: Snapshot
    large: dict[AccountName, list[str]] = {}

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """That message."""
        large = {
            name: [str(one) for one in msgspec.structs.astuple(account)]
            for name, account in snapshot.accounts.items()
            if account.price_without_us > _MOST_INT  # the largest sum there is
        }
        if not large:
            return cls(snapshot)
        fitting = {
            name: account for name, account in snapshot.accounts.items() if name not in large
        }
        return cls(msgspec.structs.replace(snapshot, accounts=fitting), large)

    @property
    def snapshot(self) -> Snapshot:
        """All of it."""
        large = {name: Account(*map(int, fields)) for name, fields in self.large.items()}
        return msgspec.structs.replace(self.fitting, accounts=self.fitting.accounts | large)


class Drained(_Message, frozen=True):
    """The last word of a worker that ends."""

    counted: Counted


class AskSnapshots(_Message, frozen=True):
    """A call: what did all of you count? `Counted`."""


class AskWorkers(_Message, frozen=True):
    """A call: who is there? `Workers`."""


# Answers -------------------------------------------------------------------------------------


class Done(_Message, frozen=True):
    """It is so."""


class Refused(_Message, frozen=True):
    """It isn't, for this reason."""

    message: str


class Forgotten(_Message, frozen=True):
    """What an invalidation found, and how many workers gave no answer in time."""

    removed: Removed
    workers_unheard: int = 0


class Known(_Message, frozen=True):
    """Whether there is such a thing; if so, it is done."""

    is_known: bool


class Workers(_Message, frozen=True):
    """All workers that there are now."""

    workers: list[ProcessState]


ToWorker = (
    Start
    | Engines
    | Collect
    | Invalidate
    | DrainUpstream
    | Prepare
    | Commit
    | Abort
    | Drain
    | Counted
    | Forgotten
    | Known
    | Workers
    | Refused
)
ToSupervisor = (
    Ready
    | Failed
    | Counted
    | Drained
    | Invalidate
    | DrainUpstream
    | AskSnapshots
    | AskWorkers
    | Done
    | Refused
    | Forgotten
)
Message = ToWorker | ToSupervisor

WORKER_READS: Final = msgspec.msgpack.Decoder(ToWorker)
SUPERVISOR_READS: Final = msgspec.msgpack.Decoder(ToSupervisor)
