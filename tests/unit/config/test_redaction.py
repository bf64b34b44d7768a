import pytest

from rlpack.config.redaction import looks_secret, secret_paths, without_secrets


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
    ],
)
def test_like_names_are_no_secrets(name):
    assert not looks_secret(name, "abc")


@pytest.mark.parametrize("value", [None, "", True, False, {}, []])
def test_what_holds_nothing_is_no_secret(value):
    assert not looks_secret("api_key", value)


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
