"""Each tenant's salt for an engine's cache, so that nobody can tell by the time what others have asked.

Only requests to chat completions, completions and responses get one. All other paths are sent without,
`/v1/messages` among them: there tenants share the engine's cache.
"""

import hmac
import json
from typing import Final

import msgspec

from preheat.core.memo import Memo
from preheat.wire.splice import change_field, insert_field

_SALTED: Final = frozenset({b"/chat/completions", b"/completions", b"/responses"})
_TENANTS: Final = 4_096
_CHARACTERS: Final = 32


class _Body(msgspec.Struct):
    """The one field under which vLLM and SGLang take a salt; absent is empty."""

    cache_salt: msgspec.Raw = msgspec.Raw()


_BODY: Final = msgspec.json.Decoder(_Body)
_TEXT: Final = msgspec.json.Decoder(str)


class Salts:
    """Derived from the machine's secret: the same in all its processes, and nobody's guess.

    A salt that a client sends counts beside its tenant's: it sets prompts of one tenant apart, and never
    leads to another's.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, b"salts of tenants", "sha256")
        self._made: Memo[str, str] = Memo(_TENANTS)

    def of(self, tenant: str, own: str = "") -> str:
        """128 bits in hexadecimal; `own` is the client's, if any."""
        if own:
            return self._derived([tenant, own])
        salt = self._made[tenant]
        if salt is None:
            salt = self._derived([tenant])
            self._made.put(tenant, salt)
        return salt

    def takes(self, path: bytes) -> bool:
        """Whether requests to it may have one."""
        return path.partition(b"?")[0] in _SALTED

    def salted(self, body: bytes, tenant: str, field: str) -> bytes:
        """The body with that salt; as it is where nobody can read it."""
        try:
            own = _own_of(body)
        except (ValueError, RecursionError):  # msgspec's own and those of bad UTF-8 are ValueErrors
            return body
        salt = b'"%b"' % self.of(tenant, own or "").encode()
        if own is None:
            return insert_field(body, field, salt)
        return change_field(body, field, lambda _: salt)

    def _derived(self, parts: list[str]) -> str:
        return hmac.digest(self._key, msgspec.json.encode(parts), "sha256").hex()[:_CHARACTERS]


def _own_of(body: bytes) -> str | None:
    """What the client has sent, in any form; None where there is no such field. Raises ValueError where
    the body isn't an object."""
    try:
        sent = bytes(_BODY.decode(body).cache_salt)
    except (
        msgspec.MsgspecError
    ):  # Python's reads half characters and the like, and so may an engine
        fields = json.loads(body)
        if not isinstance(fields, dict):
            raise ValueError("it isn't an object") from None
        sent = json.dumps(fields["cache_salt"]).encode() if "cache_salt" in fields else b""
    if not sent:
        return None
    try:
        return _TEXT.decode(sent)
    except ValueError:
        return "" if sent == b"null" else sent.decode(errors="replace")
