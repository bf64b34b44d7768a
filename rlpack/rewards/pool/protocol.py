"""The wire protocol of the pool: length-prefixed JSON objects over a socket.

Messages are JSON and not pickle, because user code may have taken over the process that sends them. A message over the
reader's limit, or one that is not a JSON object, is an error.
"""

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

WireMessage = dict[str, Any]

MAX_MESSAGE_BYTES = 1 << 30
_HEADER = struct.Struct("!I")


class WireError(RuntimeError):
    """The received bytes are not a valid message."""


def pack(message: WireMessage) -> bytes:
    """Return the bytes that encode a message.

    >>> pack({"a": 1})[4:]
    b'{"a": 1}'

    Raises:
        TypeError: it holds a value that JSON can't represent.
    """
    text = json.dumps(message, ensure_ascii=True).encode("ascii")
    return _HEADER.pack(len(text)) + text


class FrameReader:
    """Reassembles messages from a byte stream.

    >>> reader = FrameReader(limit=100)
    >>> reader.feed(pack({"a": 1}) + pack({"b": 2})[:5])
    >>> list(reader)
    [{'a': 1}]
    """

    def __init__(self, limit: int = MAX_MESSAGE_BYTES) -> None:
        """Refuse messages of more than `limit` bytes."""
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._buffer += data

    def __iter__(self) -> Iterator[WireMessage]:
        """Yield the complete messages.

        Raises:
            WireError: one is too long, or not a JSON object.
        """
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > self._limit:
                raise WireError(f"a message of {length} bytes exceeds the limit of {self._limit}")
            if len(self._buffer) < _HEADER.size + length:
                return
            text = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
            del self._buffer[: _HEADER.size + length]
            yield _parse(text)


def receive(sock: socket.socket) -> WireMessage | None:
    """Receive one message from a blocking socket; return None once the other side has closed it."""
    header = _receive_exactly(sock, _HEADER.size)
    if header is None:
        return None
    text = _receive_exactly(sock, _HEADER.unpack(header)[0])
    return None if text is None else _parse(text)


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        try:
            chunk = sock.recv(min(count - len(received), 1 << 20))
        except ConnectionResetError:
            return None
        if not chunk:
            return None
        received += chunk
    return bytes(received)


def _parse(text: bytes) -> WireMessage:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"a {type(message).__name__} instead of an object")
    return message
