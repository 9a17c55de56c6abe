"""Ports for servers that are told theirs before they start."""

import random
import socket

_LOW, _HIGH = 15_000, 30_000


def free_port() -> int:
    """One that is free on all addresses, and not of those that the system gives to whoever asks for any: before
    it is used another test's connection would have such a one."""
    while True:
        port = random.SystemRandom().randrange(_LOW, _HIGH)
        with socket.socket() as one:
            try:
                one.bind(("", port))
            except OSError:
                continue
            return port
