from functools import reduce
from typing import Any, get_args

import pytest

from rlpack.config.errors import ConfigError
from rlpack.config.keys import walk
from rlpack.config.redaction import looks_secret, secret_paths, without_secrets
from rlpack.config.validate import validate

# Mappings of the schema that hold any values.
FREE = [key.path for key in walk() if key.is_open and get_args(key.annotation)[1] is Any]


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "hub_token",
        "hf_token",
        "HF_TOKEN",
        "auth-token",
        "access_token",
        "bearer_token",
        "api_token",
        "api_key",
        "apikey",
        "openai_api_key",
        "openaiApiKey",
        "private_key",
        "secret",
        "client_secret",
        "secret_access_key",
        "password",
        "db_passwd",
        "credentials",
        "openai_key",
        "WANDB_KEY",
        "openaiKey",
        "openai_keys",
        "my-anthropic-key",
        "AZURE_OPENAI_KEY",
        "huggingface_key",
        "api_keys",
        "hf_tokens",
        "pat",
        "github_pat",
        "db_pwd",
        "Authorization",
        "Proxy-Authorization",
        "X-Api-Key",
    ],
)
def test_names_of_secrets_are_known(name):
    assert looks_secret(name, "abc")


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "pad_token",
        "eos_token",
        "tokenizer",
        "stop_token_ids",
        "api_key_env",
        "password_file",
        "secretary",
        "key",
        "monkey",
        "keys",
        "tokens",
        "num_tokens",
        "answer_key",
        "reward_fn_key",
        "required_keys",
        "path",
        "compat",
        "author",
    ],
)
def test_like_names_are_no_secrets(name):
    assert not looks_secret(name, "abc")


@pytest.mark.parametrize(
    "name",
    [
        "gold",
        "answer",
        "answers",
        "images",
        "prompts",
        "messages",
        "tests",
        "task",
        "type",
        "category",
        "language",
        "prediction",
        "choices",
        "options",
        "context",
        "chosen",
        "format",
        "level",
        "name",
        "ref",
        "rubric",
        "required",
    ],
)
@pytest.mark.parametrize("value", ["solution", "a_field_with_a_long_name", "answers/level_2/of_the_row", ["a", "b"]])
def test_a_key_that_names_a_field_is_no_secret(name, value):
    assert not looks_secret(f"{name}_key", value)
    assert not looks_secret(f"{name}Keys", value)


@pytest.mark.parametrize("name", ["judge_key", "answer_key", "my-server-keys"])
@pytest.mark.parametrize("value", ["a1" * 8, ["a1" * 8], {"me": "a1" * 8}])
def test_a_key_with_a_value_that_looks_random_is_a_secret(name, value):
    assert looks_secret(name, value)
    assert not looks_secret(name, "a1" * 7)


@pytest.mark.parametrize("value", [None, "", True, False, {}, []])
def test_what_holds_nothing_is_no_secret(value):
    assert not looks_secret("api_key", value)


@pytest.mark.parametrize("value", [3, 0.5, [1, 2], {"every": 2, "source": "a.jsonl"}])
def test_numbers_and_sections_are_no_keys_whatever_their_name(value):
    assert not looks_secret("openai_key", value)
    assert not looks_secret("pat", value)


def test_lists_and_mappings_of_keys_are_secrets():
    assert looks_secret("openai_keys", ["abc", "def"])
    assert looks_secret("tokens", {"me": "abc"})
    assert not looks_secret("tokens", ["<a>", "</a>"])


@pytest.mark.parametrize(
    "value",
    [
        f"sk-proj-{'a1' * 10}",
        f"hf_{'a1' * 12}",
        f"github_pat_{'a1' * 12}",
        f"AKIA{'A1' * 8}",
        f"Bearer {'a1' * 10}",
        f"OPENAI_API_KEY=sk-{'a1' * 10}",
        f"sk-ant-api03-{'a1' * 5}-{'b_2' * 5}",
        f"sk-or-v1-{'a1' * 10}",
    ],
)
def test_keys_that_providers_issue_are_secrets_whatever_their_name(value):
    assert list(secret_paths("p", {"key": value, "b": [value]})) == ["p.key", "p.b.0"]


@pytest.mark.parametrize(
    "value",
    [
        "task-specific-instructions",
        "Bearer of news",
        "hf_model",
        "sk-learn",
        "sk-8b-instruct-2026-01",
        "sk-learnedcheckpoints-2024",
        "/models/sk-8b-instruct-2026-01",
        "/data/sk-learn-checkpoints-2024",
        "/models/sk-1234567890abcdef",
        f"/data/hf_{'a1' * 12}",
    ],
)
def test_like_values_are_no_secrets(value):
    assert not looks_secret("key", value)


@pytest.mark.parametrize("key", [key.path for key in walk()])
def test_no_key_of_the_schema_is_hidden_by_its_name(key):
    name = key.rpartition(".")[2]
    assert not any(looks_secret(name, value) for value in ("abc", 3, ["abc"], {"a": "abc"}))


def test_what_is_refused_is_what_is_hidden_whatever_its_type_and_depth():
    config = {"a": [{"token": 7}, [{"password": "x"}]], "credentials": {"user": "u"}, "b": {"c": {"api_key": "y"}}}
    assert list(secret_paths("p", config)) == ["p.a.0.token", "p.a.1.0.password", "p.credentials", "p.b.c.api_key"]
    hidden = without_secrets(config)
    assert hidden == {
        "a": [{"token": "<hidden>"}, [{"password": "<hidden>"}]],
        "credentials": "<hidden>",
        "b": {"c": {"api_key": "<hidden>"}},
    }
    assert config["a"][0] == {"token": 7}


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@proxy:3128",
        "git+https://me:hunter2@host/repository.git@v1",
        "redis://:hunter2@host:6379/0",
        "--index-url https://me:hunter2@host/simple",
        "http://host/v1?api_key=hunter2",
        "https://host/v1?a=b&access_token=hunter2",
        "https://host/f?X-Amz-Signature=hunter2",
    ],
)
def test_a_url_with_a_password_is_a_secret_whatever_its_key(url):
    assert list(secret_paths("p", {"a": url, "b": ["x", url]})) == ["p.a", "p.b.1"]
    assert without_secrets({"a": url, "b": ["x", url], "c": ("x", [url])}) == {
        "a": "<hidden>",
        "b": ["x", "<hidden>"],
        "c": ["x", ["<hidden>"]],
    }


@pytest.mark.parametrize(
    "text",
    [
        "http://proxy:3128",
        "ssh://git@host:22/repository",
        "https://host:80/a:b@c",
        "s3://bucket/key",
        "a:b@c",
        "see https://a: b@c",
        "https://host/v1?monkey=a&max_tokens=3",
        "https://host/v1?key=",
        "a?key=b",
    ],
)
def test_a_url_without_a_password_is_no_secret(text):
    config = {"a": text, "b": ["x", text]}
    assert list(secret_paths("p", config)) == []
    assert without_secrets(config) == config


@pytest.mark.parametrize("place", FREE)
def test_every_mapping_of_free_values_refuses_what_would_be_hidden(place: str):
    path = f"{place.replace('<name>', 'x')}.hf_token"
    config = reduce(lambda below, name: {name: below}, reversed(path.split(".")), "abc")
    with pytest.raises(ConfigError) as caught:
        validate(_with_targets(config))
    (said,) = [problem for problem in caught.value.problems if "looks like a secret" in problem]
    assert said.startswith(f"{path} looks like a secret, and configs are stored and shown; pass it as an environment")
    of_vllm = place == "rollout.vllm"
    assert said.endswith(
        "such as HF_TOKEN" if of_vllm else "as an environment variable; if it is not a secret, rename the key"
    )


def _with_targets(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the targets that its entries need."""
    for entry in config.get("roles", {}).values():
        entry["target"] = "a:B"
    for entry in config.get("reward", {}).get("functions", {}).values():
        entry["function"] = "a:b"
    return config
