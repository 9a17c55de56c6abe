"""The sockets that all workers listen on: bound once, kept by the supervisor, inherited by each.

A connection that waits for a worker that died is accepted by the next one.
"""

import contextlib
import errno
import socket
import sys
from typing import Any, Final

from preheat.errors import ConfigError

_BACKLOG: Final = 1_024
_TRIES: Final = 8

Set = tuple[socket.socket, ...]
"""One socket for each address of the host's name."""


def bind(host: str, port: int, slots: int, *, key: str, shown: str) -> list[Set]:
    """A set of sockets for each slot, all on one port. Raises ConfigError.

    On Linux each slot has sockets of its own, so that the kernel spreads connections; elsewhere
    they share one.
    """
    try:
        addresses = _addresses(host, port)
        columns = _columns(addresses, slots)
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.EADDRINUSE:
            reason = (
                f"{reason}, by another program, or by a worker of a gateway that was killed, which "
                "ends after its last request"
            )
        raise ConfigError(
            f"{key}: can't listen on {shown}: {reason}; choose another one{_remedy(key)}"
        ) from None
    return list(zip(*columns, strict=True))


def _remedy(key: str) -> str:
    return " with --listen HOST:PORT" if key == "listen.address" else ""


def port_of(sets: list[Set]) -> int:
    """The port that was taken."""
    return int(sets[0][0].getsockname()[1])


def close(sets: list[Set]) -> None:
    """Stop listening, as far as this process is concerned."""
    for sockets in sets:
        for one in sockets:
            one.close()


def _addresses(host: str, port: int) -> list[tuple[int, Any]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))


def _columns(addresses: list[tuple[int, Any]], slots: int) -> list[list[socket.socket]]:
    """For each address a socket for each slot. Port 0: what is free at the first one is taken at
    all; where it isn't free there, another one is tried."""
    tries = _TRIES if addresses[0][1][1] == 0 and len(addresses) > 1 else 1
    for left in reversed(range(tries)):
        columns: list[list[socket.socket]] = []
        try:
            for family, (host, wanted, *rest) in addresses:
                port = wanted or (columns[0][0].getsockname()[1] if columns else 0)
                columns.append(_column(family, (host, port, *rest), slots))
        except OSError:
            close([tuple(column) for column in columns])
            if not left:
                raise
        else:
            return columns
    raise AssertionError("the last try returns or raises")


def _column(family: int, address: Any, slots: int) -> list[socket.socket]:
    first = _listening(family, address)
    made = [first]
    if sys.platform == "linux" and slots > 1:
        # Only now, when it listens: two gateways of one user would else share the port in silence.
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        address = first.getsockname()
        with contextlib.suppress(OSError):  # a kernel that wants the option before: they share
            made += [_listening(family, address, is_shared=True) for _ in range(slots - 1)]
    return made + [first.dup() for _ in range(slots - len(made))]


def _listening(family: int, address: Any, *, is_shared: bool = False) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError):
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(_BACKLOG)
        made.settimeout(0)
    except OSError:
        made.close()
        raise
    return made
