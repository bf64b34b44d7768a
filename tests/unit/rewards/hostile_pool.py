"""Hostile functions that attack the pool's own modules and protocol."""

import atexit
import gc
import json
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress


def replaces_json(files):
    json.dumps = json.loads = lambda *_, **__: time.sleep(60)


def replaces_the_protocol(files):
    from rlpack.rewards.pool import protocol

    protocol.pack = lambda message: b"\xff\xff\xff\xff"


def forgets_every_module(files):
    for name in list(sys.modules):
        sys.modules[name] = None  # type: ignore[assignment]


def replaces_standard_output(files):
    class Stream:
        def flush(self):
            raise KeyboardInterrupt

        def write(self, text):
            return len(text)

    sys.stdout = sys.stderr = Stream()


def hangs_at_exit(files):
    atexit.register(time.sleep, 60)
    threading._register_atexit(time.sleep, 60)
    threading.Thread(target=time.sleep, args=(60,)).start()


def refuses_every_audit_event(files):
    sys.addaudithook(lambda *_: time.sleep(60))


def stops_the_collector(files):
    gc.disable()
    gc.callbacks.append(lambda *_: time.sleep(60))
    sys.setswitchinterval(1e6)
    sys.settrace(lambda *_: time.sleep(60))
    threading.settrace(lambda *_: time.sleep(60))


def warns_for_ever(files):
    warnings.simplefilter("always")
    while True:
        warnings.warn("x" * 1000, stacklevel=1)


def pool_descriptors() -> Iterator[socket.socket]:
    for number in range(3, 64):
        with suppress(OSError):
            yield socket.socket(fileno=number)


def announces_a_message_that_never_comes(files):
    for channel in pool_descriptors():
        channel.sendall(struct.pack("!I", 1 << 19))
        time.sleep(60)


def floods_the_pool(files):
    message = json.dumps({"row": 0, "result": [1.0, None, ""], "id": 1}).encode()
    for channel in pool_descriptors():
        while True:
            channel.sendall(struct.pack("!I", len(message)) + message)


def stops_reading(files):
    for channel in pool_descriptors():
        channel.shutdown(socket.SHUT_RD)
        channel.detach()


def claims_to_be_done(files):
    message = json.dumps({"done": 1, "leftovers": False}).encode()
    for channel in pool_descriptors():
        channel.sendall(struct.pack("!I", len(message)) + message)
        time.sleep(60)
