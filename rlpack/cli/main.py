"""The `rlpack` command: subcommands, imported when they run, and exit codes.

Exit codes: 0 done, 1 the run failed, 2 wrong configuration or command line, 3 wrong data, 130 interrupted.
"""

import argparse
import gc
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from rlpack import __version__
from rlpack.cli.signals import exit_quietly_on_broken_pipe, termination_as_keyboard_interrupt
from rlpack.user_code import exit_now, protect_command

_EPILOG = """\
examples:
  rlpack train                                                   the built-in task, on CPUs
  rlpack train recipe=sft trainer.steps=200
  rlpack train model=pretrained model.path=Qwen/Qwen3-0.6B data=jsonl data.source=prompts.jsonl \\
    data.validation_source=held_out.jsonl reward.function=my_rewards:score
  rlpack train trainer.steps=50 --cfg job                        show the config, run nothing
  rlpack train seed=1,2,3 --multirun                             one run for each seed
  rlpack train recipe=sft --dry-run                              estimate memory, and whether it fits; run nothing
  rlpack plan --suggest recipe=sft placement=eight_gpus          layouts and memory switches that fit, fastest first
  rlpack plan runs/mine --max-tokens 16384 --ranks 64 --compare  every algorithm and mode on a run's lengths
  rlpack simulate lognormal --rows-per-rank 16 --ranks 64,16384  expected step times on larger clusters
  rlpack simulate runs/mine --async --ranks 16                   how many ranks generate, and how far ahead
  rlpack submit --address http://head:8265 --follow -- run_dir=/shared/mine
  rlpack evaluate runs/mine evaluate.samples=16                  pass@k and more, of the newest checkpoint
  rlpack report runs/mine                                        regenerate runs/mine/report.html
  rlpack trace runs/mine                                         export a timeline of all processes for ui.perfetto.dev
  rlpack serve runs/mine                                         its model behind an OpenAI-compatible URL (vLLM)
  eval "$(rlpack -sc install=bash)"                              shell completion (bash, zsh, fish)
"""
_COMMANDS = ("evaluate", "jobs", "logs", "plan", "report", "serve", "simulate", "stop", "submit", "trace", "train")
_INTERRUPTED = 130
_MOST_MEGABYTES = 1_000_000
_JOB_COMMANDS = (["submit"], ["jobs"], ["logs"], ["stop"])
# Options of `rlpack train` that Hydra, which completes its overrides, doesn't know.
_OWN_OPTIONS = re.compile(r" --(?:dry-run|memory-gb(?:=|\s+)\S+)(?=\s)")
_COMPLETION_FLAGS = {"-sc", "--shell-completion"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (that of the process if None) and return the exit code."""
    with exit_quietly_on_broken_pipe():
        return _command(list(sys.argv[1:] if argv is None else argv))


def _command(arguments: list[str]) -> int:
    """Run the command that the first argument names."""
    if arguments[:1] == ["train"] or _COMPLETION_FLAGS.intersection(arguments[:1]):
        return _train(arguments)
    if arguments[:1] in (["evaluate"], ["serve"]):
        return (_evaluate if arguments[0] == "evaluate" else _serve)(arguments[1:])
    if arguments[:1] in (["plan"], ["simulate"]):
        return _plan(arguments)
    if arguments[:1] in _JOB_COMMANDS:
        from rlpack.cli.job_commands import run_command

        return run_command(arguments)
    parser = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _COMMANDS:
        nearest = get_close_matches(arguments[0], _COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}? Commands" if nearest else "commands"
        parser.error(f"{arguments[0]!r} is not a command; {hint}: {', '.join(_COMMANDS)}")
    parsed = parser.parse_args(arguments)
    if parsed.command in ("report", "trace"):
        return _report(parsed.run_dir) if parsed.command == "report" else _trace(parsed)
    parser.print_help()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlpack",
        description="Reinforcement-learning post-training of language models on Ray, packed from end to end.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rlpack {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    commands.add_parser("train", help="run a recipe, with Hydra overrides (rlpack train --help)", add_help=False)
    commands.add_parser(
        "evaluate", help="evaluate a model or a run's checkpoint (rlpack evaluate --help)", add_help=False
    )
    commands.add_parser("plan", help="show how given sequence lengths would be batched (rlpack plan --help)")
    commands.add_parser("simulate", help="show expected step times on more ranks (rlpack simulate --help)")
    commands.add_parser("serve", help="start vLLM's OpenAI-compatible server for a model (rlpack serve --help)")
    commands.add_parser("submit", help="run `rlpack train` as a job on a Ray cluster (rlpack submit --help)")
    commands.add_parser("jobs", help="list a cluster's jobs (rlpack jobs --help)")
    commands.add_parser("logs", help="show or follow a job's log (rlpack logs --help)")
    commands.add_parser("stop", help="stop a job after its step, with a checkpoint (rlpack stop --help)")
    report = commands.add_parser("report", help="regenerate a run's report.html")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run")
    trace = commands.add_parser("trace", help="export a timeline of a run's processes for ui.perfetto.dev")
    trace.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run")
    trace.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: RUN_DIR/trace.json)")
    trace.add_argument(
        "--last-mb",
        type=_megabytes,
        metavar="N",
        help="read only the last N MB of each file in RUN_DIR/spans (default: all)",
    )
    return parser


def _train(arguments: list[str]) -> int:
    """Run `rlpack train` or its shell completion; on an early interrupt, print one line and return 130."""
    protect_command()
    gc.disable()  # imports make half a million objects that stay; `rlpack.cli.train` turns it on again
    try:
        with termination_as_keyboard_interrupt():
            from rlpack.cli.train import train

            if _COMPLETION_FLAGS.intersection(arguments):
                return _complete(arguments, train)
            code = train(arguments[1:])
            _exit_if_ray_hangs(code)
            return code
    except KeyboardInterrupt:
        print("rlpack train: interrupted; nothing was saved yet", file=sys.stderr)
        return _INTERRUPTED
    finally:
        gc.enable()


def _evaluate(arguments: list[str]) -> int:
    """Run `rlpack evaluate`; on an interrupt before it starts, print one line and return 130."""
    gc.disable()  # as for `rlpack train`
    try:
        with termination_as_keyboard_interrupt():
            from rlpack.cli.evaluate import evaluate

            code = evaluate(arguments)
            _exit_if_ray_hangs(code)
            return code
    except KeyboardInterrupt:
        print("rlpack evaluate: interrupted before it began", file=sys.stderr)
        return _INTERRUPTED
    finally:
        gc.enable()


def _serve(arguments: list[str]) -> int:
    """Run `rlpack serve`; on an interrupt before the server is ready, print one line and return 130."""
    try:
        with termination_as_keyboard_interrupt():
            from rlpack.cli.serve import serve

            return serve(arguments)
    except KeyboardInterrupt:
        print("rlpack serve: interrupted before the server was ready", file=sys.stderr)
        return _INTERRUPTED


def _exit_if_ray_hangs(code: int) -> None:
    """End the process at once if one of its threads can't leave Ray: the interpreter would crash during cleanup."""
    connection = sys.modules.get("rlpack.distributed.ray_connection")
    if connection is not None and connection.hangs():
        sys.stdout.flush()
        sys.stderr.flush()
        exit_now(code)


def _plan(arguments: list[str]) -> int:
    """Run a planning command, whose parser imports NumPy."""
    from rlpack.cli import plan_commands, simulate_async, suggest
    from rlpack.cli.plan_options import parsers

    if arguments[0] == "plan" and suggest.is_for_config(arguments[1:]):
        return suggest.suggest(arguments[1:])
    if arguments[0] == "simulate" and simulate_async.FLAG in arguments:
        return simulate_async.simulate_async(arguments[1:])
    plan, simulate = parsers()
    if arguments[0] == "plan":
        return plan_commands.plan_command(plan.parse_args(arguments[1:]))
    return plan_commands.simulate_command(simulate.parse_args(arguments[1:]))


def _report(run_dir: Path) -> int:
    """Write the report of a run and print its path."""
    from rlpack.cli.error_text import print_error
    from rlpack.observe.errors import ReportError
    from rlpack.observe.report.report import write_report

    try:
        print(write_report(run_dir))
    except ReportError as error:
        print_error("report", str(error))
        return 2
    return 0


def _megabytes(text: str) -> int:
    """Return the bytes of a number of megabytes; argparse names the option."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < _MOST_MEGABYTES:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and below {_MOST_MEGABYTES:,}")
    return max(1, int(number * 1e6))


def _trace(given: argparse.Namespace) -> int:
    """Write the trace of a run, and print its path."""
    from rlpack.cli.error_text import print_error
    from rlpack.observe.errors import ReportError
    from rlpack.observe.trace import write_trace

    path = given.run_dir / "trace.json" if given.out is None else given.out
    try:
        processes = write_trace(given.run_dir, path, last_bytes=given.last_mb)
    except ReportError as error:
        print_error("trace", str(error))
        return 2
    if unreadable := sum(one.unreadable for one in processes):
        print(f"skipped {unreadable} incomplete lines of killed processes")
    print(f"{path}: open it at https://ui.perfetto.dev, which reads it in the browser")
    return 0


def _complete(arguments: Sequence[str], train: Callable[[list[str]], int]) -> int:
    """Print completions for a shell; Hydra completes the overrides after `train`."""
    line = _OWN_OPTIONS.sub("", os.environ.get("COMP_LINE", ""))
    words = line.split()
    if "query=" not in " ".join(arguments):
        return train([argument for argument in arguments if argument != "train"])
    if len(words) + line.endswith(" ") <= 2:
        prefix = words[1] if len(words) > 1 else ""
        print(" ".join(command for command in _COMMANDS if command.startswith(prefix)))
        return 0
    if words[1] != "train":
        return 0
    if not line.endswith(" ") and "=" in words[-1]:
        from rlpack.cli.value_completion import value_completions

        if completions := value_completions(words[-1], words[2:-1]):
            print(("\n" if "query=fish" in " ".join(arguments) else " ").join(completions))
            return 0
    os.environ["COMP_LINE"] = line.replace(" train", "", 1)
    return train([argument for argument in arguments if argument != "train"])
