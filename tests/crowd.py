"""Many clients at once, and which worker process answers whom."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import Gateway
from openai_shapes import text_of
from rawclient import Answer, Raw, get, post


def wait_for(condition: Callable[[], Any], within_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "it doesn't come true"
        time.sleep(0.02)


@contextmanager
def clients(port: int, count: int, within_s: float = 20.0) -> Iterator[list[Raw]]:
    """So many connections, open."""
    with ExitStack() as stack:
        yield [stack.enter_context(Raw(port, within_s=within_s)) for _ in range(count)]


def at_once(crowd: Sequence[Raw], requests: Sequence[bytes]) -> list[Answer]:
    """All sent before the first answer is read."""
    for client, request in zip(crowd, requests, strict=True):
        client.send(request)
    return [client.answer() for client in crowd]


def process_of(answer: Answer) -> str:
    """What names the worker that answered: its requests' names all begin with it."""
    return answer.headers["x-preheat-request"].partition("-")[0]


def said(answers: Sequence[Answer]) -> set[str]:
    """All the texts that were told; every answer must be whole and well."""
    for answer in answers:
        assert answer.status == 200, (answer.status, answer.body)
        assert answer.is_complete
    return {text_of(answer) for answer in answers}


def kinds(answers: Sequence[Answer]) -> Counter[str]:
    return Counter(answer.cache for answer in answers)


def server_of(client: Raw) -> int:
    """The process id of the worker at the other end of this connection, where that is Linux's."""
    ends = [client.socket.getpeername()[1], client.socket.getsockname()[1]]
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if [int(end.rpartition(":")[2], 16) for end in fields[1:3]] == ends and fields[9] != "0":
            inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(file.readlink()) in inodes for file in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue  # another user's, or gone meanwhile
    raise AssertionError("nobody has that connection")


@contextmanager
def one_at_each(gateway: Gateway) -> Iterator[tuple[Raw, Raw]]:
    """A connection to each of two workers."""
    with clients(gateway.port, 24) as crowd:
        at_once(crowd, [get()] * len(crowd))  # each has been accepted now
        by_process: dict[int, Raw] = {}
        for client in crowd:
            by_process.setdefault(server_of(client), client)
        assert len(by_process) == 2
        first, second = by_process.values()
        yield first, second


def ask(client: Raw, body: Any, headers: str = "") -> Answer:
    return client.ask(post(body, headers=headers))
