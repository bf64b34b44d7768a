"""Which architectures the installed vLLM runs.

Its registry is read from its source, because importing vLLM takes seconds.
"""

import ast

from transformers import PreTrainedModel

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.argument_names import vllm_folder
from rlpack.rollout.vllm.vllm_package import SUPPORTED

_REGISTRY = "model_executor/models/registry.py"
# Tables of the registry with models that vLLM doesn't run itself.
_NOT_RUN = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")


def architecture_problem(kind: type[PreTrainedModel]) -> str | None:
    """Return why vLLM can't run a model of a class of transformers; None if it can.

    vLLM runs a model that it doesn't implement by transformers' own code, if that lets it replace the attention; the
    conditions are those of `_try_resolve_transformers` in vLLM's registry.

    Raises:
        EngineError: vLLM is not installed, or its source has another form.
    """
    if kind.__name__ in supported_architectures():
        return None
    if kind.is_backend_compatible() or kind._can_set_attn_implementation():
        return None
    return (
        f"the installed vLLM has no {kind.__name__}, and can't run transformers' implementation of it, whose attention "
        "can't be replaced"
    )


def supported_architectures() -> frozenset[str]:
    """Return the names of the models that the installed vLLM runs, read from its source file.

    Raises:
        EngineError: vLLM is not installed, or its source has another form.
    """
    path = vllm_folder() / _REGISTRY
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise EngineError(f"the models of vLLM can't be read from {path}: {error}") from error
    names = {
        key.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id not in _NOT_RUN
        for key in node.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    if "LlamaForCausalLM" not in names:
        raise EngineError(f"{path} has no table of models; rlpack works with vLLM {SUPPORTED}")
    return frozenset(names)
