"""A server asked directly, beside the requests of clients: what a dialect has questions for."""

import asyncio
from typing import Final

from preheat.engines.dialects import DIALECTS, Dialect
from preheat.engines.dialects.calls import Call
from preheat.engines.dialects.detection import PROBES, detect
from preheat.engines.dialects.readings import MOST_BYTES, Load, Slot
from preheat.errors import EngineError
from preheat.transport.client import Client, Timeouts

_WITHIN_S: Final = 10.0
"""For a question that computes nothing."""


class Direct:
    """One server, each question within a time. `dialect` is None until it was `known`."""

    def __init__(
        self, url: str, *, api_key: str = "", dialect: str = "auto", most_s: float = 300.0
    ) -> None:
        """Connect to nothing yet; `most_s` is for a question that computes. Raises ValueError for a
        url that can't be."""
        self.url = url
        self.most_s = most_s
        self.dialect = None if dialect == "auto" else DIALECTS[dialect]
        self._api_key = api_key
        self._client = Client(
            url,
            timeouts=Timeouts(connect_s=_WITHIN_S, first_byte_s=most_s, idle_s=most_s),
            max_connections=8,
        )
        self._root = self._client.base_path.removesuffix(b"/v1")

    async def known(self) -> Dialect:
        """What it speaks, found out at the first call. Raises EngineError."""
        if self.dialect is None:
            bodies = {}
            has_answered = False
            for probe in PROBES:
                status, body = await self.ask(probe, within_s=_WITHIN_S)
                has_answered |= status < 500
                if status == 200:
                    bodies[probe.path] = body
                if detect(bodies) != "openai":
                    break
            if not has_answered:
                raise EngineError(f"{self.url} answers nothing yet ({status})", kind="start")
            self.dialect = DIALECTS[detect(bodies)]
        return self.dialect

    async def ask(self, call: Call, *, within_s: float | None = None) -> tuple[int, bytes]:
        """Status and body. Cancelling closes the connection. Raises EngineError, also where no
        whole answer came in time."""
        dialect = self.dialect or DIALECTS["openai"]
        limit_s = self.most_s if within_s is None else within_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._client.request(
                    call.method, self._root + call.path, dialect.headers(self._api_key), call.body
                )
                try:
                    return response.status, await response.read(MOST_BYTES)
                finally:
                    response.close()
        except TimeoutError:
            raise EngineError(
                f"{self.url} gave no whole answer within {limit_s:g} s", kind="timeout-idle"
            ) from None

    async def told(self, call: Call | None) -> bytes | None:
        """The body of an answer that is there at once; None where there is no such question, or it is
        refused. Raises EngineError."""
        if call is None:
            return None
        status, body = await self.ask(call, within_s=_WITHIN_S)
        return body if status == 200 else None

    async def slots(self) -> list[Slot] | None:
        """Its slots; None where it has none, or doesn't tell them."""
        dialect = await self.known()
        body = await self.told(dialect.slots())
        return None if body is None else dialect.read_slots(body)

    async def load(self) -> Load | None:
        """How busy it is; None where it doesn't tell."""
        dialect = await self.known()
        body = await self.told(dialect.load())
        return None if body is None else dialect.read_load(body)

    async def block_tokens(self) -> int:
        """How many tokens it keeps together: as it says, else as its kind has them mostly."""
        dialect = await self.known()
        body = await self.told(dialect.capacity())
        capacity = None if body is None else dialect.read_capacity(body)
        said = None if capacity is None else capacity.block_tokens
        return said or dialect.block_tokens

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()
