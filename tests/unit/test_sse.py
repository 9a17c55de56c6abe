"""Server-sent events: bytes to blocks, blocks to data."""

import pytest

from preheat.wire.sse import EventTooLargeError, SseDecoder, data_of


def blocks_of(*pieces: bytes) -> list[bytes]:
    decoder = SseDecoder()
    return [block for piece in pieces for block in decoder.feed(piece)]


def test_a_block_keeps_its_bytes() -> None:
    assert blocks_of(b"data: a\n\ndata: b\r\n\r\n") == [b"data: a\n\n", b"data: b\r\n\r\n"]


def test_what_has_no_blank_line_yet_waits() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: a\n") == []
    assert decoder.rest == b"data: a\n"
    assert decoder.feed(b"\nda") == [b"data: a\n\n"]
    assert decoder.rest == b"da"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_ends_lines(end: bytes) -> None:
    whole = b"data: a" + end + b"data: b" + end + end + b"data: c" + end + end
    assert [data_of(block) for block in blocks_of(whole)] == [b"a\nb", b"c"]


def test_a_blank_line_cut_between_cr_and_lf_is_one_blank_line() -> None:
    assert blocks_of(b"data: a\r\n\r", b"\ndata: b\r\n\r\n") == [
        b"data: a\r\n\r\n",
        b"data: b\r\n\r\n",
    ]


def test_an_event_of_carriage_returns_is_not_held_back() -> None:
    assert blocks_of(b"data: a\r\r") == [b"data: a\r\r"]


@pytest.mark.parametrize(
    "pieces", [[b"\xef\xbb\xbfdata: a\n\n"], [b"\xef", b"\xbb", b"\xbfdata: a\n\n"]]
)
def test_a_byte_order_mark_at_the_start_is_not_part_of_it(pieces: list[bytes]) -> None:
    assert blocks_of(*pieces) == [b"data: a\n\n"]


def test_a_byte_order_mark_later_is_data() -> None:
    assert data_of(blocks_of(b"\n\n", b"data: \xef\xbb\xbf\n\n")[1]) == b"\xef\xbb\xbf"


def test_an_event_that_never_ends_is_refused() -> None:
    decoder = SseDecoder(limit_bytes=10)
    assert decoder.feed(b"data: a\n\ndata: b\n\n12345") == [b"data: a\n\n", b"data: b\n\n"]
    decoder.feed(b"67890")
    with pytest.raises(EventTooLargeError):
        decoder.feed(b"1")


@pytest.mark.parametrize(
    ("block", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\n\n", b"a"),
        (b"data:  a\n\n", b" a"),
        (b"data: \n\n", b""),
        (b"data:\n\n", b""),
        (b"data\n\n", b""),
        (b"data: a\ndata\ndata:b\n\n", b"a\n\nb"),
        (b"event: x\nid: 7\ndata: a\nretry: 5\n\n", b"a"),
        (b": comment\ndata: a\n\n", b"a"),
        (b"data: a\r\n\r\n", b"a"),
        (b"data: [DONE]\n\n", b"[DONE]"),
        (b": comment\n\n", None),
        (b"\n\n", None),
        (b"event: ping\n\n", None),
        (b"database: a\n\n", None),
        (b" data: a\n\n", None),
    ],
)
def test_data_is_what_the_data_lines_say(block: bytes, data: bytes | None) -> None:
    assert data_of(block) == data


@pytest.mark.parametrize(
    ("block", "data"),
    [(b"data: [DONE]\r\n\n", b"[DONE]"), (b"data: a\rdata: b\n\n", b"a\nb")],
)
def test_lines_of_one_block_may_end_differently(block: bytes, data: bytes) -> None:
    assert data_of(block) == data
