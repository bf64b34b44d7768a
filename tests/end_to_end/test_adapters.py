"""LoRA on a pretrained model, from the command to the model folder that it leaves."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpack.models.loading import build_causal_lm
from rlpack.recipes.driver.reference_policy import reference_model
from tests.builders import tiny_config, tiny_tokenizer
from tests.end_to_end.commands import curve, done

pytestmark = [pytest.mark.ray, pytest.mark.slow]
REWARD = """
def score(prompts, completions, **columns):
    return [sum(character == "7" for character in completion) / 8 for completion in completions]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    tokenizer = tiny_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = build_causal_lm(tiny_config().model, vocab_size=len(tokenizer), seed=1, **ids)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "sevens.py").write_text(REWARD)
    rows = "".join(json.dumps({"prompt": f"{number}=", "answer": "7"}) + "\n" for number in range(16))
    (folder / "rows.jsonl").write_text(rows)
    return done(
        folder,
        *("model=pretrained", "model.path=base", "experiment=lora", "actor.optimizer.learning_rate=0.02"),
        *("actor.optimizer.schedule=cosine", "actor.optimizer.warmup_steps=1", "algorithm.kl_coef=0.001"),
        *("data=jsonl", "data.source=rows.jsonl", "data.validation_source=rows.jsonl", "reward.function=sevens:score"),
        *("trainer.steps=8", "trainer.prompts_per_step=16", "trainer.group_size=4", "evaluation.samples=1"),
        *("rollout.max_new_tokens=8", "trainer.mini_batch_size=null", "evaluation.every=8"),
        ranks=1,
    )


def test_adapters_learn(run):
    rewards = curve(run.run_dir, "reward/mean")
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2, rewards


def test_rollouts_come_from_the_weights_that_are_trained(run):
    assert max(curve(run.run_dir, "rollout/logprob_gap")) < 1e-4
    assert curve(run.run_dir, "actor/kl")[0] == pytest.approx(0, abs=1e-9)
    assert curve(run.run_dir, "actor/kl")[-1] > 1e-3


def test_the_learning_rate_rises_and_falls(run):
    rates = curve(run.run_dir, "actor/learning_rate")
    assert rates[:3] == pytest.approx([0.01, 0.02, 0.01901], rel=1e-3)
    assert rates == [rates[0], *sorted(rates[1:], reverse=True)]


def test_the_reference_is_the_base_model_and_the_export_a_plain_one_with_other_linear_layers(run):
    base, reference, trained = (
        load_file(folder / "model.safetensors")
        for folder in (run.folder / "base", reference_model(run.run_dir), run.run_dir / "model")
    )
    assert base.keys() == reference.keys() == trained.keys()
    assert all(torch.equal(reference[name], base[name]) for name in base)
    changed = {name for name in base if not torch.equal(trained[name], base[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    model = AutoModelForCausalLM.from_pretrained(run.run_dir / "model", dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(run.run_dir / "model")("3=", return_tensors="pt")["input_ids"]
    assert model(prompt).logits.isfinite().all()
