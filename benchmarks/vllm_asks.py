"""What a vLLM is asked to find out whether its cache is known: prefixes shared in every way there is.

Chats under system prompts of a few families, in parts that must not share (salts, an adapter): new
questions, prompts asked again, further turns of conversations, plain texts, prompts of whole blocks
(of those the engine computes the last block again, and keeps both). And bursts: one new prefix
that nobody has yet, one prompt several times, any of the above.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.vllm_engine import BLOCK_TOKENS, CHUNK_TOKENS
from benchmarks.vllm_model import ADAPTER, MODEL, TEMPLATE_TOKENS, WORDS, text
from preheat.engines.dialects.calls import Call, Prompt, post

FAMILIES = 10
FAMILY_TOKENS = (60, 420)
QUESTION_TOKENS = (5, 90)
ANSWER_TOKENS = (1, 2, 5, 40, 70)
LONG_TOKENS = (CHUNK_TOKENS + 100, 2 * CHUNK_TOKENS + 100)
PARTS = [
    *(("", ""), ("", ""), ("mint", ""), ("sage", "")),
    *((ADAPTER, ""), ("", ADAPTER), (ADAPTER, ADAPTER)),
]
"""Salt and adapter. One salt is the adapter's name: they still don't share."""
BURST = 6
REMEMBERED = 40
MOST_TURNS = 4


class Ask(msgspec.Struct):
    """One request; messages, or a text."""

    salt: str
    adapter: str
    messages: Sequence[Mapping[str, str]] | None = None
    text: str | None = None
    answer_tokens: int = 1

    def prompt(self) -> Prompt:
        return Prompt(
            model=MODEL,
            messages=self.messages,
            text=self.text,
            adapter=self.adapter,
            salt=self.salt,
        )

    def call(self) -> Call:
        fields: dict[str, object] = {
            "model": self.adapter or MODEL,
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": self.salt or None,
        }
        if self.messages is not None:
            return post("/v1/chat/completions", {"messages": self.messages, **fields})
        return post("/v1/completions", {"prompt": self.text, **fields})


class Asks:
    """An endless supply; what it draws depends on the seed and on what was answered."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._families = [self._words(*FAMILY_TOKENS) for _ in range(FAMILIES)]
        self._past: list[tuple[Ask, str]] = []

    def alone(self) -> Ask:
        """One of any kind."""
        draw = self._chance.random()
        if self._past and draw < 0.2:
            return self.again(self._chance.choice(self._past)[0])
        if self._past and draw < 0.4 and (turn := self._next_turn()) is not None:
            return turn
        if draw < 0.5:
            salt, adapter = self._part()
            words = [*self._family(), *self._words(*QUESTION_TOKENS)]
            return Ask(salt, adapter, text=text(words), answer_tokens=self._answer())
        return self._chat(self._family(), whole_blocks=draw > 0.75)

    def burst(self) -> list[Ask]:
        """At once."""
        match self._chance.randrange(3):
            case 0:
                salt, adapter = self._part()
                prefix = self._words(*LONG_TOKENS)
                return [self._chat(prefix, part=(salt, adapter)) for _ in range(BURST)]
            case 1:
                return [self._chat(self._words(*LONG_TOKENS))] * BURST
            case _:
                return [self.alone() for _ in range(BURST)]

    def newest_again(self) -> Ask:
        """What was asked last."""
        return self.again(self._past[-1][0])

    @staticmethod
    def again(ask: Ask) -> Ask:
        return msgspec.structs.replace(ask, answer_tokens=1)

    def answered(self, ask: Ask, answer: str) -> None:
        """So that it may go on."""
        self._past = [*self._past, (ask, answer)][-REMEMBERED:]

    def _next_turn(self) -> Ask | None:
        ask, answer = self._chance.choice(self._past)
        if ask.messages is None or len(ask.messages) > 2 * MOST_TURNS:
            return None
        said = {"role": "assistant", "content": answer.strip()}
        question = {"role": "user", "content": text(self._words(*QUESTION_TOKENS))}
        messages = [*ask.messages, said, question]
        return Ask(ask.salt, ask.adapter, messages=messages, answer_tokens=self._answer())

    def _chat(
        self, system: list[str], *, part: tuple[str, str] | None = None, whole_blocks: bool = False
    ) -> Ask:
        salt, adapter = part or self._part()
        question = self._words(*QUESTION_TOKENS)
        if whole_blocks:
            odd = -(len(system) + len(question) + TEMPLATE_TOKENS) % BLOCK_TOKENS
            question += self._words(odd, odd)
        messages = [
            {"role": "system", "content": text(system)},
            {"role": "user", "content": text(question)},
        ]
        return Ask(salt, adapter, messages=messages, answer_tokens=self._answer())

    def _family(self) -> list[str]:
        """The first ones are asked for more often."""
        return self._families[min(int(self._chance.expovariate(0.4)), FAMILIES - 1)]

    def _part(self) -> tuple[str, str]:
        return self._chance.choice(PARTS)

    def _answer(self) -> int:
        return self._chance.choice(ANSWER_TOKENS)

    def _words(self, least: int, most: int) -> list[str]:
        return self._chance.choices(WORDS, k=self._chance.randint(least, most))
