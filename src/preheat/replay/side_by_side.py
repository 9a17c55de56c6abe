"""Independent simulations on as many cores as there are."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

from preheat.errors import ConfigError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def each(tasks: Mapping[K, Callable[[], T]], progress: Callable[[str], None]) -> dict[K, T]:
    """The result of every task, under its name and in its order.

    Each runs in a process of its own, forked, so that what it reads needn't be sent; what it
    returns must be picklable and should be small. With one core, or where forking isn't safe
    (anything but Linux), one after the other. What a task raises is raised here; ConfigError where
    its process died. No process outlives this.
    """
    cores = min(len(tasks), _cores())
    if cores < 2:
        return _one_by_one(tasks, progress)
    results: dict[K, T] = {}
    running: dict[Connection, tuple[K, BaseProcess]] = {}
    waiting = list(tasks.items())[::-1]
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                name, task = waiting.pop()
                reader, process = _begun(task)
                running[reader] = name, process
            for ready in cast("list[Connection]", wait(list(running))):
                name, process = running[ready]
                results[name] = _received(ready, cores)
                del running[ready]
                process.join()
                progress(f"{len(results)} of {len(tasks)} simulations")
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return {name: results[name] for name in tasks}


def _begun(task: Callable[[], Any]) -> tuple[Connection, BaseProcess]:
    """A process that runs the task, and where its outcome can be read."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(task, writer))
    process.start()
    writer.close()  # here: so that the reader sees the end when the process dies
    return reader, process


def _run(task: Callable[[], Any], writer: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the parent's to speak of
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # and the parent's handler isn't for its children
    outcome: tuple[Any, Exception | None]
    try:
        outcome = task(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised again in the parent
        outcome = None, error
    writer.send(outcome)


def _received(reader: Connection, cores: int) -> Any:
    with reader:
        try:
            result, error = reader.recv()
        except EOFError:
            raise ConfigError(
                f"a simulation's process died, most likely for want of memory: {cores} ran side by "
                "side; with `taskset -c 0` before the command they run one after the other"
            ) from None
    if error is not None:
        raise error
    return result


def _one_by_one(tasks: Mapping[K, Callable[[], T]], progress: Callable[[str], None]) -> dict[K, T]:
    results: dict[K, T] = {}
    for name, task in tasks.items():
        results[name] = task()
        progress(f"{len(results)} of {len(tasks)} simulations")
    return results


def _cores() -> int:
    """How many may be used by forking: one where other threads run, whose locks a fork would keep.

    Threads of numpy's BLAS don't count: they are idle, and their library prepares for a fork.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return 1
    return len(os.sched_getaffinity(0))
