"""`python -m preheat` and the `preheat` command."""

import sys

from preheat.cli import main

if __name__ == "__main__":
    sys.exit(main())
