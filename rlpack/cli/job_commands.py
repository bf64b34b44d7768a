"""`rlpack submit`, `jobs`, `logs` and `stop`: runs as jobs on a Ray cluster."""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence

from rlpack import __version__
from rlpack.algorithms.errors import AlgorithmError
from rlpack.batch.errors import DataError
from rlpack.cli.error_text import print_error
from rlpack.cli.submit_checks import JOINS, checked_config, checked_upload
from rlpack.cli.tables import table
from rlpack.config.errors import ConfigError
from rlpack.config.roles import pools_in_use
from rlpack.distributed.errors import JobRequestError, JobServerError, PlacementError
from rlpack.distributed.jobs.client import DEFAULT_ADDRESS, JobRecord, JobServer
from rlpack.models.errors import ModelError
from rlpack.observe.text import visible
from rlpack.rewards.errors import RewardError
from rlpack.user_code import UserCodeError

FAILED, WRONG, DATA_WRONG, INTERRUPTED = 1, 2, 3, 130
# With -P, Python does not put the working directory first on the import path.
_ENTRYPOINT = ("exec", "python", "-P", "-m", "rlpack", "train")
_WRONG_CONFIG = (AlgorithmError, ConfigError, DataError, ModelError, PlacementError, RewardError, UserCodeError)
_EPILOG = (
    "Arguments after -- are passed to `rlpack train` on the cluster. Ray's own settings (RAY_AUTH_MODE, "
    "RAY_AUTH_TOKEN) provide the token."
)


def run_command(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, and return the exit code."""
    parsed = _parser().parse_args(list(arguments))
    command: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return command(parsed)
    except KeyboardInterrupt:
        job = vars(parsed).get("job_id")
        print(f"\nrlpack {parsed.command}: interrupted{f'; job {job} continues' if job else ''}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # as by `| head`
        raise
    except (JobServerError, OSError) as error:  # an OSError of this machine, such as a full disk
        job = vars(parsed).get("job_id")
        hint = f"; job {job} may still be running; check with rlpack logs {job} --follow" if job else ""
        print_error(parsed.command, f"{error}{hint}")
        return FAILED
    except (JobRequestError, *_WRONG_CONFIG) as error:
        print_error(parsed.command, str(error))
        return DATA_WRONG if isinstance(error, DataError) else WRONG


def _parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="rlpack")
    commands = root.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, description=text, epilog=_EPILOG if name == "submit" else None)
        parser.add_argument(
            "--address",
            help="the cluster's dashboard, such as http://head-node:8265 (default: RAY_API_SERVER_ADDRESS, or else "
            f"{DEFAULT_ADDRESS})",
        )
        parser.set_defaults(run=run)
        return parser

    submit = command("submit", _submit, "Run `rlpack train` as a job on a Ray cluster.")
    submit.add_argument(
        "--follow", action="store_true", help="show the job's log until it ends, and exit with its code"
    )
    submit.add_argument("overrides", nargs="*", metavar="-- key=value", help="overrides for `rlpack train`")
    command("jobs", _jobs, "List a cluster's jobs.")
    logs = command("logs", _logs, "Show a job's log.")
    logs.add_argument("job_id", metavar="ID")
    logs.add_argument("--follow", action="store_true", help="follow until the job ends, and exit with its code")
    command("stop", _stop, "Stop a job after its step, with a checkpoint.").add_argument("job_id", metavar="ID")
    return root


def _server(arguments: argparse.Namespace) -> JobServer:
    return JobServer(arguments.address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS)


def _submit(arguments: argparse.Namespace) -> int:
    """Check everything that can be checked here, submit, and print the commands to follow and stop the job."""
    config = checked_config(arguments.overrides)
    upload = checked_upload(config, arguments.overrides)
    server = _server(arguments)
    server.check_devices(pools_in_use(config), config.job.driver_cpus)
    words = [*arguments.overrides, *([] if JOINS in arguments.overrides else [JOINS])]
    arguments.job_id = server.submit(
        shlex.join([*_ENTRYPOINT, *words]),
        config.job,
        upload,
        {
            "rlpack": __version__,
            "run_dir": str(config.run_dir),
            "stop_timeout_s": str(config.job.stop_timeout_s),
        },
    )
    job = f"{arguments.job_id} --address {server.address}"
    print(f"submitted {arguments.job_id}, run_dir {config.run_dir}")
    print(f"  log:  rlpack logs {job} --follow\n  stop: rlpack stop {job}", flush=True)
    return _followed(server, arguments.job_id) if arguments.follow else 0


def _jobs(arguments: argparse.Namespace) -> int:
    server = _server(arguments)
    rows = [
        [job.id, job.status, _code(job), _when(job), _duration(job), job.metadata.get("run_dir", "-")]
        for job in server.jobs()
    ]
    print(table(["job", "status", "code", "submitted", "took", "run_dir"], rows) if rows else "no jobs yet")
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    server = _server(arguments)
    if arguments.follow:
        return _followed(server, arguments.job_id)
    _show(server.logs(arguments.job_id))
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    """Stop a job, wait until it has saved and ended, and print how to resume it."""
    server = _server(arguments)
    job = server.job(arguments.job_id)
    if job.has_ended or not server.stop(job.id):
        print(f"job {job.id} has already ended: {server.job(job.id).status}")
        return 0
    wait_s = float(job.metadata.get("stop_timeout_s", "3"))
    print(f"stopping {job.id}: it finishes its step and saves, or is killed after {wait_s:g} s", flush=True)
    ended = server.wait_until_stopped(job.id, wait_s)
    print(f"{ended.status}{_resume_hint(ended, server.address)}")
    return 0


def _followed(server: JobServer, job_id: str) -> int:
    """Show a job's log until it ends, print its status, and return its exit code."""
    job = server.follow(job_id, _show)
    code = {"SUCCEEDED": 0, "STOPPED": INTERRUPTED}.get(job.status, job.exit_code or FAILED)
    why = "" if job.exit_code is not None or job.status != "FAILED" else f": {job.message.strip()}"
    print(f"job {job_id}: {job.status}, exit code {code}{why}{_resume_hint(job, server.address)}", file=sys.stderr)
    return code


def _resume_hint(job: JobRecord, address: str) -> str:
    """Return a line with the command that resumes a stopped run; "" for other jobs."""
    words = shlex.split(job.entrypoint)
    if words[:1] == ["cd"]:
        words = words[3:]  # after `cd folder &&`
    if job.status != "STOPPED" or tuple(words[: len(_ENTRYPOINT)]) != _ENTRYPOINT:
        return ""
    overrides = [word for word in words[len(_ENTRYPOINT) :] if word != JOINS and not word.startswith("resume=")]
    return f"\n  resume: rlpack submit --address {address} -- {shlex.join([*overrides, 'resume=auto'])}"


def _show(text: str) -> None:
    """Print a job's output; control characters in a model's text don't reach the terminal."""
    if sys.stdout.isatty():
        lines = text.replace("\r\n", "\n").replace("\r", "\n").expandtabs().split("\n")
        text = "\n".join(visible(line) for line in lines)
    sys.stdout.write(text)
    sys.stdout.flush()


def _code(job: JobRecord) -> str:
    return "-" if job.exit_code is None else str(job.exit_code)


def _when(job: JobRecord) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.started_s))


def _duration(job: JobRecord) -> str:
    seconds = max(0, int((job.ended_s or time.time()) - job.started_s))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
