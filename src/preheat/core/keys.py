"""The key of a request: a keyed digest of everything that may change its answer.

The canonical form folds only what can't change an answer (DESIGN 5.1):

- white space and escapes everywhere;
- a top-level `null`, which means the same as an absent field;
- the order of object keys and the spelling of numbers (`0`, `0.0`, `0e0`), but for fields that
  hold a schema, where both reach the model: swapping two properties changes a greedy answer.
  A field this module doesn't know may hold a schema too, so its inside is kept as it is.

Text is never folded. `IGNORED` lists the only fields left out.
"""

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from hashlib import sha256
from math import isfinite
from typing import Any, Final

import jiter
import msgspec

from preheat.core.memo import Memo
from preheat.core.types import Ask, Check, Key
from preheat.errors import RequestError

IGNORED: Final = frozenset(
    {
        "stream",
        "stream_options",
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
    }
)
"""Fields that can't change what an answer says."""

_UNSPOKEN: Final = IGNORED - {"stream"}

FOLDED: Final = frozenset({"messages", "prompt", "input", "logit_bias", "stop"})
"""Arrays and objects without a schema inside; scalars are folded under any name."""

KEY_BYTES: Final = 16
CHECK_BYTES: Final = 32
_SURE_CHARACTERS: Final = 16
_MOST_BYTES: Final = 8_388_608
_MOST_VALUES: Final = 300_000
_MOST_NAMES: Final = 50_000
_MODEL_CHARACTERS: Final = 256
_PARTITION_MEMO: Final = 4_096
_EXACT_INTEGERS: Final = 2.0**53
_WORTH_CUTTING_BYTES: Final = 16_384  # below it the canonical form is cheaper (docs/measured.md)
_HOLE: Final = b"-7205759403792793"  # stands for a cut-out value; see `_cut`


class Partition(msgspec.Struct, frozen=True, gc=False):
    """What separates requests before their bodies do; made by `Keyring.partition`.

    `name` is unambiguous; `secret` is the tenant's salt. `started` is a SHA-256 that has read the
    name: a copy of it goes on with a body, which is cheaper than a new one.
    """

    name: str
    secret: bytes
    started: Any


class Keyring:
    """Turns bodies into asks, with the secret from which every tenant's salt is derived.

    Two memos spare the canonical form: one knows whole bodies, the other the messages and
    tools of a body beside its decoded rest, for clients that repeat a conversation with
    another `user` or `stream`. Both hold digests of 256 bits, never text.

    `identity_of` names what answers for a model: its group and version; after a change of that
    mapping `forget` what is memoised. `memo_entries` bounds the first memo. Fewer `key_bytes` make keys collide, for tests.
    """

    def __init__(
        self,
        secret: bytes,
        identity_of: Callable[[str], str],
        *,
        memo_entries: int = 100_000,
        key_bytes: int = KEY_BYTES,
    ) -> None:
        self._secret = secret
        self._identity_of = identity_of
        self._key_mask = (
            None if key_bytes == KEY_BYTES else bytes([255] * key_bytes).ljust(KEY_BYTES, b"\0")
        )
        self._partitions: Memo[tuple[str, ...], Partition] = Memo(_PARTITION_MEMO)
        self._bodies: Memo[bytes, Ask] = Memo(memo_entries)
        self._parts: Memo[tuple[str, bytes], tuple[Key, Check]] = Memo(memo_entries // 2)
        self._checks: Memo[tuple[str, str], Any] = Memo(_PARTITION_MEMO)

    def forget(self) -> None:
        """What answers for a model has changed: every key is made anew."""
        self._bodies.clear()
        self._parts.clear()
        self._checks.clear()

    def partition(
        self, tenant: str, path: str, namespace: str, headers: tuple[str, ...] = ()
    ) -> Partition:
        """Where requests may share answers: one tenant, path and namespace.

        `headers` are those that go upstream and may change an answer, as `name: value`.
        """
        words = (tenant, path, namespace, *headers)
        found = self._partitions[words]
        if found is None:
            name = json.dumps(words)
            salt = hmac.digest(self._secret, b"tenant:" + tenant.encode(), "sha256")
            found = Partition(name, salt, sha256(name.encode() + b"\0"))
            self._partitions.put(words, found)
        return found

    def ask(self, body: bytes, partition: Partition) -> Ask:
        """What the body asks for. Raises RequestError (400) for a body that no engine may see."""
        if len(body) > _MOST_BYTES:
            return _glanced(body)
        digest = partition.started.copy()
        digest.update(body)
        name: bytes = digest.digest()
        ask = self._bodies[name]
        if ask is None:
            ask = self._read(body, partition)
            self._bodies.put(name, ask)
        return ask

    def _read(self, body: bytes, partition: Partition) -> Ask:
        if body.count(b",") > _MOST_VALUES or body.count(b'":') > _MOST_NAMES:
            return _glanced(body)
        parts = _cut(body) if len(body) >= _WORTH_CUTTING_BYTES else None
        name = (partition.name, parts[1] if parts else b"")
        known = self._parts[name] if parts else None
        if parts and known:
            return _ask(parts[0], known)
        try:
            fields = decode(body)
        except InexactError as inexact:
            return _ask(inexact.fields, None)
        digest = self._digest(fields, partition)
        if parts and digest:
            self._parts.put(name, digest)
        return _ask(fields, digest)

    def _digest(self, fields: Mapping[str, Any], partition: Partition) -> tuple[Key, Check] | None:
        """Key and check; None where some number can't be told exactly."""
        try:
            form = canonical(fields)
        except InexactError:
            return None
        digest = self._started(partition, fields.get("model") or "").copy()
        digest.update(form)
        check: bytes = digest.digest()
        key = hashlib.blake2b(check, digest_size=KEY_BYTES, key=self._secret).digest()
        if self._key_mask is not None:
            key = bytes(a & b for a, b in zip(key, self._key_mask, strict=True))
        return Key(key), Check(check)

    def _started(self, partition: Partition, model: str) -> Any:
        """A keyed digest that has read what separates: partition and model."""
        started = self._checks[partition.name, model]
        if started is None:
            head = json.dumps([partition.name, self._identity_of(model)]).encode()
            started = hashlib.blake2b(
                b"%d:%b" % (len(head), head), digest_size=CHECK_BYTES, key=partition.secret
            )
            self._checks.put((partition.name, model), started)
        return started


class InexactError(Exception):
    """A body that is JSON but can't be decoded without loss: it is forwarded, never cached."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__("a value can't be decoded exactly")
        self.fields = fields


def decode(body: bytes) -> dict[str, Any]:
    """The top-level object, floats as spelled. Raises RequestError (400) or InexactError."""
    try:
        fields = jiter.from_json(
            body,
            allow_inf_nan=False,
            catch_duplicate_keys=True,
            float_mode="lossless-float",
            cache_mode="keys",
        )
    except ValueError as error:
        raise _diagnosed(body, str(error)) from None
    return _checked(fields)


def canonical(fields: Mapping[str, Any]) -> bytes:
    """The canonical form of a decoded body: MessagePack, deterministic, and never stored.

    Raises InexactError for a number that loses digits in 64 bits: an engine might tell two such
    bodies apart where their keys can't.

    >>> canonical(decode(b'{"b":[1.0],"model":"m", "user":"u","a":null}')).hex()
    '81a56d6f64656ca16d81a16291c70301312e30'
    """
    folded: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or name in IGNORED:
            continue
        if isinstance(value, (dict, list)) and name not in FOLDED:
            kept[name] = value
        else:
            folded[name] = value
    try:
        form = _FOLDING.encode(folded)
        if kept:
            form += _KEEPING.encode(dict(sorted(kept.items())))
    except (OverflowError, _LosesDigitsError):
        raise InexactError(fields) from None
    return form


class _LosesDigitsError(Exception):
    """A float that comes back from a double as another number."""


def _as_double(number: Any) -> float:
    if not isinstance(number, jiter.LosslessFloat):
        raise TypeError(f"JSON has no {type(number).__name__}")
    spelling = str(number)
    value = float(spelling)
    if len(spelling) <= _SURE_CHARACTERS and "e" not in spelling and "E" not in spelling:
        return value  # fifteen digits always come back (IEEE 754)
    try:
        is_same = isfinite(value) and Decimal(repr(value)) == Decimal(spelling)
    except InvalidOperation:  # an exponent beyond what even a decimal holds
        is_same = False
    if not is_same:
        raise _LosesDigitsError
    return value


def _fold_number(number: Any) -> int | float:
    value = _as_double(number)
    return int(value) if value.is_integer() and abs(value) <= _EXACT_INTEGERS else value


def _spell_number(number: Any) -> msgspec.msgpack.Ext:
    _as_double(number)
    return msgspec.msgpack.Ext(1, bytes(number))


_FOLDING: Final = msgspec.msgpack.Encoder(order="deterministic", enc_hook=_fold_number)
_KEEPING: Final = msgspec.msgpack.Encoder(enc_hook=_spell_number)


class _Envelope(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)


def _cut(body: bytes) -> tuple[dict[str, Any], bytes] | None:
    """The decoded fields of a body without its messages and tools, and a digest of all three.

    None where the body can't be cut with certainty. The two values are found by a parser that
    takes the last of two equal keys, so the rest is decoded by the strict one, with a number in
    each hole: a second `messages` would stand there again, and the hole elsewhere.
    """
    try:
        envelope = _ENVELOPE.decode(body)
        messages, tools = bytes(envelope.messages), bytes(envelope.tools)
        if len(messages) + len(tools) < len(body) // 2:
            return None
        rest = body
        for part in (messages, tools):
            if part:
                rest = rest.replace(part, _HOLE, 1)
        fields = decode(rest)
        if any(
            type(fields.get(name)) is not int or fields[name] != int(_HOLE)
            for name, part in (("messages", messages), ("tools", tools))
            if part
        ):
            return None
        scalars = _KEEPING.encode({name: fields[name] for name in sorted(fields.keys() - IGNORED)})
    except (
        msgspec.MsgspecError,
        ValueError,
        OverflowError,
        RecursionError,
        RequestError,
        InexactError,
        _LosesDigitsError,
    ):
        return None  # the plain way says what is wrong with it
    parts = b"%d:%b%d:%b%b" % (len(messages), messages, len(tools), tools, scalars)
    return fields, sha256(parts).digest()


def _ask(fields: Mapping[str, Any], digest: tuple[Key, Check] | None) -> Ask:
    options = fields.get("stream_options")
    key, check = digest or (Key(bytes(KEY_BYTES)), Check(bytes(CHECK_BYTES)))
    bypass = ""
    if digest is None:
        bypass = "bypass-inexact"
    elif fields.get("store"):
        bypass = "bypass-store"
    return Ask(
        key=key,
        check=check,
        # A lone surrogate in it would break every log line and metric that names the model.
        model=(fields.get("model") or "").encode("utf-8", "replace").decode(),
        sampled=not _is_zero(fields.get("temperature")),
        stream=fields.get("stream") is True,
        include_usage=bool(options and options.get("include_usage")),
        has_stream_options="stream_options" in fields,
        is_bare=_UNSPOKEN.isdisjoint(fields),
        bypass=bypass,
    )


class _Glance(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


def _glanced(body: bytes) -> Ask:
    """What a body of megabytes, or of hundreds of thousands of values, asks for, as far as
    forwarding it must know: its canonical form would hold up everybody else."""
    try:
        seen = msgspec.json.decode(body, type=_Glance)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise RequestError(
            "the body isn't valid JSON of the expected form", status=400, code="invalid-json"
        ) from None
    fields = {name: getattr(seen, name) for name in seen.__struct_fields__}
    given = {name: value for name, value in fields.items() if value is not None}
    return msgspec.structs.replace(_ask(_checked(given), None), bypass="bypass-complex")


def _is_zero(temperature: Any) -> bool:
    """Only an explicit 0 is greedy: an absent temperature means the API's default."""
    if isinstance(temperature, jiter.LosslessFloat):
        return float(temperature) == 0.0
    return type(temperature) is int and temperature == 0


def _checked(fields: Any) -> dict[str, Any]:
    """The fields this gateway must understand have the right type; the rest is the engine's."""
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object", status=400, code="invalid-body")
    for name, kind, expected in (
        ("model", str, "a string"),
        ("stream", bool, "true or false"),
        ("stream_options", dict, "an object"),
    ):
        value = fields.get(name)
        if value is not None and not isinstance(value, kind):
            raise RequestError(
                f"{name} must be {expected}", status=400, code="invalid-field", param=name
            )
    if len(fields.get("model") or "") > _MODEL_CHARACTERS:
        raise RequestError(
            f"model must have at most {_MODEL_CHARACTERS} characters",
            status=400,
            code="invalid-field",
            param="model",
        )
    return fields


class _DuplicateError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _DuplicateError
    return fields


def _refuse_constant(word: str) -> None:
    raise ValueError(word)


_LENIENT: Final = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=str, parse_float=str, parse_constant=_refuse_constant
)


def _diagnosed(body: bytes, why: str) -> Exception:
    """Why the strict parser refused: a fault of the client's, or a value that isn't exact."""
    try:
        fields = _LENIENT.decode(body.decode())
    except _DuplicateError:
        return RequestError(
            "a JSON object in the body names one key twice", status=400, code="duplicate-key"
        )
    except UnicodeDecodeError:
        return RequestError("the body isn't UTF-8", status=400, code="invalid-json")
    except RecursionError:
        return RequestError("the body is nested too deeply", status=400, code="too-deep")
    except ValueError:
        where = why[why.rfind(" at line ") :] if " at line " in why else ""
        return RequestError(f"the body isn't valid JSON{where}", status=400, code="invalid-json")
    if "recursion" in why:
        return RequestError(
            "the body is nested deeper than 200 levels", status=400, code="too-deep"
        )
    try:
        return InexactError(_checked(fields))
    except RequestError as error:
        return error
