"""Scheme, host and port of an engine, and what connecting to it may end in."""

import asyncio
import errno
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from preheat.errors import EngineError


class Origin:
    """Where a url points."""

    def __init__(self, url: str) -> None:
        """Check the url; `ValueError` says what is wrong with it."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("an engine's url must look like http://host:port or https://host")
        if parts.username is not None or parts.query or parts.fragment:
            # The url isn't quoted: what stands before the @ is a secret.
            raise ValueError("an engine's url can't hold a user, a query or a fragment")
        self.is_tls = parts.scheme == "https"
        default_port = 443 if self.is_tls else 80
        self.host = parts.hostname
        self.port = parts.port or default_port
        self.base_path = parts.path.rstrip("/").encode("ascii")
        name = f"[{self.host}]" if ":" in self.host else self.host
        self.where = f"{name}:{self.port}"
        self.authority = (name if self.port == default_port else self.where).encode("ascii")

    async def connect(
        self,
        make: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        connect_s: float,
    ) -> None:
        """Open a connection that such a protocol handles. Raises EngineError."""
        where = self.where
        try:
            async with asyncio.timeout(connect_s):
                await asyncio.get_running_loop().create_connection(
                    make, self.host, self.port, ssl=tls
                )
        except TimeoutError as error:
            raise EngineError(
                f"{where} took no connection within {connect_s:g} s: check the "
                "address and the firewalls on the way, or raise connect_s",
                kind="timeout-connect",
            ) from error
        except ssl.SSLError as error:
            raise EngineError(
                f"TLS with {where} failed ({_describe(error)}): check its certificate, and that "
                "the url's scheme is right",
                kind="tls",
            ) from error
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}:
                raise EngineError(
                    "this gateway has no file descriptor left for a connection: raise its limit "
                    "(ulimit -n), or lower listen.connections",
                    kind="queue",
                ) from error
            raise EngineError(
                f"can't connect to {where} ({_describe(error)}): check that the engine runs and "
                "that its url is right",
                kind="connect",
            ) from error


def _describe(error: OSError | UnicodeError) -> str:
    """Return the reason in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError):
        return str(error.reason)
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error))
    return str(error) or type(error).__name__
