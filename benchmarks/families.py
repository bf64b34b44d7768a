"""Which causal language models of transformers run here: each architecture, batching mode, role and precision.

A tiny random model of each architecture is saved, loaded as a role loads it, checked as at the start of a rank, sharded
over one rank, and run forward and backward. Its outputs and all its gradients are compared with those of each row alone
under transformers' own attention.

- right: outputs and gradients are equal up to rounding.
- refused: the role ends with our error, whose text is given.
- wrong, crashed: neither. There must be none.

Run `python -m benchmarks.families --results FILE`, then `python -m benchmarks.family_page FILE`; about half an hour on
one core.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.family_configs import VOCABULARY, tiny_config
from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Model
from rlpack.config.sections.value_models import RewardModel
from rlpack.gloo import GLOO
from rlpack.models import attention, own_attention
from rlpack.models.check_rows import RowLimits
from rlpack.models.checks import check_isolation, check_model, check_scores, has_experts
from rlpack.models.errors import IsolationError, ModelError
from rlpack.models.heads import ScalarHeadModel, hidden_size
from rlpack.models.inputs import ModelInputs, pack_rows, pad_rows
from rlpack.models.loading import build_causal_lm, linear_head, load_classifier
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from rlpack.rollout.errors import EngineError
from rlpack.rollout.hf import HFEngine
from rlpack.rollout.types import SamplingParams

Verdict = Literal["right", "refused", "wrong", "crashed", "none"]

MODES = ("packed", "dynamic", "fixed")
ROLES = ("policy", "critic", "reward model")
PRECISIONS = ("fp32", "bf16")
# Lengths around the windows of 12 tokens; rows of two and three tokens, too.
_LENGTHS = (19, 2, 33, 12, 3, 26)
# Tokens that are generated.
_NEW_TOKENS = 16
_TIMEOUT_S = 240.0

# fp32: allowed difference of an output (nats, or relative to the largest), and of a weight's gradient relative to the
# norm of the whole gradient.
_OUTPUT_TOLERANCE, _GRADIENT_TOLERANCE = 2e-4, 1e-3
# Between a cached state and a whole row, in nats: recurrent layers add in another order.
_GENERATION_TOLERANCE = 5e-3
# bf16: allowed multiple of the error that transformers' own bf16 has, each row alone; and the least that is allowed.
_BF16_FACTOR, _BF16_OUTPUT, _BF16_GRADIENT = 4.0, 0.05, 0.05
# In bf16 rounding moves some tokens to other experts; of this part of the tokens outputs have to be equal.
_ROUTED_PART = 0.9


@dataclass(frozen=True)
class Result:
    """The verdict on one architecture in one setting.

    Attributes:
        model_type: the architecture.
        setting: such as `packed policy fp32`, or `generate`.
        verdict: `none` where there is no such model, for example no classifier.
        detail: the error's text, the differences, or how tokens are generated.
    """

    model_type: str
    setting: str
    verdict: Verdict
    detail: str = ""


def family_results(
    model_type: str, modes: tuple[str, ...] = MODES, precisions: tuple[str, ...] = PRECISIONS
) -> list[Result]:
    """Return the results of one architecture in all settings."""
    with tempfile.TemporaryDirectory() as folder, _one_rank():
        torch.manual_seed(0)
        try:
            language_model = _save(AutoModelForCausalLM, model_type, Path(folder, "lm"))
        except Exception as error:  # noqa: BLE001 - listed with its reason
            return [Result(model_type, "build", "none", f"no tiny model: {type(error).__name__}: {_first_line(error)}")]
        classifier = None
        if type(tiny_config(model_type)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            try:
                classifier = _save(AutoModelForSequenceClassification, model_type, Path(folder, "classifier"))
            except Exception as error:  # noqa: BLE001 - listed with its reason
                print(f"{model_type}: no classifier: {type(error).__name__}: {error}", file=sys.stderr)
        results = [_judge(model_type, "generate", lambda: _generate(language_model))]
        for role in ROLES:
            source = classifier if role == "reward model" else language_model
            if source is None:
                results.append(Result(model_type, role, "none", "transformers has no classifier of this type"))
                continue
            for precision in precisions:
                for mode in modes:
                    setting = f"{mode} {role} {precision}"
                    results.append(
                        _judge(model_type, setting, lambda s=source, r=role, m=mode, p=precision: _train(s, r, m, p))
                    )
        return results


def _judge(model_type: str, setting: str, run: Any) -> Result:
    """Run a setting and return its verdict; `run` returns a detail, or raises."""
    try:
        return Result(model_type, setting, "right", run())
    except (ModelError, IsolationError, EngineError) as error:
        return Result(model_type, setting, "refused", _first_line(error))
    except _WrongError as error:
        return Result(model_type, setting, "wrong", str(error))
    except Exception as error:  # noqa: BLE001 - a crash is a result
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Result(
            model_type,
            setting,
            "crashed",
            f"{type(error).__name__}: {_first_line(error)} ({place.filename}:{place.lineno})",
        )


class _WrongError(Exception):
    """Outputs or gradients differ."""


def _save(kind: Any, model_type: str, folder: Path) -> Path:
    """Save a tiny random model, all of whose weights are random (no ones or zeros)."""
    config = tiny_config(model_type)
    if kind is AutoModelForSequenceClassification:
        config.num_labels = 1
    model = kind.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * (0.1 if weight.ndim > 1 else 0.05))
    model.save_pretrained(folder)
    return folder


def _train(source: Path, role: str, mode: str, precision: str) -> str:
    """Run a role as a rank would, forward and backward; compare with each row alone."""
    packed = mode == "packed"
    model, classifier = _load(source, role, packed)
    name = {"policy": "actor", "critic": "critic", "reward model": "reward_model"}[role]
    limits = RowLimits(longest=max(_LENGTHS))
    check_model(model, "cpu", VOCABULARY, role=name, packed=packed, limits=limits, trained=role != "reward model")
    if classifier is not None:
        assert isinstance(model, ScalarHeadModel)
        check_scores(classifier, model, VOCABULARY, packed=packed)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    shard_model(model, mesh, precision=cast(Any, precision), small_bytes=0)  # layer by layer, as large models
    check_isolation(model, "cpu", VOCABULARY, role=name, packed=packed, longest=max(_LENGTHS))
    model.train()
    expected_outputs, expected_gradients = _reference(source, role, torch.float32)
    rows, outputs = _rows(), []
    for part in _microbatches(len(rows), mode):
        inputs = (pack_rows if packed else pad_rows)([rows[i] for i in part])
        scores = _forward(model, inputs)
        weights = torch.cat([_output_weights(i, rows[i]) for i in part])
        (scores * weights).sum().backward()
        outputs.append(scores.detach())
    gradients = {
        name: weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    part = _ROUTED_PART if precision == "bf16" and has_experts(model.model) else 1.0
    output_gap = _output_gap(torch.cat(outputs), expected_outputs, part)
    gradient_gap, worst = _gradient_gap(gradients, expected_gradients)
    output_limit, gradient_limit = _OUTPUT_TOLERANCE, _GRADIENT_TOLERANCE
    if precision == "bf16":
        output_limit, gradient_limit = _BF16_OUTPUT, _BF16_GRADIENT
        with suppress(RuntimeError):  # some models can't be run in bf16 themselves, only with fp32 weights
            own_outputs, own_gradients = _reference(source, role, torch.bfloat16)
            output_limit = max(output_limit, _BF16_FACTOR * _output_gap(own_outputs, expected_outputs, part))
            gradient_limit = max(gradient_limit, _BF16_FACTOR * _gradient_gap(own_gradients, expected_gradients)[0])
    detail = (
        f"outputs {output_gap:.1e} (limit {output_limit:.1e}), gradients {gradient_gap:.1e} (limit "
        f"{gradient_limit:.1e}, {worst})"
    )
    if not (output_gap <= output_limit and gradient_gap <= gradient_limit):
        raise _WrongError(detail)
    return detail


def _load(source: Path, role: str, packed: bool) -> tuple[PackedModel, PreTrainedModel | None]:
    """Load a role's model as `rlpack.workers.build` does; return it, and the classifier that it is made of."""
    name = attention.NAME if packed else own_attention.DEFAULT
    if role == "reward model":
        classifier = load_classifier(RewardModel(path=str(source)), vocab_size=VOCABULARY, attention_name=name)
        return ScalarHeadModel(language_model(classifier), linear_head(classifier)), classifier
    built = build_causal_lm(Model(path=str(source)), vocab_size=VOCABULARY, attention_name=name)
    if role == "policy":
        return Policy(built), None
    return ScalarHeadModel(language_model(built), _value_head(built)), None


def _value_head(built: PreTrainedModel) -> nn.Linear:
    """Return a value head that isn't zero, so that gradients reach the model."""
    size = hidden_size(built)
    head = nn.Linear(size, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) / size**0.5)
        head.bias.zero_()
    return head


def _forward(model: PackedModel, inputs: ModelInputs) -> Tensor:
    """Return an output per token, f32 [T]."""
    if isinstance(model, Policy):
        return model(inputs, entropy=False).logprobs
    return model(inputs, before_token=False)


def _reference(source: Path, role: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Return outputs and gradients of each row alone, by transformers' own forward pass and attention."""
    if role == "reward model":
        classifier = AutoModelForSequenceClassification.from_pretrained(source, dtype=dtype).eval()
        prefix, base, head = "model.", language_model(classifier), linear_head(classifier)
    else:
        built = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        prefix, base, head = "model.", built, None
        if role == "critic":
            base, head = language_model(built), _value_head(built).to(dtype)
    outputs = []
    for index, row in enumerate(_rows()):
        if head is None:
            logits = base(input_ids=row[None], use_cache=False).logits[0, :-1].float()
            scores = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
            scores = torch.cat([scores.new_zeros(1), scores])
        else:
            scores = head(base(input_ids=row[None], use_cache=False).last_hidden_state[0])[:, 0].float()
        (scores * _output_weights(index, row)).sum().backward()
        outputs.append(scores.detach())
    gradients = {
        prefix + name: weight.grad.float() for name, weight in base.named_parameters() if weight.grad is not None
    }
    if head is not None:
        gradients |= {
            f"head.{name}": weight.grad.float() for name, weight in head.named_parameters() if weight.grad is not None
        }
    return torch.cat(outputs), gradients


def _rows() -> list[Tensor]:
    """Return the rows, which hold neither padding nor special tokens."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in _LENGTHS]


def _output_weights(index: int, row: Tensor) -> Tensor:
    """Return the weights of a row's outputs in the loss, f32 [L]."""
    return torch.randn(row.shape[0], generator=torch.Generator().manual_seed(100 + index))


def _microbatches(num_rows: int, mode: str) -> Iterator[list[int]]:
    """Yield the rows of each microbatch, in order: all packed, three of any length, or two."""
    size = {"packed": num_rows, "dynamic": num_rows // 2, "fixed": 2}[mode]
    for start in range(0, num_rows, size):
        yield list(range(start, min(start + size, num_rows)))


def _output_gap(outputs: Tensor, expected: Tensor, part: float) -> float:
    """Return the largest difference of that part of the tokens, relative to the largest output if that exceeds 1."""
    return ((outputs - expected).abs().quantile(part) / expected.abs().max().clamp(min=1.0)).item()


def _gradient_gap(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference of a weight's gradient, relative to the norm of all, and the weight."""
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    gaps = {}
    for name in gradients.keys() | expected.keys():
        own, other = gradients.get(name), expected.get(name)
        if own is None or other is None:  # a tied weight has another name, or no gradient at all
            present = own if other is None else other
            gaps[name] = (present.norm() / total).item() if present is not None else 0.0
        else:
            gaps[name] = ((own - other).norm() / total).item()
    worst = max(gaps, key=lambda name: gaps[name] if gaps[name] == gaps[name] else float("inf"))
    return gaps[worst], worst


def _generate(source: Path) -> str:
    """Generate with the `hf` engine; compare each token's log-prob with a forward pass of the whole row alone."""
    model = build_causal_lm(Model(path=str(source)), vocab_size=VOCABULARY, attention_name=own_attention.DEFAULT)
    engine = HFEngine(model, pad_token_id=0, max_length=max(_LENGTHS) // 2 + _NEW_TOKENS)
    prompts = [row[: max(1, len(row) // 2)] for row in _rows()] * 2
    seeds = torch.arange(len(prompts)).numpy()
    params = SamplingParams(max_new_tokens=_NEW_TOKENS, stop_token_ids=(2, 5, 9))
    generated = engine.generate(Ragged.from_rows([p.tolist() for p in prompts], torch.int64), params, seeds)
    truth = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    gap = 0.0
    for prompt, response, logprobs in zip(prompts, generated.token_ids.rows(), generated.logprobs.rows(), strict=True):
        row = torch.cat([prompt, response])
        with torch.no_grad():
            scores = truth(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        expected = scores.gather(1, row[1:, None])[len(prompt) - 1 :, 0]
        gap = max(gap, (logprobs - expected).abs().max().item())
    if not gap <= _GENERATION_TOLERANCE:
        raise _WrongError(f"log-probs of sampled tokens differ by {gap:.1e} nats")
    return f"{engine.decoder_name}, log-probs {gap:.1e}"


@contextmanager
def _one_rank() -> Iterator[None]:
    """Start a process group of only this process."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(GLOO, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:400]


def _isolated(model_type: str, modes: tuple[str, ...], precisions: tuple[str, ...]) -> list[Result]:
    """Run an architecture in a separate process, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        torch.set_num_threads(1)
        sender.send([asdict(result) for result in family_results(model_type, modes, precisions)])

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        if not receiver.poll(_TIMEOUT_S):
            return [Result(model_type, "all", "crashed", f"no end after {_TIMEOUT_S:g} s")]
        return [Result(**fields) for fields in receiver.recv()]
    except EOFError:
        return [Result(model_type, "all", "crashed", "the process ended")]
    finally:
        process.kill()
        process.join(10)


def main() -> None:
    """Run the architectures and print, or write, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all without")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--results", type=Path, help="append results to this file, as JSON lines")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    types = options.types or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for model_type in types:
        results = _isolated(model_type, tuple(options.modes), tuple(options.precisions))
        if options.results:
            with options.results.open("a") as file:
                file.writelines(json.dumps(asdict(result)) + "\n" for result in results)
        counts = {v: sum(r.verdict == v for r in results) for v in ("right", "refused", "wrong", "crashed", "none")}
        print(model_type, *(f"{verdict} {count}" for verdict, count in counts.items() if count), flush=True)
        for result in results:
            if result.verdict in {"wrong", "crashed"} or result.setting == "build":
                print(f"  {result.setting}: {result.verdict}: {result.detail}", flush=True)


if __name__ == "__main__":
    main()
