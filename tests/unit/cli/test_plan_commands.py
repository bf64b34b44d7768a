"""`rlpack plan` and `rlpack simulate` as a user calls them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlpack.batch.errors import DataError
from rlpack.cli.main import main
from rlpack.config.compose import compose
from rlpack.config.roles import role_batching
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.packing import Batching, Cost, MicrobatchPlan, make_plan
from rlpack.packing.analysis.data_rank import DataRank


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_comparison_has_a_line_for_every_algorithm_and_mode(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "lengths.npy", np.array([60, 50, 40, 30, 20, 10] * 20))
    picture = tmp_path / "deep" / "plan.png"
    code, out, _ = run(capsys, "plan", str(tmp_path / "lengths.npy"), "--max-tokens", "100", "--ranks", "4",
                       "--compare", "--picture", str(picture))  # fmt: skip
    assert code == 0
    assert out.splitlines()[0] == (
        "120 sequences, 4,200 tokens, mean 35, longest 60; a budget of 100 needs at least 42 microbatches in all"
    )
    names = [line.split("  ")[0] for line in out.splitlines()[2:10]]
    assert sum(name.startswith("4 × packed, ") for name in names) == 6
    assert names[6:] == ["4 × dynamic", "4 × fixed"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "picture of fixed (padded, in arrival order); dynamic; packed, best_fit_decreasing" in out


def test_a_runs_directory_gives_the_lengths_of_its_last_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    PlanRecord.of(make_plan([5, 6, 7], Batching(max_tokens=16), dp_size=2)).write(tmp_path / "packing.json")
    code, out, _ = run(capsys, "plan", str(tmp_path), "--ranks", "2")
    assert (code, out.splitlines()[1].startswith("3 sequences, 18 tokens")) == (0, True)


def test_a_suggestion_can_be_given_to_train(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "lognormal", "--rows", "256", "--longest", "512", "--suggest"]
    code, out, _ = run(capsys, *small, "--ranks", "4,8", "--max-tokens", "512")
    assert code == 0
    found = [line for line in out.splitlines() if line.startswith("on ")]
    assert [line.split(":")[0] for line in found] == ["on 4 ranks", "on 8 ranks"]
    assert all("suggested: batching.mode=packed batching.algorithm=" in line for line in found)
    budget = found[0].partition("batching.max_tokens=")[2].split()[0]
    _, out, _ = run(capsys, *small, "--ranks", "4", "--max-tokens", budget)
    assert "on 4 ranks: no suggestion: no alternative saves" in out


@pytest.mark.parametrize("mode", ["packed", "dynamic", "fixed"])
def test_a_suggestion_keeps_to_the_mode_that_is_asked_for(capsys: pytest.CaptureFixture[str], mode: str) -> None:
    bound = ["--fixed-rows", "64"] if mode == "fixed" else ["--max-tokens", "512"]
    code, out, err = run(capsys, "plan", "lognormal", "--rows", "256", "--longest", "512", "--mode", mode, *bound,
                         "--suggest")  # fmt: skip
    assert (code, err) == (0, "")
    assert f"suggested: batching.mode={mode} " in out


def test_a_suggestions_overrides_give_the_plan_that_it_reports(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = np.random.default_rng(0).integers(4000, 9000, 512)  # a row exceeds the budget of `rlpack train`
    np.save(tmp_path / "lengths.npy", lengths)
    options = ("--ranks", "4", "--mode", "fixed", "--suggest", "--overhead-ms", "0", "--kb-per-slot", "1000")
    code, out, _ = run(capsys, "plan", str(tmp_path / "lengths.npy"), *options)
    assert code == 0
    overrides, _, reported = out.splitlines()[-1].partition("suggested: ")[2].partition(" (")
    plan = make_plan(lengths, compose(overrides.split()).batching, dp_size=4)
    # At 1 MB a slot, the fullest microbatch takes as many MB as it has slots.
    assert f"{int((plan.counts * plan.padded_lengths).max()) / 1e3:.1f} GB on the fullest rank" in reported


def test_more_ranks_and_less_padding_make_steps_shorter(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "simulate", "zipf", "--rows", "2048", "--ranks", "2,16")
    assert code == 0
    cells = [line.replace(" × ", "-").split() for line in out.splitlines()[4:10]]
    steps = {name: float(step) for name, _, _, _, step, *_ in cells}
    assert steps["16-packed"] < steps["2-packed"] < steps["2-fixed"]
    assert steps["2-packed"] <= steps["2-dynamic"]


def test_a_simulation_states_what_it_assumes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--rows", "64", "--ranks", "2", "--layers", "7", "--hidden-size", "1024", "--tflops", "31.5")
    first, second = run(capsys, "simulate", "zipf", *options)[1].splitlines()[:2]
    assert first == (
        "assuming hidden size 1,024, 7 layers, 31.5 TFLOPS a device, 10 ms overhead a microbatch, 0 GB fixed memory"
    )
    assert second.startswith("note: memory counts only activations")
    first, second = run(capsys, "simulate", "zipf", *options, "--fixed-gb", "9.5")[1].splitlines()[:2]
    assert first.endswith("9.5 GB fixed memory")
    assert not second.startswith("note")
    plan = make_plan([9] * 12, Batching(max_tokens=64), dp_size=2, cost=Cost(linear=1.0, quadratic=1.0))
    PlanRecord.of(plan, step=1).write(tmp_path / "packing.json")
    assert "assuming the FLOPs of the run," in run(capsys, "simulate", str(tmp_path), "--ranks", "2")[1]


@pytest.mark.parametrize("quadratic", [2.0 * 1024 * 20, 2.0 * 1024 * 4, 0.0])
def test_activations_of_a_run_are_those_of_its_layers_whatever_their_attention(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, quadratic: float
) -> None:
    # Layers with a window count as linear FLOPs; their activations need as much memory as those of other layers.
    plan = make_plan([8000], Batching(max_tokens=8192), dp_size=1, cost=Cost(linear=1e9, quadratic=quadratic))
    PlanRecord.of(plan, step=1, shape=(1024, 20)).write(tmp_path / "packing.json")
    lines = run(capsys, "plan", str(tmp_path))[1].splitlines()
    gigabytes = 8000 * 34 * 1024 * 20 / 1e9
    assert any(f"{gigabytes:.1f}" in line.split() for line in lines)


def test_a_modeled_time_below_a_second_has_four_digits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([5, 7, 9, 30]))
    small = ("--ranks", "1", "--hidden-size", "8", "--layers", "1", "--overhead-ms", "0.0123456")
    _, out, _ = run(capsys, "plan", str(tmp_path / "lengths.npy"), *small)
    assert float(out.splitlines()[2].split()[-3]) == pytest.approx(1.23456e-5, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "nowhere.jsonl"], 3, "rlpack plan: there is no file nowhere.jsonl"),
        (["plan", "zipf", "--ranks", "0"], 2, "rlpack plan: --ranks is 0; it has to be from 1 to"),
        (["plan", "zipf", "--max-tokens", "0"], 2, "rlpack plan: --max-tokens is 0; it has to be above 0"),
        (["plan", "zipf", "--max-tokens", "4", "--pad-to-multiple", "8"], 2, "pad_to_multiple (8) exceeds"),
        (["simulate", "zipf", "--ranks", "many"], 2, "--ranks is 'many'; give whole numbers separated by commas"),
        (["simulate", "zipf", "--tflops", "-1"], 2, "--tflops is -1; it has to be above 0"),
        (["plan", "zipf", "--rows", "2000000000"], 2, "--rows is 2,000,000,000, over the limit of 16,777,216"),
        (
            ["simulate", "zipf", "--rows-per-rank", "99999", "--ranks", "8,16384"],
            2,
            "makes 1,638,383,616 rows on 16,384",
        ),
        (["simulate", "zipf", "--rows-per-rank", "9", "--rows", "5"], 2, "--rows is the total of all ranks"),
        (["plan", "zipf", "--column", "x"], 2, "--column is for files, but zipf is a synthetic trace; remove it"),
        (["plan", "a.npy", "--rows", "5"], 2, "--rows is for synthetic traces, but a.npy is not one; remove it"),
        (["plan", "a.npy", "--column", "x"], 2, "--column is for .jsonl and .parquet files, but a.npy is not one"),
        (
            ["plan", "zipf", "--mode", "fixed", "--max-tokens", "9"],
            2,
            "--max-tokens has no effect on fixed mode",
        ),
        (["plan", "zipf", "--mode", "dynamic", "--algorithm", "optimal"], 2, "--algorithm is for packed mode, but"),
        (["plan", "zipf", "--compare", "--mode", "fixed"], 2, "--mode chooses one, but --compare shows all"),
        (["plan", "zipf", "--fixed-rows", "9"], 2, "--fixed-rows is for fixed mode, but --mode is packed"),
        (["plan", "zipf", "--fit", "--tflops", "9"], 2, "--tflops is fitted by --fit"),
        (["plan", "zipf", "--fit", "--kb-per-slot", "9", "--layers", "2"], 2, "--layers sets times and memory, which"),
        (["plan", "zipf", "--picture", "plan.xyz"], 2, "--picture plan.xyz ends in .xyz; give one of .png, .svg, .pdf"),
        (["plan", "zipf", "--ranks", "2,4", "--picture", "a.png"], 2, "--picture draws one plan, but --ranks has"),
        (
            ["plan", "zipf", "--compare", "--ranks", "2,4", "--picture", "a.png"],
            2,
            "--picture draws one plan, but --ranks has several numbers",
        ),
        (["plan", "zipf", "--overhead-ms", "-5"], 2, "--overhead-ms is -5; it has to be at least 0"),
        (["plan", "zipf", "--fixed-gb", "-1.5"], 2, "--fixed-gb is -1.5; it has to be at least 0"),
        (["simulate", "zipf", "--kb-per-slot", "0"], 2, "--kb-per-slot is 0; it has to be above 0"),
        (["simulate", "zipf", "--kb-per-slot", "nan"], 2, "--kb-per-slot is nan; it has to be finite"),
        (["plan", "zipf", "--tflops", "inf"], 2, "--tflops is inf; it has to be finite"),
        (["plan", "zipf", "--longest", "3000000000"], 2, "--longest is 3,000,000,000, over the limit of 2,147,483,647"),
        (["plan", "zipf", "--hidden-size", "9" * 400], 2, "999, over the limit of 2,147,483,647; lower it"),
        (["plan", "zipf", "--layers", "-" + "9" * 400], 2, "999; it has to be above 0"),
        (["plan", "zipf", "--memory-gb", "0.001", "--suggest"], 2, "slots fit into 90% of memory"),
    ],
)
def test_what_can_not_be_planned_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    found, _, err = run(capsys, *arguments)
    assert (found, len(err.splitlines())) == (code, 1)
    assert message in err


def test_a_directory_without_a_plan_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "plan", str(tmp_path))
    assert (code, "has no packing.json; give a run's directory" in err) == (3, True)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "phase": "sft_warmup", "time_s": 1.0}\n')
    code, _, err = run(capsys, "plan", str(tmp_path))
    assert (code, "has no packing.json: the run took no training step" in err) == (3, True)
    assert f"run_dir={tmp_path} resume=auto" in err
    metrics.write_text('{"step": 1, "phase": "train", "time_s": 1.0}\n')
    code, _, err = run(capsys, "plan", str(tmp_path))
    assert (code, "has no packing.json, in which a recipe stores the lengths" in err) == (3, True)


def test_sequences_over_the_budget_and_several_optimizer_steps_are_spoken_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "lengths.npy", np.array([60, 50, 40, 130]))
    options = ["--max-tokens", "100", "--ranks", "1", "--mini-batch-size", "2"]
    _, out, _ = run(capsys, "plan", str(tmp_path / "lengths.npy"), *options)
    assert "numbers are totals over all 2 optimizer steps" in out
    assert "1 sequences exceed the budget: each gets its own microbatch here" in out


@pytest.mark.parametrize(
    ("options", "has_budget"),
    [(["--mode", "fixed"], False), (["--mode", "dynamic"], True), ([], True), (["--compare"], True)],
)
def test_a_budget_is_spoken_of_only_where_a_plan_has_one(
    capsys: pytest.CaptureFixture[str], options: list[str], *, has_budget: bool
) -> None:
    code, out, _ = run(capsys, "plan", "lognormal", "--longest", "40000", "--rows", "2000", *options)
    assert (code, out.startswith("2,000 sequences, ")) == (0, True)
    assert ("a budget of 16,384 needs at least" in out, "exceed the budget" in out) == (has_budget, has_budget)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    assert left.value.code == 2
    return capsys.readouterr().err


def test_a_mistyped_option_is_one_line_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "plan", "zipf", "--maxtokens", "9") == (
        "rlpack plan: unknown option --maxtokens; did you mean --max-tokens?\n"
    )
    assert refused(capsys, "simulate", "zipf", "--compare") == "rlpack simulate: unknown option --compare; see --help\n"
    assert "unknown option --asyn; did you mean --async?" in refused(capsys, "simulate", "zipf", "--asyn")
    assert refused(capsys, "plan", "zipf", "--rows", "many").startswith("rlpack plan: argument --rows: invalid int")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("plan",), ["Show how given sequence lengths would be batched", "rlpack plan --suggest key=value ..."]),
        (("simulate",), ["Compare the modeled step times", "commas (default: 8,64,512)"]),
        (("simulate", "--async"), ["Forecast the steps per hour", "engine (default: 20)", "trace (default: 8192)"]),
    ],
)
def test_the_help_says_what_the_command_does_and_which_values_are_defaults(
    arguments: tuple[str, ...], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert [text for text in texts if text not in shown] == []


def test_few_sequences_for_each_rank_are_remarked(capsys: pytest.CaptureFixture[str]) -> None:
    said = "an optimizer step has 64 sequences for 64 ranks, 1 each: its time is that of the longest"
    for command, hint in (("plan", "more rows\n"), ("simulate", "more rows (--rows-per-rank grows them")):
        _, out, _ = run(capsys, command, "lognormal", "--rows", "64", "--ranks", "1,16,64")
        assert said in out
        assert hint in out
        assert "for 16 ranks" not in out


def test_fewer_sequences_than_ranks_are_remarked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.arange(1, 11))
    for command in ("plan", "simulate"):
        _, out, _ = run(capsys, command, str(tmp_path / "lengths.npy"), "--ranks", "4,16", "--max-tokens", "64")
        assert out.splitlines()[-1] == "an optimizer step has 10 sequences for 16 ranks: at least 6 get none"
    _, out, _ = run(capsys, "plan", str(tmp_path / "lengths.npy"), "--ranks", "8", "--mini-batch-size", "5")
    assert out.splitlines()[-1] == "an optimizer step has 5 sequences for 8 ranks: at least 3 get none"


def test_every_column_is_explained_and_named_alike(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "simulate"):
        _, out, _ = run(capsys, command, "zipf", "--rows", "64", "--ranks", "2", "--memory-gb", "1")
        header, *lines = out.splitlines()[3 if command == "simulate" else 1 :]
        shared = ["microbatches", "waste %", "time s", "memory GB"]
        for name in shared:
            assert name in header
            assert any(line.startswith(name) for line in lines)
        assert lines[0].startswith("2 × packed")
        assert lines[-1].startswith("! ")
        assert lines[-1].endswith("more than the 1 GB of a device (--memory-gb)")


def test_a_trace_grows_with_the_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([5, 7, 9]))
    code, out, _ = run(capsys, "simulate", str(tmp_path / "lengths.npy"), "--rows-per-rank", "2", "--ranks", "2,4")
    assert code == 0
    assert out.splitlines()[2].startswith("2 ranks: 4 sequences, 26 tokens")
    assert out.splitlines()[3].startswith("4 ranks: 8 sequences, 54 tokens")


@pytest.mark.parametrize("suffix", ["svg", "pdf", "jpg", "webp"])
def test_a_picture_is_of_the_kind_that_its_name_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str
) -> None:
    starts = {"svg": b"<?xml", "pdf": b"%PDF", "jpg": b"\xff\xd8", "webp": b"RIFF"}
    picture = tmp_path / f"plan.{suffix}"
    assert run(capsys, "plan", "zipf", "--rows", "20", "--ranks", "2", "--picture", str(picture))[0] == 0
    assert picture.read_bytes().startswith(starts[suffix])


def test_a_picture_that_cannot_be_written_is_said_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "plan.png", tmp_path / "folder.png"):
        (tmp_path / "folder.png").mkdir(exist_ok=True)
        code, out, err = run(capsys, "plan", "zipf", "--picture", str(place))
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert f"--picture {place} can't be written: " in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "packing.json is not JSON"),
        ('{"step": 1}', "packing.json has no 'lengths'"),
        ("[]", "is not a plan record: it contains a list instead"),
        ('{"lengths": [3, 1.5]}', "is not a plan record: length of row 1 is 1.5, of type float"),
        ('{"lengths": [true]}', "length of row 0 is True, of type bool"),
    ],
)
def test_a_record_that_no_plan_can_be_made_from_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "packing.json").write_text(content)
    code, _, err = run(capsys, "plan", str(tmp_path))
    assert (code, len(err.splitlines())) == (3, 1)
    assert message in err


def test_a_record_without_lengths_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    PlanRecord.of(make_plan([], Batching(max_tokens=16), dp_size=2)).write(tmp_path / "packing.json")
    code, _, err = run(capsys, "plan", str(tmp_path))
    assert (code, "packing.json has no lengths; give a run that took a step" in err) == (3, True)


def test_plain_numbers_have_no_column(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lengths.jsonl").write_text("3\n4\n")
    code, _, err = run(capsys, "plan", str(tmp_path / "lengths.jsonl"), "--column", "length")
    assert (code, "has plain numbers, which have no column 'length'; remove --column" in err) == (3, True)


def test_damaged_metrics_are_one_warning_with_a_count(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    PlanRecord.of(make_plan([5, 6], Batching(max_tokens=16), dp_size=2)).write(tmp_path / "packing.json")
    (tmp_path / "metrics.jsonl").write_text("not a record\n" * 30)
    code, _, err = run(capsys, "plan", str(tmp_path), "--fit")
    assert (code, "calibration has 0 steps with times" in err) == (2, True)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "30 lines are not records and are skipped; the first is line 1"
    ]


def test_a_plan_names_the_multiple_of_microbatches_that_the_run_had(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = make_plan([40, 30, 20, 20], Batching(max_tokens=64, divisible_by=4), dp_size=1)
    PlanRecord.of(plan, step=3).write(tmp_path / "packing.json")
    code, out, _ = run(capsys, "plan", str(tmp_path))
    assert (code, "microbatches in multiples of 4" in out.splitlines()[0]) == (0, True)


def test_a_run_gives_ranks_batching_and_model_for_what_is_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    batching = Batching(max_tokens=64, algorithm="first_fit_decreasing", pad_to_multiple=8)
    cost = Cost(linear=5e11, quadratic=1e6)
    plan = make_plan([40, 30, 20, 20], batching, dp_size=2, mini_batch_size=2, cost=cost)
    PlanRecord.of(plan, step=3).write(tmp_path / "packing.json")
    code, out, _ = run(capsys, "plan", str(tmp_path))
    taken, headline, _, row, *_ = out.splitlines()
    assert (code, taken.startswith("as in step 3 of ")) == (0, True)
    assert "--max-tokens 64, --mini-batch-size 2, --pad-to-multiple 8, --ranks 2, --mode packed" in taken
    assert "a budget of 64 " in headline
    assert row.startswith("2 × packed, first_fit_decreasing ")
    seconds = float(row.split()[8])  # 40 and 24 aligned tokens are the fuller rank's of the two optimizer steps
    assert seconds == pytest.approx(3 * (64 * 5e11) / 400e12 + 2 * 10e-3, rel=0.05)
    code, out, _ = run(capsys, "plan", str(tmp_path), "--ranks", "1", "--mode", "fixed", "--fixed-rows", "2")
    assert out.splitlines()[3].startswith("1 × fixed ")
    assert "--mode" not in out.splitlines()[0]
    code, out, _ = run(capsys, "simulate", str(tmp_path), "--rows-per-rank", "4", "--ranks", "2")
    assert "numbers are totals" not in out  # rows that grow with the ranks stay one


def test_a_run_whose_count_of_microbatches_was_asked_for_keeps_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    batching = Batching(max_tokens=64, min_microbatches=3, divisible_by=2)
    PlanRecord.of(make_plan([9] * 12, batching, dp_size=2)).write(tmp_path / "packing.json")
    _, out, _ = run(capsys, "plan", str(tmp_path))
    assert out.splitlines()[3].split()[4] == "4"


def test_the_lengths_of_a_run_that_shares_prompts_can_be_compared_in_all_modes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    batching = Batching(max_tokens=64, share_prompts=True)
    plan = make_plan([40, 30], batching, dp_size=1, groups=[0, 0], split_groups=True, prefixes=[20, 20])
    PlanRecord.of(plan).write(tmp_path / "packing.json")
    code, out, _ = run(capsys, "plan", str(tmp_path), "--compare", "--suggest")
    assert code == 0
    assert out.splitlines()[1].startswith("2 sequences, 70 tokens (20 of them in repeated prompts), mean 35")


def run_with_shared_prompts(folder: Path, *, whole_groups: bool = False) -> MicrobatchPlan:
    """Write a run of 8 prompts of 50 tokens with 4 responses of 10 each, on 2 ranks."""
    plan = make_plan(
        [60] * 32,
        Batching(max_tokens=180, share_prompts=True),
        dp_size=2,
        groups=np.repeat(np.arange(8), 4),
        split_groups=not whole_groups,
        prefixes=[50] * 32,
        cost=Cost(linear=1e12),
    )
    PlanRecord.of(plan, step=3).write(folder / "packing.json")
    return plan


def test_a_run_that_shares_prompts_is_planned_with_shared_prompts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = run_with_shared_prompts(tmp_path)
    assert plan.metrics.num_microbatches == 4  # two prompts each: 2 × (50 + 4 × 10) of 180 tokens
    code, out, _ = run(capsys, "plan", str(tmp_path), "--tflops", "3", "--overhead-ms", "0")
    first, headline, _, row, *_ = out.splitlines()
    assert (code, first.endswith("(--kb-per-slot)")) == (0, True)
    assert "FLOPs of its model, batching.share_prompts; " in first
    assert headline == (
        "32 sequences, 1,920 tokens (1,200 of them in repeated prompts), mean 60, longest 60; a budget of 180 needs at "
        "least 4 microbatches in all"
    )
    assert float(row.split()[4]) == 2  # microbatches per rank
    assert float(row.split()[8]) == pytest.approx(360)  # 360 tokens of a rank, 3 TFLOP each, at 3 TFLOPS


def test_a_run_that_shares_prompts_is_simulated_with_shared_prompts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_with_shared_prompts(tmp_path)
    for options in ("--ranks=2",), ("--ranks=2", "--rows-per-rank=16"), ("--ranks=4", "--rows-per-rank=16"):
        _, out, _ = run(capsys, "simulate", str(tmp_path), *options)
        lines = [line.split() for line in out.splitlines() if " × " in line and "batching" not in line]
        cells = {mode: count for _, _, mode, count, *_ in lines}
        assert cells == {"packed": "2", "dynamic": "6", "fixed": "1"}
    assert "64 sequences, 3,840 tokens (2,400 of them in repeated prompts)" in out
    assert "needs at least 8 microbatches" in out


@pytest.mark.parametrize("options", [(), ("--mode", "dynamic"), ("--pad-to-multiple", "8")])
def test_a_run_that_shares_prompts_and_is_planned_without_them_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    run_with_shared_prompts(tmp_path, whole_groups=not options)
    code, out, _ = run(capsys, "plan", str(tmp_path), *options)
    assert (code, "without batching.share_prompts" in out.splitlines()[0]) == (0, True)
    assert ("without keeping groups whole" in out.splitlines()[0]) == (not options)
    assert out.splitlines()[1].startswith("32 sequences, 1,920 tokens, mean 60, longest 60; a budget of 180 needs")


def test_a_suggestion_for_a_run_that_shares_prompts_shares_them_or_gives_the_key_that_does_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_with_shared_prompts(tmp_path)
    options = ("plan", str(tmp_path), "--suggest", "--kb-per-slot", "1000", "--tflops", "4000", "--overhead-ms", "100")
    _, out, _ = run(capsys, *options)
    suggested = out.splitlines()[-1]
    assert "suggested: batching.mode=packed" in suggested
    assert "batching.pad_to_multiple=1 batching.max_tokens=" in suggested
    assert "share_prompts" not in suggested
    assert "(0.370 s, 21.3% less" in suggested  # 360 tokens of a rank, 3 TFLOP each, in one microbatch instead of two
    _, out, _ = run(capsys, *options, "--mode", "dynamic")
    assert "batching.mode=dynamic batching.length_multiple=1 batching.share_prompts=false" in out.splitlines()[-1]


# Layouts of 8 devices a rank.
RANKS = "placement.pools.main.ranks=16"
LAYOUTS = {
    "ulysses": ([RANKS, "actor.parallel.cp=4", "actor.parallel.tp=2"], DataRank(cp=4, tp=2)),
    "all_gather": (
        [RANKS, "actor.parallel.cp=4", "actor.parallel.pp=2", "actor.parallel.cp_method=all_gather"],
        DataRank(cp=4, pp=2, chunks=8),
    ),
}


def run_with_layout(folder: Path, method: str, lengths: np.ndarray) -> None:
    """Write a run of 8 devices a rank with a budget of 8,192 tokens for each cp rank, hidden size 4,096, 36 layers."""
    keys, data_rank = LAYOUTS[method]
    batching = role_batching(compose([*keys, "batching.max_tokens=8192"]), "actor")
    assert batching.max_tokens == 4 * 8192
    plan = make_plan(lengths, batching, dp_size=2, cost=Cost(linear=1e12))
    PlanRecord.of(plan, step=5, shape=(4096, 36), data_rank=data_rank).write(folder / "packing.json")


@pytest.mark.parametrize(("method", "activation_ranks"), [("ulysses", 8), ("all_gather", 4)])
def test_devices_that_work_on_the_same_rows_share_time_and_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, method: str, activation_ranks: int
) -> None:
    run_with_layout(tmp_path, method, np.full(256, 4096))
    code, out, _ = run(capsys, "plan", str(tmp_path), "--overhead-ms", "0")
    first, headline, _, row, *_ = out.splitlines()
    assert (code, "--max-tokens 8192, " in first) == (0, True)
    assert "8 devices a rank (cp 4, " in first
    assert "--max-tokens for each of the 4 ranks of cp; 5.01e+03 kB of activations per slot" in first
    assert "a budget of 32,768 needs at least 32 microbatches" in headline
    # Of the 32 microbatches of 8 sequences, each of the two ranks runs 16.
    _, _, _, _, microbatches, *_, seconds, gigabytes, _ = row.split()
    assert int(microbatches) == 16
    assert float(seconds) == pytest.approx(16 * 3 * 32768 * 1e12 / (8 * 400e12), abs=1e-3)
    assert float(gigabytes.rstrip("!")) == pytest.approx(32768 * 34 * 4096 * 36 / activation_ranks / 1e9, abs=0.05)


@pytest.mark.parametrize(("method", "activation_ranks"), [("ulysses", 8), ("all_gather", 4)])
def test_a_suggestion_for_shared_rows_is_the_budget_of_one_rank_of_cp(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, method: str, activation_ranks: int
) -> None:
    lengths = np.random.default_rng(0).integers(500, 8000, 256)
    run_with_layout(tmp_path, method, lengths)
    _, out, _ = run(capsys, "plan", str(tmp_path), "--suggest", "--memory-gb", "30.001", "--overhead-ms", "10000")
    overrides, _, reported = out.splitlines()[-1].partition("suggested: ")[2].partition(" (")
    assert reported.startswith("a budget of each of the 4 ranks of cp; ")
    batching = role_batching(compose([*LAYOUTS[method][0], *overrides.split()]), "actor")
    plan = make_plan(lengths, replace(batching, divisible_by=1), dp_size=2, cost=Cost(linear=1e12))
    slots = plan.padded_lengths * (1 if batching.mode == "packed" else plan.counts)
    seconds = 3 * slots.max(axis=0).sum() * 1e12 / (8 * 400e12) + 10 * slots.shape[1]
    assert float(reported.split("; ")[1].split()[0]) == pytest.approx(seconds, rel=1e-4)
    assert f" {slots.max() * 34 * 4096 * 36 / activation_ranks / 1e9:.1f} GB on the fullest rank" in reported
    assert slots.max() * 34 * 4096 * 36 / activation_ranks > 0.85 * 0.9 * 30e9


def test_records_of_earlier_runs_have_single_devices(tmp_path: Path) -> None:
    path = tmp_path / "packing.json"
    run_with_layout(tmp_path, "all_gather", np.full(8, 100))
    assert PlanRecord.read(path).data_rank == DataRank(cp=4, pp=2, chunks=8)
    values = json.loads(path.read_text())
    del values["data_rank"]
    path.write_text(json.dumps(values))
    assert PlanRecord.read(path).data_rank == DataRank()
    path.write_text(json.dumps(values | {"data_rank": {"cp": 0}}))
    with pytest.raises(DataError, match="is not a plan record: cp is 0"):
        PlanRecord.read(path)
