"""Check by names and shapes whether a stream of weights fits an engine's model."""

from torch import Tensor
from transformers import PreTrainedModel

from rlpack.batch.weight_layout import WeightLayout
from rlpack.rollout.errors import EngineError


def tied_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return the additional names of each tied weight, by its first name."""
    first: dict[int, str] = {}
    further: dict[str, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(weight), name)) != name:
            further.setdefault(known, []).append(name)
    return further


def weights_and_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, with a tied weight only under its first name."""
    saved = model.state_dict().keys()
    return {name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in saved}


def check_layout(model: PreTrainedModel, layout: WeightLayout) -> None:
    """Check names and shapes; weights tied to one that is sent may be missing.

    Args:
        model: the engine's model; may be on the meta device.
        layout: layout of the stream.

    Raises:
        EngineError: a name or a shape does not fit the model.
    """
    own, shapes = _saved(model), layout.shapes
    sent = {id(own[name]) for name in shapes if name in own}
    missing = sorted(name for name in own if name not in shapes and id(own[name]) not in sent)
    unknown = sorted(name for name in shapes if name not in own)
    misshapen = sorted(name for name in shapes if name in own and shapes[name] != tuple(own[name].shape))
    for name, aliases in tied_names(model).items():
        if name in shapes and (twice := shapes.keys() & set(aliases)):
            raise EngineError(
                f"weights do not fit: {name} and {min(twice)} are separate weights of the actor, but config.json of "
                "the engine's model ties them; set tie_word_embeddings=false in the config.json of model.path if its "
                "files hold both, or rollout.engine=hf"
            )
    if missing or unknown or misshapen:
        raise EngineError(f"weights do not fit: missing {missing}, unknown {unknown}, wrong shape {misshapen}")


def _saved(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return all parameters and the buffers that a checkpoint holds, under each of their names."""
    saved = model.state_dict().keys()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor for name, tensor in named if name in saved}
