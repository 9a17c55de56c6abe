"""Requests that a server must survive: broken, hostile, or meant to be read in two ways."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec

from benchmarks import chat
from benchmarks.rawhttp import HOST, post

MODEL = "m3"  # its own, so that what is booked for good requests stays comparable
SMUGGLED = f"GET /preheat/v1/stats HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()


class BadInput(msgspec.Struct, frozen=True):
    """One kind of it.

    Where `may_pass`, handing it to the engine and passing on whatever it says is right too: the
    gateway doesn't judge what it needn't read.
    """

    name: str
    data: Callable[[str], bytes]  # from the client's key
    may_pass: bool = False


def _body(data: bytes) -> Callable[[str], bytes]:
    return lambda key: post(chat.PATH, data, key=key)


def _fields(**fields: object) -> Callable[[str], bytes]:
    good = {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": "hi"}]}
    return _body(json.dumps(good | fields).encode())


def _headers(lines: str) -> Callable[[str], bytes]:
    good = chat.ask("hi", model=MODEL)
    return lambda key: post(chat.PATH, good, key=key, headers=lines)


def _framed(lines: str, body: bytes) -> Callable[[str], bytes]:
    """A head whose framing is in these lines alone, and a second request behind the first."""

    def data(key: str) -> bytes:
        head = f"POST {chat.PATH} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {key}\r\n"
        return (head + lines + "\r\n").encode("latin-1") + body + SMUGGLED

    return data


_GOOD = chat.ask("hi", model=MODEL)
_CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_GOOD), _GOOD)
_TEXT = b'{"model":"m3","temperature":0,"messages":[{"role":"user","content":"%s"}]}'

KINDS = (
    BadInput("json_cut", _body(_GOOD[:-7])),
    BadInput("json_two_values", _body(_GOOD + _GOOD)),
    BadInput("json_comment", _body(b"/* hi */" + _GOOD)),
    BadInput("json_twice_a_key", _body(b'{"model":"m3",' + _GOOD[1:])),
    BadInput("json_not_an_object", _body(b'["model", "m3"]')),
    BadInput("json_empty", _body(b"")),
    BadInput("json_nan", _body(_GOOD.replace(b'"temperature":0', b'"temperature":NaN'))),
    BadInput("deep_nesting", _body(b'{"model":"m3","messages":' + b"[" * 50_000)),
    BadInput(
        "deep_and_closed",
        _body(b'{"model":"m3","messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
    ),
    BadInput("utf8_broken", _body(_TEXT % b"\xff\xfe\xc3"), may_pass=True),
    BadInput("utf8_surrogate", _body(_TEXT % b"\\ud800"), may_pass=True),
    BadInput("number_too_big", _fields(seed=10**400), may_pass=True),
    BadInput("type_messages", _fields(messages=5), may_pass=True),
    BadInput("type_model", _fields(model=[1]), may_pass=True),
    BadInput("type_temperature", _fields(temperature="hot"), may_pass=True),
    BadInput("type_stream", _fields(stream="yes"), may_pass=True),
    BadInput("model_unknown", _fields(model="none-such"), may_pass=True),
    BadInput("key_unknown", lambda key: post(chat.PATH, _GOOD, key="wrong" + key)),
    BadInput("header_no_colon", _headers("X-Broken\r\n")),
    BadInput("header_space_before_colon", _headers("X-Broken : 1\r\n")),
    BadInput("header_nul", _headers("X-Broken: a\x00b\r\n")),
    BadInput("header_folded", _headers("X-Broken: a\r\n b\r\n")),
    BadInput("header_too_long", _headers(f"X-Long: {'x' * 70_000}\r\n")),
    BadInput("header_too_many", _headers("".join(f"X-N{i}: 1\r\n" for i in range(500)))),
    BadInput("header_ttl", _headers("X-Preheat-Ttl: soon\r\n")),
    BadInput("request_line", lambda key: b"POST\r\n\r\n"),
    BadInput("version", lambda key: b"GET / HTTP/9.9\r\n\r\n"),
    BadInput("not_http", lambda key: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(90)),
    BadInput(
        "smuggle_cl_te", _framed("Content-Length: 6\r\nTransfer-Encoding: chunked\r\n", _CHUNKED)
    ),
    BadInput(
        "smuggle_te_cl",
        _framed(f"Transfer-Encoding: chunked\r\nContent-Length: {len(_CHUNKED)}\r\n", _CHUNKED),
    ),
    BadInput(
        "smuggle_cl_cl", _framed(f"Content-Length: {len(_GOOD)}\r\nContent-Length: 3\r\n", _GOOD)
    ),
    BadInput("smuggle_cl_list", _framed(f"Content-Length: {len(_GOOD)}, 3\r\n", _GOOD)),
    BadInput("smuggle_cl_sign", _framed(f"Content-Length: +{len(_GOOD)}\r\n", _GOOD)),
    BadInput("smuggle_te_unknown", _framed("Transfer-Encoding: xchunked\r\n", _CHUNKED)),
    BadInput("smuggle_te_twice", _framed("Transfer-Encoding: chunked, identity\r\n", _CHUNKED)),
    BadInput(
        "smuggle_chunk_size",
        _framed("Transfer-Encoding: chunked\r\n", b"0x%x\r\n%s\r\n0\r\n\r\n" % (len(_GOOD), _GOOD)),
    ),
)
