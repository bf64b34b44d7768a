"""Run vLLM's server for `rlpack serve`: its private folder, its token, and what the command prints."""

import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import PreTrainedConfig

from rlpack.cli.error_text import print_error
from rlpack.cli.serve_output import TOKEN_VARIABLE, as_command, judge_overrides, lines_to_paste, reward_model_overrides
from rlpack.cli.serve_request import ServeRequest
from rlpack.config.errors import to_config_error
from rlpack.config.schema import Model
from rlpack.data.tokenization import holds_character_tokenizer
from rlpack.models.loading import load_config
from rlpack.rewards.errors import RewardError
from rlpack.rewards.reward_model_client import classify_url, read_score
from rlpack.rewards.score_requests import AttemptFailedError
from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm import require_token
from rlpack.rollout.vllm.classifier_arguments import is_classifier, pad_token
from rlpack.rollout.vllm.process_variables import DEFAULT_VARIABLES, process_variables
from rlpack.rollout.vllm.server_arguments import command_line, server_arguments
from rlpack.rollout.vllm.server_process import base_url, started_server

_TOKEN_BYTES = 32
_LOG, _TOKEN, _TOKENIZER = "vllm.log", "token", "tokenizer"
# Every file of a tokenizer, and no file of a model.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_ANSWER_S = 120.0  # before the first answer, vLLM may compile
_LOOPBACK = "127.0.0.1"


def serve_model(request: ServeRequest) -> int:
    """Start the server, print how to use it, and wait until a signal ends it; return the exit code.

    Raises:
        ConfigError: an option doesn't fit the model.
        ModelError: the model's config can't be loaded.
        KeyboardInterrupt: a signal came before the server was ready.
    """
    with _private_folder() as folder:
        config, arguments = _arguments(request, folder)
        token = request.token or _written_token(folder)
        log = folder / _LOG
        print(f"rlpack serve: starting vLLM for {request.model.path}; its output is in {log}", file=sys.stderr)
        is_ready, begin = False, time.monotonic()
        try:
            with started_server(command_line(arguments), _environment(request, arguments, token), log) as server:
                port = server.wait_until_ready(request.options.host, request.options.port, request.start_timeout_s)
                is_ready = True
                _print_usage(request, config, port, token, folder, time.monotonic() - begin)
                server.wait_for_end()
        except EngineError as error:
            _keep_log_alone(folder)
            print_error("serve", str(error))
            return 1
        except KeyboardInterrupt:
            if not is_ready:
                raise
            print("rlpack serve: stopped", file=sys.stderr)
    return 0


def _arguments(request: ServeRequest, folder: Path) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return the model's config and the arguments of vLLM's server."""
    model, given = request.model, request.options.vllm
    trusts = given.get("trust_remote_code") is True
    section = Model(path=model.path, revision=given.get("revision"), trust_remote_code=trusts)
    try:
        config = load_config(section, key="MODEL_OR_RUN")
        arguments = server_arguments(config, request.options, model=model.path, name=model.name)
    except EngineError as error:
        raise to_config_error(str(error)) from error
    if model.folder is not None and "tokenizer" not in given and holds_character_tokenizer(model.folder):
        arguments["tokenizer"] = str(_tokenizer_alone(model.folder, folder / _TOKENIZER))
    return config, arguments


def _tokenizer_alone(model: Path, target: Path) -> Path:
    """Link a model's tokenizer into a folder without a config, which would replace a character tokenizer's class."""
    target.mkdir()
    for name in _TOKENIZER_FILES:
        if (model / name).is_file():
            (target / name).symlink_to(model / name)
    return target


def _environment(request: ServeRequest, arguments: dict[str, Any], token: str) -> dict[str, str]:
    """Return the environment variables of vLLM's process."""
    variables = process_variables(
        num_threads=torch.get_num_threads(),
        on_gpu=request.options.on_gpu,
        enforce_eager=bool(arguments["enforce_eager"]),
    )
    # vLLM's processes talk to each other on one machine.
    defaults = {**DEFAULT_VARIABLES, "VLLM_HOST_IP": _LOOPBACK}
    return {**defaults, **os.environ, **variables, require_token.TOKEN_VARIABLE: token}


def _written_token(folder: Path) -> str:
    """Write a new token to a file that only this user can read, and return it."""
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    descriptor = os.open(folder / _TOKEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return token


def _print_usage(
    request: ServeRequest, config: PreTrainedConfig, port: int, token: str, folder: Path, seconds: float
) -> None:
    """Print how clients and a run reach the server, after a first answer."""
    local = f"{base_url(request.options.host, port)}/v1"
    with httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=_ANSWER_S, trust_env=False) as client:
        served = _models(client, local)
        name, max_length = str(served["id"]), int(served["max_model_len"])
        if is_classifier(config):
            _check_scores(client, local, name)
        why_no_chat = "" if is_classifier(config) else _why_no_chat(client, local, name)
    url = _public_url(request.options.host, port)
    print(f"{name} is ready after {seconds:.0f} s; prompt and response have up to {max_length} tokens together")
    token_file = str(folder / _TOKEN) if request.token is None else None
    print(*lines_to_paste(url, token_file), sep="\n")
    token_env = request.token_env or TOKEN_VARIABLE
    if is_classifier(config):
        overrides = reward_model_overrides(url, name, token_env, pad_token(config))
        print(f"as a reward model, in a shell with these variables:\n{as_command(overrides)}")
    elif why_no_chat:
        print(
            f"chat requests, and therefore judges, don't work; completions do. vLLM says: {why_no_chat} Set "
            "vllm.chat_template=<file or text>"
        )
    else:
        overrides = judge_overrides(url, name, token_env, max_length)
        print(f"as a judge, in a shell with these variables:\n{as_command(overrides)}")
    print("Ctrl-C ends the server", flush=True)


def _check_scores(client: httpx.Client, url: str, name: str) -> None:
    """Check that the server scores a row of tokens.

    Raises:
        EngineError: it doesn't give one finite number.
    """
    address = classify_url(url)
    try:
        answer = client.post(address, json={"model": name, "input": [[0]], "use_activation": False})
        result = read_score(answer.raise_for_status().text, address)
    except (httpx.HTTPError, AttemptFailedError, RewardError) as error:
        raise EngineError(f"vLLM's server started, but doesn't score a row: {error}") from error
    if result.problem:
        raise EngineError(f"vLLM's server started, but doesn't score a row: {result.detail}")


def _models(client: httpx.Client, url: str) -> dict[str, Any]:
    """Return the server's description of its model.

    Raises:
        EngineError: it doesn't answer.
    """
    try:
        return client.get(f"{url}/models").raise_for_status().json()["data"][0]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise EngineError(f"vLLM's server started, but doesn't list its model: {error}") from error


def _why_no_chat(client: httpx.Client, url: str, name: str) -> str:
    """Return why the server refuses chats, such as a missing chat template; "" if it answers one."""
    chat = {"model": name, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
    try:
        answer = client.post(f"{url}/chat/completions", json=chat)
        return "" if answer.is_success else str(answer.json()["error"]["message"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}."


def _public_url(host: str, port: int) -> str:
    """Return the URL for clients, which may be on other machines if the server listens on all addresses."""
    return f"{base_url(socket.gethostname() if host in {'0.0.0.0', '::'} else host, port)}/v1"


@contextmanager
def _private_folder() -> Iterator[Path]:
    """Make a folder that only this user can read, and delete it at the end, unless only the log is left in it."""
    folder = Path(tempfile.mkdtemp(prefix="rlpack-serve-"))  # mode 0700
    try:
        yield folder
    finally:
        if [path.name for path in folder.iterdir()] != [_LOG]:
            shutil.rmtree(folder, ignore_errors=True)


def _keep_log_alone(folder: Path) -> None:
    """Delete all but the log, which the error names."""
    (folder / _TOKEN).unlink(missing_ok=True)
    shutil.rmtree(folder / _TOKENIZER, ignore_errors=True)
