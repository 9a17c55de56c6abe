"""How many leading tokens two prompts share, told from what a request log keeps of them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from preheat.replay.llamacpp import Prompt


class TextOverlap(msgspec.Struct, frozen=True):
    """What prompts share, in tokens, told from hashes of their text's blocks.

    Where two texts part isn't known within a block: half of one is taken, the mean, and the new
    prompt's tokens a byte; `seams` knows better for some last common blocks (`seams_of`). Prompts
    without a common block share `head_tokens`, what the template begins with.
    """

    block_bytes: int = 512
    head_tokens: int = 3
    seams: Mapping[int, int] = {}

    def __call__(self, held: Prompt, prompt: Prompt) -> int:
        if held is prompt:
            return prompt.held_tokens
        if held.key and held.key == prompt.key:
            return held.input_tokens
        common = _common(held.blocks, prompt.blocks)
        is_later = held.session != "" and held.session == prompt.session
        if is_later and common == len(held.blocks) and held.bytes <= prompt.bytes:
            return held.held_tokens
        if not common:
            return self.head_tokens
        known = self.seams.get(prompt.blocks[common - 1])
        if known is not None:
            return known
        shared_bytes = min((common + 0.5) * self.block_bytes, held.bytes, prompt.bytes)
        return round(shared_bytes * prompt.input_tokens / max(1, prompt.bytes))


def seams_of(answered: Iterable[Prompt], block_bytes: int = 512) -> dict[int, int]:
    """Where many prompts part, in tokens, by their last common block: told by what an engine had
    cached of a session's first prompt, if that is near the block's end.

    `answered` are prompts that an engine has answered, in their order, with `cached_tokens`.
    """
    seen: set[int] = set()
    sessions: set[str] = set()
    told: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for prompt in answered:
        blocks = prompt.blocks
        common = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        if common and (not prompt.session or prompt.session not in sessions):
            rate = prompt.input_tokens / max(1, prompt.bytes)
            least, most = (rate * block_bytes * (common + part) for part in (-0.2, 1.2))
            if least <= prompt.cached_tokens <= most:
                told[blocks[common - 1]][prompt.cached_tokens] += 1
        seen.update(blocks)
        sessions.add(prompt.session)
    return {block: counts.most_common(1)[0][0] for block, counts in told.items()}


def _common(some: tuple[int, ...], others: tuple[int, ...]) -> int:
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count
