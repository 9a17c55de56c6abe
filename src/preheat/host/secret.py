"""The secret of the machine's files: read once, so that all workers have the same."""

from preheat import config
from preheat.config import Settings
from preheat.errors import ConfigError
from preheat.stores.secret import secret_at
from preheat.telemetry.logs import Log


class Secret:
    """Outlives its file: who removes the folder under a running gateway gets it written again."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known = b""

    def told(self, settings: Settings) -> bytes:
        """What a worker with these settings is told: b"" where it finds it in the environment.
        Reads and writes files. Raises ConfigError where there is none yet and none can be."""
        if settings.exact.secret_env:
            return b""
        folder = config.cache_folder(settings, config.environment())
        if not self._known:
            self._known = secret_at(folder)
            return self._known
        try:
            if secret_at(folder, self._known) != self._known:
                self._log.event("secret-not-kept", why="another gateway has made one of its own")
        except ConfigError as error:
            self._log.event("secret-not-kept", why=str(error))
        return self._known
