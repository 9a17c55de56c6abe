"""What goes on beside the requests: its defects are told, and what takes long has a thread."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar

from preheat.engines.worker import OnEvent
from preheat.errors import place_of

P = ParamSpec("P")
T = TypeVar("T")

_ON_LOOP_BYTES: Final = 4_096
"""Less is read, hashed and written in the event loop: sooner than in a thread."""


async def guarded(
    work: Coroutine[Any, Any, T], on_event: OnEvent, worker: str | None = None
) -> T | None:
    """What comes of it; None where a defect of ours ends it, which is told at once: nobody awaits a task that
    runs as long as its group."""
    try:
        return await work
    except Exception as bug:  # noqa: BLE001  what goes on beside the requests mustn't end them
        tell_bug(on_event, bug, worker)
        return None


def tell_bug(on_event: OnEvent, bug: Exception, worker: str | None = None) -> None:
    """Log a defect of ours in what is done for this server, or for all."""
    fields: dict[str, object] = {} if worker is None else {"worker": worker}
    on_event("bug", {**fields, **place_of(bug)})


async def aside(size_bytes: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Do work on so many bytes: in a thread where they are many."""
    if size_bytes > _ON_LOOP_BYTES:
        return await asyncio.to_thread(work, *args, **named)
    return work(*args, **named)
