import json
import socket
import struct

import pytest

from rlpack.rewards.pool.protocol import FrameReader, WireError, pack, receive

ODD = {"text": "é🙂\x00\ud800", "number": 0.1, "nothing": None, "list": [1, [2.5, True]], "nan": "NaN"}


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_messages_arrive_whole_however_they_are_cut(size):
    sent, reader, found = pack(ODD) + pack({"a": 1}), FrameReader(), []
    for start in range(0, len(sent), size):
        reader.feed(sent[start : start + size])
        found += list(reader)
    assert found == [ODD, {"a": 1}]


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (struct.pack("!I", 2000), "exceeds the limit of 1000"),
        (struct.pack("!I", 5) + b"hello", "not JSON"),
        (struct.pack("!I", 2) + b"\xff\xff", "not JSON"),
        (struct.pack("!I", 3) + b"[1]", "a list instead of an object"),
        (struct.pack("!I", 900) + b"[" * 900, "not JSON"),
    ],
)
def test_an_invalid_message_is_an_error(sent, text):
    reader = FrameReader(limit=1000)
    reader.feed(sent)
    with pytest.raises(WireError, match=text):
        list(reader)


def test_a_blocking_reader_gets_one_message_and_sees_the_end():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(pack(ODD) + pack({})[:3])
            assert receive(ours) == ODD
        assert receive(ours) is None


def test_values_that_json_can_not_represent_are_refused():
    with pytest.raises(TypeError):
        pack({"a": b"1"})
    assert json.loads(pack({"a": (1, 2)})[4:]) == {"a": [1, 2]}
