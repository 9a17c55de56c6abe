"""What an engine says of its KV cache, whatever its dialect."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from preheat.core.witness import Trust

GPU: Final = "GPU"
"""The medium where an event names none."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that stand behind one another came in; `parent` is the one before them, if any.

    Hashes are the engine's, folded to 64 bits; ours are never compared with them. `token_ids` are
    `block_tokens` for each block, or none where only the place is new (another tier). `extra_keys`
    are what else went into each block's hash: salt, LoRA name, images. `kind` is the attention of
    its `group` of layers; empty where there is but one.
    """

    block_hashes: Sequence[int]
    parent: int | None
    token_ids: Sequence[int]
    block_tokens: int
    medium: str = GPU
    lora_name: str = ""
    extra_keys: Sequence[tuple[str | bytes, ...]] = ()
    group: int | None = None
    kind: str = ""


class Removed(msgspec.Struct, frozen=True, gc=False):
    """These are on that medium no more."""

    block_hashes: Sequence[int]
    medium: str = GPU
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Nothing of this rank is left."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """What one step of the engine did, in order. `at` is its own wall clock, in seconds; `rank` its
    place among data-parallel equals."""

    at: float
    events: Sequence[Event]
    rank: int = 0


class Joined(msgspec.Struct, frozen=True, gc=False):
    """From here on all is heard; `whole`: so was everything before."""

    whole: bool


class Restarted(msgspec.Struct, frozen=True, gc=False):
    """Another process speaks now: what the one before it held is gone."""


class Lost(msgspec.Struct, frozen=True, gc=False):
    """So many batches at least will never be heard; 0 where only nobody can tell."""

    batches: int


class Unsure(msgspec.Struct, frozen=True, gc=False):
    """The connection is broken."""


class Sure(msgspec.Struct, frozen=True, gc=False):
    """It is back, and nothing was lost after all."""


class Moved(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Another process of ours has heard the events: our blocks that came and went, and how far it is to be
    trusted. `anew`: nothing else is there."""

    came: Sequence[int]
    gone: Sequence[int]
    trust: Trust
    anew: bool = False


Step = Batch | Joined | Restarted | Lost | Unsure | Sure | Moved
"""What a worker's event stream amounts to, in the order in which it holds."""


def in_pieces(step: Step, most_blocks: int) -> Iterator[Step]:
    """The same in pieces of so many blocks at most, so that whoever takes them can do something else
    between two."""
    if not isinstance(step, Batch):
        yield step
        return
    for event in step.events:
        for piece in _pieces(event, most_blocks):
            yield Batch(step.at, [piece], step.rank)


def _pieces(event: Event, most_blocks: int) -> Iterator[Event]:
    if isinstance(event, Cleared) or len(event.block_hashes) <= most_blocks:
        yield event
        return
    for begin in range(0, len(event.block_hashes), most_blocks):
        end = begin + most_blocks
        names = event.block_hashes[begin:end]
        if isinstance(event, Removed):
            yield msgspec.structs.replace(event, block_hashes=names)
            continue
        yield msgspec.structs.replace(
            event,
            block_hashes=names,
            parent=event.block_hashes[begin - 1] if begin else event.parent,
            token_ids=event.token_ids[begin * event.block_tokens : end * event.block_tokens],
            extra_keys=event.extra_keys[begin:end],
        )
