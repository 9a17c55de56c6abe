"""Runs `make serve` once and draws what the terminal showed, for the README.

.venv/bin/python scripts/picture.py docs/serve.svg
"""

import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMAND = ["make", "--no-print-directory", "serve", "ONCE=1", "LISTEN=127.0.0.1:8000"]


def main(target: Path) -> None:
    done = subprocess.run(
        COMMAND, capture_output=True, text=True, timeout=600, check=True, stdin=subprocess.DEVNULL
    )
    console = Console(record=True, width=112, file=sys.stderr, force_terminal=True)
    console.print(Text("$ make serve", style="bold"))
    for line in done.stdout.splitlines():
        style = "green" if "preheat; hit" in line else "yellow" if "fwd=miss" in line else ""
        console.print(Text(line, style=style))
    svg = console.export_svg(title="preheat")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # no font from elsewhere
    target.write_text(svg.replace("Fira Code", "ui-monospace"), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
