"""The command line of `rlpack serve`, and its checks; nothing is started."""

import argparse
import difflib
import errno
import ipaddress
import math
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rlpack.config.errors import ConfigError, to_config_error
from rlpack.installation import how_to_install
from rlpack.rollout.vllm.argument_names import SERVER_OWN_ARGUMENTS, argument_problems
from rlpack.rollout.vllm.server_options import ServerOptions
from rlpack.rollout.vllm.vllm_package import CPU_PACKAGE, installation_problem, installed_version, package_for
from rlpack.startup.served_model import ServedModel, find_served_model

_EPILOG = """\
examples:
  rlpack serve runs/mine                                   the model that a run has exported
  rlpack serve Qwen/Qwen3-0.6B --max-length 4096           a model of the Hub
  rlpack serve path/to/reward_model                        a sequence classifier with one label
  rlpack serve path/to/model vllm.chat_template=chat.jinja

vllm.<argument>=value passes any other argument of vLLM's engine or server, by vLLM's name. Every request except /health
needs the header Authorization: Bearer <token>. Each start writes a new token to a file that only you can read, unless
--token-env names a variable with yours. Ctrl-C ends the server.
"""
OPTIONS = ("--host", "--port", "--max-length", "--dtype", "--kv-cache-gb", "--token-env", "--start-timeout")
_ARGUMENT = re.compile(r"vllm\.(\w+)=")
_TOKEN = re.compile(r"[!-~]+")
_SHORTEST_TOKEN = 16
_LAST_PORT = 65_535


@dataclass(frozen=True)
class ServeRequest:
    """What to serve, and how.

    Attributes:
        model: the model.
        options: options of the server.
        token: given by the user; None for a new one.
        token_env: the environment variable that it was read from.
        start_timeout_s: deadline for the start, in seconds.
    """

    model: ServedModel
    options: ServerOptions
    token: str | None = field(default=None, repr=False)
    token_env: str | None = None
    start_timeout_s: float = 900.0


def serve_request(parsed: argparse.Namespace, words: Sequence[str], environment: Mapping[str, str]) -> ServeRequest:
    """Parse a command line.

    Args:
        parsed: the options.
        words: the other words.
        environment: the process's environment variables.

    Raises:
        ConfigError: an option is wrong, vLLM is missing or doesn't fit, or the port is in use.
        EngineError: the names of vLLM's arguments can't be read.
        ModelError: there is no such model.
    """
    arguments = vllm_arguments(words)
    host = _address(parsed.host)
    token = None if parsed.token_env is None else _token(parsed.token_env, environment)
    if token is None and not ipaddress.ip_address(host).is_loopback:
        raise to_config_error(
            f"--host is {parsed.host}, which other machines can reach, but no token is given; set an environment "
            "variable to a secret that they also have, and pass its name as --token-env. Traffic is not encrypted"
        )
    on_gpu = _on_gpu()
    if problem := installation_problem(on_gpu=on_gpu):
        raise to_config_error(f"{problem}; {how_to_install(package_for(on_gpu=on_gpu), environment)}")
    own = SERVER_OWN_ARGUMENTS
    if problems := list(argument_problems(arguments, on_gpu=on_gpu, section="vllm", own=own, of_server=True)):
        raise ConfigError(problems)
    _check_port(host, parsed.port)
    return ServeRequest(
        model=find_served_model(parsed.model),
        options=ServerOptions(
            *(host, parsed.port, parsed.max_length, parsed.dtype, parsed.kv_cache_gb, arguments, on_gpu)
        ),
        token=token,
        token_env=parsed.token_env,
        start_timeout_s=parsed.start_timeout,
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of everything but arguments of vLLM."""
    result = argparse.ArgumentParser(
        prog="rlpack serve",
        usage="rlpack serve MODEL_OR_RUN [options] [vllm.<argument>=value …]",
        description="Start vLLM's OpenAI-compatible server for a model. Requests need a token. By default, only this "
        "machine can connect (--host).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("model", metavar="MODEL_OR_RUN", help="a model's folder or Hub name, or a run's directory")
    result.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1); others than "
                        "loopback need --token-env")  # fmt: skip
    result.add_argument("--port", type=_port, default=0, metavar="N", help="0 for any free port (default)")
    result.add_argument("--max-length", type=_count, metavar="N", help="longest prompt and response together, "
                        "in tokens (default: the model's limit, as far as the cache has room)")  # fmt: skip
    result.add_argument("--dtype", choices=("fp32", "bf16"), help="of weights and cache (default: that of the files)")
    result.add_argument("--kv-cache-gb", type=_positive, metavar="X", help="size of the cache of keys and values on "
                        "all GPUs together (default: on CPUs at most an eighth of the available memory)")  # fmt: skip
    result.add_argument("--token-env", metavar="NAME", help="environment variable with the token to use")
    result.add_argument("--start-timeout", type=_positive, default=900.0, metavar="S", help="deadline for the "
                        "start, in seconds (default: 900)")  # fmt: skip
    return result


def vllm_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return vLLM's arguments from the words that are not options; they have Hydra's syntax.

    >>> vllm_arguments(["vllm.max_num_seqs=8", "vllm.chat_template='{{ messages }}'"])
    {'max_num_seqs': 8, 'chat_template': '{{ messages }}'}

    Raises:
        ConfigError: a word has another form.
    """
    arguments: dict[str, Any] = {}
    for word in words:
        match = _ARGUMENT.match(word)
        if match is None:
            raise to_config_error(_unknown_word(word))
        try:
            override = OverridesParser.create().parse_override(word)
            if override.is_sweep_override():
                raise to_config_error(
                    f"{word} has several values; write a list as vllm.{match[1]}=[a,b], or quote the value"
                )
            arguments[match[1]] = override.value()
        except HydraException as error:
            raise to_config_error(f"{word} can't be read: {str(error).splitlines()[0]}; quote its value") from error
    return arguments


def _unknown_word(word: str) -> str:
    """Return what is wrong with a word that is neither option nor argument of vLLM."""
    name = word.partition("=")[0]
    if not word.startswith("-"):
        return f"{word!r} is not an option; write vllm.<argument>=value for an argument of vLLM, or --option value"
    close = difflib.get_close_matches(name, OPTIONS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"vLLM's own is vllm.{name.lstrip('-').replace('-', '_')}=value"
    return f"unknown option {name}; {hint}"


def _address(host: str) -> str:
    """Return the IP address of a host name of this machine."""
    try:
        return "127.0.0.1" if host == "localhost" else str(ipaddress.ip_address(host))
    except ValueError:
        raise to_config_error(
            f"--host is {host!r}; give localhost or an IP address of this machine, or 0.0.0.0 for all"
        ) from None


def _token(name: str, environment: Mapping[str, str]) -> str:
    """Return the token in an environment variable."""
    token = environment.get(name)
    if token is None:
        raise to_config_error(f"--token-env is {name}, but that environment variable is not set; export it")
    if len(token) < _SHORTEST_TOKEN or not _TOKEN.fullmatch(token):
        raise to_config_error(
            f"the environment variable {name} has {len(token)} characters; a token has at least {_SHORTEST_TOKEN}, "
            "printable ASCII without spaces, such as those of `openssl rand -hex 32`"
        )
    return token


def _on_gpu() -> bool:
    """Return whether the model runs on a GPU: where one can be used, unless vLLM for CPUs is installed."""
    if installed_version(CPU_PACKAGE) is not None:
        return False
    import torch

    return torch.cuda.is_available()


def _check_port(host: str, port: int) -> None:
    """Raise if the server could not listen on a port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            raise to_config_error(
                f"--host is {host!r}, which is not an address of this machine: {reason}; use 127.0.0.1 for this "
                "machine alone, or 0.0.0.0 for all of its addresses"
            ) from error
        raise to_config_error(
            f"--port is {port}, but the server can't listen on it at {host}: {reason}; choose another, or 0 for any"
        ) from error


def _port(text: str) -> int:
    """Read a port; argparse names the option."""
    if not text.isdecimal() or (port := int(text)) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 to {_LAST_PORT}")
    return port


def _count(text: str) -> int:
    """Read a positive whole number."""
    if not text.isdecimal() or (number := int(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number


def _positive(text: str) -> float:
    """Read a positive number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
