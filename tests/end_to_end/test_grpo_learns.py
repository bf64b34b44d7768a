"""One run with everything that a run leaves behind."""

import json
import math
import re

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpack.checkpoint.commit import load_state, newest
from rlpack.cli.main import main
from rlpack.config.validate import validate
from rlpack.observe.metric_table import unknown_names
from rlpack.recipes.driver.splits import load_splits
from rlpack.rewards.functions import final_answer
from tests.end_to_end.commands import committed, curve, done, records, steps
from tests.end_to_end.settings import EASY

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STEPS, WARM_UP = 15, 80


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return done(
        tmp_path_factory.mktemp("grpo"),
        *EASY,
        "data.generator.noise=0.5",
        f"sft_warmup.steps={WARM_UP}",
        "sft_warmup.batch_size=32",
        "sft_warmup.learning_rate=2e-3",
        f"trainer.steps={STEPS}",
        "trainer.prompts_per_step=16",
        "trainer.group_size=16",
        "trainer.mini_batch_size=null",
        "actor.optimizer.learning_rate=5e-4",
        "evaluation.every=10",
        "evaluation.samples=8",
        "checkpoint.every=10",
        "logger.tensorboard=true",
        "logger.wandb=offline",
        forks_workers=False,  # one run is just as a user's
    )


def test_the_reward_rises(run):
    rewards = curve(run.run_dir, "reward/mean")
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + 0.2, rewards


def test_the_supervised_loss_falls_in_the_warm_up(run):
    losses = curve(run.run_dir, "sft_warmup/loss", "sft_warmup")
    assert losses[-1] < losses[0] / 3


def test_every_step_is_logged_once_and_in_order(run):
    assert steps(run.run_dir, "sft_warmup") == list(range(1, WARM_UP + 1))
    assert steps(run.run_dir, "train") == list(range(1, STEPS + 1))
    assert steps(run.run_dir, "evaluation") == [0, 10, STEPS]
    times = [record["time_s"] for record in records(run.run_dir)]
    assert times == sorted(times)


def test_every_figure_is_a_finite_number_under_a_known_name(run):
    for record in records(run.run_dir):
        figures = {name: value for name, value in record.items() if name not in {"step", "phase", "time_s"}}
        assert unknown_names(figures) == []
        assert all(math.isfinite(value) for value in figures.values()), record


def test_trainer_and_sampler_agree_and_the_first_ratio_is_1(run):
    assert max(curve(run.run_dir, "rollout/logprob_gap")) < 1e-4
    assert curve(run.run_dir, "actor/ratio_max") == pytest.approx([1.0] * STEPS, abs=1e-5)


def test_the_config_that_is_written_down_is_a_valid_one(run):
    config = validate(yaml.safe_load((run.run_dir / "config.yaml").read_text()))
    assert (config.trainer.steps, config.logger.wandb, config.run_dir) == (STEPS, "offline", str(run.run_dir))


def test_the_report_opens_offline_and_the_packing_picture_is_an_image(run):
    page = (run.run_dir / "report.html").read_text()
    sources = re.findall(r"(?:src|href)\s*=\s*(\S+)", page)
    assert len(sources) >= 3
    assert all(source.startswith('"data:image/') for source in sources)
    assert not re.search(r"https?://|url\((?!data:)|@import|<script|<link|<iframe", page)
    assert "held-out accuracy" in page
    assert (run.run_dir / "packing.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_can_be_written_again(run, capsys):
    (run.run_dir / "report.html").unlink()
    assert main(["report", str(run.run_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(run.run_dir / "report.html")
    assert (run.run_dir / "report.html").stat().st_size > 10_000


def test_the_exported_folder_alone_answers_as_the_run_did(run):
    model = AutoModelForCausalLM.from_pretrained(run.run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.run_dir / "model")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def accuracy(prompts):
        right = 0
        for example in prompts.examples:
            ids = tokenizer(example.prompt, return_tensors="pt")["input_ids"]
            assert tokenizer.decode(ids[0]) == example.prompt
            tokens = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
            text = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
            right += final_answer([example.prompt], [text], [example.answer]) == [1.0]
        return right / len(prompts)

    _, trained, held_out = load_splits(validate(yaml.safe_load((run.run_dir / "config.yaml").read_text())))
    assert accuracy(held_out) == curve(run.run_dir, "evaluation/reward_greedy", "evaluation")[-1]
    assert accuracy(trained) > 0.6


def test_the_last_checkpoint_is_whole_and_knows_where_the_run_stands(run):
    assert committed(run.run_dir, "train") == [10, STEPS]
    assert committed(run.run_dir, "sft_warmup") == [70, WARM_UP]
    checkpoint = newest(run.run_dir / "checkpoints" / "train")
    assert checkpoint is not None
    progress = load_state(checkpoint)["progress"]
    assert progress == {
        "phase": "train", "step": STEPS, "optimizer_steps": WARM_UP + STEPS,
        "prompts_consumed": 16 * STEPS, "prompts_trained": 16 * STEPS,
        "demonstrations_trained": 32 * WARM_UP, "kl_coef": None,
    }  # fmt: skip
    assert not list((run.run_dir / "checkpoints").glob("*/.*"))


def test_held_out_rollouts_are_kept_and_shown(run):
    samples = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0, 0, 10, 10, STEPS, STEPS]
    assert {len(sample["prompt"]) for sample in samples} == {len("a1b2=")}
    assert samples[-1]["completion"] in run.out


def test_the_console_says_when_the_roles_are_ready_and_shows_nothing_but_steps_after_that(run):
    start, _, after = run.out.partition("the roles are ready after ")
    assert start.endswith("starting the roles actor, reference, rollout, reward\n")
    assert re.match(r"\d+\.\d s\n", after)
    before_training = after.partition("\nsamples\n")[0].splitlines()[1:]
    assert all(line.startswith(("warm-up ", "role reward scored")) for line in before_training), before_training
    assert "sft_warmup" not in run.out


def test_the_console_ends_with_what_the_run_came_to(run):
    end = run.out[run.out.index("model written to") :]
    assert "mean reward, first and last step" in end
    assert "held-out accuracy, sampled" in end
    table = {line.split()[0]: line.split()[1:] for line in end.splitlines() if line.startswith("  packing/")}
    assert len(table) > 3
    assert all(len(values) == 3 for values in table.values())  # nothing was lost, so nothing is explained
    zeros = end.partition("\n  0 in all steps")[2].partition("\nreport:")[0]
    assert "packing/waste_ratio" in zeros.replace(",", " ").split()
    assert end.rstrip().endswith(f"report: {run.run_dir / 'report.html'}")


def test_tensorboard_has_what_the_file_has(run):
    board = EventAccumulator(str(run.run_dir / "tensorboard" / "train"))
    board.Reload()
    events = board.Scalars("reward/mean")
    assert [event.step for event in events] == list(range(1, STEPS + 1))
    assert [event.value for event in events] == pytest.approx(curve(run.run_dir, "reward/mean"))


def test_weights_and_biases_writes_its_run_without_a_network(run):
    (written,) = run.run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert written.stat().st_size > 1000
