"""Frames survive any cut, and nothing that is no frame gets through or costs memory."""

import contextlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.wire.frames import (
    Frame,
    FrameError,
    FrameReader,
    address_text,
    join_payloads,
    number_field,
    pack_answer,
    pack_frame,
    split_address,
    split_payloads,
    text_field,
    whole_field,
)

LIMITS = {"max_header_bytes": 1000, "max_body_bytes": 1000}
HEADERS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20), max_size=4)


def read_all(reader):
    frames = []
    while (frame := reader.next()) is not None:
        frames.append(frame)
    return frames


@given(st.lists(st.tuples(HEADERS, st.binary(max_size=50)), max_size=4), st.data())
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(frames, data):
    stream = b"".join(pack_frame(header, body) for header, body in frames)
    reader, came = FrameReader(**LIMITS), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        reader.feed(stream[:cut])
        came += read_all(reader)
        stream = stream[cut:]
    assert came == [Frame(header, body) for header, body in frames]


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_refused_or_waited_for_and_never_anything_else(garbage, has_magic):
    reader = FrameReader(**LIMITS)
    reader.feed(b"SHL1" * has_magic + garbage)
    try:
        read_all(reader)
    except FrameError:
        return
    assert len(reader._buffer) <= 204


@pytest.mark.parametrize(
    "hostile",
    [
        b"G",
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00",  # a TLS hello
        struct.pack("!4sIQ", b"SHL1", 1001, 0),
        struct.pack("!4sIQ", b"SHL1", 2**32 - 1, 0),
        struct.pack("!4sIQ", b"SHL1", 2, 2**64 - 1),
        struct.pack("!4sIQ", b"SHL1", 2, 0) + b"[]",
        struct.pack("!4sIQ", b"SHL1", 2, 0) + b"{]",
        struct.pack("!4sIQ", b"SHL1", 2, 0) + b"\xff\xfe",
        struct.pack("!4sIQ", b"SHL1", 0, 0),
        struct.pack("!4sIQ", b"SHL1", 1000, 0) + b"[" * 1000,
        struct.pack("!4sIQ", b"SHL1", 1000, 0) + b"9" * 1000,
    ],
)
def test_invalid_frame_is_refused_as_early_as_possible(hostile):
    reader = FrameReader(**LIMITS)
    reader.feed(hostile)
    with pytest.raises(FrameError):
        reader.next()


def test_deep_nesting_is_refused():
    header = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    reader = FrameReader(max_header_bytes=10**6, max_body_bytes=0)
    reader.feed(struct.pack("!4sIQ", b"SHL1", len(header), 0) + header)
    with pytest.raises(FrameError):
        reader.next()


@given(st.lists(st.binary(max_size=20) | st.sampled_from([b"", b"same"]), max_size=9))
def test_payloads_are_joined_and_split(payloads):
    assert split_payloads(join_payloads(payloads), len(payloads)) == payloads


@given(st.lists(st.sampled_from([b"", b"a", b"bc"]), max_size=5), st.data())
def test_an_answer_that_was_changed_gives_payloads_or_is_refused(payloads, data):
    body = bytearray(join_payloads(payloads))
    for offset in data.draw(st.lists(st.integers(0, max(0, len(body) - 1)), max_size=2)):
        body[offset : offset + 1] = data.draw(st.binary(max_size=2))
    with contextlib.suppress(FrameError):
        assert all(
            isinstance(payload, bytes) for payload in split_payloads(bytes(body), len(payloads))
        )


def test_the_short_cut_for_answers_is_the_same_frame():
    assert pack_answer(7, "ok", b"x") == pack_frame({"ticket": 7, "is": "ok"}, b"x")


def test_answers_do_not_grow_with_the_job_where_processes_bring_the_same():
    assert join_payloads([b""] * 10_000) == b""
    assert len(join_payloads([b"digest"] * 10_000)) == len(join_payloads([b"digest"]))
    for count in (9, 10_000):
        from_one = [b""] * (count - 1)
        assert len(join_payloads([*from_one[:5], b"value", *from_one[5:]])) == 49


@pytest.mark.parametrize("body", [b"\0", b"\0\0\0\1\0\0\0\1a", b"\0\0\0\1\0\0\0\1abc"])
def test_an_answer_that_does_not_add_up_is_refused(body):
    with pytest.raises(FrameError):
        split_payloads(body, 2)


def test_fields_have_the_type_they_must_have():
    header = json.loads('{"t": "x", "n": 3, "b": true, "f": 1.5, "nan": NaN, "none": null}')
    assert (text_field(header, "t"), whole_field(header, "n")) == ("x", 3)
    assert (number_field(header, "f"), number_field(header, "none")) == (1.5, float("inf"))
    for field, name in [
        (text_field, "n"), (text_field, "absent"), (whole_field, "b"), (whole_field, "f"),
        (number_field, "nan"), (number_field, "b"), (number_field, "t"), (number_field, "absent"),
    ]:  # fmt: skip
        with pytest.raises(FrameError, match=name):
            field(header, name)


@pytest.mark.parametrize("pair", [("10.0.0.1", 8476), ("::1", 80), ("head-node", 65535)])
def test_addresses_go_there_and_back(pair):
    assert split_address(address_text(*pair)) == pair


@pytest.mark.parametrize("bad", ["", "host", "host:", ":80", "host:x", "host:70000", "host:-1"])
def test_invalid_addresses_are_refused(bad):
    with pytest.raises(ValueError, match="is not an address"):
        split_address(bad)


def test_equal_frames_share_one_immutable_header():
    reader = FrameReader(max_header_bytes=1000, max_body_bytes=1000)
    reader.feed(pack_frame({"do": "arrive", "step": 3}, b"a") * 2)
    first, second = reader.next(), reader.next()
    assert first == second
    assert first.header is second.header
    with pytest.raises(TypeError):
        first.header["step"] = 4


def test_an_answer_without_a_ticket_says_only_what_it_is():
    assert pack_answer(0, "ok", b"x") == pack_frame({"is": "ok"}, b"x")
