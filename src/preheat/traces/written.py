"""What a trace written in the form of our log says of itself, in its file's metadata."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

TOKENS_UNIT: Final = "tokens-"
"""How `block_unit` begins; then comes how many a block has."""

_KEY: Final = b"preheat.trace"


class Written(msgspec.Struct, frozen=True):
    """Its name and format before, what its blocks and times are, and the rules it was read by."""

    name: str
    format: str
    block_tokens: Annotated[int, msgspec.Meta(ge=0)]
    times: Literal["measured", "rule", "order"]
    rules: tuple[str, ...]


def metadata_of(written: Written) -> dict[bytes, bytes]:
    """As it stands in a file."""
    return {_KEY: msgspec.json.encode(written)}


def written_of(metadata: Mapping[bytes, bytes] | None) -> Written | None:
    """From a file's metadata; None where it isn't a written trace."""
    told = (metadata or {}).get(_KEY)
    return msgspec.json.decode(told, type=Written) if told else None
