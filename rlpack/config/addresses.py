"""The syntax of addresses of Ray clusters."""

import re
from collections.abc import Iterator

_ADDRESS = re.compile(r"auto|([a-z]+://)?[^\s/]+:(?P<port>\d{1,5})")
_LARGEST_PORT = 65535


def address_problems(address: str | None) -> Iterator[str]:
    """Yield a problem unless an address is None, `auto` or host:port.

    >>> list(address_problems("10.0.0.1:6379")), len(list(address_problems("10.0.0.1:99999")))
    ([], 1)
    """
    if address is None:
        return
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"] or 1) <= _LARGEST_PORT:
        yield (
            f"placement.address is {address!r}; set it to auto, to host:port with a port from 1 to {_LARGEST_PORT}, or "
            "to null, which starts a cluster for the run"
        )
