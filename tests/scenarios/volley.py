"""Many requests over a few connections, cheaply, and how each was answered."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

CONNECTIONS: Final = 8
_WITHIN_S: Final = 100.0
_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_FORWARDED: Final = re.compile(rb"cache-status: preheat; fwd=(\w+)", re.IGNORECASE)


def volley(
    port: int, path: str, bodies: Iterable[bytes], headers: Mapping[str, str] | None = None
) -> Counter[tuple[int, str]]:
    """Post them all; how many had which status and which word of Cache-Status."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    start = f"POST {path} HTTP/1.1\r\nHost: x\r\n{lines}".encode()
    counts: Counter[tuple[int, str]] = Counter()

    async def post_all() -> None:
        async with asyncio.timeout(_WITHIN_S), asyncio.TaskGroup() as group:
            left = iter(bodies)
            for _ in range(CONNECTIONS):
                group.create_task(_post(port, start, left, counts))

    asyncio.run(post_all())
    return counts


async def _post(
    port: int, start: bytes, left: Iterator[bytes], counts: Counter[tuple[int, str]]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for body in left:
            writer.write(b"%bContent-Length: %d\r\n\r\n%b" % (start, len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            assert length is not None, head
            await reader.readexactly(int(length[1]))
            word = _FORWARDED.search(head)
            counts[int(head[9:12]), word[1].decode() if word else "hit"] += 1
    finally:
        writer.close()
        await writer.wait_closed()
