"""One server that is examined: which dialect it speaks, and each question within a budget."""

from typing import Final

import msgspec

from preheat.engines.dialects import DIALECTS, Dialect
from preheat.engines.dialects.calls import Call, Prompt
from preheat.engines.dialects.detection import PROBES, detect
from preheat.engines.dialects.openai import openai_call
from preheat.engines.dialects.readings import Cached
from preheat.errors import EngineError
from preheat.lab.doctor.finding import Finding, Severity
from preheat.lab.doctor.peer import Peer, Reply

MOST_COMPUTED: Final = 32
"""Requests with a prompt to compute, to one server. A healthy vLLM gets 5, a healthy llama.cpp with
two slots 7: the others are for telling one cause from another."""
MOST_FREE: Final = 64
"""Questions that cost no computing: pages, counts of tokens, templates."""
TRUNK_TOKENS: Final = 1_300
"""Longer than any block or chunk under which an engine keeps nothing (OpenAI's is 1,024 tokens)."""
_SMALLER: Final = "max_completion_tokens"


class OutOfBudgetError(Exception):
    """What was promised to be the most has been asked."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to examine, and how."""

    url: str
    api_key: str = ""
    model: str = ""
    adapter: str = ""
    timeout_s: float = 60.0


class Answer(msgspec.Struct, frozen=True):
    """What a server said to a prompt. `cached` is None where it doesn't tell, or refused."""

    status: int
    body: bytes
    said: str
    took_s: float
    cached: Cached | None


class Server:
    """An address. Every question goes over a connection of its own, so that what spreads connections
    over several servers is seen."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.about = target.url
        self.dialect: Dialect = DIALECTS["openai"]
        self.model = target.model
        self.pages: dict[bytes, bytes] = {}
        """What it said to the questions that are asked first, by path."""
        self.computed = self.free = 0
        self._limit_field = "max_tokens"

    async def meet(self) -> None:
        """Find out what it is. Raises EngineError."""
        for call in PROBES:
            reply = await self.ask(call)
            if reply.status == 200:
                self.pages[call.path] = reply.body
        self.dialect = DIALECTS[detect(self.pages)]

    async def ask(self, call: Call) -> Reply:
        """A question that costs no computing. Raises EngineError."""
        self.free += 1
        if self.free > MOST_FREE:
            raise OutOfBudgetError(f"{MOST_FREE} questions were asked")
        return await self._send(call)

    async def told(self, call: Call | None) -> bytes | None:
        """The body of an answer with status 200; None where there isn't one. Raises EngineError."""
        if call is None:
            return None
        reply = await self.ask(call)
        return reply.body if reply.status == 200 else None

    async def compute(self, prompt: Prompt, **fields: object) -> Answer:
        """As a client would ask it, for one token of answer. Raises EngineError."""
        asked = {self._limit_field: 1, **fields}
        answer = await self.computing(openai_call(prompt, **asked))
        if answer.status == 400 and self._limit_field != _SMALLER and _SMALLER in answer.said:
            self._limit_field = _SMALLER
            return await self.compute(prompt, **fields)
        return answer

    async def computing(self, call: Call) -> Answer:
        """A question with a prompt to compute, in the engine's own way. Raises EngineError."""
        self.computed += 1
        if self.computed > MOST_COMPUTED:
            raise OutOfBudgetError(f"{MOST_COMPUTED} prompts were sent")
        reply = await self._send(call)
        cached = self.dialect.read_cached(reply.body) if reply.status == 200 else None
        return Answer(reply.status, reply.body, reply.said, reply.took_s, cached)

    async def _send(self, call: Call) -> Reply:
        target = self.target
        peer = Peer(self.about, target.url, target.api_key, target.timeout_s)
        try:
            return await peer.send(call)
        finally:
            await peer.aclose()

    def unreachable(self, error: EngineError) -> Finding:
        """What it means that it gave no answer."""
        return Peer(self.about, self.target.url, "", 1.0).unreachable(error)

    def finding(
        self,
        check: str,
        severity: Severity,
        found: str,
        *,
        asked: str = "",
        why: str = "",
        do: str = "",
    ) -> Finding:
        """One about this server."""
        return Finding(check, self.about, severity, found, why, do, asked)


def chat(server: Server, system: str, question: str) -> Prompt:
    """A conversation's first turn."""
    return Prompt(
        model=server.model,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
    )
