"""`rlpack simulate --async` from a trace, a file and a run."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from rlpack.cli.main import main
from rlpack.cli.rates_of_run import measured, scores_apart
from rlpack.config.compose import compose
from rlpack.config.roles import started_roles
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.run_dir import CONFIG, LENGTHS, METRICS
from rlpack.packing import Batching


def simulate(*words: str) -> int:
    return main(["simulate", *words, "--async"])


def test_the_best_setup_comes_with_its_keys(capsys: pytest.CaptureFixture[str]):
    assert simulate("lognormal", "--ranks", "4", "--leads", "0,1,3") == 0
    out = capsys.readouterr().out
    rows = [line.split("  ")[0] for line in out.splitlines()[2:-1]]
    assert rows == ["in turns", "lead 1, drain", "lead 1, in_flight", "lead 3, in_flight"]
    assert "trainer.lead=3 rollout=vllm rollout.publish=in_flight placement=two_pools" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (
            ("--ranks", "3", "--leads", "2"),
            "placement.pools.main.ranks={} placement.pools.engines.ranks={}",
        ),
        (
            ("--ranks", "3", "--leads", "0"),
            "trainer.lead=0 rollout.publish=drain placement.pools.main.ranks={} placement.roles.rollout=main "
            "~placement.pools.engines",
        ),
    ],
)
def test_keys_for_a_run_on_gpus_keep_the_gpus_of_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], keys: str
):
    in_flight_run(tmp_path)
    config = (tmp_path / CONFIG).read_text()
    config = config.replace("main: {ranks: 2}", "main: {ranks: 2, gpus_per_rank: 1.0}")
    (tmp_path / CONFIG).write_text(config.replace("engines: {ranks: 1}", "engines: {ranks: 1, gpus_per_rank: 2.0}"))
    assert simulate(str(tmp_path), *options) == 0
    best = capsys.readouterr().out.splitlines()[-1]
    assert re.search(re.escape(keys).replace(r"\{\}", r"\d") + "$", best)


VLLM_IN_FLIGHT = ("rollout=vllm", "rollout.publish=in_flight", "placement=two_pools")


@pytest.mark.parametrize("leads", ["0", "1", "2"])
@pytest.mark.parametrize(
    "of_run",
    [
        (*VLLM_IN_FLIGHT, "rollout.kv_cache=keep", "trainer.lead=2"),
        (*VLLM_IN_FLIGHT, "trainer.late_groups.window=2", "trainer.lead=1"),
        ("placement=two_pools", "trainer.lead=1"),
        ("rollout=vllm", "rollout.deterministic=true", "placement=two_pools", "trainer.lead=1"),
        (
            *("placement=cpu", "placement.pools.main.ranks=4", "placement.pools.samplers.ranks=2"),
            *("placement.roles.rollout=samplers", "placement.roles.reward=samplers", "trainer.lead=1"),
        ),
        ("placement=eight_gpus", "placement.pools.main.ranks=3", "actor.precision=bf16"),
        (),
    ],
)
def test_the_keys_turn_a_runs_configuration_into_the_best_setup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of_run: tuple[str, ...], leads: str
):
    window = 2 if "trainer.late_groups.window=2" in of_run else 1
    in_flight_run(tmp_path, window)
    (tmp_path / CONFIG).write_text(json.dumps(compose(list(of_run)).model_dump(mode="json")))
    limit = ("--max-staleness", "1") if leads == "1" else ()
    words = (str(tmp_path), "--ranks", "3", "--leads", leads, *limit, "--rows-per-step", "4", "--slots", "4")
    assert simulate(*words, "--token-ms", "50", "--train-tokens-per-s", "40", "--publish-s", "0.5") == 0
    best = capsys.readouterr().out.splitlines()[-1]
    keys = best.rpartition(": ")[2].split()
    chosen = compose([*of_run, *keys])  # which refuses what can't be combined
    is_in_flight = ", in_flight, " in best
    assert chosen.rollout.publish == ("in_flight" if is_in_flight else "drain")
    assert (chosen.trainer.lead, chosen.trainer.late_groups.window) == (int(leads), window if is_in_flight else 1)
    assert not limit or chosen.trainer.max_lag == 1
    used = {chosen.placement.roles.get(role, "main") for role in started_roles(chosen)}
    assert len(used) == (1 if leads == "0" else 2)
    assert sum(chosen.placement.pools[pool].ranks for pool in used) == 3
    assert all(pool.gpus_per_rank == ("placement=eight_gpus" in of_run) for pool in chosen.placement.pools.values())


def test_a_bound_on_staleness_leaves_out_longer_leads(capsys: pytest.CaptureFixture[str]):
    assert simulate("lognormal", "--ranks", "4", "--max-staleness", "1") == 0
    assert "\nlead 2" not in capsys.readouterr().out
    assert simulate("lognormal", "--ranks", "4", "--leads", "2", "--max-staleness", "1") == 2
    assert "no setup keeps --max-staleness 1; raise it, or include 0 in --leads" in capsys.readouterr().err


def test_the_bound_on_staleness_is_the_proved_one_not_the_largest_that_was_seen(
    capsys: pytest.CaptureFixture[str],
):
    # Training takes most of the time, so no response gets as old as the lead allows.
    words = ("lognormal", "--ranks", "4", "--leads", "0,2,8", "--train-tokens-per-s", "100", "--publish-s", "0")
    assert simulate(*words) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("lead 8"))
    assert int(re.search(r"largest seen (\d+), bound 8", line)[1]) <= 8
    assert simulate(*words, "--max-staleness", "2") == 0
    out = capsys.readouterr().out
    assert "left out by --max-staleness 2: lead 8, in_flight (up to 8)\n" in out
    assert [line[:6] for line in out.splitlines() if line.startswith("lead ")] == ["lead 2"]


def in_flight_run(folder: Path, window: int = 1, *, with_engines: bool = True) -> None:
    """Write a run whose steps wait 3 of 5.5 s; each engine runs 4 responses and makes 80 tokens a second."""
    PlanRecord(6, (30, 50, 30, 50), Batching(max_tokens=64), num_ranks=2).write(folder / LENGTHS)
    (folder / CONFIG).write_text(
        "placement: {pools: {main: {ranks: 2}, engines: {ranks: 1}}, roles: {rollout: engines}}\n"
        "rollout: {max_num_seqs: 4, publish: in_flight}\n"
        f"trainer: {{lead: 2, prompts_per_step: 2, group_size: 2, late_groups: {{window: {window}}}}}\n"
    )
    shared = {"phase": "train", "time_s": 1.0, "rollout/response_tokens_mean": 30.0, "rollout/lag": 1.0}
    shared |= {"rollout/response_tokens_max": 40.0, "time/step_s": 5.5, "time/wait_s": 3.0, "time/sync_s": 0.5}
    left = (1, 0, 1, 1, 0, 0) if window > 1 else (0,) * 6
    steps = []
    for number, (before, after) in enumerate(zip((0, *left), left, strict=False), start=1):
        one = shared | {"step": number, "packing/real_tokens": 2 * (2 + before - after) * 40.0}
        if window > 1:
            one |= {"rollout/groups_left": float(after)}
        if not after:  # a batch ended, which took longer than a step
            one |= {"time/generate_s": 9.0}
        steps.append(one)
    (folder / METRICS).write_text("".join(json.dumps(one) + "\n" for one in steps))
    spans, second = folder / "spans", 10**6
    spans.mkdir()
    values = [["engine", at * second, second, {"running": 4.0, "waiting": 9.0, "tokens": 80}] for at in range(20, 30)]
    slow = [["engine", 0, 20 * second, {"running": 4.0, "waiting": 0.0, "tokens": 1}]]  # it compiles
    driver = [[f"train step {number}", 10 * number * second, 9 * second, "MainThread"] for number in range(6)]
    files = {"driver": driver, "main/0": values[:1] + slow}
    if with_engines:
        files["engines/0"] = slow + values
    for process, lines in files.items():
        head = {"process": process, "pid": 1, "host": "node"}
        text = "".join(json.dumps(line) + "\n" for line in [head, *lines])
        (spans / f"{process.replace('/', '-')}.jsonl").write_text(text)


@pytest.mark.parametrize("window", [1, 2])
def test_rates_of_a_run_in_flight_leave_out_waits_of_training_and_of_responses(
    tmp_path: Path, window: int, capsys: pytest.CaptureFixture[str]
):
    in_flight_run(tmp_path, window)
    assert simulate(str(tmp_path), "--ranks", "3", "--leads", "2") == 0
    said = capsys.readouterr().out
    # 160 tokens in 5.5 - 3.0 - 0.5 s on 2 ranks, and 4 responses of 20 tokens in a second.
    assert "4 a step; 4 at once in an engine, 50 ms a token; training 40 tokens/s a rank; publication 0.5 s" in said
    assert "responses of 30 tokens on average" in said
    assert f"bound {2 + window - 1}\n" in said
    assert ("trainer.late_groups.window=2 of the run is not simulated, but adds 1 to the bound" in said) == (window > 1)


def test_a_run_in_flight_that_does_not_tell_the_time_per_token_needs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    in_flight_run(tmp_path, with_engines=False)
    assert simulate(str(tmp_path), "--ranks", "3") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "rollout.publish=in_flight, whose time/generate_s includes waits for other batches" in line
    assert line.endswith("give --token-ms")
    assert simulate(str(tmp_path), "--ranks", "3", "--token-ms", "25") == 0
    assert "25 ms a token; training 40 tokens/s a rank" in capsys.readouterr().out


def test_rates_are_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    PlanRecord(3, (30, 50), Batching(max_tokens=64), num_ranks=2).write(tmp_path / LENGTHS)
    step = {
        "phase": "train",
        "time_s": 1.0,
        "rollout/response_tokens_mean": 30.0,
        "rollout/response_tokens_max": 40.0,
        "packing/real_tokens": 80.0,
        "time/generate_s": 2.0,
        "time/sync_s": 0.5,
    }
    steps = [step | {"step": number, "time/step_s": seconds} for number, seconds in ((1, 99.0), (2, 99.0), (3, 4.5))]
    (tmp_path / METRICS).write_text("".join(json.dumps(one) + "\n" for one in steps))
    assert simulate(str(tmp_path), "--ranks", "2", "--publish-s", "0") == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert "responses of 30 tokens on average, 40 at most; 2 a step; 2 at once in an engine, 50 ms a token" in said
    assert "training 20 tokens/s a rank; publication 0 s" in said  # 80 tokens in 2 s on 2 ranks; the option wins


def test_a_forecast_for_other_ranks_than_the_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    in_flight_run(tmp_path)  # 2 ranks train
    said = "measured on 2 training ranks, and are assumed to be the same on 8;"
    for words, is_said in (
        (("--ranks", "2"), False),
        (("--ranks", "8"), True),
        (("--ranks", "8", "--train-tokens-per-s", "40"), False),
    ):
        assert simulate(str(tmp_path), *words, "--leads", "0") == 0
        assert (said in capsys.readouterr().out) == is_said


@pytest.mark.parametrize("publish", ["drain", "in_flight"])
def test_a_forecast_with_more_responses_in_an_engine_than_were_measured_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], publish: str
):
    in_flight_run(tmp_path)  # 4 responses a step in one engine
    config = tmp_path / CONFIG
    text = config.read_text().replace("publish: in_flight", f"publish: {publish}")
    config.write_text(text.replace("max_num_seqs: 4", "max_num_seqs: 32"))
    said = "measured with up to 4 responses at a time in an engine; this setup has up to "
    for words, number in (
        (("--ranks", "2", "--leads", "2"), 12),
        (("--ranks", "2", "--leads", "1", "--rows-per-step", "16"), 16),
        (("--ranks", "2", "--leads", "0"), None),
        (("--ranks", "2", "--leads", "2", "--slots", "5"), None),
        (("--ranks", "2", "--leads", "2", "--token-ms", "50"), None),
    ):
        assert simulate(str(tmp_path), *words) == 0
        out = capsys.readouterr().out
        assert (said in out) == (number is not None), words
        assert number is None or f"{said}{number}, so compare" in out


def engine_windows(folder: Path, *windows: tuple[float, int, float]) -> None:
    """Give the run's engine windows of these running responses, iterations and seconds per iteration."""
    at_us, lines = 30 * 10**6, [{"process": "engines/0", "pid": 1, "host": "node"}]
    for running, iterations, seconds in windows:
        duration_us = round(iterations * seconds * 1e6)
        values = {"running": running, "waiting": 0.0, "tokens": running * iterations}
        lines.append(["engine", at_us, duration_us, values])
        at_us += duration_us
    (folder / "spans" / "engines-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("windows", "said"),
    [
        # 10 ms with one response, and 2 more for each other one.
        ([(1.0, 9, 0.010), (3.0, 5, 0.014), (8.0, 20, 0.024)], "10 ms a token and 2 more for each other response"),
        # Too few of other numbers to tell.
        ([(4.0, 50, 0.010), (4.5, 50, 0.020)], "15 ms a token; training"),
        # Less with more responses, which is noise: the time of all.
        ([(2.0, 50, 0.020), (8.0, 50, 0.010)], "15 ms a token; training"),
        # A line would be below zero without responses.
        ([(2.0, 50, 0.001), (6.0, 50, 0.023)], "3 ms a token and 3 more for each other response"),
    ],
)
def test_the_time_of_a_token_depends_on_the_responses_of_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], windows: list[tuple[float, int, float]], said: str
):
    in_flight_run(tmp_path)
    engine_windows(tmp_path, *windows)
    assert simulate(str(tmp_path), "--ranks", "2", "--leads", "1") == 0
    assert said in capsys.readouterr().out


def test_the_time_of_batches_is_that_of_the_steps_in_the_proportions_of_the_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    in_flight_run(tmp_path)
    config = tmp_path / CONFIG
    config.write_text(config.read_text().replace("publish: in_flight", "publish: drain"))
    engine_windows(tmp_path, (1.0, 9, 0.010), (3.0, 5, 0.014), (8.0, 20, 0.024))
    PlanRecord(6, (40, 40, 40, 40), Batching(max_tokens=64), num_ranks=2).write(tmp_path / LENGTHS)
    # Steps take 9 s for four responses of up to 40 tokens: 225 ms a token, of which three others add 6 of 16 parts.
    assert simulate(str(tmp_path), "--ranks", "2", "--leads", "0") == 0
    out = capsys.readouterr().out
    assert "141 ms a token and 28 more for each other response in the engine" in out


def test_whole_batches_of_the_hf_engine_do_not_show_how_the_time_depends_on_the_responses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    in_flight_run(tmp_path)
    config = tmp_path / CONFIG
    config.write_text(config.read_text().replace("publish: in_flight", "publish: drain"))
    engine_windows(tmp_path, (1.0, 9, 0.010), (8.0, 20, 0.024))
    path = tmp_path / "spans" / "engines-0.jsonl"
    path.write_text(path.read_text().replace('"waiting": 0.0, ', ""))
    assert simulate(str(tmp_path), "--ranks", "2", "--leads", "0") == 0
    assert "225 ms a token; training" in capsys.readouterr().out


def test_options_give_the_time_of_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ("--ranks", "2", "--leads", "0", "--token-ms", "10", "--token-ms-per-response", "0.5")
    assert simulate("lognormal", *words) == 0
    assert "10 ms a token and 0.5 more for each other response in the engine" in capsys.readouterr().out


def test_ranks_that_share_rows_count_as_training_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    in_flight_run(tmp_path)
    config = tmp_path / CONFIG
    config.write_text(config.read_text().replace("main: {ranks: 2}", "main: {ranks: 4}"))  # 2 data ranks, tp=2
    assert simulate(str(tmp_path), "--ranks", "4", "--leads", "0") == 0
    out = capsys.readouterr().out
    assert "training 20 tokens/s a rank" in out
    assert "are assumed" not in out


def test_a_role_without_a_pool_is_in_the_first_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    in_flight_run(tmp_path)
    config = tmp_path / CONFIG
    text = config.read_text().replace("main: {ranks: 2}", "gpus: {ranks: 4}, main: {ranks: 9}")
    config.write_text(text.replace("max_num_seqs: 4", "max_num_seqs: 16"))
    assert simulate(str(tmp_path), "--ranks", "4", "--leads", "0") == 0
    out = capsys.readouterr().out
    assert "4 a step; 16 at once in an engine, 50 ms a token; training 20 tokens/s a rank" in out


@pytest.mark.parametrize("lead", [0, 1])
def test_scoring_and_waking_engines_is_no_training(tmp_path: Path, lead: int, capsys: pytest.CaptureFixture[str]):
    """Generation takes 10 s, a judge 60 and training 10; with a lead, a step waits 61 s for its batch.

    Without one, engines that share GPUs also wake and sleep for 10 s.
    """
    PlanRecord(6, (30, 50), Batching(max_tokens=64), num_ranks=1).write(tmp_path / LENGTHS)
    step = {"phase": "train", "time_s": 1.0, "rollout/response_tokens_mean": 30.0, "rollout/response_tokens_max": 40.0}
    step |= {"packing/real_tokens": 80.0, "time/generate_s": 10.0, "time/reward_s": 60.0, "time/sync_s": 1.0}
    in_turns = {"time/step_s": 91.0, "time/wake_s": 4.0, "time/sleep_s": 6.0}
    step |= {"time/step_s": 71.0, "time/wait_s": 60.0, "rollout/lag": 1.0} if lead else in_turns
    (tmp_path / METRICS).write_text("".join(json.dumps(step | {"step": number}) + "\n" for number in range(1, 7)))
    assert simulate(str(tmp_path), "--ranks", "2", "--leads", "1") == 0
    out = capsys.readouterr().out
    assert "training 8 tokens/s a rank; publication 1 s; scoring 60 s" in out  # 80 tokens in 10 s
    drain = next(line for line in out.splitlines() if line.startswith("lead 1, drain"))
    assert float(drain.split()[6]) == pytest.approx(71.0, rel=0.05)
    if not lead:
        # With half the speed of training, two ranks train as long as the one of the run.
        assert simulate(str(tmp_path), "--ranks", "2", "--leads", "0", "--train-tokens-per-s", "4") == 0
        turns = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("in turns"))
        assert float(turns.split()[5]) == pytest.approx(91.0, rel=0.02)


def test_setups_that_the_runs_layout_does_not_divide_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    in_flight_run(tmp_path)
    of_run = [*VLLM_IN_FLIGHT, "placement.pools.main.ranks=2", "actor.parallel.tp=2", "trainer.lead=1"]
    (tmp_path / CONFIG).write_text(json.dumps(compose(of_run).model_dump(mode="json")))
    given = ("--rows-per-step", "4", "--slots", "4", "--token-ms", "50", "--train-tokens-per-s", "40")
    assert simulate(str(tmp_path), "--ranks", "5", "--leads", "1", *given) == 0
    out = capsys.readouterr().out
    assert "left out: 4 of 8 setups, whose training ranks the run's layout (actor.parallel) doesn't divide" in out
    assert compose([*of_run, *out.splitlines()[-1].rpartition(": ")[2].split()]).placement.pools["main"].ranks in (2, 4)
    assert simulate(str(tmp_path), "--ranks", "3", "--leads", "0", *given) == 2
    assert "--ranks 3 leaves no setup that the run's layout" in capsys.readouterr().err


def test_engines_with_several_gpus_and_hf_engines_in_flight_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    in_flight_run(tmp_path)
    text = (tmp_path / CONFIG).read_text().replace("main: {ranks: 2}", "main: {ranks: 2, gpus_per_rank: 1.0}")
    (tmp_path / CONFIG).write_text(text.replace("engines: {ranks: 1}", "engines: {ranks: 1, gpus_per_rank: 4.0}"))
    assert simulate(str(tmp_path), "--ranks", "4", "--leads", "2") == 0
    out = capsys.readouterr().out
    ranks = {pool: int(count) for pool, count in re.findall(r"pools\.(\w+)\.ranks=(\d)", out)}
    gpus = 4 * ranks["engines"] + ranks["main"]
    assert f"but an engine has 4 GPUs, so those with more engines have more; this one has {gpus}" in out
    assert "measured with rollout.engine=hf" not in out
    assert simulate(str(tmp_path), "--ranks", "4", "--leads", "0") == 0
    assert (
        "measured on engines with 4 GPUs; in turns, an engine has only the 1 of a training rank"
        in capsys.readouterr().out
    )
    (tmp_path / CONFIG).write_text(
        json.dumps(compose(["placement=two_pools", "trainer.lead=1"]).model_dump(mode="json"))
    )
    assert simulate(str(tmp_path), "--ranks", "4", "--leads", "2") == 0
    assert "measured with rollout.engine=hf, but this setup needs vLLM; give --token-ms" in capsys.readouterr().out


def run_in_turns(folder: Path, times: dict[str, float], parts: list[tuple[str, float, float]], score_s: float) -> None:
    """Write a run without a lead whose steps of 40 s have these times, and these parts from second to second.

    Its reward role scores from second 2 for `score_s`.
    """
    PlanRecord(6, (30, 50), Batching(max_tokens=64), num_ranks=1).write(folder / LENGTHS)
    step = {"phase": "train", "time_s": 1.0, "rollout/response_tokens_mean": 30.0, "rollout/response_tokens_max": 40.0}
    step |= {"packing/real_tokens": 80.0, "time/step_s": 40.0, **times}
    (folder / METRICS).write_text("".join(json.dumps(step | {"step": number}) + "\n" for number in range(1, 7)))
    (folder / "spans").mkdir()
    lines: dict[str, list[tuple[str, float, float, str]]] = {"driver": [], "main/0": []}
    for number in range(6):
        began = 100.0 * number
        lines["driver"] += [(name, began + start, end - start, "MainThread") for name, start, end in parts]
        lines["driver"].append((f"train step {number}", began, 40.0, "MainThread"))
        lines["main/0"].append(("reward.score", began + 2.0, score_s, "background-reward"))
        # The evaluation after the step.
        lines["main/0"].append(("reward.score", began + 50.0, 45.0, "background-reward"))
    for process, spans in lines.items():
        head = json.dumps({"process": process, "pid": 1, "host": "node"})
        rows = [json.dumps([name, int(at * 1e6), int(seconds * 1e6), thread]) for name, at, seconds, thread in spans]
        (folder / "spans" / f"{process.replace('/', '-')}.jsonl").write_text("\n".join([head, *rows]) + "\n")


@pytest.mark.parametrize(
    ("score_s", "wait_s", "said"),
    [
        # Generation ends at second 10, and the step waits for rewards from second 15 on.
        (12.0, 0.0, "scoring 4 s"),
        (20.0, 7.0, "scoring 12 s"),
        (7.0, 0.0, "publication 0 s\n"),
    ],
)
def test_scoring_that_overlaps_the_log_prob_pass_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], score_s: float, wait_s: float, said: str
):
    times = {"time/generate_s": 10.0, "time/logprobs_s": 5.0, "time/reward_s": wait_s}
    parts = [("generate", 0.0, 10.0), ("logprobs", 10.0, 15.0), ("reward", 15.0, 15.0 + wait_s)]
    run_in_turns(tmp_path, times, parts, score_s)
    assert simulate(str(tmp_path), "--ranks", "2", "--leads", "0,1", "--slots", "2") == 0
    out = capsys.readouterr().out
    assert said in out
    assert "is not counted" not in out
    train_s = 30.0 - wait_s
    turns, drain = (next(line for line in out.splitlines() if line.startswith(name)) for name in ("in turns", "lead 1"))
    # Two ranks in turns take half the time for training, and so for the log-probs that overlap scoring.
    measured_s = max(0.0, 2.0 + score_s - 10.0)
    assert float(turns.split()[5]) == pytest.approx(10.0 + train_s / 2 + max(0.0, measured_s - 2.5), rel=0.05)
    assert float(drain.split()[6]) == pytest.approx(max(train_s, 10.0 + measured_s), rel=0.08)


def test_rewards_that_a_draw_waits_for_overlap_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    times = {"time/generate_s": 10.0, "time/logprobs_s": 5.0, "time/reward_s": 8.0}  # as DAPO
    parts = [("generate", 0.0, 6.0), ("reward", 6.0, 9.0), ("generate", 9.0, 13.0), ("reward", 13.0, 18.0)]
    run_in_turns(tmp_path, times, [*parts, ("logprobs", 18.0, 23.0)], 16.0)
    assert simulate(str(tmp_path), "--ranks", "2", "--leads", "0") == 0
    out = capsys.readouterr().out
    assert "scoring 8 s" in out
    turns = next(line for line in out.splitlines() if line.startswith("in turns"))
    assert float(turns.split()[5]) == pytest.approx(10.0 + 8.0 + 22.0 / 2, rel=0.05)


def test_scoring_that_was_not_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    times = {"time/generate_s": 10.0, "time/logprobs_s": 5.0, "time/reward_s": 0.0}
    run_in_turns(tmp_path, times, [], 12.0)
    assert simulate(str(tmp_path), "--ranks", "2", "--leads", "0") == 0
    assert "scoring that overlapped the log-prob pass of the run is not counted" in capsys.readouterr().out
    assert simulate(str(tmp_path), "--ranks", "2", "--leads", "0", "--score-s", "3") == 0
    assert "is not counted" not in capsys.readouterr().out


OWN_RECIPE = """
from rlpack.config.recipes import RecipeSpec
SPEC = RecipeSpec(runs_ahead={})
def main(config): ...
"""


@pytest.mark.parametrize(
    ("target", "leads", "left_out"),
    [
        ("rlpack.recipes.grpo", ["0", "1", "1", "2", "4"], None),
        (
            "rlpack.recipes.dapo",
            ["0", "1", "1"],
            "left out: trainer.lead=2, 4, because with recipe=dapo the first prompt",
        ),
        ("own_turns", ["0"], "left out: trainer.lead=1, 2, 4, because recipe=own_turns draws its batches itself"),
        ("own_ahead", ["0", "1", "1"], "left out: trainer.lead=2, 4, because with recipe=own_ahead the first prompt"),
        ("removed_recipe", ["0", "1", "1", "2", "4"], "may refuse some of the leads, but can't be read: recipe.target"),
    ],
)
def test_leads_that_the_recipe_of_the_run_refuses_are_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    leads: list[str],
    left_out: str | None,
):
    (tmp_path / "run").mkdir()
    in_flight_run(tmp_path / "run")
    with (tmp_path / "run" / CONFIG).open("a") as file:
        file.write(f"recipe: {{target: {target}}}\n")
    for name, is_ahead in (("own_turns", False), ("own_ahead", True)):
        (tmp_path / f"{name}.py").write_text(OWN_RECIPE.format(is_ahead))
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the working directory
    monkeypatch.chdir(tmp_path)
    assert simulate(str(tmp_path / "run"), "--ranks", "3") == 0
    out = capsys.readouterr().out
    names = [line.split(",")[0] for line in out.splitlines() if line.startswith(("in turns ", "lead "))]
    assert [name.split()[1].replace("turns", "0") for name in names] == leads
    assert left_out is None or left_out in out
    assert ("left out" in out) == (left_out is not None and left_out.startswith("left out"))


def test_only_refused_leads_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    in_flight_run(tmp_path)
    with (tmp_path / CONFIG).open("a") as file:
        file.write("recipe: {target: rlpack.recipes.dapo}\n")
    assert simulate(str(tmp_path), "--ranks", "3", "--leads", "2,4") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "rlpack simulate: --leads has 2, 4, but with recipe=dapo the first prompt of a batch is known only once the "
        "previous batch is drawn; include 1"
    )


def test_rates_of_a_run_whose_last_batch_has_long_responses_are_those_of_all_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # Prompts of 10 tokens. The last batch has responses of 40 and 80, and those of the two steps before have 50.
    PlanRecord(5, (50, 50, 90, 90), Batching(max_tokens=128), num_ranks=1).write(tmp_path / LENGTHS)
    (tmp_path / CONFIG).write_text(
        "placement: {pools: {main: {ranks: 1}, engines: {ranks: 1}}, roles: {rollout: engines}}\n"
        "rollout: {max_num_seqs: 2}\n"
    )
    shared = {"phase": "train", "time_s": 1.0, "time/step_s": 5.0, "time/generate_s": 3.2, "time/sync_s": 0.0}
    figures = [(50.0, 80.0)] * 4 + [(60.0, 80.0)]
    steps = [
        shared
        | {"step": number, "rollout/response_tokens_mean": mean, "rollout/response_tokens_max": longest}
        | {"packing/real_tokens": 4 * (mean + 10.0)}
        for number, (mean, longest) in enumerate(figures, start=1)
    ]
    (tmp_path / METRICS).write_text("".join(json.dumps(one) + "\n" for one in steps))
    assert simulate(str(tmp_path), "--ranks", "2") == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert "responses of 53 tokens on average, 80 at most; 4 a step; 2 at once in an engine" in said
    # 240 tokens in 1.8 s. Two slots take 80 to 160 tokens' time, so a token takes 20 to 40 ms instead of 3.2 s / 80.
    assert "training 133 tokens/s a rank" in said
    assert 20 < float(re.search(r"([\d.]+) ms a token", said)[1]) < 40


def run_of_long_prompts(folder: Path, responses: tuple[int, ...] | None) -> None:
    """Write a run with prompts of 5, 5, 60 and 90 tokens and responses of 8, 8, 6 and 4, of which one was cut."""
    PlanRecord(5, (13, 13, 66, 94), Batching(max_tokens=128), num_ranks=1, responses=responses).write(folder / LENGTHS)
    step = {"phase": "train", "time_s": 1.0, "time/step_s": 5.0, "time/generate_s": 3.2, "time/sync_s": 0.0}
    step |= {"rollout/response_tokens_mean": 6.5, "rollout/response_tokens_max": 8.0, "packing/real_tokens": 186.0}
    (folder / METRICS).write_text("".join(json.dumps(step | {"step": number}) + "\n" for number in range(1, 6)))


@pytest.mark.parametrize("responses", [(8, 8, 6, 4), None])
def test_responses_of_a_run_are_not_longer_for_long_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], responses: tuple[int, ...] | None
):
    run_of_long_prompts(tmp_path, responses)
    assert simulate(str(tmp_path), "--ranks", "2") == 0
    out = capsys.readouterr().out
    assert re.match(r"responses of [67] tokens on average, 8 at most; ", out)
    note = "response lengths are approximate, because packing.json of the run has only those of rows with their prompts"
    assert (note in out) == (responses is None)
    lengths = measured(tmp_path).lengths
    assert lengths.mean() == pytest.approx(6.5, rel=0.01)
    assert set(lengths) == ({1, 8} if responses is None else {4, 6, 8})


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("lognormal", "--ranks", "1"), 2, "--ranks is 1; it has to be a whole number from 2 to"),
        (("lognormal", "--leads", "1,x"), 2, "--leads is x; it has to be a whole number from 0 to 64"),
        (("lognormal", "--max-staleness", "-1"), 2, "--max-staleness is -1; it has to be a whole number from 0 to"),
        (("lognormal", "--max-staleness", "x"), 2, "--max-staleness is x; it has to be a whole number from 0 to"),
        (("lognormal", "--slots", "0"), 2, "--slots is 0; it has to be above 0"),
        (("lognormal", "--token-ms", "-2.5"), 2, "--token-ms is -2.5; it has to be above 0"),
        (("lognormal", "--token-ms-per-response", "-1"), 2, "--token-ms-per-response is -1; it has to be at least 0"),
        (("lognormal", "--publish-s", "nan"), 2, "--publish-s is nan; it has to be finite"),
        (("lognormal", "--rows-per-step", "99999999999"), 2, "--rows-per-step is 99,999,999,999, over the limit of 16"),
        (("lognormal", "--longest", "0"), 2, "--longest is 0; it has to be above 0"),
        (("nothing",), 3, "nothing is neither a file nor a synthetic trace"),
        (("lognormal", "--column", "n"), 2, "--column has no effect on lognormal; remove it"),
    ],
)
def test_wrong_options_are_one_error(words: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]):
    assert simulate(*words) == code
    assert said in capsys.readouterr().err


def test_lengths_of_a_file_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    np.save(tmp_path / "lengths.npy", np.array([7, 9]))
    assert simulate(str(tmp_path / "lengths.npy"), "--ranks", "2") == 0
    assert "responses of 8 tokens on average, 9 at most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recipe", "roles", "apart"),
    [
        ("grpo", {"rollout": "engines", "reward": "scores"}, True),
        ("grpo", {"rollout": "engines", "reward": "engines"}, False),
        ("grpo", {"rollout": "engines"}, False),  # scores wait for the updates of the actor
        ("grpo", {}, False),
        ("grpo", {"actor": "engines"}, False),  # the first pool has the engines, too
        ("grpo", {"rollout": "engines", "reward": "scores", "judge": "scores"}, True),
        ("grpo", {"rollout": "engines", "reward": "scores", "judge": "main"}, False),
        ("dapo", {"rollout": "engines", "reward": "scores"}, False),  # which batch is next depends on scores
    ],
)
def test_scoring_overlaps_generation_only_in_a_pool_of_its_own(recipe: str, roles: dict[str, str], apart: bool):
    pools = {"main": {"ranks": 1}, "engines": {"ranks": 1}, "scores": {"ranks": 1}}
    config = {
        "recipe": {"target": f"rlpack.recipes.{recipe}"},
        "placement": {"pools": pools, "roles": roles},
        "roles": {"actor": {}, "rollout": {}, "reward": {}, "reward_model": {}} | {role: {} for role in roles},
        "reward_model": {"path": None},
    }
    assert scores_apart(config) is apart
    assert not scores_apart(config | {"reward_model": {"path": "scorer"}})  # in the pool of the actor
    assert not scores_apart({})
