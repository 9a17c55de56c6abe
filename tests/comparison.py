"""The same load on two gateways, and what the one costs more than the other."""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from types import TracebackType
from typing import Self

from harness import Gateway, chat
from rawclient import Raw, post

_PAUSE_S = 0.01


class Comparison:
    """Clients that ask both for what is new and for what has been asked, without a pause worth the
    name; the foreground one measures. `failures` tells every answer that wasn't one."""

    def __init__(self, tested: Gateway, plain: Gateway, clients: int = 2) -> None:
        self.failures: list[str] = []
        self.answered = 0
        self._tested = tested
        self._gateways = (tested, plain)
        self._names = count()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(gateway, f"{number}"), daemon=True)
            for gateway in self._gateways
            for number in range(clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self._measured = [Raw(gateway.port, within_s=30) for gateway in self._gateways]
        self.added_s(10)  # connections, modules, caches
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(40)
        for client in self._measured:
            client.close()

    def added_s(self, rounds: int, until: Callable[[], bool] = lambda: False) -> list[float]:
        """By how much each of so many misses took longer, compared with the other's median."""
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            body = post(chat(f"measured {next(self._names)}"))
            for client, took_s in zip(self._measured, times, strict=True):
                began_at = time.monotonic()
                answer = client.ask(body)
                took_s.append(time.monotonic() - began_at)
                if answer.status != 200:
                    self.failures.append(f"status {answer.status}: {answer.body[:200]!r}")
            if until():
                break
            time.sleep(_PAUSE_S)
        usual_s = statistics.median(times[1])
        return [took_s - usual_s for took_s in times[0]]

    def _ask(self, gateway: Gateway, name: str) -> None:
        with Raw(gateway.port, within_s=30) as client:
            for number in count():
                if self._stop.is_set():
                    return
                try:
                    answer = client.ask(post(chat(f"{name} {number // 2}")))
                except (OSError, EOFError) as error:
                    self.failures.append(f"{name}: {error!r}")
                    return
                self.answered += 1
                if answer.status != 200:
                    self.failures.append(f"status {answer.status}: {answer.body[:200]!r}")
                self._stop.wait(_PAUSE_S)


def shown(name: str, added_s: Sequence[float]) -> str:
    """One line of figures."""
    ordered = sorted(added_s)
    p90_s = ordered[int(len(ordered) * 0.9)]
    return (
        f"{name}: {len(ordered)} requests, added median {statistics.median(ordered) * 1e3:.2f} ms, "
        f"p90 {p90_s * 1e3:.2f} ms, most {ordered[-1] * 1e3:.2f} ms"
    )
