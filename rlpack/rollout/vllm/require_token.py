"""ASGI middleware that requires the token of `rlpack serve` on every path of vLLM's server.

vLLM's own check covers only paths such as `/v1`; `/invocations` and `/generative_scoring`, among others, would run the
model for anyone. It runs in vLLM's process, which imports it by name (`--middleware`).
"""

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_VARIABLE = "VLLM_API_KEY"
# Reports only that the server is ready.
OPEN_PATH = "/health"
_UNAUTHORIZED = 401
_POLICY_VIOLATION = 1008

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequireToken:
    """Answers requests without the token with status 401."""

    def __init__(self, app: App) -> None:
        """Read the token from the environment.

        Raises:
            ValueError: there is none.
        """
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise ValueError(f"the environment variable {TOKEN_VARIABLE} is not set, but every request needs a token")
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an event on, or refuse it."""
        kind = scope["type"]
        if kind not in {"http", "websocket"} or (kind == "http" and scope["path"] == OPEN_PATH) or self._knows(scope):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            body = b'{"error": {"message": "the token is missing or wrong", "code": 401}}'
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": _UNAUTHORIZED, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _knows(self, scope: Scope) -> bool:
        """Return whether a request has the token, compared in constant time."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if given else (b"", b"", b"")
        return scheme.lower() == b"bearer" and secrets.compare_digest(token, self._token)
