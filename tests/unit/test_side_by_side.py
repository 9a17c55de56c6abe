"""The tests in forking.py, in a process that has one thread."""

import subprocess
import sys
from pathlib import Path


def test_the_tests_that_fork() -> None:
    forking = Path(__file__).with_name("forking.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(forking)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout
