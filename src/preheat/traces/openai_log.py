"""Logs of OpenAI's API with bodies, a JSON object a line, as LiteLLM, Helicone and vLLM users have
them (`exchange` lists the shapes).

Keys and blocks are made as the gateway makes them, so a replay finds what it would have found. The
text itself isn't kept.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from preheat.core.blocks import HASH_BYTES, prompt_of
from preheat.core.keys import Keyring
from preheat.errors import RequestError, TraceError
from preheat.traces.arrival import UNKNOWN, Arrival
from preheat.traces.exchange import Exchange, exchange_of
from preheat.traces.numbering import (
    BYTES_PER_TOKEN,
    CHUNK_BYTES,
    Numbering,
    ratio_of,
)
from preheat.traces.reader import UNSORTED_RULE, Draft, Format, Reading, said
from preheat.traces.source import Head, Source
from preheat.traces.turns import Turns

_SHAPES: Final = (
    *(("request", "response"), ("request_created_at", "request_body"), ("startTime", "call_type")),
    *(("startTime", "request_id"), ("standard_logging_object",), ("standard_logging_payload",)),
    *(("custom_id", "body"), ("custom_id", "response"), ("at", "body"), ("messages",)),
    *(("prompt", "model"), ("request",)),
)
_CUT: Final = b"litellm_truncated "
"""What stands in a text's middle where LiteLLM stored its beginning and end only."""

_PATHS: Final = (
    ("messages", "/v1/chat/completions"),
    ("prompt", "/v1/completions"),
    ("input", "/v1/embeddings"),
)


def _recognises(head: Head) -> bool:
    return any(head.has(*names) for names in _SHAPES)


class _Seen(msgspec.Struct):
    """An exchange without its text."""

    exchange: Exchange
    source: Source
    line: int
    blocks: tuple[int, ...] = ()
    prompt_bytes: int = 0
    key: int = UNKNOWN
    sampled: bool = False


class _Prompts:
    """Numbers prompts' keys and blocks."""

    def __init__(self) -> None:
        self._keyring = Keyring(b"", str, memo_entries=2)
        self._keys, self._blocks = Numbering(), Numbering()
        self.were_cut = 0

    def see(self, seen: _Seen) -> None:
        """Fills in what a body says, and lets it go."""
        exchange = seen.exchange
        body, exchange.body = exchange.body, b""
        if not body:
            return
        self.were_cut += _CUT in body
        path = exchange.path or _path_of(body)
        prompt = prompt_of(body, b"", (exchange.model,))
        starts = range(0, len(prompt.blocks), HASH_BYTES)
        numbers = [self._blocks.of(prompt.blocks[start : start + HASH_BYTES]) for start in starts]
        if prompt.prompt_bytes - len(numbers) * CHUNK_BYTES >= BYTES_PER_TOKEN:
            rest = blake2b(body, digest_size=16).digest()
            numbers.append(self._blocks.of(rest))
        seen.blocks, seen.prompt_bytes = tuple(numbers), prompt.prompt_bytes
        exchange.path = path
        try:
            ask = self._keyring.ask(body, self._keyring.partition(exchange.tenant, path, ""))
        except RequestError:  # no engine would see it, and so no cache
            return
        seen.sampled = ask.sampled
        if not ask.bypass:
            seen.key = self._keys.of(ask.key)


def _path_of(body: bytes) -> str:
    """By the field that holds the prompt."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return next((path for name, path in _PATHS if name in fields), "")


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    seen = _joined(list(_seen(sources, reading)), reading)
    dated = [one for one in seen if one.exchange.at is not None]
    is_dated = bool(dated)
    if is_dated:
        for one in seen:
            if one.exchange.at is None:
                reading.refuse(one.source, one.line, "no time, where other lines have one")
        seen = sorted(dated, key=_at)
        if seen != dated:
            reading.tell(UNSORTED_RULE)
    else:
        reading.tell("No times: requests are a second apart.")
    without = sum(not one.prompt_bytes for one in seen)
    ratio = ratio_of((one.exchange.input_tokens, one.prompt_bytes) for one in seen)
    if without < len(seen):
        reading.tell(ratio.rule)
    if without:
        reading.tell(_without_rule(without, len(seen)))
    turns = Turns()
    arrivals = [
        _arrival(one, _at(one) if is_dated else float(place), ratio.per_byte, turns)
        for place, one in enumerate(seen)
    ]
    return Draft(
        arrivals=arrivals,
        block_tokens=ratio.block_tokens if without < len(seen) else 0,
        times="measured" if is_dated else "order",
        is_dated=is_dated,
    )


def _seen(sources: Sequence[Source], reading: Reading) -> Iterator[_Seen]:
    prompts = _Prompts()
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
    for source in sources:
        for number, fields in reading.records(source, decoder):
            try:
                seen = _Seen(exchange_of(fields), source, number)
                prompts.see(seen)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                reading.refuse(source, number, said(error))
                continue
            yield seen
    if prompts.were_cut:
        reading.tell(
            f"LiteLLM had cut texts of {prompts.were_cut} prompts (MAX_STRING_LENGTH_PROMPT_IN_DB): "
            "what differs there can't be seen, so hits are overstated."
        )


def _joined(seen: list[_Seen], reading: Reading) -> list[_Seen]:
    """With the answers of a batch put to its requests."""
    answers = {one.exchange.custom_id: one for one in seen if one.exchange.is_answer_only}
    if not answers:
        return seen
    asked = [one for one in seen if not one.exchange.is_answer_only]
    if not asked:
        raise TraceError(
            f"{seen[0].source.name}: a batch's answers have no prompts; give the batch's input too"
        )
    for one in asked:
        found = answers.pop(one.exchange.custom_id, None)
        if found is not None:
            exchange, answer = one.exchange, found.exchange
            exchange.at = answer.at
            exchange.stop = answer.stop
            exchange.input_tokens = answer.input_tokens
            exchange.output_tokens = answer.output_tokens
    reading.tell("A batch's requests have the times at which their answers were made.")
    for left in answers.values():
        reading.refuse(left.source, left.line, "an answer to no request of these files")
    return asked


def _without_rule(without: int, rows: int) -> str:
    """For rows that say of a prompt only how long it was."""
    if without < rows:
        return f"{without} of {rows} rows have no prompt: they share nothing."
    return (
        f"None of {rows} rows has a prompt (LiteLLM: store_prompts_in_spend_logs is off; Helicone: "
        "exported without --include-body), so it can't be said what a cache would save."
    )


def _at(seen: _Seen) -> float:
    return seen.exchange.at or 0.0


def _arrival(seen: _Seen, at: float, per_byte: float, turns: Turns) -> Arrival:
    exchange = seen.exchange
    turn, think_s = turns.next(exchange.session, at, exchange.service_s)
    tokens = exchange.input_tokens
    if tokens < 0 and seen.prompt_bytes:
        tokens = round(seen.prompt_bytes * per_byte)
    return Arrival(
        at=at,
        id=exchange.id or f"{seen.source.prefix}{seen.line}",
        session=exchange.session,
        turn=turn,
        tenant=exchange.tenant,
        model=exchange.model,
        key=seen.key,
        input_tokens=tokens,
        output_tokens=exchange.output_tokens,
        blocks=seen.blocks,
        think_s=think_s,
        ttft_s=exchange.ttft_s,
        service_s=exchange.service_s,
        kind=exchange.path,
        stop=exchange.stop,
        sampled=seen.sampled,
    )


FORMAT: Final = Format(_recognises, _read)
