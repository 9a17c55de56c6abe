"""A text that is shown anew in its own place on a terminal."""

import shutil
import sys


class Screen:
    """On standard output. What doesn't fit is left out: lines at the bottom, and the ends of long ones."""

    def __init__(self) -> None:
        self._lines = 0

    def show(self, text: str) -> None:
        """In the place of what it showed last."""
        size = shutil.get_terminal_size()
        lines = [line[: size.columns - 1] for line in text.splitlines()[: size.lines - 1]]
        self.clear()
        print("\n".join(lines), flush=True)
        self._lines = len(lines)

    def clear(self) -> None:
        """Make room for something else."""
        if self._lines:
            sys.stdout.write(f"\x1b[{self._lines}A\x1b[J")
            sys.stdout.flush()
            self._lines = 0
