import base64
import io
import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from rich.console import Console as RichConsole

from rlpack.observe.console import Console, Sample
from rlpack.observe.errors import ReportError
from rlpack.observe.report import plots
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.report.plot_style import SETTINGS
from rlpack.observe.report.plots import Series, running_mean
from rlpack.observe.report.report import write_report
from rlpack.observe.report.step_times import StepTimes, time_by_part
from rlpack.observe.report.summary import packing_table, summarize
from rlpack.observe.run import Run
from rlpack.observe.sinks import JsonlSink
from rlpack.packing import Batching, make_plan

HOSTILE = "<script>alert(1)</script>\x1b[31m</pre>&\"'\u202e<img src=http://evil/x>"


class Seen(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in {"meta", "img", "wbr"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def a_run(folder: Path) -> None:
    sink = JsonlSink(folder / "metrics.jsonl")
    sink.log(1, "sft_warmup", {"sft_warmup/loss": 2.0, "time/update_s": 1.0})
    for step in range(4):
        if step:
            sink.log(
                step,
                "train",
                {
                    "reward/mean": step / 4,
                    "actor/grad_norm": 1.0 / step,
                    "actor/kl": float("nan"),
                    "time/update_s": 2.0,
                },
            )
        sink.log(step, "evaluation", {"evaluation/reward_sampled": step / 5, "evaluation/graded_rewards": 0.0})
    sink.close()
    PlanRecord(3, (5, 60, 7, 8), Batching(max_tokens=64, micro_batch_size=2), 2).write(folder / "packing.json")
    (folder / "config.yaml").write_text(f"seed: 1\ndata:\n  source: {HOSTILE!a}\n")


def test_the_page_is_well_formed_and_loads_nothing(tmp_path: Path) -> None:
    a_run(tmp_path)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    seen = Seen(page)
    assert seen.open == []
    assert "script" not in seen.tags
    assert all(source.startswith("data:image/") for source in seen.sources)
    assert len(seen.sources) == 5  # reward, packing, time, warm-up, health
    assert "default-src 'none'" in page
    assert not re.search(r"https?://", page)


def test_model_output_is_escaped(tmp_path: Path) -> None:
    a_run(tmp_path)
    run = Run(tmp_path, [], Console(RichConsole(file=io.StringIO())), {})
    run.log_samples([Sample(HOSTILE, HOSTILE, HOSTILE, None)])
    run.log(3, {})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<img src=http" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[31m&lt;/pre&gt;" in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "quarantined" in page


def test_the_cards_show_first_and_last_values(tmp_path: Path) -> None:
    a_run(tmp_path)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    cards = re.findall(r'<div class="card"><b>(.*?)</b>', page)
    assert cards[:2] == ["0.250 → 0.750", "0.0% → 60.0%"]
    assert cards[3] == "3"


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert write_report(tmp_path).read_bytes() == write_report(tmp_path).read_bytes()


def test_a_run_of_no_step_and_a_crashed_one_still_give_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No reward and no evaluation" in write_report(tmp_path).read_text()
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "phase": "train", "time_s": 1.0, "reward/mean": 1.0}\n{"step": 2, "ph'
    )
    (tmp_path / "config.yaml").write_text("a: [unclosed")
    (tmp_path / "samples.jsonl").write_text("not json\n[1]\n")
    (tmp_path / "packing.json").write_text("{")
    page = write_report(tmp_path).read_text()
    assert "1.000" in page
    assert "→" not in page


def test_a_supervised_run_shows_its_held_out_losses(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as stream:
        for step, loss in ((0, 2.0), (5, 1.0)):
            held_out = {"evaluation/loss": loss, "evaluation/perplexity": 4.0 * loss}
            stream.write(json.dumps({"step": step, "phase": "evaluation", "time_s": 1.0, **held_out}) + "\n")
            stream.write(json.dumps({"step": step + 1, "phase": "train", "time_s": 1.0, "actor/loss": loss}) + "\n")
    page = write_report(tmp_path).read_text()
    assert re.findall(r'<div class="card"><b>(.*?)</b><span>(.*?)</span>', page)[:2] == [
        ("2.000 → 1.000", "held-out loss, before and after"),
        ("8.00 → 4.00", "held-out perplexity, before and after"),
    ]
    assert '<img alt="Loss"' in page
    assert "evaluation were logged" not in page
    figure = plots.supervised_loss([json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()])
    assert figure is not None
    training, held_out = figure.axes[0].get_lines()
    assert (list(training.get_xdata()), list(training.get_ydata())) == ([1, 6], [2.0, 1.0])
    assert (list(held_out.get_xdata()), list(held_out.get_ydata())) == ([0, 5], [2.0, 1.0])


def test_names_of_metrics_can_be_broken_between_their_words_alone(tmp_path: Path) -> None:
    a_run(tmp_path)
    table = write_report(tmp_path).read_text().partition("All metrics")[2]
    assert "<code>actor/<wbr>grad_<wbr>norm</code>" in table
    assert "<code>reward/<wbr>mean</code>" in table


def test_a_run_without_a_learning_signal_is_spoken_of(tmp_path: Path) -> None:
    lines = [
        {"step": step, "phase": "train", "time_s": 1.0, "reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0}
        for step in (1, 2, 3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "No learning signal in 3 training steps: the rewards of each group are all equal (reward/mean is 0)" in (
        write_report(tmp_path).read_text()
    )
    half = [line | {"advantage/zero_group_fraction": 0.5} for line in lines]  # ReMax: greedy responses differ
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in half))
    assert "learning signal" not in write_report(tmp_path).read_text()
    lines[2]["reward/max"] = 1.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "learning signal" not in write_report(tmp_path).read_text()


@pytest.mark.parametrize(
    ("graded", "text", "noun"),
    [(0.0, "50.0% → 75.0%", "accuracy"), (3.0, "0.500 → 0.750", "mean reward"), (None, "0.500 → 0.750", "mean reward")],
)
def test_a_mean_reward_is_called_accuracy_only_if_every_reward_is_0_or_1(
    tmp_path: Path, graded: float | None, text: str, noun: str
) -> None:
    count = {} if graded is None else {"evaluation/graded_rewards": graded}  # runs of earlier versions don't have it
    record = {"step": 0, "phase": "evaluation", "time_s": 1.0, "evaluation/reward_sampled": 0.5, **count}
    later = record | {"step": 9, "evaluation/reward_sampled": 0.75}
    row = summarize([record, later], None)[0]
    assert (row.text, row.label) == (text, f"held-out {noun}, sampled, before and after")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (record, later)))
    page = write_report(tmp_path).read_text()
    assert ("accuracy" in page.partition("All metrics")[0]) == (noun == "accuracy")
    (figure,) = [plots.rewards([record, later])]
    assert figure is not None
    assert noun in figure.axes[0].get_legend().get_texts()[0].get_text()


def test_every_line_of_the_reward_plot_is_named_and_every_plot_of_steps_says_so() -> None:
    records = [{"step": step, "phase": "train", "reward/mean": 0.5, "actor/loss": float(step)} for step in range(3)]
    rewards, health = plots.rewards(records), plots.policy_health(records)
    assert rewards is not None
    assert health is not None
    assert len(rewards.axes[0].get_legend().get_texts()) == len(rewards.axes[0].get_lines()) == 1
    shown = [axes for axes in health.axes if axes.get_visible()]
    assert [axes.get_xlabel() for axes in shown] == ["step"]
    rewards = plots.rewards([records[0] | {"step": step} for step in range(8)])
    assert rewards is not None
    assert len(rewards.axes[0].get_legend().get_texts()) == len(rewards.axes[0].get_lines()) == 2


def test_the_running_mean_neither_lags_nor_leads() -> None:
    ramp = np.arange(50) / 50
    assert running_mean(ramp, 5) == pytest.approx(ramp)
    peak = np.zeros(50)
    peak[20] = 1.0
    assert running_mean(peak, 5) == pytest.approx([1 / 11 if 15 <= place <= 25 else 0.0 for place in range(50)])
    records = [{"step": step + 1, "phase": "train", "reward/mean": value} for step, value in enumerate(ramp)]
    figure = plots.rewards(records)
    assert figure is not None
    each, mean = (np.asarray(line.get_ydata()) for line in figure.axes[0].get_lines())
    assert mean == pytest.approx(each)


def test_health_metrics_that_never_change_are_a_line_of_text_instead_of_a_plot() -> None:
    values = [{"packing/waste_ratio": 0.0, "actor/kl": 0.5, "actor/grad_norm": float(step)} for step in range(4)]
    records = [{"step": step, "phase": "train"} | one for step, one in enumerate(values)]
    figure = plots.policy_health(records)
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == ["actor/grad_norm"]
    assert plots.health_text(records).endswith("The same in all steps: actor/kl 0.5, packing/waste_ratio 0.")
    assert plots.policy_health([record | {"actor/grad_norm": 1.0} for record in records]) is None
    one_step = plots.policy_health(records[:1])
    assert one_step is not None
    assert "same in all" not in plots.health_text(records[:1])


@pytest.mark.parametrize("scale", [3e-7, 3e-4, 0.3, 3.0, 3e8])
def test_no_power_or_offset_stands_above_a_health_plot_where_the_title_is(scale: float) -> None:
    records = [{"step": step, "phase": "train", "rollout/logprob_gap": scale * (1 + step / 100)} for step in range(10)]
    with matplotlib.rc_context(SETTINGS):
        figure = plots.policy_health(records)
        assert figure is not None
        figure.draw_without_rendering()
    axes = figure.axes[0]
    assert axes.yaxis.get_offset_text().get_text() == ""
    low, high = axes.get_ylim()
    inside = [(tick, text.get_text()) for tick, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)]
    labels = [(tick, text) for tick, text in inside if low <= tick <= high]
    assert len(labels) > 1
    assert [float(text) for _, text in labels] == pytest.approx([tick for tick, _ in labels])


def test_a_loss_ends_below_the_top_of_its_plot() -> None:
    records = [{"step": step, "phase": "sft_warmup", "sft_warmup/loss": 4.0 / step} for step in range(1, 9)]
    figure = plots.sft_warmup_loss(records)
    assert figure is not None
    assert figure.axes[0].get_ylim() == pytest.approx((0, 4.32))


def test_the_table_of_all_metrics_is_closed_and_names_each_phase_once(tmp_path: Path) -> None:
    a_run(tmp_path)
    page = write_report(tmp_path).read_text()
    assert "<details open" not in page
    table = page.partition("All metrics")[2].partition("</table>")[0]
    assert re.findall(r'<tr class="phase"><th>(\w+)</th>', table) == ["train", "evaluation", "sft_warmup"]
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    assert {row.count("<td") + row.count("<th") for row in rows} == {7}


def test_a_single_value_is_not_shown_as_a_change() -> None:
    record = {"step": 1, "phase": "train", "time_s": 1.0, "reward/mean": 0.25}
    (one, *_), (two, *_) = (
        summarize([record], None),
        summarize([record, record | {"step": 2, "reward/mean": 0.5}], None),
    )
    assert (one.label, one.before, one.after) == ("mean reward", None, "0.250")
    assert (two.label, two.before, two.after) == ("mean reward, first and last step", "0.250", "0.500")


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="contains no run"):
        write_report(tmp_path)


def test_the_picture_in_the_page_equals_the_file(tmp_path: Path) -> None:
    a_run(tmp_path)
    page = write_report(tmp_path).read_text()
    assert base64.b64encode((tmp_path / "packing.png").read_bytes()).decode() in page


def test_curves_leave_out_values_that_are_not_finite() -> None:
    records = [
        {"step": step, "phase": "train", "reward/mean": value}
        for step, value in ((1, 0.5), (2, float("nan")), (3, float("inf")), (4, 1.0))
    ]
    assert Series.of(records, "reward/mean", "train").steps.tolist() == [1, 4]
    assert Series.of(records, "reward/mean", "sft_warmup").values.tolist() == []


def train(step: int, time_s: float, step_s: float, **seconds: float) -> dict[str, Any]:
    times = {f"time/{name}_s": value for name, value in seconds.items()}
    return {"phase": "train", "step": step, "time_s": time_s, "time/step_s": step_s} | times


def evaluation(step: int, time_s: float, **seconds: float) -> dict[str, Any]:
    times = {f"time/{name}_s": value for name, value in seconds.items()}
    return {"phase": "evaluation", "step": step, "time_s": time_s} | times


def test_the_parts_of_a_run_add_up_to_its_steps_and_what_was_between_them() -> None:
    records = [
        {"phase": "sft_warmup", "step": 1, "time_s": 5.0, "time/update_s": 4.5, "time/step_s": 5.0},
        evaluation(0, 8.0, evaluate=2.0, sync=1.0, generate=1.5),
        train(1, 17.0, 9.0, update=4.0, generate=2.0, restart=1.0),
        train(2, 29.0, 10.0, update=6.0, generate=3.0, checkpoint=2.0),
        evaluation(2, 32.0, evaluate=3.0),
    ]
    times = StepTimes.of(records)
    between = {"evaluate": 5.0, "checkpoint": 2.0, "sync": 1.0}
    assert times.parts == {"update": 10.0, "generate": 5.0, "warm-up": 5.0, "other": 4.0} | between
    assert list(times.parts)[-1] == "other"
    assert sum(times.parts.values()) == records[-1]["time_s"]
    assert (times.meanwhile, times.included) == ({}, {"restart": 1.0})


def test_what_runs_while_other_steps_train_is_no_part_of_the_steps() -> None:
    # With trainer.lead: each batch is generated during four steps, and the evaluation after step 1 during step 2.
    records = [
        evaluation(0, 5.0, evaluate=5.0),
        train(1, 15.0, 10.0, generate=40.0, reward=1.0, update=8.0, wait=2.0),
        evaluation(1, 24.0, evaluate=9.0),
        train(2, 25.0, 10.0, generate=40.0, reward=1.0, update=7.0, wait=1.0, drain=2.0),
        evaluation(2, 31.0, evaluate=6.0),
    ]
    times = StepTimes.of(records)
    assert times.parts == {"update": 15.0, "evaluate": 11.0, "wait": 3.0, "drain": 2.0}
    assert times.meanwhile == {"generate": 80.0, "evaluate": 9.0, "reward": 2.0}
    figure = time_by_part(times)
    assert figure is not None
    shown = [text.get_text().split() for text in figure.axes[0].texts]
    assert shown[0] == ["15.0", "s", "(48%)"]
    assert shown[4] == ["80.0", "s", "while", "other", "steps", "train"]


def test_the_summary_names_padded_and_used_waste() -> None:
    record = PlanRecord(1, (4, 2, 4, 2), Batching(max_tokens=64, micro_batch_size=2), 1)
    (waste,) = [row for row in summarize([], record) if row.label.startswith("wasted")]
    # Padded: two microbatches of 2 × 4 slots for 12 tokens; packed has no padding at all.
    assert (waste.before, waste.after) == ("25.0%", "0.0%")


def test_the_wasted_slots_are_those_of_all_optimizer_steps_of_the_step(tmp_path: Path) -> None:
    # Padded: the first optimizer step has no padding, the second 4 × 8 slots for 14 tokens.
    record = PlanRecord(1, (8, 8, 8, 8, 2, 2, 2, 8), Batching(max_tokens=64, micro_batch_size=4), 1, mini_batch_size=4)
    (waste,) = [row for row in summarize([], record) if row.label.startswith("wasted")]
    assert (waste.before, waste.after) == (f"{18 / 64:.1%}", "0.0%")
    (tmp_path / "metrics.jsonl").write_text("")
    record.write(tmp_path / "packing.json")
    assert "The sequences of the first optimizer step of step 1," in write_report(tmp_path).read_text()


def test_drawing_a_report_leaves_matplotlibs_own_settings_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    a_run(tmp_path)
    write_report(tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_metrics_of_plans_are_summed_up_over_training_steps_alone() -> None:
    values = {("train", 1): 0.5, ("train", 2): 0.1, ("train", 3): 0.3, ("sft_warmup", 1): 9.0}
    records = [
        {"phase": phase, "step": step, "time_s": 1.0, "packing/waste_ratio": value, "actor/loss": 1.0}
        for (phase, step), value in values.items()
    ]
    assert packing_table(records)[1:] == [
        ["packing/waste_ratio", "0.1", "0.3", "0.5", "Token slots that hold no real token."]
    ]
    assert packing_table([record for record in records if record["phase"] != "train"]) == []


def test_every_metric_of_plans_is_summed_up_and_those_that_show_a_loss_are_explained() -> None:
    plan = make_plan([60, 3, 5, 7, 20, 30, 9, 11], Batching(max_tokens=256), dp_size=2)
    metrics = {f"packing/{name}": float(value) for name, value in asdict(plan.metrics).items()}
    record = {"phase": "train", "step": 1, "time_s": 1.0, **metrics}
    assert metrics["packing/packing_efficiency"] < 1  # but that isn't a loss: each rank needs a microbatch
    *rows, zeros = packing_table([record])[1:]
    assert {row[0] for row in rows} == {name for name, value in metrics.items() if value}
    assert not any(row[-1] for row in rows)
    assert zeros[:4] == ["0 in all steps", "0", "0", "0"]
    assert set(zeros[4].split(", ")) == {name for name, value in metrics.items() if not value}
    explained = [row for row in packing_table([record | {"packing/truncated_tokens": 8.0}])[1:-1] if row[-1]]
    assert explained == [["packing/truncated_tokens", "8", "8", "8", "Tokens cut from overlong sequences."]]
