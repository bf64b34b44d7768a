"""How the pool and its processes talk: JSON objects with their length before them, over a socket.

JSON and no pickle, since what a process answers may have been written by whatever took it over. A message over
the reader's limit, or one that is no JSON object, is an error and never a guess.
"""

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

_HEAD = struct.Struct("!I")
LARGEST_MESSAGE = 1 << 30


class WireError(RuntimeError):
    """What came is no message."""


def pack(message: Message) -> bytes:
    """Return a message as it is sent.

    >>> pack({"a": 1})[4:]
    b'{"a": 1}'

    Raises:
        TypeError: it holds what JSON has no form for.
    """
    text = json.dumps(message, ensure_ascii=True).encode("ascii")
    return _HEAD.pack(len(text)) + text


class Reader:
    """Puts messages together from the bytes that come.

    >>> reader = Reader(limit=100)
    >>> reader.feed(pack({"a": 1}) + pack({"b": 2})[:5])
    >>> list(reader)
    [{'a': 1}]
    """

    def __init__(self, limit: int = LARGEST_MESSAGE) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the bytes that came next."""
        self._buffer += data

    def __iter__(self) -> Iterator[Message]:
        """Yield the messages that are whole.

        Raises:
            WireError: one is too long, or no JSON object.
        """
        while len(self._buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer)
            if length > self._limit:
                raise WireError(f"a message of {length} bytes, over the limit of {self._limit}")
            if len(self._buffer) < _HEAD.size + length:
                return
            text = bytes(self._buffer[_HEAD.size : _HEAD.size + length])
            del self._buffer[: _HEAD.size + length]
            yield _parsed(text)


def receive(sock: socket.socket) -> Message | None:
    """Wait for one message on a blocking socket; None when the other side is gone."""
    head = _exactly(sock, _HEAD.size)
    if head is None:
        return None
    text = _exactly(sock, _HEAD.unpack(head)[0])
    return None if text is None else _parsed(text)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = sock.recv(min(count - len(parts), 1 << 20))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def _parsed(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"a {type(message).__name__} and no object")
    return message
