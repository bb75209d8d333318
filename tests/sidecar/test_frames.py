# SPDX-License-Identifier: Apache-2.0
"""Frames of the handshake on the unix socket."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atp_sidecar.frames import MAX_FRAME_BYTES, FrameError, decode, encode, read_frame


def read(data: bytes) -> object:
    async def run() -> object:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader)

    return asyncio.run(run())


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(), st.booleans(), st.none()), max_size=4))
def test_round_trip(fields: dict[str, object]) -> None:
    message = {**fields, "type": "x"}
    assert read(encode(message)) == message


@given(st.binary(max_size=64))
def test_any_bytes_give_a_message_an_end_or_a_named_error(data: bytes) -> None:
    try:
        message = read(data)
    except FrameError:
        return
    assert message is None or isinstance(message, dict)


def test_end_between_frames() -> None:
    assert read(b"") is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\0\0", "inside a frame"),
        (b"\0\0\0\x05{}", "inside a frame"),
        (b"\xff\xff\xff\xff", f"exceeds {MAX_FRAME_BYTES}"),
        (b"\0\0\0\x02[]", "not a JSON object"),
        (b"\0\0\0\x02{}", 'with a "type"'),
        (b"\0\0\0\x01{", "not JSON"),
    ],
)
def test_bad_bytes(data: bytes, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        read(data)


def test_too_large() -> None:
    with pytest.raises(FrameError, match="exceeds"):
        encode({"type": "x" * MAX_FRAME_BYTES})
    with pytest.raises(FrameError):
        decode(b"1")
