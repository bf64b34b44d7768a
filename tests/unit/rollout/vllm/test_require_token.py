"""Requests without the token reach nothing but /health, whatever their path."""

import asyncio

import pytest

from rlpack.rollout.vllm.require_token import TOKEN_VARIABLE, RequireToken

TOKEN = "a-secret-of-many-characters"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


def answer(kind: str = "http", path: str = "/v1/models", header: str | None = None, method: str = "GET"):
    """Return the first message that a request gets."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        raise AssertionError("the middleware reads no body")

    headers = [(b"host", b"x")] + ([] if header is None else [(b"authorization", header.encode())])
    scope = {"type": kind, "path": path, "headers": headers, "method": method}
    asyncio.run(RequireToken(app)(scope, receive, send))
    return sent[0]


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


@pytest.mark.parametrize("path", ["/v1/models", "/invocations", "/metrics", "/docs", "/", "/health/x", "/tokenize", ""])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_every_path_needs_the_token(path, method):
    assert answer(path=path, method=method)["status"] == 401
    assert answer(path=path, method=method, header=f"Bearer {TOKEN}")["status"] == 200


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer a"])
def test_another_token_or_scheme_is_refused(header):
    assert answer(header=header)["status"] == 401


def test_a_scheme_is_read_in_any_case():
    assert answer(header=f"bearer {TOKEN}")["status"] == 200


def test_health_is_open_to_requests_alone():
    assert answer(path="/health")["status"] == 200
    assert answer("websocket", path="/health") == {"type": "websocket.close", "code": 1008}


def test_a_websocket_without_the_token_is_closed():
    assert answer("websocket", path="/v1/realtime") == {"type": "websocket.close", "code": 1008}
    assert answer("websocket", path="/v1/realtime", header=f"Bearer {TOKEN}")["status"] == 200


def test_events_of_the_server_itself_pass():
    assert answer("lifespan")["status"] == 200


@pytest.mark.parametrize("value", [None, ""])
def test_a_server_without_a_token_does_not_start(monkeypatch, value):
    if value is None:
        monkeypatch.delenv(TOKEN_VARIABLE)
    else:
        monkeypatch.setenv(TOKEN_VARIABLE, value)
    with pytest.raises(ValueError, match="VLLM_API_KEY is not set"):
        RequireToken(app)
