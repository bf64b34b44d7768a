"""What `rlpack serve` prints: how to reach the server, and how to make it score a run."""

import shlex

from rlpack.config.hydra_text import hydra_text
from rlpack.config.reward_rules import JUDGE, SERVED_REWARD_MODEL
from rlpack.config.schema import Judge

# Environment variables that OpenAI's client and most others read.
URL_VARIABLE, TOKEN_VARIABLE = "OPENAI_BASE_URL", "OPENAI_API_KEY"


def lines_to_paste(url: str, token_file: str | None) -> list[str]:
    """Return the shell commands that tell clients the URL and the token.

    Args:
        url: base URL.
        token_file: file with the token; None if the user has given the token.
    """
    token = [] if token_file is None else [f'export {TOKEN_VARIABLE}="$(cat {shlex.quote(token_file)})"']
    return [f"export {URL_VARIABLE}={shlex.quote(url)}", *token]


def judge_overrides(url: str, model: str, api_key_env: str, max_length: int) -> list[str]:
    """Return the overrides of `rlpack train` that make a server the judge.

    The judge's answers may take at most half of the length, which leaves room for prompts.

    >>> judge_overrides("http://127.0.0.1:80/v1", "7", "KEY", 512)[1:]
    ['judge.url=http://127.0.0.1:80/v1', "judge.model='7'", 'judge.api_key_env=KEY', 'judge.max_tokens=256']

    Args:
        url: base URL.
        model: the model's name on the server.
        api_key_env: environment variable with the token.
        max_length: longest prompt and answer together, in tokens.
    """
    overrides = [
        f"roles.judge.target={JUDGE}",
        f"judge.url={url}",
        f"judge.model={hydra_text(model)}",
        f"judge.api_key_env={api_key_env}",
    ]
    half = max(1, max_length // 2)
    return [*overrides, f"judge.max_tokens={half}"] if half < Judge().max_tokens else overrides


def reward_model_overrides(url: str, model: str, api_key_env: str, pad_token_id: int | None) -> list[str]:
    """Return the overrides of `rlpack train` that make a server's reward model score a run.

    >>> reward_model_overrides("http://127.0.0.1:80/v1", "m", "KEY", 0)[1:3]
    ['roles.judge.arguments.pad_token_id=0', 'judge.url=http://127.0.0.1:80/v1']

    Args:
        url: base URL.
        model: the model's name on the server.
        api_key_env: environment variable with the token.
        pad_token_id: the padding token of the model.
    """
    padding = [] if pad_token_id is None else [f"roles.judge.arguments.pad_token_id={pad_token_id}"]
    return [
        f"roles.judge.target={SERVED_REWARD_MODEL}",
        *padding,
        f"judge.url={url}",
        f"judge.model={hydra_text(model)}",
        f"judge.api_key_env={api_key_env}",
    ]


def as_command(overrides: list[str]) -> str:
    """Return a command line with overrides, for the user to complete."""
    return shlex.join(["rlpack", "train", *overrides])
