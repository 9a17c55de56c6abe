"""llama.cpp's wheel needs GCC's OpenMP runtime, which a minimal Debian doesn't have.

Where it is missing, this takes libgomp out of a small wheel that carries it and puts it into the
virtual environment's `lib`, where `preheat.engines.child` looks. Elsewhere it does nothing.
"""

import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "libgomp.so.1"
CARRIER = "pykdtree==1.4.3"


def is_missing() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        ctypes.CDLL(NAME)
    except OSError:
        return not (Path(sys.prefix) / "lib" / NAME).exists()
    return False


def main() -> None:
    if not is_missing():
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            + ["--target", folder, CARRIER],
            check=True,
            timeout=300,
        )
        found = next(Path(folder).glob("*.libs/libgomp*.so*"))
        shutil.copy(found, Path(sys.prefix) / "lib" / NAME)
    print(f"{NAME} is missing on this system: taken from {CARRIER} into {sys.prefix}/lib")


if __name__ == "__main__":
    main()
