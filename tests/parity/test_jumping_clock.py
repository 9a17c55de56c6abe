"""Gateway and reference driver decide alike, request by request, in simulated time."""

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from parity import simulation
from parity.loop import JumpingLoop
from parity.reference import Reference
from parity.traffic import arrivals

REQUESTS = 3_000
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def _secret() -> object:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in simulation.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def asked() -> list[simulation.Arrival]:
    return arrivals(REQUESTS)


@pytest.fixture(scope="module")
def served(asked: list[simulation.Arrival]) -> simulation.Run:
    return simulation.run(asked)


@pytest.fixture(scope="module")
def replayed(asked: list[simulation.Arrival]) -> simulation.Run:
    return Reference(asked, simulation.words(asked)).run()


def test_the_clock_jumps_from_timer_to_timer_and_meets_each_exactly() -> None:
    async def work() -> list[float]:
        loop = asyncio.get_running_loop()
        moments: list[float] = []
        for at in (0.1, 0.3, 86_400.7, 0.30000000000000004):
            loop.call_at(at, lambda: moments.append(loop.time()))
        await asyncio.sleep(100_000)
        return moments

    began_at = time.monotonic()
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        assert runner.run(work()) == [0.1, 0.3, 0.3, 86_400.7]
    assert time.monotonic() - began_at < 5


def test_waiting_for_ever_is_an_error() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with (
        asyncio.Runner(loop_factory=JumpingLoop) as runner,
        pytest.raises(RuntimeError, match="no timer"),
    ):
        runner.run(work())


def test_the_traffic_holds_every_kind_of_event(served: simulation.Run) -> None:
    kinds = Counter(line[3] for line in served.lines if line[0] == "request")
    reasons = Counter(line[5] for line in served.lines if line[3:4] == ("forward",))
    evicted = sum(len(line[-2]) for line in served.lines if "keep" in line)
    leaders_gone = sum(line[0] == "failure" for line in served.lines)
    assert sum(kinds.values()) == REQUESTS
    assert min(kinds["hit"], kinds["join"], kinds["forward"]) > 200, kinds
    assert min(reasons["key-first-seen"], reasons["evicted"], reasons["expired"]) > 20, reasons
    assert evicted > 200
    assert leaders_gone > 20


def test_gateway_and_reference_decide_alike(
    served: simulation.Run, replayed: simulation.Run
) -> None:
    for ours, theirs in zip(served.lines, replayed.lines, strict=False):
        assert ours == theirs
    assert len(served.lines) == len(replayed.lines)


def test_gateway_and_reference_hold_the_same_at_the_end(
    served: simulation.Run, replayed: simulation.Run
) -> None:
    assert served.held == replayed.held
    assert served.snapshot.accounts == replayed.snapshot.accounts
    assert served.snapshot.totals == replayed.snapshot.totals


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_decisions_dont_depend_on_the_hash_seed(served: simulation.Run, hash_seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "parity.simulation", str(REQUESTS)],
        cwd=TESTS,
        env={**os.environ, **simulation.ENVIRONMENT, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.strip() == simulation.digest(served), done.stderr
