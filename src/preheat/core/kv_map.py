"""From an engine's blocks to ours: what its events name, in ids that a prompt can be looked up by."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from preheat.core.kv_events import Cleared, Event, Removed, Stored
from preheat.core.tokens import TOKEN_BYTES, chain, mixed, packed

_MOST_ASIDE: Final = 8_192
"""Blocks whose parent nobody knows."""
_MOST_PLACES: Final = 64
_WHOLE_KINDS: Final = frozenset(("", "full_attention", "mla_attention", "sink_full_attention"))
"""Groups of layers that need all of a prefix. What the others keep doesn't tell whether it is a hit."""

_Extras = Sequence[str | bytes]


class _Known(msgspec.Struct, gc=False):
    """One of the engine's blocks: those of ours that end in it; the id and the packed tokens that a
    chain goes on from; where it is (bits); how often there had been doubts when that was told; and by
    place how many further copies are there."""

    ids: tuple[int, ...]
    last: int
    rest: bytes
    places: int
    epoch: int
    twins: dict[int, int] | None = None


class KvMap:
    """The engine's hashes are only names. A block's id is ours, chained from its tokens, its parent and
    `root(salt, lora_name)`; blocks may be of any size on either side.

    A block is held while any medium, or any data-parallel rank of the same stream, has it. One whose
    parent isn't known is set aside until that comes, with what is said of it meanwhile.

    vLLM may keep several copies of one block, and tells of each when it comes and goes (0.32,
    `BlockPool`). It alone names groups of layers, so copies are counted where one is named; elsewhere a
    block that is stored again is the same one.
    """

    def __init__(
        self, *, block_tokens: int, root: Callable[[str, str], int], most_blocks: int
    ) -> None:
        self.over = 0
        """Blocks that weren't noted: for want of room, or because their parent never came."""
        self.epoch = 0
        """What is told now belongs to it; `outdated` drops epochs."""
        self._text_bytes = block_tokens * TOKEN_BYTES
        self._block_tokens = block_tokens
        self._root = root
        self._most_blocks = most_blocks
        self._known: dict[int, _Known] = {}
        self._held: dict[int, int] = {}  # ours → how many of the engine's say so
        self._places: dict[tuple[int, str, int | None], int] = {}
        self._aside: dict[int, list[tuple[int, Event]]] = {}  # by the parent that is missing
        self._orphans: dict[int, int] = {}  # a block that is aside → that parent
        self._touched: dict[int, bool] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def __iter__(self) -> Iterator[int]:
        """Our blocks that are held."""
        return iter(self._held)

    def apply(self, rank: int, event: Event) -> None:
        """The next event."""
        todo = [(rank, event)]
        while todo:
            rank, event = todo.pop()
            match event:
                case Stored():
                    todo.extend(reversed(self._stored(rank, event)))
                case Removed():
                    self._removed(rank, event)
                case Cleared():
                    self._cleared(rank)

    def move(self, came: Sequence[int], gone: Sequence[int]) -> None:
        """Our own blocks, as another process of ours has made them out."""
        held = self._held
        for block in gone:
            if held.pop(block, None) is not None:
                self._touched.setdefault(block, True)
        for block in came:
            if block not in held and len(held) < self._most_blocks:
                self._touched.setdefault(block, False)
                held[block] = 1

    def clears_all(self, rank: int) -> bool:
        """Whether nothing is left when this rank is cleared."""
        return all(owner == rank for owner, _, _ in self._places)

    def outdated(self, epoch: int) -> None:
        """What was told in this epoch or before, and not since, is dropped."""
        for name in [name for name, one in self._known.items() if one.epoch <= epoch]:
            self._drop(name)

    def forget(self) -> None:
        """Nothing is known."""
        for name in list(self._known):
            self._drop(name)
        self.move((), [*self._held])
        self._places.clear()
        self.forget_aside()

    def forget_aside(self) -> None:
        """What waits isn't to be relied upon any more."""
        self._aside.clear()
        self._orphans.clear()

    def touched(self) -> dict[int, bool]:
        """The blocks that may have come or gone since this was asked last, and whether they were held
        then."""
        touched, self._touched = self._touched, {}
        return touched

    def _stored(self, rank: int, event: Stored) -> list[tuple[int, Event]]:
        """Returns what had waited for these blocks."""
        place = self._place(rank, event.medium, event.group)
        if event.kind not in _WHOLE_KINDS or not place:
            return []
        if not event.token_ids:
            self._moved(rank, event, place)
            return []
        if event.parent is None:
            salt, extras = _salt(event)
            last, rest = self._root(salt, event.lora_name), b""
        elif event.parent in self._known:
            parent = self._known[event.parent]
            last, rest, extras = parent.last, parent.rest, _extras(event)
        else:
            self._set_aside(rank, event, event.parent)
            return []
        self._link(event, place, last, rest, extras)
        return self._waiting(event.block_hashes) if self._aside else []

    def _link(
        self, event: Stored, place: int, last: int, rest: bytes, extras: Sequence[_Extras]
    ) -> None:
        text = packed(event.token_ids)
        size = event.block_tokens * TOKEN_BYTES
        for number, name in enumerate(event.block_hashes):
            if number < len(extras):
                last = mixed(last, extras[number])
            rest += text[number * size : (number + 1) * size]
            ids = tuple(chain(rest, self._block_tokens, last))
            last = ids[-1] if ids else last
            rest = rest[len(ids) * self._text_bytes :]
            known = self._known.get(name)
            if known is not None and (known.ids, known.last, known.rest) != (ids, last, rest):
                self._drop(name)  # another block under that name
                known = None
            if known is None:
                if len(self._known) >= self._most_blocks:
                    self.over += len(event.block_hashes) - number
                    return
                known = self._add(name, _Known(ids, last, rest, 0, self.epoch))
            elif event.group is not None:
                self._count_twin(known, place)
            known.places |= place
            known.epoch = self.epoch

    def _moved(self, rank: int, event: Stored, place: int) -> None:
        """Another medium has them, too: which tokens they are was said before."""
        for name in event.block_hashes:
            known = self._known.get(name)
            if known is not None:
                known.places |= place
                known.epoch = self.epoch
            else:
                self._also_aside(rank, event, name)

    def _removed(self, rank: int, event: Removed) -> None:
        place = self._place(rank, event.medium, event.group)
        for name in event.block_hashes:
            known = self._known.get(name)
            if known is None:
                self._also_aside(rank, event, name)
                continue
            if known.twins is not None and known.twins.get(place):
                known.twins[place] -= 1
                continue
            known.places &= ~place
            if not known.places:
                self._drop(name)

    def _cleared(self, rank: int) -> None:
        self.forget_aside()
        keep = ~sum(place for (owner, _, _), place in self._places.items() if owner == rank)
        for name, known in list(self._known.items()):
            known.places &= keep
            known.twins = None  # rather one too few
            if not known.places:
                self._drop(name)

    def _count_twin(self, known: _Known, place: int) -> None:
        """A block that is there came again. What was counted before a doubt isn't relied upon."""
        if known.epoch < self.epoch:
            known.twins = None
        elif known.places & place:
            known.twins = known.twins or {}
            known.twins[place] = known.twins.get(place, 0) + 1

    def _add(self, name: int, known: _Known) -> _Known:
        self._known[name] = known
        held = self._held
        for block in known.ids:
            count = held.get(block, 0)
            self._touched.setdefault(block, count > 0)
            held[block] = count + 1
        return known

    def _drop(self, name: int) -> None:
        held = self._held
        for block in self._known.pop(name).ids:
            self._touched.setdefault(block, True)
            if held[block] == 1:
                del held[block]
            else:
                held[block] -= 1

    def _place(self, rank: int, medium: str, group: int | None) -> int:
        """Its bit; 0 where there are too many."""
        where = (rank, medium, group)
        place = self._places.get(where, 0)
        if not place and len(self._places) < _MOST_PLACES:
            place = self._places[where] = 1 << len(self._places)
        return place

    def _set_aside(self, rank: int, event: Stored, parent: int) -> None:
        self._aside.setdefault(parent, []).append((rank, event))
        self._orphans.update(dict.fromkeys(event.block_hashes, parent))
        while len(self._orphans) > _MOST_ASIDE:
            self.over += len(self._waiting([next(iter(self._aside))]))

    def _also_aside(self, rank: int, event: Stored | Removed, name: int) -> None:
        """It may be said of a block that is aside. Where too much is said of one it is given up."""
        parent = self._orphans.get(name)
        if parent is None:
            return
        waiting = self._aside[parent]
        waiting.append((rank, msgspec.structs.replace(event, block_hashes=[name])))
        if len(waiting) > _MOST_ASIDE:
            self.over += len(self._waiting([parent]))

    def _waiting(self, parents: Sequence[int]) -> list[tuple[int, Event]]:
        """What stood aside for them; it does no more."""
        waiting: list[tuple[int, Event]] = []
        for parent in parents:
            for rank, event in self._aside.pop(parent, ()):
                waiting.append((rank, event))
                if isinstance(event, Stored):
                    for name in event.block_hashes:
                        self._orphans.pop(name, None)
        return waiting


def _extras(event: Stored) -> list[_Extras]:
    """What else than tokens counts for each block; the LoRA name, the first of them, counts at the
    root."""
    lora_name = event.lora_name
    return [keys[1:] if keys[:1] == (lora_name,) else keys for keys in event.extra_keys]


def _salt(event: Stored) -> tuple[str, list[_Extras]]:
    """The salt, and what else counts. vLLM puts the salt among the first block's extra keys: a single
    word is taken for it; where there are more (an image, too) all of them are something else."""
    extras = _extras(event)
    if extras and len(extras[0]) == 1 and isinstance(extras[0][0], str):
        return extras[0][0], [(), *extras[1:]]
    return "", extras
