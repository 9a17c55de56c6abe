"""The upstreams that an operator drains: the workers that are there know, new ones must be told."""

from preheat import config
from preheat.config import EngineSettings, Settings
from preheat.engines.worker import name_at
from preheat.host.embedded import DEFAULT

_Server = tuple[str, str]


class Draining:
    """Remembers them by engine and url, as a worker does: new settings may give them new names."""

    def __init__(self) -> None:
        self._servers: set[_Server] = set()

    def note(self, settings: Settings, name: str, *, is_draining: bool) -> bool:
        """Remember that. Whether these settings have an upstream of that name."""
        server = _servers(settings).get(name)
        if server is None:
            return False
        (self._servers.add if is_draining else self._servers.discard)(server)
        return True

    def names(self, settings: Settings) -> tuple[str, ...]:
        """What they are called with these settings."""
        return tuple(name for name, server in _servers(settings).items() if server in self._servers)

    def keep(self, settings: Settings) -> None:
        """Forget those that these settings don't have, so that there are never more."""
        self._servers &= set(_servers(settings).values())


def _servers(settings: Settings) -> dict[str, _Server]:
    found: dict[str, _Server] = {}
    engines = settings.engines or {DEFAULT: EngineSettings(kind="embedded")}
    for engine, its in engines.items():
        urls = config.upstreams_of(its) or ("",)
        for position, url in enumerate(urls):
            found.setdefault(name_at(engine, position, len(urls)), (engine, url))
    return found
