"""Where an observer's sights go: a screen, lines of JSON, a page."""

import argparse
import sys
from typing import TYPE_CHECKING

import msgspec

from preheat.cli.pages import write_page
from preheat.cli.progress import Line
from preheat.cli.screen import Screen

if TYPE_CHECKING:
    from preheat.lab.observe.sight import Sight


class Shown:
    """Where sights go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.line = Line()
        self._options = options
        self._screen = Screen() if sys.stdout.isatty() and not options.json else None
        self._told_bad = 0

    def show(self, sight: "Sight") -> None:
        """One of many."""
        if self._screen is None:
            self._tell_bad(sight)
        if self._options.json:
            if not self._options.once:
                _print_json(sight)
        elif self._screen is not None:
            from preheat.cli.observe_text import told

            self._screen.show(told(sight, is_short=True))
        if self._screen is None:
            self.line.tell(f"{sight.log}: {sight.lines:,} lines, {sight.bad} of them bad")
        self._write_page(sight)

    def last(self, sight: "Sight") -> None:
        """The report."""
        if self._screen is not None:
            self._screen.clear()
        self._tell_bad(sight)
        if self._options.json:
            _print_json(sight)
        else:
            from preheat.cli.observe_text import told

            print(told(sight))
        self._write_page(sight)

    def _tell_bad(self, sight: "Sight") -> None:
        """A few, by their numbers; the report has the last hundred."""
        for bad in sight.bad_lines[self._told_bad : 3]:
            self._told_bad += 1
            print(f"skipped {bad.path}:{bad.line}: {bad.why}", file=sys.stderr)

    def _write_page(self, sight: "Sight") -> None:
        if self._options.html is not None:
            from preheat.cli.observe_text import report_of
            from preheat.replay.report import encode

            write_page(self._options.html, encode(report_of(sight)))


def _print_json(sight: "Sight") -> None:
    print(msgspec.json.encode(sight).decode(), flush=True)
