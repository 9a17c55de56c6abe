"""Which slot file has most of a prompt: also one that goes on otherwise, as far as this process wrote it."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from preheat.core.memo import Memo
from preheat.core.slot_desk import Holding
from preheat.engines.slot_folder import SlotFolder
from preheat.engines.slot_names import Kept

_FILES: Final = 1_024
_BLOCKS: Final = 65_536


class Found(NamedTuple):
    """A file, and how many leading blocks and tokens of the prompt it has."""

    kept: Kept
    blocks: int
    tokens: int


class SlotShelf:
    """The names of files tell whole prefixes only. Of those that this process has written it knows all
    blocks: many prompts begin with the same trunk, and a file of one serves the others."""

    def __init__(self, folder: SlotFolder) -> None:
        self._folder = folder
        self._holdings: Memo[bytes, Holding] = Memo(_FILES)  # by the file's chain
        self._chains: Memo[int, bytes] = Memo(_BLOCKS)  # by each of its blocks; the latest counts

    def wrote(self, holding: Holding) -> None:
        """A file has this now."""
        kept = self._folder.find(holding.tenant, holding.blocks)
        if kept is None or kept.blocks != len(holding.blocks):
            return
        self._holdings.put(kept.chain, holding)
        for block in holding.blocks:
            self._chains.put(block, kept.chain)

    def find(self, tenant: str, blocks: Sequence[int]) -> Found | None:
        """The file with the longest beginning of this prompt. Blocks' ids differ between tenants."""
        whole = self._folder.find(tenant, blocks)
        least = 0 if whole is None else whole.blocks
        for length in range(len(blocks), least, -1):
            chain = self._chains[blocks[length - 1]]
            kept = None if chain is None else self._folder.named(chain)
            if kept is not None:
                return Found(kept, length, kept.tokens * length // kept.blocks)
        return None if whole is None else Found(whole, whole.blocks, whole.tokens)

    def newest(self) -> list[tuple[Kept, Holding]]:
        """Files of which it is known what they hold, the one used last first."""
        known = ((kept, self._holdings[kept.chain]) for kept in self._folder.newest())
        return [(kept, holding) for kept, holding in known if holding is not None]
