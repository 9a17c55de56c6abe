"""What a flight asks, and the clients who listen to it."""

from preheat.core.types import Request
from preheat.engines import Engine
from preheat.gateway.buffer import Piece
from preheat.transport.server import Exchange
from preheat.wire import openai


class Call:
    """What a flight asks of which engine."""

    __slots__ = ("body", "dialect", "engine", "headers", "is_usage_injected", "path")

    def __init__(
        self,
        engine: Engine,
        path: bytes,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        dialect: openai.Dialect,
        *,
        is_usage_injected: bool,
    ) -> None:
        self.engine = engine
        self.path = path
        self.headers = headers
        self.body = body
        self.dialect = dialect
        self.is_usage_injected = is_usage_injected


class Listener:
    """One client of a flight: in which form it wants the answer, and how far it has got."""

    __slots__ = (
        "cache_status",
        "created",
        "exchange",
        "is_leader",
        "is_stood_in",
        "name",
        "position",
        "request",
        "started_at",
        "status",
        "version",
    )

    def __init__(
        self,
        exchange: Exchange,
        request: Request,
        name: bytes,
        cache_status: str,
        started_at: float,
    ) -> None:
        self.exchange = exchange
        self.request = request
        self.name = name  # the id that its answer bears
        self.cache_status = cache_status
        self.started_at = started_at
        self.is_leader = True
        self.is_stood_in = False  # by a stale answer
        self.version = 0  # of the table of engines that its key was made with
        self.position = 0
        self.created = 0
        self.status = 0  # what it was told

    def take(self, piece: Piece, call: Call) -> None:
        """Send it this event, in the form it asked for."""
        if piece.is_usage and not self.request.ask.include_usage:
            return
        if not piece.is_chunk:
            if self.is_leader or piece.is_common:
                self.exchange.write(piece.raw)
        elif not self.is_leader:
            self.exchange.write(openai.event(piece.rest(), self.name, self.created))
        elif call.is_usage_injected and piece.tells_usage:
            shown = {k: v for k, v in piece.chunk().items() if k != "usage"}
            self.exchange.write(b"data: %b\n\n" % openai.encode(shown))
        else:
            self.exchange.write(piece.raw)
