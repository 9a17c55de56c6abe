"""What only a request can tell: small real ones are asked, one token of answer each as a rule.

In all about 3,000 input tokens and 70 output tokens.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from math import ceil
from typing import Any, Final

import msgspec

from preheat.core.types import Usage
from preheat.lab.doctor import prefix_cache
from preheat.lab.doctor.finding import Finding
from preheat.lab.doctor.peer import Peer, Reply, shown
from preheat.wire.openai import DONE, usage_of

_SHORT_WORDS: Final = 8
_LONGER_WORDS: Final = 72
# Longer than any block or chunk below which an engine caches nothing (OpenAI's is 1,024 tokens).
_LONG_TOKENS: Final = 1_300
_GREEDY_TOKENS: Final = 32
_COUNTED_WITHIN_S: Final = 1.0
_WORDS: Final = ("one", "two", "red", "sun", "day", "sea", "box", "cat", "dog", "map", "ice", "key")


class Probes:
    """The requests to one engine, in an order in which each needs what the one before found."""

    def __init__(self, peer: Peer, model: str, kind: str, *, injects_usage: bool) -> None:
        self._peer = peer
        self._model = model
        self._kind = kind
        self._injects_usage = injects_usage
        self._limit_field = "max_tokens"

    async def run(self) -> AsyncIterator[Finding]:
        """All findings."""
        short = await self._ask(text_of(_SHORT_WORDS))
        if short.status == 400 and "max_completion_tokens" in short.said:
            self._limit_field = "max_completion_tokens"
            short = await self._ask(text_of(_SHORT_WORDS))
        if short.status != 200:
            yield self._refused(short)
            return
        yield self._usage(short)
        longer = await self._ask(text_of(_LONGER_WORDS), **_STREAMED)
        yield await self._stream_usage(longer)
        yield await self._prefix_cache(_tokens_a_word(short, longer))
        yield await self._greedy()

    async def _ask(self, text: str, output_tokens: int = 1, **fields: Any) -> Reply:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            self._limit_field: output_tokens,
            **fields,
        }
        return await self._peer.post(f"{self._peer.base}/chat/completions", body)

    def _refused(self, reply: Reply) -> Finding:
        if reply.status in {401, 403}:
            why, do = "it refuses requests", "set api_key_env to the variable that holds its key"
        elif reply.status == 404:
            why = "it has no such model, or can't chat with it"
            do = "ask for a model that its list has; models that can't chat aren't examined"
        elif reply.status == 429:
            why, do = "it is over its limit", "ask again later"
        else:
            why, do = "it refuses a plain small chat", "see its log"
        return self._finding(
            "asked",
            "problem",
            f"status {reply.status} for a small chat with {shown(self._model)}"
            # Refusing a key, some quote a part of it.
            + (f": {reply.said}" if reply.said and reply.status not in {401, 403} else ""),
            why,
            do,
        )

    def _usage(self, reply: Reply) -> Finding:
        if usage_of(reply.json.get("usage")) is not None:
            return self._finding("usage", "ok", "answers tell their usage")
        return self._finding(
            "usage-missing",
            "warning",
            "answers have no usage",
            "tokens, prices and savings can't be counted, and are told as 0",
            "no setting helps: the server leaves it out; update it, or report it to its makers",
        )

    async def _stream_usage(self, reply: Reply) -> Finding:
        if reply.status in {400, 422}:
            plain = await self._ask(text_of(_SHORT_WORDS), stream=True)
            if plain.status == 200:
                return self._stream_options_refused(reply)
        if reply.status != 200 or not reply.is_stream:
            return self._finding(
                "stream-refused",
                "problem",
                f"a request with stream = true got status {reply.status} and "
                f"{shown(reply.headers.get('content-type', 'no content type'))}",
                "clients that stream get no stream",
                "see its log, and whether what stands before it passes events through",
            )
        if reply.events[-1:] != [DONE]:
            return self._finding(
                "stream-unfinished",
                "warning",
                "a stream ended without data: [DONE]",
                "such an answer counts as broken off and is never stored",
                "see what stands before it; update the server",
            )
        if _stream_usage_of(reply) is not None:
            return self._finding("stream-usage", "ok", "streams tell their usage when asked")
        return self._finding(
            "stream-usage-missing",
            "warning",
            "a stream with stream_options.include_usage has no usage",
            "the tokens of streams can't be counted, and are told as 0",
            "update the server; what stands before it may also take the last chunk out",
        )

    def _stream_options_refused(self, reply: Reply) -> Finding:
        found = f"it refuses stream_options (status {reply.status}: {reply.said})"
        if not self._injects_usage:
            return self._finding(
                "stream-options-refused",
                "note",
                found + "; inject_usage is off, as it must be",
                "the tokens of streams can't be counted",
                "nothing, or update the server",
            )
        return self._finding(
            "stream-options-refused",
            "problem",
            found,
            "Preheat asks streams for their usage, so that every stream fails",
            f"set {self._peer.about}.inject_usage = false",
        )

    async def _prefix_cache(self, tokens_a_word: float) -> Finding:
        """The same long prompt twice, with the engine's counters before and after."""
        text = text_of(ceil(_LONG_TOKENS / max(0.5, tokens_a_word)))
        cold = await self._ask(text)
        if cold.status != 200:
            return self._finding(
                "cached-tokens-unknown",
                "note",
                f"a prompt of {_LONG_TOKENS} tokens got status {cold.status}"
                + (f": {cold.said}" if cold.said else ""),
                "so nothing can be said about the engine's own prefix cache",
                "give it a larger context if prompts are that long",
            )
        between = await self._counters()
        warm = await self._ask(text)
        after = await self._counters()
        if between and after == between:  # some count a moment later
            await asyncio.sleep(_COUNTED_WITHIN_S)
            after = await self._counters()
        seen = prefix_cache.Seen(
            kind=self._kind,
            input_tokens=_input_tokens(warm),
            told=prefix_cache.told_by(warm.json),
            timings=prefix_cache.timings_of(warm.json),
            queried=prefix_cache.grown(prefix_cache.QUERIED, between, after),
            hit=prefix_cache.grown(prefix_cache.HIT, between, after),
            cold_s=cold.took_s,
            warm_s=warm.took_s,
        )
        return prefix_cache.judge(self._peer.about, seen)

    async def _counters(self) -> dict[str, float]:
        page = await self._peer.get(f"{self._peer.root}/metrics")
        return prefix_cache.counters_in(page.body) if page.status == 200 else {}

    async def _greedy(self) -> Finding:
        text = text_of(_SHORT_WORDS)
        first, second = [await self._ask(text, _GREEDY_TOKENS) for _ in range(2)]
        if first.status != 200 or second.status != 200:
            return self._finding(
                "greedy-unknown",
                "note",
                f"a chat with {_GREEDY_TOKENS} tokens of answer got status "
                f"{max(first.status, second.status)}",
            )
        if _are_alike(first, second):
            return self._finding("greedy", "ok", "a greedy request has the same answer twice")
        return self._finding(
            "greedy-differs",
            "note",
            "the same request with temperature 0 got two answers",
            "usual on GPUs with batching and a warm prefix; the exact cache hides it, since all "
            "get the first answer",
            "nothing, unless clients count on different answers: they send Cache-Control: no-cache",
        )

    def _finding(
        self, check: str, severity: Any, found: str, why: str = "", do: str = ""
    ) -> Finding:
        return Finding(check, self._peer.about, severity, found, why, do)


_STREAMED: Final[dict[str, Any]] = {
    "stream": True,
    "stream_options": {"include_usage": True},
}


def text_of(words: int) -> str:
    """A prompt of so many words that nobody has asked before, and nobody will again."""
    drawn = [_WORDS[byte % len(_WORDS)] for byte in secrets.token_bytes(words)]
    return f"{secrets.token_hex(8)} {' '.join(drawn)}"


def _tokens_a_word(short: Reply, longer: Reply) -> float:
    """From two prompts, so that what the template adds falls out; 1 where they tell nothing."""
    few = usage_of(short.json.get("usage"))
    many = _stream_usage_of(longer)
    if few is None or many is None or many.input_tokens <= few.input_tokens:
        return 1.0
    return (many.input_tokens - few.input_tokens) / (_LONGER_WORDS - _SHORT_WORDS)


def _stream_usage_of(reply: Reply) -> Usage | None:
    for data in reversed(reply.events):
        try:
            chunk = msgspec.json.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            continue
        usage = usage_of(chunk.get("usage")) if isinstance(chunk, dict) else None
        if usage is not None:
            return usage
    return None


def _input_tokens(reply: Reply) -> int:
    usage = usage_of(reply.json.get("usage"))
    return usage.input_tokens if usage is not None else 0


def _are_alike(one: Reply, other: Reply) -> bool:
    try:
        return _texts(one) == _texts(other)
    except RecursionError:  # nobody's answer is nested that deeply
        return False


def _texts(reply: Reply) -> list[Any]:
    choices = reply.json.get("choices")
    return [
        (one.get("message"), one.get("finish_reason"))
        for one in (choices if isinstance(choices, list) else [])
        if isinstance(one, dict)
    ]
