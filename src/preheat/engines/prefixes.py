"""A prefix that is to be warm, in the form in which a server can be asked for pieces of it."""

from array import array
from typing import Final

import msgspec

from preheat.core.warmup import digest_of
from preheat.engines.dialects import Dialect
from preheat.engines.dialects.calls import Prompt
from preheat.engines.direct import Direct

_ENCODE: Final = msgspec.json.Encoder(order="deterministic").encode


def name_of(prompt: Prompt) -> str:
    """Its digest: the same for the same prefix, model, adapter and salt, on every server."""
    parts = (prompt.model, prompt.adapter, prompt.salt)
    return digest_of([*(part.encode() for part in parts), bytes_of(prompt)])


def bytes_of(prompt: Prompt) -> bytes:
    """All of it. Where it is token ids, a longer one begins with the bytes of a shorter one."""
    if prompt.ids is not None:
        return array("I", prompt.ids).tobytes()
    if prompt.text is not None:
        return prompt.text.encode()
    return _ENCODE([prompt.messages, prompt.tools])


async def as_ids(direct: Direct, prompt: Prompt) -> Prompt:
    """The same as token ids, as the server's own tokenizer and template make them, where it has both
    and can be asked for ids; else unchanged. Messages are taken without the beginning of an answer:
    what stands behind them may be another message. Raises EngineError.
    """
    dialect = await direct.known()
    if prompt.ids is not None:
        return prompt
    body = await direct.told(dialect.tokenise(prompt, opens_answer=False))
    if body is None and prompt.messages is not None:
        text = await _rendered(direct, dialect, prompt)
        if text is None:
            return prompt
        body = await direct.told(dialect.tokenise(Prompt(model=prompt.model, text=text)))
    tokens = None if body is None else dialect.read_tokens(body)
    if tokens is None or not tokens.ids:
        return prompt
    made = msgspec.structs.replace(prompt, messages=None, tools=None, text=None, ids=tokens.ids)
    return prompt if dialect.warm(made) is None else made


async def _rendered(direct: Direct, dialect: Dialect, prompt: Prompt) -> str | None:
    body = await direct.told(dialect.render(prompt, opens_answer=False))
    return None if body is None else dialect.read_rendered(body)
