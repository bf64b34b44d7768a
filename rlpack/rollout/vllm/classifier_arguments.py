"""vLLM's arguments for a reward model: a sequence classifier with one label, scored at the last token.

vLLM runs the family's causal language model with the classifier's head in place of the output layer. By default it
would apply a sigmoid to a single label, but rewards are the head's raw output.
"""

from typing import Any

from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlpack.models.errors import ModelError
from rlpack.models.loading import build_meta_classifier
from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.architectures import supported_architectures

_SUFFIX = "ForSequenceClassification"
_HEAD = "score"  # the only name under which vLLM loads a head
_WAY_OUT = "score with it in the run itself, reward_model.path={model}"


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return whether a model is a sequence classifier, by the class that its config names."""
    return any(name.endswith(_SUFFIX) for name in config.architectures or ())


def classifier_arguments(config: PreTrainedConfig, *, model: str) -> dict[str, Any]:
    """Return the engine arguments of a reward model, beyond those of every vLLM that rlpack starts.

    Args:
        config: config of the model.
        model: folder or hub name, for errors.

    Raises:
        EngineError: it has more than one label or another head, or vLLM has no such model.
    """
    if config.num_labels != 1:
        raise EngineError(
            f"{model!r} is a sequence classifier with {config.num_labels} labels, but a reward model has 1; give one "
            "that was trained with num_labels=1"
        )
    way_out = _WAY_OUT.format(model=model)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if architecture is None or type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise EngineError(
            f"{model!r} is a {config.model_type}, of which transformers has no causal language model, and vLLM would "
            f"not score its last token; give another reward model, or {way_out}"
        )
    if architecture not in supported_architectures():
        raise EngineError(
            f"{model!r} is a {config.model_type} reward model, but the installed vLLM has no {architecture}; {way_out}"
        )
    heads = _heads(_built(config, model))
    if heads != [_HEAD]:
        raise EngineError(
            f"{model!r} is a {config.model_type} with the heads {', '.join(heads) or 'none'}, but vLLM loads one "
            f"linear head named {_HEAD}; {way_out}"
        )
    return {
        "runner": "pooling",
        "convert": "classify",
        "pooler_config": {"task": "classify", "seq_pooling_type": "LAST", "use_activation": False},
        "hf_overrides": {"architectures": [architecture]},
    }


def pad_token(config: PreTrainedConfig) -> int | None:
    """Return the padding token of a classifier, at which transformers never reads a score."""
    return config.get_text_config().to_dict().get("pad_token_id")


def _built(config: PreTrainedConfig, model: str) -> PreTrainedModel:
    try:
        return build_meta_classifier(config, model)
    except ModelError as error:
        raise EngineError(f"{model!r} can't be served: {error}") from error


def _heads(classifier: PreTrainedModel) -> list[str]:
    """Return the names of a classifier's own linear layers."""
    return [name for name, module in classifier.named_children() if isinstance(module, nn.Linear)]
