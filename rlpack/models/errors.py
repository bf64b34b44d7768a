"""The errors of `rlpack.models`, and those that checks with and without PyTorch share."""

import difflib
from collections.abc import Iterable


class ModelError(ValueError):
    """An invalid model setting: a path, a config key, or an unsupported kind of model."""


class IsolationError(RuntimeError):
    """A model whose packed sequences are not independent of each other."""


# The fix, by key, for a critic or a reward model whose tokenizer differs from the policy's.
_SAME_TOKENIZER = {
    "critic.path": "leave critic.path=null, or choose a model of the policy's family",
    "reward_model.path": "write a role that tokenizes texts itself (roles.<name>.target), or set another model",
}


def unknown_type_error(kind: object, known: Iterable[str]) -> ModelError:
    """Return the error for a new model of a type that transformers doesn't have."""
    near = ", ".join(difflib.get_close_matches(str(kind), list(known), n=3)) or "qwen3, llama, mistral"
    return ModelError(f"model.config.model_type is {kind!r}, which transformers does not know; try {near}")


def unknown_setting_error(kind: str, key: str, known: Iterable[str]) -> ModelError:
    """Return the error for a setting of a new model that its type doesn't have."""
    settings = sorted(known)
    near = difflib.get_close_matches(key, settings, n=3)
    way_out = f"~model.config.{key} removes what a preset sets"
    hint = (
        f"did you mean {', '.join(near)}? {way_out}" if near else f"{way_out}; its settings are {', '.join(settings)}"
    )
    return ModelError(f"model.config.{key} is not a setting of {kind}; {hint}")


def not_causal_error(kind: str) -> ModelError:
    """Return the error for a model type that has no causal language model."""
    return ModelError(f"the model is a {kind}, which is not a causal language model; choose another")


def remote_code_error(key: str, name: str) -> ModelError:
    """Return the error for a model that needs code from its repository."""
    return ModelError(
        f"{key} is {name!r}, whose repository has custom code (auto_map in its config), which isn't run unless "
        "model.trust_remote_code=true with model.revision set to a commit that you have read; set both, or choose a "
        "model that transformers knows"
    )


def other_tokenizer_error(key: str, path: str, num_tokens: int, of_policy: str) -> ModelError:
    """Return the error for a model whose tokenizer differs from the policy's.

    Args:
        key: `critic.path` or `reward_model.path`.
        path: path of the model.
        num_tokens: number of tokens of its tokenizer.
        of_policy: the policy's tokenizer, or its number of tokens.
    """
    return ModelError(
        f"{key} is {path!r}, whose tokenizer has {num_tokens} tokens and differs from the policy's, of {of_policy}; "
        f"the model reads the policy's tokens: {_SAME_TOKENIZER[key]}"
    )


def nothing_trained_error(key: str, patterns: Iterable[str]) -> ModelError:
    """Return the error for patterns in an optimizer section that freeze every weight."""
    return ModelError(
        f"{key}.freeze={list(patterns)} freezes all weights, so nothing would be trained; remove some patterns"
    )


def no_end_problem(tokenizer: str, max_new_tokens: int) -> str:
    """Return the message for a tokenizer without a token that ends a response.

    Args:
        tokenizer: what to call it, the subject of the sentence.
        max_new_tokens: `rollout.max_new_tokens`.
    """
    return (
        f"{tokenizer} has no end-of-sequence token (eos_token), so every response would run to "
        f"rollout.max_new_tokens={max_new_tokens}; set rollout.stop_token_ids to ids that end a response, "
        "model.tokenizer to a tokenizer that has the token, or eos_token_id in the generation_config.json of "
        "model.path; with chat messages, data.chat_template=true ends responses at the template's end of a turn"
    )
