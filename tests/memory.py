"""How much memory another process takes, as Linux tells it."""

from pathlib import Path

import pytest

CLEAR_PEAK = "5"  # proc(5), clear_refs


class PeakMemory:
    """The growth of a process since this was made, at its worst moment."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        try:
            (self._folder / "clear_refs").write_text(CLEAR_PEAK)
        except OSError:
            pytest.skip("peaks of memory are measured on Linux only")
        self._start_bytes = self._read("VmRSS")

    @property
    def grown_bytes(self) -> int:
        return self._read("VmHWM") - self._start_bytes

    def _read(self, name: str) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1_024
        raise AssertionError(f"no {name}")
