"""Where KV events are to be heard: endpoints as an engine is given them, as we have to use them."""

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from preheat.errors import ConfigError

_USUAL_PORTS: Final = {"http": 80, "https": 443}


class Meeting(msgspec.Struct, frozen=True):
    """Where publisher and subscriber meet; `binds`: we are the one who waits there."""

    address: str
    binds: bool


class KvPlace(msgspec.Struct, frozen=True):
    """One publisher: its endpoints as in the engine's own `--kv-events-config`, and where it runs."""

    endpoint: str
    replay_endpoint: str = ""
    host: str = "127.0.0.1"


def places_of(
    urls: Sequence[str], endpoints: Sequence[str], replay_endpoints: Sequence[str]
) -> dict[str, KvPlace]:
    """Each url's: from one endpoint a url, in order, or from one for all, in which `{host}` and `{port}`
    are the url's. Raises ConfigError where two would share a stream.

    >>> places_of(["http://gpu-1:8000"], ["tcp://{host}:5557"], [])["http://gpu-1:8000"]
    KvPlace(endpoint='tcp://*:5557', replay_endpoint='', host='gpu-1')
    """
    made, taken = {}, set()
    for position, url in enumerate(urls):
        live = _spelled(_at(endpoints, position, len(urls)), url)
        replay = (
            _spelled(_at(replay_endpoints, position, len(urls)), url) if replay_endpoints else ""
        )
        place = made[url] = KvPlace(live, replay, urlsplit(url).hostname or "127.0.0.1")
        for endpoint in filter(None, (live, replay)):
            address = meet(endpoint, place.host).address
            if address in taken:
                raise ConfigError(
                    f"{address} would be that of two streams; each server has its own: give one for each "
                    "of urls, or one with {host} or {port}"
                )
            taken.add(address)
    return made


def meet(endpoint: str, host: str, rank: int = 0) -> Meeting:
    """Where to meet a publisher that was given this endpoint. It listens where that has `*` or `::`, or
    is ipc (or inproc, which nobody outside can reach); otherwise it connects, and we must listen.
    Each data-parallel rank has the next port. Raises ConfigError.

    >>> meet("tcp://*:5557", "10.0.0.7", 1)
    Meeting(address='tcp://10.0.0.7:5558', binds=False)
    >>> meet("tcp://10.0.0.1:5557", "10.0.0.7")
    Meeting(address='tcp://10.0.0.1:5557', binds=True)
    """
    scheme, slashes, place = endpoint.partition("://")
    if scheme == "tcp" and slashes:
        name, colon, port = place.rpartition(":")
        if colon and port.isdigit() and 0 < int(port) + rank < 65_536:
            binds = "*" not in name and "::" not in name
            if not binds:
                name = f"[{host}]" if ":" in host else host
            return Meeting(f"tcp://{name}:{int(port) + rank}", binds)
    elif scheme == "ipc" and place and not rank:
        return Meeting(endpoint, binds=False)
    raise ConfigError(
        f"KV events: {endpoint!r} (rank {rank}) isn't an endpoint. Spell it as in the engine's "
        "--kv-events-config: tcp://*:5557, tcp://HOST:5557, or ipc://PATH where there is one rank."
    )


def _at(given: Sequence[str], position: int, of: int) -> str:
    if len(given) not in {1, of}:
        raise ConfigError("give one endpoint for all servers, or one for each of urls")
    return given[position if len(given) > 1 else 0]


def _spelled(endpoint: str, url: str) -> str:
    """With the url's own host and port. Where the engine is named by its own host, it listens."""
    parts = urlsplit(url)
    port = parts.port or _USUAL_PORTS.get(parts.scheme, 80)
    if endpoint.startswith("tcp://{host}:"):
        endpoint = endpoint.replace("{host}", "*", 1)
    return endpoint.replace("{host}", parts.hostname or "").replace("{port}", str(port))
